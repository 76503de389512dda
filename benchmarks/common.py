"""Helpers for all benchmarks: records, clients, repetition, processes, results."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

import meteor_py as meteor

RECORD_BYTES = 100
SEED = 20_180_506
#: redis-py's batch size, which the goals assume.
PIPELINE = 500
#: Records per publish_many call.
CALL = 10_000
#: Seconds after which a process counts as stuck.
STUCK_S = 120.0

_CONTEXT = multiprocessing.get_context("spawn")

#: Waits until all processes in a run are ready; returns the time on a clock that they share.
Ready = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One row of the results table."""

    what: str
    unit: str
    ours: float
    peer: float | None = None
    peer_name: str = ""
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None

    @property
    def cells(self) -> tuple[str, str, str, str, str, str]:
        peer = "" if self.peer is None else f"{show(self.peer, self.unit)} ({self.peer_name})"
        ratio = "" if self.ratio is None else f"{self.ratio:.{1 if self.ratio >= 10 else 2}f}x"
        met = {True: "yes", False: "no", None: ""}[self.met]
        return self.what, show(self.ours, self.unit), peer, ratio, self.goal, met


def faster(what: str, ours: float, peer: float, peer_name: str, goal: float | None = None) -> Row:
    """Return a row with two rates: ours should be at least ``goal`` times the peer's."""
    ratio = ours / peer
    met = None if goal is None else ratio >= goal
    text = "" if goal is None else f">= {goal:g}x"
    return Row(what, "/s", ours, peer, peer_name, ratio, text, met)


def cheaper(
    what: str, unit: str, ours: float, peer: float, peer_name: str, goal: float | None = None
) -> Row:
    """Return a row with two costs: ours should be at most ``goal`` times the peer's."""
    ratio = ours / peer
    met = None if goal is None else ratio <= goal
    text = "" if goal is None else f"<= {goal:g}x"
    return Row(what, unit, ours, peer, peer_name, ratio, text, met)


def within(what: str, unit: str, ours: float, goal: float | None = None) -> Row:
    """Return a row with one figure that should not exceed ``goal``."""
    text = "" if goal is None else f"<= {show(goal, unit)}"
    return Row(what, unit, ours, goal=text, met=None if goal is None else ours <= goal)


def show(figure: float, unit: str) -> str:
    if unit == "/s":
        return f"{figure / 1e6:.2f} M/s" if figure >= 1e6 else f"{figure / 1e3:.0f} k/s"
    return f"{figure:.{2 if figure < 10 else 0}f} {unit}"


@dataclass(frozen=True)
class Bench:
    """The server under test, and the number of measurements to take."""

    url: str
    #: "valkey" or "redis". One goal depends on it.
    server: str
    quick: bool
    #: Shows the current step in the progress bar.
    step: Callable[[str], None]

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def clear(self) -> None:
        """Empty the server."""
        with plain_client(self.url) as client:
            client.flushall()

    def best(
        self, cases: Mapping[str, Callable[[], float]], repeats: int | None = None
    ) -> dict[str, float]:
        """Return each case's highest rate. Cases alternate, so noise affects all of them."""
        found: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(repeats or self.pick(5, 2)):
            for name, case in cases.items():
                self.step(name)
                found[name].append(case())
        return {name: max(rates) for name, rates in found.items()}


def values_of(count: int, seed: int = 0, size: int = RECORD_BYTES) -> list[bytes]:
    """Return distinct values, the same in every run."""
    blob = random.Random(SEED + seed).randbytes(count * size)
    return [blob[i : i + size] for i in range(0, len(blob), size)]


def cut(values: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def plain_client(url: str) -> Any:
    """Return a redis-py client with hiredis, without retries, health checks or other extras."""
    return redis.Redis.from_url(
        url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=None,
        health_check_interval=0,
        protocol=2,
        driver_info=None,
    )


@contextmanager
def connected(url: str) -> Iterator[meteor.Client]:
    """Yield a meteor_py client."""
    with warnings.catch_warnings():
        # The benchmark's server deliberately keeps nothing on disk.
        warnings.simplefilter("ignore", meteor.DataSafetyWarning)
        with meteor.connect(url) as client:
            yield client


def percentile(samples: Sequence[float], percent: int) -> float:
    return statistics.quantiles(samples, n=100)[percent - 1]


# -- processes ---------------------------------------------------------------------------------


def at_once(*jobs: tuple[Callable[..., Any], tuple[Any, ...]]) -> list[Any]:
    """Run each job in a separate process and return their results.

    Each job gets a function that waits until all jobs are ready, followed by its arguments.
    """
    barrier = _CONTEXT.Barrier(len(jobs))
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in jobs]
    processes = [
        _CONTEXT.Process(target=_work, args=(writer, barrier, job, args), daemon=True)
        for (_, writer), (job, args) in zip(pipes, jobs, strict=True)
    ]
    try:
        for process, (_, writer) in zip(processes, pipes, strict=True):
            process.start()
            writer.close()
        return _collect([reader for reader, _ in pipes])
    finally:
        for process in processes:
            if process.is_alive() and process.exitcode is None:
                process.join(1.0)
            process.kill()
            process.join()


def _collect(readers: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + STUCK_S
    while len(results) < len(readers):
        waiting = [r for i, r in enumerate(readers) if i not in results]
        found: list[Any] = wait(waiting, max(deadline - time.monotonic(), 0))
        if not found:
            raise RuntimeError(f"A benchmark did not end within {STUCK_S:g} seconds.")
        for reader in found:
            try:
                failure, result = reader.recv()
            except EOFError:
                failure, result = "The process was killed.", None
            if failure:
                raise RuntimeError(f"A benchmark process failed:\n{failure}")
            results[readers.index(reader)] = result
    return [results[i] for i in range(len(readers))]


def _work(writer: Any, barrier: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    def ready() -> float:
        barrier.wait(STUCK_S)
        return time.monotonic()

    try:
        writer.send(("", job(ready, *args)))
    except BaseException:
        barrier.abort()
        writer.send((traceback.format_exc(), None))
