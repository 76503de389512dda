"""A stream as a log: its handle, and a reader that starts at any position.

``catalog`` creates and finds streams, and ``handle`` represents one stream for other packages.
``log_reader`` reads records in order and detects missing ones. It combines ``ring_reader``, for
records on the server, and ``store_reader``, for records that the ring has dropped.
"""
