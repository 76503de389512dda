"""The takeover steps of the tour: a group's processes handle records, and one is killed."""

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
#: Kill a process once the group's processes have handled this many records.
KILL_AFTER = 1_000
GROUP = "billing"


class Kind(NamedTuple):
    """A kind of group, and its processes."""

    processes: int
    lease_s: float
    #: Seconds of work per record.
    work_s: float


KINDS = {"exclusive": Kind(2, 1.0, 0.0003), "shared": Kind(3, 0.5, 0.001)}


class Handled(NamedTuple):
    """A record that a process has handled."""

    #: Time on the monotonic clock that all processes on a machine share.
    at_ns: int
    offset: int
    #: In a shared group, number of earlier failed deliveries. A consumer's death counts as one.
    failures: int


@dataclass(frozen=True)
class Outcome:
    #: All handled records in time order, and the number that the killed process handled.
    handled: list[Handled]
    before: int
    #: Seconds from the kill until another process handled one of the killed process's records.
    pause_s: float

    @property
    def lost(self) -> int:
        return len(set(range(RECORDS)) - {one.offset for one in self.handled})

    @property
    def twice(self) -> int:
        return len(self.handled) - len({one.offset for one in self.handled})

    @property
    def out_of_order(self) -> int:
        """Number of records that were handled after a later record of the same cart."""
        newest: dict[int, int] = {}
        found = 0
        for offset in dict.fromkeys(one.offset for one in self.handled):
            cart = offset % CARTS
            found += offset < newest.get(cart, -1)
            newest[cart] = max(offset, newest.get(cart, -1))
        return found


def take_over(
    name: str, stream: meteor.Stream, url: str, advance: Callable[[int], None]
) -> Outcome:
    """Publish changes to carts and kill one of the group's processes."""
    with ExitStack() as stack:
        count = KINDS[name].processes
        workers = Worker.start(count, stack, __name__, url, name, stream.name)
        started = "The group's processes had not started"
        wait_until(lambda: all(worker.lines for worker in workers), started)  # each prints "ready"
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
    wait_until(condition, "The group's processes had not finished")


def _work(name: str, stream_name: str) -> None:
    """Print a line when ready, and then a line for each handled record."""
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
