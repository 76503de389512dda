"""The archiving scripts give every reply that their headers document, on all kinds of servers.

As in ``test_scripts.py``, the tests call the scripts directly. A refusal must change nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import pytest

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX
from meteor_py.redis import keys, scripts
from tests.client.test_scripts import HISTORY, INCARNATION
from tests.conftest import ServerFactory
from tests.support.group_scripts import Answer, GroupBench


class StoreBench(GroupBench):
    """A stream with a store, and an archiver ``a`` that has the lease."""

    term = 0

    def __init__(self, client: meteor.Client) -> None:
        super().__init__(client, group=keys.ARCHIVERS)

    def begin(self, capacity: int = 10, max_unarchived: int = 100, **meta: Any) -> None:
        stored = {"store": "id", "archived": 0, "expired": 0, "max_unarchived": max_unarchived}
        self.create(capacity, **stored | meta)
        self.open(0)
        self.term = self.acquire("a")[1]

    def advance(
        self,
        to: int,
        known: int | None = None,
        *,
        nonce: str = "a",
        term: int | None = None,
        epoch: int = 1,
        history: str = HISTORY,
        incarnation: str = INCARNATION,
    ) -> Answer:
        args = (incarnation, history, nonce, self.term if term is None else term, epoch)
        archived = self.archived if known is None else known
        script_keys = [self.log, self.meta, self.group]
        return self.answer(scripts.ADVANCE_ARCHIVED, script_keys, *args, archived, to)

    def flush(self, incarnation: str = INCARNATION) -> Answer:
        return self.answer(scripts.REQUEST_FLUSH, [self.meta], incarnation)

    def drop_below(self, offset: int, incarnation: str = INCARNATION) -> Answer:
        return self.answer(scripts.EXPIRE_HISTORY, [self.meta], incarnation, offset)

    def fill(self, *sizes: int) -> None:
        """Publish frames of these sizes with a new producer."""
        producer = f"p{self.meta_field('next')}"
        for sequence, size in enumerate(sizes):
            assert self.publish(sequence, size, producer=producer)[0] == "OK"

    @property
    def archived(self) -> int:
        return int(self.meta_field("archived"))

    def ring(self) -> list[str]:
        return [entry_id.decode() for entry_id, _ in self.entries()]

    def snapshot(self) -> dict[bytes, Any]:
        plain: Any = self.plain
        look = {b"hash": plain.hgetall, b"stream": plain.xrange, b"string": plain.get}
        return {name: look[plain.type(name)](name) for name in plain.keys("*")}


@pytest.fixture
def bench(any_url: str) -> Iterator[StoreBench]:
    with meteor.connect(any_url) as client:
        bench = StoreBench(client)
        yield bench
        bench.plain.close()


# advance_archived


def test_advance_records_progress_and_trims_the_ring_to_its_capacity(
    bench: StoreBench,
) -> None:
    bench.begin(capacity=10)
    bench.fill(5, 5, 5, 5, 5)
    assert bench.ring() == ["4-5", "9-5", "14-5", "19-5", "24-5"]  # all 25: none is archived
    assert bench.advance(7) == ("OK",)
    assert bench.archived == 7
    assert bench.ring() == ["9-5", "14-5", "19-5", "24-5"]  # a partly archived frame stays
    assert bench.advance(10) == ("OK",)
    assert bench.ring() == ["14-5", "19-5", "24-5"]
    assert bench.advance(25) == ("OK",)
    assert bench.ring() == ["19-5", "24-5"]  # the last ten
    assert bench.meta_field("next") == "25"


def test_repeated_advance_changes_nothing(bench: StoreBench) -> None:
    bench.begin()
    bench.fill(*[5] * 6)
    assert bench.advance(20, known=0) == ("OK",)
    before = bench.snapshot()
    assert bench.advance(20, known=0) == ("OK",)  # as after a lost reply
    assert bench.advance(20, known=20) == ("OK",)
    assert bench.snapshot() == before


REFUSALS: dict[str, tuple[dict[str, Any], Answer]] = {
    "another incarnation": ({"incarnation": "second"}, ("INCARNATION",)),
    "another history": ({"history": "g" * 40}, ("HISTORY", HISTORY)),
    "another nonce": ({"nonce": "b"}, ("FENCED", "term")),
    "no nonce": ({"nonce": ""}, ("FENCED", "term")),
    "an older term": ({"term": 0}, ("FENCED", "term")),
    "an older epoch": ({"epoch": 0}, ("EPOCH",)),
    "another beginning": ({"known": 5}, ("MOVED", 10)),
    "a step back": ({"to": 9}, ("MOVED", 10)),
    "a step beyond the end": ({"to": 31}, ("MOVED", 10)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_advance_refuses_with_the_documented_reply_and_changes_nothing(
    bench: StoreBench, what: str
) -> None:
    call, answer = REFUSALS[what]
    bench.begin()
    bench.fill(*[5] * 6)
    assert bench.advance(10) == ("OK",)
    before = bench.snapshot()
    expected = tuple(bench.term if part == "term" else part for part in answer)
    assert bench.advance(**{"to": 20} | call) == expected
    assert bench.snapshot() == before
    assert bench.advance(20) == ("OK",)


def test_advance_reports_the_first_of_several_errors(bench: StoreBench) -> None:
    bench.begin()
    bench.fill(5)
    wrong: dict[str, Any] = {"to": 9, "known": 3, "epoch": 0, "nonce": "b", "history": "g" * 40}
    assert bench.advance(**wrong, incarnation="second") == ("INCARNATION",)
    assert bench.advance(**wrong) == ("HISTORY", HISTORY)
    del wrong["history"]
    assert bench.advance(**wrong) == ("FENCED", bench.term)
    del wrong["nonce"]
    assert bench.advance(**wrong) == ("EPOCH",)
    del wrong["epoch"]
    assert bench.advance(**wrong) == ("MOVED", 0)
    assert bench.advance(5, known=0) == ("OK",)


def test_advance_for_no_stream_or_one_without_a_store_creates_nothing(bench: StoreBench) -> None:
    assert bench.advance(1, known=0) == ("NOSTREAM",)
    assert bench.snapshot() == {}
    bench.create()
    bench.open(0)
    bench.term = bench.acquire("a")[1]
    bench.fill(5)
    before = bench.snapshot()
    assert bench.advance(5, known=0) == ("MOVED", -1)
    assert bench.snapshot() == before


def test_advance_does_not_compare_an_unknown_history(bench: StoreBench) -> None:
    bench.begin()
    bench.fill(5)
    assert bench.advance(5, history="") == ("OK",)


def test_advance_is_allowed_for_the_last_owner_even_if_its_lease_expired(
    bench: StoreBench,
) -> None:
    bench.begin()
    bench.fill(5, 5)
    bench.expire()
    assert bench.advance(5) == ("OK",)  # no other archiver has started
    bench.acquire("b", expired=bench.term)
    assert bench.advance(10)[0] == "FENCED"
    assert bench.archived == 5


def test_advance_after_a_release_is_refused(bench: StoreBench) -> None:
    bench.begin()
    bench.fill(5)
    assert bench.release("a") == ("OK",)
    assert bench.advance(5) == ("FENCED", bench.term)
    assert bench.archived == 0


def test_advance_keeps_all_digits_of_large_offsets(bench: StoreBench) -> None:
    start = OFFSET_MAX - 40
    bench.begin(next=start, archived=start)
    bench.fill(*[5] * 8)
    assert bench.meta_field("next") == str(OFFSET_MAX)
    assert bench.advance(OFFSET_MAX - 1) == ("OK",)
    assert bench.meta_field("archived") == str(OFFSET_MAX - 1)
    assert bench.ring() == [f"{OFFSET_MAX - 6}-5", f"{OFFSET_MAX - 1}-5"]
    assert bench.advance(3) == ("MOVED", OFFSET_MAX - 1)


def fill_up(bench: StoreBench) -> int:
    """Publish until the server is full; return the next sequence."""
    for sequence in range(1000):
        try:
            bench.publish(sequence, payload=b"x" * 100_000)
        except meteor.OutOfMemory:
            return sequence
    raise AssertionError("the server does not fill up")


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_advance_works_on_a_full_server_and_makes_room(
    private_server: ServerFactory, kind: Literal["valkey", "redis"]
) -> None:
    server = private_server("--maxmemory", "8mb", kind=kind)
    with meteor.connect(server.url) as client:
        bench = StoreBench(client)
        bench.begin(capacity=1, max_unarchived=OFFSET_MAX)
        sequence = fill_up(bench)
        before = bench.snapshot()
        with pytest.raises(meteor.OutOfMemory):
            bench.publish(sequence, payload=b"x" * 100_000)
        assert bench.snapshot() == before
        assert bench.renew("a", bench.term) == ("OK",)
        assert bench.flush() == ("OK", sequence)
        assert bench.advance(sequence) == ("OK",)
        assert bench.drop_below(1) == ("OK", 1)
        assert bench.publish(sequence, payload=b"x" * 100_000)[0] == "OK"


# publish and configure, in a stream with a store


def test_publish_beyond_max_unarchived_is_refused(bench: StoreBench) -> None:
    bench.begin(capacity=10, max_unarchived=20)
    bench.fill(10, 9)
    before = bench.snapshot()
    assert bench.publish(0, 2, producer="q") == ("FULL", 0)
    assert bench.snapshot() == before
    assert bench.publish(0, 1, producer="q") == ("OK", 19, 1)
    assert bench.publish(1, 1, producer="q") == ("FULL", 0)
    assert bench.publish(0, 1, producer="q") == ("OK", 19, 1)  # a repeat needs no room
    assert bench.advance(1) == ("OK",)
    assert bench.publish(1, 1, producer="q") == ("OK", 20, 1)


def test_random_operations_never_drop_unarchived_or_recent_records(
    bench: StoreBench, rng: random.Random
) -> None:
    bench.begin(capacity=10, max_unarchived=60)
    capacity, end, archived, floor, sequence = 10, 0, 0, 0, 0
    for _ in range(150):
        what = rng.choice(["publish", "publish", "advance", "configure"])
        if what == "publish":
            size = rng.randrange(1, min(capacity, 8) + 1)
            answer = bench.publish(sequence, size)
            assert answer == (("OK", end, 1) if end + size - archived <= 60 else ("FULL", archived))
            if answer[0] == "OK":
                sequence, end = sequence + 1, end + size
        elif what == "advance":
            archived = rng.randrange(archived, end + 1)
            assert bench.advance(archived) == ("OK",)
        else:
            capacity = rng.randrange(1, 30)
            order, args = [bench.log, bench.meta, bench.settings], (INCARNATION, capacity)
            while bench.answer(scripts.CONFIGURE_STREAM, order, *args) == ("MORE",):
                pass
        floor = max(floor, min(archived, end - capacity))  # a larger capacity restores nothing
        frames = [tuple(map(int, entry_id.split("-"))) for entry_id in bench.ring()]
        if frames:
            last, count = frames[0]
            assert last - count + 1 <= floor <= last
            assert sum(count for _, count in frames) == end - (last - count + 1)  # without a hole
        else:
            assert end == 0


# flush


def test_flush_requests_all_records(bench: StoreBench) -> None:
    bench.begin()
    assert bench.flush() == ("OK", 0)
    bench.fill(5, 5)
    for _ in range(2):
        assert bench.flush() == ("OK", 10)
        assert bench.meta_field("flush") == "10"


def test_flush_does_not_recreate_a_deleted_stream(bench: StoreBench) -> None:
    assert bench.flush() == ("NOSTREAM",)
    assert bench.snapshot() == {}
    bench.begin()
    before = bench.snapshot()
    assert bench.flush("second") == ("INCARNATION",)
    bench.plain.hdel(bench.meta, "archived")
    assert bench.flush() == ("NOSTORE",)
    bench.plain.hset(bench.meta, "archived", 0)
    assert bench.snapshot() == before


# expire


def test_expire_moves_forward_only_and_not_past_the_archived_offset(bench: StoreBench) -> None:
    bench.begin()
    bench.fill(*[5] * 6)
    assert bench.drop_below(5) == ("OK", 0)
    bench.advance(20)
    ring = bench.ring()
    for offset, stays in ((5, 5), (3, 5), (0, 5), (19, 19), (25, 20), (OFFSET_MAX, 20)):
        assert bench.drop_below(offset) == ("OK", stays)
        assert bench.meta_field("expired") == str(stays)
    assert bench.ring() == ring
    assert bench.archived == 20


def test_expire_keeps_all_digits_of_large_offsets(bench: StoreBench) -> None:
    bench.begin(next=OFFSET_MAX, archived=OFFSET_MAX - 1)
    assert bench.drop_below(OFFSET_MAX - 2) == ("OK", OFFSET_MAX - 2)
    assert bench.meta_field("expired") == str(OFFSET_MAX - 2)


def test_expire_does_not_recreate_a_deleted_stream(bench: StoreBench) -> None:
    assert bench.drop_below(1) == ("NOSTREAM",)
    assert bench.snapshot() == {}
    bench.begin()
    bench.fill(5)
    bench.advance(5)
    before = bench.snapshot()
    assert bench.drop_below(5, "second") == ("INCARNATION",)
    bench.plain.hdel(bench.meta, "archived")
    assert bench.drop_below(5) == ("NOSTORE",)
    bench.plain.hset(bench.meta, "archived", 5)
    assert bench.snapshot() == before
