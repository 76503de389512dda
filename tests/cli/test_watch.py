"""``meteor watch`` reports the changes between two snapshots of a server."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

import meteor_py as meteor
from meteor_cli.live import snapshot
from meteor_cli.live.changes import Change, changes
from meteor_cli.live.snapshot import Observer, Snapshot, StreamSnapshot, rates_between
from meteor_cli.live.watch import to_json, to_text
from meteor_py.redis import keys
from tests.conftest import ServerFactory
from tests.support.archivers import LONG_S, StoredStream
from tests.support.commands import RunningCommand
from tests.support.group_members import GroupHarness
from tests.support.proxied_stream import NAME, ReplicatedStream
from tests.support.readers import fill
from tests.support.snapshots import group, look, seen
from tests.support.waiting import eventually

HOSTILE = "evil\x1b[2J\u202egnp.exe\n"


def reported(
    before: Snapshot | None, after: Snapshot, lag_max: int | None = None
) -> list[tuple[str, str]]:
    return [(each.event, each.text) for each in changes(before, after, lag_max)]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, seen(next=7), [("created", "created")]),
        (seen(), None, [("deleted", "deleted")]),
        (seen(), seen(next=900, length=900), []),
        (
            seen(groups=(group(),)),
            seen(incarnation="j", next=0),
            [("recreated", "deleted and recreated")],
        ),
        (
            seen(),
            seen(next=6),
            [("log_truncated", "the server lost records 6 to 9")],
        ),
        (
            seen(),
            seen(epoch=2, epoch_first=10, next=30),
            [
                (
                    "epoch_changed",
                    "the server was restarted or failed over, or the stream's slot moved",
                )
            ],
        ),
        (
            seen(),
            seen(epoch=2, epoch_first=8, next=30),
            [
                (
                    "epoch_changed",
                    "the server was restarted or failed over, or the stream's slot moved",
                ),
                ("log_truncated", "the server lost records 8 to 9"),
            ],
        ),
        (seen(archived=5), seen(archived=5, archiver="a"), [("archiver_taken", "archived by a")]),
        (
            seen(archived=5, archiver="a"),
            seen(archived=5, archiver="b"),
            [("archiver_taken", "archived by b instead of a")],
        ),
        (
            seen(archived=5, archiver="a"),
            seen(archived=10),
            [("archiver_ended", "no longer archived by a")],
        ),
        (
            seen(archived=5, archiver="a"),
            seen(archived=9),
            [("archiver_missing", "no archiver, 1 record waiting; a stopped")],
        ),
        (
            seen(archived=10),
            seen(archived=10, next=15),
            [("archiver_missing", "no archiver, 5 records waiting")],
        ),
        (seen(archived=5), seen(archived=5, next=15), []),
    ],
)
def test_changes_to_a_stream_are_reported(
    before: StreamSnapshot | None, after: StreamSnapshot | None, expected: list[tuple[str, str]]
) -> None:
    one, two = (look(*([each] if each else [])) for each in (before, after))
    assert reported(one, two) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, group(confirmed=4), [("group_created", "created at 4")]),
        (
            None,
            group(owner="x"),
            [("group_created", "created at 0"), ("lease_taken", "lease taken by x")],
        ),
        (group(), None, [("group_deleted", "deleted")]),
        (group(), group(confirmed=9), []),
        (group(confirmed=9), group(confirmed=2), [("group_moved_back", "moved back from 9 to 2")]),
        (group(), group(owner="x", term=2), [("lease_taken", "lease taken by x")]),
        (group(owner="x"), group(), [("lease_ended", "x no longer holds the lease")]),
        (
            group(owner="x"),
            group(owner="y", term=2),
            [("lease_taken_over", "lease taken over from x by y")],
        ),
        (
            group(owner="x"),
            group(owner="x", term=2),
            [("lease_taken", "lease lost and taken again by x")],
        ),
        (group(term=1), group(term=5), []),
    ],
)
def test_changes_to_a_group_are_reported(before: Any, after: Any, expected: Any) -> None:
    one, two = (look(seen(groups=(each,) if each else ())) for each in (before, after))
    assert reported(one, two) == expected


def test_lag_is_reported_when_it_crosses_the_limit() -> None:
    looks = [look(seen(groups=(group(lag=lag),))) for lag in (5, 6, 9, 5, 6)]
    found = [reported(one, two, 5) for one, two in pairwise(looks)]
    assert found == [
        [("lag_high", "lag is 6, above 5")],
        [],
        [("lag_normal", "lag is 5, no longer above 5")],
        [("lag_high", "lag is 6, above 5")],
    ]
    assert reported(looks[0], looks[1]) == []


def test_records_dropped_before_they_are_confirmed_are_reported_once() -> None:
    looks = [look(seen(first=first, groups=(group(confirmed=3),))) for first in (3, 5, 8)]
    assert reported(looks[0], looks[1]) == [
        ("records_dropped", "records 3 to 4 were dropped before they were confirmed")
    ]
    assert reported(looks[1], looks[2]) == []


def test_first_snapshot_reports_only_problems() -> None:
    troubled = seen(first=2, archived=4, groups=(group(lag=10), group("h", 10)))
    fine = seen("fine", groups=(group(confirmed=10, owner="x"),))
    events = [each.event for each in changes(None, look(fine, troubled), 5)]
    assert events == ["archiver_missing", "records_dropped", "lag_high"]


def test_unreadable_stream_is_not_reported_as_deleted() -> None:
    there, hidden = look(seen()), look(unreadable={"s": "no"})
    assert reported(there, hidden) == [("unreadable", "cannot be read: no")]
    assert reported(hidden, hidden) == []
    assert reported(hidden, there) == [("readable", "can be read again")]
    assert reported(hidden, look()) == [("deleted", "deleted")]


def test_change_is_sanitized_as_text_and_json() -> None:
    at = datetime.fromisoformat("2026-11-16T14:30:00.123+01:00")
    facts: dict[str, int | str | None] = {"owner": HOSTILE, "term": 7}
    change = Change("s", "g", "lease_taken", f"lease taken by {HOSTILE}", facts)
    line = to_text(change, at)
    assert line == (r"2026-11-16T14:30:00+01:00 s/g: lease taken by evil\x1b[2J\u202egnp.exe\n")
    text = to_json(change, at)
    assert text.isascii()
    assert "\x1b" not in text
    assert msgspec.json.decode(text) == {
        "time": "2026-11-16T14:30:00.123+01:00", "stream": "s", "group": "g",
        "event": "lease_taken", "owner": HOSTILE, "term": 7,
    }  # fmt: skip


# Rates


def test_rates_are_computed_from_two_snapshots() -> None:
    before = seen(at=1.0, archived=0, groups=(group(), group("back", 9)))
    after = seen(
        at=3.0, next=30, archived=8, groups=(group(confirmed=5), group("back", 2), group("new"))
    )
    rates = rates_between(before, after)
    assert (rates.published, rates.archived, rates.confirmed) == (10.0, 4.0, {"g": 2.5})


@pytest.mark.parametrize("other", [{"incarnation": "j"}, {"epoch": 2}, {"at": 0.0}])
def test_incomparable_snapshots_have_no_rate(other: dict[str, Any]) -> None:
    after = seen(**({"at": 1.0, "next": 20} | other))
    assert rates_between(seen(), after).published is None
    assert rates_between(None, after).published is None


# Snapshots of a server


def test_snapshot_follows_recreated_streams(url: str) -> None:
    with meteor.connect(url) as m:
        first = m.stream("a", create=True)
        m.stream("b", create=True)
        observer = Observer(m)
        assert list(observer.snapshot().streams) == ["a", "b"]
        first.delete()
        assert list(observer.snapshot().streams) == ["b"]
        m.stream("b", create=True).delete()
        recreated = m.stream("b", create=True)
        assert observer.snapshot().streams["b"].stream.incarnation == recreated.incarnation


def test_damaged_stream_does_not_hide_other_streams(url: str) -> None:
    with meteor.connect(url) as m:
        m.stream("a", create=True)
        m.redis.hset(keys.meta("b"), "next", "many")
        m.redis.hset(keys.meta("\x1b[2J"), "next", "1")
        m.redis.sadd(keys.STREAMS, "b", "\x1b[2J")
        found = Observer(m).snapshot()
        assert (list(found.streams), sorted(found.unreadable)) == (["a"], ["\x1b[2J", "b"])
        with pytest.raises(meteor.CorruptStream):
            Observer(m, ("b",)).snapshot()


def test_snapshot_is_bounded_and_keeps_known_streams(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "STREAMS_MAX", 3)
    with meteor.connect(url) as m:
        for name in "bcdef":
            m.stream(name, create=True)
        observer = Observer(m)
        found = observer.snapshot()
        assert (list(found.streams), found.left_off) == (["b", "c", "d"], 2)
        m.stream("a", create=True)
        assert changes(found, observer.snapshot()) == []


# The command


class Watch(RunningCommand):
    """The running command, after its first snapshot."""

    def __init__(self, url: str, *arguments: str) -> None:
        super().__init__(url, "watch", "--interval", "0.1", *arguments)
        self.greeting = self.line("stderr")

    def event(self, name: str) -> dict[str, Any]:
        """Return the next event, which must have this name."""
        found: dict[str, Any] = msgspec.json.decode(self.line())
        assert found["event"] == name, found
        return found


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


def test_watch_reports_stream_and_group_events(url: str, client: meteor.Client) -> None:
    with Watch(url, "--json", "--lag", "20") as watch:
        assert watch.greeting == "meteor: watching 0 streams."
        stream = client.stream("orders", capacity=10)
        created = watch.event("created")
        assert datetime.fromisoformat(created.pop("time")).tzinfo is not None
        assert created == {"stream": "orders", "group": None, "event": "created", "next": 0}
        with stream.subscriber(group="billing", lease_ttl=LONG_S) as sub:
            sub.poll(0)
            assert watch.event("group_created")["group"] == "billing"
            assert watch.event("lease_taken")["owner"] == sub.member
            fill(stream, 5)
            sub.poll(10)
            assert sub.confirm().result(20) == 5
        assert watch.event("lease_ended")["before"] == sub.member
        fill(stream, *[10] * 3)
        found = [msgspec.json.decode(watch.line()) for _ in range(2)]
        assert {each["event"] for each in found} == {"records_dropped", "lag_high"}
        stream.seek_group("billing", "latest")
        assert watch.event("lag_normal")["lag"] == 0
        stream.seek_group("billing", 30)
        assert watch.event("group_moved_back")["confirmed"] == 30
        stream.delete_group("billing")
        watch.event("group_deleted")
        stream.delete()
        watch.event("deleted")
        done = watch.end(signal.SIGINT)
        assert (done.code, done.out) == (130, b"")


def test_watch_reports_the_old_and_the_new_owner_of_a_lease(harness: GroupHarness) -> None:
    harness.fill(3)
    with Watch(harness.url) as watch:
        first = harness.member(lease_ttl=0.5)
        assert first.poll() == [0, 1, 2]
        assert re.fullmatch(r"\S+ orders/billing: created at 0", watch.line())
        assert watch.line().endswith(f"orders/billing: lease taken by {first.name}")
        first.kill()
        second = harness.member(lease_ttl=LONG_S)
        assert second.poll(20) == [0, 1, 2]
        line = watch.line()
        # A snapshot may be taken between the two leases.
        if line.endswith(f"{first.name} no longer holds the lease"):
            assert watch.line().endswith(f"lease taken by {second.name}")
        else:
            assert line.endswith(f"lease taken over from {first.name} by {second.name}")


def test_watch_reports_a_forced_seek(url: str, client: meteor.Client) -> None:
    stream = client.stream("orders", create=True)
    fill(stream, 10)
    with stream.subscriber(group="g", lease_ttl=LONG_S) as sub:
        sub.poll(0)
        assert sub.confirm().result(20) == 10
        with Watch(url, "orders", "--json") as watch:
            stream.seek_group("g", 3, force=True)
            assert watch.event("group_moved_back")["before"] == 10
            watch.event("lease_ended")
            eventually(lambda: sub.poll(0.1).first_offset == 3)
            assert watch.event("lease_taken")["owner"] == sub.member


def test_watch_reports_a_missing_archiver(url: str, tmp_path: Path) -> None:
    with StoredStream(url, tmp_path / "store") as stored:
        stored.fill(50)
        with Watch(url, "--json") as watch:
            assert watch.event("archiver_missing")["unarchived"] == 50
            with stored.archiver():
                stored.wait_archived(50)
                assert watch.event("archiver_taken")["owner"] == stored.owner
            assert watch.event("archiver_ended")["before"]
            stored.fill(7)
            assert watch.event("archiver_missing")["unarchived"] == 7


def test_watch_reports_records_lost_in_a_failover(replicated: ReplicatedStream) -> None:
    proxied = replicated.proxied
    publisher = proxied.warm_publisher()
    replicated.lag()
    publisher.publish_many([b"lost"] * 4).result(20)
    with Watch(proxied.proxy.url, "--json") as watch:
        replicated.fail_over()
        fill(proxied.stream, 1)  # the new publisher detects the failover
        found: list[dict[str, Any]] = []
        while not found or found[-1]["event"] != "epoch_changed":
            found.append(msgspec.json.decode(watch.line()))
        if "log_truncated" not in [each["event"] for each in found]:
            found.append(watch.event("log_truncated"))
        lost = next(each for each in found if each["event"] == "log_truncated")
        assert (lost["stream"], lost["first"], lost["last"]) == (NAME, 1, 4)


def test_watch_reports_a_server_restart(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with meteor.connect(server.url) as m:
        m.stream("orders", create=True)
        with Watch(server.url, "--json") as watch:
            server.kill()
            gone = watch.event("server_gone")
            assert (gone["stream"], gone["group"]) == (None, None)
            assert server.url in gone["reason"]
            server.restart()
            watch.event("server_back")
            m.stream("trades", create=True)
            assert watch.event("created")["stream"] == "trades"


def test_watch_waits_for_a_stream_that_does_not_exist(url: str, client: meteor.Client) -> None:
    with Watch(url, "orders") as watch:
        assert watch.line("stderr").endswith("there is no stream 'orders' yet; waiting for it.")
        client.stream("other", create=True)
        client.stream("orders", create=True)
        assert watch.line().endswith(" orders: created")


def test_watch_prints_hostile_names_as_escapes(harness: GroupHarness) -> None:
    harness.subscriber().close()
    with Watch(harness.url) as watch:
        harness.take_away("evil\x1b[2J\u202e")
        assert watch.line().endswith(r"lease taken by evil\x1b[2J\u202e")


def test_closed_pipe_ends_watch_quietly(url: str) -> None:
    with Watch(url) as watch:
        assert watch.process.stdout is not None
        watch.process.stdout.close()
        assert watch.process.wait(60) == 0
        watch.process.stdout = None
        assert watch.process.communicate()[1] == b""


def test_watch_without_a_server_fails() -> None:
    with RunningCommand("redis://127.0.0.1:1", "watch") as command:
        done = command.end()
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert "cannot be reached" in done.err


def test_key_from_another_program_does_not_end_watch(url: str, client: meteor.Client) -> None:
    client.stream("orders", create=True)
    with RunningCommand(url, "watch", "--interval", "0.1", "--json") as watching:
        assert watching.line("stderr") == "meteor: watching 1 stream."
        client.stream("orders", create=False).delete()
        assert '"deleted"' in watching.line()
        client.redis.set(keys.meta("alien"), "of another program")
        client.redis.sadd(keys.STREAMS, "alien", b"\xff")
        assert '"unreadable"' in watching.line()
        client.stream("orders", create=True)
        assert '"created"' in watching.line()
        assert watching.end(signal.SIGTERM).code == 143
