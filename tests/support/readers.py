"""Helpers for reader tests: streams with known values, and raw keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import redis

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.waiting import eventually


def value(offset: int) -> bytes:
    """Return the value at an offset, which is the same in all test streams."""
    return b"value %d" % offset


def fill(stream: meteor.Stream, *sizes: int) -> int:
    """Append frames of these sizes; return the next offset."""
    with stream.publisher() as pub:  # creates the stream if it does not exist
        end = stream.describe().next
        for size in sizes:
            first = pub.publish_many([value(end + i) for i in range(size)]).result()
            assert first == end, "another publisher is active"
            end += size
    return end


def later_than_all(stream: meteor.Stream) -> int:
    """Return a time in ms that is later than all records; 0 if the clock has not advanced yet."""
    now = int(datetime.now(UTC).timestamp() * 1000)
    is_later = stream.offset_at(datetime.fromtimestamp(now / 1000, UTC)) == stream.bounds()[1]
    return now if is_later else 0


def check_values(batch: meteor.RecordBatch) -> list[int]:
    """Check the value of each record, and return the offsets."""
    assert batch.values() == [value(offset) for offset in batch.offsets]
    return list(batch.offsets)


def drain(sub: meteor.Subscriber, **options: Any) -> list[int]:
    """Read and check all remaining records; return their offsets."""
    offsets: list[int] = []
    while batch := sub.poll(timeout=0, **options):
        offsets += check_values(batch)
    return offsets


def everything(client: redis.Redis) -> dict[bytes, tuple[Any, ...]]:
    """Return all keys on a server, with their contents and whether they expire."""
    found: Any = client.keys("*")
    return {key: (client.dump(key), client.pttl(key) >= 0) for key in sorted(found)}


def entries(client: redis.Redis, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Return the entries in a stream's log."""
    answer: Any = client.xrange(keys.log(stream))
    return list(answer)


def frame_name(fields: dict[bytes, bytes]) -> bytes:
    """Return the format of an entry's frame."""
    return next(name for name in fields if name not in (b"t", b"crc"))


def replace_frame(
    client: redis.Redis, stream: str, entry_id: bytes, payload: bytes, name: bytes | None = None
) -> None:
    """Replace the payload of one frame in the log and, if ``name`` is given, its format."""
    found = entries(client, stream)
    client.delete(keys.log(stream))
    for each, fields in found:
        if each == entry_id:
            old = frame_name(fields)
            fields = {name or old if k == old else k: v for k, v in fields.items()}
            fields[name or old] = payload
        changed: dict[Any, Any] = dict(fields)
        client.xadd(keys.log(stream), changed, id=each)


def blocked(client: redis.Redis, number: int = 1) -> None:
    """Wait until exactly `number` clients are blocked in the server."""
    eventually(lambda: client.info("clients")["blocked_clients"] == number)


@contextmanager
def background(work: Callable[[threading.Event], object]) -> Iterator[threading.Thread]:
    """Run ``work(stop)`` in a thread during the block, and re-raise its error."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="test-background")
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive(), "the background work did not end"
    if failures:
        raise failures[0]
