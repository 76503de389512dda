"""Every script of groups gives every answer that its head promises, on all kinds of servers.

As in test_scripts.py they are called by hand. A refusal must leave everything as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX
from meteor_py.redis import keys
from tests.client.test_scripts import HISTORY, LIFE
from tests.support.group_scripts import TTL_MS, Answer, GroupBench
from tests.support.readers import fill
from tests.support.waiting import eventually


@pytest.fixture
def bench(any_url: str) -> Iterator[GroupBench]:
    with meteor.connect(any_url) as client:
        yield GroupBench(client)


@pytest.fixture
def ten(bench: GroupBench) -> GroupBench:
    """With a stream of ten records, and a group at its beginning."""
    bench.create(next=10)
    assert bench.open(0) == ("OK", 0)
    return bench


def ok(answer: Answer) -> int:
    """The term of a lease that was got."""
    assert answer[0] == "OK", answer
    return int(answer[1])


# A stream or group that is not there


CALLS: dict[str, Callable[..., Answer]] = {
    "open": lambda bench, life: bench.open(life=life),
    "acquire": lambda bench, life: bench.acquire("a", life=life),
    "renew": lambda bench, life: bench.renew("a", 1, life=life),
    "confirm": lambda bench, life: bench.confirm("a", 1, 1, life=life),
    "seek": lambda bench, life: bench.seek(0, life=life),
    "delete": lambda bench, life: bench.delete(life=life),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_stream_or_another_is_told_and_nothing_written(bench: GroupBench, call: str) -> None:
    assert CALLS[call](bench, LIFE) == ("NOSTREAM",)
    assert bench.snapshot() == {}
    bench.create()
    bench.open()
    before = bench.snapshot()
    assert CALLS[call](bench, "another life") == ("INCARNATION",)
    assert bench.snapshot() == before


@pytest.mark.parametrize("left_behind", [False, True])
@pytest.mark.parametrize("call", ["acquire", "renew", "confirm", "delete"])
def test_no_group_or_one_of_a_former_stream_is_told(
    bench: GroupBench, call: str, left_behind: bool
) -> None:
    bench.create()
    if left_behind:
        bench.plain.hset(bench.group, mapping={"incarnation": "an earlier life", "start": "7"})
    before = bench.snapshot()
    assert CALLS[call](bench, LIFE) == ("NOGROUP",)
    assert bench.snapshot() == before
    assert bench.release("a") == ("FENCED",)
    assert bench.snapshot() == before


# open_group


def test_a_group_begins_once_at_the_place_of_the_first(ten: GroupBench) -> None:
    before = ten.snapshot()
    assert ten.open(5) == ("OK", 0)
    assert ten.open("") == ("OK", 0)
    assert ten.snapshot() == before
    assert ten.plain.smembers(ten.groups) == {b"g"}


def test_a_group_without_a_place_begins_at_the_end_and_stays_there(bench: GroupBench) -> None:
    bench.create(next=10)
    assert bench.open("") == ("OK", 10)
    bench.plain.hset(bench.meta, "next", 20)
    assert bench.open("") == ("OK", 10)


def test_without_create_only_a_confirmed_offset_counts(bench: GroupBench) -> None:
    bench.create(next=10)
    assert bench.open(create=False) == ("NOOFFSET",)
    assert not bench.plain.exists(bench.group, bench.groups)
    bench.open(3)
    assert bench.open(create=False) == ("NOOFFSET",)
    term = ok(bench.acquire("a"))
    bench.confirm("a", term, 4)
    assert bench.open(create=False) == ("OK", 4)
    assert bench.open(0) == ("OK", 4)


def test_what_a_former_stream_left_behind_is_replaced(bench: GroupBench) -> None:
    bench.create(next=10)
    old: dict[Any, Any] = {"start": "7", "confirmed": "8", "term": "5", "nonce": "a"}
    bench.plain.hset(bench.group, mapping={"incarnation": "earlier"} | old)
    bench.plain.set(bench.lease, "m-a 5", px=TTL_MS)
    assert bench.open(2) == ("OK", 2)
    assert bench.field("confirmed") is None
    assert bench.field("nonce") is None
    assert bench.holder() is None


# acquire


def test_the_lease_goes_to_one_and_the_others_hear_who_has_it(ten: GroupBench) -> None:
    before = int(time.time() * 1000) - 5000
    answer = ten.acquire("a", ttl_ms=5000)
    term = ok(answer)
    assert answer == ("OK", term, 0, 1, 10, "")
    assert before < term < before + 60_000  # terms follow the clock
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


def test_asking_again_with_the_same_nonce_gives_the_same_answer(ten: GroupBench) -> None:
    answer = ten.acquire("a", ttl_ms=1000)
    stored = ten.snapshot()
    assert ten.acquire("a", ttl_ms=50_000) == answer
    assert ten.snapshot() == stored  # neither a term nor an event more
    assert ten.plain.pttl(ten.lease) > 1000


def test_a_nonce_whose_lease_ran_out_gets_a_new_term(ten: GroupBench) -> None:
    term = ok(ten.acquire("a"))
    ten.expire()
    assert ok(ten.acquire("a")) > term


def test_after_a_release_the_next_gets_it_at_once_and_a_higher_term(ten: GroupBench) -> None:
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


def test_a_lease_that_ran_out_is_left_to_its_owner_for_a_while(ten: GroupBench) -> None:
    term = ok(ten.acquire("a"))
    ten.expire()
    stored = ten.snapshot()
    assert ten.acquire("b") == ("EXPIRED", 0, ten.last_event(), "m-a", term)
    assert ten.acquire("b", expired=term - 1) == ("EXPIRED", 0, ten.last_event(), "m-a", term)
    assert ten.snapshot() == stored
    assert ten.renew("a", term) == ("OK",)  # it comes back
    assert ten.acquire("b", expired=term)[0] == "HELD"
    ten.expire()
    later = ok(ten.acquire("b", expired=term))  # it does not
    assert later > term
    ten.expire()
    assert ten.acquire("c", expired=term)[0] == "EXPIRED"  # another term has ended since


@pytest.mark.parametrize("by", ["acquire", "seek"])
def test_the_term_rises_even_if_the_clock_was_set_back(ten: GroupBench, by: str) -> None:
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


def test_a_lease_key_without_an_end_is_not_taken(ten: GroupBench) -> None:
    ten.plain.set(ten.lease, "somebody")
    assert ten.acquire("a") == ("HELD", -1, "0-0", "")


def test_the_position_is_what_is_confirmed_else_the_start(bench: GroupBench) -> None:
    bench.create(next=10, epoch=7)
    bench.open(3)
    answer = bench.acquire("a")
    assert answer[2:] == (3, 7, 10, "")
    bench.confirm("a", ok(answer), 6, epoch=7)
    bench.release("a")
    bench.plain.hset(bench.meta, "next", 20)
    assert bench.acquire("b")[2:] == (6, 7, 20, "")


def test_only_the_first_term_floats_and_a_repeat_of_its_question(bench: GroupBench) -> None:
    bench.create(next=10)
    bench.open(2, floating=True)
    first = bench.acquire("a")
    assert first[-1] == "floating"
    assert bench.acquire("a") == first
    bench.expire()
    assert bench.acquire("b", expired=ok(first))[-1] == ""
    bench.release("b")
    assert bench.acquire("a")[-1] == ""
    assert bench.seek(4, floating=True, force=True) == ("OK",)
    assert bench.acquire("c")[-1] == "floating"  # as after a new beginning
    bench.release("c")
    assert bench.acquire("d")[-1] == ""


# renew and lapse


def test_touch_lengthens_the_lease_of_its_owner_only(ten: GroupBench) -> None:
    term = ok(ten.acquire("a", ttl_ms=1000))
    assert ten.renew("a", term, ttl_ms=50_000) == ("OK",)
    stored = ten.snapshot()
    assert ten.plain.pttl(ten.lease) > 1000
    assert ten.renew("b", term) == ("FENCED", term)
    assert ten.renew("a", term - 1) == ("FENCED", term)
    assert ten.snapshot() == stored


def test_touch_of_a_group_without_terms_is_fenced(ten: GroupBench) -> None:
    assert ten.renew("a", 1) == ("FENCED", 0)
    assert ten.confirm("a", 1, 1) == ("FENCED", 0)
    assert ten.holder() is None


def test_a_lapsed_lease_is_there_for_everybody_and_its_owner_gets_it_back(
    ten: GroupBench,
) -> None:
    term = ok(ten.acquire("a"))
    assert ten.release("a", lapse=True) == ("OK",)
    assert ten.holder() is None
    assert ten.renew("a", term) == ("OK",)
    assert ten.holder() == f"m-a {term}"
    assert ten.field("owner") == "m-a"
    assert [event["event"] for event in ten.happened()] == ["assigned", "released", "assigned"]
    assert ten.release("a", lapse=True) == ("OK",)
    later = ok(ten.acquire("b"))  # at once: it was given up
    assert ten.renew("a", term) == ("FENCED", later)
    assert ten.release("a", lapse=True) == ("FENCED",)


def test_a_lapse_that_arrives_after_the_next_renewal_changes_nothing(ten: GroupBench) -> None:
    term = ok(ten.acquire("a"))
    assert ten.renew("a", term) == ("OK",)
    assert ten.release("a", lapse=True, lease=f"m-a {term} 0") == ("FENCED",)
    assert ten.holder() == f"m-a {term}"


def test_what_was_handled_may_be_confirmed_while_it_is_lapsed(ten: GroupBench) -> None:
    term = ok(ten.acquire("a"))
    ten.release("a", lapse=True)
    assert ten.confirm("a", term, 3) == ("OK", 3)


# confirm


def test_confirmed_goes_forward_only_and_not_beyond_the_end(ten: GroupBench) -> None:
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


def test_a_confirm_below_the_start_does_not_take_the_group_back(bench: GroupBench) -> None:
    bench.create(next=10)
    bench.open(5)
    term = ok(bench.acquire("a"))
    assert bench.confirm("a", term, 3) == ("OK", 5)
    assert bench.open(create=False) == ("NOOFFSET",)
    assert bench.acquire("a")[2] == 5


def test_a_confirm_of_another_history_or_epoch_is_told_so(bench: GroupBench) -> None:
    bench.create(next=10, epoch=5, epochs="1:0,5:8")
    bench.open(0)
    term = ok(bench.acquire("a"))
    stored = bench.snapshot()
    assert bench.confirm("a", term, 3, history="x" * 40) == ("HISTORY", HISTORY)
    assert bench.confirm("a", term, 3, epoch=1) == ("EPOCH", 5, "1:0,5:8", 10)
    assert bench.confirm("b", term, 3, epoch=1) == ("FENCED", term)  # before all else
    assert bench.snapshot() == stored
    assert bench.confirm("a", term, 3, epoch=5, history="") == ("OK", 3)  # hidden: not compared


def test_offsets_and_terms_stay_exact_up_to_the_last(bench: GroupBench) -> None:
    end = OFFSET_MAX
    bench.create(next=end)
    assert bench.open("") == ("OK", end)
    bench.delete()
    assert bench.open(end - 3) == ("OK", end - 3)
    answer = bench.acquire("a")
    term = ok(answer)
    assert answer[2:] == (end - 3, 1, end, "")
    for offset in (end - 2, end - 1, end):
        assert bench.confirm("a", term, offset) == ("OK", offset)
        assert bench.field("confirmed") == str(offset)
    assert bench.confirm("a", term, end - 1) == ("OK", end)
    assert bench.seek(end - 1, force=True) == ("OK",)
    assert bench.acquire("b")[2] == end - 1
    bench.plain.hset(bench.group, mapping={"term": 2**53 - 2, "nonce": "b"})
    assert bench.renew("b", 2**53 - 2) == ("OK",)
    bench.release("b")
    assert ok(bench.acquire("c")) == 2**53 - 1
    assert bench.field("term") == str(2**53 - 1)


# seek_group


def test_a_seek_begins_a_group_or_moves_one(bench: GroupBench) -> None:
    bench.create(next=10)
    assert bench.seek(7, request="1") == ("OK",)
    assert bench.plain.smembers(bench.groups) == {b"g"}
    assert bench.open(0) == bench.open(create=False) == ("OK", 7)
    assert bench.seek(3, request="2") == ("OK",)  # back, too
    assert bench.acquire("a")[2] == 3


def test_a_seek_of_an_active_group_needs_force_and_fences_its_owner(ten: GroupBench) -> None:
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


def test_a_repeated_seek_does_not_undo_what_followed(ten: GroupBench) -> None:
    assert ten.seek(2, request="1", force=True) == ("OK",)
    term = ok(ten.acquire("a"))
    ten.confirm("a", term, 4)
    stored = ten.snapshot()
    assert ten.seek(2, request="1", force=True) == ("OK",)
    assert ten.snapshot() == stored


def test_a_lease_left_behind_by_a_former_stream_does_not_stop_a_seek(bench: GroupBench) -> None:
    bench.create(next=10)
    bench.plain.hset(bench.group, mapping={"incarnation": "earlier", "term": "5", "nonce": "a"})
    bench.plain.set(bench.lease, "m-a 5", px=TTL_MS)
    assert bench.seek(2) == ("OK",)
    assert bench.holder() is None
    assert bench.acquire("b")[2] == 2


# delete_group, and what is left


def test_an_active_group_is_deleted_by_force_only(ten: GroupBench) -> None:
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


def test_a_group_begun_anew_does_not_know_its_former_owner(ten: GroupBench) -> None:
    term = ok(ten.acquire("a"))
    ten.delete(force=True)
    ten.open(0)
    assert ten.renew("a", term)[0] == ten.confirm("a", term, 5)[0] == "FENCED"
    assert ten.release("a") == ("FENCED",)
    assert ten.acquire("b")[2] == 0


def test_groups_do_not_know_each_other(ten: GroupBench) -> None:
    other = GroupBench(ten.client, group="h")
    other.open(5)
    first, second = ok(ten.acquire("a")), ok(other.acquire("b"))
    assert ten.confirm("b", second, 3)[0] == "FENCED"
    assert ten.confirm("a", first, 3) == ("OK", 3)
    assert other.confirm("b", second, 7) == ("OK", 7)
    assert ten.delete(force=True) == ("OK",)
    assert other.renew("b", second) == ("OK",)
    assert ten.plain.smembers(ten.groups) == {b"h"}


def test_every_key_has_somebody_who_deletes_it(any_url: str) -> None:
    with meteor.connect(any_url) as client:
        stream = client.stream("s")
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
        assert client.redis.keys("*") == []  # not even by the member that leaves late


def test_events_are_bounded(ten: GroupBench) -> None:
    for _ in range(700):
        ok(ten.acquire("a"))
        ten.release("a")
    kept: Any = ten.plain.xlen(ten.events)
    assert 1000 <= kept <= 1200


def test_a_lease_ends_by_itself(ten: GroupBench) -> None:
    term = ok(ten.acquire("a", ttl_ms=50))
    eventually(lambda: ten.acquire("b", expired=term)[0] == "OK")


# The epoch that a confirm names


def lose_tail(bench: GroupBench, first: int) -> None:
    """The server loses all from ``first`` on, and a new epoch begins there."""
    for entry_id, _ in bench.entries():
        if int(entry_id.split(b"-")[0]) >= first:
            bench.plain.xdel(bench.log, entry_id)
    bench.plain.hset(bench.meta, mapping={"next": first, "history": "of a former server"})


@pytest.mark.parametrize("lost", [0, 5])
def test_only_what_was_read_in_a_lost_branch_cannot_be_confirmed(url: str, lost: int) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s")
        fill(stream, *[1] * 10)
        with stream.subscriber(group="g") as sub:
            assert len(sub.poll()) == 10
            lose_tail(GroupBench(client), 10 - lost)
            fill(stream, 10)
            assert sub.confirm(4).result(20) == 5  # by which the session hears of the epoch
            if lost:
                with pytest.raises(meteor.LogTruncated) as caught:
                    sub.confirm(9).result(20)
                assert (caught.value.first, caught.value.last) == (5, 9)
                assert stream.groups()[0].confirmed == 5
            else:
                assert sub.confirm(9).result(20) == 10
                assert len(sub.poll()) == 10  # of the new epoch
                assert sub.confirm().result(20) == 20
