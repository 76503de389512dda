"""The take-overs of the tour: processes of one group handle records, and one is killed at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import meteor_py as meteor
from meteor_cli.commands.demo.worker import Worker, run_worker, wait_until

RECORDS = 3_000
CARTS = 60
#: Records that have been handled when one process is killed.
KILL_AFTER = 1_000
GROUP = "billing"


class Kind(NamedTuple):
    """A kind of group, and its processes."""

    processes: int
    lease_s: float
    #: Seconds that one works on a record.
    work_s: float


KINDS = {"exclusive": Kind(2, 1.0, 0.0003), "shared": Kind(3, 0.5, 0.001)}


class Handled(NamedTuple):
    """A record that was handled: when, by a clock that all processes share, and which."""

    at_ns: int
    offset: int
    #: Deliveries of it that had failed before, of which a death is one; only in a shared group.
    failures: int


@dataclass(frozen=True)
class Outcome:
    """What became of the records."""

    #: As they were handled, in the order of time; and how many of them by the killed process.
    handled: list[Handled]
    before: int
    #: Seconds from the kill until another went on with what the dead one had.
    pause_s: float

    @property
    def lost(self) -> int:
        return len(set(range(RECORDS)) - {one.offset for one in self.handled})

    @property
    def twice(self) -> int:
        return len(self.handled) - len({one.offset for one in self.handled})

    @property
    def out_of_order(self) -> int:
        """Records that were handled when a later one of their cart already had been."""
        newest: dict[int, int] = {}
        found = 0
        for offset in dict.fromkeys(one.offset for one in self.handled):
            cart = offset % CARTS
            found += offset < newest.get(cart, -1)
            newest[cart] = offset
        return found


def take_over(
    name: str, stream: meteor.Stream, url: str, advance: Callable[[int], None]
) -> Outcome:
    """Publish changes of carts to a group of this kind, and kill one of those at work."""
    with ExitStack() as stack:
        count = KINDS[name].processes
        workers = Worker.start(count, stack, __name__, url, name, stream.name)
        _wait(lambda: all(worker.lines for worker in workers))  # all are there
        with stream.publisher() as pub:
            carts = [b"cart-%d" % (n % CARTS) for n in range(RECORDS)]
            pub.publish_many([b"change %d" % n for n in range(RECORDS)], keys=carts)

        def handled() -> int:
            number = sum(len(worker.lines) - 1 for worker in workers)
            advance(min(number, RECORDS))
            return number

        _wait(lambda: handled() >= KILL_AFTER)
        victim = max(workers, key=lambda worker: len(worker.lines))
        killed_ns = time.monotonic_ns()
        victim.end()
        _wait(lambda: handled() >= RECORDS and stream.group(GROUP).confirmed == RECORDS)
    found = sorted(one for worker in workers for one in _handled(worker))
    others = [one for worker in workers if worker is not victim for one in _handled(worker)]
    inherited = [one for one in others if one.failures or name == "exclusive"]
    after = [one.at_ns - killed_ns for one in inherited if one.at_ns > killed_ns]
    return Outcome(found, len(victim.lines) - 1, min(after, default=0) / 1e9)


def _handled(worker: Worker) -> list[Handled]:
    return [Handled(*map(int, line)) for line in worker.lines[1:]]


def _wait(condition: Callable[[], bool]) -> None:
    wait_until(condition, "The processes of the group are not done")


def _work(name: str, stream_name: str) -> None:
    """What a process does: it tells that it is there, and then of each record."""
    kind = KINDS[name]

    def handle(offset: int, failures: int = 0) -> None:
        threading.Event().wait(kind.work_s)
        print(time.monotonic_ns(), offset, failures, flush=True)

    with meteor.connect() as m:
        stream = m.stream(stream_name, create=False)
        if name == "exclusive":
            with stream.subscriber(group=GROUP, lease_ttl=kind.lease_s) as sub:
                print("ready", flush=True)
                for record in sub:
                    handle(record.offset)
                    sub.confirm(record)
            return
        with stream.shared_subscriber(GROUP, lease_ttl=kind.lease_s) as shared:
            print("ready", flush=True)
            for one in shared:
                handle(one.offset, one.failures)
                one.ack()


if __name__ == "__main__":
    run_worker(_work)
