"""``meteor shared``, and what other commands show of shared groups, as processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meteor_cli.args.keys import parse_key, show_key
from meteor_cli.commands.shared import reasons
from meteor_py import (
    Consumer,
    GroupConfigMismatch,
    GroupNotFound,
    KeyState,
    SharedConfig,
    SharedDescription,
    SharedSubscriber,
    Stream,
    connect,
)
from meteor_py.shared.config import WAITING_MAX
from tests.support.commands import METEOR, Running, meteor, succeed
from tests.support.readers import everything
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

#: No text, and nothing that a terminal should see.
NASTY = b"\xff\x00\x1b[2J\\"
SHOWN = r"\xff\x00\x1b[2J\\"


@pytest.fixture
def stream(url: str) -> Iterator[Stream]:
    """Twelve records of three carts in turn, one of which has a nasty id."""
    with connect(url) as m:
        stream = m.stream("carts", ordering_key="key")
        with stream.publisher() as pub:
            for number in range(12):
                pub.publish(b"%d" % number, key=(b"a", b"b", NASTY)[number % 3])
        yield stream


@pytest.fixture
def sub(stream: Stream) -> Iterator[SharedSubscriber]:
    """A consumer that holds two records of each cart; cart a gets parked, b delayed."""
    with stream.shared_subscriber("billing", max_per_key=2, on_poison="park") as sub:
        records = {record.offset: record for record in sub.poll()}
        records[0].reject("no such cart")
        records[1].release(delay=600)
        sub.flush()
        yield sub


def test_shared_groups_are_listed(url: str, stream: Stream, sub: SharedSubscriber) -> None:
    for arguments in ([], ["carts"]):
        heading, line = succeed(url, "shared", "ls", *arguments).lines
        assert heading.split() == [
            *("stream", "group", "consumers", "lag", "waiting", "ready", "blocked", "dead", "lost")
        ]
        assert line.split() == ["carts", "billing", "1", "12", "10", "0", "2", "0", "0"]


def test_what_there_is_not_is_said_with_a_hint(url: str, stream: Stream) -> None:
    done = succeed(url, "shared", "ls", "carts")
    assert (done.out, "there is no shared group yet" in done.err) == (b"", True)
    connect(url).stream("plain")
    assert "--ordering-key key" in succeed(url, "shared", "ls", "plain").err
    for command in ("info", "fsck"):
        done = meteor(url, "shared", command, "carts", "nope")
        assert (done.code, done.out) == (1, b"")
        assert "has no shared group 'nope'; `meteor shared ls carts`" in done.err
        assert done.err.count("\n") == 1
    assert "There is no stream 'nope'" in meteor(url, "shared", "ls", "nope").err


def test_a_shared_group_is_described_with_what_is_in_the_way(
    url: str, sub: SharedSubscriber
) -> None:
    shown = succeed(url, "shared", "info", "carts", "billing").text
    assert "below 0 of 12, lag 12" in shown
    assert "after 5 failures, then its key is parked" in shown
    assert f"{sub.name}     1        2  " in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["a", "4", "0", "4", "0", "parked", "-"] in lines
    assert ["b", "4", "0", "4", "1", "delayed", "-"] in lines
    assert [SHOWN, "4", "2", "2", "2", "owned", sub.name] in lines
    assert "* 1 key is parked, with 4 records: `meteor shared resume carts billing" in shown
    assert "* 1 key is delayed after a failure" in shown
    assert f"* 2 records wait for {sub.name}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_number_of_groups_shown_is_limited(url: str, sub: SharedSubscriber) -> None:
    shown = succeed(url, "shared", "info", "carts", "billing", "-n", "1").lines
    assert "\u2026 and 2 more keys" in shown
    assert not any(line.startswith("b ") for line in shown)
    (found,) = succeed(url, "shared", "info", "carts", "billing", "-n", "1", "--json").objects
    assert [key["key"] for key in found["keys"]] == ["a"]
    assert found["keys_total"] == 3


def test_ids_in_json_bring_every_byte_back(url: str, sub: SharedSubscriber) -> None:
    (found,) = succeed(url, "shared", "info", "carts", "billing", "--json").objects
    assert [key["key"] for key in found["keys"]] == ["a", "b", {"b64": "/wAbWzJKXA=="}]


@pytest.mark.parametrize("given", [[SHOWN], [NASTY.hex(), "--hex"]])
def test_an_id_is_given_as_it_is_shown_or_in_hex(
    url: str, sub: SharedSubscriber, given: list[str]
) -> None:
    arguments = ["shared", "purge", "carts", "billing", *given]
    done = succeed(url, *arguments, "--dry-run")
    assert f"2 waiting records of {SHOWN}; 2 records stay with {sub.name}" in done.err
    done = succeed(url, *arguments, "--limit", "1", "--yes")
    assert f"1 record of {SHOWN}" in done.err
    assert "1 record of" in succeed(url, *arguments, "--yes").err
    done = succeed(url, *arguments, "--yes")
    assert f"nothing of {SHOWN} waits in shared group 'billing'; 2 records stay" in done.err
    assert sub.fsck() == []


def test_a_dry_run_of_a_purge_changes_nothing_and_says_what_is_not_known(
    url: str, stream: Stream
) -> None:
    with stream.shared_subscriber("billing", prefetch=1) as sub:
        sub.poll(20)
        command = ["shared", "purge", "carts", "billing", "b", "--dry-run"]
        before = everything(stream.client.redis)
        done = succeed(url, *command)
        assert "11 records have not been looked at, and may be of any key" in done.err
        assert "nothing of b waits" in done.err
        assert everything(stream.client.redis).keys() == before.keys()
        assert sub._shared.describe().looked == 1
        sub.keys(look_ahead=True)
        done = succeed(url, *command)
        assert "not been looked at" not in done.err
        assert "would be purged from shared group 'billing': 4 waiting records of b" in done.err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["\\q"], r"a backslash is written \\"),
        (["zz", "--hex"], "not in hexadecimal"),
        ([""], "1 to 256 bytes, not 0"),
        (["x" * 257], "1 to 256 bytes, not 257"),
    ],
)
def test_what_is_no_id_is_refused(url: str, stream: Stream, given: list[str], why: str) -> None:
    done = meteor(url, "shared", "purge", "carts", "billing", *given)
    assert done.code == 2
    assert why in done.err


@pytest.mark.parametrize("group", [b"cart-7", NASTY, "\u202eé".encode(), b"\xc3", b"a\nb"])
def test_what_is_shown_of_an_id_is_harmless_and_gives_it_back(group: bytes) -> None:
    assert parse_key(show_key(group)) == group
    assert show_key(group).isprintable()


def test_records_are_purged_only_if_that_is_confirmed(url: str, sub: SharedSubscriber) -> None:
    command = ["shared", "purge", "carts", "billing", "a"]
    done = meteor(url, *command)
    assert done.code == 2
    assert "will not process 4 waiting records of a" in done.err
    assert "--yes" in done.err
    for answer, code, purged in (("n", 1, 0), ("y", 0, 4)):
        with Terminal([METEOR, "--url", url, *command]) as terminal:
            terminal.wait_for("Go on?")
            terminal.press(f"{answer}\n")
            assert terminal.wait() == code
        (found,) = succeed(url, "shared", "ls", "--json").objects
        assert found["purged"] == purged


def test_a_parked_and_a_delayed_group_go_on(url: str, sub: SharedSubscriber) -> None:
    for group, offset in (("a", 0), ("b", 1)):
        done = succeed(url, "shared", "resume", "carts", "billing", group)
        assert f"{group} goes on" in done.err
        again = succeed(url, "shared", "resume", "carts", "billing", group)
        assert "neither parked nor delayed" in again.err
        assert sub.poll(20)[0].offset == offset


def test_a_check_finds_contradictions(url: str, stream: Stream, sub: SharedSubscriber) -> None:
    assert "all is well" in succeed(url, "shared", "fsck", "carts", "billing").err
    stream.client.redis.hset("meteor:{carts}:shared:billing:state", "waiting", "99")
    done = meteor(url, "shared", "fsck", "carts", "billing")
    assert (done.code, done.lines) == (1, ["99 records are said to wait, and 10 do."])
    assert "1 contradiction" in done.err
    done = meteor(url, "shared", "fsck", "carts", "billing", "--json")
    assert done.objects[0]["flaw"] == "99 records are said to wait, and 10 do."
    stream.client.redis.hset("meteor:{carts}:shared:billing:state", "waiting", "10")


def test_books_that_cannot_be_read_are_said_in_a_sentence(url: str, stream: Stream) -> None:
    with stream.shared_subscriber("billing"):
        pass
    redis = stream.client.redis
    redis.hdel("meteor:{carts}:shared:billing:state", "group_cap")
    redis.hset("meteor:{carts}:shared:billing:consumers", "abc", "x")
    done = meteor(url, "shared", "fsck", "carts", "billing")
    assert done.code == 1
    assert "Consumer b'abc' has an entry that cannot be read: b'x'." in done.lines
    assert "The setting 'group_cap' is missing." in done.lines
    assert "4 contradictions" in done.err


def test_a_dead_consumer_counts_no_more(url: str, stream: Stream) -> None:
    sub = stream.shared_subscriber("billing", lease_ttl=0.2, max_poll_interval=0.1)
    try:
        assert sub.poll(20)
        eventually(lambda: stream.groups()[0].consumers == 0)  # it does not poll
        shown = succeed(url, "shared", "info", "carts", "billing").text
        assert f"{sub.name}     3       12   dead" in shown
        assert f"* {sub.name} is dead: whoever asks for records next" in shown
        assert succeed(url, "shared", "ls").lines[1].split()[2] == "0"
        succeed(url, "groups", "rm", "carts", "billing", "--yes")
    finally:
        sub.close()


def test_names_are_completed(url: str, sub: SharedSubscriber) -> None:
    sub.stream.seek_group("alone", 0)
    for words, found in (("shared info ", "carts"), ("shared info carts ", "billing")):
        typed = f"meteor {words}"
        env = {
            "_METEOR_COMPLETE": "bash_complete",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split())),
        }
        assert meteor(url, environ=env).lines == [f"plain,{found}"]


# -- why nothing is delivered --------------------------------------------------------------------


def described(**others: object) -> SharedDescription:
    counters = ("acked", "dead", "lost", "purged", "returned", "reaped", "dying", "ready")
    facts: dict[str, object] = dict.fromkeys((*counters, "blocked", "confirmed", "waiting"), 0)
    facts |= {"name": "billing", "config": SharedConfig(dead_letter="dead"), "lost_last": None}
    facts |= {"lag": 10, "looked": 10, "consumers": (Consumer("1", "x", 1, 1, 9.5),)} | others
    return SharedDescription(**facts)  # type: ignore[arg-type]


OWNED = KeyState(b"a", 3, 1, 2, "x", 0, "owned")
TWO = (Consumer("1", "x", 1, 1, 9.5), Consumer("2", "y", 0, 0, 9.5))
DEAD = Consumer("3", "z", 1, 1, -0.1)


@pytest.mark.parametrize(
    ("found", "groups", "sentence"),
    [
        (described(lag=0), [], "All records are settled: it waits for new ones."),
        (described(consumers=()), [], "There is no consumer, and 10 records are not settled."),
        (described(consumers=(DEAD,)), [], "There is no consumer, and 10 records are not"),
        (described(consumers=(*TWO, DEAD)), [], "z is dead: whoever asks for records next gets"),
        (described(waiting=WAITING_MAX), [], "1,000,000 records wait for their keys, and more"),
        (described(dying=1), [], "1 record was given up, and not yet published to stream 'dead'"),
        (described(consumers=TWO), [OWNED, OWNED], "All 2 keys are held by x."),
        (described(), [OWNED], "2 records wait for x, which has to settle what it holds"),
        (described(ready=2), [], "2 keys can be had at once"),
        (described(looked=9), [], "1 record has not been looked at yet"),
        (described(), [], "Nothing is in the way: x has 1 record to settle."),
        (described(consumers=TWO[1:]), [], "Nothing is in the way: 10 records are not settled."),
    ],
)
def test_the_reason_is_said_in_plain_words(
    found: SharedDescription, groups: list[KeyState], sentence: str
) -> None:
    told = reasons("carts", found, groups)
    assert any(reason.startswith(sentence) for reason in told), told


# -- other commands ------------------------------------------------------------------------------


def test_a_stream_is_created_with_groups_and_says_so(url: str) -> None:
    succeed(url, "streams", "create", "a", "--ordering-key", "header:cart")
    assert "group by     header:cart" in succeed(url, "streams", "info", "a").text
    succeed(url, "publish", "b", "x", "-k", "k", "--ordering-key", "key")
    (found,) = succeed(url, "streams", "info", "b", "--json").objects
    assert found["ordering_key"] == "key"
    done = meteor(url, "streams", "create", "c", "--ordering-key", "kex")
    assert done.code == 2
    assert "'kex' is neither key nor header:NAME" in done.err
    done = meteor(url, "streams", "create", "a", "--ordering-key", "key")
    assert done.code == 1
    assert "create another stream" in done.err


def test_groups_shows_the_kind_and_the_consumers(url: str, sub: SharedSubscriber) -> None:
    sub.stream.seek_group("alone", 3)
    alone, shared = (line.split() for line in succeed(url, "groups", "ls", "carts").lines[1:])
    assert alone[:-1] == ["carts", "alone", "3", "9", "exclusive", "-"]
    assert shared == ["carts", "billing", "0", "12", "shared", "1", "consumer", "-"]
    shown = succeed(url, "groups", "info", "carts", "billing").text
    assert "`meteor shared info carts billing`" in shown
    assert "billing" in succeed(url, "streams", "info", "carts").text


def test_a_shared_group_is_deleted_once_its_consumers_are_gone_or_by_force(
    url: str, stream: Stream, sub: SharedSubscriber
) -> None:
    done = meteor(url, "groups", "rm", "carts", "billing", "--yes")
    assert done.code == 1
    assert f"{sub.name} is one of its consumers" in done.err
    with stream.shared_subscriber("other"):
        pass
    succeed(url, "groups", "rm", "carts", "other", "--yes")
    succeed(url, "groups", "rm", "carts", "billing", "--yes", "--force")
    assert stream.groups() == []
    assert not [key for key in stream.client.redis.keys("*") if b":shared" in key]
    with pytest.raises(GroupNotFound):
        sub.poll(0)


def test_a_shared_group_is_neither_moved_nor_tailed(url: str, sub: SharedSubscriber) -> None:
    for arguments in (
        ["seek", "carts", "billing", "--to", "0", "--dry-run"],
        ["seek", "carts", "billing", "--to", "0"],
        ["tail", "carts", "-e", "-g", "billing"],
    ):
        done = meteor(url, *arguments)
        assert (done.code, done.out) == (1, b"")
        assert "is a shared one" in done.err
    with pytest.raises(GroupConfigMismatch):
        sub.stream.seek_group("billing", 0)
    assert [group.kind for group in sub.stream.groups()] == ["shared"]


def test_a_stream_whose_groups_have_ids_that_are_no_text_is_deleted_whole(
    url: str, stream: Stream
) -> None:
    with stream.shared_subscriber("billing", max_per_key=1) as sub:
        sub.poll()
        sub.keys(look_ahead=True)
        succeed(url, "streams", "rm", "carts", "--yes")
        assert stream.client.redis.keys("*carts*") == []


def test_top_and_watch_take_a_shared_group_for_what_it_is(
    url: str, stream: Stream, sub: SharedSubscriber
) -> None:
    with Running(url, "watch", "--json", "--interval", "0.1") as watching:
        assert "watching 1 stream" in watching.line("stderr")
        stream.configure(capacity=1)
        with stream.publisher() as pub:
            pub.publish_many([b"x"] * 20, keys=[b"c"] * 20).result()
        assert stream.bounds()[0] > 0, "records lie below the ring that are not settled"
        with stream.shared_subscriber("other"):
            assert '"group":"other","event":"group_begun"' in watching.line()
        changed = watching.line()
        assert '"event":"consumers_changed","consumers":0,"before":1' in changed
    shown = succeed(url, "top", "--once").lines
    (line,) = [line for line in shown if line.startswith("  billing")]
    assert line.endswith("1 consumer")
    assert "lost" not in line, "which of them were settled, nobody knows from outside"
    (other,) = [line for line in shown if line.startswith("  other")]
    assert other.endswith("nobody")


def test_long_names_are_cut_in_a_terminal_and_numbers_are_not(url: str) -> None:
    with connect(url) as m:
        stream = m.stream("shopping-carts-of-all-of-europe", ordering_key="key")
        with stream.publisher() as pub:
            pub.publish_many([b"x"] * 123, keys=[b"k" * 200] * 123).result()
        with stream.shared_subscriber("billing-and-invoicing-of-carts") as sub:
            assert sub.poll()
            command = ["shared", "info", stream.name, sub.group]
            with Terminal([METEOR, "--url", url, *command], rows=40) as terminal:
                assert terminal.wait() == 0
            (line,) = [line for line in terminal.lines if line.startswith("kkk")]
            assert line.split()[1:6] == ["123", "32", "91", "0", "owned"]
            with Terminal([METEOR, "--url", url, "shared", "ls"]) as terminal:
                assert terminal.wait() == 0
            assert terminal.lines[1].split()[2:] == ["1", "123", "91", "0", "0", "0", "0"]
            assert "k" * 200 in succeed(url, *command).text, "not in a pipe"
