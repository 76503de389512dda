"""``meteor peers`` inspects and changes peer groups, in pipes and in a terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from contextlib import closing
from typing import Any

import msgspec
import pytest

import meteor_py as meteor_
from meteor_cli.live.peer_watch import describe_event
from meteor_cli.render.schema import FIELDS, MEMBER_FIELDS, PEER_EVENTS
from meteor_py import Event, Membership, PeerGroup
from tests.conftest import ServerFactory
from tests.support.commands import METEOR, RunningCommand, meteor, succeed
from tests.support.mailing import NAME, SOON_S, Post
from tests.support.mailing import post as post
from tests.support.peer_members import HOSTILE
from tests.support.peer_members import group as group
from tests.support.peer_members import members as members
from tests.support.peering import Peer
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

# Inspecting


def test_groups_are_listed_with_members_leader_and_term(
    url: str, members: list[Membership]
) -> None:
    with meteor_.connect(url) as m, m.peer_group("cells", instance="c1", election=None):
        heading, cells, workers = succeed(url, "peers", "ls").lines
        assert heading.split() == ["group", "members", "alive", "leader", "term"]
        assert cells.split() == ["cells/c1", "0", "0", "-", "-"]
        term = members[0].term
        assert term is not None
        assert workers.split() == [NAME, "2", "2", "w1", str(term.number)]
        found = succeed(url, "peers", "ls", "--json").objects
    assert [each["name"] for each in found] == ["cells/c1", NAME]
    assert [each["election"] for each in found] == ["none", "oldest"]
    assert all(set(each) == set(FIELDS["peers ls"]) for each in found)


def test_ls_without_peer_groups_says_so(url: str) -> None:
    done = succeed(url, "peers", "ls")
    assert (done.out, "there are no peer groups yet" in done.err) == (b"", True)


def test_unreadable_peer_group_does_not_hide_other_groups(
    url: str, members: list[Membership], group: PeerGroup
) -> None:
    client = group._handle.protocol.connector
    client.redis.sadd("meteor:groups", "odd")
    client.redis.hset("meteor:group:{odd}:config", mapping={"ttl": "1000"})
    done = meteor(url, "peers", "ls")
    assert (done.code, len(done.lines)) == (1, 2)
    assert "skipping group 'odd'" in done.err


def test_members_are_listed_including_dead_ones(
    url: str, members: list[Membership], group: PeerGroup
) -> None:
    members[1].close()
    nameless = group.join()
    heading, *lines = succeed(url, "peers", "members", NAME).lines
    assert heading.split() == ["id", "status", "leader", "priority", "joined", "metadata"]
    assert [line.split()[:4] for line in lines] == [
        ["w1", "alive", "yes", "5"],
        ["w2", "dead", "-", "0"],
        [nameless.id, "alive", "-", "0"],
    ]
    assert r"evil\u001b[2J\u202egnp.exe\n" in lines[0]
    found = succeed(url, "peers", "members", NAME, "--json").objects
    assert [each["persistent"] for each in found] == [True, True, False]
    assert found[0]["metadata"] == {"host": HOSTILE}
    assert all(set(each) == set(FIELDS["peers members"]) for each in found)


def test_an_instance_is_named_with_a_slash(url: str) -> None:
    with meteor_.connect(url) as m, m.peer_group("cells", instance="c1") as group:
        me = group.join()
        assert succeed(url, "peers", "leader", "cells/c1").lines == [me.id]
        for typed in ("cells/", "/c1", "cells/c1/x", ".cells", ""):
            done = meteor(url, "peers", "leader", typed)
            assert (done.code, done.err.count("\n")) == (1, 1)
            assert "cannot be the name of a group. Use 1 to 128" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["members"],
        ["watch"],
        ["leader"],
        ["leader", "--wait", "0.1"],
        ["send", "jobs"],
        ["ask", "jobs"],
        ["propose", "topic"],
        ["remove", "w1", "--yes"],
        ["delete", "--yes"],
    ],
)
def test_missing_peer_group_is_not_created(url: str, arguments: list[str]) -> None:
    command, *rest = arguments
    done = meteor(url, "peers", command, "nope", *rest)
    assert (done.code, done.out) == (1, b"")
    assert "There is no peer group 'nope'. `meteor peers ls`" in done.err
    assert done.err.count("\n") == 1
    with meteor_.connect(url) as m:
        assert m.peer_groups() == []
        assert m.redis.keys("*") == []


def test_inspecting_a_group_changes_nothing(
    url: str, members: list[Membership], group: PeerGroup
) -> None:
    before = group.view
    for command in ("ls", "members", "leader"):
        succeed(url, "peers", command, *([] if command == "ls" else [NAME]))
    assert group._handle.protocol.look().view == before


# The leader


def test_the_leader_is_printed_with_its_term_as_json(url: str, members: list[Membership]) -> None:
    assert succeed(url, "peers", "leader", NAME).text == "w1\n"
    (found,) = succeed(url, "peers", "leader", NAME, "--json").objects
    assert set(found) == set(FIELDS["peers leader"])
    assert (found["leader"], found["priority"], found["leads"]) == ("w1", 5, True)
    term = members[0].term
    assert term is not None
    assert found["term"] == term.number


def test_leader_command_exits_with_1_without_a_leader(url: str, post: Post) -> None:
    post.group(min_size=2).join()
    done = meteor(url, "peers", "leader", NAME)
    assert (done.code, done.out, done.err.count("\n")) == (1, b"", 1)
    assert "currently has no leader. 1 member is alive; an election needs 2." in done.err
    with meteor_.connect(url) as m, m.peer_group("flat", election=None):
        done = meteor(url, "peers", "leader", "flat", "--wait", "60")
        assert (done.code, "has no elections" in done.err) == (1, True)


def test_leader_command_can_wait_for_a_leader(url: str, group: PeerGroup) -> None:
    done = meteor(url, "peers", "leader", NAME, "--wait", "0.2")
    assert (done.code, "0 members are alive." in done.err) == (1, True)
    with RunningCommand(url, "peers", "leader", NAME, "--wait", "60") as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.process.wait(0.5)
        me = group.join()
        assert waiting.line() == me.id
        assert waiting.end().code == 0


# Removing


def test_removing_a_member_needs_confirmation(
    url: str, members: list[Membership], group: PeerGroup
) -> None:
    command = ["peers", "remove", NAME, "w1"]
    done = meteor(url, *command)
    assert (done.code, "'w1' (alive, the leader) will be removed" in done.err) == (2, True)
    assert "(alive, the leader) would be removed" in succeed(url, *command, "--dry-run").err
    for answer, code in (("n", 1), ("y", 0)):
        assert group.find("w1") is not None
        with Terminal([METEOR, "--url", url, *command]) as terminal:
            terminal.wait_for("Continue?")
            terminal.press(f"{answer}\n")
            assert terminal.wait() == code
    eventually(lambda: members[0].lost.is_set())
    eventually(lambda: group.leader is not None and group.leader.id == "w2")
    done = meteor(url, *command, "--yes")
    assert (done.code, "There is no member 'w1' in group 'workers'" in done.err) == (1, True)
    meant = "Did you mean `meteor peers delete` or `meteor peers remove`?"
    assert meant in meteor(url, "peers", "rm", NAME).err


def test_group_is_deleted_only_after_confirmation(url: str, group: PeerGroup) -> None:
    group.join("w1").close()
    group.close()
    command = ["peers", "delete", NAME]
    what = "1 member, all messages, all guarded values."
    done = meteor(url, *command)
    assert (done.code, f"'workers' will be deleted: {what} There is no" in done.err) == (2, True)
    assert f"would be deleted: {what}" in succeed(url, *command, "--dry-run").err
    with meteor_.connect(url) as m:
        for answer, code in (("n", 1), ("y", 0)):
            assert m.peer_groups() == [NAME]
            with Terminal([METEOR, "--url", url, *command], columns=200) as terminal:
                terminal.wait_for("Continue?")
                terminal.press(f"{answer}\n")
                assert terminal.wait() == code
        assert m.peer_groups() == []
        assert m.redis.keys("*") == []
    done = meteor(url, *command, "--yes")
    assert (done.code, "There is no peer group 'workers'" in done.err) == (1, True)


def test_deleting_a_group_with_live_members_needs_force(
    url: str, members: list[Membership], group: PeerGroup
) -> None:
    for name in ("w3", "w4", "w5"):
        group.join(name)
    command, begun = ["peers", "delete", NAME, "--yes"], group._handle.protocol.look().view
    for more in ([], ["--dry-run"]):
        done = meteor(url, *command, *more)
        assert (done.code, done.out, done.err.count("\n")) == (1, b"", 1)
        assert "has live members: w1, w2, w3 and 2 more. " in done.err
        assert "with --force. " in done.err
    assert "5 members (5 alive), " in succeed(url, *command, "--force", "--dry-run").err
    assert group._handle.protocol.look().view == begun, "the group was changed"
    reset = threading.Event()
    group.on_reset(reset.set)
    assert "deleted. Live members will rejoin it." in succeed(url, *command, "--force").err
    assert reset.wait(SOON_S)
    eventually(lambda: sum(member.alive for member in group.members) == 5)


def test_group_joined_during_confirmation_is_not_deleted(url: str, group: PeerGroup) -> None:
    with Terminal([METEOR, "--url", url, "peers", "delete", NAME], columns=200) as terminal:
        terminal.wait_for("Continue?")
        group.join("w1")
        terminal.press("y\n")
        assert terminal.wait() == 1
        assert "live member" in terminal.text
        assert "with --force." in terminal.text
    assert [member.id for member in group.members] == ["w1"]


# Watching


def test_watch_reports_events_in_order_when_a_process_is_killed(url: str) -> None:
    with meteor_.connect(url) as m, m.peer_group(NAME, ttl=1) as group:
        me = group.join("w1")
        with RunningCommand(url, "peers", "watch", NAME, "--json") as watching:
            assert "watching group 'workers'" in watching.line("stderr")
            with closing(Peer(url)) as child:
                child.ask("join", "w2")
                me.resign()
            eventually(lambda: (group.leader or me).id == "w1" and me.term is not None, 30)
            future = group.propose("topic", kind=2)
            assert not future.result(30).passed
            me.update({"load": 1})
            me.leave()
            found = [msgspec.json.decode(watching.line())]
            while found[-1]["event"] != "left":
                found.append(msgspec.json.decode(watching.line()))
            assert watching.end(signal.SIGINT).code == 130
    assert [(each["event"], each.get("member")) for each in found] == [
        ("state", None),
        ("joined", "w2"),
        ("resigned", "w1"),
        ("elected", "w2"),
        ("dead", "w2"),
        ("resigned", "w2"),
        ("elected", "w1"),
        ("proposed", None),
        ("decided", None),
        ("updated", "w1"),
        ("left", "w1"),
    ]
    first = found[0]["view"]
    assert [each["view"] for each in found] == list(range(first, first + len(found)))
    assert all(set(each) == {*FIELDS["peers watch"], *PEER_EVENTS[each["event"]]} for each in found)
    assert [set(member) for member in found[0]["members"]] == [set(MEMBER_FIELDS)]
    assert (found[7]["topic"], found[8]["passed"]) == ('"topic"', False)
    assert found[8]["missing"] == ["w1"]


def test_watch_in_a_terminal_shows_the_state_and_then_each_event(
    url: str, members: list[Membership], group: PeerGroup
) -> None:
    with Terminal([METEOR, "--url", url, "peers", "watch", NAME]) as terminal:
        terminal.wait_for("w2: alive")
        title, state, one, two, *_ = terminal.lines
        assert title == "meteor: watching group 'workers'."
        assert re.fullmatch(r"\S{25} #3 2 members, leader w1, term \d+", state)
        assert (one.split(), two.split()) == (["w1:", "alive,", "leader"], ["w2:", "alive"])
        other = group.join("w3")
        terminal.wait_for("#4 w3 joined")
        other.close()
        terminal.wait_for("#5 w3 closed; it may come back")
        group.propose(HOSTILE).result(30)
        terminal.wait_for("#7 the vote passed: 2 yes")
        members[0].resign()
        terminal.wait_for("#8 w1 is no longer the leader: it resigned")
        terminal.wait_for("#9 w2 is the leader, term ")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
        assert b"\x1b[2J" not in terminal.output
        assert r'#6 vote called (majority): "evil\u001b[2J' in "".join(terminal.lines)


def test_watch_ends_when_the_pipe_is_closed(url: str, members: list[Membership]) -> None:
    with RunningCommand(url, "peers", "watch", NAME) as watching:
        watching.line("stderr")
        assert watching.process.stdout is not None
        watching.process.stdout.close()
        assert watching.process.wait(30) == 0


@pytest.mark.slow
def test_watch_survives_a_server_restart(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes")
    url = f"redis://127.0.0.1:{server.port}"
    with meteor_.connect(url) as m, m.peer_group(NAME, ttl=1) as group:
        me = group.join("w1")
        with RunningCommand(url, "peers", "watch", NAME, "--timeout", "1") as watching:
            watching.line("stderr")
            assert "1 member, leader w1" in watching.line()
            watching.line()
            server.kill()
            assert "cannot be reached" in watching.line()
            server.restart()
            assert "the server is back" in watching.line()
            eventually(lambda: me.term is not None, 30)
            me.leave()
            while "w1 left" not in watching.line():
                pass


def test_property_event_shows_its_value() -> None:
    fields = {"name": b"limit", "value": b'{"a":1}'}
    said, facts = describe_event(Event(7, "property", 0, property="limit", fields=fields))
    assert said == 'property limit was set to {"a":1}'
    assert set(facts) == set(PEER_EVENTS["property"])
    said, facts = describe_event(Event(7, "property", 0, property="limit"))
    assert (said, facts["value"]) == ("property limit was changed or deleted", None)


@pytest.mark.parametrize(
    ("kind", "reason", "text"),
    [
        ("left", "left", "w left"),
        ("left", "expired", "w left: its heartbeats stopped"),
        ("left", "removed", "w was removed"),
        ("left", "resync", "w is gone"),
        ("dead", None, "w is dead"),
        ("alive", None, "w is back"),
        ("resigned", "taken over", "w is no longer the leader: it joined again"),
        ("reset", None, "the server lost some of the group's state, or the group was deleted"),
    ],
)
def test_event_is_described_in_words(kind: Any, reason: str | None, text: str) -> None:
    said, facts = describe_event(Event(7, kind, 0, member="w", reason=reason))
    assert said == text
    assert set(facts) == set(PEER_EVENTS[kind])


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("peers mem", ["members"]),
        ("peers members ", ["cells/c1", "workers"]),
        ("peers remove workers w", ["w1", "w2"]),
        ("peers send workers jobs --to ", ["any", "all", "leader", "w1", "w2"]),
        ("peers send cells/c1 jobs --to ", ["any", "all", "leader", "member:all"]),
        ("peers send cells/c1 jobs --to al", ["all"]),
        ("peers remove cells/c1 ", ["all"]),
        ("peers remove nope ", []),
    ],
)
def test_completion_offers_peer_groups_and_members(
    url: str, members: list[Membership], typed: str, found: list[str]
) -> None:
    words = f"meteor {typed}"
    env = {
        "_METEOR_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    with meteor_.connect(url) as m, m.peer_group("cells", instance="c1") as cells:
        cells.join("all")
        done = meteor(url, environ=env)
    assert [line.partition(",")[2] for line in done.lines if line] == found
    assert done.err == ""
