"""What happened: events, one file of JSON lines per process, and payloads that say who wrote them.

A line is written with one system call, so a killed process loses at most the line it was writing.
All processes run on one machine: their monotonic clocks are the same clock, and times compare.
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
    # Publishers, about `values`: asked for; in the log at `offsets`; not there; nobody knows.
    "publish",
    "acked",
    "failed",
    "unknown",
    # Members of a group: a term begins at `first`; records from `first` on were handed out; a
    # confirm of all below `first` was asked for, done, refused, or left without an answer.
    "assigned",
    "deliver",
    "confirm",
    "confirmed",
    "refused",
    "lease_lost",
    "released",
    # Any reader: the records from `first` to `last` are gone; and were passed over. The store
    # could not be read, or listed.
    "missing",
    "gap",
    "truncated",
    "unavailable",
    # Readers without a group: one begins at `first`, and from there on saw these records.
    "reading",
    "seen",
    # Archivers: about to append `first` to `last` to the store in a term; they are there, and the
    # stream will be told. Somebody has merged files; somebody has listed them, when the records
    # below `first`, or at the end of it those below `last`, were archived.
    "append",
    "appended",
    "compacted",
    "listed",
    # Somebody met an error that no fault explains.
    "error",
    # The run: the bounds of the ring, what is archived and what each group has confirmed at one
    # moment; faults; the store was taken away, and put back; the end of all faults.
    "sample",
    "fault",
    "hidden",
    "shown",
    "healed",
    # And at its end: the whole log; all below `last` is archived; what is in one file of the
    # store; what is wrong with them.
    "log",
    "archived",
    "stored",
    "flaw",
]


class Event(msgspec.Struct, omit_defaults=True):
    """One thing that happened. Which fields count depends on the kind."""

    t: int  # monotonic clock, ns: after what it tells of, except of what is asked for
    kind: Kind
    who: str = ""  # the publisher, member, or reader
    group: str = ""
    term: int = -1
    began: int = -1  # when the call that brought it was made
    number: int = -1  # ties a confirm to its outcome
    first: int = -1
    last: int = -1
    values: list[str] = []
    offsets: list[int] = []
    confirmed: dict[str, int] = {}
    archived: int = -1
    waiting: int = -1  # frames in the ring that are not archived, or not wholly; 2 for more
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
    """Appends events to one file. For several threads."""

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
    """All events of the files in a directory, by time."""
    events = [event for path in sorted(directory.glob("*.jsonl")) for event in read_file(path)]
    return by_time(events)


def read_file(path: Path) -> list[Event]:
    """The events of one process; the last line may be torn, any other may not."""
    decoder = msgspec.json.Decoder(Event)
    lines = path.read_bytes().split(b"\n")
    # The last one is empty, or what a killed process could not finish.
    return [decoder.decode(line) for line in lines[:-1]]


def by_time(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.t)


# Payloads: "<publisher>-<counter>", then padding that follows from it.

_PADDING_BYTES = 120
_LARGE_BYTES = 20_000


def payload(publisher: str, counter: int) -> bytes:
    """A value that nobody else publishes: one in a hundred is large, one has no padding."""
    name = f"{publisher}-{counter}".encode()
    return name + b"." * _padding(counter)


def value_of(data: bytes) -> str:
    """The name of a payload; of bytes that are none, a name that nobody has published."""
    name = data.rstrip(b".").decode(errors="replace")
    publisher, _, counter = name.rpartition("-")
    if counter.isdecimal() and len(data) == len(name) + _padding(int(counter)):
        return f"{publisher}-{counter}"
    return f"corrupt:{data[:40]!r}"


def author(value: str) -> tuple[str, int]:
    """The publisher and the counter of a value."""
    publisher, _, counter = value.rpartition("-")
    return publisher, int(counter) if counter.isdecimal() else -1


def _padding(counter: int) -> int:
    if counter % 100 == 99:
        return _LARGE_BYTES
    return counter % 100 * _PADDING_BYTES // 50
