"""Archiving: copying records from the ring into the store.

``archiver`` competes for a stream's archiver lease, and runs one ``archive_term`` each time it
acquires the lease. ``admin`` has the class behind ``stream.store``, which lists, verifies, compacts
and expires archived records.
"""
