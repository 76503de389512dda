"""Consistency check of shared groups: every flaw is reported, and none raises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.shared import fsck
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
        queue.keys()
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
    queue.client._connector.call("DEL", queue.key("state"))  # otherwise Queue checks it at the end
    with pytest.raises(meteor.GroupNotFound):
        queue.shared.fsck()
    with queue:
        pass


def test_intact_group_with_every_kind_of_key_has_no_flaws(damage: Damage) -> None:
    parts = {part.split(b":")[0] for part in damage.queue.shared._protocol.find()}
    everything = b"state groups consumers leases failures letters dying blocked delayed bell"
    assert {*everything.split(), b"held", b"more", b"waiting"} <= parts
    assert damage.flaws() == []


SPOILED: list[tuple[str, tuple[object, ...], str]] = [
    # Unreadable values
    ("unreadable consumer", ("HSET", "consumers", "{}", "x"), "consumer .* cannot be read: b'x'"),
    ("consumer of unknown kind", ("HSET", "consumers", "{}", "1:odd:x"), "cannot be read"),
    ("missing setting", ("HDEL", "state", "group_cap"), "'group_cap' is missing"),
    (
        "invalid setting",
        ("HSET", "state", "on_poison", "x"),
        "setting is invalid: on_po",
    ),
    ("missing number", ("HDEL", "state", "next"), "The state has no number 'next'"),
    ("invalid number", ("HSET", "state", "waiting", "x"), "invalid number 'waiting': b'x'"),
    ("missing limit", ("HDEL", "state", "max_waiting"), "no number 'max_waiting'"),
    ("unreadable list", ("HSET", "held:{}", "C", "6,x"), "held .* key b'C', b'x' is not a n"),
    ("unreadable offset", ("RPUSH", "waiting:A", "x"), "waiting .* key b'A', b'x' is not a n"),
    ("unreadable key entry", ("HSET", "groups", "A", ":x:"), "key b'A' cannot be read: b':x:'"),
    ("unreadable letter", ("HSET", "letters", "1", "9:x"), "dead letter b'1' cannot be read"),
    ("invalid letter", ("HSET", "letters", "y", "1:1:Ax"), "dead letter b'y' cannot be read"),
    ("dying entry without offset", ("ZADD", "dying", 1, "x"), "set 'dying', b'x' is not a number"),
    ("endless lease", ("ZADD", "leases", "+inf", "zz"), "and the leases do not match"),
    ("negative failures", ("HSET", "failures", "0", "-1"), "'failures', b'-1' is not a number"),
    ("groups without padding", ("HDEL", "groups", ""), "'groups' lacks its padding"),
    ("held without padding", ("HDEL", "held:{}", ""), "'held' .* lacks its padding"),
    # Leftovers
    ("failure of settled record", ("HSET", "failures", "3", "1"), "Settled record 3 .* 'failures'"),
    ("settled suspect", ("SADD", "suspects", "3"), "Settled record 3 .* 'suspects'"),
    ("delay of an unknown key", ("ZADD", "delayed", 1, "Z"), "b'Z' has a time at which its delay"),
    ("delay without an end", ("DEL", "delayed"), "no time at which its delay ends"),
    ("unknown redis key", ("SET", "foo", "x"), "b'foo' is not part of a shared group"),
    ("unknown key family", ("SET", "foo:x", "x"), "b'foo:x' is not part of a shared"),
    ("unknown state", ("HSET", "groups", "Z", ":0:z:"), "the unknown state b'z'"),
    ("key entry without records", ("HSET", "groups", "Z", ""), "b'Z' has an entry but no records"),
    ("holder that is not a member", ("DEL", "consumers"), "holds records, but is not a member"),
    ("member without held hash", ("DEL", "held:{}"), "has no hash for the records it"),
    ("key reserved for nothing", ("HSET", "held:{}", "Z", ""), "b'Z' is reserved for a last try"),
    ("unmarked reservation", ("HSET", "held:{}", "Z", ""), "reserves 1 keys, but is marked b''"),
    ("mark without key", ("HSET", "consumers", "{}", "9:reserved:x"), "but reserves no key"),
    ("alone, but holds others", ("HSET", "consumers", "{}", "9:alone:x"), "alone, but does not"),
    ("letters without dying", ("DEL", "dying"), "'dying' and 'letters' do not"),
    # Contradictions
    ("bell behind", ("HSET", "state", "bell", "0"), "bell number 0, but the last entry"),
    ("bell ahead", ("XADD", "bell", "999-0", "c", ""), "last entry of the bell is 999"),
    ("next beyond the stream", ("HSET", "state", "next", "99"), "the stream ends at 40"),
    ("next before start", ("HSET", "state", "start", "99"), "started at 99"),
    ("record in two places", ("RPUSH", "waiting:A", "6"), "A record is in two places"),
    ("wrong order", ("RPUSH", "waiting:A", "0"), "waiting records of key b'A' are not in o"),
]


@pytest.mark.parametrize(
    ("commands", "said"), [each[1:] for each in SPOILED], ids=[each[0] for each in SPOILED]
)
def test_flaw_is_reported(damage: Damage, commands: tuple[str, str], said: str) -> None:
    damage(*commands)
    flaws = damage.flaws()
    assert any(re.search(said, flaw) for flaw in flaws), flaws
    assert len(flaws) == len({*flaws}), "each once"


PARTS = "state groups ready blocked delayed leases consumers failures suspects letters dying bell"


@pytest.mark.parametrize("part", [*PARTS.split(), "held:{}", "more:{}", "waiting:A"])
def test_key_of_the_wrong_type_is_reported(damage: Damage, part: str) -> None:
    damage("DEL", part)
    damage("SET", part, "x")
    name = part.format(damage.consumer)
    assert any(
        flaw.startswith(f"The key {name.encode()!r} is a string,") for flaw in damage.flaws()
    )
    damage("DEL", part)


@pytest.mark.parametrize("kind", [None, "string"])
def test_unlisted_group_is_reported(damage: Damage, kind: str | None) -> None:
    call, names = damage.queue.client._connector.call, keys.shared_groups(STREAM)
    call("DEL", names)
    if kind:
        call("SET", names, "x")
    assert damage.flaws() == ["The list of shared groups does not include 'billing'."]
    call("DEL", names)


# Ordering keys compared with the index


def test_records_filed_under_the_wrong_key_are_reported(damage: Damage) -> None:
    a, b = damage("LRANGE", "waiting:A", 0, -1), damage("LRANGE", "waiting:C", 0, -1)
    damage("LSET", "waiting:A", -1, b[-1])
    damage("LSET", "waiting:C", -1, a[-1])
    assert damage.flaws() == [
        f"Record {int(a[-1])} is filed under key b'C', not b'A'.",
        f"Record {int(b[-1])} is filed under key b'A', not b'C'.",
    ]


def test_many_misfiled_records_are_counted(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "_NAMED", 3)
    index = keys.index(STREAM)
    damage.queue.client._connector.call("DEL", index)
    groups = [b"\0\0" * 40, b"Z"]
    damage.queue.client._connector.call("XADD", index, "39-40", *groups)
    flaws = damage.flaws()
    assert flaws[:3] == [f"Record {n} is filed under key {g!r}, not b'Z'." for n, g in FIRST]
    assert flaws[3:] == ["36 more records are filed under wrong keys."]


FIRST = [(0, b"A"), (1, b"B"), (2, b"C")]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("options", [{}, {"keyless": "free"}, {"default_key": "rest"}])
def test_keyless_records_and_dropped_index_entries_are_no_flaws(
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
        assert queue.shared.fsck() == []  # the index has dropped five of them


def test_deleted_group_or_stream_raises(url: str) -> None:
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


def test_last_try_and_reserved_key_are_no_flaws(url: str) -> None:
    with Queue(url, "ABC", max_deliveries=2) as queue:
        c1, c2 = queue.consumers(2)
        c1.poll(5, max_records=2)
        die(c1)
        queue.publish("D")
        assert [record.offset for record in c2.poll(5)] == [0]
        assert c2.poll(0) == []
        assert queue.shared.fsck() == []
        assert queue.shared.describe().name == GROUP
