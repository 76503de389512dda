"""Consistency check of shared groups: every flaw is reported, and none raises an error."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.shared import fsck
from meteor_py.shared.group_state import KeyEntry
from meteor_py.shared.record import Standing
from tests.support.readers import background
from tests.support.sharing import GROUP, STREAM, Queue, die


class Damage:
    """A group that has every kind of key, and commands that damage it."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        c1, c2 = queue.consumers(2, prefetch=9)
        records = {record.offset: record for record in c1.poll(5)}
        records[1].reject("why")
        records[0].release(delay=600.0)
        records[2].release(only_this=True)
        records[3].ack()
        c1.flush()
        assert c2.poll(0) == []
        # Publish so many records that the group stores some of the waiting offsets in chunks.
        queue.publish("C" * 300, frame=300)
        assert c2.poll(0) == []
        self.consumer = c1._deliveries._consumer
        self.rescued = queue.shared.fsck()

    def __call__(self, command: str, part: str, *arguments: object) -> Any:
        filled = [x.format(self.consumer) if isinstance(x, str) else x for x in arguments]
        return self.queue.client._connector.call(
            command, self.queue.key(part.format(self.consumer)), *filled
        )

    def flaws(self) -> list[str]:
        return self.queue.shared.fsck()


@pytest.fixture
def damage(url: str) -> Iterator[Damage]:
    queue = Queue(url, "ABCD" * 10, max_per_key=3, dead_letter="dead", lease_ttl=300.0)
    damage = Damage(queue)
    assert damage.rescued == []
    yield damage
    queue.client._connector.call("DEL", queue.key("meta"))  # so that Queue skips its final check
    with pytest.raises(meteor.GroupNotFound):
        queue.shared.fsck()
    with queue:
        pass


def test_intact_group_with_every_kind_of_key_has_no_flaws(damage: Damage) -> None:
    parts = {part.split(b":")[0] for part in damage.queue.shared._protocol.find()}
    everything = b"meta state keys waiting members leases failures letters dying blocked delayed"
    assert {*everything.split(), b"unsettled", b"batches", b"more"} <= parts
    assert damage.flaws() == []


def line(*offsets: int) -> bytes:
    return b"".join(offset.to_bytes(7, "little") for offset in offsets)


def plain(held: int, *offsets: int, owner: bytes = b"......") -> bytes:
    return owner + held.to_bytes(2, "little") + line(*offsets)


