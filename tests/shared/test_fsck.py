"""The check of the state of a shared group: what is wrong in them is said, and nothing raised."""

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
    """A group with all there can be in the state of the group, and what is done to them."""

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
def damage(any_url: str) -> Iterator[Damage]:
    queue = Queue(any_url, "ABCD" * 10, max_per_key=3, dead_letter="dead", lease_ttl=300.0)
    damage = Damage(queue)
    assert damage.rescued == []
    yield damage
    queue.client._connector.call("DEL", queue.key("state"))  # or it would be checked at the end
    with pytest.raises(meteor.GroupNotFound):
        queue.shared.fsck()
    with queue:
        pass


def test_a_group_in_order_has_all_there_can_be(damage: Damage) -> None:
    parts = {part.split(b":")[0] for part in damage.queue.shared._protocol.find()}
    everything = b"state groups consumers leases failures letters dying blocked delayed bell"
    assert {*everything.split(), b"held", b"more", b"waiting"} <= parts
    assert damage.flaws() == []


SPOILED: list[tuple[str, tuple[object, ...], str]] = [
    # What cannot be read
    ("a garbled consumer", ("HSET", "consumers", "{}", "x"), "Consumer .* cannot be read: b'x'"),
    ("a consumer of no kind", ("HSET", "consumers", "{}", "1:odd:x"), "cannot be read"),
    ("a setting that is missing", ("HDEL", "state", "group_cap"), "'group_cap' is missing"),
    ("a setting that cannot be", ("HSET", "state", "on_poison", "x"), "A setting cannot be: on_po"),
    ("a number that is missing", ("HDEL", "state", "next"), "The state has no number 'next'"),
    ("a number that is none", ("HSET", "state", "waiting", "x"), "no number 'waiting', but b'x'"),
    ("no room", ("HDEL", "state", "max_waiting"), "no number 'max_waiting'"),
    ("a garbled list", ("HSET", "held:{}", "C", "6,x"), "held of key b'C' .* no number: b'x'"),
    ("a garbled offset", ("RPUSH", "waiting:A", "x"), "waits of key b'A' .* no number: b'x'"),
    ("a garbled group", ("HSET", "groups", "A", ":x:"), "Key b'A' .* cannot be read: b':x:'"),
    ("a garbled letter", ("HSET", "letters", "1", "9:x"), "The letter b'1' cannot be read"),
    ("a letter of none", ("HSET", "letters", "y", "1:1:Ax"), "The letter b'y' cannot be read"),
    ("a dying word", ("ZADD", "dying", 1, "x"), "The set dying has .* no number: b'x'"),
    ("an endless lease", ("ZADD", "leases", "+inf", "zz"), "not those that have leases"),
    ("a failure of less", ("HSET", "failures", "0", "-1"), "failures has .* no number: b'-1'"),
    ("no field of its own", ("HDEL", "groups", ""), "groups has lost the field"),
    ("none of a consumer", ("HDEL", "held:{}", ""), "holds has lost the field"),
    # What belongs to nothing
    ("a failure of one settled", ("HSET", "failures", "3", "1"), "failed that is settled: 3"),
    ("a suspect that is settled", ("SADD", "suspects", "3"), "suspected that is settled: 3"),
    ("a delay of nobody", ("ZADD", "delayed", 1, "Z"), "b'Z' has the end of a delay"),
    ("a delay without an end", ("DEL", "delayed"), "no end of its delay"),
    ("an unknown key", ("SET", "foo", "x"), "a key b'foo', which no shared group has"),
    ("an unknown family", ("SET", "foo:x", "x"), "a key b'foo:x', which no shared group has"),
    ("an unknown state", ("HSET", "groups", "Z", ":0:z:"), "state that there is not: b'z'"),
    ("a group of nothing", ("HSET", "groups", "Z", ""), "b'Z' has an entry, and no record"),
    ("what nobody holds", ("DEL", "consumers"), "holds records, and is none"),
    ("a consumer without hands", ("DEL", "held:{}"), "has no place for what it holds"),
    ("a group kept for nothing", ("HSET", "held:{}", "Z", ""), "b'Z' is kept for a last try"),
    ("a group kept by chance", ("HSET", "held:{}", "Z", ""), "keeps 1 keys, and is b''"),
    ("kept, and nothing is", ("HSET", "consumers", "{}", "9:reserved:x"), "and keeps none"),
    ("alone with others", ("HSET", "consumers", "{}", "9:alone:x"), "last try, and not alone"),
    ("letters of nobody", ("DEL", "dying"), "letters are not those"),
    # What is not as far as the other
    ("a bell behind", ("HSET", "state", "bell", "0"), "bell is at 0, and its last ringing was"),
    ("a bell ahead", ("XADD", "bell", "999-0", "c", ""), "its last ringing was 999"),
    ("more than there is", ("HSET", "state", "next", "99"), "a stream that ends at 40"),
    ("less than it began with", ("HSET", "state", "start", "99"), "began at 99"),
    ("twice the same", ("RPUSH", "waiting:A", "6"), "A record is in two places"),
    ("not in order", ("RPUSH", "waiting:A", "0"), "waits of key b'A' is not in order"),
]


