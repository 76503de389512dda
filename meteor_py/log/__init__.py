"""One stream as a log: its handle, and reading it from any position.

``catalog`` creates and finds streams, and ``handle`` is one of them for the other packages.
``log_reader`` reads from a position on and notices what is missing: it joins ``ring_reader``, for
what the server holds, and ``store_reader``, for what the ring has dropped.
"""
