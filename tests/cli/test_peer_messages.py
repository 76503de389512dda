"""``meteor peers send``, ``ask``, ``dead`` and ``propose``: messages to members, and votes."""

from __future__ import annotations

from typing import Any

import click
import pytest

import meteor_py as meteor_
from meteor_cli.args.input import parse_body
from meteor_cli.render.schema import FIELDS
from meteor_py import HandlerFailed, Membership, PeerCodec, PeerGroup
from tests.support.commands import meteor, succeed
from tests.support.mailing import NAME, Post
from tests.support.mailing import post as post
from tests.support.peer_members import group as group
from tests.support.peer_members import members as members
from tests.support.waiting import eventually

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
        ("7 {}", "7 {}"),
        ("", ""),
        ("\udcff", "\udcff"),
    ],
)
def test_body_is_json_or_text(text: str | None, body: Any) -> None:
    assert parse_body(text, "BODY") == body


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a":', "it ends too early"),
        ("{id: 7}", "object keys must be strings"),
        (" [info] started", "invalid character"),
        ('"7" of nine', "trailing characters"),
        ("[" * 100_000, "it is nested too deeply"),
        ('["\udcff"]', "it is not UTF-8"),
    ],
)
def test_invalid_json_is_refused_without_the_text_option(text: str, why: str) -> None:
    with pytest.raises(click.BadParameter, match="starts like JSON but is invalid: ") as caught:
        parse_body(text, "BODY")
    assert why in caught.value.message
    assert len(caught.value.message) < 250
    assert parse_body(text, "BODY", as_text=True) == text


def test_broken_json_is_not_sent(url: str, members: list[Membership], group: PeerGroup) -> None:
    before = group.view
    for command, what in (("send", "BODY"), ("ask", "BODY"), ("propose", "TOPIC")):
        queue = [] if command == "propose" else ["jobs"]
        done = meteor(url, "peers", command, NAME, *queue, '{"a":')
        assert (done.code, done.out) == (2, b"")
        assert f"""Invalid value for {what}: '{{"a":' starts like JSON""" in done.err
        assert "Use --text" in done.err
    assert group._handle.protocol.look().view == before, "a member was asked to vote"


@pytest.mark.parametrize("text", ['{"a":', "7", "null"])
def test_text_option_sends_the_body_as_text(url: str, members: list[Membership], text: str) -> None:
    (found,) = succeed(url, "peers", "ask", NAME, "jobs", text, "--text").objects
    assert found["did"] == text
    (found,) = succeed(url, "peers", "propose", NAME, text, "--text", "--json").objects
    assert found["topic"] == text
    got: list[Any] = []
    members[0].on("notes")(lambda message: got.append(message.body))
    succeed(url, "peers", "send", NAME, "notes", text, "--text", "--to", "w1")
    assert got == [text]


@pytest.mark.parametrize("to", ["any", "all", "leader", "w1"])
@pytest.mark.parametrize("tell", [[], ["--tell"]])
def test_message_reaches_its_target_with_body_and_priority(
    url: str, members: list[Membership], group: PeerGroup, to: str, tell: list[str]
) -> None:
    got: list[tuple[str, Any, int]] = []
    for member in members:
        member.on("notes")(lambda m: got.append((m.member, m.body, m.priority)))
    arguments = ["notes", '{"a": 1}', "--to", to, "--priority", "3", *tell]
    done = succeed(url, "peers", "send", NAME, *arguments)
    assert done.err.startswith(f"meteor: {'sent to' if tell else 'handled by'} ")
    eventually(lambda: len(got) == (2 if to == "all" else 1))
    assert {each[1:] for each in [(m, str(b), p) for m, b, p in got]} == {("{'a': 1}", 3)}
    if to in ("leader", "w1"):
        assert got[0][0] == "w1"