@pytest.mark.parametrize(
    ("commands", "said"), [each[1:] for each in SPOILED], ids=[each[0] for each in SPOILED]
)
def test_what_is_wrong_is_said(damage: Damage, commands: tuple[str, str], said: str) -> None:
    damage(*commands)
    flaws = damage.flaws()
    assert any(re.search(said, flaw) for flaw in flaws), flaws
    assert len(flaws) == len({*flaws}), "each once"


PARTS = "state groups ready blocked delayed leases consumers failures suspects letters dying bell"


@pytest.mark.parametrize("part", [*PARTS.split(), "held:{}", "more:{}", "waiting:A"])
def test_a_key_of_another_type_is_said_whichever_it_is(damage: Damage, part: str) -> None:
    damage("DEL", part)
    damage("SET", part, "x")
    name = part.format(damage.consumer)
    assert any(
        flaw.startswith(f"The key {name.encode()!r} is a string,") for flaw in damage.flaws()
    )
    damage("DEL", part)


@pytest.mark.parametrize("kind", [None, "string"])
def test_a_group_that_is_not_listed_is_said(damage: Damage, kind: str | None) -> None:
    call, names = damage.queue.client._connector.call, keys.shared_groups(STREAM)
    call("DEL", names)
    if kind:
        call("SET", names, "x")
    assert damage.flaws() == ["'billing' is not among the names of the shared groups."]
    call("DEL", names)


# Groups, beside the index


def test_records_that_wait_for_another_key_are_said(damage: Damage) -> None:
    a, b = damage("LRANGE", "waiting:A", 0, -1), damage("LRANGE", "waiting:C", 0, -1)
    damage("LSET", "waiting:A", -1, b[-1])
    damage("LSET", "waiting:C", -1, a[-1])
    assert damage.flaws() == [
        f"Record {int(a[-1])} is with key b'C', and of b'A'.",
        f"Record {int(b[-1])} is with key b'A', and of b'C'.",
    ]


def test_many_of_them_are_counted(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsck, "_NAMED", 3)
    index = keys.index(STREAM)
    damage.queue.client._connector.call("DEL", index)
    groups = [b"\0\0" * 40, b"Z"]
    damage.queue.client._connector.call("XADD", index, "39-40", *groups)
    flaws = damage.flaws()
    assert flaws[:3] == [f"Record {n} is with key {g!r}, and of b'Z'." for n, g in FIRST]
    assert flaws[3:] == ["36 more records are with keys that are not theirs."]


FIRST = [(0, b"A"), (1, b"B"), (2, b"C")]


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("options", [{}, {"keyless": "free"}, {"default_key": "rest"}])
def test_what_has_no_key_and_what_the_index_has_dropped_is_no_flaw(
    any_url: str, monkeypatch: pytest.MonkeyPatch, size: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(fsck, "_ENTRIES", size)
    with Queue(any_url, settings={"capacity": 20}, **options) as queue:
        with queue.stream.publisher() as pub:
            for start in range(0, 30, 5):
                named = [b"A", None, b"", b"B", None]
                pub.publish_many([b"%d" % (start + n) for n in range(5)], keys=named).result(20)
        c1 = queue.consumer()
        held = c1.poll(5)
        assert len(held) == 20
        queue.publish("ABABABABAB", frame=5)
        queue.keys()
        assert queue.shared.fsck() == []  # five of them are not in the index any more


def test_a_group_deleted_under_it_is_said_to_be(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
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


def test_the_last_try_of_one_and_what_is_kept_for_it_are_in_order(any_url: str) -> None:
    with Queue(any_url, "ABC", max_deliveries=2) as queue:
        c1, c2 = queue.consumers(2)
        c1.poll(5, max_records=2)
        die(c1)
        queue.publish("D")
        assert [record.offset for record in c2.poll(5)] == [0]
        assert c2.poll(0) == []
        assert queue.shared.fsck() == []
        assert queue.shared.describe().name == GROUP
