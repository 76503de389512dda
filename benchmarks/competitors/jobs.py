"""The jobs that systems run: publish, read, both at once, fan-out, latency, open loop.

Each publisher and consumer is a separate process. Records have 100 bytes, unless a job's title says
otherwise. After each job that measures a rate, the number of records in the stream is compared with
the number published.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common import RECORD_BYTES, Ready, at_once, percentile, values_of
from benchmarks.competitors.systems import System

Figures = dict[str, float]

#: Seconds for consumers to settle before publishers start.
_HEAD_START_S = 0.5
_READ_S = 100.0
_PAUSE_S = 0.002
_WARM_UP = 200
_STAMP = 20


@dataclass(frozen=True)
class Job:
    """A job, and how its figures are shown."""

    title: str
    run: Callable[[System, int], Figures]
    #: Number of records for a fast system. Slower systems get fewer if the figure is a rate.
    records: int
    higher_is_better: bool = True


# -- processes ---------------------------------------------------------------------------------


def publish(
    ready: Ready, system: System, count: int, seed: int, bulk: bool, delay_s: float
) -> tuple[float, float]:
    """Publish; return the start time, and the time when everything was acknowledged."""
    values = values_of(count, seed)
    publisher = system.publisher()
    gc.collect()
    ready()
    time.sleep(delay_s)
    began = time.monotonic()
    if bulk:
        publisher.send_bulk(values)
    else:
        publisher.send_all(values)
    ended = time.monotonic()
    publisher.close()
    return began, ended


def read(ready: Ready, system: System, count: int, from_start: bool) -> tuple[float, float]:
    """Read ``count`` records; return the start and end times."""
    consumer = system.consumer()
    if not from_start:
        consumer.to_end()
    gc.collect()
    began = ready()
    if from_start:
        consumer.to_start()
    received = 0
    while received < count:
        values = consumer.poll()
        received += len(values)
        if values and len(values[-1]) != RECORD_BYTES:
            raise ValueError(f"A record has {len(values[-1])} bytes, not {RECORD_BYTES}.")
        if time.monotonic() - began > _READ_S:
            raise TimeoutError(
                f"Only {received} of {count} records arrived in {_READ_S:g} seconds."
            )
    ended = time.monotonic()
    consumer.close()
    if received > count:
        raise ValueError(f"{received} records arrived instead of {count}.")
    return began, ended


def send_one_by_one(ready: Ready, system: System, count: int) -> None:
    """Send records with a pause after each. Each record holds the time at which it was sent."""
    publisher = system.publisher()
    ready()
    time.sleep(2 * _HEAD_START_S)
    for _ in range(count):
        publisher.send(_stamped(time.monotonic_ns()))
        time.sleep(_PAUSE_S)
    publisher.flush()
    publisher.close()


def send_on_schedule(ready: Ready, system: System, count: int, rate: int, size: int) -> None:
    """Send at a fixed rate. Each record holds the time at which it was due."""
    publisher = system.publisher()
    ready()
    time.sleep(2 * _HEAD_START_S)
    step_ns = 1_000_000_000 // rate
    start_ns = time.monotonic_ns()
    sent = 0
    while sent < count:
        due = min((time.monotonic_ns() - start_ns) // step_ns + 1, count)
        while sent < due:
            publisher.send(_stamped(start_ns + sent * step_ns, size))
            sent += 1
        time.sleep(0.0002)
    publisher.flush()
    publisher.close()


def receive(ready: Ready, system: System, count: int) -> list[float]:
    """Receive records; return how many microseconds after its stored time each one arrived."""
    consumer = system.consumer()
    consumer.to_end()
    began = ready()
    delays: list[float] = []
    while len(delays) < count:
        values = consumer.poll()
        at = time.monotonic_ns()
        delays.extend((at - int(value[:_STAMP])) / 1000 for value in values)
        if time.monotonic() - began > _READ_S:
            raise TimeoutError(f"{len(delays)} of {count} records arrived in {_READ_S:g} seconds.")
    consumer.close()
    return delays


def _stamped(at_ns: int, size: int = RECORD_BYTES) -> bytes:
    return b"%0*d" % (_STAMP, at_ns) + b"x" * (size - _STAMP)


# -- jobs --------------------------------------------------------------------------------------


def _publish_job(system: System, count: int, *, bulk: bool) -> Figures:
    ((began, ended),) = at_once((publish, (system, count, 0, bulk, 0.0)))
    _check_count(system, count)
    return {"records/s": count / (ended - began)}


def publish_loop(system: System, count: int) -> Figures:
    return _publish_job(system, count, bulk=False)


def publish_bulk(system: System, count: int) -> Figures:
    return _publish_job(system, count, bulk=True)


def read_all(system: System, count: int) -> Figures:
    publisher = system.publisher()
    publisher.send_bulk(values_of(count))
    publisher.close()
    _check_count(system, count)
    ((began, ended),) = at_once((read, (system, count, True)))
    return {"records/s": count / (ended - began)}


def _flow(system: System, each: int, publishers: int, consumers: int, *, bulk: bool) -> Figures:
    total = each * publishers
    times = at_once(
        *((publish, (system, each, i, bulk, _HEAD_START_S)) for i in range(publishers)),
        *((read, (system, total, False)) for _ in range(consumers)),
    )
    _check_count(system, total)
    began = min(began for began, _ in times[:publishers])
    ended = max(ended for _, ended in times[publishers:])
    return {"deliveries/s": total * consumers / (ended - began)}


def one_to_one(system: System, count: int) -> Figures:
    return _flow(system, count, 1, 1, bulk=True)


def fan_out(system: System, count: int) -> Figures:
    return _flow(system, count // 4, 4, 16, bulk=True)


def latency(system: System, count: int) -> Figures:
    total = count + _WARM_UP
    _, delays = at_once((send_one_by_one, (system, total)), (receive, (system, total)))
    return _spread(delays[_WARM_UP:])


def open_loop(rate: int, size: int) -> Callable[[System, int], Figures]:
    def job(system: System, count: int) -> Figures:
        sending = (send_on_schedule, (system, count, rate, size))
        _, delays = at_once(sending, (receive, (system, count)))
        return _spread(delays[count // 10 :])  # the first tenth is a warm-up

    return job


def _spread(delays: Sequence[float]) -> Figures:
    return {"p50 us": statistics.median(delays), "p99 us": percentile(delays, 99)}


def _check_count(system: System, expected: int) -> None:
    found = system.count()
    if found != expected:
        raise RuntimeError(f"{system.name} holds {found} records instead of {expected}.")


JOBS = {
    "publish_loop": Job("`publish()` in a loop, until all are acknowledged", publish_loop, 500_000),
    "publish_bulk": Job(
        "Bulk calls of 10,000, until all are acknowledged", publish_bulk, 1_000_000
    ),
    "read": Job("Read all existing records", read_all, 1_000_000),
    "one_to_one": Job("1 publisher (bulk) and 1 consumer at once", one_to_one, 1_000_000),
    "fan_out": Job("4 publishers x 16 consumers, each gets everything", fan_out, 200_000),
    "latency": Job("One record at a time, 500 per second", latency, 2_000, False),
    "open_20k": Job("20,000 records/s of 100 bytes", open_loop(20_000, 100), 200_000, False),
    "open_20k_1kb": Job("20,000 records/s of 1 KB", open_loop(20_000, 1_000), 200_000, False),
    "open_50k": Job("50,000 records/s of 100 bytes", open_loop(50_000, 100), 500_000, False),
    "open_50k_1kb": Job("50,000 records/s of 1 KB", open_loop(50_000, 1_000), 500_000, False),
}