SPOILED: list[tuple[str, tuple[object, ...], str]] = [
    # Unreadable values
    ("unreadable consumer", ("HSET", "members", "{}", "x"), "consumer .* cannot be read"),
    ("missing setting", ("HDEL", "meta", "group_cap"), "'group_cap' is missing"),
    ("invalid setting", ("HSET", "meta", "on_poison", "x"), "setting is invalid: on_po"),
    ("missing progress", ("HDEL", "meta", "progress"), "progress cannot be read"),
    ("invalid progress", ("HSET", "meta", "progress", "x"), "progress cannot be read"),
    ("missing limit", ("HDEL", "meta", "max_waiting"), "no numeric field 'max_waiting'"),
    ("missing start", ("HDEL", "meta", "start"), "no numeric field 'start'"),
    ("unreadable batch", ("HSET", "batches:{}", "9", b"x"), "Batch b'9' of .* cannot be read"),
    ("unreadable key entry", ("HSET", "keys", "A", "x"), "key b'A' cannot be read"),
    ("truncated line", ("HSET", "keys", "Z", plain(0, 6)[:-1]), "key b'Z' cannot be read"),
    ("unreadable letter", ("HSET", "letters", "1", "9:x"), "dead letter b'1' cannot be read"),
    ("invalid letter", ("HSET", "letters", "y", "1:1:Ax"), "dead letter b'y' cannot be read"),
    ("keys without padding", ("HDEL", "keys", ""), "'keys' lacks its padding"),
    # Leftovers
    ("dying entry without a letter", ("ZADD", "dying", 1, "x"), "'dying' and 'letters' do not"),
    ("letters without dying", ("DEL", "dying"), "'dying' and 'letters' do not"),
    ("lease of an unknown consumer", ("ZADD", "leases", "+inf", "zz"), "leases do not match"),
    (
        "failure of a settled record",
        ("HSET", "failures", "3", "1"),
        "Settled record 3 .* 'failures'",
    ),
    ("delay without an end", ("DEL", "delayed"), "is delayed, but the set delayed does not"),
    (
        "ready key without records",
        ("ZADD", "ready", 1, "Z"),
        "set ready lists key b'Z', which has no entry",
    ),
    ("purge of an unknown key", ("ZADD", "purges", 1, "Z"), "0 purged keys, but 'purges'"),
    ("unknown redis key", ("SET", "foo", "x"), "b'foo' is not part of a shared group"),
    ("unknown key family", ("SET", "foo:x", "x"), "b'foo:x' is not part of a shared"),
    (
        "key entry without records",
        ("HSET", "keys", "Z", plain(0)),
        "b'Z' has an entry but no records",
    ),
    (
        "held record without an owner",
        ("HSET", "keys", "Z", plain(1)),
        "b'Z' has 1 held records, but no owner",
    ),
    ("holder that is not a member", ("DEL", "members"), "holds records, but is not a member"),
    ("list of an unknown consumer", ("RPUSH", "more:zz", "A"), "b'more:zz' belongs to no consumer"),
    (
        "wake of an unknown consumer",
        ("XADD", "wake:zz", "1-1", "w", "1"),
        "b'wake:zz' belongs to no",
    ),
    (
        "delay of a key without records",
        ("ZADD", "delayed", 1, "Z"),
        "set delayed lists key b'Z', which has no entry",
    ),
    ("batches are gone", ("DEL", "batches:{}"), "should hold . records, but holds 0"),
    # Contradictions
    ("missing chunk", ("DEL", "waiting"), "further waiting records, which does not"),
    ("unsettled batch not listed", ("DEL", "unsettled"), "'unsettled' does not list exactly"),
    ("start beyond next", ("HSET", "meta", "start", "999"), "started at 999"),
    ("blocked key not listed", ("DEL", "blocked"), "set blocked has a wrong .* for key b'A'"),
    ("wrong place in a set", ("ZADD", "blocked", 77, "A"), "blocked has a wrong .* for key b'A'"),
    ("wrong order", ("HSET", "keys", "Z", plain(0, 7, 6)), "records of key b'Z' are not in order"),
    ("record listed twice", ("HSET", "keys", "Z", plain(0, 6)), "A record is listed twice"),
    ("wrong owner", ("HSET", "keys", "D", plain(2, owner=b"abcdef")), "holds its records"),
]


@pytest.mark.parametrize(
    ("commands", "said"), [each[1:] for each in SPOILED], ids=[each[0] for each in SPOILED]
)
def test_flaw_is_reported(damage: Damage, commands: tuple[str, str], said: str) -> None:
    damage(*commands)
    flaws = damage.flaws()
    assert any(re.search(said, flaw) for flaw in flaws), flaws
    assert len(flaws) == len({*flaws}), "a flaw was reported twice"


PARTS = (
    "keys waiting ready blocked delayed leases members failures letters dying unsettled purges idle"
)


@pytest.mark.parametrize("part", [*PARTS.split(), "meta", "batches:{}", "more:{}", "wake:{}"])
def test_key_of_the_wrong_type_is_reported(damage: Damage, part: str) -> None:
    damage("DEL", part)
    damage("SET", part, "x")
    name = part.format(damage.consumer)
    assert any(
        flaw.startswith(f"The key {name.encode()!r} is a string,") for flaw in damage.flaws()
    )
    damage("DEL", part)


