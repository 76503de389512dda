"""A fleet of consumers in other processes, with kills, pauses and a final check."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import meteor_py as meteor
from meteor_py.subscribe.dead_letters import OFFSET_HEADER
from tests.support.group_members import Process
from tests.support.proxy import Proxy
from tests.support.servers import plain_client
from tests.support.shared_worker import HISTORY, POISON, READY, STOP
from tests.support.sharing import GROUP, STREAM
from tests.support.waiting import eventually

LETTERS = "letters"
#: Seconds without any progress after which a group counts as stuck.
STUCK_S = 60.0


class Fleet:
    """Consumer processes for a stream of keyed, numbered records. Dead ones are restarted."""

    def __init__(
        self,
        url: str,
        rng: random.Random,
        *,
        consumers: int = 4,
        keys: int = 200,
        prefetch: int = 256,
        lease_ttl: float = 1.0,
        max_deliveries: int = 5,
        trouble: float = 0.002,
        run: bool = False,
        visits: bool = False,
        lossy: bool = False,
    ) -> None:
        """Start the consumers.

        Args:
            trouble: The fraction of records that a consumer releases; it rejects half as many.
            run: The consumers call ``run()`` instead of ``poll()``.
            visits: The consumers leave and join again after a few polls.
            lossy: Replies to the consumers are lost at random, and half of the consumers are
                sometimes cut off, for up to 1.5 lease times.
        """
        self._stack = ExitStack()
        self.rng = rng
        self._options = {"url": url, "prefetch": prefetch, "trouble": trouble, "run": run}
        self._options |= {"seed": rng.randrange(1 << 32), "visits": visits}
        self._proxies: list[Proxy] = []
        if lossy:
            host, port = url.removeprefix("redis://").partition("/")[0].split(":")
            self._proxies = [self._stack.enter_context(Proxy(host, int(port))) for _ in range(2)]
            for proxy in self._proxies:
                proxy.chaos(random.Random(rng.randrange(1 << 32)), 0.002)
        self._stalled: dict[int, float] = {}  # proxies, and when to cut them
        self.plain: Any = self._stack.enter_context(plain_client(url))
        self.client = self._stack.enter_context(meteor.connect(url))
        self.stream = self.client.stream(STREAM, ordering_key="key", capacity=10_000_000)
        self.client.stream(LETTERS, create=True)
        self.stream.shared_subscriber(
            GROUP, lease_ttl=lease_ttl, max_deliveries=max_deliveries, dead_letter=LETTERS
        ).close()
        self.shared = self.stream.shared_group(GROUP)
        self.lease_s = lease_ttl
        self.key_of: list[bytes] = []
        self._names = [b"g%d" % number for number in range(keys)]
        self._publisher = self._stack.enter_context(self.stream.publisher())
        self._members = [self._start(number) for number in range(consumers)]
        for member in self._members:
            assert member.read() == READY
        self.done: Counter[str] = Counter()
        self._paused: dict[int, float] = {}  # members, and when to resume them
        self._next: list[Callable[[int], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self._members:
            member.close()
        self._stack.close()

    def _start(self, number: int) -> Process:
        url = self._options["url"]
        if self._proxies:
            url = self._proxies[number % len(self._proxies)].url
        options = self._options | {"meteor_url": url}
        return Process("-m", "tests.support.shared_worker", json.dumps(options))

    def publish(self, records: int, *, poison: Collection[int] = ()) -> None:
        """Publish in frames of various sizes. Records at the ``poison`` offsets kill consumers."""
        left = records
        while left:
            size = min(left, self.rng.choice([1, 7, 100, 1_000, 4_096]))
            keys = [self.rng.choice(self._names) for _ in range(size)]
            values = [b"%d" % (len(self.key_of) + number) for number in range(size)]
            for offset in poison:
                if 0 <= offset - len(self.key_of) < size:
                    values[offset - len(self.key_of)] = POISON
            self._publisher.publish_many(values, keys=keys)
            self.key_of += keys
            left -= size
        self._publisher.flush()

    # -- faults --------------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        self._members[number].close()
        self._paused.pop(number, None)
        self._members[number] = self._start(number)
        self.done["killed"] += 1

    def restart_dead(self) -> None:
        """Restart dead consumers, like a supervisor."""
        for number, member in enumerate(self._members):
            if member._process.poll() is not None:
                self.kill(number)

    def trouble(self) -> None:
        """Resume paused consumers that are due, restart dead ones, and kill or pause one.

        If the fleet is lossy, sometimes cut off half of the consumers too.
        """
        for number, until in list(self._paused.items()):
            if time.monotonic() > until:
                self._members[number].resume()
                del self._paused[number]
        self._cut_off()
        self.restart_dead()
        number = self.rng.randrange(len(self._members))
        if number in self._paused:
            return
        if not self._next:  # in random order, but both faults occur
            self._next = self.rng.sample([self.kill, self._pause] * 2, 4)
        self._next.pop()(number)

    def _pause(self, number: int) -> None:
        try:
            self._members[number].pause()
        except (FileNotFoundError, ProcessLookupError):
            return  # a poison record has killed it
        long = self.lease_s * self.rng.choice([0.3, 1.5, 2.5])
        self._paused[number] = time.monotonic() + long
        self.done["paused"] += 1

    def _cut_off(self) -> None:
        """Now and then, hold back replies to half of the consumers, then cut their connections."""
        for number, until in list(self._stalled.items()):
            if time.monotonic() > until:
                self._proxies[number].cut()
                self._proxies[number].resume()
                del self._stalled[number]
        if self._proxies and not self._stalled and self.rng.random() < 0.05:
            number = self.rng.randrange(len(self._proxies))
            self._proxies[number].stall("replies")
            self._stalled[number] = time.monotonic() + self.lease_s * self.rng.choice([0.5, 1.5])
            self.done["cut off"] += 1

    @contextmanager
    def all_awake(self) -> Iterator[None]:
        for number in list(self._paused):
            self._members[number].resume()
        self._paused.clear()
        for number in list(self._stalled):
            self._proxies[number].resume()
        self._stalled.clear()
        yield

    def drain(self, *, every_s: float | None = None) -> None:
        """Wait until all records are settled, causing a fault about every ``every_s`` seconds."""
        end = self.stream.end().offset
        seen, seen_at, next_at = -1, time.monotonic(), time.monotonic()

        def finished() -> bool:
            nonlocal seen, seen_at, next_at
            state = self.shared.describe()
            if state.acked + state.dead != seen:
                seen, seen_at = state.acked + state.dead, time.monotonic()
            assert time.monotonic() - seen_at < STUCK_S, f"stuck at {state}"
            if every_s is None:
                self.restart_dead()
            elif time.monotonic() > next_at:
                self.trouble()
                next_at = time.monotonic() + self.rng.uniform(0.5, 1.5) * every_s
            return state.confirmed == end and not state.dead_letters_pending

        eventually(finished, 900, "the group did not settle all records in time")
        with self.all_awake():
            self.plain.set(STOP, 1)

    # -- the final check -----------------------------------------------------------------------

    def letters(self) -> list[int]:
        found: list[int] = []
        for batch in self.client.stream(LETTERS, create=False).read():
            found += [int((record.headers or {})[OFFSET_HEADER]) for record in batch]
        return sorted(found)

    def check(self) -> None:
        state = self.shared.describe()
        letters, total = self.letters(), len(self.key_of)
        assert state.confirmed == self.stream.end().offset == total
        assert len(set(letters)) == len(letters) == state.dead, (
            "dead letters are missing or repeated"
        )
        assert state.acked + state.dead == total, "records were settled twice or not at all"
        assert state.lost == state.purged == state.waiting == 0
        assert self.shared.fsck() == []
        history = [int(offset) for offset in self.plain.lrange(HISTORY, 0, -1)]
        assert {*history, *letters} == set(range(total)), (
            "records were neither processed nor moved to the dead letters"
        )
        last: dict[bytes, int] = {}
        dead = {*letters}  # a paused consumer that was fenced may process a dead record late
        for offset in dict.fromkeys(history):  # in the order in which each was first processed
            if offset in dead:
                continue
            key = self.key_of[offset]
            assert offset > last.get(key, -1), f"{offset} was processed after {last[key]}"
            last[key] = offset
        print(
            f"{total} records, {len(history) - len(set(history))} repeated, {len(letters)} dead "
            f"letters, {state.returned} returned, {state.reaped} reaped, {dict(self.done)}"
        )
