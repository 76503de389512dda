"""Publishing records to a stream, exactly once.

A record meets the modules in this order: ``publisher`` and ``validation``, ``fast_path`` or
``accumulator``, ``batch`` (whose ``ack`` the caller has), ``in_flight``, and ``sender``, which
calls ``redis/lua/log/publish.lua``. ``transaction`` is the other way in: staged writes, committed
at once.
"""
