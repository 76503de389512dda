"""A stream as a log: its handle, and a reader that starts at any position.

``catalog`` creates and finds streams, and ``handle`` represents one of them for other packages.
``log_reader`` starts at a position and detects missing records. It combines ``ring_reader``,
for records on the server, and ``store_reader``, for records that the ring has dropped.
"""
