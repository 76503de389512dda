"""Archiver settings."""

from __future__ import annotations

from dataclasses import dataclass

from meteor_py.records.config import (
    FRAME_RECORDS_MAX,
    OFFSET_MAX,
    StreamConfig,
    check_int,
    check_lease_ttl,
    check_seconds,
)


@dataclass(frozen=True)
class ArchiverConfig:
    """An archiver's settings.

    The archiver writes a segment when one of the three ``segment_`` limits is reached, or earlier,
    for example if a flush is requested.

    >>> stream.archiver(segment_age=10)    # doctest: +SKIP
    """

    #: Approximate maximum number of records in a segment. A small ``max_unarchived`` lowers it.
    segment_records: int = 1_000_000
    #: Approximate maximum size of a segment's records in memory, in bytes. The compressed file is
    #: smaller.
    segment_bytes: int = 64 * 1024 * 1024
    #: Maximum seconds that a record waits for more records before its segment is written.
    segment_age: float = 60.0
    #: Lease duration in seconds. If an archiver dies, another takes over after this time.
    lease_ttl: float = 10.0

    def __post_init__(self) -> None:
        check_int("segment_records", self.segment_records, 1, OFFSET_MAX)
        check_int("segment_bytes", self.segment_bytes, 1, 2**40)
        check_seconds("segment_age", self.segment_age, zero=True)
        check_lease_ttl(self.lease_ttl)

    def segment_limit(self, stream: StreamConfig) -> int:
        """Return the number of records at which an archiver that has caught up writes a segment.

        If the stream limits unarchived records, this is less than half of ``max_unarchived`` (but
        at least 1), so that writing the segment does not block publishers.
        """
        room = (stream.max_unarchived or OFFSET_MAX) - min(stream.capacity, FRAME_RECORDS_MAX)
        return max(min(self.segment_records, room // 2), 1)
