"""The shopping carts of the tour: three consumers share them out, and one is killed at work."""

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
CONSUMERS = 3
#: Records that all of them have handled when one is killed.
KILL_AFTER = 1_000
LEASE_S = 0.5
GROUP = "billing"
#: Seconds that a consumer works on a record.
_WORK_S = 0.001


class Handled(NamedTuple):
    """A record that was handled: when, by a clock that all processes share, and which."""

    at_ns: int
    offset: int
    #: Deliveries of it that had failed before, of which a death is one.
    failures: int


@dataclass(frozen=True)
class Outcome:
    """What became of the records."""

    #: As the consumers handled them, in the order of time.
    handled: list[Handled]
    #: Seconds from the kill until another consumer went on with a cart of the dead one.
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
        seen: set[int] = set()
        found = 0
        for one in self.handled:
            if one.offset not in seen:
                cart = one.offset % CARTS
                found += one.offset < newest.get(cart, -1)
                newest[cart] = one.offset
                seen.add(one.offset)
        return found


class Consumer(Worker):
    """A process that handles records of carts, and tells of each."""

    @property
    def handled(self) -> list[Handled]:
        return [Handled(*map(int, line)) for line in self.lines]


def share(stream: meteor.Stream, url: str, advance: Callable[[int], None]) -> Outcome:
    """Publish changes of carts, share them out to three consumers, and kill one of them."""
    with ExitStack() as stack:
        consumers = Consumer.start(CONSUMERS, __name__, url, stream.name, stack)
        _wait(lambda: sum(group.consumers or 0 for group in stream.groups()) == CONSUMERS)
        with stream.publisher() as pub:
            carts = [b"cart-%d" % (n % CARTS) for n in range(RECORDS)]
            pub.publish_many([b"change %d" % n for n in range(RECORDS)], keys=carts)

        def count() -> int:
            number = sum(len(consumer.lines) for consumer in consumers)
            advance(min(number, RECORDS))
            return number

        _wait(lambda: count() >= KILL_AFTER)
        killed_ns = time.monotonic_ns()
        consumers[0].end()
        group = stream.shared_group(GROUP)
        _wait(lambda: count() >= RECORDS and group.confirmed == RECORDS)
    handled = sorted(one for consumer in consumers for one in consumer.handled)
    inherited = [one.at_ns for one in handled if one.failures and one.at_ns > killed_ns]
    pause_s = (inherited[0] - killed_ns) / 1e9 if inherited else 0.0
    return Outcome(handled, pause_s)


def _wait(condition: Callable[[], bool]) -> None:
    wait_until(condition, "The consumers are not done")


def _work(stream: str) -> None:
    """What a consumer does."""
    with (
        meteor.connect() as m,
        m.stream(stream, create=False).shared_subscriber(GROUP, lease_ttl=LEASE_S) as sub,
    ):
        for record in sub:
            threading.Event().wait(_WORK_S)
            print(time.monotonic_ns(), record.offset, record.failures, flush=True)  # handled
            record.ack()


if __name__ == "__main__":
    run_worker(_work)
