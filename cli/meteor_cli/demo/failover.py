"""The fail-over of the tour: two workers of one group, one of which is killed at work."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import meteor_py as meteor

RECORDS = 3_000
#: Records that the first worker has handled when it is killed.
KILL_AFTER = 1_000
LEASE_S = 1.0
GROUP = "billing"
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

    #: What it runs.
    module = "meteor_cli.demo.failover"

    def __init__(self, url: str, stream: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", self.module, stream],
            stdin=subprocess.PIPE,  # which is closed when we end, in whatever way
            stdout=subprocess.PIPE,
            text=True,
            # Not on the command line, where everybody could read a password.
            env=os.environ | {"METEOR_URL": url},
            start_new_session=True,  # Ctrl-C is for us: we see to the rest
        )
        self.offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._listen, name="meteor-cli-worker")
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was killed in the middle of it
                self.offsets.put(int(line))

    def next(self) -> int:
        try:
            return self.offsets.get(timeout=_PATIENCE_S)
        except queue.Empty:
            raise TimeoutError(f"A worker did nothing for {_PATIENCE_S:g} seconds.") from None

    def rest(self) -> list[int]:
        found: list[int] = []
        while not self.offsets.empty():
            found.append(self.offsets.get())
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def fail_over(stream: meteor.Stream, url: str, advance: Callable[[int], None]) -> Outcome:
    """Publish to a group of two workers, and kill the one that has the lease."""
    with ExitStack() as stack:
        workers: list[Worker] = []
        for _ in range(2):
            workers.append(Worker(url, stream.name))
            stack.callback(workers[-1].end)
        with stream.publisher() as pub:
            pub.publish(b"order 0").result()
        owner, heir = _who_reads(workers)
        stack.enter_context(_Publishing(stream))
        handled: list[int] = []
        while len(handled) < KILL_AFTER:
            handled.append(owner.next())
            advance(len(handled))
        owner.process.kill()
        killed_at = time.perf_counter()
        taken_over = [heir.next()]
        pause_s = time.perf_counter() - killed_at
        owner.end()
        handled += owner.rest()
        while taken_over[-1] < RECORDS - 1:
            taken_over.append(heir.next())
            advance(taken_over[-1] + 1)
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
    raise TimeoutError(f"No worker came up in {_PATIENCE_S:g} seconds.")


class _Publishing:
    """A thread that publishes at a steady pace, for as long as somebody is there."""

    def __init__(self, stream: meteor.Stream) -> None:
        self._stream = stream
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="meteor-cli-publishing")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _publish(self) -> None:
        with self._stream.publisher() as pub:
            for start in range(1, RECORDS, _STEP):
                stop = min(start + _STEP, RECORDS)
                pub.publish_many([b"order %d" % n for n in range(start, stop)])
                if self._ended.wait(_STEP / _PER_SECOND):
                    return


def _wait_until_confirmed(stream: meteor.Stream) -> int:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        confirmed = stream.groups()[0].confirmed
        if confirmed == RECORDS or time.monotonic() > deadline:
            return confirmed
        time.sleep(0.01)


def _work(stream: str) -> None:
    """What a worker does."""
    end_with_parent()
    with (
        meteor.connect() as m,
        m.stream(stream, create=False).subscriber(group=GROUP, lease_ttl=LEASE_S) as sub,
    ):
        for record in sub:
            print(record.offset, flush=True)  # handled
            sub.confirm(record)


def end_with_parent() -> None:
    """End this process when the one that has started it ends, in whatever way."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, name="meteor-cli-parent", daemon=True).start()


if __name__ == "__main__":
    try:
        _work(sys.argv[1])
    except meteor.MeteorError:
        sys.exit(1)  # the tour was ended, and its server with it; else it misses us, and says so
