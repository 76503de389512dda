"""Helpers for tests of receivers: handlers that note what they get, and programs that die."""

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
    """Notes the records that it is given, after ``work`` was done on them without an error."""

    def __init__(self, work: Callable[[meteor.Record], object] = lambda record: None) -> None:
        self.work = work
        #: What it was called with, and what of that was done.
        self.given: list[int] = []
        self.done: list[int] = []

    def __call__(self, record: meteor.Record) -> None:
        self.given.append(record.offset)
        self.work(record)
        self.done.append(record.offset)

    def wait_for(self, *offsets: int) -> None:
        """Wait until exactly these were done, in this order."""
        eventually(lambda: len(self.done) >= len(offsets), 20, f"only {self.done} were done")
        assert self.done == list(offsets)


class Gate:
    """A handler that stops before one record, until it is opened."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, record: meteor.Record) -> None:
        if record.offset == self.offset:
            self.reached.set()
            assert self.opened.wait(60), "nobody has opened the gate"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Wait until it is reached; open it behind the block, whatever comes of that."""
        try:
            assert self.reached.wait(20), "the record never came"
            yield
        finally:
            self.opened.set()


def fails_for(*offsets: int) -> Callable[[meteor.Record], None]:
    """What raises ``ValueError`` for these records."""

    def work(record: meteor.Record) -> None:
        if record.offset in offsets:
            raise ValueError(f"no {record.offset}")

    return work


def right_values(record: meteor.Record) -> None:
    """A handler that checks that each record is the one of its offset."""
    assert record.value == value(record.offset)


def confirmed(stream: meteor.Stream, group: str = "g") -> int:
    """What the server has as confirmed of a group."""
    (found,) = (each for each in stream.groups() if each.name == group)
    return found.confirmed


def owner(stream: meteor.Stream, group: str = "g") -> str | None:
    """Who has the lease of a group."""
    (found,) = (each for each in stream.groups() if each.name == group)
    return found.owner


def is_free(stream: meteor.Stream, group: str = "g") -> bool:
    """Whether the lease was given up, and not only ran out."""
    plain = stream.client.redis
    given_up = plain.hget(keys.group(stream.name, group), "owner") == b""
    return given_up and not plain.exists(keys.lease(stream.name, group))


def next_of(stream: meteor.Stream, group: str = "g") -> list[int]:
    """What the next member of a group is given."""
    with stream.subscriber(group=group) as sub:
        return list(sub.poll(timeout=20).offsets)


def dies(program: str, *args: str) -> None:
    """Run a program that is to kill itself."""
    command = [sys.executable, "-W", "ignore", "-c", program, *args]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
