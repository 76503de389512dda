"""Helpers for receiver tests: handlers that record their calls, and programs that die."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.readers import value
from tests.support.waiting import eventually


class Handler:
    """A handler that records all its calls, and those that succeeded."""

    def __init__(self, work: Callable[[meteor.Record], object] = lambda record: None) -> None:
        self.work = work
        #: Offsets of all calls, and of those that succeeded.
        self.given: list[int] = []
        self.done: list[int] = []

    def __call__(self, record: meteor.Record) -> None:
        self.given.append(record.offset)
        self.work(record)
        self.done.append(record.offset)

    def wait_for(self, *offsets: int) -> None:
        """Wait until exactly these records are done, in this order."""
        eventually(lambda: len(self.done) >= len(offsets), 20, "not all records were handled")
        assert self.done == list(offsets)


class Gate:
    """A handler that blocks on one record until the gate is opened."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, record: meteor.Record) -> None:
        if record.offset == self.offset:
            self.reached.set()
            assert self.opened.wait(60), "the gate was not opened"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait until the record is reached; open the gate when the ``with`` block ends."""
        try:
            assert self.reached.wait(20), "the record never arrived"
            yield
        finally:
            self.opened.set()


def fails_for(*offsets: int) -> Callable[[meteor.Record], None]:
    """Return a handler that raises ``ValueError`` for these records."""

    def work(record: meteor.Record) -> None:
        if record.offset in offsets:
            raise ValueError(f"no {record.offset}")

    return work


def right_values(record: meteor.Record) -> None:
    """Check a record's value. Receivers use this function as a handler."""
    assert record.value == value(record.offset)


def confirmed(stream: meteor.Stream, group: str = "g") -> int:
    """Return a group's confirmed offset on the server."""
    (found,) = (each for each in stream.groups() if each.name == group)
    return found.confirmed


def owner(stream: meteor.Stream, group: str = "g") -> str | None:
    """Return the owner of a group's lease."""
    (found,) = (each for each in stream.groups() if each.name == group)
    return found.owner


def is_free(stream: meteor.Stream, group: str = "g") -> bool:
    """Return whether the group's lease was released, as opposed to expired."""
    plain = stream.client.redis
    released = plain.hget(keys.group(stream.name, group), "owner") == b""
    return released and not plain.exists(keys.lease(stream.name, group))


def next_of(stream: meteor.Stream, group: str = "g") -> list[int]:
    """Return the offsets that the next member of a group gets."""
    with stream.subscriber(group=group) as sub:
        return list(sub.poll(timeout=20).offsets)


def dies(program: str, *args: str) -> None:
    """Run a program that must kill itself."""
    command = [sys.executable, "-W", "ignore", "-c", program, *args]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
