"""Stores keep a stream's records after the ring has dropped them.

``base`` defines the store protocol; ``memory`` and ``parquet`` implement it. A Parquet store keeps
one ``segment_log`` per incarnation of the stream, as files in a ``storage``. ``read_ahead`` fetches
the next records while a reader uses the current ones, ``maintenance`` merges and removes files, and
``identity`` makes sure that a store belongs to its stream.

Vocabulary: A *store* is a ``RingbufferStore`` object. Its *address* is the ``uri`` that users pass.
Its *location* is the address without secrets, as shown in messages. Its *id* is a random string
that ties the store to one stream. Segments and records are *live* if readers see them.
"""
