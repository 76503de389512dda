"""Helpers for transaction tests: stages, commits and their leftovers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import Stage, Staged, StageOwner
from meteor_py.records.frame import Columns
from meteor_py.redis import keys


def stage(
    stream: meteor.Stream, name: str, *frames: str, owner: StageOwner | None = None
) -> Staged:
    """Stage frames of space-separated values: ``stage(stream, "a", "1 2", "3")``."""
    stage = Stage(stream._handle, name, owner=owner)
    for values in frames:
        stage.write(Columns([value.encode() for value in values.split()]))
    return stage.finish()


def contents(stream: meteor.Stream) -> str:
    """Return all values, after checking that their offsets are dense from 0."""
    batches = list(stream.read())
    assert [offset for batch in batches for offset in batch.offsets] == list(
        range(stream.end().offset)
    )
    return b" ".join(value for batch in batches for value in batch.values()).decode()


def numbers(count: int) -> str:
    return " ".join(map(str, range(count)))


def begin(stream: meteor.Stream, version: int, *stages: Staged, moves: int = 0) -> None:
    """Act as a committer for writer ``w`` that dies after saving its plan and making some moves."""
    answer = transaction._plan(stream._handle, "w", version, stages)
    assert answer == [b"OK", 0, sum(each.frames for each in stages)]
    spans = [(each.name, i, each.frames) for each in stages for i in range(each.frames)]
    for done, (name, frame, size) in enumerate(spans[:moves]):
        answer = transaction._move(stream._handle, "w", version, done, name, (frame, size))
        assert answer == [b"OK", done + 1]


def lasting(stream: meteor.Stream) -> set[bytes]:
    """Return the keys that do not expire."""
    plain = stream.client.redis
    found: Any = plain.keys("*")
    return {key for key in found if plain.pttl(key) == -1}


def fence(stream: meteor.Stream, writer: str = "w") -> bytes | None:
    found: bytes | None = stream.client._connector.call("HGET", keys.fences("s"), writer)
    return found


def in_threads(*works: Callable[[], None]) -> None:
    """Run all functions concurrently; raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
