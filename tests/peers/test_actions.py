"""Timed actions: a group agrees on an action, and its members run it at the same moment."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from meteor_py.errors import (
    ActionRefused,
    ClockTooUncertain,
)
from meteor_py.peers.voting.actions import Action
from meteor_py.peers.voting.clock import GroupClock
from meteor_py.peers.voting.proposal import Outcome, Proposal
from meteor_py.runtime.clock import now
from tests.conftest import ServerFactory
from tests.support.mailing import SOON_S
from tests.support.peer_voters import LONG_S, RESULT_S, Hold, Panel, Voters, always
from tests.support.peering import Open, expel
from tests.support.peering import open_group as open_group
from tests.support.proxy import Proxy
from tests.support.servers import HOST
from tests.support.waiting import eventually

#: Maximum rounding error in seconds between two readings of one clock.
FLOAT_S = 1e-6
#: Minimum number of seconds between the end of a vote and the action.
LEAD_S = 0.2


def outcome_of(future: Future[Outcome]) -> Outcome:
    return future.result(RESULT_S)


def done_by(processes: list[Voters], count: int = 1) -> list[list[dict[str, Any]]]:
    """Wait until each process has run ``count`` actions, and return the actions."""
    for process in processes:
        eventually(partial(_has_done, process, count), RESULT_S, f"{process.name} did not act")
    return [process.ask("actions") for process in processes]


def _has_done(process: Voters, count: int) -> bool:
    return len(process.ask("actions")) >= count


# -- running


def test_five_processes_act_at_the_same_moment_within_error_bounds(
    url: str, record_property: Any
) -> None:
    with Panel(url) as panel:
        processes = panel.processes(5)
        for process in processes:
            process.ask("act", "open")
        at = panel.peer_group.now() + 1.5
        outcome = outcome_of(panel.peer_group.propose_action("open", {"relay": 3}, at=at))
        assert outcome.passed
        assert outcome.action == "open"
        assert outcome.at is not None
        assert abs(outcome.at - at) <= 0.001
        found = [one for (one,) in done_by(processes)]
        for one in found:
            assert (one["name"], one["params"], one["at"]) == ("open", {"relay": 3}, outcome.at)
            assert one["poll"] == outcome.poll
            assert 0 < one["error_bound"] < 0.1
            started = one["true"] - outcome.at
            assert started >= -one["error_bound"] - FLOAT_S  # not too early
            assert one["late"] <= started + one["error_bound"] + FLOAT_S  # not overstated
        starts = [one["true"] for one in found]
        bound = max(one["error_bound"] for one in found)
        spread = max(starts) - min(starts)
        late = max(one["late"] for one in found)
        print(f"spread {spread * 1e6:.0f} us, bound {bound * 1e6:.0f} us, late {late * 1e6:.0f} us")
        # Besides clock errors, processes may have waited for a CPU.
        assert spread <= 2 * bound + max(late, 0.0) + FLOAT_S + _delays(found, outcome.at)


def _delays(found: list[dict[str, Any]], at: float) -> float:
    """Return the longest delay between reading the clock and running the handler."""
    return max(float(one["true"] - at - one["late"]) for one in found)


def test_member_that_does_not_lead_can_propose_an_action_repeatedly(url: str) -> None:
    with Panel(url) as panel:
        one, two = panel.members(2)
        done: list[Action] = []
        for member in (one, two):
            member.on_action("tick", late="run")(done.append)
        for count in (1, 2):
            future = two.propose_action("tick", count, at=panel.peer_group.now() + 1.0)
            assert outcome_of(future).by == two.id
            eventually(partial(_has_length, done, 2 * count), RESULT_S, "the action was not run")
        assert [action.params for action in done] == [1, 1, 2, 2]
        assert all(action.by == two.id for action in done)


def _has_length(done: list[Action], length: int) -> bool:
    return len(done) == length


def test_rejected_action_does_not_run(url: str) -> None:
    with Panel(url) as panel:
        one, two = panel.members(2)
        done: list[Action] = []
        for member in (one, two):
            member.on_action("a")(done.append)
            member.on_action("b")(done.append)
        two.on_vote(lambda proposal: proposal.action == "b")
        at = panel.peer_group.now() + 1.0
        assert not outcome_of(panel.peer_group.propose_action("a", at=at)).passed
        assert outcome_of(panel.peer_group.propose_action("b", at=at)).passed
        eventually(lambda: len(done) == 2, RESULT_S, "the action was not run")
        assert {action.name for action in done} == {"b"}


def test_outvoted_member_acts_but_unasked_member_does_not(url: str) -> None:
    with Panel(url) as panel:
        one, two, three = panel.members(3)
        done: list[str] = []

        def register(member: Any) -> None:
            member.on_action("go")(lambda action: done.append(member.id))

        for member in (one, two, three):
            register(member)
        three.on_vote(always(False))
        hold = Hold()
        two.on_vote(hold)
        at = panel.peer_group.now() + 1.5
        future = panel.peer_group.propose_action("go", at=at, kind="majority", timeout=LONG_S)
        late = panel.peer_group.join()
        register(late)
        eventually(lambda: "n" in panel.votes(), RESULT_S, "the member did not vote")
        hold.go()
        assert outcome_of(future).no == (three.id,)
        eventually(lambda: len(done) == 3, RESULT_S, "the action was not run")
        assert sorted(done) == sorted([one.id, two.id, three.id])


def test_member_that_left_does_not_act(url: str) -> None:
    with Panel(url) as panel:
        one, two = panel.members(2)
        done: list[str] = []
        for member in (one, two):
            member.on_action("go")(lambda action, member=member: done.append(member.id))
        assert outcome_of(
            panel.peer_group.propose_action("go", at=panel.peer_group.now() + 1.0)
        ).passed
        one.leave()
        eventually(lambda: done, RESULT_S, "no member ran the action")
        assert done == [two.id]


def test_named_member_acts_after_restart(url: str) -> None:
    with Panel(url) as panel:
        old = panel.process(name="worker")
        old.ask("act", "go")
        at = panel.peer_group.now() + 5.0
        assert outcome_of(panel.peer_group.propose_action("go", at=at)).passed
        old.kill()
        new = panel.process(name="worker")
        new.ask("act", "go")
        (((one),),) = done_by([new])
        assert one["late"] >= -one["error_bound"]


def test_slow_or_failing_action_does_not_delay_others(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(action: Action) -> None:
        raise RuntimeError("the breaker is stuck")

    release, done = threading.Event(), threading.Event()
    with Panel(url) as panel:
        (member,) = panel.members(1)
        member.on_action("slow")(lambda action: release.wait(RESULT_S))
        member.on_action("fails")(fail)
        member.on_action("quick")(lambda action: done.set())
        at = panel.peer_group.now() + 1.0
        for name in ("slow", "fails", "quick"):
            assert outcome_of(panel.peer_group.propose_action(name, at=at)).passed
        assert done.wait(RESULT_S)
        eventually(lambda: "breaker is stuck" in caplog.text, RESULT_S, "the error was not logged")
        release.set()


# -- voting


def test_member_votes_yes_only_to_actions_it_has_handlers_for(url: str) -> None:
    with Panel(url) as panel:
        able, unable, blank = panel.members(3)
        able.on_action("go")(lambda action: None)
        unable.on_action("stay")(lambda action: None)
        future = panel.peer_group.propose_action(
            "go", at=panel.peer_group.now() + 1.0, kind="majority"
        )
        outcome = outcome_of(future)
        assert (outcome.yes, outcome.no) == ((able.id,), (unable.id,))
        assert outcome.missing == (blank.id,)  # this member has no handlers, so it has not voted
        assert not outcome.passed


def test_vote_on_action_ends_before_the_action_whatever_the_timeout(url: str) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        asked: list[Proposal] = []
        hold = Hold()

        def vote(proposal: Proposal) -> bool | None:
            asked.append(proposal)
            return hold(proposal)

        member.on_vote(vote)
        missed: list[Action] = []
        member.on_action("go")(missed.append)
        at = panel.peer_group.now() + 1
        future = panel.peer_group.propose_action("go", at=at, timeout=LONG_S)
        outcome = outcome_of(future)
        assert (outcome.passed, outcome.reason) == (False, "timeout")
        assert asked[0].deadline <= at - LEAD_S
        assert asked[0].at == outcome.at
        hold.go()
        assert not missed


def test_vote_on_action_ends_before_the_action_even_if_extended(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        panel.members(1)
        at = panel.peer_group.now() + 1
        future = panel.peer_group.propose_action("go", at=at, timeout=0.3)
        # As if the server had been down for a minute: the vote's deadline moves by a minute.
        panel.redis.hincrby(panel.key("state"), "last", -60_000)
        assert outcome_of(future).reason == "timeout"
        graces: Any = panel.redis.hget(panel.key("state"), "graces")
        assert int(graces) == 1


def test_action_that_is_too_soon_is_refused(url: str) -> None:
    with Panel(url) as panel:
        panel.members(1)
        for at in (panel.peer_group.now() + LEAD_S / 2, panel.peer_group.now() - 1, 0):
            with pytest.raises(ActionRefused, match="Choose a later time"):
                panel.peer_group.propose_action("go", at=at)


def test_pending_action_cannot_be_proposed_again_until_it_has_run(url: str) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        done: list[Action] = []
        member.on_action("go")(done.append)
        hold = Hold()
        member.on_vote(hold)
        group = panel.peer_group
        first = group.propose_action("go", at=group.now() + 1.5)
        with pytest.raises(ActionRefused, match=r"is already pending \(poll"):
            group.propose_action("go", at=group.now() + 9)  # the vote is open
        hold.go()
        assert outcome_of(first).passed
        with pytest.raises(ActionRefused, match=outcome_of(first).poll):
            group.propose_action("go", at=group.now() + 9)  # the members have agreed on it
        eventually(lambda: done, RESULT_S, "the action was not run")
        assert outcome_of(group.propose_action("go", at=group.now() + 1)).passed


def test_rejected_action_can_be_proposed_again(url: str) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        member.on_vote(always(False))
        group = panel.peer_group
        assert not outcome_of(group.propose_action("go", at=group.now() + 60)).passed
        assert not panel.redis.exists(panel.key("pending"))
        member.on_vote(always(True))
        outcome = outcome_of(group.propose_action("go", at=group.now() + 60))
        assert outcome.passed
        left: Any = panel.redis.pttl(panel.key("pending"))
        assert 3_600_000 < left < 3_670_000  # an hour after the last action is due


@pytest.mark.parametrize("at", [float("nan"), float("inf"), -1, 1e13, "soon", True])
def test_impossible_action_time_is_refused(url: str, at: Any) -> None:
    with Panel(url) as panel, pytest.raises((ValueError, TypeError), match="at must be"):
        panel.peer_group.propose_action("go", at=at)


# -- too late


def test_member_that_learns_of_an_action_too_late_misses_it_or_runs_it_late(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        (here,) = panel.members(1)
        careful, keen = panel.processes(2)
        careful.ask("act", "go")
        keen.ask("act", "go", "run")
        here.on_action("go")(lambda action: None)
        for process in (careful, keen):
            process.pause()
        at = panel.peer_group.now() + 1.0
        outcome = outcome_of(panel.peer_group.propose_action("go", 7, at=at, kind=1))
        assert outcome.passed
        eventually(
            lambda: panel.peer_group.now() > at + 0.05, RESULT_S, "the clock did not advance"
        )
        for process in (careful, keen):
            process.resume()
        eventually(lambda: careful.ask("missed"), RESULT_S, "on_missed was not called")
        (missed,) = careful.ask("missed")
        assert (missed["name"], missed["params"], missed["poll"]) == ("go", 7, outcome.poll)
        assert missed["late"] >= 0.05 - missed["error_bound"]
        assert careful.ask("actions") == []
        (((done),),) = done_by([keen])
        assert done["late"] >= 0.05 - done["error_bound"]
        assert keen.ask("missed") == []


def test_process_that_sleeps_through_an_action_misses_it(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        (sleeper,) = panel.processes(1)
        sleeper.ask("act", "go")
        at = panel.peer_group.now() + 2
        assert outcome_of(panel.peer_group.propose_action("go", at=at)).passed
        eventually(lambda: sleeper.ask("decisions"), RESULT_S, "no outcome arrived")
        sleeper.pause()
        eventually(lambda: panel.peer_group.now() > at + 0.3, RESULT_S, "the clock did not advance")
        sleeper.resume()
        eventually(lambda: sleeper.ask("missed"), RESULT_S, "on_missed was not called")
        assert sleeper.ask("missed")[0]["late"] >= 0.3 - sleeper.ask("missed")[0]["error_bound"]
        assert sleeper.ask("actions") == []


def test_handler_added_late_runs_upcoming_actions_and_ignores_past_ones(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Panel(url) as panel:
        group, (member,) = panel.peer_group, panel.members(1)
        member.on_vote(always(True))
        at = group.now() + 1.0
        for name in ("go", "coming"):
            assert outcome_of(group.propose_action(name, 1, at=at)).passed
        calls: list[Action] = []
        member.on_action("coming")(calls.append)
        eventually(lambda: calls, RESULT_S, "the action did not run")
        member.on_missed(calls.append)
        member.on_action("go")(calls.append)
        with caplog.at_level(logging.WARNING, "meteor_py"):
            assert outcome_of(group.propose_action("go", 2, at=group.now() + 0.8)).passed
            eventually(lambda: len(calls) == 2, RESULT_S, "the action did not run")
        assert [(action.name, action.params) for action in calls] == [("coming", 1), ("go", 2)]
        assert "missed action" not in caplog.text


# -- the clock


def test_proposer_with_uncertain_clock_is_refused(url: str) -> None:
    with Panel(url) as panel:
        panel.members(1)
        at = panel.peer_group.now() + 2
        with pytest.raises(ClockTooUncertain, match="Allow a larger"):
            panel.peer_group.propose_action("go", at=at, max_error=1e-9)


def test_voter_with_uncertain_clock_votes_no(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes")
    with Panel(server.url) as panel, Proxy(HOST, server.port) as proxy:
        near = panel.process()
        proxy.delay(0.1)
        far = panel.process(url=proxy.url)
        for process in (near, far):
            process.ask("act", "go")
        assert far.ask("error_bound") >= 0.1
        at = panel.peer_group.now() + 10
        future = panel.peer_group.propose_action("go", at=at, timeout=8, max_error=0.09)
        assert outcome_of(future).no == (far.name,)


def read(clock: GroupClock, server: float, trip: float = 0.002, age: float = 0.0) -> float:
    """Add a reading to the clock; return when it was taken, on the ``now()`` clock."""
    at = now() - age
    clock.read(at - trip / 2, at + trip / 2, server)
    return at


def test_clock_uses_its_best_reading() -> None:
    clock = GroupClock()
    assert not clock.known
    at = read(clock, 1000.0, trip=0.002)
    read(clock, 1000.4, trip=1.0)
    assert clock.now() - (now() - at) == pytest.approx(1000.0, abs=1e-3)
    assert 0.001 <= clock.error_bound < 0.4


def test_error_bound_grows_as_the_reading_ages() -> None:
    clock = GroupClock()
    read(clock, 1000.0, age=100.0)
    assert clock.error_bound >= 0.001 + 100 * 100e-6
    read(clock, 1100.0)
    assert clock.error_bound < 0.002


@pytest.mark.parametrize("step", [-3600.0, -0.5, 0.5, 3600.0])
def test_readings_from_before_a_clock_step_are_dropped(step: float) -> None:
    clock = GroupClock()
    for _ in range(8):
        read(clock, 1000.0, trip=0.0002)
    at = read(clock, 1000.0 + step, trip=0.002)  # less precise, but the only valid reading
    assert clock.now() - (now() - at) == pytest.approx(1000.0 + step, abs=0.01)
    assert clock.error_bound >= 0.001


def test_clock_can_be_read_while_it_is_updated() -> None:
    clock = GroupClock()
    read(clock, 1000.0)
    ended = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not ended.is_set():
                clock.now()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        read(clock, 1000.0)
    ended.set()
    thread.join()
    assert not errors


def test_member_whose_id_has_changed_since_the_vote_misses_the_action(open_group: Open) -> None:
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


def test_action_handler_sees_how_its_member_voted(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    votes: dict[str, bool | None] = {"yes": True, "no": False, "none": None}
    seen: dict[str, bool | None] = {}
    for name, vote in votes.items():
        me = group.join(name)
        me.on_action("go")(lambda action, name=name: seen.update({name: action.vote}))
        me.on_vote(lambda proposal, vote=vote: vote)
    at = group.now() + 1.5
    assert group.propose_action("go", at=at, kind=1, timeout=60).result(SOON_S).passed
    eventually(lambda: "yes" in seen and "no" in seen and "none" in seen, SOON_S)
    assert seen["yes"] is True
    assert seen["no"] in (False, None)  # the yes vote may have decided before the no vote arrived
    assert seen["none"] is None
