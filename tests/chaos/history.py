"""Histories: one JSON Lines file of events per process, and payloads that name their publisher.

A line is written with one system call, so a killed process loses at most its last line.
All processes run on one machine and share its monotonic clock, so times are comparable.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

Kind = Literal[
    # Publishers
    "publish",  # the publisher is about to send `values`
    "acked",  # the publisher learned that `values` are in the log at `offsets`
    "failed",  # the publisher learned that `values` are not in the log
    "unknown",  # the publisher cannot tell whether `values` are in the log
    # Group members
    "assigned",  # the member acquired the lease: its term begins at `first`
    "deliver",  # the member received `values`, from offset `first` on
    "confirm",  # the member asks to confirm all records below `first`
    "confirmed",  # the confirm with this `number` succeeded
    "refused",  # the confirm with this `number` failed, or its outcome is unknown
    "lease_lost",  # a call failed because of the lease, the connection or the server
    "released",  # the member left the group, perhaps only for a while
    # Any reader; archivers record "unavailable", too
    "missing",  # a call reported that the records from `first` to `last` are gone
    "gap",  # the reader skipped the records from `first` to `last`, which are gone
    "truncated",  # a call reported that the server has lost the records from `first` to `last`
    "unavailable",  # the store could not be read, listed or merged
    # Readers without a group
    "reading",  # the reader starts at offset `first`
    "seen",  # the reader received `values`, from offset `first` on
    # Archivers
    "append",  # the archiver is about to append a segment with the records `first` to `last`
    "appended",  # the archiver has appended this segment and is about to commit it
    "compacted",  # files were merged
    # Readers of the store
    "listed",  # files were listed while `archived` was at least `first` and at most `last`
    # Any process
    "error",  # an error that no fault explains
    # The run
    "sample",  # the ring's bounds, `archived` and all confirmed offsets at one moment
    "fault",  # the nemesis causes the fault in `text`
    "hidden",  # the nemesis is about to hide the store
    "shown",  # the store is visible again
    "healed",  # all faults have ended
    # The end of the run
    "log",  # the log has `values`, from offset `first` on
    "archived",  # the store has all records below `last`
    "stored",  # the file `text` in the store has `values` at `offsets`
    "flaw",  # a check of the store found a flaw in the records from `first` to `last`
]


class Event(msgspec.Struct, omit_defaults=True):
    """One event. Its kind determines which fields it has."""

    t: int  # monotonic time in ns, read before a request, but after anything else
    kind: Kind
    who: str = ""  # the name of the publisher, member, reader or archiver
    group: str = ""
    term: int = -1
    began: int = -1  # when the call began
    number: int = -1  # links a confirm to its outcome
    first: int = -1
    last: int = -1
    values: list[str] = []
    offsets: list[int] = []
    confirmed: dict[str, int] = {}
    archived: int = -1
    waiting: int = -1  # number of frames that are not wholly archived; 2 means 2 or more
    text: str = ""

    def __str__(self) -> str:
        parts = [f"{self.t / 1e9:.4f}", self.kind, self.who]
        for name in ("group", "term", "first", "last", "archived", "text"):
            value = getattr(self, name)
            if value not in (-1, ""):
                parts.append(f"{name}={str(value).splitlines()[-1][:200]}")
        if self.values:
            parts.append(f"{len(self.values)} records {self.values[0]}..{self.values[-1]}")
        if self.confirmed:
            parts.append(f"confirmed={self.confirmed}")
        return " ".join(part for part in parts if part)


def now() -> int:
    return time.monotonic_ns()


class Writer:
    """Appends events to one file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._descriptor = os.open(path, flags, 0o600)
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()

    def add(self, kind: Kind, **fields: Any) -> Event:
        event = Event(now(), kind, **fields)
        line = self._encoder.encode(event) + b"\n"
        with self._lock:
            written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"Only {written} of {len(line)} bytes of an event were written.")
        return event

    def close(self) -> None:
        os.close(self._descriptor)


def read(directory: Path) -> list[Event]:
    """Return all events from the files in a directory, sorted by time."""
    events = [event for path in sorted(directory.glob("*.jsonl")) for event in read_file(path)]
    return by_time(events)


def read_file(path: Path) -> list[Event]:
    """Return the events of one process."""
    decoder = msgspec.json.Decoder(Event)
    lines = path.read_bytes().split(b"\n")
    # The last line is empty, or incomplete if the process was killed while writing it.
    return [decoder.decode(line) for line in lines[:-1]]


def by_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.t)


# Payloads: "<publisher>-<counter>", then padding whose length depends on the counter.

_PADDING_BYTES = 120
_LARGE_BYTES = 20_000


def payload(publisher: str, counter: int) -> bytes:
    """Return a unique value. One in a hundred is large, and one in a hundred has no padding."""
    name = f"{publisher}-{counter}".encode()
    return name + b"." * _padding(counter)


def value_of(data: bytes) -> str:
    """Return the name in a payload; for damaged bytes, a name that was never published."""
    name = data.rstrip(b".").decode(errors="replace")
    publisher, _, counter = name.rpartition("-")
    if counter.isdecimal() and len(data) == len(name) + _padding(int(counter)):
        return f"{publisher}-{counter}"
    return f"corrupt:{data[:40]!r}"


def author(value: str) -> tuple[str, int]:
    """Return a value's publisher and counter."""
    publisher, _, counter = value.rpartition("-")
    return publisher, int(counter) if counter.isdecimal() else -1


def _padding(counter: int) -> int:
    if counter % 100 == 99:
        return _LARGE_BYTES
    return counter % 100 * _PADDING_BYTES // 50
