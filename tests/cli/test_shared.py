"""``meteor shared``, and other commands that show shared groups, run as processes."""

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
from tests.support.commands import METEOR, RunningCommand, meteor, succeed
from tests.support.readers import everything
from tests.support.sharing import change_progress
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

#: An ordering key that is not valid text and is unsafe for a terminal, and how commands show it.
NASTY = b"\xff\x00\x1b[2J\\"
SHOWN = r"\xff\x00\x1b[2J\\"


@pytest.fixture
def stream(url: str) -> Iterator[Stream]:
    """Twelve records, for three carts in turn. One cart has a hostile id."""
    with connect(url) as m:
        stream = m.stream("carts", ordering_key="key")
        with stream.publisher() as pub:
            for number in range(12):
                pub.publish(b"%d" % number, key=(b"a", b"b", NASTY)[number % 3])
        yield stream


@pytest.fixture
def sub(stream: Stream) -> Iterator[SharedSubscriber]:
    """A consumer that holds two records of the hostile cart; cart a is parked, and b is delayed."""
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


def test_missing_shared_group_prints_a_hint(url: str, stream: Stream) -> None:
    done = succeed(url, "shared", "ls", "carts")
    assert (done.out, "there are no shared groups yet" in done.err) == (b"", True)
    connect(url).stream("plain", create=True)
    assert "--ordering-key key" in succeed(url, "shared", "ls", "plain").err
    for command in ("info", "fsck"):
        done = meteor(url, "shared", command, "carts", "nope")
        assert (done.code, done.out) == (1, b"")
        assert "has no shared group 'nope'. `meteor shared ls carts`" in done.err
        assert done.err.count("\n") == 1
    assert "There is no stream 'nope'" in meteor(url, "shared", "ls", "nope").err


def test_info_explains_why_records_wait(url: str, sub: SharedSubscriber) -> None:
    shown = succeed(url, "shared", "info", "carts", "billing").text
    assert "below 0 of 12, lag 12" in shown
    assert "after 5 failures, then park the key" in shown
    assert f"{sub.member}     1        2  " in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["a", "4", "0", "4", "0", "parked", "-"] in lines
    assert ["b", "4", "0", "4", "1", "delayed", "-"] in lines
    assert [SHOWN, "4", "2", "2", "2", "owned", sub.member] in lines
    assert "* 1 key is parked, with 4 records. Resume one with `meteor shared resume" in shown
    assert "* 1 key is delayed, with 4 records." in shown
    assert f"* 2 records wait until {sub.member}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_info_limits_the_number_of_keys(url: str, sub: SharedSubscriber) -> None:
    shown = succeed(url, "shared", "info", "carts", "billing", "-n", "1").lines
    assert "\u2026 and 2 more keys" in shown
    assert not any(line.startswith("b ") for line in shown)
    (found,) = succeed(url, "shared", "info", "carts", "billing", "-n", "1", "--json").objects
    assert [key["key"] for key in found["keys"]] == ["a"]
    assert found["keys_total"] == 3


def test_keys_in_json_are_exact(url: str, sub: SharedSubscriber) -> None:
    (found,) = succeed(url, "shared", "info", "carts", "billing", "--json").objects
    assert [key["key"] for key in found["keys"]] == ["a", "b", {"b64": "/wAbWzJKXA=="}]


@pytest.mark.parametrize("given", [[SHOWN], [NASTY.hex(), "--hex"]])
def test_key_can_be_passed_as_shown_or_in_hex(
    url: str, sub: SharedSubscriber, given: list[str]
) -> None:
    arguments = ["shared", "purge", "carts", "billing", *given]
    done = succeed(url, *arguments, "--dry-run")
    assert f"2 waiting records of {SHOWN} would be purged from" in done.err
    assert f"; 2 records stay with {sub.member}." in done.err
    done = succeed(url, *arguments, "--limit", "1", "--yes")
    assert f"1 record of {SHOWN}" in done.err
    assert "1 record of" in succeed(url, *arguments, "--yes").err
    done = succeed(url, *arguments, "--yes")
    assert (
        f"no records of {SHOWN} are waiting in shared group 'billing'; 2 records stay" in done.err
    )
    assert sub.fsck() == []


