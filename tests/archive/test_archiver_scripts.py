"""The archiving scripts return every reply that their headers document, on all kinds of servers.

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
from tests.support.group_scripts import Answer, GroupScripts


class ArchiveScripts(GroupScripts):
    """A stream with a store, and its scripts. ``begin`` gives the lease to archiver ``a``."""

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
def lua(any_url: str) -> Iterator[ArchiveScripts]:
    with meteor.connect(any_url) as client:
        lua = ArchiveScripts(client)
        yield lua
        lua.plain.close()


# advance_archived


def test_advance_stores_the_progress_and_trims_the_ring_to_its_capacity(
    lua: ArchiveScripts,
) -> None:
    lua.begin(capacity=10)
    lua.fill(5, 5, 5, 5, 5)
    assert lua.ring() == ["4-5", "9-5", "14-5", "19-5", "24-5"]  # all 25, because none is archived
    assert lua.advance(7) == ("OK",)
    assert lua.archived == 7
    assert lua.ring() == ["9-5", "14-5", "19-5", "24-5"]  # a partly archived frame stays
    assert lua.advance(10) == ("OK",)
    assert lua.ring() == ["14-5", "19-5", "24-5"]
    assert lua.advance(25) == ("OK",)
    assert lua.ring() == ["19-5", "24-5"]  # the last ten records
    assert lua.meta_field("next") == "25"


def test_repeated_advance_changes_nothing(lua: ArchiveScripts) -> None:
    lua.begin()
    lua.fill(*[5] * 6)
    assert lua.advance(20, known=0) == ("OK",)
    before = lua.snapshot()
    assert lua.advance(20, known=0) == ("OK",)  # as after a lost reply
    assert lua.advance(20, known=20) == ("OK",)
    assert lua.snapshot() == before


REFUSALS: dict[str, tuple[dict[str, Any], Answer]] = {
    "another incarnation": ({"incarnation": "second"}, ("INCARNATION",)),
    "another history": ({"history": "g" * 40}, ("HISTORY", HISTORY)),
    "another nonce": ({"nonce": "b"}, ("FENCED", "term")),
    "no nonce": ({"nonce": ""}, ("FENCED", "term")),
    "an older term": ({"term": 0}, ("FENCED", "term")),
    "an older epoch": ({"epoch": 0}, ("EPOCH",)),
    "an outdated archived offset": ({"known": 5}, ("MOVED", 10)),
    "a step back": ({"to": 9}, ("MOVED", 10)),
    "a step beyond the end": ({"to": 31}, ("MOVED", 10)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_advance_refuses_with_the_documented_reply_and_changes_nothing(
    lua: ArchiveScripts, what: str
) -> None:
    call, answer = REFUSALS[what]
    lua.begin()
    lua.fill(*[5] * 6)
    assert lua.advance(10) == ("OK",)
    before = lua.snapshot()
    expected = tuple(lua.term if part == "term" else part for part in answer)
    assert lua.advance(**{"to": 20} | call) == expected
    assert lua.snapshot() == before
    assert lua.advance(20) == ("OK",)


def test_advance_reports_the_first_of_several_errors(lua: ArchiveScripts) -> None:
    lua.begin()
    lua.fill(5)
    wrong: dict[str, Any] = {"to": 9, "known": 3, "epoch": 0, "nonce": "b", "history": "g" * 40}
    assert lua.advance(**wrong, incarnation="second") == ("INCARNATION",)
    assert lua.advance(**wrong) == ("HISTORY", HISTORY)
    del wrong["history"]
    assert lua.advance(**wrong) == ("FENCED", lua.term)
    del wrong["nonce"]
    assert lua.advance(**wrong) == ("EPOCH",)
    del wrong["epoch"]
    assert lua.advance(**wrong) == ("MOVED", 0)
    assert lua.advance(5, known=0) == ("OK",)


def test_advance_without_a_stream_or_store_creates_nothing(lua: ArchiveScripts) -> None:
    assert lua.advance(1, known=0) == ("NOSTREAM",)
    assert lua.snapshot() == {}
    lua.create()
    lua.open(0)
    lua.term = lua.acquire("a")[1]
    lua.fill(5)
    before = lua.snapshot()
    assert lua.advance(5, known=0) == ("MOVED", -1)
    assert lua.snapshot() == before


def test_advance_does_not_compare_an_unknown_history(lua: ArchiveScripts) -> None:
    lua.begin()
    lua.fill(5)
    assert lua.advance(5, history="") == ("OK",)


def test_advance_is_allowed_for_the_last_owner_even_if_its_lease_expired(
    lua: ArchiveScripts,
) -> None:
    lua.begin()
    lua.fill(5, 5)
    lua.expire()
    assert lua.advance(5) == ("OK",)  # no other archiver has started
    lua.acquire("b", expired=lua.term)
    assert lua.advance(10)[0] == "FENCED"
    assert lua.archived == 5


def test_advance_after_a_release_is_refused(lua: ArchiveScripts) -> None:
    lua.begin()
    lua.fill(5)
    assert lua.release("a") == ("OK",)
    assert lua.advance(5) == ("FENCED", lua.term)
    assert lua.archived == 0


def test_advance_keeps_all_digits_in_large_offsets(lua: ArchiveScripts) -> None:
    start = OFFSET_MAX - 40
    lua.begin(next=start, archived=start)
    lua.fill(*[5] * 8)
    assert lua.meta_field("next") == str(OFFSET_MAX)
    assert lua.advance(OFFSET_MAX - 1) == ("OK",)
    assert lua.meta_field("archived") == str(OFFSET_MAX - 1)
    assert lua.ring() == [f"{OFFSET_MAX - 6}-5", f"{OFFSET_MAX - 1}-5"]
    assert lua.advance(3) == ("MOVED", OFFSET_MAX - 1)


def fill_up(lua: ArchiveScripts) -> int:
    """Publish until the server is full; return the next sequence number."""
    for sequence in range(1000):
        try:
            lua.publish(sequence, payload=b"x" * 100_000)
        except meteor.OutOfMemory:
            return sequence
    raise AssertionError("the server does not fill up")


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_advance_works_on_a_full_server_and_makes_room(
    private_server: ServerFactory, kind: Literal["valkey", "redis"]
) -> None:
    server = private_server("--maxmemory", "8mb", kind=kind)
    with meteor.connect(server.url) as client:
        lua = ArchiveScripts(client)
        lua.begin(capacity=1, max_unarchived=OFFSET_MAX)
        sequence = fill_up(lua)
        before = lua.snapshot()
        with pytest.raises(meteor.OutOfMemory):
            lua.publish(sequence, payload=b"x" * 100_000)
        assert lua.snapshot() == before
        assert lua.renew("a", lua.term) == ("OK",)
        assert lua.flush() == ("OK", sequence)
        assert lua.advance(sequence) == ("OK",)
        assert lua.drop_below(1) == ("OK", 1)
        assert lua.publish(sequence, payload=b"x" * 100_000)[0] == "OK"


# publish and configure, in a stream with a store


def test_publish_beyond_max_unarchived_is_refused(lua: ArchiveScripts) -> None:
    lua.begin(capacity=10, max_unarchived=20)
    lua.fill(10, 9)
    before = lua.snapshot()
    assert lua.publish(0, 2, producer="q") == ("FULL", 0)
    assert lua.snapshot() == before
    assert lua.publish(0, 1, producer="q") == ("OK", 19, 1)
    assert lua.publish(1, 1, producer="q") == ("FULL", 0)
    assert lua.publish(0, 1, producer="q") == ("OK", 19, 1)  # a repeated batch needs no room
    assert lua.advance(1) == ("OK",)
    assert lua.publish(1, 1, producer="q") == ("OK", 20, 1)


def test_random_operations_never_drop_unarchived_or_recent_records(
    lua: ArchiveScripts, rng: random.Random
) -> None:
    lua.begin(capacity=10, max_unarchived=60)
    capacity, end, archived, floor, sequence = 10, 0, 0, 0, 0
    for _ in range(150):
        what = rng.choice(["publish", "publish", "advance", "configure"])
        if what == "publish":
            size = rng.randrange(1, min(capacity, 8) + 1)
            answer = lua.publish(sequence, size)
            assert answer == (("OK", end, 1) if end + size - archived <= 60 else ("FULL", archived))
            if answer[0] == "OK":
                sequence, end = sequence + 1, end + size
        elif what == "advance":
            archived = rng.randrange(archived, end + 1)
            assert lua.advance(archived) == ("OK",)
        else:
            capacity = rng.randrange(1, 30)
            order, args = [lua.log, lua.meta, lua.settings], (INCARNATION, capacity)
            while lua.answer(scripts.CONFIGURE_STREAM, order, *args) == ("MORE",):
                pass
        # Raising the capacity does not bring records back.
        floor = max(floor, min(archived, end - capacity))
        frames = [tuple(map(int, entry_id.split("-"))) for entry_id in lua.ring()]
        if frames:
            last, count = frames[0]
            assert last - count + 1 <= floor <= last
            # No offset is missing.
            assert sum(count for _, count in frames) == end - (last - count + 1)
        else:
            assert end == 0


# flush


def test_flush_requests_archiving_up_to_the_end_of_the_stream(lua: ArchiveScripts) -> None:
    lua.begin()
    assert lua.flush() == ("OK", 0)
    lua.fill(5, 5)
    for _ in range(2):
        assert lua.flush() == ("OK", 10)
        assert lua.meta_field("flush") == "10"


def test_flush_does_not_recreate_a_deleted_stream(lua: ArchiveScripts) -> None:
    assert lua.flush() == ("NOSTREAM",)
    assert lua.snapshot() == {}
    lua.begin()
    before = lua.snapshot()
    assert lua.flush("second") == ("INCARNATION",)
    lua.plain.hdel(lua.meta, "archived")
    assert lua.flush() == ("NOSTORE",)
    lua.plain.hset(lua.meta, "archived", 0)
    assert lua.snapshot() == before


# expire


def test_expire_moves_forward_only_and_not_past_the_archived_offset(lua: ArchiveScripts) -> None:
    lua.begin()
    lua.fill(*[5] * 6)
    assert lua.drop_below(5) == ("OK", 0)
    lua.advance(20)
    ring = lua.ring()
    for offset, stays in ((5, 5), (3, 5), (0, 5), (19, 19), (25, 20), (OFFSET_MAX, 20)):
        assert lua.drop_below(offset) == ("OK", stays)
        assert lua.meta_field("expired") == str(stays)
    assert lua.ring() == ring
    assert lua.archived == 20


def test_expire_keeps_all_digits_in_large_offsets(lua: ArchiveScripts) -> None:
    lua.begin(next=OFFSET_MAX, archived=OFFSET_MAX - 1)
    assert lua.drop_below(OFFSET_MAX - 2) == ("OK", OFFSET_MAX - 2)
    assert lua.meta_field("expired") == str(OFFSET_MAX - 2)


def test_expire_does_not_recreate_a_deleted_stream(lua: ArchiveScripts) -> None:
    assert lua.drop_below(1) == ("NOSTREAM",)
    assert lua.snapshot() == {}
    lua.begin()
    lua.fill(5)
    lua.advance(5)
    before = lua.snapshot()
    assert lua.drop_below(5, "second") == ("INCARNATION",)
    lua.plain.hdel(lua.meta, "archived")
    assert lua.drop_below(5) == ("NOSTORE",)
    lua.plain.hset(lua.meta, "archived", 5)
    assert lua.snapshot() == before
