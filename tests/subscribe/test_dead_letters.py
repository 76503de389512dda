"""A letter is the record as it was, with the reason; there is one, whatever happens meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.records.position import Position, diverged_at
from meteor_py.redis import keys
from meteor_py.subscribe import dead_letters
from meteor_py.subscribe.dead_letters import bury
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, Bench
from tests.support.proxy import Proxy
from tests.support.readers import background, entries, frame_name
from tests.support.servers import HOST, Replica, Server, plain_client
from tests.support.waiting import eventually

GROUP = "billing"
WHEN = 1_700_000_000_123


class Graveyard:
    """A stream with records, and the stream for its dead letters."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.client = meteor.connect(url)
        self.source = self.client.stream(NAME)
        self.target = self.client.stream("dead", **settings)

    def record(self, value: bytes = b"poison", **options: Any) -> meteor.Record:
        """Publish a record and read it back."""
        with self.source.publisher(max_record_bytes=32 * 2**20) as pub:
            offset = pub.publish(value, **options).result(10)
        (batch,) = self.source.read(offset, offset + 1)
        return batch[0]

    def bury(self, record: meteor.Record, **options: Any) -> None:
        target = options.pop("target", self.target)
        group = options.pop("group", GROUP)
        settings: dict[str, Any] = {"reason": "why", "tries": 3} | options
        bury(target._handle, self.source._handle, group, record, **settings)

    def letters(self) -> list[meteor.Record]:
        return [record for batch in self.target.read() for record in batch]


@pytest.fixture
def yard(any_url: str) -> Iterator[Graveyard]:
    yard = Graveyard(any_url)
    with yard.client:
        yield yard


@pytest.fixture
def real(url: str) -> Iterator[Graveyard]:
    """On a real server only."""
    yard = Graveyard(url)
    with yard.client:
        yield yard


# What is in a letter


def test_a_letter_has_all_of_the_record_and_says_where_it_comes_from(yard: Graveyard) -> None:
    yard.record(b"before")
    record = yard.record(b"poison", key=b"k", headers={"mine": b"\xff"}, timestamp=WHEN)
    yard.bury(record, reason="it is größer", tries=5)
    (letter,) = yard.letters()
    assert (letter.value, letter.key, letter.timestamp) == (b"poison", b"k", WHEN)
    assert letter.headers == {
        "mine": b"\xff",
        "meteor-stream": NAME.encode(),
        "meteor-group": GROUP.encode(),
        "meteor-offset": b"1",
        "meteor-reason": "it is größer".encode(),
        "meteor-tries": b"5",
    }
    assert record.headers == {"mine": b"\xff"}, "the record itself stays as it was"


@pytest.mark.parametrize("options", [{}, {"key": b""}, {"headers": {}}])
def test_what_the_record_lacks_the_letter_lacks_too(
    yard: Graveyard, options: dict[str, Any]
) -> None:
    record = yard.record(b"", **options)
    yard.bury(record)
    (letter,) = yard.letters()
    assert (letter.value, letter.key) == (b"", options.get("key"))
    assert letter.timestamp == record.timestamp == record.appended
    assert letter.headers is not None
    assert len(letter.headers) == 5
    assert all(name.startswith("meteor-") for name in letter.headers)


def test_a_letter_that_is_buried_again_says_where_it_was_last(yard: Graveyard) -> None:
    yard.bury(yard.record(b"poison", headers={"mine": b"1"}))
    (letter,) = yard.letters()
    last = yard.client.stream("last")
    bury(last._handle, yard.target._handle, "undertaker", letter, reason="again", tries=1)
    ((again,),) = last.read()
    assert again.headers is not None
    assert again.headers["meteor-stream"] == b"dead"
    assert again.headers["meteor-reason"] == b"again"
    assert again.headers["mine"] == b"1"


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("", b""),
        ("x" * 5000, b"x" * dead_letters.REASON_BYTES_MAX),
        ("x" + "ü" * 5000, b"x" + "ü".encode() * 511),
        ("bad \udcff", b"bad \\udcff"),
    ],
)
def test_a_reason_of_any_kind_becomes_utf8_that_is_not_long(
    yard: Graveyard, reason: str, kept: bytes
) -> None:
    yard.bury(yard.record(), reason=reason)
    (letter,) = yard.letters()
    assert letter.headers is not None
    assert letter.headers[dead_letters.REASON_HEADER] == kept


