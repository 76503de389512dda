"""Archiving: copying records from the ring into the store.

``archiver`` competes for the lease of a stream's archivers, and runs one ``archive_term`` for each
time it holds the lease. ``admin`` is what ``stream.store`` returns: list, verify, compact, expire.
"""
