"""The fail-over of the tour: two workers of one group, one of which is killed at work."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import meteor_py as meteor
from meteor_py.server import open_embedded

RECORDS = 3_000
#: Records that the first worker has handled when it is killed.
KILL_AFTER = 1_000
LEASE_S = 1.0
_STREAM, _GROUP = "orders", "billing"
_PER_SECOND = 2_000
_STEP = 20
#: Seconds after which the tour gives up on a worker.
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of the records."""

    #: The offsets, as the first and the second worker handled them.
    first: list[int]
    second: list[int]
    #: Seconds from the kill to the second worker's first record.
    pause_s: float
    confirmed: int

    @property
    def lost(self) -> int:
        return len(set(range(RECORDS)) - {*self.first, *self.second})

    @property
    def twice(self) -> int:
        return len(set(self.first) & set(self.second))


class Worker:
    """A process that handles the group's records, and tells the offset of each."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "meteor_cli.failover", url]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._listen, name="demo-worker")
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was killed in the middle of it
                self.offsets.put(int(line))

    def next(self) -> int:
        return self.offsets.get(timeout=_PATIENCE_S)

    def rest(self) -> list[int]:
        found: list[int] = []
        while not self.offsets.empty():
            found.append(self.offsets.get())
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()


def fail_over(advance: Callable[[int], None]) -> Outcome:
    """Publish to a group of two workers, and kill the one that has the lease."""
    with ExitStack() as stack:
        server = stack.enter_context(open_embedded())
        m = stack.enter_context(_connect(server.url))
        stream = m.stream(_STREAM)
        workers = [Worker(server.url) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.end)
        with stream.publisher() as pub:
            pub.publish(b"order 0").result()
        owner, heir = _who_reads(workers)
        publishing = threading.Thread(target=_publish, args=(stream, advance), name="demo-pub")
        publishing.start()
        stack.callback(publishing.join)
        handled = [owner.next() for _ in range(KILL_AFTER)]
        owner.process.kill()
        killed_at = time.perf_counter()
        taken_over = [heir.next()]
        pause_s = time.perf_counter() - killed_at
        owner.end()
        handled += owner.rest()
        while taken_over[-1] < RECORDS - 1:
            taken_over.append(heir.next())
        confirmed = _wait_until_confirmed(stream)
    return Outcome(handled, taken_over, pause_s, confirmed)


def _who_reads(workers: list[Worker]) -> tuple[Worker, Worker]:
    """The one that has the lease, and the other."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        for number, worker in enumerate(workers):
            if not worker.offsets.empty():
                return worker, workers[1 - number]
        time.sleep(0.002)
    raise TimeoutError("No worker of the demo came up.")


def _publish(stream: meteor.Stream, advance: Callable[[int], None]) -> None:
    with stream.publisher() as pub:
        for start in range(1, RECORDS, _STEP):
            stop = min(start + _STEP, RECORDS)
            pub.publish_many([b"order %d" % n for n in range(start, stop)])
            advance(stop - start)
            time.sleep(_STEP / _PER_SECOND)


def _wait_until_confirmed(stream: meteor.Stream) -> int:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        confirmed = stream.groups()[0].confirmed
        if confirmed == RECORDS or time.monotonic() > deadline:
            return confirmed
        time.sleep(0.01)


def _connect(url: str) -> meteor.Client:
    # The demo's own server keeps nothing on disk, on purpose.
    warnings.simplefilter("ignore", meteor.DataSafetyWarning)
    return meteor.connect(url)


def work(url: str) -> None:
    """What a worker does."""
    with (
        _connect(url) as m,
        m.stream(_STREAM).subscriber(group=_GROUP, lease_ttl=LEASE_S) as sub,
    ):
        for record in sub:
            print(record.offset, flush=True)  # handled
            sub.confirm(record)


if __name__ == "__main__":
    work(sys.argv[1])
