"""The systems under comparison behind one interface, each with its best settings.

A system is a small immutable description, so that it can be sent to a job's processes. Its
publishers and consumers belong to the process that opens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["BULK", "Consumer", "Publisher", "System"]

#: Records in one bulk call.
BULK = 10_000


class Publisher(Protocol):
    def send(self, value: bytes) -> None:
        """Publish one record. If the client can, return before the server acknowledges it."""

    def send_all(self, values: Sequence[bytes]) -> None:
        """Publish records with one call each, and wait until all are acknowledged."""

    def send_bulk(self, values: Sequence[bytes]) -> None:
        """Publish records as fast as the client can, and wait until all are acknowledged."""

    def flush(self) -> None:
        """Wait until all records are acknowledged."""

    def close(self) -> None: ...


class Consumer(Protocol):
    def to_end(self) -> None:
        """Prepare to read records that are published from now on."""

    def to_start(self) -> None:
        """Start reading at the first record."""

    def poll(self) -> Sequence[bytes]:
        """Return the values that are available, waiting up to about a second for the first."""

    def close(self) -> None: ...


class System(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def durability(self) -> str:
        """Where a record is stored when it is acknowledged."""

    def fresh(self) -> System:
        """Return this system with an empty stream."""

    def count(self) -> int:
        """Return the number of records in the stream."""

    def publisher(self) -> Publisher: ...

    def consumer(self) -> Consumer: ...
