"""Stores: where the records of a stream are kept after the ring has dropped them.

``base`` states what a store must do; ``memory`` and ``parquet`` implement it. A Parquet store keeps
one ``segment_log`` per incarnation of the stream, as files in a ``storage``. ``read_ahead`` fetches
the next records while a reader uses these, ``maintenance`` merges and removes files, and
``identity`` makes sure that a store belongs to its stream.
"""