def test_busy_group_has_no_flaws(url: str) -> None:
    """The check reads the state in portions while consumers claim, settle, leave and join."""
    with Queue(url, max_per_key=3, settings={"capacity": 1_000_000}) as queue:
        queue.publish("ABCDEFGHIJ" * 200, frame=1_000)
        queue.consumer().close()
        checks, flaws = 0, list[str]()

        def work(stop: threading.Event) -> None:
            while not stop.is_set():
                with queue.stream.shared_subscriber(GROUP, prefetch=20) as sub:
                    for _ in range(5):
                        for record in sub.poll(0.1):
                            if record.standing is not Standing.HELD:
                                continue  # returned with an earlier record of its key
                            if record.offset % 7 == 0 and not record.failures:
                                record.release()
                            else:
                                record.ack()

        with background(work), background(work):
            while queue.shared.describe().confirmed < 2_000 and not flaws:
                flaws, checks = queue.shared.fsck(), checks + 1
        print(f"{checks} checks")
        assert flaws == []


@pytest.mark.parametrize("kind", [None, "others"])
def test_unlisted_group_is_reported(damage: Damage, kind: str | None) -> None:
    call, names = damage.queue.client._connector.call, keys.shared_groups(STREAM)
    call("DEL", names)
    if kind:
        call("SADD", names, "another")
    assert damage.flaws() == ["The list of shared groups does not include 'billing'."]
    call("DEL", names)


# Ordering keys compared with the index


def test_records_filed_under_the_wrong_key_are_reported(damage: Damage) -> None:
    raw = damage("HGET", "keys", "C")
    other = KeyEntry.parse(raw).waiting[0] + 1  # a record whose key is D
    damage("HSET", "keys", "C", raw[:-7] + line(other))
    assert f"Record {other} is filed under key b'C', not b'D'." in damage.flaws()


def test_many_misfiled_records_are_counted(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "_NAMED", 3)
    index = keys.index(STREAM)
    damage.queue.client._connector.call("DEL", index)
    groups = [b"\0\0" * 40, b"Z"]
    damage.queue.client._connector.call("XADD", index, "39-40", *groups)
    flaws = damage.flaws()
    assert flaws[:3] == [f"Record {n} is filed under key {g!r}, not b'Z'." for n, g in FIRST]
    assert re.fullmatch(r"\d+ more records are filed under wrong keys.", flaws[3])


FIRST = [(0, b"A"), (1, b"B"), (2, b"C")]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("options", [{}, {"keyless": "free"}, {"default_key": "rest"}])
def test_keyless_records_and_dropped_index_entries_are_not_flaws(
    url: str, monkeypatch: pytest.MonkeyPatch, size: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(fsck, "_ENTRIES", size)
    with Queue(url, settings={"capacity": 20}, **options) as queue:
        with queue.stream.publisher() as pub:
            for start in range(0, 30, 5):
                named = [b"A", None, b"", b"B", None]
                pub.publish_many([b"%d" % (start + n) for n in range(5)], keys=named).result(20)
        c1 = queue.consumer()
        held = c1.poll(5)
        assert len(held) == 20
        queue.publish("ABABABABAB", frame=5)
        queue.keys()
        # The index no longer has the entries of some held records.
        assert queue.shared.fsck() == []


def test_check_of_a_deleted_group_or_stream_raises(url: str) -> None:
    with Queue(url, "A") as queue:
        queue.consumer().close()
        shared = queue.shared
        assert shared.fsck() == []
        shared.delete()
        with pytest.raises(meteor.GroupNotFound):
            shared.fsck()
        queue.stream.delete()
        with pytest.raises(meteor.StreamNotFound):
            shared.fsck()
        queue.client.stream(STREAM, ordering_key="key")
        with pytest.raises(meteor.LogTruncated):
            shared.fsck()


def test_last_try_and_reserved_key_are_not_flaws(url: str) -> None:
    with Queue(url, "ABC", max_deliveries=2) as queue:
        c1, c2 = queue.consumers(2)
        c1.poll(5, max_records=2)
        die(c1)
        queue.publish("D")
        c2.flush()  # takes back the records of the dead consumer
        assert [record.offset for record in c2.poll(5)] == [0]
        assert c2.poll(0) == []
        assert queue.shared.fsck() == []
        assert queue.shared.describe().name == GROUP
