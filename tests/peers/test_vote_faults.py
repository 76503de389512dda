"""Impossible votes are refused, and every other vote's future completes, whatever is lost."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from meteor_py.errors import (
    MembershipLost,
    NoLeader,
    PeerError,
)
from meteor_py.peers.codec import PeerCodec
from meteor_py.peers.voting.proposal import Outcome, Proposal
from tests.conftest import ServerFactory
from tests.support.mailing import SOON_S, Gate, Record, result
from tests.support.peer_voters import GROUP, LONG_S, RESULT_S, Panel, always, ids, outcome_of
from tests.support.peering import Open
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


def test_require_leader_raises_without_a_leader(url: str) -> None:
    with Panel(url, election=None) as panel:
        (member,) = panel.members(1)
        member.on_vote(always(True))
        with pytest.raises(NoLeader, match="has no leader"):
            panel.peer_group.propose("x", require_leader=True)
        assert outcome_of(panel.peer_group.propose("x")).passed


def test_group_without_members_cannot_vote(url: str) -> None:
    with Panel(url) as panel, pytest.raises(PeerError, match="has no live member that could vote"):
        panel.peer_group.propose("x")


def test_former_member_cannot_propose_as_a_member(url: str) -> None:
    with Panel(url) as panel:
        one, two = panel.members(2)
        one.leave()
        with pytest.raises(MembershipLost):
            one.propose("x")
        panel.redis.hset(panel.key("members"), two.id, "1:another:0:1:0:1:")
        with pytest.raises(MembershipLost):
            two.propose("x")


@pytest.mark.parametrize("kind", ["most", 0, True, 1.5])
def test_invalid_vote_kind_is_refused(url: str, kind: Any) -> None:
    with Panel(url) as panel, pytest.raises((ValueError, TypeError), match="kind must be"):
        panel.peer_group.propose("x", kind=kind)


def test_member_that_does_not_know_a_topics_type_does_not_vote(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    codec = PeerCodec()
    codec.register(complex, id=7, encode=lambda z: str(z).encode(), decode=_complex)
    with Panel(url) as panel, panel.client.peer_group(GROUP, codec=codec) as group:
        knowing, ignorant = group.join(), panel.peer_group.join()
        topics: list[Any] = []

        @knowing.on_vote
        def vote(proposal: Proposal) -> bool:
            topics.append(proposal.topic)
            return True

        ignorant.on_vote(always(True))
        outcome = outcome_of(group.propose(1 + 2j, kind="consensus", timeout=0.5))
        assert (outcome.topic, topics) == (1 + 2j, [1 + 2j])
        assert (outcome.yes, outcome.missing) == (ids(knowing), ids(ignorant))
        eventually(lambda: "'7' is not known here" in caplog.text, RESULT_S, "no error was logged")
        assert outcome_of(group.propose("plain", kind="consensus")).passed


def _complex(data: bytes) -> complex:
    return complex(data.decode())


def test_topic_that_is_too_large_is_refused(url: str) -> None:
    with Panel(url) as panel, pytest.raises(ValueError, match="Send the data first"):
        panel.peer_group.propose("x" * 65_536)


def test_future_completes_if_the_decision_event_is_lost(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Panel(url) as panel:
        (member,) = panel.members(1)
        monkeypatch.setattr(panel.peer_group._handle.polls, "decided", lambda event: None)
        told: list[Outcome] = []
        panel.peer_group.on_decision(told.append)
        member.on_vote(always(True))
        outcome = outcome_of(panel.peer_group.propose("x", timeout=0.5))
        assert outcome.passed
        eventually(lambda: told == [outcome], RESULT_S, "no outcome arrived")


def test_future_completes_if_the_server_has_lost_the_vote(url: str) -> None:
    with Panel(url) as panel:
        panel.members(1)
        future = panel.peer_group.propose("x", timeout=0.5)
        panel.redis.flushall()
        panel.peer_group._handle.heartbeat.hurry()  # recreates the group at once
        with pytest.raises(PeerError, match="the server lost state"):
            outcome_of(future)


def test_future_fails_when_its_handle_is_closed(url: str) -> None:
    with Panel(url) as panel:
        panel.members(1)
        handle = panel.handle()
        future = handle.propose("x", timeout=LONG_S)
        handle.close()
        with pytest.raises(PeerError, match="closed first"):
            outcome_of(future)
        assert not future.cancel()


def test_vote_continues_after_a_server_outage(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes")
    with Panel(server.url, ttl=0.6) as panel:
        one, two = panel.members(2)
        one.on_vote(always(True))
        future = panel.peer_group.propose("x", kind="consensus", timeout=1.0)
        eventually(lambda: "y" in panel.votes(), RESULT_S, "the member did not vote")
        server.kill()
        # If the outage lasts more than half a ttl, members get a full ttl, and the vote keeps its
        # remaining time.
        server.start()
        two.on_vote(always(True))
        assert outcome_of(future).voters == ids(one, two)


def test_no_vote_thread_runs_without_vote_or_action_handlers(url: str) -> None:
    with Panel(url) as panel:
        panel.members(1)
        running = {thread.name for thread in threading.enumerate()}
        assert not {
            name for name in running if name.startswith(("meteor-polls", "meteor-callbacks-v"))
        }


def test_handlers_that_raise_system_exit_stop_no_thread(
    open_group: Open, caplog: pytest.LogCaptureFixture
) -> None:
    group = open_group(ttl=LONG_S)
    me = group.join("a")
    me.on("q")(Record(lambda message: message.body))
    me.on_action("go")(lambda action: sys.exit(1))
    assert result(group.propose_action("go", at=group.now() + 1)).passed
    eventually(lambda: "Action 'go' in group 'workers' failed" in caplog.text, SOON_S)
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


def test_proposer_that_cannot_decode_the_outcome_gets_the_error(url: str) -> None:
    codec = PeerCodec()
    codec.register(complex, id=7, encode=lambda z: str(z).encode(), decode=_fail)
    with Panel(url) as panel, panel.client.peer_group(GROUP, codec=codec) as group:
        panel.members(1)
        future = group.propose(1 + 2j, timeout=0.5)
        assert "no such number" in str(future.exception(10))


def _fail(data: bytes) -> complex:
    raise ValueError("There is no such number.")
