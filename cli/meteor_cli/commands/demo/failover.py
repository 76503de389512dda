"""The fail-over of the tour: two workers of one group, one of which is killed at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import meteor_py as meteor
from meteor_cli.commands.demo.worker import Worker, run_worker, wait_until

RECORDS = 3_000
#: Records that the first worker has handled when it is killed.
KILL_AFTER = 1_000
LEASE_S = 1.0
GROUP = "billing"
_PER_SECOND = 2_000
_STEP = 20


@dataclass(frozen=True)
class Outcome:
    """What became of the records."""

    #: The offsets, as the first and the second worker handled them.
    first: list[int]
    second: list[int]
    #: Seconds from the kill to the second worker's first record.
    pause_s: float

    @property
    def lost(self) -> int:
        return len(set(range(RECORDS)) - {*self.first, *self.second})

    @property
    def twice(self) -> int:
        return len(set(self.first) & set(self.second))


def fail_over(stream: meteor.Stream, url: str, advance: Callable[[int], None]) -> Outcome:
    """Publish to a group of two workers, and kill the one that has the lease."""
    with ExitStack() as stack:
        workers = Worker.start(2, __name__, url, stream.name, stack)
        with stream.publisher() as pub:
            pub.publish(b"order 0").result()
        _wait(lambda: any(worker.lines for worker in workers))
        owner, heir = workers if workers[0].lines else reversed(workers)
        stack.enter_context(_Publishing(stream))

        def handled(worker: Worker) -> int:
            """How many it has; tell of the offset that was reached."""
            advance(_last(worker) + 1)
            return len(worker.lines)

        _wait(lambda: handled(owner) >= KILL_AFTER)
        owner.process.kill()
        killed_at = time.perf_counter()
        _wait(lambda: handled(heir) > 0)
        pause_s = time.perf_counter() - killed_at
        owner.end()
        _wait(lambda: handled(heir) > 0 and _last(heir) == RECORDS - 1)
        _wait(lambda: stream.groups()[0].confirmed == RECORDS)
        return Outcome(_offsets(owner), _offsets(heir), pause_s)


def _offsets(worker: Worker) -> list[int]:
    return [int(offset) for (offset,) in worker.lines]


def _last(worker: Worker) -> int:
    return int(worker.lines[-1][0]) if worker.lines else -1


def _wait(condition: Callable[[], bool]) -> None:
    wait_until(condition, "The workers are not done")


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


def _work(stream: str) -> None:
    """What a worker does."""
    with (
        meteor.connect() as m,
        m.stream(stream, create=False).subscriber(group=GROUP, lease_ttl=LEASE_S) as sub,
    ):
        for record in sub:
            print(record.offset, flush=True)  # handled
            sub.confirm(record)


if __name__ == "__main__":
    run_worker(_work)