def test_purge_dry_run_changes_nothing_and_counts_unscanned_records(
    url: str, stream: Stream
) -> None:
    with stream.shared_subscriber("billing", prefetch=1) as sub:
        sub.poll(20)
        command = ["shared", "purge", "carts", "billing", "b", "--dry-run"]
        before = everything(stream.client.redis)
        done = succeed(url, *command)
        assert "4 waiting records of b would be purged from shared group 'billing'" in done.err
        assert everything(stream.client.redis).keys() == before.keys()
        assert sub._shared.describe().scanned == 1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["\\q"], r"write a backslash as \\"),
        (["zz", "--hex"], "not hexadecimal"),
        ([""], "1 to 256 bytes, not 0"),
        (["x" * 257], "1 to 256 bytes, not 257"),
    ],
)
def test_invalid_key_is_refused(url: str, stream: Stream, given: list[str], why: str) -> None:
    done = meteor(url, "shared", "purge", "carts", "billing", *given)
    assert done.code == 2
    assert why in done.err


@pytest.mark.parametrize("group", [b"cart-7", NASTY, "\u202eé".encode(), b"\xc3", b"a\nb"])
def test_displayed_key_is_harmless_and_can_be_parsed_back(group: bytes) -> None:
    assert parse_key(show_key(group)) == group
    assert show_key(group).isprintable()


def test_purge_needs_confirmation(url: str, sub: SharedSubscriber) -> None:
    command = ["shared", "purge", "carts", "billing", "a"]
    done = meteor(url, *command)
    assert done.code == 2
    assert "4 waiting records of a will be purged" in done.err
    assert "--yes" in done.err
    for answer, code, purged in (("n", 1, 0), ("y", 0, 4)):
        with Terminal([METEOR, "--url", url, *command]) as terminal:
            terminal.wait_for("Continue?")
            terminal.press(f"{answer}\n")
            assert terminal.wait() == code
        (found,) = succeed(url, "shared", "ls", "--json").objects
        assert found["purged"] == purged


def test_resume_releases_parked_and_delayed_keys(url: str, sub: SharedSubscriber) -> None:
    for group, offset in (("a", 0), ("b", 1)):
        done = succeed(url, "shared", "resume", "carts", "billing", group)
        assert f"{group} resumed" in done.err
        again = succeed(url, "shared", "resume", "carts", "billing", group)
        assert "neither parked nor delayed" in again.err
        assert sub.poll(20)[0].offset == offset


def test_fsck_finds_contradictions(url: str, stream: Stream, sub: SharedSubscriber) -> None:
    assert "no contradictions" in succeed(url, "shared", "fsck", "carts", "billing").err
    before = sub._shared.describe().waiting
    change_progress(stream.client._connector, sub._shared._protocol, waiting="x99")
    done = meteor(url, "shared", "fsck", "carts", "billing")
    assert (done.code, done.lines) == (
        1,
        [f"The group counts 99 waiting records, but {before} are waiting."],
    )
    assert "1 contradiction" in done.err
    done = meteor(url, "shared", "fsck", "carts", "billing", "--json")
    assert (
        done.objects[0]["flaw"] == f"The group counts 99 waiting records, but {before} are waiting."
    )
    change_progress(stream.client._connector, sub._shared._protocol, waiting=f"x{before}")


def test_fsck_reports_unreadable_state(url: str, stream: Stream) -> None:
    with stream.shared_subscriber("billing"):
        pass
    redis = stream.client.redis
    redis.hdel("meteor:{carts}:shared:billing:meta", "group_cap")
    redis.hset("meteor:{carts}:shared:billing:members", "abc", "x")
    done = meteor(url, "shared", "fsck", "carts", "billing")
    assert done.code == 1
    assert "The entry of consumer b'abc' cannot be read: It has only 1 bytes." in done.lines
    assert "The setting 'group_cap' is missing." in done.lines
    assert "3 contradictions" in done.err


