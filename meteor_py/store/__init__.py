"""Stores keep the records of a stream after the ring has dropped them.

``base`` defines the protocol of a store; ``memory`` and ``parquet`` implement it. A Parquet store
keeps one ``segment_log`` per incarnation of the stream, as files in a ``storage``. ``read_ahead``
fetches the next records while a reader uses the current ones, ``maintenance`` merges and removes
files, and ``identity`` makes sure that a store belongs to its stream.

Words used throughout: a *store* is a ``RingbufferStore`` object, its *address* is what users pass
or its ``uri``, its *location* is the address as messages show it, without secrets, and its *id* is
the random string that ties it to one stream. Segments and records are *live* if readers see them.
"""
