"""Each Atomix or RIAPS call in the tables of docs/peer-group-words.md has a counterpart that works.

A comment such as ``# groupSize`` names the original call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meteor_py import Client, Member, Membership, Outcome, PeerCodec, Proposal
from meteor_py.errors import HandlerFailed, MemberLeft, NoLeader
from meteor_py.peers.aliases import (
    Delivery,
    DistributedGroup,
    Execution,
    GroupMember,
    GroupTerm,
    LocalMember,
)
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.messaging.message import Message
from tests.support.mailing import Gate, Post, Record, failure, result
from tests.support.waiting import eventually


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with Post(url) as post:
        yield post


def atomix(post: Post, **settings: Any) -> DistributedGroup:
    return DistributedGroup(post.group(**settings))


def test_every_call_in_the_tables_is_named_in_this_file() -> None:
    here = Path(__file__)
    tables = (here.parents[2] / "docs" / "peer-group-words.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", tables, re.MULTILINE)
    calls = [call for row in rows for call in re.findall(r"`(.*?)`", row)]
    assert len(calls) > 80
    # The last word before the arguments, in Java or Python spelling.
    words = {re.findall(r"\w+", call.partition("(")[0])[-1] for call in calls}
    text = here.read_text()
    snakes = {word: re.sub("(?<=[a-z])(?=[A-Z])", "_", word).lower() for word in words}
    missing = [w for w in words if not re.search(rf"\b({w}|{snakes[w]})\b", text)]
    assert not missing


def test_meteor_py_calls_in_the_tables_exist() -> None:
    tables = (Path(__file__).parents[2] / "docs" / "peer-group-words.md").read_text()
    rows = [row.strip("|").split(" | ") for row in tables.splitlines() if row.startswith("| ")]
    calls = {call for row in rows for cell in row[1:] for call in re.findall(r"`(.*?)`", cell)}
    owners: dict[str, list[type]] = {
        "m": [Client],
        "group": [PeerGroup, DistributedGroup],
        "me": [Membership],
        "local": [LocalMember],
        "member": [Member, GroupMember],
        "message": [Message],
        "proposal": [Proposal],
        "outcome": [Outcome],
        "codec": [PeerCodec],
    }
    named = [(owner, name) for call in calls for owner, name in re.findall(r"\b(\w+)\.(\w+)", call)]
    ours = [(owner, name) for owner, name in named if owner in owners]
    assert len(ours) > 40
    assert not [
        (owner, name)
        for owner, name in ours
        if not any(name in known_names(one) for one in owners[owner])
    ]


def known_names(kind: type) -> set[str]:
    """Return the names of the attributes of a class and its instances."""
    given = set(re.findall(r"self\.(\w+)", inspect.getsource(kind)))
    return {*dir(kind), *given, *inspect.get_annotations(kind)}


# Atomix


def test_atomix_listeners_see_members_join_and_leave(post: Post) -> None:
    group, other = atomix(post, member_expiration=600), atomix(post)  # getGroup
    assert other.group.config.member_expiration == 600  # withMemberExpiration
    joined: list[str] = []
    left: list[str] = []
    group.on_join(lambda member: joined.append(member.id()))
    group.on_leave(lambda member: left.append(member.id()))
    local = other.join()
    eventually(lambda: joined == [local.id()])
    assert [member.id() for member in group.members()] == [local.id()]
    local.leave()
    eventually(lambda: left == [local.id()])
    assert other.members() == []


def test_atomix_persistent_member_has_metadata_and_can_be_removed(post: Post) -> None:
    group = atomix(post)
    group.join("a", {"host": "n1"})
    member = group.member("a")
    assert member is not None
    assert (member.metadata(), member.status().value) == ({"host": "n1"}, "alive")
    assert group.remove("a")
    eventually(lambda: group.member("a") is None)
    assert member.status().value == "dead"


def test_atomix_election_listeners_see_each_term(post: Post) -> None:
    group, other = atomix(post), atomix(post)
    first = group.join("first")
    other.join("second")
    terms: list[GroupTerm] = []
    other.election().on_election(terms.append)
    eventually(lambda: len(terms) == 1, message="the listener was not called at once")
    assert _leader(terms[0]) == "first"
    first.leave()
    eventually(lambda: len(terms) == 2)
    assert _leader(terms[1]) == "second"
    assert terms[1].term() > terms[0].term()
    now = other.election().term()
    assert (now.term(), _leader(now)) == (terms[1].term(), "second")


def _leader(term: GroupTerm) -> str | None:
    leader = term.leader()
    return None if leader is None else leader.id()


def _member(group: DistributedGroup, name: str) -> GroupMember:
    eventually(lambda: group.member(name) is not None)
    member = group.member(name)
    assert member is not None
    return member


def test_atomix_direct_message_can_be_acked_failed_or_replied_to(post: Post) -> None:
    group, other = atomix(post), atomix(post)
    consumer = other.join("foo").messaging().consumer("bar")
    messaging = _member(group, "foo").messaging()
    consumer.on_message(lambda message: message.ack())
    assert result(messaging.producer("bar").send("baz")) is None
    consumer.on_message(lambda message: message.reply(f"{message.body}!"))
    assert result(messaging.producer("bar").send("baz")) == "baz!"
    consumer.on_message(lambda message: message.fail())
    sync = messaging.producer("bar", execution=Execution.SYNC)
    assert isinstance(failure(sync.send("baz")), HandlerFailed)


def test_atomix_asynchronous_message_completes_when_it_is_stored(post: Post) -> None:
    group, other = atomix(post), atomix(post)
    other.join("foo")
    producer = _member(group, "foo").messaging().producer("bar", execution=Execution.ASYNC)
    future = producer.send("baz")
    result(future)
    seen: list[Any] = []
    future.add_done_callback(seen.append)  # thenAccept, thenRun
    assert seen == [future]
    assert len(future.result()) > 0  # get: the message id


@pytest.mark.parametrize("execution", Execution)
def test_atomix_broadcast_reaches_each_member_once(post: Post, execution: Execution) -> None:
    # Atomix's Options: withExecution is set, and withDelivery keeps its default, broadcast.
    group, other = atomix(post), atomix(post)
    got = {name: Record(lambda message: message.reply(message.member)) for name in "123"}
    for handle, name in ((group, "1"), (other, "2"), (other, "3")):
        handle.join(name).messaging().consumer("foo").on_message(got[name])
    outcome = result(group.messaging().producer("foo", execution=execution).send("Hello world!"))
    for record in got.values():
        record.wait_for(1)
        assert record.bodies == ["Hello world!"]
    if execution is Execution.REQUEST_REPLY:
        assert sorted(outcome.values.values()) == ["1", "2", "3"]


def test_atomix_random_message_moves_to_another_member_when_its_member_leaves(post: Post) -> None:
    group = atomix(post)
    gates = {name: Gate(lambda message: message.ack()) for name in ("1", "2")}
    locals_ = {name: group.join(name) for name in gates}
    for name, gate in gates.items():
        locals_[name].messaging().consumer("bar").on_message(gate)
    producer = group.messaging().producer("bar", delivery=Delivery.RANDOM)
    future = producer.send("task", timeout=60)
    eventually(lambda: any(gate.entered.is_set() for gate in gates.values()))
    first = next(name for name, gate in gates.items() if gate.entered.is_set())
    (other,) = set(gates) - {first}
    group.remove(first)
    gates[other].open.set()
    assert result(future) is None
    gates[first].open.set()


def test_atomix_message_fails_when_its_member_leaves(post: Post) -> None:
    group, other = atomix(post), atomix(post)
    got = Record()
    local = other.join()
    local.messaging().consumer("bar").on_message(got)
    future = _member(group, local.id()).messaging().producer("bar").send("baz", timeout=60)
    got.wait_for(1)
    local.leave()
    assert isinstance(failure(future), MemberLeft)


def test_atomix_local_member_is_the_sender_of_its_messages(post: Post) -> None:
    group = atomix(post)
    got = Record(lambda message: message.ack())
    local = group.join("me")
    local.messaging().consumer("q").on_message(got)
    result(local.messaging().producer("q").send(1))
    assert [message.sender for message in got.messages] == ["me"]


def test_atomix_serializer_assigns_numbers_to_types(post: Post) -> None:
    group, other = atomix(post), atomix(post)
    for each in (group, other):
        each.serializer().register(
            complex,
            id=1,
            encode=lambda z: str(z).encode(),
            decode=lambda data: complex(data.decode()),
        )
    got = Record(lambda message: message.ack())
    other.join("foo").messaging().consumer("bar").on_message(got)
    result(_member(group, "foo").messaging().producer("bar").send(1 + 2j))
    assert got.bodies == [1 + 2j]


def test_atomix_conflicting_options_are_refused(post: Post) -> None:
    group = atomix(post)
    group.join("foo")
    member = _member(group, "foo")
    with pytest.raises(ValueError, match="Omit delivery"):
        member.messaging().producer("bar", delivery=Delivery.RANDOM)
    for messaging in (member.messaging(), group.messaging()):
        with pytest.raises(ValueError, match="Only the process"):
            messaging.consumer("bar")
    group.close()
    assert group.group.closed


# RIAPS


@pytest.mark.parametrize("leader", [True, False])
def test_riaps_group_can_have_a_leader_or_none(post: Post, leader: bool) -> None:
    client = post.client()
    with (
        # using Msg: any type that the codec accepts
        client.peer_group("TheGroup", election="oldest" if leader else None) as group,
        group.join() as me,  # handleActivate
    ):
        if leader:
            eventually(lambda: me.term is not None)
        else:
            assert me.term is None
            with pytest.raises(NoLeader):
                me.propose("topic", require_leader=True)
    with client.peer_group("TheGroup") as again:
        assert again.members == []  # handleDeactivate, at the end of the block


def test_riaps_group_instance_reports_members_that_join_and_leave(post: Post) -> None:
    client = post.client()
    with (
        client.peer_group("TheGroup", instance="g1") as g,
        client.peer_group("TheGroup", instance="g1") as h,
    ):
        joined = Record()
        left: list[str] = []
        g.on_join(lambda member: joined.messages.append(member))  # handleMemberJoined
        g.on_leave(lambda member, reason: left.append(member.id))  # handleMemberLeft
        me = h.join()  # joinGroup
        eventually(lambda: [member.id for member in joined.messages] == [me.id])
        assert len(g.members) == 1  # groupSize
        assert g.name == "TheGroup/g1"  # getGroupName, getGroupId
        me.leave()  # leaveGroup
        eventually(lambda: left == [me.id])


def test_riaps_group_message_reaches_all_members(post: Post) -> None:
    group, other = post.group(), post.group()
    got = [Record(), Record()]
    me = group.join()
    me.on("group")(got[0])  # handleGroupMessage, recv_pyobj
    other.join().on("group")(got[1])
    result(me.all.tell("group", {"any": "object"}))  # send_pyobj
    for record in got:
        record.wait_for(1)
        assert record.bodies == [{"any": "object"}]


def test_riaps_messages_can_be_plain_bytes(post: Post) -> None:
    group = post.group(codec="bytes")
    got = Record()
    group.join().on("group")(got)
    result(group.all.send("group", b"\0raw"))  # send
    assert got.bodies == [b"\0raw"]  # recv


def test_riaps_leader_can_be_queried_and_observed(post: Post) -> None:
    group = post.group(min_size=2)
    elected: list[str] = []
    exited: list[str] = []
    group.on_elected(lambda leader, term: elected.append(leader.id))  # handleLeaderElected
    group.on_resigned(lambda leader, term, reason: exited.append(leader))  # handleLeaderExited
    first = group.join("first")
    assert _leader_id(group) is None  # hasLeader: false, because a leader needs two members
    assert isinstance(failure(first.leader_proxy.tell("leader")), NoLeader)
    second = group.join("second")
    eventually(lambda: first.term is not None)  # isLeader
    assert second.term is None
    assert _leader_id(group) == "first"  # getLeaderId
    group.join("third")
    first.leave()
    eventually(lambda: elected == ["first", "second"])
    assert exited == ["first"]


def _leader_id(group: PeerGroup) -> str | None:
    return None if group.leader is None else group.leader.id


def test_riaps_leader_can_reply_to_a_member(post: Post) -> None:
    group, other = post.group(), post.group()
    leader, member = group.join(), other.join()
    got = Record()

    @leader.on("to-leader")  # handleMessageToLeader
    def to_leader(message: Message) -> None:
        assert message.sender is not None  # identity
        # sendToMember, or its _pyobj variant
        leader.member(message.sender).tell("from-leader", f"re: {message.body}")

    member.on("from-leader")(got)  # handleMessageFromLeader
    result(member.leader_proxy.send("to-leader", "report"))  # sendToLeader, sendToLeader_pyobj
    (message,) = got.wait_for(1)
    assert message.body == "re: report"
    assert message.from_leader


def test_riaps_messages_have_times_and_priorities(post: Post) -> None:
    group = post.group()
    got = Record()
    group.join().on("group", priority=256)(got)  # groupPriority
    result(group.all.send("group", priority=1))
    (message,) = got.messages
    # timed: recvTime, sendTime
    assert message.received_at - message.sent_at == message.latency
    assert message.priority == 1


@pytest.mark.parametrize(("limit", "passed"), [(7, True), (70, False)])
def test_riaps_members_vote_by_majority_or_consensus(post: Post, limit: int, passed: bool) -> None:
    group, other = post.group(), post.group()
    me = group.join()
    seen: list[Any] = []
    for member in (me, other.join()):

        @member.on_vote  # handleVoteRequest, recv, sendVote
        def vote(proposal: Any) -> bool:
            return bool(proposal.topic["limit"] < 10)

    other.on_decision(seen.append)  # handleVoteResult
    for kind in ("majority", "consensus"):  # Poll.MAJORITY, Poll.CONSENSUS
        future = me.propose({"limit": limit}, kind=kind, timeout=20, require_leader=True)
        outcome = result(future)  # requestVote, requestVote_pyobj
        assert (outcome.passed, outcome.topic) == (passed, {"limit": limit})
        assert len(outcome.poll) > 0  # rfvId
    eventually(lambda: [outcome.passed for outcome in seen] == [passed, passed])


def test_riaps_vote_with_require_leader_needs_a_leader(post: Post) -> None:
    group = post.group(election=None)
    me = group.join()
    with pytest.raises(NoLeader):
        me.propose("some topic", require_leader=True)


def test_riaps_members_vote_on_an_action_and_run_it(post: Post) -> None:
    group, other = post.group(), post.group()
    done: list[Any] = []
    members = [group.join(), other.join()]
    for member in members:
        member.on_vote(lambda proposal: proposal.action == "open" and proposal.at > 0)
        member.on_action("open", late="run")(done.append)  # handleActionVoteRequest
    at = group.now() + 1.0
    outcome = result(members[0].propose_action("open", {"relay": 3}, at=at))  # requestActionVote
    assert outcome.passed
    eventually(lambda: len(done) == 2, message="the action did not run on both members")
    assert [action.params for action in done] == [{"relay": 3}] * 2


def test_atomix_broadcast_can_wait_for_dead_persistent_members(post: Post) -> None:
    group, other = atomix(post), atomix(post)
    other.group.join("dead").close()
    producer = group.messaging().producer("q", include_dead=True)
    future = producer.send("x", timeout=60)
    local = other.join("dead")
    local.messaging().consumer("q").on_message(lambda message: message.ack())
    assert result(future) is None
    with pytest.raises(ValueError, match="broadcast"):
        group.messaging().producer("q", delivery=Delivery.RANDOM, include_dead=True)
    with pytest.raises(ValueError, match="broadcast"):
        group.members()[0].messaging().producer("q", include_dead=True)
