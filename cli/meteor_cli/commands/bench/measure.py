"""Measurements for ``demo`` and ``bench``. Each function times one operation."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import meteor_py as meteor

Advance = Callable[[int], None]

#: Maximum number of records per publish_many call, and per batch when reading in a group.
CALL = 10_000
#: Seconds to wait for a published record.
_PATIENCE_S = 30.0
#: Seconds after which a waiting reader checks whether it should stop.
_POLL_S = 0.1


def publish_many(
    stream: meteor.Stream, parts: Iterable[Sequence[bytes]], advance: Advance
) -> float:
    """Publish lists of values; return the seconds until all are acknowledged."""
    done = 0
    waiting: deque[meteor.ManyAck] = deque()  # the publisher's memory limit bounds its length

    def settle() -> None:
        nonlocal done
        ack = waiting.popleft()
        ack.result()
        done += sum(map(len, ack.ranges))
        advance(done)

    with stream.publisher() as pub:
        start = time.perf_counter()
        for part in parts:
            waiting.append(pub.publish_many(part))
            while waiting and waiting[0].done():
                settle()
        while waiting:
            settle()
        return time.perf_counter() - start


def publish_each(
    stream: meteor.Stream, parts: Iterable[Sequence[bytes]], advance: Advance
) -> float:
    """Publish values one by one; return the seconds until all are acknowledged."""
    done = 0
    with stream.publisher() as pub:
        start = time.perf_counter()
        for part in parts:
            for value in part:
                ack = pub.publish(value)
            if ack.done():
                ack.result()  # if the server is gone, fail now instead of at the end
            done += len(part)
            advance(done)
        pub.flush()
        return time.perf_counter() - start


def read(
    stream: meteor.Stream, advance: Advance, *, convert: Callable[[meteor.RecordBatch], object]
) -> tuple[int, float]:
    """Read the whole stream; return the number of records and the elapsed seconds."""
    done = 0
    start = time.perf_counter()
    for batch in stream.read():
        convert(batch)
        done += len(batch)
        advance(done)
    return done, time.perf_counter() - start


def read_in_group(stream: meteor.Stream, advance: Advance, *, group: str) -> tuple[int, float]:
    """Read the whole stream in a group, confirming each batch. Returns the same as ``read``.

    Raises:
        TimeoutError: No record arrived within ``_PATIENCE_S`` seconds.
    """
    end = stream.bounds()[1]
    done = 0
    with stream.subscriber(group=group) as sub:
        start = time.perf_counter()
        while sub.position < end:
            batch = sub.poll(_PATIENCE_S, CALL)
            if not batch:
                raise TimeoutError(f"No record arrived within {_PATIENCE_S:g} seconds.")
            batch.values()
            ack = sub.confirm(batch)
            done += len(batch)
            advance(done)
        ack.result(_PATIENCE_S)
        return done, time.perf_counter() - start


def follow(
    stream: meteor.Stream, records: Sequence[tuple[bytes | None, bytes]], advance: Advance
) -> tuple[list[meteor.Record], list[float]]:
    """Publish records one by one, each after a reader has received the previous one.

    Returns:
        The records that were read, and the seconds from publishing each one to reading it.

    Raises:
        TimeoutError: A record did not arrive within ``_PATIENCE_S`` seconds.
    """
    found: queue.SimpleQueue[tuple[float, meteor.Record] | Exception] = queue.SimpleQueue()
    ended = threading.Event()

    def listen() -> None:
        try:
            while not ended.is_set():
                for record in sub.poll(_POLL_S):
                    found.put((time.perf_counter(), record))
        except Exception as error:
            found.put(error)

    read: list[meteor.Record] = []
    took: list[float] = []
    with stream.subscriber() as sub, stream.publisher() as pub:
        listener = threading.Thread(target=listen, name="meteor-cli-listener")
        listener.start()
        try:
            for key, value in records:
                start = time.perf_counter()
                pub.publish(value, key=key)
                try:
                    item = found.get(timeout=_PATIENCE_S)
                except queue.Empty:
                    text = f"A record did not arrive within {_PATIENCE_S:g} seconds."
                    raise TimeoutError(text) from None
                if isinstance(item, Exception):
                    raise item
                took.append(item[0] - start)
                read.append(item[1])
                advance(len(read))
        finally:
            ended.set()
            listener.join()
    return read, took


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the smallest sample that is at least as large as ``percent`` % of all samples.

    >>> percentile([5, 1, 4, 2, 3], 50)
    3
    """
    ordered = sorted(samples)
    return ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]
