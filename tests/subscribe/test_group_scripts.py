"""Every group script returns each reply that its header documents, on all kinds of servers.

As in ``test_scripts.py``, the tests call the scripts directly. A refusal must change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX
from meteor_py.redis import keys
from tests.client.test_scripts import HISTORY, INCARNATION
from tests.support.group_scripts import TTL_MS, Answer, GroupScripts
from tests.support.readers import fill
from tests.support.waiting import eventually


@pytest.fixture
def lua(any_url: str) -> Iterator[GroupScripts]:
    with meteor.connect(any_url) as client:
        yield GroupScripts(client)


@pytest.fixture
def ten(lua: GroupScripts) -> GroupScripts:
    """A stream of ten records, and a group at offset 0."""
    lua.create(next=10)
    assert lua.open(0) == ("OK", 0)
    return lua


def ok(answer: Answer) -> int:
    """Return the term of an acquired lease."""
    assert answer[0] == "OK", answer
    return int(answer[1])


# Missing streams and groups


CALLS: dict[str, Callable[..., Answer]] = {
    "open": lambda lua, incarnation: lua.open(incarnation=incarnation),
    "acquire": lambda lua, incarnation: lua.acquire("a", incarnation=incarnation),
    "renew": lambda lua, incarnation: lua.renew("a", 1, incarnation=incarnation),
    "confirm": lambda lua, incarnation: lua.confirm("a", 1, 1, incarnation=incarnation),
    "seek": lambda lua, incarnation: lua.seek(0, incarnation=incarnation),
    "delete": lambda lua, incarnation: lua.delete(incarnation=incarnation),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_for_a_missing_or_recreated_stream_is_refused_and_writes_nothing(
    lua: GroupScripts, call: str
) -> None:
    assert CALLS[call](lua, INCARNATION) == ("NOSTREAM",)
    assert lua.snapshot() == {}
    lua.create()
    lua.open()
    before = lua.snapshot()
    assert CALLS[call](lua, "another incarnation") == ("INCARNATION",)
    assert lua.snapshot() == before


@pytest.mark.parametrize("left_behind", [False, True])
@pytest.mark.parametrize("call", ["acquire", "renew", "confirm", "delete"])
def test_missing_group_or_group_from_an_earlier_incarnation_is_refused(
    lua: GroupScripts, call: str, left_behind: bool
) -> None:
    lua.create()
    if left_behind:
        lua.plain.hset(lua.group, mapping={"incarnation": "earlier", "start": "7"})
    before = lua.snapshot()
    assert CALLS[call](lua, INCARNATION) == ("NOGROUP",)
    assert lua.snapshot() == before
    assert lua.release("a") == ("FENCED",)
    assert lua.snapshot() == before


# open_group


def test_first_open_decides_where_a_group_starts(ten: GroupScripts) -> None:
    before = ten.snapshot()
    assert ten.open(5) == ("OK", 0)
    assert ten.open("") == ("OK", 0)
    assert ten.snapshot() == before
    assert ten.plain.smembers(ten.groups) == {b"g"}


def test_group_without_a_start_begins_at_the_end_and_stays_there(lua: GroupScripts) -> None:
    lua.create(next=10)
    assert lua.open("") == ("OK", 10)
    lua.plain.hset(lua.meta, "next", 20)
    assert lua.open("") == ("OK", 10)


def test_open_without_create_requires_a_confirmed_offset(lua: GroupScripts) -> None:
    lua.create(next=10)
    assert lua.open(create=False) == ("NOOFFSET",)
    assert not lua.plain.exists(lua.group, lua.groups)
    lua.open(3)
    assert lua.open(create=False) == ("NOOFFSET",)
    term = ok(lua.acquire("a"))
    lua.confirm("a", term, 4)
    assert lua.open(create=False) == ("OK", 4)
    assert lua.open(0) == ("OK", 4)


def test_group_from_an_earlier_incarnation_is_replaced(lua: GroupScripts) -> None:
    lua.create(next=10)
    old: dict[Any, Any] = {"start": "7", "confirmed": "8", "term": "5", "nonce": "a"}
    lua.plain.hset(lua.group, mapping={"incarnation": "earlier"} | old)
    lua.plain.set(lua.lease, "m-a 5", px=TTL_MS)
    assert lua.open(2) == ("OK", 2)
    assert lua.field("confirmed") is None
    assert lua.field("nonce") is None
    assert lua.holder() is None


# acquire


def test_lease_goes_to_one_member_and_others_learn_its_owner(ten: GroupScripts) -> None:
    before = int(time.time() * 1000) - 5000
    answer = ten.acquire("a", ttl_ms=5000)
    term = ok(answer)
    assert answer == ("OK", term, 0, 1, 10, "")
    assert before < term < before + 60_000  # the term number is the time in ms
    assert ten.holder() == f"m-a {term}"
    assert 0 < ten.plain.pttl(ten.lease) <= 5000
    stored = ten.snapshot()
    code, left_ms, event, owner = ten.acquire("b")
    assert (code, event, owner) == ("HELD", ten.last_event(), "m-a")
    assert 0 < left_ms <= 5000
    assert ten.snapshot() == stored
    assert ten.happened() == [
        {"event": "assigned", "group": "g", "member": "m-a", "term": str(term)}
    ]


def test_acquire_repeated_with_the_same_nonce_gets_the_same_reply(ten: GroupScripts) -> None:
    answer = ten.acquire("a", ttl_ms=1000)
    stored = ten.snapshot()
    assert ten.acquire("a", ttl_ms=50_000) == answer
    assert ten.snapshot() == stored  # no additional term or event
    assert ten.plain.pttl(ten.lease) > 1000


def test_nonce_of_an_expired_lease_gets_a_new_term(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    ten.expire()
    assert ok(ten.acquire("a")) > term


def test_released_lease_is_acquired_at_once_with_a_higher_term(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    assert ten.release("a") == ("OK",)
    assert ten.holder() is None
    assert (ten.field("owner"), ten.field("nonce")) == ("", "")
    later = ok(ten.acquire("b"))
    assert later > term
    assert ten.renew("a", term) == ("FENCED", later)
    assert ten.confirm("a", term, 1) == ("FENCED", later)
    stored = ten.snapshot()
    assert ten.release("a") == ("FENCED",)
    assert ten.snapshot() == stored


def test_group_remembers_where_recent_unreleased_terms_ended(ten: GroupScripts) -> None:
    term: int | str = ""
    for number in range(30):
        nonce = f"{number:016x}"
        (term, position) = ten.acquire(nonce, expired=term)[1:3]
        assert position == max(number - 1, 0) // 3
        ten.confirm(nonce, int(term), number // 3)
        ten.expire()
    ended = (ten.field("ended") or "").split(",")[:-1]
    assert 7 <= len(ended) <= 30
    assert ended == [f"{n:016x}:{n // 3}" for n in range(28, 28 - len(ended), -1)]


def test_group_does_not_remember_where_a_released_term_ended(ten: GroupScripts) -> None:
    ten.acquire("a")
    ten.release("a")
    ten.acquire("b")
    assert ten.field("ended") is None


def test_expired_lease_is_reserved_for_its_owner_during_the_grace_period(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    ten.expire()
    stored = ten.snapshot()
    assert ten.acquire("b") == ("EXPIRED", 0, ten.last_event(), "m-a", term)
    assert ten.acquire("b", expired=term - 1) == ("EXPIRED", 0, ten.last_event(), "m-a", term)
    assert ten.snapshot() == stored
    assert ten.renew("a", term) == ("OK",)  # the owner reclaims it
    assert ten.acquire("b", expired=term)[0] == "HELD"
    ten.expire()
    later = ok(ten.acquire("b", expired=term))  # the owner has not reclaimed its lease
    assert later > term
    ten.expire()
    assert ten.acquire("c", expired=term)[0] == "EXPIRED"  # another term has ended since


@pytest.mark.parametrize("by", ["acquire", "seek"])
def test_term_increases_even_if_the_clock_was_set_back(ten: GroupScripts, by: str) -> None:
    far = 10**14  # far above the clock in ms
    ten.plain.hset(ten.group, "term", far)
    if by == "acquire":
        assert ok(ten.acquire("a")) == far + 1
        ten.release("a")
        assert ok(ten.acquire("a")) == far + 2
    else:
        assert ten.seek(3) == ("OK",)
        assert ten.field("term") == str(far + 1)
        assert ok(ten.acquire("a")) == far + 2


def test_lease_key_without_an_expiry_is_not_taken(ten: GroupScripts) -> None:
    ten.plain.set(ten.lease, "somebody")
    assert ten.acquire("a") == ("HELD", -1, "0-0", "")


def test_position_is_the_confirmed_offset_or_the_start(lua: GroupScripts) -> None:
    lua.create(next=10, epoch=7)
    lua.open(3)
    answer = lua.acquire("a")
    assert answer[2:] == (3, 7, 10, "")
    lua.confirm("a", ok(answer), 6, epoch=7)
    lua.release("a")
    lua.plain.hset(lua.meta, "next", 20)
    assert lua.acquire("b")[2:] == (6, 7, 20, "")


def test_only_the_first_term_has_a_floating_start(lua: GroupScripts) -> None:
    lua.create(next=10)
    lua.open(2, floating=True)
    first = lua.acquire("a")
    assert first[-1] == "floating"
    assert lua.acquire("a") == first
    lua.expire()
    assert lua.acquire("b", expired=ok(first))[-1] == ""
    lua.release("b")
    assert lua.acquire("a")[-1] == ""
    assert lua.seek(4, floating=True, force=True) == ("OK",)
    assert lua.acquire("c")[-1] == "floating"  # as in a new group
    lua.release("c")
    assert lua.acquire("d")[-1] == ""


# renew and lapse


def test_renew_extends_only_its_owners_lease(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a", ttl_ms=1000))
    assert ten.renew("a", term, ttl_ms=50_000) == ("OK",)
    stored = ten.snapshot()
    assert ten.plain.pttl(ten.lease) > 1000
    assert ten.renew("b", term) == ("FENCED", term)
    assert ten.renew("a", term - 1) == ("FENCED", term)
    assert ten.snapshot() == stored


def test_renew_is_fenced_in_a_group_without_terms(ten: GroupScripts) -> None:
    assert ten.renew("a", 1) == ("FENCED", 0)
    assert ten.confirm("a", 1, 1) == ("FENCED", 0)
    assert ten.holder() is None


def test_lapsed_lease_is_free_and_its_owner_can_reclaim_it(
    ten: GroupScripts,
) -> None:
    term = ok(ten.acquire("a"))
    assert ten.release("a", lapse=True) == ("OK",)
    assert ten.holder() is None
    assert ten.renew("a", term) == ("OK",)
    assert ten.holder() == f"m-a {term}"
    assert ten.field("owner") == "m-a"
    assert [event["event"] for event in ten.happened()] == ["assigned", "released", "assigned"]
    assert ten.release("a", lapse=True) == ("OK",)
    later = ok(ten.acquire("b"))  # at once: the lease was released
    assert ten.renew("a", term) == ("FENCED", later)
    assert ten.release("a", lapse=True) == ("FENCED",)


def test_lapse_that_arrives_after_the_next_renewal_changes_nothing(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    assert ten.renew("a", term) == ("OK",)
    assert ten.release("a", lapse=True, lease=f"m-a {term} 0") == ("FENCED",)
    assert ten.holder() == f"m-a {term}"


def test_owner_of_a_lapsed_lease_can_confirm(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    ten.release("a", lapse=True)
    assert ten.confirm("a", term, 3) == ("OK", 3)


# confirm


def test_confirmed_offset_moves_only_forward_and_not_beyond_the_end(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    assert ten.confirm("a", term, 4) == ("OK", 4)
    assert ten.confirm("a", term, 2) == ("OK", 4)
    assert ten.confirm("a", term, 4) == ("OK", 4)
    assert ten.confirm("a", term, 10) == ("OK", 10)
    stored = ten.snapshot()
    assert ten.confirm("a", term, 11) == ("BEYOND", 10)
    assert ten.confirm("a", term, 0) == ("OK", 10)
    assert ten.confirm("a", term - 1, 10) == ten.confirm("b", term, 10) == ("FENCED", term)
    assert ten.snapshot() == stored


def test_confirm_below_the_start_does_not_move_the_group_back(lua: GroupScripts) -> None:
    lua.create(next=10)
    lua.open(5)
    term = ok(lua.acquire("a"))
    assert lua.confirm("a", term, 3) == ("OK", 5)
    assert lua.open(create=False) == ("NOOFFSET",)
    assert lua.acquire("a")[2] == 5


def test_confirm_with_another_history_or_epoch_is_refused(lua: GroupScripts) -> None:
    lua.create(next=10, epoch=5, epochs="1:0,5:8")
    lua.open(0)
    term = ok(lua.acquire("a"))
    stored = lua.snapshot()
    assert lua.confirm("a", term, 3, history="x" * 40) == ("HISTORY", HISTORY)
    assert lua.confirm("a", term, 3, epoch=1) == ("EPOCH", 5, "1:0,5:8", 10)
    assert lua.confirm("b", term, 3, epoch=1) == ("FENCED", term)  # the owner is checked first
    assert lua.snapshot() == stored
    # An unknown history is not compared.
    assert lua.confirm("a", term, 3, epoch=5, history="") == ("OK", 3)


def test_offsets_and_terms_are_exact_up_to_the_maximum(lua: GroupScripts) -> None:
    end = OFFSET_MAX
    lua.create(next=end)
    assert lua.open("") == ("OK", end)
    lua.delete()
    assert lua.open(end - 3) == ("OK", end - 3)
    answer = lua.acquire("a")
    term = ok(answer)
    assert answer[2:] == (end - 3, 1, end, "")
    for offset in (end - 2, end - 1, end):
        assert lua.confirm("a", term, offset) == ("OK", offset)
        assert lua.field("confirmed") == str(offset)
    assert lua.confirm("a", term, end - 1) == ("OK", end)
    assert lua.seek(end - 1, force=True) == ("OK",)
    assert lua.acquire("b")[2] == end - 1
    lua.plain.hset(lua.group, mapping={"term": 2**53 - 2, "nonce": "b"})
    assert lua.renew("b", 2**53 - 2) == ("OK",)
    lua.release("b")
    assert ok(lua.acquire("c")) == 2**53 - 1
    assert lua.field("term") == str(2**53 - 1)


# seek_group


def test_seek_creates_or_moves_a_group(lua: GroupScripts) -> None:
    lua.create(next=10)
    assert lua.seek(7, request="1") == ("OK",)
    assert lua.plain.smembers(lua.groups) == {b"g"}
    assert lua.open(0) == lua.open(create=False) == ("OK", 7)
    assert lua.seek(3, request="2") == ("OK",)  # a seek can go backwards
    assert lua.acquire("a")[2] == 3


def test_seek_in_an_active_group_needs_force_and_fences_the_owner(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    ten.confirm("a", term, 5)
    stored = ten.snapshot()
    assert ten.seek(2) == ("ACTIVE", f"m-a {term} 0")
    assert ten.seek(11, force=True) == ("BEYOND", 10)
    assert ten.snapshot() == stored
    assert ten.seek(2, force=True) == ("OK",)
    fence = int(ten.field("term") or 0)
    assert fence > term
    assert ten.confirm("a", term, 6) == ("FENCED", fence)
    assert ten.renew("a", term) == ("FENCED", fence)
    assert ten.release("a") == ("FENCED",)
    answer = ten.acquire("a")
    assert ok(answer) > fence
    assert answer[2] == 2
    assert ten.happened()[1] == {"event": "sought", "group": "g", "term": str(fence), "offset": "2"}


def test_repeated_seek_does_not_undo_later_confirms(ten: GroupScripts) -> None:
    assert ten.seek(2, request="1", force=True) == ("OK",)
    term = ok(ten.acquire("a"))
    ten.confirm("a", term, 4)
    stored = ten.snapshot()
    assert ten.seek(2, request="1", force=True) == ("OK",)
    assert ten.snapshot() == stored


def test_lease_from_an_earlier_incarnation_does_not_block_a_seek(lua: GroupScripts) -> None:
    lua.create(next=10)
    lua.plain.hset(lua.group, mapping={"incarnation": "earlier", "term": "5", "nonce": "a"})
    lua.plain.set(lua.lease, "m-a 5", px=TTL_MS)
    assert lua.seek(2) == ("OK",)
    assert lua.holder() is None
    assert lua.acquire("b")[2] == 2


# delete_group


def test_active_group_is_deleted_only_with_force(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    stored = ten.snapshot()
    assert ten.delete() == ("ACTIVE", f"m-a {term} 0")
    assert ten.snapshot() == stored
    assert ten.delete(force=True) == ("OK",)
    assert ten.delete(force=True) == ("NOGROUP",)
    assert ten.happened()[-1] == {"event": "deleted", "group": "g"}
    for late in (ten.renew("a", term), ten.confirm("a", term, 5), ten.acquire("a")):
        assert late == ("NOGROUP",)
    assert ten.release("a") == ("FENCED",)
    assert not ten.plain.exists(ten.group, ten.lease, ten.groups)


def test_recreated_group_fences_its_former_owner(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a"))
    ten.delete(force=True)
    ten.open(0)
    assert ten.renew("a", term)[0] == ten.confirm("a", term, 5)[0] == "FENCED"
    assert ten.release("a") == ("FENCED",)
    assert ten.acquire("b")[2] == 0


def test_groups_are_independent(ten: GroupScripts) -> None:
    other = GroupScripts(ten.client, group="h")
    other.open(5)
    first, second = ok(ten.acquire("a")), ok(other.acquire("b"))
    assert ten.confirm("b", second, 3)[0] == "FENCED"
    assert ten.confirm("a", first, 3) == ("OK", 3)
    assert other.confirm("b", second, 7) == ("OK", 7)
    assert ten.delete(force=True) == ("OK",)
    assert other.renew("b", second) == ("OK",)
    assert ten.plain.smembers(ten.groups) == {b"h"}


def test_every_key_is_deleted_with_its_group_or_stream(any_url: str) -> None:
    with meteor.connect(any_url) as client:
        stream = client.stream("s", create=True)
        fill(stream, 5)
        for group in ("g", "h"):
            with stream.subscriber(group=group) as sub:
                sub.poll()
                sub.confirm()
        stream.seek_group("i", 3)
        names = [keys.group("s", "g"), keys.lease("s", "g")]
        stream.delete_group("g")
        assert not client.redis.exists(*names)
        assert [group.name for group in stream.groups()] == ["h", "i"]
        with stream.subscriber(group="h", lease_ttl=60) as sub:
            sub.poll(timeout=0)
            stream.delete()
            assert client.redis.keys("*") == []
        assert client.redis.keys("*") == []  # the member that leaves late creates no key


def test_number_of_stored_events_is_bounded(ten: GroupScripts) -> None:
    pipe = ten.plain.pipeline(transaction=False)
    for _ in range(1500):
        pipe.xadd(ten.events, {"event": "released", "group": "g"})
    pipe.execute()
    ok(ten.acquire("a"))
    kept: Any = ten.plain.xlen(ten.events)
    assert 1000 <= kept <= 1200


def test_lease_expires(ten: GroupScripts) -> None:
    term = ok(ten.acquire("a", ttl_ms=50))
    eventually(lambda: ten.acquire("b", expired=term)[0] == "OK")


# Epochs in confirms


def lose_tail(lua: GroupScripts, first: int) -> None:
    """Simulate a failover that loses all records from ``first`` on.

    The next write begins a new epoch.
    """
    for entry_id, _ in lua.entries():
        if int(entry_id.split(b"-")[0]) >= first:
            lua.plain.xdel(lua.log, entry_id)
    lua.plain.hset(lua.meta, mapping={"next": first, "history": "of a former server"})


@pytest.mark.parametrize("lost", [0, 5])
def test_confirm_is_refused_only_for_records_on_a_lost_branch(url: str, lost: int) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", create=True)
        fill(stream, *[1] * 10)
        with stream.subscriber(group="g") as sub:
            assert len(sub.poll()) == 10
            lose_tail(GroupScripts(client), 10 - lost)
            fill(stream, 10)
            assert sub.confirm(4).result(20) == 5  # the session learns of the new epoch
            if lost:
                with pytest.raises(meteor.LogTruncated) as caught:
                    sub.confirm(9).result(20)
                assert (caught.value.first, caught.value.last) == (5, 9)
                assert stream.groups()[0].confirmed == 5
            else:
                assert sub.confirm(9).result(20) == 10
                assert len(sub.poll()) == 10  # records in the new epoch
                assert sub.confirm().result(20) == 20
