"""The log scripts give every reply that their headers document, on Valkey, Redis and fakeredis.

The tests call the scripts directly, to create states that no publisher would create. A refusal must
change nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX
from meteor_py.records.position import Position, diverged_at
from meteor_py.redis import keys, scripts
from tests.support.readers import check_values, drain, fill, value

TTL_MS = 60_000
INCARNATION = "the-first-incarnation"
HISTORY = "h" * 40


class StreamScripts:
    """A stream in a known state, and direct calls to its scripts."""

    def __init__(self, client: meteor.Client, name: str = "s") -> None:
        self.client = client
        self.plain = client.redis
        self.name = name
        self.log, self.meta = keys.log(name), keys.meta(name)
        self.settings = keys.settings(name)

    def create(self, capacity: int = 10_000, **meta: Any) -> None:
        fields = {"capacity": capacity, "compression": "none", "checksum": "0", "codec": "bytes"}
        flat = [item for pair in fields.items() for item in pair]
        both = [self.meta, self.settings]
        reply = self.run(scripts.CREATE_STREAM, both, INCARNATION, HISTORY, *flat)
        assert reply[0] == 1
        if meta:
            changes: dict[Any, Any] = meta
            self.plain.hset(self.meta, mapping=changes)

    def run(self, script: scripts.Script, script_keys: list[str], *args: Any) -> Any:
        return self.client._connector.run(script, script_keys, args)

    def publish(
        self,
        seq: int = 0,
        n: int = 1,
        *,
        producer: str = "p",
        epoch: int = 0,
        incarnation: str = INCARNATION,
        history: str = HISTORY,
        payload: bytes = b"x",
        crc: int | str = "",
        fingerprint: int = 7,
        ttl_ms: int = TTL_MS,
    ) -> tuple[Any, ...]:
        script_keys = [self.log, self.meta, keys.producer(self.name, producer)]
        reply = self.run(
            scripts.PUBLISH, script_keys, incarnation, history, epoch, seq, n, fingerprint, ttl_ms,
            "0v", payload, crc,
        )  # fmt: skip
        return tuple(x.decode() if isinstance(x, bytes) else x for x in reply)

    def snapshot(self) -> dict[bytes, Any]:
        """Return the contents of all keys, without their times to live."""
        found: dict[bytes, Any] = {}
        names: Any = self.plain.keys("*")
        for key in names:
            is_hash = self.plain.type(key) == b"hash"
            found[key] = self.plain.hgetall(key) if is_hash else self.plain.xrange(key)
        return found

    def entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        reply: Any = self.plain.xrange(self.log)
        return list(reply)

    def meta_field(self, name: str) -> str:
        reply: Any = self.plain.hget(self.meta, name)
        return str(reply.decode())


@pytest.fixture
def lua(any_url: str) -> Iterator[StreamScripts]:
    with meteor.connect(any_url) as client:
        lua = StreamScripts(client)
        yield lua
        lua.plain.close()


# publish: replies


def test_publish_replies_with_the_first_offset_and_the_epoch(lua: StreamScripts) -> None:
    lua.create(epoch=5)
    assert lua.publish(0, 3) == ("OK", 0, 5)
    assert lua.publish(1, 1) == ("OK", 3, 5)
    assert lua.publish(0, 2, producer="q", crc=123) == ("OK", 4, 5)
    assert [entry_id for entry_id, _ in lua.entries()] == [b"2-3", b"3-1", b"5-2"]
    assert [set(fields) for _, fields in lua.entries()] == [
        {b"t", b"0v"}, {b"t", b"0v"}, {b"t", b"0v", b"crc"},
    ]  # fmt: skip
    assert lua.meta_field("next") == "6"
    assert lua.meta_field("appended") == lua.entries()[-1][1][b"t"].decode()


def test_publish_remembers_a_producer_for_its_ttl(lua: StreamScripts) -> None:
    lua.create()
    key = keys.producer("s", "p")
    lua.publish(ttl_ms=5000)
    assert 0 < lua.plain.pttl(key) <= 5000
    lua.publish(ttl_ms=90_000)  # a repeated batch also renews the time to live
    assert 5000 < lua.plain.pttl(key) <= 90_000


REFUSALS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "another incarnation": ({"incarnation": "second"}, ("INCARNATION",)),
    "another history": ({"history": "g" * 40}, ("HISTORY", HISTORY)),
    "a producer in an earlier epoch": ({"epoch": 2}, ("STALEPRODUCER", 3)),
    "a later epoch that does not begin at 0": ({"epoch": 4, "seq": 2}, ("OUTOFSEQ", 0)),
    "an unknown producer that does not begin at 0": ({"producer": "q"}, ("NOPRODUCER",)),
    "a sequence number that is too high": ({"seq": 3}, ("OUTOFSEQ", 2)),
    "a sequence number that is too low": ({"seq": 1, "fingerprint": 8}, ("OUTOFSEQ", 2)),
    "a retry with other records": ({"seq": 1, "n": 2}, ("OUTOFSEQ", 2)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_publish_refuses_with_the_documented_reply_and_writes_nothing(
    lua: StreamScripts, what: str
) -> None:
    call, reply = REFUSALS[what]
    lua.create()
    lua.publish(0, epoch=3)
    lua.publish(1, epoch=3)
    before = lua.snapshot()
    assert lua.publish(**{"seq": 2, "epoch": 3} | call) == reply
    assert lua.snapshot() == before
    assert lua.publish(2, epoch=3)[0] == "OK"


def test_publish_to_a_missing_stream_does_not_create_it(lua: StreamScripts) -> None:
    assert lua.publish() == ("NOSTREAM",)
    assert lua.snapshot() == {}


def test_publish_does_not_compare_a_replication_id_that_the_sender_cannot_see(
    lua: StreamScripts,
) -> None:
    lua.create()
    assert lua.publish(history="")[0] == "OK"


def test_publish_checks_in_the_documented_order(lua: StreamScripts) -> None:
    """Correct several wrong arguments one by one. Each reply names the first remaining error."""
    lua.create(archived=0, max_unarchived=2, next=OFFSET_MAX)
    lua.plain.hset(keys.producer("s", "p"), mapping={"epoch": 3, "last": 4, "4": "4:0:1:7"})
    wrong: dict[str, Any] = {"incarnation": "second", "history": "g" * 40, "epoch": 2, "seq": 9}
    assert lua.publish(**wrong) == ("INCARNATION",)
    wrong["incarnation"] = INCARNATION
    assert lua.publish(**wrong) == ("HISTORY", HISTORY)
    wrong["history"] = HISTORY
    assert lua.publish(**wrong) == ("STALEPRODUCER", 3)
    wrong["epoch"] = 4
    assert lua.publish(**wrong) == ("OUTOFSEQ", 0)
    wrong["epoch"] = 3
    assert lua.publish(**wrong) == ("OUTOFSEQ", 5)
    # A repeated batch gets its first reply, although the stream has no room for a new one.
    assert lua.publish(4, epoch=3) == ("OK", 0, 1)
    wrong["seq"] = 5
    assert lua.publish(**wrong) == ("EXHAUSTED",)
    lua.plain.hset(lua.meta, "next", 2)
    assert lua.publish(**wrong) == ("FULL", 0)
    lua.plain.hset(lua.meta, "archived", 1)
    assert lua.publish(**wrong) == ("OK", 2, 1)


# publish: exactly once


def test_retrying_one_of_the_last_eight_batches_returns_its_first_reply(lua: StreamScripts) -> None:
    lua.create()
    replies = [lua.publish(seq, 1 + seq % 3, fingerprint=seq) for seq in range(20)]
    before = lua.snapshot()
    for seq in range(12, 20):
        assert lua.publish(seq, 1 + seq % 3, fingerprint=seq) == replies[seq]
    for seq in range(12):
        assert lua.publish(seq, 1 + seq % 3, fingerprint=seq) == ("OUTOFSEQ", 20)
    assert lua.snapshot() == before


def test_a_new_producer_epoch_fences_the_old_one(lua: StreamScripts) -> None:
    lua.create()
    for seq in range(5):
        lua.publish(seq)
    assert lua.publish(0, epoch=1) == ("OK", 5, 1)
    state: Any = lua.plain.hgetall(keys.producer("s", "p"))
    assert state == {b"epoch": b"1", b"last": b"0", b"0": b"0:5:1:7"}
    for seq in (0, 4, 5):
        assert lua.publish(seq, epoch=0) == ("STALEPRODUCER", 1)
    assert lua.publish(0, epoch=1) == ("OK", 5, 1)
    assert lua.publish(1, epoch=1) == ("OK", 6, 1)
    assert lua.publish(4, epoch=1) == ("OUTOFSEQ", 2)  # the previous epoch had a batch 4


def test_producers_are_independent(lua: StreamScripts) -> None:
    lua.create()
    for seq in range(3):
        for number, producer in enumerate("abc"):
            reply = ("OK", 3 * seq + number, 1)
            assert lua.publish(seq, producer=producer, fingerprint=seq) == reply
            assert lua.publish(seq, producer=producer, fingerprint=seq) == reply


# publish: the ring


def test_publish_trims_the_ring_at_an_exact_frame_boundary(
    lua: StreamScripts, rng: random.Random
) -> None:
    lua.create(capacity=20)
    model: list[tuple[int, int]] = []
    end = 0
    for seq in range(80):
        n = rng.randrange(1, 21)
        assert lua.publish(seq, n) == ("OK", end, 1)
        end += n
        model = [(last, k) for last, k in [*model, (end - 1, n)] if last >= end - 20]
        assert [entry_id for entry_id, _ in lua.entries()] == [b"%d-%d" % pair for pair in model]


def test_with_a_store_only_archived_records_are_trimmed(lua: StreamScripts) -> None:
    lua.create(capacity=3, archived=0, max_unarchived=6)
    for seq in range(6):
        assert lua.publish(seq)[0] == "OK"
    assert len(lua.entries()) == 6
    assert lua.publish(6) == ("FULL", 0)
    assert lua.publish(5) == ("OK", 5, 1)
    lua.plain.hset(lua.meta, "archived", 2)
    assert lua.publish(6) == ("OK", 6, 1)
    assert lua.entries()[0][0] == b"2-1"
    lua.plain.hset(lua.meta, "archived", 7)
    assert lua.publish(7) == ("OK", 7, 1)
    assert lua.entries()[0][0] == b"5-1"


def test_the_append_time_comes_from_the_server_and_never_decreases(lua: StreamScripts) -> None:
    lua.create()
    before = int(time.time() * 1000)
    lua.publish(0)
    now = int(lua.entries()[0][1][b"t"])
    assert before - 1000 <= now <= int(time.time() * 1000) + 1000
    ahead = now + 10**9
    lua.plain.hset(lua.meta, "appended", ahead)  # the clock was ahead, and was set back
    lua.publish(1)
    lua.publish(2)
    assert [int(fields[b"t"]) for _, fields in lua.entries()] == [now, ahead, ahead]
    assert lua.meta_field("appended") == str(ahead)


def test_the_append_time_is_the_servers_time_in_milliseconds(lua: StreamScripts) -> None:
    lua.create()
    # Repeat: TIME returns microseconds without leading zeros, and the script must restore them.
    for seq in range(100):
        earliest = _server_ms(lua)
        lua.publish(seq)
        assert earliest <= int(lua.entries()[-1][1][b"t"]) <= _server_ms(lua)


def _server_ms(lua: StreamScripts) -> int:
    seconds, microseconds = lua.plain.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


def test_offsets_are_exact_up_to_the_maximum(lua: StreamScripts) -> None:
    end = OFFSET_MAX - 10
    lua.create(capacity=6, next=end, appended=1000)
    for seq, n in enumerate([3, 1, 4, 1]):
        assert lua.publish(seq, n) == ("OK", end, 1)
        assert lua.publish(seq, n) == ("OK", end, 1)
        end += n
        assert lua.entries()[-1][0] == b"%d-%d" % (end - 1, n)
        assert lua.meta_field("next") == str(end)
    assert lua.publish(4, 2) == ("EXHAUSTED",)
    assert lua.publish(4, 1) == ("OK", OFFSET_MAX - 1, 1)
    assert lua.publish(5, 1) == ("EXHAUSTED",)
    assert lua.entries()[0][0] == b"%d-4" % (OFFSET_MAX - 3)
    located = lua.run(scripts.OFFSET_AT_TIME, [lua.log, lua.meta], INCARNATION, 1001)
    assert located == [b"OK", OFFSET_MAX - 6, OFFSET_MAX - 6]


def test_a_stream_near_the_maximum_offset_can_be_read(lua: StreamScripts) -> None:
    start = OFFSET_MAX - 100
    stream = lua.client.stream("s", create=True)
    lua.plain.hset(lua.meta, "next", start)
    with stream.subscriber() as sub:
        assert fill(stream, 1, 50, 1, 40) == start + 92
        assert drain(sub) == list(range(start, start + 92))
        sub.seek(start + 60)
        assert check_values(sub.poll(timeout=0)) == list(range(start + 60, start + 92))
    assert stream.describe().first == stream.offset_at(datetime.fromtimestamp(0, UTC)) == start
    with stream.publisher() as pub:
        ack = pub.publish_many([value(0)] * 100)
        with pytest.raises(meteor.ServerRefused, match="offsets"):
            ack.result()


# create_stream, describe_stream, offset_at_time


def test_create_stream_replies_with_all_fields_and_whether_it_created_the_stream(
    lua: StreamScripts,
) -> None:
    both = [lua.meta, lua.settings]
    args = [INCARNATION, HISTORY, "capacity", "5", "codec", "json", "store", "id"]
    created, fields, settings = lua.run(scripts.CREATE_STREAM, both, *args)
    again, *same = lua.run(scripts.CREATE_STREAM, both, "other", "", "capacity", "9")
    assert (created, again) == (1, 0)
    assert [fields, settings] == same
    assert dict(zip(settings[::2], settings[1::2], strict=True)) == {
        b"incarnation": INCARNATION.encode(), b"codec": b"json", b"store": b"id",
    }  # fmt: skip
    pairs = dict(zip(fields[::2], fields[1::2], strict=True))
    assert pairs[b"incarnation"] == INCARNATION.encode()
    assert pairs[b"history"] == HISTORY.encode()
    assert pairs[b"capacity"] == b"5"
    assert (pairs[b"next"], pairs[b"epoch"], pairs[b"epochs"]) == (b"0", b"1", b"1:0")


def test_describe_and_offset_at_reply_for_missing_and_existing_streams(lua: StreamScripts) -> None:
    both = [lua.log, lua.meta]
    assert lua.run(scripts.DESCRIBE_STREAM, both) == [[], 0, b""]
    assert lua.run(scripts.OFFSET_AT_TIME, both, INCARNATION, 0) == [b"NOSTREAM"]
    lua.create()
    assert lua.run(scripts.DESCRIBE_STREAM, both)[1:] == [0, b""]
    assert lua.run(scripts.OFFSET_AT_TIME, both, INCARNATION, 0) == [b"OK", 0, 0]
    assert lua.run(scripts.OFFSET_AT_TIME, both, "another incarnation", 0) == [b"INCARNATION"]
    lua.publish(0, 3)
    assert lua.run(scripts.DESCRIBE_STREAM, both)[1:] == [1, b"2-3"]
    assert lua.run(scripts.OFFSET_AT_TIME, both, INCARNATION, 10**14) == [b"OK", 3, 0]
    lua.plain.xadd(lua.log, {"user": "1"}, id="7-0")
    lua.plain.hset(lua.meta, mapping={"next": 8, "appended": 10**14})
    assert lua.run(scripts.OFFSET_AT_TIME, both, INCARNATION, 10**14) == [b"FOREIGN", b"7-0"]


# configure_stream, delete_stream


@pytest.mark.parametrize(
    ("script", "args"), [(scripts.CONFIGURE_STREAM, ["5"]), (scripts.DELETE_STREAM, [])]
)
def test_a_deleted_or_recreated_stream_is_neither_configured_nor_deleted(
    lua: StreamScripts, script: scripts.Script, args: list[str]
) -> None:
    configures = script is scripts.CONFIGURE_STREAM
    order = [lua.log, lua.meta] if configures else [lua.meta, lua.log]
    order.append(lua.settings)
    assert lua.run(script, order, INCARNATION, *args) == [b"NOSTREAM"]
    lua.create()
    lua.publish()
    before = lua.snapshot()
    assert lua.run(script, order, "another incarnation", *args) == [b"INCARNATION"]
    assert lua.snapshot() == before
    assert lua.run(script, order, INCARNATION, *args)[0] == b"OK"
    assert lua.snapshot() != before


def test_configure_changes_only_the_given_settings(lua: StreamScripts) -> None:
    lua.create(capacity=50)
    order = [lua.log, lua.meta, lua.settings]
    for capacity, change in (("50", ("", "checksum", "1")), ("60", ("60",))):
        assert lua.run(scripts.CONFIGURE_STREAM, order, INCARNATION, *change)[0] == b"OK"
        assert (lua.meta_field("capacity"), lua.meta_field("checksum")) == (capacity, "1")
        assert lua.plain.hget(lua.settings, "checksum") == b"1"
    assert lua.plain.hget(lua.settings, "capacity") is None


def test_configure_trims_in_steps_and_sets_the_capacity_last(lua: StreamScripts) -> None:
    lua.create()
    for seq in range(450):
        lua.publish(seq)
    order = [lua.log, lua.meta, lua.settings]
    replies = [lua.run(scripts.CONFIGURE_STREAM, order, INCARNATION, "7")[0]]
    while replies[-1] == b"MORE":
        assert lua.meta_field("capacity") == "10000"
        replies.append(lua.run(scripts.CONFIGURE_STREAM, order, INCARNATION, "7")[0])
    assert replies[-1] == b"OK"
    assert lua.meta_field("capacity") == "7"
    assert [entry_id for entry_id, _ in lua.entries()] == [b"%d-1" % i for i in range(443, 450)]


def test_delete_stream_deletes_all_given_keys(lua: StreamScripts) -> None:
    lua.create()
    lua.publish()
    others = [lua.log, lua.settings, keys.producer("s", "p")]
    assert lua.run(scripts.DELETE_STREAM, [lua.meta, *others], INCARNATION) == [b"OK"]
    assert lua.snapshot() == {}


# new_epoch


def new_epoch(
    lua: StreamScripts, found: str, seen: str, incarnation: str = INCARNATION
) -> list[bytes]:
    reply: list[bytes] = lua.run(scripts.NEW_EPOCH, [lua.meta], incarnation, found, seen, 7)
    return reply


def epochs(lua: StreamScripts) -> list[tuple[int, int]]:
    pairs = (pair.split(":") for pair in lua.meta_field("epochs").split(","))
    return [(int(number), int(first)) for number, first in pairs]


def test_clients_that_find_the_same_replication_id_begin_one_epoch(lua: StreamScripts) -> None:
    assert new_epoch(lua, HISTORY, "b") == [b"NOSTREAM"]
    lua.create()
    lua.publish(0, 5)
    assert new_epoch(lua, HISTORY, "b", incarnation="another") == [b"INCARNATION"]
    before = int(time.time() * 1000) - 1000
    assert new_epoch(lua, HISTORY, "b") == [b"OK"]
    after = lua.snapshot()
    number = int(lua.meta_field("epoch"))
    assert before < number < before + 60_000  # the number is the time in ms, plus ARGV[4]
    assert epochs(lua) == [(1, 0), (number, 5)]
    assert new_epoch(lua, HISTORY, "b") == [b"OK"]  # a second client found the same id
    assert new_epoch(lua, HISTORY, "c") == [b"HISTORY", b"b"]  # a third read an outdated id
    assert lua.snapshot() == after
    assert lua.publish(1, history="b") == ("OK", 5, number)


def test_epoch_numbers_increase_even_if_the_clock_does_not(lua: StreamScripts) -> None:
    far = 10**14
    lua.create(epoch=far)
    new_epoch(lua, HISTORY, "b")
    assert int(lua.meta_field("epoch")) == far + 7


def test_epoch_table_lists_every_epoch_and_marks_it_as_consecutive(lua: StreamScripts) -> None:
    lua.create()
    lua.publish(0, 5)
    for found, seen in (("h" * 40, "b"), ("b", "c"), ("c", "d")):
        new_epoch(lua, found, seen)
    lua.plain.hset(lua.meta, "next", 3)  # as if the server had lost records 3 and 4
    new_epoch(lua, "d", "e")
    assert [first for _, first in epochs(lua)] == [0, 5, 5, 5, 3]
    assert lua.meta_field("epochs").count(",+") == 4


def test_epoch_table_is_bounded_and_positions_older_than_it_count_as_lost(
    lua: StreamScripts,
) -> None:
    table = ",".join(f"{number}:{number * 10}" for number in range(1, 1001))
    lua.create(next=20_000, epoch=1000, epochs=table)
    for number, seen in enumerate("abc"):
        new_epoch(lua, "abc"[number - 1] if number else HISTORY, seen)
        lua.plain.hset(lua.meta, "next", 20_001 + number)
        kept = epochs(lua)
        assert len(kept) == 1000
        assert kept[0] == (2 + number, -1)
        assert kept[1] == (3 + number, (3 + number) * 10)
    text = lua.meta_field("epochs")
    # The table no longer has epoch 1, so any record read in that epoch may have been lost.
    assert diverged_at(Position(INCARNATION, 1, 15), text, 10**6) == 0
    # At offset 0 no record has been read, so none can have been lost.
    assert diverged_at(Position(INCARNATION, 1, 0), text, 10**6) is None
    assert diverged_at(Position(INCARNATION, 900, 15_000), text, 10**6) == 9010
    assert diverged_at(Position(INCARNATION, 900, 9_010), text, 10**6) is None
