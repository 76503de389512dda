"""Expiry: deletion of a store's oldest records, on request or by the ``retain`` policy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from meteor_py.errors import MeteorError
from meteor_py.log.handle import StreamHandle
from meteor_py.records.config import OFFSET_MAX, check_int
from meteor_py.records.descriptions import GroupDescription
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import EXPIRE_HISTORY
from meteor_py.store.base import RingbufferStore
from meteor_py.store.parquet import ParquetStore

_log = logging.getLogger(__name__)

#: Seconds between two runs of the ``retain`` policy.
_ENFORCE_S = 60.0


def first_kept(
    stream: StreamHandle,
    store: RingbufferStore,
    groups: Sequence[GroupDescription],
    *,
    before: datetime | None = None,
    max_bytes: int | None = None,
    offset: int | None = None,
) -> int:
    """Return the first offset to keep. Records that one of ``groups`` has not confirmed are kept.

    See ``Archive.expire`` for the criteria.
    """
    first, end = stream.archived_bounds()
    wanted = first
    if before is not None:
        wanted = max(wanted, stream.offset_at(before))
    if offset is not None:
        wanted = max(wanted, check_int("offset", offset, 0, OFFSET_MAX))
    if max_bytes is not None:
        check_int("max_bytes", max_bytes, 0, OFFSET_MAX)
        if not isinstance(store, ParquetStore):
            raise TypeError(
                "expire(max_bytes=...) needs a file-based store, such as a ParquetStore, not "
                f"{store!r}."
            )
        wanted = max(wanted, store.fitting(stream.incarnation, end, max_bytes))
    wanted = min([wanted, end, *(group.confirmed for group in groups)])
    if isinstance(store, ParquetStore):
        wanted = store.segment_end(stream.incarnation, wanted)
    return max(wanted, first)


def delete_below(
    stream: StreamHandle, store: RingbufferStore, groups: Sequence[GroupDescription], offset: int
) -> int:
    """Delete the records below ``offset`` that the groups have confirmed.

    Returns:
        The first offset that is kept.
    """
    # The script checks the groups again, because one may have been moved back in the meantime.
    group_keys = [keys.group(stream.name, group.name) for group in groups]
    script_keys = [keys.meta(stream.name), *group_keys]
    reply = stream.run(EXPIRE_HISTORY, [stream.incarnation, offset], script_keys)
    if reply[0] == b"NOSTORE":
        raise reply_errors.no_store(stream.name)
    kept = int(reply[1])
    # Delete the files only after the script has run: then readers no longer look for them.
    store.delete(stream.incarnation, kept)
    return kept


class RetainPolicy:
    """Enforces a stream's ``retain`` and ``retain_bytes`` settings, for its archiver."""

    def __init__(
        self,
        stream: StreamHandle,
        store: RingbufferStore,
        list_groups: Callable[[], Sequence[GroupDescription]],
    ) -> None:
        self._stream = stream
        self._store = store
        self._list_groups = list_groups
        self._next = 0.0
        self._warned = False

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def enforce(self) -> None:
        """Delete the records that the settings no longer retain. Log errors instead of raising."""
        self._next = time.monotonic() + _ENFORCE_S
        try:
            self._enforce()
            self._warned = False
        except (MeteorError, TypeError) as error:
            if not self._warned:
                _log.warning("Cannot expire records of stream %r: %s", self._stream.name, error)
            self._warned = True

    def _enforce(self) -> None:
        stream = self._stream
        meta = stream.snapshot()[0]  # another client may have changed the settings
        config = meta.config
        if config.retain is None and config.retain_bytes is None:
            return
        stream.check_store()
        before = None
        if config.retain is not None:
            # Use the server's clock, as append times do.
            before = stream.clock() - timedelta(seconds=config.retain)
        groups = self._list_groups()
        kept = first_kept(stream, self._store, groups, before=before, max_bytes=config.retain_bytes)
        first = stream.archived_bounds()[0]
        if kept > first:
            kept = delete_below(stream, self._store, groups, kept)
            _log.info("Records %d to %d of stream %r have expired.", first, kept - 1, stream.name)