def test_dead_consumer_is_not_counted(url: str, stream: Stream) -> None:
    sub = stream.shared_subscriber("billing", lease_ttl=0.2, max_poll_interval=0.1)
    try:
        assert sub.poll(20)
        eventually(lambda: stream.groups()[0].consumers == 0)  # without polls, the lease expires
        shown = succeed(url, "shared", "info", "carts", "billing").text
        assert f"{sub.member}     3       12   dead" in shown
        assert f"* {sub.member} is dead. Other consumers get its records" in shown
        assert succeed(url, "shared", "ls").lines[1].split()[2] == "0"
        succeed(url, "groups", "rm", "carts", "billing", "--yes")
    finally:
        sub.close()


def test_completion_offers_only_shared_groups(url: str, sub: SharedSubscriber) -> None:
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
    counters = (
        "acked",
        "dead",
        "lost",
        "purged",
        "returned",
        "reaped",
        "dead_letters_pending",
        "ready",
    )
    facts: dict[str, object] = dict.fromkeys((*counters, "blocked", "confirmed", "waiting"), 0)
    facts |= {"name": "billing", "config": SharedConfig(dead_letter="dead"), "lost_last": None}
    facts |= {"lag": 10, "scanned": 10, "consumers": (Consumer("1", "x", 1, 1, 9.5),)} | others
    return SharedDescription(**facts)  # type: ignore[arg-type]


OWNED = KeyState(b"a", 3, 1, 2, "x", 0, "owned")
TWO = (Consumer("1", "x", 1, 1, 9.5), Consumer("2", "y", 0, 0, 9.5))
DEAD = Consumer("3", "z", 1, 1, -0.1)


@pytest.mark.parametrize(
    ("found", "groups", "sentence"),
    [
        (described(lag=0), [], "All records are settled. The group is waiting for new ones."),
        (
            described(consumers=()),
            [],
            "There are no live consumers, and 10 records are not settled.",
        ),
        (described(consumers=(DEAD,)), [], "There are no live consumers, and 10 records are not"),
        (described(consumers=(*TWO, DEAD)), [], "z is dead. Other consumers get its records"),
        (described(waiting=WAITING_MAX), [], "1,000,000 records are waiting for their keys, which"),
        (
            described(dead_letters_pending=1),
            [],
            "1 record is waiting to be published to the dead-letter stream",
        ),
        (described(consumers=TWO), [OWNED, OWNED], "x holds all 2 keys."),
        (described(), [OWNED], "2 records wait until x settles earlier records"),
        (described(ready=2), [], "2 keys are ready for the next consumer"),
        (described(scanned=9), [], "1 record is not scanned yet"),
        (described(), [], "Nothing is blocked: x has 1 record to settle."),
        (described(consumers=TWO[1:]), [], "Nothing is blocked: 10 records are not settled."),
    ],
)
def test_reason_why_records_wait_is_explained(
    found: SharedDescription, groups: list[KeyState], sentence: str
) -> None:
    told = reasons("carts", found, groups)
    assert any(reason.startswith(sentence) for reason in told), told


# -- other commands ------------------------------------------------------------------------------


def test_ordering_key_can_be_added_to_an_existing_stream(url: str) -> None:
    succeed(url, "publish", "plain", "early", "-k", "A")
    done = meteor(url, "streams", "create", "plain", "--ordering-key", "key")
    assert done.code == 1
    assert "`meteor streams configure plain`" in done.err
    done = succeed(url, "streams", "configure", "plain", "--ordering-key", "key")
    assert "ordering_key from None to key" in done.err
    with connect(url) as m, m.stream("plain").shared_subscriber("g") as sub:
        assert [record.ordering_key for record in sub.poll(5)] == [b"A"]
    done = meteor(url, "streams", "configure", "plain", "--ordering-key", "header:cart")
    assert done.code == 1
    assert "exists with ordering_key='key', not 'header:cart'" in done.err


