"""A key with most of the traffic, whose owner sleeps on it:
``python -m tests.support.shared_hot_key``.

Prints the rate of the other keys while it sleeps, against that when it works, and against that
when there is no such key.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Literal

import meteor_py as meteor
from tests.support.servers import Server, binaries
from tests.support.sharing import Queue, discard

HOT, SHARE = b"hot", 10  # one in so many records is of another key
Case = Literal["held", "worked", "absent"]


def others_per_second(url: str, case: Case, others: int, *, consumers: int = 3) -> float:
    """Process ``others`` records of other keys, and tell how fast that was."""
    with Queue(url, settings={"capacity": 10_000_000}, max_per_key=32) as queue:
        names = [b"k%d" % (number % 100) for number in range(others)]
        keys = [g for name in names for g in ([HOT] * (SHARE - 1) + [name])]
        keys = names if case == "absent" else keys
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
        assert done.wait(120), f"{left} records of other keys do not come"
        took = time.perf_counter() - started
        for thread in threads:
            thread.join()
        for sub in subscribers:
            sub.flush()
        if case == "held":
            hot = next(state for state in queue.shared.keys() if state.key == HOT)
            assert (hot.acquired, hot.owner) == (1, owner.name), "the hot key is still held"
        discard(owner)
        assert left == [0]
        return others / took


def main() -> None:
    others = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
    rates: dict[str, list[float]] = {}
    for _ in range(3):
        for case in ("absent", "worked", "held"):
            with Server(binaries()["valkey"]) as server:
                rates.setdefault(case, []).append(others_per_second(server.url, case, others))
    for case, found in rates.items():
        print(f"{case:7} {max(found):10,.0f} records/s of other keys")
    best = {case: max(found) for case, found in rates.items()}
    print(f"held / worked {best['held'] / best['worked']:.2f}")
    print(f"held / absent {best['held'] / best['absent']:.2f}")


if __name__ == "__main__":
    main()
