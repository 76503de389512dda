"""What a review of peer groups found: each of these failed once.

Ttls are long, so no timer does it: the heart beats when it is told to (``hurry``).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import HandlerFailed, MemberTaken, MemberUnknown, MessageExpired, PeerError
from meteor_py.peers import group_handle, listeners, member_handle
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.leadership import Term
from meteor_py.peers.membership import Membership
from meteor_py.peers.messaging import inbox as ininbox_module
from meteor_py.peers.messaging import requests
from meteor_py.peers.messaging.inbox import QueueState
from meteor_py.peers.messaging.message import Message
from meteor_py.peers.voting.actions import Action
from meteor_py.peers.voting.proposal import Outcome
from meteor_py.runtime.clock import now
from tests.support.mailing import SOON_S, Gate, Record, failure, inbox_length, result
from tests.support.peering import LONG_S, Open, expel
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


def beat(group: PeerGroup, me: Membership) -> None:
    """Return when the heart has beaten for a member, and done what follows from it."""
    for _ in range(2):  # what follows from the first is done before the second
        before = me._handle.valid_until
        group._handle.heartbeat.hurry()
        eventually(lambda before=before: me._handle.valid_until > before, SOON_S)  # type: ignore[misc]


def leader_threads() -> int:
    return sum(thread.name.startswith("meteor-leader") for thread in threading.enumerate())


# The leader


def lead_for_a_moment(me: Membership) -> None:
    with me.leadership(SOON_S):
        pass


@pytest.mark.parametrize("way", [Membership.resign, lead_for_a_moment])
def test_nobody_else_is_elected_while_the_work_of_one_who_resigns_goes_on(
    open_group: Open, monkeypatch: pytest.MonkeyPatch, way: Callable[[Membership], object]
) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", LONG_S)
    one, two = open_group(ttl=LONG_S), open_group()
    me, other = one.join(), two.join()
    begun, ending, finish = threading.Event(), threading.Event(), threading.Event()

    @me.as_leader
    def lead(term: Term) -> None:
        begun.set()
        term.lost.wait(SOON_S)
        ending.set()
        finish.wait(SOON_S)

    assert begun.wait(SOON_S)
    resigning = threading.Thread(target=way, args=(me,))
    resigning.start()
    assert ending.wait(SOON_S)
    beat(one, me)
    assert two._handle.protocol.look().leader == me.id
    assert other.term is None
    finish.set()
    resigning.join(SOON_S)
    eventually(lambda: other.term is not None, SOON_S)


def test_work_that_goes_on_after_its_term_has_one_thread_and_is_called_with_the_last_one(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_handle, "LEAVE_S", 0.01)
    me = open_group(ttl=LONG_S).join()
    finish = threading.Event()
    terms: list[Term] = []

    @me.as_leader
    def lead(term: Term) -> None:
        terms.append(term)
        finish.wait(SOON_S)

    eventually(lambda: terms, SOON_S)
    numbers = []
    for _ in range(5):
        eventually(lambda: me.term is not None, SOON_S)
        assert me.term is not None
        numbers.append(me.term.number)
        me.resign()
    eventually(lambda: me.term is not None, SOON_S)
    assert leader_threads() == 1
    finish.set()
    eventually(lambda: len(terms) == 2, SOON_S)
    assert terms[0].number == numbers[0]
    assert terms[1] is me.term
    eventually(lambda: leader_threads() == 0, SOON_S)


def test_the_same_function_leads_once(open_group: Open) -> None:
    me = open_group(ttl=LONG_S).join()
    terms: list[Term] = []
    me.as_leader(terms.append)
    me.as_leader(terms.append)
    eventually(lambda: len(terms) == 1 and leader_threads() == 0, SOON_S)
    me.resign()
    eventually(lambda: len(terms) == 2 and leader_threads() == 0, SOON_S)


def test_work_that_exits_lets_others_lead(open_group: Open) -> None:
    group = open_group(ttl=1.5)
    first, second = group.join(), group.join()
    first.as_leader(lambda term: sys.exit("fatal"))
    eventually(lambda: second.term is not None, SOON_S)


# What is answered


class Odd(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Thing:
    """Something that cannot be written."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode(self) -> bytes:
        raise self.error


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "answer",
    [2**70, nested(100_000), Thing(KeyError("x")), Thing(SystemExit(1)), Thing(Odd())],
    ids=["overflow", "depth", "KeyError", "SystemExit", "no text"],
)
def test_an_answer_that_cannot_be_written_fails_the_message(
    open_group: Open, answer: object
) -> None:
    codec = PeerCodec("msgpack")
    codec.register(Thing, id=1, encode=Thing.encode, decode=lambda data: Thing(KeyError()))
    group = open_group(ttl=LONG_S, codec=codec)
    me = group.join("a")
    me.on("q")(Record(lambda message: answer if message.body else "well"))
    error = failure(group.member("a").ask("q", 1, timeout=LONG_S))
    assert isinstance(error, HandlerFailed)
    assert "cannot be sent" in str(error)
    assert result(group.member("a").ask("q", 0, timeout=LONG_S)) == "well"  # its thread goes on
    assert inbox_length(group, "a") == 0


