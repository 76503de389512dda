"""Helpers that publish numbers and read whole streams."""

from __future__ import annotations

from collections.abc import Iterable

import meteor_py as meteor


def publish(stream: meteor.Stream, numbers: Iterable[int]) -> None:
    """Publish the numbers as text, and wait until the server has them."""
    with stream.publisher() as pub:
        pub.publish_many([b"%d" % number for number in numbers]).result(10)


def values(stream: meteor.Stream) -> list[bytes]:
    """Return all values, whose offsets must be 0, 1, 2..."""
    records = [record for batch in stream.read(0) for record in batch]
    assert [record.offset for record in records] == list(range(len(records)))
    return [record.value for record in records]


def numbers(stream: meteor.Stream) -> list[int]:
    """Return all values in a stream of numbers."""
    return [int(value) for value in values(stream)]
