"""Peer groups whose members constantly join and leave, in several processes.

All processes see the same events. A leader that leaves is replaced at once. Every request gets a
reply or a specific error, and no message reaches a member that has left.
"""

from __future__ import annotations

import random
from collections import Counter

from meteor_py.errors import MemberUnknown
from meteor_py.peers.event import Event
from tests.support.mailing import failure
from tests.support.peer_nodes import BOX, STORM_S, Node, Nodes, ask_all, plain
from tests.support.peer_nodes import nodes as nodes
from tests.support.peering import GROUP, LONG_S, Open, ids, watching
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually

#: Errors that a request may raise while members join and leave. MessageExpired is not among them:
#: the sender must learn why the request failed, instead of waiting for the timeout.
ERRORS = {"NoLeader", "MemberUnknown", "MemberLeft", "MembershipLost"}


# Events


def test_all_processes_see_the_same_events_while_members_join_and_leave(
    nodes: Nodes, open_group: Open, rng: random.Random
) -> None:
    group = open_group(ttl=LONG_S)
    *processes, one, two = nodes.start(7, GROUP)
    with watching(group) as here:
        one.ask("watch", GROUP, "callback")
        two.ask("watch", GROUP, "iterator")
        seeds = [rng.random() for _ in processes]
        ask_all(processes, "storm", GROUP, 10, 8, each=seeds)
        last = group._handle.protocol.look()
        assert not last.members
        eventually(lambda: bool(here) and here[-1].view == last.view, STORM_S)
    for observer in (one, two):
        eventually(lambda o=observer: o.ask("view") == last.view, STORM_S)  # type: ignore[misc]
    seen = [plain(event) for event in here]
    assert [event["view"] for event in seen] == list(range(1, last.view + 1))
    assert not any(event["resync"] for event in seen)
    kinds = Counter(event["kind"] for event in seen)
    assert (kinds["joined"], kinds["left"]) == (400, 400)
    assert kinds["elected"] == kinds["resigned"] > 0
    assert one.ask("events") == seen
    assert two.ask("events") == seen
    check_leaders(here)


def check_leaders(events: list[Event]) -> None:
    """Check that terms only increase, and that a group with members elects a leader at once.

    While the group has members but no leader, the next event must be an election, or the
    resignation of a leader that has left. The only exception is a group whose members all leave in
    their next events.
    """
    members: set[str | None] = set()
    leader: str | None = None
    terms = [0]
    for number, event in enumerate(events):
        if leader is None and not all(leaves_next(events[number:], member) for member in members):
            assert event.kind in ("elected", "resigned"), event
        match event.kind:
            case "joined":
                assert event.member not in members
                members.add(event.member)
            case "left":
                members.remove(event.member)
                leader = None if leader == event.member else leader
            case "resigned":
                leader = None
            case "elected":
                assert leader is None
                assert event.member in members
                leader = event.member
                assert event.term is not None
                terms.append(event.term)
    assert (leader is None) == (not members)
    assert terms == sorted(set(terms))


def leaves_next(events: list[Event], member: str | None) -> bool:
    """Return whether a member's next event is its departure."""
    return next((event.kind for event in events if event.member == member), None) == "left"


# Members that come and go


def test_roaming_members_always_have_a_leader_and_get_no_message_after_leaving(
    nodes: Nodes, open_group: Open, rng: random.Random
) -> None:
    group = open_group(ttl=LONG_S)
    processes = nodes.start(4, GROUP)
    with watching(group) as events:
        found = ask_all(processes, "roam", GROUP, 120, each=[rng.random() for _ in processes])
        members = [one["ids"] for one in found]
        told = [body for one in found for body in one["told"]]
        check_goodbye(processes, told)
    everybody = [member for those in members for member in those]
    assert len(set(everybody)) == len(everybody)  # each join creates a new id
    assert len(everybody) > 20
    handled = check_handled(processes, events, told)
    leaders = [event.member for event in events if event.kind == "elected"]
    assert len(set(leaders)) > 5
    assert handled
    for those in members:
        for former in those[:-1][-3:]:
            assert isinstance(failure(group.member(former).ask(BOX, "late")), MemberUnknown)
    assert sorted(ids(group)) == sorted(those[-1] for those in members)


def test_each_request_gets_a_reply_or_a_specific_error_while_members_come_and_go(
    nodes: Nodes, open_group: Open, rng: random.Random
) -> None:
    group = open_group(ttl=LONG_S)
    processes = nodes.start(4, GROUP)
    with watching(group) as events:
        seeds = [rng.random() for _ in processes]
        found = ask_all(processes, "roam_and_ask", GROUP, 40, 100, each=seeds)
        told = [body for one in found for body in one["told"]]
        check_goodbye(processes, told)
    asked = [question for one in found for question in one["asked"]]
    assert len(asked) == 400
    bodies = {body for _, body, _, _ in asked}
    handled = check_handled(processes, events, told, bodies)
    for to, body, how, answers in asked:
        assert how == "answered" or how in ERRORS, (to, body, how)
        if how != "answered":
            continue
        for member, value in answers["values"].items():
            assert value == {"by": member, "body": body}
            assert handled[member, body] == 1
        assert set(answers["failed"].values()) <= {"MemberLeft"}
        assert len(answers["values"]) == 1 or to == "all"
    ends = Counter((to, how) for to, _, how, _ in asked)
    print(sorted(ends.items()))
    assert min(ends[to, "answered"] for to in ("leader", "any", "all", "member")) > 0
    by_body = Counter(body for _, body in handled)
    for to, body, _, _ in asked:
        assert by_body[body] <= 1 or to in ("all", "any")  # only these can reach several members
    leaders = [event.member for event in events if event.kind == "elected"]
    assert len(set(leaders)) > 5


def check_goodbye(processes: list[Node], told: list[str]) -> None:
    """Check that, after the load, every member gets a last message from each process.

    Also add these messages to ``told``.
    """
    for number, process in enumerate(processes):
        told.append(f"last-{number}")
        process.ask("tell_all", GROUP, [told[-1]])
    for process in processes:
        eventually(lambda p=process: last_words(p) == sorted(told[-len(processes) :]), 30)  # type: ignore[misc]


def last_words(process: Node) -> list[str]:
    return sorted(m["body"] for m in process.ask("heard") if m["body"].startswith("last-"))


def check_handled(
    processes: list[Node], events: list[Event], told: list[str], asked: set[str] | None = None
) -> Counter[tuple[str, str]]:
    """Check that members handled only messages that were sent, each once, before they left.

    Also check the leaders and, on the server's clock, that no message was sent after its receiver
    left, and that none of the messages in ``told`` was sent before its receiver joined.

    Returns:
        The number of handled messages by member and body.
    """
    check_leaders(events)
    joined = {event.member: event.at for event in events if event.kind == "joined"}
    left = {event.member: event.at for event in events if event.kind == "left"}
    handled: Counter[tuple[str, str]] = Counter()
    for messages in ask_all(processes, "heard"):
        for message in messages:
            member = message["member"]
            handled[member, message["body"]] += 1
            if message["body"] in told:
                assert joined[member] <= message["sent_ms"]
            assert message["sent_ms"] <= left.get(member, message["sent_ms"])
    assert {body for _, body in handled} <= {*told, *(asked or ())}
    assert set(handled.values()) <= {1}
    assert ask_all(processes, "heard_after_leaving") == [[]] * len(processes)
    return handled
