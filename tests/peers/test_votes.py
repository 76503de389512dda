"""Peer group votes: voters, counting, decisions and outcomes."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.peers.voting.proposal import Outcome, Proposal
from meteor_py.redis.scripts import PEERS_JOIN, PEERS_PROPOSE, PEERS_VOTE
from tests.conftest import ServerFactory
from tests.support.peer_voters import (
    GROUP,
    LONG_S,
    RESULT_S,
    Hold,
    Panel,
    Voters,
    always,
    ids,
    outcome_of,
)
from tests.support.proxy import Proxy
from tests.support.servers import HOST
from tests.support.waiting import eventually

# -- voters and listeners


def test_all_members_are_asked_once_and_learn_the_outcome(any_url: str) -> None:
    with Panel(any_url) as panel:
        members = panel.members(3)
        asked: list[tuple[str, Proposal]] = []
        told: list[Outcome] = []
        panel.handle().on_decision(told.append)
        for member in members:

            def vote(proposal: Proposal, member: Any = member) -> bool:
                asked.append((member.id, proposal))
                return True

            member.on_vote(vote)
        leader = panel.peer_group.leader
        assert leader is not None

        outcome = outcome_of(members[1].propose({"value": 7}, kind="consensus"))

        assert outcome.passed
        assert outcome.reason == "passed"
        assert outcome.yes == ids(*members)  # including the leader and the proposer
        assert (outcome.no, outcome.abstained, outcome.missing) == ((), (), ())
        assert outcome.topic == {"value": 7}
        assert outcome.by == members[1].id
        assert sorted(member for member, _ in asked) == list(ids(*members))
        assert {p.id for _, p in asked} == {outcome.poll}
        proposal = asked[0][1]
        assert (proposal.topic, proposal.by) == ({"value": 7}, members[1].id)
        assert (proposal.kind, proposal.action, proposal.at) == ("consensus", None, None)
        assert proposal.deadline > outcome.decided
        eventually(lambda: told, RESULT_S, "another handle did not get the outcome")
        assert told == [outcome]


def test_any_process_can_propose_and_all_receive_proposal_and_outcome(url: str) -> None:
    with Panel(url) as panel:
        processes = panel.processes(4)
        for number, process in enumerate(processes):
            process.ask("vote", number != 0)
        for number, process in enumerate(processes):
            process.ask("propose", number, 3, LONG_S)  # three yes votes are enough
            for other in processes:
                eventually(partial(_was_told, other, number + 1), RESULT_S, "no outcome arrived")
        for process in processes:
            decisions = process.ask("decisions")
            assert [outcome["topic"] for outcome in decisions] == [0, 1, 2, 3]
            assert [outcome["by"] for outcome in decisions] == [p.name for p in processes]
            assert all(outcome["passed"] for outcome in decisions)
            polls = [outcome["poll"] for outcome in decisions]
            eventually(partial(_was_asked, process, polls), RESULT_S, "the member was not asked")


def _was_asked(process: Voters, polls: list[str]) -> bool:
    return bool(process.ask("asked") == polls)


def test_observer_can_propose_but_has_no_vote(url: str) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        member.on_vote(always(True))
        outcome = outcome_of(panel.handle().propose("x"))
        assert (outcome.by, outcome.voters) == (None, ids(member))


def test_member_that_joins_later_is_not_asked(url: str) -> None:
    with Panel(url) as panel:
        (old,) = panel.members(1)
        future = panel.peer_group.propose("x", timeout=LONG_S)
        late, asked = panel.peer_group.join(), list[str]()
        late.on_vote(lambda proposal: asked.append(proposal.topic))
        old.on_vote(always(True))
        assert outcome_of(future).voters == ids(old)
        last = panel.peer_group.propose("y", timeout=LONG_S)
        assert outcome_of(last).voters == ids(old, late)
        assert asked == ["y"]


def test_handler_registered_late_votes_in_open_polls(url: str) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        first, second = (panel.peer_group.propose(n, timeout=LONG_S) for n in range(2))
        member.on_vote(always(True))
        assert outcome_of(first).passed
        assert outcome_of(second).passed


def test_restarted_named_member_votes_in_open_polls(url: str) -> None:
    with Panel(url) as panel:
        old = panel.process(name="worker")
        assert old.name == "worker"
        future = panel.peer_group.propose("x", timeout=LONG_S)
        panel.process(name="worker").ask("vote", True)
        assert outcome_of(future).yes == ("worker",)


def test_member_whose_events_were_lost_still_votes(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        process = panel.process()
        process.ask("vote", True)
        process.pause()
        future = panel.peer_group.propose("x", timeout=LONG_S)
        panel.redis.xtrim(panel.key("events"), maxlen=0, approximate=False)
        process.resume()
        panel.peer_group.join().leave()  # an event after the ones that the member cannot see
        assert outcome_of(future).yes == (process.name,)


# -- decisions


def test_majority_decides_even_if_others_do_not_vote(url: str) -> None:
    with Panel(url) as panel:
        one, two, silent = panel.members(3)
        one.on_vote(always(True))
        two.on_vote(always(True))
        outcome = outcome_of(panel.peer_group.propose("x", timeout=LONG_S))
        assert (outcome.passed, outcome.yes, outcome.missing) == (True, ids(one, two), ids(silent))


def test_half_is_not_a_majority(url: str) -> None:
    with Panel(url) as panel:
        one, two, three, four = panel.members(4)
        for member, answer in ((one, True), (two, True), (three, False), (four, None)):
            member.on_vote(always(answer))
        outcome = outcome_of(panel.peer_group.propose("x", timeout=LONG_S))
        assert (outcome.passed, outcome.reason) == (False, "rejected")
        assert outcome.missing == () or len(outcome.yes) < 2


def test_proposal_that_cannot_reach_a_majority_is_rejected_at_once(url: str) -> None:
    with Panel(url) as panel:
        one, two, silent = panel.members(3)
        one.on_vote(always(False))
        two.on_vote(always(None))
        outcome = outcome_of(panel.peer_group.propose("x", timeout=LONG_S))
        assert (outcome.passed, outcome.reason) == (False, "rejected")
        assert (outcome.no, outcome.abstained) == (ids(one), ids(two))
        assert outcome.missing == ids(silent)


def test_consensus_fails_at_the_first_no_vote(url: str) -> None:
    with Panel(url) as panel:
        one, *_ = panel.members(3)
        one.on_vote(always(False))
        outcome = outcome_of(panel.peer_group.propose("x", kind="consensus", timeout=LONG_S))
        assert (outcome.passed, outcome.reason, outcome.no) == (False, "rejected", ids(one))


def test_required_number_of_yes_votes_is_enough(url: str) -> None:
    with Panel(url) as panel:
        one, *_ = panel.members(3)
        one.on_vote(always(True))
        assert outcome_of(panel.peer_group.propose("x", kind=1, timeout=LONG_S)).passed


def test_proposal_that_needs_more_votes_than_there_are_voters_is_rejected_at_once(url: str) -> None:
    with Panel(url) as panel:
        panel.members(2)
        outcome = outcome_of(panel.peer_group.propose("x", kind=3, timeout=LONG_S))
        assert (outcome.passed, outcome.reason) == (False, "rejected")


def test_vote_times_out_if_voters_are_silent(url: str) -> None:
    # With this ttl, no heartbeat ends the vote during the test: the proposer must ask the server.
    with Panel(url, ttl=LONG_S) as panel:
        one, silent = panel.members(2)
        one.on_vote(always(True))
        outcome = outcome_of(panel.peer_group.propose("x", timeout=0.2))
        assert (outcome.passed, outcome.reason) == (False, "timeout")
        assert (outcome.yes, outcome.missing) == (ids(one), ids(silent))


def test_vote_handler_that_raises_counts_as_no_and_is_logged(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def vote(proposal: Proposal) -> bool:
        raise RuntimeError("no idea")

    with Panel(url) as panel:
        (member,) = panel.members(1)
        member.on_vote(vote)
        with caplog.at_level(logging.ERROR, "meteor_py"):
            assert outcome_of(panel.peer_group.propose("x")).no == ids(member)
        assert "no idea" in caplog.text


def test_slow_vote_handler_misses_its_vote_without_delaying_others(url: str) -> None:
    hold = Hold()
    with Panel(url, ttl=0.6) as panel:
        slow, quick = panel.members(2)
        slow.on_vote(hold)
        quick.on_vote(always(True))
        outcome = outcome_of(panel.peer_group.propose("x", kind="consensus", timeout=1.5))
        assert (outcome.reason, outcome.missing) == ("timeout", ids(slow))
        # The handler blocked for more than twice the ttl. A member that is silent for that long is
        # considered dead.
        assert not slow.lost.is_set()
        assert [member.id for member in panel.peer_group.members if member.alive] == [
            slow.id,
            quick.id,
        ]
        hold.go()
        assert outcome_of(panel.peer_group.propose("y", kind="consensus")).passed


# -- counting


def test_vote_counts_once_if_it_is_in_time_and_its_member_was_asked(any_url: str) -> None:
    with Panel(any_url) as panel:
        one, two, three = panel.members(3)

        def propose(kind: str) -> str:
            poll = f"poll-{kind}"
            args = [poll, kind, 60_000, "", 200, "", b"json:1", "", "", "0", ""]
            assert panel.run(PEERS_PROPOSE, *args)[2] == 3
            assert panel.run(PEERS_PROPOSE, *args)[2] == 3  # a retry after a lost reply
            return poll

        def vote(poll: str, member: Any, answer: str, session: str = "") -> list[Any]:
            return panel.run(PEERS_VOTE, poll, member.id, session or member._handle.session, answer)

        poll = propose("majority")
        late = panel.peer_group.join()
        assert vote(poll, one, "y") == [b"OK", 1]
        assert vote(poll, one, "y") == [b"OK", 0]  # a repeated vote
        assert vote(poll, one, "n") == [b"OK", 0]  # a changed vote
        assert vote(poll, late, "y") == [b"OK", 0]  # joined after the proposal
        assert vote(poll, two, "y", session="of another session") == [b"FENCED"]
        assert panel.run(PEERS_VOTE, poll, "stranger", "s", "y") == [b"FENCED"]
        assert vote("no such poll", one, "y") == [b"OK", 0]
        assert panel.redis.hget(panel.key(f"poll:{poll}"), "result") is None
        assert vote(poll, two, "y") == [b"OK", 1]
        assert panel.redis.hget(panel.key(f"poll:{poll}"), "result") == b"yes"
        assert vote(poll, three, "n") == [b"OK", 0]  # already decided
        kinds = [entry[1][b"kind"] for entry in _events(panel)]
        assert (kinds.count(b"proposed"), kinds.count(b"decided")) == (1, 1)


def _events(panel: Panel) -> list[Any]:
    found: Any = panel.redis.xrange(panel.key("events"))
    return list(found)


def test_ended_polls_that_a_sweep_has_not_reached_accept_no_votes(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        (member,) = panel.members(1)
        polls = [f"poll-{n}" for n in range(900, 800, -1)]  # a sweep ends them in the reverse order
        for poll in polls:
            args = [poll, "majority", 60_000, "", 200, "", b"json:1", "", "", "0", ""]
            panel.run(PEERS_PROPOSE, *args)
        panel.redis.zadd(panel.key("polls"), dict.fromkeys(polls, 1.0))
        panel.redis.hdel(panel.key("state"), "due")
        votes = [
            panel.run(PEERS_VOTE, poll, member.id, member._handle.session, "y")[1] for poll in polls
        ]
        assert votes == [0] * 100
        results = [panel.redis.hget(panel.key(f"poll:{poll}"), "result") for poll in polls]
        assert results == [b"no"] * 100


def test_a_thousand_members_vote(url: str) -> None:
    with Panel(url, ttl=LONG_S, election=None) as panel:
        names = [f"member-{n}" for n in range(1000)]
        for name in names:
            answer = panel.run(PEERS_JOIN, name, f"s-{name}", "1", "0", b"", "fail", 1000)
            assert answer[0] == b"OK"
        future = panel.peer_group.propose("x", kind="consensus", timeout=LONG_S)
        poll = panel.open_poll()
        for name in names:
            panel.run(PEERS_VOTE, poll, name, f"s-{name}", "y")
        assert outcome_of(future).yes == tuple(sorted(names))


def test_vote_leaves_only_keys_that_expire(url: str) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        member.on_vote(always(True))
        outcome = outcome_of(panel.peer_group.propose("x"))
        for part in ("poll", "votes"):
            left: Any = panel.redis.pttl(panel.key(f"{part}:{outcome.poll}"))
            assert 0 < left <= 3_600_000
        assert not panel.redis.exists(panel.key("polls"), panel.key("limits"))


def test_lost_reply_does_not_start_a_second_vote(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes")
    with Panel(server.url) as panel, Proxy(HOST, server.port) as proxy:
        (member,) = panel.members(1)
        with meteor.connect(proxy.url) as client, client.peer_group(GROUP) as group:
            outcome_of(_after(group.propose("warm up", kind=2), member))
            for cut in (proxy.cut_after_request, proxy.cut_before_request):
                cut(match=PEERS_PROPOSE.sha.encode())
                assert outcome_of(group.propose("x")).passed
        kinds = [entry[1][b"kind"] for entry in _events(panel)]
        assert kinds.count(b"proposed") == 3


def _after(future: Future[Outcome], member: Any) -> Future[Outcome]:
    """Register a vote handler after a proposal has loaded its script; return the future."""
    member.on_vote(always(True))
    return future


def test_vote_whose_reply_is_lost_counts_once(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes")
    with (
        Panel(server.url) as panel,
        Proxy(HOST, server.port) as proxy,
        meteor.connect(proxy.url) as client,
        client.peer_group(GROUP) as group,
    ):
        member = group.join()
        member.on_vote(always(True))
        assert outcome_of(panel.peer_group.propose("warm up")).passed
        for cut in (proxy.cut_after_request, proxy.cut_before_request):
            cut(match=PEERS_VOTE.sha.encode())
            assert outcome_of(panel.peer_group.propose("x", timeout=LONG_S)).yes == ids(member)


# -- members that leave or die


def test_member_that_leaves_before_voting_does_not_count_as_yes(url: str) -> None:
    with Panel(url) as panel:
        one, two, three = panel.members(3)
        one.on_vote(always(True))
        both = panel.peer_group.propose("x", kind="consensus", timeout=LONG_S)
        most = panel.peer_group.propose("y", timeout=LONG_S)
        three.leave()
        outcome = outcome_of(both)
        assert (outcome.passed, outcome.reason) == (False, "left")
        assert three.id in outcome.missing
        two.on_vote(always(True))
        assert outcome_of(most).yes == ids(one, two)


def test_cast_vote_counts_after_the_voter_leaves(url: str) -> None:
    with Panel(url) as panel:
        one, two = panel.members(2)
        one.on_vote(always(True))
        future = panel.peer_group.propose("x", kind="consensus", timeout=LONG_S)
        eventually(lambda: "y" in panel.votes(), RESULT_S, "the member did not vote")
        one.leave()
        two.on_vote(always(True))
        outcome = outcome_of(future)
        assert (outcome.passed, len(outcome.yes)) == (True, 2)


def test_killed_voter_does_not_delay_a_vote(url: str) -> None:
    with Panel(url, ttl=0.6) as panel:
        one, two, dying = panel.processes(3)
        dying.ask("hold")
        all_of_them = panel.peer_group.propose("x", kind="consensus", timeout=LONG_S)
        most = panel.peer_group.propose("y", timeout=LONG_S)
        eventually(lambda: dying.ask("asked"), RESULT_S, "the member was not asked")
        dying.kill()
        outcome = outcome_of(all_of_them)
        assert (outcome.passed, outcome.reason) == (False, "left")
        assert dying.name in outcome.missing
        one.ask("vote", True)
        two.ask("vote", True)
        assert outcome_of(most).yes == tuple(sorted([one.name, two.name]))


def test_vote_survives_the_leaders_death(url: str) -> None:
    with Panel(url, ttl=0.6) as panel:
        leader, *others = panel.processes(3)
        eventually(
            lambda: panel.peer_group.leader and panel.peer_group.leader.id == leader.name,
            RESULT_S,
            "the oldest member did not lead",
        )
        future = panel.peer_group.propose("x", timeout=LONG_S, require_leader=True)
        leader.kill()
        for process in others:
            process.ask("vote", True)
        outcome = outcome_of(future)
        assert outcome.passed
        assert outcome.missing == (leader.name,)


def test_others_learn_the_outcome_when_the_proposer_is_dead(url: str) -> None:
    with Panel(url, ttl=0.6) as panel:
        requester, *others = panel.processes(3)
        requester.ask("propose", {"n": 1}, "majority", LONG_S)
        requester.ask("propose", {"n": 2}, 3, 1.0)
        requester.kill()
        eventually(
            lambda: any(d["topic"] == {"n": 2} for d in others[0].ask("decisions")),
            RESULT_S,
            "a vote without a waiting proposer did not end",
        )
        for process in others:
            process.ask("vote", True)
        for process in others:
            eventually(partial(_was_told, process, 2), RESULT_S, "no outcome arrived")
            by_topic = {d["topic"]["n"]: d for d in process.ask("decisions")}
            assert by_topic[1]["passed"]
            assert not by_topic[2]["passed"]
            assert {d["by"] for d in by_topic.values()} == {requester.name}


def _was_told(process: Voters, count: int) -> bool:
    return len(process.ask("decisions")) == count


def test_member_with_only_action_handlers_does_not_vote_on_topics(url: str) -> None:
    with Panel(url) as panel:
        voter, actor = panel.members(2)
        actor.on_action("stop")(lambda action: None)
        voter.on_vote(always(True))
        outcome = outcome_of(panel.peer_group.propose("x", kind="consensus", timeout=0.5))
        assert (outcome.yes, outcome.no, outcome.missing) == (ids(voter), (), ids(actor))
        future = panel.peer_group.propose("y", kind="consensus", timeout=LONG_S)
        eventually(lambda: "y" in panel.votes(), RESULT_S)
        actor.on_vote(always(True))
        assert outcome_of(future).passed


def test_vote_that_needs_a_leader_ends_when_the_group_loses_it(url: str) -> None:
    with Panel(url, ttl=LONG_S, min_size=3) as panel:
        first, *_ = panel.members(3)
        needing = panel.peer_group.propose("x", timeout=LONG_S, require_leader=True)
        other = panel.peer_group.propose("y", timeout=LONG_S, kind=1)
        first.leave()  # two members are too few for a leader
        outcome = needing.result(RESULT_S)
        assert (outcome.passed, outcome.reason) == (False, "no leader")
        assert not other.done()
        with pytest.raises(meteor.NoLeader):
            panel.peer_group.propose("x", require_leader=True)


def test_vote_that_needs_a_leader_continues_under_the_next_one(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        first, *others = panel.members(3)
        future = panel.peer_group.propose("x", timeout=LONG_S, require_leader=True)
        first.leave()
        assert not future.done()
        for member in others:
            member.on_vote(lambda proposal: True)
        assert future.result(RESULT_S).passed


def test_poll_id_is_known_while_the_vote_is_open(url: str) -> None:
    with Panel(url, ttl=LONG_S) as panel:
        (member,) = panel.members(1)
        seen: list[str] = []
        future = panel.peer_group.propose("x", timeout=LONG_S)

        def vote(proposal: Any) -> bool:
            seen.append(proposal.id)
            return True

        member.on_vote(vote)
        assert future.result(RESULT_S).poll == future.poll
        assert seen == [future.poll]
