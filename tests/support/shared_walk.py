"""A random walk over a shared group, compared with a model after each step.

Consumers have no threads: the walk chooses every event, so a seed repeats the whole walk. The
model knows the fate of every record. After every step, the walk compares the state in Redis with
the model, and runs fsck.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
import redis

import meteor_py as meteor
from meteor_py.redis.scripts import SHARED_MAINTAIN, SHARED_STEP
from meteor_py.shared.admin import SharedGroup, open_shared
from meteor_py.shared.deliveries import Deliveries
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.group_state import Member, read_batch
from meteor_py.shared.protocol import Maintenance, SharedProtocol, StepReply, StepRequest
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.subscribe.dead_letters import OFFSET_HEADER, bury
from tests.support.shared_model import Model
from tests.support.sharing import make_due

STREAM, GROUP, LETTERS = "orders", "billing", "letters"

#: Steps without progress after which a group counts as stuck. Several such steps are normal,
#: because each step reports only a few dead letters.
IDLE_STEPS = 30
#: Parts of the state that a consumer changes when it joins.
_OF_CONSUMERS = (b"members", b"leases", b"dying", b"idle", b"meta", b"state")


#: Limits in the scripts and their smaller replacements, so that a short walk reaches each limit.
_SMALL = {
    b"local BATCH = 32 ": b"local BATCH = 3 ",
    b"local LOADS = 400 ": b"local LOADS = 6 ",
    b"local NEAR, CHUNK = 128, 128": b"local NEAR, CHUNK = 4, 3",
    b"local QUANTUM, ROUND = 16, 64": b"local QUANTUM, ROUND = 2, 3",
    # Not smaller than 8, because one exchange takes back at most 64 portions.
    b"local RETURN = 64": b"local RETURN = 8",
    b"local SCAN = 512": b"local SCAN = 9",
}


@contextmanager
def changed_scripts(changes: dict[bytes, bytes]) -> Iterator[None]:
    """Replace parts of the step and maintenance scripts during the block."""
    with pytest.MonkeyPatch.context() as patch:
        left = {*changes}
        for script in (SHARED_STEP, SHARED_MAINTAIN):
            source = script.source
            for old, new in changes.items():
                if old in source:
                    left.discard(old)
                source = source.replace(old, new)
            patch.setattr(script, "source", source)
            patch.setattr(script, "sha", hashlib.sha1(source, usedforsecurity=False).hexdigest())
        assert not left, f"the scripts do not contain {left}"
        yield


def small_scripts() -> AbstractContextManager[None]:
    return changed_scripts(_SMALL)


class Hand:
    """One consumer, controlled by the walk."""

    def __init__(self, shared: SharedGroup, settings: Any, name: str) -> None:
        ordering_rule = shared.stream.config.ordering_rule
        assert ordering_rule is not None
        self.name = name
        self.deliveries = Deliveries(shared._protocol, settings, ordering_rule, None, name)
        self.frames = FrameCache(shared.stream._handle)
        self.deliveries.exchange()
        self.deliveries.dead_letters.clear()  # the server assigns them again
        self.held: dict[int, SharedRecord] = {}
        self.said: list[tuple[str, int, dict[str, Any]]] = []  # settled since the last exchange

    @property
    def id(self) -> str:
        return self.deliveries._consumer

    def close(self) -> None:
        self.deliveries.close()
        self.frames.close()


class Walk(Model):
    """A random walk. ``run()`` takes random steps, then drains the group."""

    def __init__(self, client: meteor.Client, plain: redis.Redis, seed: object) -> None:
        self.rng = rng = random.Random(str(seed))
        self.client, self.plain = client, plain
        super().__init__(
            tries=rng.choice([0, 2, 2, 3, 5]),
            parks=rng.random() < 0.4,
            letters=rng.random() < 0.6,
        )
        self.cap = rng.choice([1, 2, 5, 32])
        self.names = [b"g%d" % n for n in range(rng.choice([1, 3, 12, 60]))]
        self.room = rng.choice([20, 300, 1_000_000])
        capacity = rng.choice([60, 400, 10_000_000, 10_000_000])
        self.stream = client.stream(STREAM, ordering_key="key", capacity=capacity)
        if self.letters:
            client.stream(LETTERS, create=True)
        asked: dict[str, Any] = {
            "max_per_key": self.cap,
            "lease_ttl": 600.0,
            "max_deliveries": self.tries,
            "dead_letter": LETTERS if self.letters else None,
            "on_poison": "park" if self.parks else "skip",
        }
        self.shared, self.settings = open_shared(
            self.stream, self.stream._handle, GROUP, asked, meteor.InitialOffset.EARLIEST
        )
        plain.hset(self.shared._protocol.key("meta"), "max_waiting", self.room)
        self.shared._protocol.step = self.step  # type: ignore[method-assign]
        self.shared._protocol.maintain = self.maintain  # type: ignore[method-assign]
        self.hand: Hand | None = None  # the consumer in the current exchange
        self.told = True  # whether the model has applied that consumer's settlements
        self.left = ""  # the consumer that last called maintain()
        self.publisher = self.stream.publisher()
        self.buried: list[int] = []
        self.next = 0
        self.confirmed = 0
        self.hands: list[Hand] = []
        self.ghosts: list[Hand] = []  # dead consumers that are not detected yet
        self.done: list[str] = []

    def close(self) -> None:
        self.publisher.close()
        for hand in self.hands + self.ghosts:
            hand.close()

    # -- the walk ------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        actions: list[tuple[int, Callable[[], object]]] = [
            (10, self.publish),
            (30, self.claim),
            (25, self.settle_some),
            (6, self.settle_all),
            (2, self.join),
            (2, self.leave),
            (3, self.crash),
            (2, self.expire),
            (2, self.purge),
            (2, self.resume),
            (2, self.come_due),
            (1, self.look_ahead),
            (3, self.publish_letters),
        ]
        weights = [weight for weight, _ in actions]
        self.publish()
        self.join()
        for _ in range(steps):
            ((_, action),) = self.rng.choices(actions, weights)
            self.done.append(action.__name__)
            action()
            self.check()
        self.drain()

    def publish(self) -> None:
        size = self.rng.choice([1, 1, 2, 7, 20, 20, 100])
        if self.rng.random() < 0.02:
            size = 4096
        skew = self.rng.choice([0.0, 0.8])
        keys = [
            self.names[0] if self.rng.random() < skew else self.rng.choice(self.names)
            for _ in range(size)
        ]
        if size == 1:
            first = self.publisher.publish(b"v", key=keys[0]).result(20)
        elif size > 20:
            values = pa.array([b"v"] * size, pa.binary())
            first = self.publisher.publish_many(values, keys=pa.array(keys)).result(20)
        else:
            first = self.publisher.publish_many([b"v"] * size, keys=keys).result(20)
        self.key_of |= {first + n: key for n, key in enumerate(keys)}

    def join(self) -> None:
        if len(self.hands) < 5:
            hand = Hand(self.shared, self.settings, f"hand-{len(self.done)}")
            self.hands.append(hand)
            self.detect_the_dead()

    def some_hand(self) -> Hand:
        if not self.hands:
            self.join()
        return self.rng.choice(self.hands)

    def claim(self) -> None:
        self.exchange(self.some_hand(), self.rng.choice([1, 1, 3, 16, 64, 300]))

    def settle_some(self, hand: Hand | None = None, share: float | None = None) -> None:
        hand = hand or self.some_hand()
        share = share or self.rng.choice([0.1, 0.5, 1.0])
        offsets = [offset for offset in hand.held if self.rng.random() < share]
        if self.rng.random() < 0.5:
            self.rng.shuffle(offsets)
        for offset in offsets:
            if offset in hand.held:
                self.settle(hand, hand.held[offset])

    def settle(self, hand: Hand, record: SharedRecord) -> None:
        """Settle a record locally; the model learns of it when the server does."""
        what = self.rng.random()
        if what < 0.75:
            record.ack()
            hand.said.append(("ack", record.offset, {}))
        elif what < 0.83:
            delay = self.rng.choice([0.0, 0.0, 500.0])
            record.release(delay)
            hand.said.append(("rewind", record.offset, {"delay": delay}))
        elif what < 0.93:
            record.release(only_this=True)
            hand.said.append(("release", record.offset, {}))
        else:
            record.reject("7")
            hand.said.append(("reject", record.offset, {}))
        hand.held = {o: r for o, r in hand.held.items() if r.standing is Standing.HELD}

    def settle_all(self) -> None:
        hand = self.some_hand()
        for record in list(hand.held.values()):
            record.ack()
            hand.said.append(("ack", record.offset, {}))
        hand.held.clear()
        self.exchange(hand, 0)

    def leave(self) -> None:
        hand = self.some_hand()
        # Take back all records of dead consumers first: the model does not know that the scripts
        # take them back in portions.
        self.exchange(hand, 0)
        self.exchange(hand, 0, leave=True)
        self.hands.remove(hand)
        hand.close()

    def crash(self) -> None:
        """Let a consumer die; its death is detected when its lease expires."""
        hand = self.some_hand()
        self.hands.remove(hand)
        hand.said.clear()
        hand.close()
        self.ghosts.append(hand)
        self.make_due("leases", hand.id)

    def make_due(self, part: str, *members: Any) -> None:
        make_due(self.client._connector, self.shared._protocol, part, *members)

    def expire(self) -> None:
        """Let a live consumer's lease expire: its later settlements must not count."""
        if len(self.hands) < 2:
            return
        late, other = self.rng.sample(self.hands, 2)
        while self.ghosts:
            self.exchange(other, 0)
        self.make_due("leases", late.id)
        self.exchange(other, self.rng.choice([0, 16]))
        assert late.id not in self.consumers()
        self.settle_some(late)
        said = {offset for _, offset, _ in late.said}
        before = self.state()
        late.said.clear()
        late.deliveries.exchange()
        late.held.clear()
        refused = late.deliveries.take_refused()
        assert set(refused) == said, "the refused settlements are not exactly the late ones"
        after = self.state()
        for found in (before, after):  # `late` rejoins and may get dead letters
            for part in _OF_CONSUMERS:
                found.pop(part, None)
        assert after == before, "late settlements changed the state"

    def purge(self) -> None:
        key = self.rng.choice(self.names)
        limit = self.rng.choice([None, 1, 5])
        looked, kept = self.shared.describe().scanned, self.stream.bounds()[0]
        mark = self.marks.get(key, 0)
        gone = [o for o in self.waiting(key) if o < looked or o >= max(kept, mark)][:limit]
        assert self.shared.purge(key, limit) == len(gone)
        for offset in gone:
            if offset < looked:
                self.close_record(offset, "purged")
        if limit is None or len(gone) < limit:
            self.marks[key] = len(self.key_of)
        elif gone[-1] >= looked:
            self.marks[key] = max(mark, gone[-1] + 1)
        if self.stopped.get(key) == "d" and not self.waiting_seen(key):
            del self.stopped[key]

    def resume(self) -> None:
        key = self.rng.choice(list(self.stopped) or self.names)
        waiting = self.waiting_seen(key)
        assert self.shared.resume(key) == (key in self.stopped)
        if self.stopped.pop(key, None) and waiting:
            self.failures.pop(waiting[0], None)

    def come_due(self) -> None:
        due = [key for key, how in self.stopped.items() if how == "d"]
        self.make_due("delayed", *due)
        self.exchange(self.some_hand(), 0)
        for key in due:
            if self.stopped[key] == "d":
                del self.stopped[key]

    def look_ahead(self) -> None:
        looked, kept = self.shared.describe().scanned, self.stream.bounds()[0]
        states = self.shared.keys(look_ahead=True)
        open_now = Counter(
            self.key_of[o]
            for o in self.open()
            if o not in self.dying
            and (o < looked or o >= max(kept, self.marks.get(self.key_of[o], 0)))
        )
        assert {state.key: state.count for state in states if state.count} == dict(open_now)

    def publish_letters(self) -> None:
        """Assign the dead letters again, in case their consumer has died, and bury them."""
        self.make_due("dying", *self.letters_in_state())
        self.exchange(self.some_hand(), 0, bury_letters=True)

    def drain(self) -> None:
        """Let one remaining consumer settle everything; steps must make progress."""
        for hand in self.hands[1:]:
            self.exchange(hand, 0)
            self.exchange(hand, 0, leave=True)
            hand.close()
        del self.hands[1:]
        hand = self.some_hand()
        idle = 0
        while left := len(self.open()):
            self.done.append("drain")
            for key in list(self.stopped):
                self.shared.resume(key)
                waiting = self.waiting_seen(key)
                del self.stopped[key]
                if waiting:
                    self.failures.pop(waiting[0], None)
            for record in list(hand.held.values()):
                record.ack()
                hand.said.append(("ack", record.offset, {}))
            hand.held.clear()
            self.publish_letters()
            self.exchange(hand, 500)
            idle = 0 if len(self.open()) < left else idle + 1
            assert idle < IDLE_STEPS, f"no progress; still open: {sorted(self.open())[:9]}"
        self.check()
        assert self.shared.confirmed == len(self.key_of) == self.stream.end().offset
        self.check_letters()

    # -- one exchange --------------------------------------------------------------------------

    def exchange(
        self, hand: Hand, want: int, *, leave: bool = False, bury_letters: bool = False
    ) -> StepReply:
        self.hand, self.told = hand, False
        reply = hand.deliveries.exchange(want, leave=leave)
        self.tell_all()
        if leave:
            self.give_back(self.left, died=False)
        self.hand = None
        self.detect_the_dead()
        letters = list(hand.deliveries.dead_letters)
        for letter in letters:
            assert letter.offset in self.dying
            assert letter.ordering_key == self.key_of[letter.offset]
            assert letter.failures == self.failures[letter.offset]
        if bury_letters:
            self.bury(hand, letters)
        hand.deliveries.dead_letters.clear()
        found, lost, unreadable = hand.frames.fetch(sorted(hand.deliveries.holdings.granted))
        assert not unreadable
        for record in hand.deliveries.receive(found, lost):
            assert record.ordering_key == self.key_of[record.offset]
            hand.held[record.offset] = record
        if lost:
            first = self.stream.bounds()[0]
            assert max(lost) < first, "a record that the ring still has was reported as lost"
            hand.said += [("gone", offset, {}) for offset in lost]
            self.exchange(hand, 0)
        while hand.deliveries.take_lost():
            pass
        return reply

    def tell_all(self) -> None:
        """Apply the consumer's settlements to the model.

        A step sends settlements before it claims records.
        """
        hand = self.hand
        if hand is None or self.told:
            return
        self.told = True
        said, hand.said = hand.said, []
        for one in sorted(said, key=lambda one: one[0] != "ack"):  # acks are sent first
            self.tell(hand.id or self.left, *one)

    def step(self, connection: Any, consumer: str, request: StepRequest) -> StepReply:
        """Take a step (sometimes twice, as after a lost reply) and compare it with the model."""
        call = partial(SharedProtocol.step, self.shared._protocol, connection, consumer, request)
        reply = call()
        if self.rng.random() < 0.1:
            again = call()
            assert (again.batches, again.report) == (reply.batches, reply.report)
        hand = self.hand
        if hand is None or consumer != hand.id:
            return reply
        assert not reply.report.refused, "settlements of held records were refused"
        if request.want:
            self.tell_all()
        self.check_scanned(reply)
        self.check_grants(hand, reply)
        return reply

    def maintain(self, connection: Any, consumer: str, *, leave: bool = False) -> Maintenance:
        self.tell_all()
        self.left = consumer
        done = SharedProtocol.maintain(self.shared._protocol, connection, consumer, leave=leave)
        self.detect_the_dead()
        return done

    def detect_the_dead(self) -> None:
        there = self.consumers()
        for consumer in {*self.holder.values()} - there:
            if self.hand is None or consumer not in (self.hand.id, self.left):
                self.give_back(consumer, died=True)
        self.ghosts = [ghost for ghost in self.ghosts if ghost.id in there]

    def check_scanned(self, reply: StepReply) -> None:
        first = self.stream.bounds()[0]
        for low, high in reply.report.lost:
            assert self.next <= low <= high < first, (
                "a record that the ring still has was reported as lost"
            )
            for offset in range(low, high + 1):
                self.close_record(offset, "lost")
        for offset in range(self.next, reply.next):
            if offset < self.marks.get(self.key_of[offset], 0) and offset not in self.fate:
                self.close_record(offset, "purged")
        self.next = reply.next

    def check_grants(self, hand: Hand, reply: StepReply) -> None:
        last_tries = 0
        for offset in (o for offsets in reply.batches.values() for o in offsets):
            key = self.key_of[offset]
            assert offset not in self.fate
            assert offset not in self.holder
            assert key not in self.stopped, f"{key!r} is stopped"
            for other in self.by_key[key]:
                if other >= offset:
                    break
                if other in self.fate or other in self.dying:
                    continue
                owner = self.holder.get(other)
                assert owner == hand.id, f"{hand.name} got {offset} while {other} was open"
            later = [o for o in self.holder if self.key_of[o] == key]
            assert {self.holder[o] for o in later} <= {hand.id}, "a key has several owners"
            assert len(later) < self.cap
            assert not later or not self.is_suspect(offset), (
                "a suspect was granted with other records"
            )
            assert reply.report.failures.get(offset, 0) == self.failures[offset]
            if self.is_suspect(offset) and self.tries:
                last_tries += self.failures[offset] >= self.tries - 1
            self.holder[offset] = hand.id
        if last_tries:
            held = [o for o, c in self.holder.items() if c == hand.id]
            assert len(held) == 1, "a last try was not delivered alone"

    def bury(self, hand: Hand, letters: list[Any]) -> None:
        for letter in letters:
            found = hand.frames.fetch([letter.offset]).found
            if letter.offset in found:
                target = self.client.stream(LETTERS, create=False)
                record = found[letter.offset]
                bury(
                    target._handle,
                    self.stream._handle,
                    GROUP,
                    record,
                    epoch=1,
                    reason="x",
                    tries=letter.failures,
                )
                self.buried.append(letter.offset)
                if self.rng.random() < 0.2:
                    # As if the consumer had died before its report. Another consumer then buries
                    # the letter again.
                    continue
            hand.deliveries.dead_letter_settled(letter, "")
            self.dying.discard(letter.offset)
            self.close_record(letter.offset, "dead" if letter.offset in found else "lost")
        self.exchange(hand, 0)

    # -- checks --------------------------------------------------------------------------------

    def waiting_seen(self, key: bytes) -> list[int]:
        looked = self.shared.describe().scanned
        return [offset for offset in self.waiting(key) if offset < looked]

    def consumers(self) -> set[str]:
        """Return the consumers that are alive, or whose records were not all taken back."""
        flat: Any = self.plain.hgetall(self.shared._protocol.key("members"))
        return {
            consumer.decode()
            for consumer, raw in flat.items()
            if not Member.parse(raw).dead
            or self.plain.exists(self.shared._protocol.whole(b"batches:" + consumer))
        }

    def state(self) -> dict[bytes, Any]:
        found: dict[bytes, Any] = {}
        for part in self.shared._protocol.find():
            key = self.shared._protocol.whole(part)
            kind = self.plain.type(key)
            if kind == b"hash":
                found[part] = self.plain.hgetall(key)
            elif kind == b"zset":
                found[part] = self.plain.zrange(key, 0, -1, withscores=True)
            elif kind == b"list":
                found[part] = self.plain.lrange(key, 0, -1)
        return found

    def check(self) -> None:
        assert self.shared.fsck() == []
        found = self.shared.describe()
        expected = min(self.open(), default=len(self.key_of))
        assert found.confirmed == expected, f"confirmed is {found.confirmed}, not {expected}"
        assert found.confirmed >= self.confirmed, "the confirmed offset decreased"
        self.confirmed = found.confirmed
        fates = Counter(self.fate.values())
        assert found.acked == fates["acked"]
        assert found.purged == fates["purged"]
        held: dict[int, str] = {}
        for consumer in self.consumers():
            values: Any = self.plain.hvals(self.shared._protocol.key(f"batches:{consumer}"))
            held |= {offset: consumer for raw in values for offset, _ in read_batch(raw)}
        assert held == self.holder
        failures: Any = self.plain.hgetall(self.shared._protocol.key("failures"))
        assert {int(o): int(n) for o, n in failures.items()} == dict(+self.failures)
        assert {int(o) for o in self.letters_in_state()} == self.dying

    def letters_in_state(self) -> list[bytes]:
        found: Any = self.plain.hkeys(self.shared._protocol.key("letters"))
        return list(found)

    def check_letters(self) -> None:
        found: list[int] = []
        if self.letters:
            for batch in self.client.stream(LETTERS, create=False).read():
                found += [int((record.headers or {})[OFFSET_HEADER]) for record in batch]
        assert sorted(found) == sorted({*self.buried}), "a dead letter is missing or repeated"
        assert {o for o, fate in self.fate.items() if fate == "dead"} <= {*found}