def test_stream_can_be_created_with_an_ordering_key(url: str) -> None:
    succeed(url, "streams", "create", "a", "--ordering-key", "header:cart")
    assert "ordering key  header:cart" in succeed(url, "streams", "info", "a").text
    succeed(url, "publish", "b", "x", "-k", "k", "--ordering-key", "key")
    (found,) = succeed(url, "streams", "info", "b", "--json").objects
    assert found["ordering_key"] == "key"
    done = meteor(url, "streams", "create", "c", "--ordering-key", "kex")
    assert done.code == 2
    assert "'kex' is neither 'key' nor 'header:NAME'" in done.err
    done = meteor(url, "streams", "create", "a", "--ordering-key", "key")
    assert done.code == 1
    assert "create another stream" in done.err


def test_groups_command_shows_the_kind_and_the_consumers(url: str, sub: SharedSubscriber) -> None:
    sub.stream.seek_group("alone", 3)
    alone, shared = (line.split() for line in succeed(url, "groups", "ls", "carts").lines[1:])
    assert alone == ["carts", "alone", "3", "9", "exclusive", "-"]
    assert shared == ["carts", "billing", "0", "12", "shared", "1", "consumer"]
    shown = succeed(url, "groups", "info", "carts", "billing").text
    assert "`meteor shared info carts billing`" in shown
    assert "billing" in succeed(url, "streams", "info", "carts").text


def test_deleting_a_shared_group_with_consumers_needs_force(
    url: str, stream: Stream, sub: SharedSubscriber
) -> None:
    done = meteor(url, "groups", "rm", "carts", "billing", "--yes")
    assert done.code == 1
    assert f"{sub.member} consumes from it" in done.err
    with stream.shared_subscriber("other"):
        pass
    succeed(url, "groups", "rm", "carts", "other", "--yes")
    succeed(url, "groups", "rm", "carts", "billing", "--yes", "--force")
    assert stream.groups() == []
    assert not [key for key in stream.client.redis.keys("*") if b":shared" in key]
    with pytest.raises(GroupNotFound):
        sub.poll(0)


def test_shared_group_cannot_be_moved_or_tailed(url: str, sub: SharedSubscriber) -> None:
    for arguments in (
        ["seek", "carts", "billing", "--to", "0", "--dry-run"],
        ["seek", "carts", "billing", "--to", "0"],
        ["tail", "carts", "-e", "-g", "billing"],
    ):
        done = meteor(url, *arguments)
        assert (done.code, done.out) == (1, b"")
        assert "is a shared " in done.err
    with pytest.raises(GroupConfigMismatch):
        sub.stream.seek_group("billing", 0)
    assert [group.kind for group in sub.stream.groups()] == ["shared"]


def test_deleting_a_stream_deletes_binary_ordering_keys(url: str, stream: Stream) -> None:
    with stream.shared_subscriber("billing", max_per_key=1) as sub:
        sub.poll()
        sub.keys(look_ahead=True)
        succeed(url, "streams", "rm", "carts", "--yes")
        assert stream.client.redis.keys("*carts*") == []


def test_top_and_watch_show_shared_groups(url: str, stream: Stream, sub: SharedSubscriber) -> None:
    with RunningCommand(url, "watch", "--json", "--interval", "0.1") as watching:
        assert "watching 1 stream" in watching.line("stderr")
        stream.configure(capacity=1)
        with stream.publisher() as pub:
            pub.publish_many([b"x"] * 20, keys=[b"c"] * 20).result()
        assert stream.bounds()[0] > 0, "the ring dropped no unsettled record"
        with stream.shared_subscriber("other"):
            assert '"group":"other","event":"group_created"' in watching.line()
        changed = watching.line()
        assert '"event":"consumers_changed","consumers":0,"before":1' in changed
    shown = succeed(url, "top", "--once").lines
    (line,) = [line for line in shown if line.startswith("  billing")]
    assert line.endswith("1 consumer")
    assert "lost" not in line  # observers cannot know which of the dropped records were settled
    (other,) = [line for line in shown if line.startswith("  other")]
    assert other.endswith("none")


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
            assert "k" * 200 in succeed(url, *command).text, "a name was cut in a pipe"