def test_a_handler_whose_error_has_no_text_fails_its_message(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)

    def fail(message: Message) -> None:
        raise Odd

    group.join("a").on("q")(fail)
    assert "Odd" in str(failure(group.member("a").ask("q", timeout=LONG_S)))


@pytest.mark.parametrize("value", [2**70, nested(100_000), Thing(KeyError("x"))])
def test_whatever_cannot_be_written_is_a_value_error_for_who_sends(value: object) -> None:
    codec = PeerCodec("msgpack")
    codec.register(Thing, id=1, encode=Thing.encode, decode=lambda data: Thing(KeyError()))
    with pytest.raises(ValueError, match="cannot be written") as info:
        codec.encode(value)
    assert info.value.__cause__ is not None


@pytest.mark.parametrize("value", [float("nan"), [{"x": float("inf")}, None], (1, -float("inf"))])
def test_numbers_that_json_has_not_are_refused(open_group: Open, value: object) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join("a", metadata={"nothing": None})
    assert me.group.members[0].metadata == {"nothing": None}
    for way in (
        lambda: group.join(metadata=value),
        lambda: me.update(value),
        lambda: group.member("a").tell("q", value),
        lambda: group.propose(value),
    ):
        with pytest.raises(ValueError, match="NaN and infinity"):
            way()
    codec = PeerCodec("msgpack")
    assert repr(codec.decode(*codec.encode([float("nan")]))) == "[nan]"


def test_the_reader_waits_for_what_is_left_of_a_handler_s_time(open_group: Open) -> None:
    me = open_group(ttl=LONG_S).join()
    inbox = ininbox_module.Inbox(me._handle)
    timeout = inbox._connection.block_max_s / 2
    box = QueueState(inbox, "q", print, timeout=timeout)
    box.live = True
    message = Message("m", "q", "tell", None, False, 1, 1, 0.0, 0.0, 0.0)
    box.held[(0, 1), "m"] = message
    assert inbox._block_s([box]) == timeout  # it may be taken at once
    message.overdue_at = now() + timeout / 2
    assert inbox._block_s([box]) <= timeout / 2
    message.overdue_at = now()
    assert 0 < inbox._block_s([box]) < timeout / 2


