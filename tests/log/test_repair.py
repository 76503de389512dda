"""``stream.repair()`` removes log entries that no publisher wrote.

A foreign entry beyond the end blocks publishing, even after it is deleted. A repair keeps every
frame with its offset, while publishers and subscribers stay open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import REPAIR_LOG, Script
from tests.conftest import ServerFactory
from tests.support.readers import blocked
from tests.support.waiting import eventually

LOG = keys.log("s")


@pytest.fixture
def client(any_url: str) -> Iterator[meteor.Client]:
    with meteor.connect(any_url) as m:
        yield m


@pytest.fixture
def plain(client: meteor.Client) -> Any:
    return client.redis


@pytest.fixture
def stream(client: meteor.Client) -> meteor.Stream:
    """Ten records in five frames."""
    stream = client.stream("s", checksum=True)
    publish(stream, 10)
    return stream


def publish(stream: meteor.Stream, count: int) -> None:
    with stream.publisher() as pub:
        for n in range(0, count, 2):
            pub.publish_many([b"%d" % n, b"%d" % (n + 1)]).result(5)


def values(stream: meteor.Stream) -> list[bytes]:
    return [value for batch in stream.read() for value in batch.values()]


TEN = [b"%d" % n for n in range(10)]


def test_healthy_stream_is_left_unchanged(stream: meteor.Stream, plain: Any) -> None:
    before = plain.xinfo_stream(LOG)
    for dry_run in (True, False):
        report = stream.repair(dry_run=dry_run)
        assert report == meteor.RepairReport("s", 5, 0, (), blocked=False, repaired=False)
        assert report.healthy
    assert plain.xinfo_stream(LOG) == before
    assert stream.client.stream("empty", create=True).repair(dry_run=False).healthy


def test_publishing_continues_after_an_entry_beyond_the_end_is_removed(
    stream: meteor.Stream, plain: Any
) -> None:
    with stream.publisher() as pub:
        foreign = plain.xadd(LOG, {"user": "1"}).decode()
        with pytest.raises(meteor.CorruptStream, match="repair"):
            pub.publish(b"x").result(5)
        report = stream.repair()
        assert (report.foreign, report.entries, report.blocked) == (1, (foreign,), True)
        assert not report.repaired
        with pytest.raises(meteor.CorruptStream):  # a dry run has changed nothing
            pub.publish(b"x").result(5)
        assert stream.repair(dry_run=False).repaired
        assert pub.publish(b"x").result(5) == 10
    assert values(stream) == [*TEN, b"x"]
    assert stream.repair().healthy


def test_repair_unblocks_publishing_after_a_foreign_entry_was_deleted_by_hand(
    stream: meteor.Stream, plain: Any
) -> None:
    plain.xdel(LOG, plain.xadd(LOG, {"user": "1"}))
    with stream.publisher() as pub, pytest.raises(meteor.CorruptStream):
        pub.publish(b"x").result(5)
    report = stream.repair(dry_run=False)
    assert (report.foreign, report.blocked, report.repaired) == (0, True, True)
    publish(stream, 2)
    assert stream.end().offset == 12


def test_foreign_entries_between_frames_are_removed(stream: meteor.Stream, plain: Any) -> None:
    strange: list[dict[Any, Any]] = [
        *({"user": "1"}, {"t": "soon", "0v": "x"}, {"t": "1", "Format": "x"}),
        *({"t": "1", "0v": "x", "crc": "?"}, {"t": "1", "0v": "x", "sum": "1"}, {"t": "1"}),
    ]
    for n, fields in enumerate(strange):
        plain.xadd(LOG, fields, id=f"9-{3 + n}")
    plain.xadd(LOG, {"t": "1", "0v": "x"}, id="9-99")  # claims more records than the log has
    publish(stream, 2)
    report = stream.repair(dry_run=False)
    assert (report.frames, report.foreign, report.blocked) == (6, 7, False)
    assert values(stream) == [*TEN, b"0", b"1"]


def test_log_with_only_foreign_entries_becomes_empty(client: meteor.Client, plain: Any) -> None:
    stream = client.stream("s", create=True)
    for _ in range(1_200):
        plain.xadd(LOG, {"user": "1"})
    report = stream.repair(dry_run=False)
    assert (report.frames, report.foreign, len(report.entries)) == (0, 1_200, 100)
    publish(stream, 10)
    assert values(stream) == TEN


def test_ordering_key_index_is_repaired_with_the_log(client: meteor.Client, plain: Any) -> None:
    stream = client.stream("s", ordering_key="key")
    publish(stream, 10)
    plain.xadd(keys.index("s"), {"user": "1"})
    with stream.publisher() as pub, pytest.raises(meteor.MeteorError):
        pub.publish(b"x").result(5)  # the frame is in the log anyway, beyond the end
    report = stream.repair(dry_run=False)
    assert (report.frames, report.foreign, report.blocked) == (5, 2, True)
    publish(stream, 2)
    with stream.shared_subscriber("g") as shared:
        got: list[bytes] = []
        while len(got) < 12:
            for record in shared.poll(5):
                got.append(record.value)
                record.ack()
    assert got == [*TEN, b"0", b"1"]
    assert stream.repair().healthy


def test_repairing_many_frames_takes_many_steps_and_leaves_no_copy(
    client: meteor.Client, plain: Any
) -> None:
    stream = client.stream("s", create=True)
    with stream.publisher() as pub:
        for _ in range(1_300):
            pub.publish(b"x").result(5)
        for _ in range(3):
            pub.publish(b"y" * 900_000).result(5)
    plain.xadd(LOG, {"user": "1"})
    assert stream.repair(dry_run=False).frames == 1_303
    assert plain.keys("meteor:{s}:repair:*") == []
    assert plain.pttl(LOG) == -1
    assert stream.bounds() == (0, 1_303)
    publish(stream, 2)
    assert len(values(stream)) == 1_305


def test_open_subscribers_continue_across_a_repair(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", create=True)
        publish(stream, 10)
        with stream.subscriber(group="g") as sub:
            assert sub.poll(5).values() == TEN
            m.redis.xadd(LOG, {"user": "1"})
            with pytest.raises(meteor.CorruptStream, match="repair"):
                eventually(lambda: sub.poll(timeout=0.1), 5, "the entry was not seen")
            stream.repair(dry_run=False)
            publish(stream, 2)
            assert sub.poll(5).values() == [b"0", b"1"]


def test_subscriber_that_waits_during_a_repair_gets_the_next_record(url: str) -> None:
    with meteor.connect(url) as m:
        stream, got = m.stream("s", create=True), list[Any]()
        publish(stream, 10)
        m.redis.xdel(LOG, m.redis.xadd(LOG, {"user": "1"}))
        with stream.subscriber() as sub:
            thread = threading.Thread(target=lambda: got.extend(sub.poll(20).values()))
            thread.start()
            try:
                blocked(m.redis)
                stream.repair(dry_run=False)
                publish(stream, 2)
            finally:
                thread.join(20)
        assert got[:1] == [b"0"]


def test_repair_that_is_interrupted_at_any_step_changes_nothing(
    client: meteor.Client, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = client.stream("s", create=True)
    with stream.publisher() as pub:
        for _ in range(1_100):
            pub.publish(b"x").result(5)
    plain.xadd(LOG, {"user": "1"})
    run, steps, dies_at = Connection.run, 0, 0

    def interrupted(self: Connection, script: Script, *args: Any) -> Any:
        nonlocal steps
        if script is REPAIR_LOG and args[1][3] != "":
            steps += 1
            if steps == dies_at:
                raise KeyboardInterrupt
        return run(self, script, *args)

    monkeypatch.setattr(Connection, "run", interrupted)
    for step in (1, 2, 3):
        steps, dies_at = 0, step
        with pytest.raises(KeyboardInterrupt):
            stream.repair(dry_run=False)
        assert plain.xlen(LOG) == 1_101
        assert plain.keys("meteor:{s}:repair:*") == []
    dies_at = 0
    assert stream.repair(dry_run=False).repaired
    assert stream.bounds() == (0, 1_100)


def test_copy_left_by_a_killed_repair_expires(stream: meteor.Stream, plain: Any) -> None:
    publish(stream, 2_000)
    copy = keys.repair("s", "1")
    args = [stream.incarnation, "log", "0-0", "0", "3600000"]
    reply = stream._handle.connector.run(REPAIR_LOG, [LOG, keys.meta("s"), copy], args)
    assert reply[0] == b"MORE"
    assert 3_590_000 < plain.pttl(copy) <= 3_600_000
    plain.delete(copy)  # as if an hour had passed
    args = [stream.incarnation, "log", reply[1], str(reply[2]), "3600000"]
    gone = stream._handle.connector.run(REPAIR_LOG, [LOG, keys.meta("s"), copy], args)
    assert gone == [b"GONE"]
    assert plain.xlen(LOG) == 1_005


def test_repair_on_a_full_server_changes_nothing(private_server: ServerFactory) -> None:
    server = private_server("--maxmemory-policy", "noeviction")
    with meteor.connect(server.url) as m:
        stream = m.stream("s", create=True)
        publish(stream, 10)
        m.redis.xadd(LOG, {"user": "1"})
        m.redis.config_set("maxmemory", 1)
        with pytest.raises(meteor.OutOfMemory):
            stream.repair(dry_run=False)
        assert m.redis.xlen(LOG) == 6
        m.redis.config_set("maxmemory", 0)
        assert stream.repair(dry_run=False).repaired
        assert values(stream) == TEN


def test_repairing_a_deleted_or_recreated_stream_raises(stream: meteor.Stream) -> None:
    stream.client.stream("s", create=True).delete()
    with pytest.raises(meteor.StreamNotFound):
        stream.repair()
    stream.client.stream("s", create=True)
    with pytest.raises(meteor.LogTruncated):
        stream.repair(dry_run=False)
