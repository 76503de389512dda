"""Helpers for tests that read: streams with known frames, and a look behind the scenes."""

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
    """The value of this offset in all streams here."""
    return b"value %d" % offset


def fill(stream: meteor.Stream, *sizes: int) -> int:
    """Append frames of so many records each; return the next offset."""
    end = stream.describe().next
    with stream.publisher() as pub:
        for size in sizes:
            first = pub.publish_many([value(end + i) for i in range(size)]).result()
            assert first == end, "somebody else publishes"
            end += size
    return end


def later_than_all(stream: meteor.Stream) -> int:
    """A time in ms after all records that there are; 0 as long as the server's clock has none."""
    now = int(datetime.now(UTC).timestamp() * 1000)
    is_later = stream.offset_at(datetime.fromtimestamp(now / 1000, UTC)) == stream.bounds()[1]
    return now if is_later else 0


def check_values(batch: meteor.RecordBatch) -> list[int]:
    """Check that each record is the one of its offset, and return the offsets."""
    assert batch.values() == [value(offset) for offset in batch.offsets]
    return list(batch.offsets)


def drain(sub: meteor.Subscriber, **options: Any) -> list[int]:
    """Read until nothing is left, checking values; return the offsets."""
    offsets: list[int] = []
    while batch := sub.poll(timeout=0, **options):
        offsets += check_values(batch)
    return offsets


def everything(client: redis.Redis) -> dict[bytes, tuple[Any, ...]]:
    """All keys of a server with their whole contents and times to live."""
    found: Any = client.keys("*")
    return {key: (client.dump(key), client.pttl(key) >= 0) for key in sorted(found)}


def entries(client: redis.Redis, stream: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The log of a stream."""
    answer: Any = client.xrange(keys.log(stream))
    return list(answer)


def frame_name(fields: dict[bytes, bytes]) -> bytes:
    """The format of an entry's frame."""
    return next(name for name in fields if name not in (b"t", b"crc"))


def replace_frame(
    client: redis.Redis, stream: str, entry_id: bytes, payload: bytes, name: bytes | None = None
) -> None:
    """Put other bytes into one frame of the log, all else as it was."""
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
    """Wait until so many readers wait inside the server."""
    eventually(lambda: client.info("clients")["blocked_clients"] == number)


@contextmanager
def background(work: Callable[[threading.Event], object]) -> Iterator[threading.Thread]:
    """Run ``work(stop)`` in a thread meanwhile, and raise here what it raises."""
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
