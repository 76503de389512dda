"""``meteor peers``: distributed groups on the command line, as processes and in a terminal."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

import meteor_py as meteor_
from meteor_cli.contracts import FIELDS, MEMBER_FIELDS, PEER_EVENTS
from meteor_cli.peer_lines import tell
from meteor_cli.peer_messages import parse
from meteor_py import Event, HandlerFailed, Membership, Message, PeerCodec, PeerGroup
from tests.commands import METEOR, Running, meteor, succeed
from tests.conftest import ServerFactory
from tests.mailing import NAME, Post
from tests.peering import Peer
from tests.terminal import Terminal
from tests.waiting import eventually

HOSTILE = "evil\x1b[2J\u202egnp.exe\n"


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with Post(url) as post:
        yield post


@pytest.fixture
def group(post: Post) -> PeerGroup:
    return post.group()


@pytest.fixture
def crew(group: PeerGroup) -> list[Membership]:
    """Two members: one leads, one fails what it gets on the queue "hard"."""
    members = [group.join("w1", metadata={"host": HOSTILE}, priority=5), group.join("w2")]
    for member in members:
        member.on("jobs")(lambda message: {"did": message.body, "by": message.member})
        member.on_vote(lambda proposal: proposal.topic != "no")

    def hard(message: Message) -> int:
        if message.member == "w2":
            raise ValueError(HOSTILE)
        return 1

    for member in members:
        member.on("hard")(hard)
    return members


# Looking


def test_groups_are_listed_with_members_leader_and_term(url: str, crew: list[Membership]) -> None:
    with meteor_.connect(url) as m, m.group("cells", instance="c1", election=None):
        heading, cells, workers = succeed(url, "peers", "ls").lines
        assert heading.split() == ["group", "members", "alive", "leader", "term"]
        assert cells.split() == ["cells/c1", "0", "0", "-", "-"]
        term = crew[0].term
        assert term is not None
        assert workers.split() == [NAME, "2", "2", "w1", str(term.number)]
        found = succeed(url, "peers", "ls", "--json").objects
    assert [each["name"] for each in found] == ["cells/c1", NAME]
    assert [each["election"] for each in found] == ["none", "oldest"]
    assert all(set(each) == set(FIELDS["peers ls"]) for each in found)


def test_without_groups_a_sentence_says_so(url: str) -> None:
    done = succeed(url, "peers", "ls")
    assert (done.out, "there is no distributed group yet" in done.err) == (b"", True)


def test_a_group_that_cannot_be_read_does_not_hide_the_others(
    url: str, crew: list[Membership], group: PeerGroup
) -> None:
    client = group.books.client
    client.redis.sadd("meteor:groups", "odd")
    client.redis.hset("meteor:group:{odd}:config", mapping={"ttl": "1000"})
    done = meteor(url, "peers", "ls")
    assert (done.code, len(done.lines)) == (1, 2)
    assert "group 'odd' is left out" in done.err


def test_members_are_listed_dead_ones_too(
    url: str, crew: list[Membership], group: PeerGroup
) -> None:
    crew[1].close()
    nameless = group.join()
    heading, *lines = succeed(url, "peers", "members", NAME).lines
    assert heading.split() == ["id", "status", "leads", "priority", "joined", "metadata"]
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
    with meteor_.connect(url) as m, m.group("cells", instance="c1") as group:
        me = group.join()
        assert succeed(url, "peers", "leader", "cells/c1").lines == [me.id]
        done = meteor(url, "peers", "leader", "cells/")
        assert (done.code, "cannot be the name of a group" in done.err) == (1, True)


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
    ],
)
def test_a_group_that_does_not_exist_is_not_begun(url: str, arguments: list[str]) -> None:
    command, *rest = arguments
    done = meteor(url, "peers", command, "nope", *rest)
    assert (done.code, done.out) == (1, b"")
    assert "There is no distributed group 'nope'; `meteor peers ls`" in done.err
    assert done.err.count("\n") == 1
    with meteor_.connect(url) as m:
        assert m.groups() == []
        assert m.redis.keys("*") == []


def test_looking_on_changes_nothing_and_nobody_joins(
    url: str, crew: list[Membership], group: PeerGroup
) -> None:
    before = group.view
    for command in ("ls", "members", "leader"):
        succeed(url, "peers", command, *([] if command == "ls" else [NAME]))
    assert group.books.look().view == before


# The leader


def test_the_leader_is_printed_with_its_term_as_json(url: str, crew: list[Membership]) -> None:
    assert succeed(url, "peers", "leader", NAME).text == "w1\n"
    (found,) = succeed(url, "peers", "leader", NAME, "--json").objects
    assert set(found) == set(FIELDS["peers leader"])
    assert (found["leader"], found["priority"], found["leads"]) == ("w1", 5, True)
    term = crew[0].term
    assert term is not None
    assert found["term"] == term.number


def test_without_a_leader_the_exit_status_is_one(url: str, post: Post) -> None:
    post.group(min_size=2).join()
    done = meteor(url, "peers", "leader", NAME)
    assert (done.code, done.out, done.err.count("\n")) == (1, b"", 1)
    assert "has no leader now; 1 member is alive, and it needs 2 to elect one." in done.err
    with meteor_.connect(url) as m, m.group("flat", election=None):
        done = meteor(url, "peers", "leader", "flat", "--wait", "60")
        assert (done.code, "elects nobody" in done.err) == (1, True)


def test_a_leader_is_waited_for(url: str, group: PeerGroup) -> None:
    done = meteor(url, "peers", "leader", NAME, "--wait", "0.2")
    assert (done.code, "0 members are alive." in done.err) == (1, True)
    with Running(url, "peers", "leader", NAME, "--wait", "60") as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.process.wait(0.5)
        me = group.join()
        assert waiting.line() == me.id
        assert waiting.end().code == 0


# Messages


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (None, None),
        ("null", None),
        ("7", 7),
        ('{"id": 7}', {"id": 7}),
        ('"7"', "7"),
        ("hello", "hello"),
        ("{id: 7}", "{id: 7}"),
        ("", ""),
        ("\udcff", "\udcff"),
    ],
)
def test_a_body_is_json_or_else_text(text: str | None, body: Any) -> None:
    assert parse(text) == body


@pytest.mark.parametrize("to", ["any", "all", "leader", "w1"])
@pytest.mark.parametrize("tell", [[], ["--tell"]])
def test_a_message_is_sent(
    url: str, crew: list[Membership], group: PeerGroup, to: str, tell: list[str]
) -> None:
    got: list[tuple[str, Any, int]] = []
    for member in crew:
        member.on("notes")(lambda m: got.append((m.member, m.body, m.priority)))
    arguments = ["notes", '{"a": 1}', "--to", to, "--priority", "3", *tell]
    done = succeed(url, "peers", "send", NAME, *arguments)
    assert done.err.startswith(f"meteor: {'left for' if tell else 'handled by'} ")
    eventually(lambda: len(got) == (2 if to == "all" else 1))
    assert {each[1:] for each in [(m, str(b), p) for m, b, p in got]} == {("{'a': 1}", 3)}
    if to in ("leader", "w1"):
        assert got[0][0] == "w1"


def test_what_becomes_of_a_message_is_said_in_a_sentence(url: str, crew: list[Membership]) -> None:
    for arguments, sentence in (
        (["jobs", "x", "--to", "bob"], "no member 'bob' in group 'workers'; `meteor peers members"),
        (["hard", "x", "--to", "all"], "1 of 2 members of group 'workers' did not take"),
        (["hard", "x", "--to", "w2"], r"ValueError: evil\x1b[2J\u202egnp.exe\n"),
        (["nobody", "--timeout", "0.2"], "not answered within 0.2 seconds"),
        (["a/b"], "cannot be the name of a queue"),
    ):
        done = meteor(url, "peers", "send", NAME, *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (1, b"", 1), done
        assert sentence in done.err


def test_the_answer_is_printed_as_json(url: str, crew: list[Membership]) -> None:
    (found,) = succeed(url, "peers", "ask", NAME, "jobs", "[1]", "--to", "leader").objects
    assert found == {"did": [1], "by": "w1"}
    (found,) = succeed(url, "peers", "ask", NAME, "jobs").objects
    assert found["by"] in ("w1", "w2")
    done = meteor(url, "peers", "ask", NAME, "nobody", "--timeout", "0.2")
    assert (done.code, "not answered within 0.2 seconds" in done.err) == (1, True)


def test_bytes_are_printed_as_those_of_records_are(url: str, post: Post) -> None:
    with meteor_.connect(url) as m, m.group("raw", codec="bytes") as group:
        me = group.join()
        me.on("q")(lambda message: b"\xff")
        me.on("text")(lambda message: b"text")
        assert succeed(url, "peers", "ask", "raw", "q").objects == [{"b64": "/w=="}]
        assert succeed(url, "peers", "ask", "raw", "text").objects == ["text"]


def test_the_answers_of_all_are_printed_and_those_missing_named(
    url: str, crew: list[Membership]
) -> None:
    found = succeed(url, "peers", "ask", NAME, "jobs", "1", "--to", "all").objects
    assert [each["member"] for each in found] == ["w1", "w2"]
    assert all(set(each) == set(FIELDS["peers ask --to all"]) for each in found)
    done = meteor(url, "peers", "ask", NAME, "hard", "--to", "all")
    assert (done.code, "1 of 2 members did not answer" in done.err) == (1, True)
    one, two = done.objects
    assert (one["reply"], one["error"], two["reply"]) == (1, None, None)
    assert "ValueError" in two["error"]
    assert b"\x1b" not in done.out


def test_dead_letters_are_listed_with_the_reason(url: str, post: Post, group: PeerGroup) -> None:
    done = succeed(url, "peers", "dead", NAME)
    assert (done.out, done.err) == (b"", "meteor: group 'workers' has no dead letters.\n")
    codec = PeerCodec()
    codec.register(
        complex,
        id=7,
        encode=lambda z: b"\xff" + str(z).encode(),
        decode=lambda data: complex(data[1:].decode()),
    )
    group.join("w1").on("jobs")(lambda message: None)
    with pytest.raises(HandlerFailed):
        post.group(codec=codec).member("w1").send("jobs", 1j).result(20)
    heading, line = succeed(url, "peers", "dead", NAME).lines
    assert heading.split()[:4] == ["buried", "member", "queue", "verb"]
    assert line.split()[3:9] == ["w1", "jobs", "send", "-", "7", "3"]
    assert "register it" in line
    (found,) = succeed(url, "peers", "dead", NAME, "--json").objects
    assert set(found) == set(FIELDS["peers dead"])
    assert (found["group"], found["queue"], found["body"]) == (NAME, "jobs", {"b64": "/zFq"})


# Votes


def test_the_outcome_of_a_vote_is_the_exit_status(url: str, crew: list[Membership]) -> None:
    lines = succeed(url, "peers", "propose", NAME, '{"limit": 7}', "--kind", "2").lines
    assert [line.split(maxsplit=1) for line in lines] == [
        ["outcome", "passed"],
        ["yes", "2: w1, w2"],
        ["no", "0"],
    ]
    done = meteor(url, "peers", "propose", NAME, "no", "--json")
    (found,) = done.objects
    assert (done.code, found["passed"], found["yes"], found["topic"]) == (1, False, [], "no")
    assert set(found) == set(FIELDS["peers propose"])


def test_a_vote_that_is_not_decided_in_time_has_not_passed(url: str, group: PeerGroup) -> None:
    silent = group.join("silent")
    done = meteor(url, "peers", "propose", NAME, "x", "--kind", "consensus", "--timeout", "0.3")
    assert done.code == 1
    assert "did not pass: not enough had voted in time" in done.text
    assert "1: silent" in done.text
    silent.leave()
    done = meteor(url, "peers", "propose", NAME, "x")
    assert (done.code, "Nobody in group 'workers' is alive to vote" in done.err) == (1, True)


def test_what_is_no_kind_of_vote_is_refused(url: str, crew: list[Membership]) -> None:
    for kind in ("most", "0", "1001"):
        done = meteor(url, "peers", "propose", NAME, "x", "--kind", kind)
        assert (done.code, "neither majority nor consensus" in done.err) == (2, True)


# Removing


def test_a_member_is_removed_only_if_that_is_confirmed(
    url: str, crew: list[Membership], group: PeerGroup
) -> None:
    command = ["peers", "remove", NAME, "w1"]
    done = meteor(url, *command)
    assert (done.code, "'w1' (alive, and leads) will be removed" in done.err) == (2, True)
    assert "(alive, and leads) would be removed" in succeed(url, *command, "--dry-run").err
    for answer, code in (("n", 1), ("y", 0)):
        assert group.find("w1") is not None
        with Terminal([METEOR, "--url", url, *command]) as terminal:
            terminal.wait_for("Go on?")
            terminal.press(f"{answer}\n")
            assert terminal.wait() == code
    eventually(lambda: crew[0].lost.is_set())
    eventually(lambda: group.leader is not None and group.leader.id == "w2")
    done = meteor(url, *command, "--yes")
    assert (done.code, "There is no member 'w1' in group 'workers'" in done.err) == (1, True)
    assert "`meteor peers remove` does that" in meteor(url, "peers", "rm", NAME).err


# Watching


def test_events_are_told_in_their_order_when_a_process_is_killed(url: str) -> None:
    with meteor_.connect(url) as m, m.group(NAME, ttl=1) as group:
        me = group.join("w1")
        with Running(url, "peers", "watch", NAME, "--json") as watching:
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
    url: str, crew: list[Membership], group: PeerGroup
) -> None:
    with Terminal([METEOR, "--url", url, "peers", "watch", NAME]) as terminal:
        terminal.wait_for("watching group 'workers'.")
        state, one, two, *_ = terminal.lines
        assert re.fullmatch(r"\S{25} #3 2 members, w1 leads, term \d+", state)
        assert (one.split(), two.split()) == (["w1:", "alive,", "leads"], ["w2:", "alive"])
        other = group.join("w3")
        terminal.wait_for("#4 w3 joined")
        other.close()
        terminal.wait_for("#5 w3 has ended, and may come back")
        group.propose(HOSTILE).result(30)
        terminal.wait_for("#7 the vote passed: 2 yes")
        crew[0].resign()
        terminal.wait_for("#8 w1 leads no more: it has resigned")
        terminal.wait_for("#9 w2 leads, term ")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
        assert b"\x1b[2J" not in terminal.output
        assert r'#6 somebody puts to the vote (majority): "evil\u001b[2J' in "".join(terminal.lines)


def test_watch_ends_when_nobody_reads_any_more(url: str, crew: list[Membership]) -> None:
    with Running(url, "peers", "watch", NAME) as watching:
        watching.line("stderr")
        assert watching.process.stdout is not None
        watching.process.stdout.close()
        assert watching.process.wait(30) == 0


@pytest.mark.slow
def test_watch_tells_when_the_server_is_away_and_goes_on(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes")
    url = f"redis://127.0.0.1:{server.port}"
    with meteor_.connect(url) as m, m.group(NAME, ttl=1) as group:
        me = group.join("w1")
        with Running(url, "peers", "watch", NAME, "--timeout", "1") as watching:
            watching.line("stderr")
            assert "1 member, w1 leads" in watching.line()
            watching.line()
            server.kill()
            assert "cannot be reached" in watching.line()
            server.restart()
            assert "the server answers again" in watching.line()
            eventually(lambda: me.term is not None, 30)
            me.leave()
            while "w1 left" not in watching.line():
                pass


@pytest.mark.parametrize(
    ("kind", "reason", "text"),
    [
        ("left", "left", "w left"),
        ("left", "expired", "w left: it was not heard of"),
        ("left", "removed", "w was removed"),
        ("left", "resync", "w is gone"),
        ("dead", None, "w is dead"),
        ("alive", None, "w is back"),
        ("resigned", "taken over", "w leads no more: it has joined again"),
        ("reset", None, "the server has lost state of the group, or it was deleted"),
    ],
)
def test_an_event_in_words(kind: Any, reason: str | None, text: str) -> None:
    said, facts = tell(Event(7, kind, 0, member="w", reason=reason))
    assert said == text
    assert set(facts) == set(PEER_EVENTS[kind])


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("peers mem", ["members"]),
        ("peers members ", ["cells/c1", "workers"]),
        ("peers remove workers w", ["w1", "w2"]),
        ("peers send workers jobs --to ", ["any", "all", "leader", "w1", "w2"]),
        ("peers remove nope ", []),
    ],
)
def test_the_shell_completes_groups_and_members(
    url: str, crew: list[Membership], typed: str, found: list[str]
) -> None:
    words = f"meteor {typed}"
    env = {
        "_METEOR_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    with meteor_.connect(url) as m, m.group("cells", instance="c1"):
        done = meteor(url, environ=env)
    assert [line.partition(",")[2] for line in done.lines if line] == found
    assert done.err == ""