def test_failed_message_prints_one_error(url: str, members: list[Membership]) -> None:
    for arguments, sentence in (
        (["jobs", "x", "--to", "bob"], "no member 'bob' in group 'workers'. `meteor peers members"),
        (["hard", "x", "--to", "all"], "1 of 2 members of group 'workers' did not acknowledge"),
        (["hard", "x", "--to", "w2"], r"ValueError: evil\x1b[2J\u202egnp.exe\n"),
        (["nobody", "--timeout", "0.2"], "got no reply within 0.2 seconds"),
        (["a/b"], "cannot be the name of a queue"),
    ):
        done = meteor(url, "peers", "send", NAME, *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (1, b"", 1), done
        assert sentence in done.err


def test_member_named_like_a_target_keyword_can_be_reached(url: str, group: PeerGroup) -> None:
    for name in ("leads", "any", "all", "leader"):
        group.join(name).on("who")(lambda message: message.member)
    for name in ("any", "all", "leader", "leads"):
        to = ["--to", f"member:{name}"]
        assert succeed(url, "peers", "ask", NAME, "who", *to).objects == [name]
        done = succeed(url, "peers", "send", NAME, "who", *to)
        assert done.err == f"meteor: handled by member {name!r}.\n"
    assert succeed(url, "peers", "ask", NAME, "who", "--to", "leader").objects == ["leads"]
    assert len(succeed(url, "peers", "ask", NAME, "who", "--to", "all").objects) == 4
    done = meteor(url, "peers", "ask", NAME, "who", "--to", "member:bob")
    assert (done.code, "no member 'bob' in group 'workers'" in done.err) == (1, True)


@pytest.mark.parametrize("command", ["ask", "send"])
@pytest.mark.parametrize("to", ["any", "all", "w2"])
def test_error_for_a_missing_reply_suggests_a_missing_handler(
    url: str, members: list[Membership], command: str, to: str
) -> None:
    members[0].on("half")(lambda message: None)
    queue = "half" if to == "all" else "nobody"
    done = meteor(url, "peers", command, NAME, queue, "--to", to, "--timeout", "1")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"There may be no handler for queue {queue!r}." in done.err
    assert "within 1 second" in done.text + done.err
    assert "1 seconds" not in done.text + done.err


def test_error_from_a_failed_handler_does_not_suggest_a_missing_handler(
    url: str, members: list[Membership]
) -> None:
    for command in ("ask", "send"):
        for to in ("all", "w2"):
            done = meteor(url, "peers", command, NAME, "hard", "--to", to)
            assert (done.code, "may be no handler" in done.err) == (1, False)


def test_reply_is_printed_as_json(url: str, members: list[Membership]) -> None:
    (found,) = succeed(url, "peers", "ask", NAME, "jobs", "[1]", "--to", "leader").objects
    assert found == {"did": [1], "by": "w1"}
    (found,) = succeed(url, "peers", "ask", NAME, "jobs").objects
    assert found["by"] in ("w1", "w2")
    done = meteor(url, "peers", "ask", NAME, "nobody", "--timeout", "0.2")
    assert (done.code, "got no reply within 0.2 seconds" in done.err) == (1, True)


def test_bytes_in_replies_are_printed_like_records(url: str, post: Post) -> None:
    with meteor_.connect(url) as m, m.peer_group("raw", codec="bytes") as group:
        me = group.join()
        me.on("q")(lambda message: b"\xff")
        me.on("text")(lambda message: b"text")
        assert succeed(url, "peers", "ask", "raw", "q").objects == [{"b64": "/w=="}]
        assert succeed(url, "peers", "ask", "raw", "text").objects == ["text"]


def test_replies_from_all_members_are_printed_with_errors(
    url: str, members: list[Membership]
) -> None:
    found = succeed(url, "peers", "ask", NAME, "jobs", "1", "--to", "all").objects
    assert [each["member"] for each in found] == ["w1", "w2"]
    assert all(set(each) == set(FIELDS["peers ask --to all"]) for each in found)
    done = meteor(url, "peers", "ask", NAME, "hard", "--to", "all")
    assert (done.code, "1 of 2 members did not reply" in done.err) == (1, True)
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
    assert heading.split()[:4] == ["failed", "member", "queue", "verb"]
    assert line.split()[3:9] == ["w1", "jobs", "send", "-", "7", "3"]
    assert "Register it" in line
    (found,) = succeed(url, "peers", "dead", NAME, "--json").objects
    assert set(found) == set(FIELDS["peers dead"])
    assert (found["group"], found["queue"], found["body"]) == (NAME, "jobs", {"b64": "/zFq"})


# Votes


def test_outcome_of_a_vote_determines_the_exit_status(url: str, members: list[Membership]) -> None:
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


def test_vote_that_is_not_decided_in_time_does_not_pass(url: str, group: PeerGroup) -> None:
    silent = group.join("silent")
    done = meteor(url, "peers", "propose", NAME, "x", "--kind", "consensus", "--timeout", "0.3")
    assert done.code == 1
    assert "did not pass: too few members voted in time" in done.text
    assert "1: silent" in done.text
    silent.leave()
    done = meteor(url, "peers", "propose", NAME, "x")
    assert (done.code, "has no live member that could vote" in done.err) == (1, True)


def test_invalid_vote_kind_is_refused(url: str, members: list[Membership]) -> None:
    for kind in ("most", "0", "1001"):
        done = meteor(url, "peers", "propose", NAME, "x", "--kind", kind)
        assert (done.code, "is not majority, consensus" in done.err) == (2, True)
        assert "or a number from 1 to 1,000." in done.err


def test_vote_that_needs_more_votes_than_there_are_members_does_not_pass(
    url: str, group: PeerGroup
) -> None:
    for name in ("w1", "w2"):
        group.join(name).on_vote(lambda proposal: True)
        count = "1 member" if name == "w1" else "2 members"
        done = meteor(url, "peers", "propose", NAME, "x", "--kind", "5")
        outcome, *_ = done.lines
        assert done.code == 1
        assert outcome.endswith(f"  did not pass: 5 votes needed, but only {count} can vote")
    assert "passed" in succeed(url, "peers", "propose", NAME, "x", "--kind", "2").text
