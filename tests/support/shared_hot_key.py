"""A measurement of other keys' throughput while a hot key is held or being processed."""

from __future__ import annotations

import threading
import time
from typing import Literal

import meteor_py as meteor
from tests.support.sharing import Queue, discard

HOT, SHARE = b"hot", 10  # one record in SHARE has another key
Case = Literal["held", "worked"]


def others_per_second(url: str, case: Case, others: int, *, consumers: int = 3) -> float:
    """Process ``others`` records with other keys; return how many are processed per second."""
    with Queue(url, settings={"capacity": 10_000_000}, max_per_key=32) as queue:
        names = [b"k%d" % (number % 100) for number in range(others)]
        keys = [g for name in names for g in ([HOT] * (SHARE - 1) + [name])]
        with queue.stream.publisher() as publisher:
            publisher.publish_many([b"v" * 100] * len(keys), keys=keys)
        owner = queue.consumer(prefetch=1)
        if case == "held":
            assert owner.poll(5)[0].ordering_key == HOT
        left = [others]
        done, lock = threading.Event(), threading.Lock()

        def work(sub: meteor.SharedSubscriber) -> None:
            while not done.is_set():
                records = sub.poll(0.2)
                for record in records:
                    record.ack()
                with lock:
                    left[0] -= sum(record.ordering_key != HOT for record in records)
                    if left[0] <= 0:
                        done.set()

        subscribers = queue.consumers(consumers, prefetch=256)
        threads = [threading.Thread(target=work, args=(sub,)) for sub in subscribers]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        assert done.wait(120), f"{left} records with other keys are missing"
        took = time.perf_counter() - started
        for thread in threads:
            thread.join()
        for sub in subscribers:
            sub.flush()
        if case == "held":
            hot = next(state for state in queue.shared.keys() if state.key == HOT)
            assert (hot.acquired, hot.owner) == (1, owner.member), "the hot key is no longer held"
        discard(owner)
        assert left == [0]
        return others / took
