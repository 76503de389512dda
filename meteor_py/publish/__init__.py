"""Publishing records to a stream, exactly once.

A record passes through the modules in this order: ``publisher`` and ``validation``, ``fast_path``
or ``accumulator``, ``batch`` (whose ``ack`` the caller holds), ``in_flight``, and ``sender``, which
runs ``redis/lua/log/publish.lua``. If no other record is pending, ``direct_line`` may send a record
from the publishing thread instead. ``transaction`` is an alternative: several processes stage
frames, and one commits them.
"""