def test_a_callback_of_an_answer_does_not_wait_for_its_own_thread(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = open_group(ttl=LONG_S)
    me, slow, quick = group.join("a"), Gate(), Gate()
    me.on("slow")(slow)
    me.on("quick")(quick)
    asked: list[Future[Any]] = []

    def ask_again(_: object) -> None:
        asked.append(group.member("a").ask("slow", timeout=LONG_S))

    first = group.member("a").ask("slow", timeout=LONG_S)
    second = group.member("a").ask("quick", timeout=LONG_S)
    second.add_done_callback(ask_again)
    monkeypatch.setattr(requests, "PENDING_MAX", 1)
    quick.open.set()
    eventually(lambda: asked, SOON_S)
    assert isinstance(failure(asked[0]), MessageExpired)
    assert not first.done()
    slow.open.set()
    result(first)


def test_a_message_to_a_group_of_dead_members_says_so(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    assert str(failure(group.any.tell("q"))) == "Nobody is in group 'workers'."
    group.join("a").close()
    eventually(lambda: [member.alive for member in group.members] == [False], SOON_S)
    for target in (group.any, group.all):
        error = failure(target.tell("q"))
        assert isinstance(error, MemberUnknown)
        assert str(error) == "Nobody in group 'workers' is alive."


@pytest.mark.parametrize("how", ["resync", "connection"])
def test_answers_are_read_from_the_beginning_when_they_may_have_begun_anew(
    open_group: Open, how: str
) -> None:
    group = open_group(ttl=LONG_S)
    group.join("a").on("q")(Record(lambda message: message.body))
    assert result(group.member("a").ask("q", 1)) == 1
    watcher = group._handle.event_reader
    watcher._reply_position = "9999999999999-0"  # by the clock of a server that is gone

    def lost() -> bool:
        if how == "resync":
            group._handle.resync(reset=True)
            group.join().leave()  # the watch is woken
        else:
            watcher._connection.interrupt()
        return watcher._reply_position != "9999999999999-0"

    eventually(lost, SOON_S)
    assert result(group.member("a").ask("q", 2, timeout=LONG_S)) == 2


# Members


def test_all_members_of_a_handle_leave_though_their_handlers_are_busy(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_handle, "_LEAVE_S", 0.3)  # for all of them together
    one, two = open_group(ttl=LONG_S), open_group()
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        me = one.join()
        me.on("q")(gate)
        two.member(me.id).tell("q").result(SOON_S)
        gate.wait_until_entered()
    one.close()
    eventually(lambda: not two.members, SOON_S)
    assert not any(gate.messages for gate in gates)
    for gate in gates:
        gate.open.set()


def test_a_member_that_cannot_come_back_does_not_keep_others_from_being_heard_of(
    open_group: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = open_group(ttl=LONG_S)
    first, second = group.join(), group.join()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(member_handle, "MEMBERS_MAX", 1)
        expel(group, first.id)
        group._handle.heartbeat.hurry()
        eventually(lambda: first._handle.recovering, SOON_S)
        beat(group, second)
        beat(group, second)
        assert first._handle.recovering
        assert caplog.text.count("may not have more") >= 1
        assert sum("is not heard of" in record.message for record in caplog.records) == 1
    group._handle.heartbeat.hurry()
    eventually(lambda: not first._handle.recovering, SOON_S)
    assert not first.lost.is_set()


def test_who_was_expelled_and_comes_back_updates_and_proposes_meanwhile(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    me.on_vote(lambda proposal: True)
    expel(group, me.id)
    me.update({"x": 1})
    eventually(lambda: [member.metadata for member in group.members] == [{"x": 1}], SOON_S)
    expel(group, me.id)
    assert result(me.propose("lunch", timeout=SOON_S)).passed
    assert me.reason is None
    group.remove(me.id)
    with pytest.raises(meteor.MembershipLost, match="removed"):
        me.update({"x": 2})


def test_the_id_of_a_member_without_a_name_cannot_be_taken_over(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    with pytest.raises(MemberTaken, match="joined without a name; choose another"):
        group.join(me.id)
    group.join("a")
    with pytest.raises(MemberTaken, match="take it over"):
        group.join("a", on_conflict="fail")


def test_a_group_is_opened_by_the_name_that_is_listed(url: str) -> None:
    with meteor.connect(url) as m, m.peer_group("cell", instance="c1") as group:
        me = group.join()
        (name,) = m.peer_groups()
        with m.peer_group(name, create=False) as same:
            assert (same.name, same.find(me.id) is not None) == ("cell/c1", True)
        for wrong in ("cell/", "/c1", "cell/c1/x"):
            with pytest.raises(ValueError, match="group"):
                m.peer_group(wrong)
        with pytest.raises(ValueError, match="group"):
            m.peer_group("cell/c1", instance="c2")


def test_that_dead_members_stay_for_ever_can_be_asked_for(url: str) -> None:
    with meteor.connect(url) as m:
        m.peer_group("short", member_expiration=5).close()
        m.peer_group("short").close()
        with pytest.raises(PeerError, match=r"exists with member_expiration=5\.0, not None"):
            m.peer_group("short", member_expiration=None)
        m.peer_group("long", member_expiration=None).close()
        m.peer_group("long", member_expiration=None).close()


# Callbacks


def test_a_callback_that_exits_is_logged_and_the_next_is_called(
    open_group: Open, caplog: pytest.LogCaptureFixture
) -> None:
    group = open_group(ttl=LONG_S, election=None)
    told: list[str] = []
    group.on_join(lambda member: sys.exit(1))
    group.on_join(lambda member: told.append(member.id))
    group.join("a")
    group.join("b")
    eventually(lambda: told == ["a", "b"], SOON_S)
    assert "A callback of a group failed" in caplog.text


def test_a_vote_and_an_action_and_a_callback_that_exit_stop_nothing(
    open_group: Open, caplog: pytest.LogCaptureFixture
) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join("a")
    me.on("q")(Record(lambda message: message.body))
    me.on_action("go")(lambda action: sys.exit(1))
    assert result(group.propose_action("go", at=group.now() + 1)).passed
    eventually(lambda: "Action 'go' of group 'workers' failed" in caplog.text, SOON_S)
    me.on_vote(lambda proposal: sys.exit(1))
    outcome = group.propose("lunch", timeout=LONG_S)
    outcome.add_done_callback(lambda future: sys.exit(1))
    assert result(outcome).no == ("a",)
    assert result(group.propose("dinner", timeout=LONG_S)).no == ("a",)
    gate = Gate()
    me.on("gate")(gate)
    answer = group.member("a").ask("gate", timeout=LONG_S)
    answer.add_done_callback(lambda future: sys.exit(1))
    gate.open.set()
    result(answer)
    assert result(group.member("a").ask("q", 7, timeout=LONG_S)) == 7


def test_who_is_another_member_since_the_vote_misses_the_action(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join()
    done: list[Action] = []
    missed: list[Action] = []
    me.on_action("go")(done.append)
    me.on_missed(missed.append)
    before = me.id
    expel(group, me.id)
    group._handle.heartbeat.hurry()
    eventually(lambda: me.id != before and not me._handle.recovering, SOON_S)
    facts: dict[str, Any] = {"no": (), "abstained": (), "missing": (), "topic": 7, "by": None}
    facts |= {"passed": True, "reason": "passed", "kind": "majority", "decided": group.now()}
    at = group.now() + LONG_S
    me._handle.voter.act(Outcome(poll="p1", yes=("other",), action="go", at=at, **facts))
    me._handle.voter.act(Outcome(poll="p2", yes=(before,), action="go", at=at, **facts))
    eventually(lambda: missed, SOON_S)
    assert [(action.poll, action.params) for action in missed] == [("p2", 7)]
    assert not done


def test_who_was_not_told_of_all_is_told_to_look_anew(
    open_group: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_CALLS_MAX", 3)
    group = open_group(ttl=LONG_S, election=None)
    hangs, goes_on = threading.Event(), threading.Event()
    told: list[str] = []

    @group.on_join
    def _(member: meteor.Member) -> None:
        told.append(member.id)
        hangs.set()
        assert goes_on.wait(SOON_S)

    group.on_reset(lambda: told.append(f"{len(group.members)} members"))
    group.join("m0")
    assert hangs.wait(SOON_S)
    for number in range(1, 8):
        group.join(f"m{number}")
    goes_on.set()
    eventually(lambda: len(told) == 5, SOON_S)
    group.join("last")
    eventually(lambda: "last" in told, SOON_S)
    assert told == ["m0", "m1", "m2", "m3", "8 members", "last"]