def test_a_value_that_a_codec_has_decoded_is_refused_before_anything_is_sent(
    yard: Graveyard,
) -> None:
    record = meteor.Record(0, {"a": 1}, None, None, WHEN, WHEN)
    with pytest.raises(TypeError, match="must be bytes"):
        yard.bury(record)
    assert yard.letters() == []


def test_the_codec_of_the_target_does_not_touch_the_value(any_url: str) -> None:
    yard = Graveyard(any_url, codec="json")
    with yard.client:
        yard.bury(yard.record(b"{not json"))
        with yard.target.subscriber(initial_offset="earliest", codec="bytes") as sub:
            assert sub.poll(timeout=5).values() == [b"{not json"]


@pytest.mark.parametrize("size", [2**20, 32 * 2**20])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_largest_record_can_be_buried(
    url: str, rng: Random, size: int, compression: meteor.Compression
) -> None:
    yard = Graveyard(url, compression=compression)
    with yard.client:
        headers = {"mine": rng.randbytes(size // 8)}
        value = rng.randbytes(size // 2) + bytes(size // 8 * 3 - 6)
        record = yard.record(value, key=b"kk", headers=headers)
        yard.bury(record)
        yard.bury(record)
        (letter,) = yard.letters()
        assert letter.value == value
        assert letter.headers is not None
        assert letter.headers["mine"] == headers["mine"]


@pytest.mark.parametrize(
    ("compression", "name"), [("none", b"0chv"), ("lz4", b"1chv.lz4"), ("zstd", b"1chv.zstd")]
)
def test_frame_and_checksum_are_as_the_target_says(
    any_url: str, compression: meteor.Compression, name: bytes
) -> None:
    yard = Graveyard(any_url, compression=compression, checksum=True)
    with yard.client:
        yard.bury(yard.record(b"abcdefgh" * 300))
        (entry,) = entries(yard.client.redis, "dead")
        assert frame_name(entry[1]) == name
        assert b"crc" in entry[1]
        assert [letter.value for letter in yard.letters()] == [b"abcdefgh" * 300]


def test_the_server_forgets_a_letter_after_a_day(yard: Graveyard) -> None:
    record = yard.record()
    yard.bury(record)
    redis = yard.client.redis
    found: Any = redis.keys(keys.producer("dead", "dl-*"))
    (producer,) = found
    assert 86_000 < redis.ttl(producer) <= 86_400
    redis.delete(producer)
    yard.bury(record)
    assert len(yard.letters()) == 2


# How many letters there are


def test_the_same_letter_is_there_once(yard: Graveyard) -> None:
    record = yard.record()
    for _ in range(3):
        yard.bury(record)
    assert len(yard.letters()) == 1


def test_a_repeat_with_another_reason_or_count_changes_nothing(yard: Graveyard) -> None:
    record = yard.record()
    yard.bury(record, reason="first", tries=1)
    yard.bury(record, reason="another", tries=2)
    yard.bury(record, reason="first", tries=2)
    yard.target.configure(checksum=True, compression="zstd")
    yard.bury(record, reason="first", tries=1)
    (letter,) = yard.letters()
    assert letter.headers is not None
    assert letter.headers["meteor-reason"] == b"first"
    assert letter.headers["meteor-tries"] == b"1"


def test_each_offset_group_stream_and_life_of_a_stream_has_its_own(yard: Graveyard) -> None:
    first, second = yard.record(), yard.record()
    yard.bury(first)
    yard.bury(second)
    yard.bury(first, group="other")
    bury(
        yard.target._handle,
        yard.client.stream("other")._handle,
        GROUP,
        first,
        reason="why",
        tries=3,
    )
    yard.source.delete()
    yard.source = yard.client.stream(NAME)
    again = yard.record()
    assert again.offset == first.offset
    yard.bury(again)
    assert len(yard.letters()) == 5


def test_a_repeat_after_the_ring_has_dropped_the_letter_does_not_bring_it_back(
    any_url: str,
) -> None:
    yard = Graveyard(any_url, capacity=1)
    with yard.client:
        first, second = yard.record(b"first"), yard.record(b"second")
        yard.bury(first)
        yard.bury(second)
        yard.bury(first)
        assert [letter.value for letter in yard.letters()] == [b"second"]


@pytest.mark.parametrize("clients", [1, 2])
def test_threads_that_bury_the_same_letter_at_once_make_one(any_url: str, clients: int) -> None:
    yards = [Graveyard(any_url) for _ in range(clients)]
    records = [yards[0].record(b"%d" % n) for n in range(20)]
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        gate.wait(10)
        for record in records:
            yards[number % clients].bury(record, tries=number)

    with (
        background(lambda _: work(0)),
        background(lambda _: work(1)),
        background(lambda _: work(2)),
    ):
        work(3)
    assert [letter.value for letter in yards[0].letters()] == [b"%d" % n for n in range(20)]
    for yard in yards:
        yard.client.close()


# Lost answers, dead servers, dead processes


def test_a_lost_answer_makes_no_second_letter(server: Server, real: Graveyard) -> None:
    real.client.load_scripts()
    record = real.record()
    with Proxy(HOST, server.port) as proxy, meteor.connect(proxy.url) as through:
        target = through.stream("dead")
        proxy.cut_after_request(match=b"EVALSHA")
        real.bury(record, target=target)
        assert proxy.counters.cuts == 1
    assert len(real.letters()) == 1


def test_with_answers_lost_again_and_again_each_letter_is_there_once(
    server: Server, real: Graveyard, rng: Random
) -> None:
    records = [real.record(b"%d" % n) for n in range(100)]
    with Proxy(HOST, server.port) as proxy, meteor.connect(proxy.url) as through:
        target = through.stream("dead")
        proxy.chaos(rng, 0.3, ("lost_reply", "torn_reply", "lost_request"))
        for record in records:
            real.bury(record, target=target)
        assert proxy.counters.cuts > 10
    assert [letter.value for letter in real.letters()] == [b"%d" % n for n in range(100)]


def test_a_server_that_is_killed_and_comes_back_with_its_data_has_one(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    yard = Graveyard(server.url)
    with yard.client:
        first, second = yard.record(b"first"), yard.record(b"second")
        yard.bury(first)
        epoch = yard.target.describe().epoch
        server.kill()
        with background(lambda _: yard.bury(first, tries=4)):
            server.start()
        yard.bury(second)
        assert [letter.value for letter in yard.letters()] == [b"first", b"second"]
        assert yard.target.describe().epoch > epoch, "another history, and no new epoch"


def test_a_letter_lost_in_a_fail_over_is_written_again_in_a_new_epoch(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Bench(server) as bench, Proxy(HOST, server.port) as line:
        target = bench.client.stream("dead")
        with bench.stream.publisher() as pub:
            pub.publish(b"poison").result(10)
        ((record,),) = bench.stream.read()
        through = bench.through.stream("dead")
        seen = Position(target.incarnation, target.describe().epoch, 1)
        with Replica(server, port=line.port) as replica:
            replica.wait_in_sync()
            line.stall()
            bury(through._handle, bench.stream._handle, GROUP, record, reason="why", tries=1)
            replica.promote()
            bench.move_to(replica)
            bury(through._handle, bench.stream._handle, GROUP, record, reason="why", tries=1)
            ((letter,),) = bench.client.stream("dead").read()
            assert letter.value == b"poison"
            epochs: Any = bench.direct.hget(keys.meta("dead"), "epochs")
            assert diverged_at(seen, epochs.decode(), 1) == 0


def test_a_server_promoted_under_an_idle_connection_is_noticed(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    yard = Graveyard(server.url)
    with yard.client, Replica(server) as other:
        first, second = yard.record(), yard.record()
        yard.bury(first)
        other.wait_in_sync()
        other.promote()
        epoch = yard.target.describe().epoch
        with plain_client(server.url) as client:
            client.replicaof(HOST, str(other.port))
            eventually(lambda: client.info("replication")["master_link_status"] == "up")
            client.replicaof("NO", "ONE")
        yard.bury(second, timeout_s=0)  # one try is enough
        assert yard.target.describe().epoch > epoch
        assert len(yard.letters()) == 2


_KILLED = """
import os, signal, sys
import meteor_py as meteor
from meteor_py.subscribe.dead_letters import bury
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import PUBLISH

def run(link, script, *args):
    answer = plain_run(link, script, *args)
    if script is PUBLISH:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

plain_run, Connection.run = Connection.run, run
client = meteor.connect(sys.argv[1])
source = client.stream(sys.argv[2])
((record,),) = source.read()
bury(client.stream("dead")._handle, source._handle, sys.argv[3], record, reason="first", tries=1)
"""


@pytest.mark.parametrize("reason", ["first", "another"])
def test_a_process_killed_behind_the_publish_and_one_that_repeats_it_make_one(
    url: str, real: Graveyard, reason: str
) -> None:
    record = real.record()
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, url, NAME, GROUP]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert len(real.letters()) == 1, "it was killed too early"
    real.bury(record, reason=reason, tries=1)
    assert len(real.letters()) == 1


# What cannot be


def test_a_target_that_is_gone_raises_at_once(yard: Graveyard) -> None:
    record = yard.record()
    yard.client.stream("dead").delete()
    with pytest.raises(meteor.StreamNotFound):
        yard.bury(record, stop=not_tried_again)
    yard.client.stream("dead")
    with pytest.raises(meteor.LogTruncated):
        yard.bury(record, stop=not_tried_again)


def test_a_server_that_stays_away_raises_when_the_time_is_over(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    yard = Graveyard(server.url)
    with yard.client:
        record = yard.record()
        server.kill()
        for timeout_s in (0.0, 0.5):
            start = time.monotonic()
            with pytest.raises(meteor.ConnectionFailed):
                yard.bury(record, timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - start < timeout_s + 5


def test_stop_ends_the_tries_early(private_server: ServerFactory) -> None:
    server = private_server()
    yard = Graveyard(server.url)
    with yard.client:
        record = yard.record()
        server.kill()
        asked: list[bool] = []

        def stop() -> bool:
            asked.append(len(asked) == 3)
            return asked[-1]

        start = time.monotonic()
        with pytest.raises(meteor.ConnectionFailed):
            yard.bury(record, stop=stop)
        assert asked == [False, False, False, True]
        assert time.monotonic() - start < 10


def test_what_works_at_once_is_not_stopped(yard: Graveyard) -> None:
    yard.bury(yard.record(), timeout_s=0, stop=lambda: True)
    assert len(yard.letters()) == 1


def test_a_server_without_memory_is_waited_for_and_a_repeat_is_still_answered(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    yard = Graveyard(server.url)
    with yard.client, plain_client(server.url) as direct:
        first, second = yard.record(b"first"), yard.record(b"second")
        yard.bury(first)
        direct.config_set("maxmemory", 1)
        yard.bury(first)
        with pytest.raises(meteor.OutOfMemory):
            yard.bury(second, timeout_s=0.1)
        yard.bury(second, stop=on_call(3, lambda: direct.config_set("maxmemory", 0)))
        assert [letter.value for letter in yard.letters()] == [b"first", b"second"]


def test_a_full_target_is_waited_for(yard: Graveyard) -> None:
    first, second = yard.record(b"first"), yard.record(b"second")
    meta, redis = keys.meta("dead"), yard.client.redis
    redis.hset(meta, mapping={"archived": 0, "max_unarchived": 1})
    yard.bury(first)
    yard.bury(first, tries=4)
    with pytest.raises(meteor.StreamFull):
        yard.bury(second, timeout_s=0.1)
    yard.bury(second, stop=on_call(3, lambda: redis.hset(meta, "archived", 1)))
    assert [letter.value for letter in yard.letters()] == [b"first", b"second"]


def test_a_target_without_offsets_left_raises_at_once(yard: Graveyard) -> None:
    record = yard.record()
    yard.client.redis.hset(keys.meta("dead"), "next", str(2**53 - 1))
    with pytest.raises(meteor.ServerRefused, match="EXHAUSTED"):
        yard.bury(record, stop=not_tried_again)


def test_a_closed_client_raises_at_once(yard: Graveyard) -> None:
    record = yard.record()
    yard.client.close()
    with pytest.raises(meteor.MeteorError, match="closed"):
        yard.bury(record, stop=not_tried_again)


def not_tried_again() -> bool:
    pytest.fail("It was to be tried again.")


def on_call(number: int, work: Callable[[], object]) -> Callable[[], bool]:
    """A ``stop`` that never stops, and does ``work`` when asked for the n-th time."""
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        if calls == number:
            work()
        return False

    return stop
