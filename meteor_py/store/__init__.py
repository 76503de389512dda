"""Stores: where the records of a stream are kept after the ring has dropped them.

``base`` is what a store must be able to do, ``memory`` and ``parquet`` are two that can.
``archiver`` moves records into a store, ``cold`` reads them back, ``archive`` is what users see of
it as ``stream.store``.
"""
