"""A dead letter is a copy of a failed record with the reason for its failure, stored once."""

from __future__ import annotations

import logging
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
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream
from tests.support.proxy import Proxy
from tests.support.readers import background, entries, frame_name
from tests.support.servers import HOST, Replica, Server, plain_client
from tests.support.waiting import eventually

GROUP = "billing"
WHEN = 1_700_000_000_123


class DeadLetterStreams:
    """A stream with records, and the stream for its dead letters."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.client = meteor.connect(url)
        self.source = self.client.stream(NAME, create=True)
        self.target = self.client.stream("dead", create=True, **settings)

    def record(self, value: bytes = b"poison", **options: Any) -> meteor.Record:
        """Publish a record and read it back."""
        with self.source.publisher(max_record_bytes=32 * 2**20) as pub:
            offset = pub.publish(value, **options).result(10)
        (batch,) = self.source.read(offset, offset + 1)
        return batch[0]

    def bury(self, record: meteor.Record, **options: Any) -> None:
        target = options.pop("target", self.target)
        group = options.pop("group", GROUP)
        settings: dict[str, Any] = {"epoch": 1, "reason": "why", "tries": 3} | options
        bury(target._handle, self.source._handle, group, record, **settings)

    def letters(self) -> list[meteor.Record]:
        return [record for batch in self.target.read() for record in batch]


@pytest.fixture
def streams(any_url: str) -> Iterator[DeadLetterStreams]:
    streams = DeadLetterStreams(any_url)
    with streams.client:
        yield streams


@pytest.fixture
def real(url: str) -> Iterator[DeadLetterStreams]:
    """The same streams on a real server."""
    streams = DeadLetterStreams(url)
    with streams.client:
        yield streams


# Contents


def test_dead_letter_contains_the_whole_record_and_its_origin(streams: DeadLetterStreams) -> None:
    streams.record(b"before")
    record = streams.record(b"poison", key=b"k", headers={"mine": b"\xff"}, timestamp=WHEN)
    streams.bury(record, reason="it is größer", tries=5)
    (letter,) = streams.letters()
    assert (letter.value, letter.key, letter.timestamp) == (b"poison", b"k", WHEN)
    assert letter.headers == {
        "mine": b"\xff",
        "meteor-stream": NAME.encode(),
        "meteor-group": GROUP.encode(),
        "meteor-offset": b"1",
        "meteor-reason": "it is größer".encode(),
        "meteor-tries": b"5",
    }
    assert record.headers == {"mine": b"\xff"}, "the record itself was changed"


@pytest.mark.parametrize("options", [{}, {"key": b""}, {"headers": {}}])
def test_dead_letter_for_a_record_without_headers_has_only_meteor_headers(
    streams: DeadLetterStreams, options: dict[str, Any]
) -> None:
    record = streams.record(b"", **options)
    streams.bury(record)
    (letter,) = streams.letters()
    assert (letter.value, letter.key) == (b"", options.get("key"))
    assert letter.timestamp == record.timestamp == record.appended
    assert letter.headers is not None
    assert len(letter.headers) == 5
    assert all(name.startswith("meteor-") for name in letter.headers)


def test_dead_letter_for_a_dead_letter_names_the_dead_letter_stream_as_its_origin(
    streams: DeadLetterStreams,
) -> None:
    streams.bury(streams.record(b"poison", headers={"mine": b"1"}))
    (letter,) = streams.letters()
    last = streams.client.stream("last", create=True)
    bury(
        last._handle, streams.target._handle, "undertaker", letter, epoch=1, reason="again", tries=1
    )
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
def test_reason_is_stored_as_bounded_utf8(
    streams: DeadLetterStreams, reason: str, kept: bytes
) -> None:
    streams.bury(streams.record(), reason=reason)
    (letter,) = streams.letters()
    assert letter.headers is not None
    assert letter.headers[dead_letters.REASON_HEADER] == kept


def test_decoded_value_is_refused_before_anything_is_sent(
    streams: DeadLetterStreams,
) -> None:
    record = meteor.Record(0, {"a": 1}, None, None, WHEN, WHEN)
    with pytest.raises(TypeError, match="must be bytes"):
        streams.bury(record)
    assert streams.letters() == []


def test_target_codec_does_not_encode_the_value(any_url: str) -> None:
    streams = DeadLetterStreams(any_url, codec="json")
    with streams.client:
        streams.bury(streams.record(b"{not json"))
        with streams.target.subscriber(initial_offset="earliest", codec="bytes") as sub:
            assert sub.poll(timeout=5).values() == [b"{not json"]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_largest_record_can_become_a_dead_letter(
    url: str, rng: Random, compression: meteor.Compression
) -> None:
    size = 32 * 2**20
    streams = DeadLetterStreams(url, compression=compression)
    with streams.client:
        headers = {"mine": rng.randbytes(size // 8)}
        value = rng.randbytes(size // 2) + bytes(size // 8 * 3 - 6)
        record = streams.record(value, key=b"kk", headers=headers)
        streams.bury(record)
        streams.bury(record)
        (letter,) = streams.letters()
        assert letter.value == value
        assert letter.headers is not None
        assert letter.headers["mine"] == headers["mine"]


@pytest.mark.parametrize(
    ("compression", "name"), [("none", b"0chv"), ("lz4", b"1chv.lz4"), ("zstd", b"1chv.zstd")]
)
def test_dead_letter_uses_the_compression_and_checksum_of_its_stream(
    any_url: str, compression: meteor.Compression, name: bytes
) -> None:
    streams = DeadLetterStreams(any_url, compression=compression, checksum=True)
    with streams.client:
        streams.bury(streams.record(b"abcdefgh" * 300))
        (entry,) = entries(streams.client.redis, "dead")
        assert frame_name(entry[1]) == name
        assert b"crc" in entry[1]
        assert [letter.value for letter in streams.letters()] == [b"abcdefgh" * 300]


def test_server_remembers_a_dead_letter_for_a_day(streams: DeadLetterStreams) -> None:
    record = streams.record()
    streams.bury(record)
    redis = streams.client.redis
    found: Any = redis.keys(keys.producer("dead", "dl-*"))
    (producer,) = found
    assert 86_000 < redis.ttl(producer) <= 86_400
    redis.delete(producer)
    streams.bury(record)
    assert len(streams.letters()) == 2


# Exactly once


def test_burying_a_record_again_adds_no_dead_letter(streams: DeadLetterStreams) -> None:
    record = streams.record()
    for _ in range(3):
        streams.bury(record)
    assert len(streams.letters()) == 1


def test_retry_with_another_reason_or_count_changes_nothing(streams: DeadLetterStreams) -> None:
    record = streams.record()
    streams.bury(record, reason="first", tries=1)
    streams.bury(record, reason="another", tries=2)
    streams.bury(record, reason="first", tries=2)
    streams.target.configure(checksum=True, compression="zstd")
    streams.bury(record, reason="first", tries=1)
    (letter,) = streams.letters()
    assert letter.headers is not None
    assert letter.headers["meteor-reason"] == b"first"
    assert letter.headers["meteor-tries"] == b"1"


def test_each_offset_epoch_group_stream_and_incarnation_has_its_own_dead_letter(
    streams: DeadLetterStreams,
) -> None:
    first, second = streams.record(), streams.record()
    streams.bury(first)
    streams.bury(second)
    streams.bury(first, group="other")
    bury(
        streams.target._handle,
        streams.client.stream("other", create=True)._handle,
        GROUP,
        first,
        epoch=1,
        reason="why",
        tries=3,
    )
    streams.bury(first, epoch=2)
    streams.source.delete()
    streams.source = streams.client.stream(NAME, create=True)
    again = streams.record()
    assert again.offset == first.offset
    streams.bury(again)
    assert len(streams.letters()) == 6


def test_retry_does_not_restore_a_dead_letter_that_the_ring_has_dropped(
    any_url: str,
) -> None:
    streams = DeadLetterStreams(any_url, capacity=1)
    with streams.client:
        first, second = streams.record(b"first"), streams.record(b"second")
        streams.bury(first)
        streams.bury(second)
        streams.bury(first)
        assert [letter.value for letter in streams.letters()] == [b"second"]


@pytest.mark.parametrize("clients", [1, 2])
def test_threads_that_bury_the_same_record_at_once_add_one_dead_letter(
    any_url: str, clients: int
) -> None:
    yards = [DeadLetterStreams(any_url) for _ in range(clients)]
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
    for streams in yards:
        streams.client.close()


# Lost replies, dead servers, dead processes


def test_lost_reply_adds_no_second_dead_letter(server: Server, real: DeadLetterStreams) -> None:
    real.client.load_scripts()
    record = real.record()
    with Proxy(HOST, server.port) as proxy, meteor.connect(proxy.url) as through:
        target = through.stream("dead", create=True)
        proxy.cut_after_request(match=b"EVALSHA")
        real.bury(record, target=target)
        assert proxy.counters.cuts == 1
    assert len(real.letters()) == 1


def test_record_gets_one_dead_letter_even_if_requests_and_replies_are_lost_at_random(
    server: Server, real: DeadLetterStreams, rng: Random
) -> None:
    records = [real.record(b"%d" % n) for n in range(40)]
    with Proxy(HOST, server.port) as proxy, meteor.connect(proxy.url) as through:
        target = through.stream("dead", create=True)
        proxy.chaos(rng, 0.3, ("lost_reply", "torn_reply", "lost_request"))
        for record in records:
            real.bury(record, target=target)
        assert proxy.counters.cuts > 3
    assert [letter.value for letter in real.letters()] == [b"%d" % n for n in range(40)]


def test_restarted_server_that_kept_its_data_has_one_dead_letter_per_record(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    streams = DeadLetterStreams(server.url)
    with streams.client:
        first, second = streams.record(b"first"), streams.record(b"second")
        streams.bury(first)
        epoch = streams.target.describe().epoch
        server.kill()
        with background(lambda _: streams.bury(first, tries=4)):
            server.start()
        streams.bury(second)
        assert [letter.value for letter in streams.letters()] == [b"first", b"second"]
        assert streams.target.describe().epoch > epoch, "the new history has no new epoch"


def test_dead_letter_lost_in_a_failover_is_written_again_in_a_new_epoch(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with ProxiedStream(server) as proxied, Proxy(HOST, server.port) as line:
        target = proxied.client.stream("dead", create=True)
        with proxied.stream.publisher() as pub:
            pub.publish(b"poison").result(10)
        ((record,),) = proxied.stream.read()
        through = proxied.through.stream("dead", create=True)
        seen = Position(target.incarnation, target.describe().epoch, 1)
        with Replica(server, port=line.port) as replica:
            replica.wait_in_sync()
            line.stall()
            bury(
                through._handle,
                proxied.stream._handle,
                GROUP,
                record,
                epoch=1,
                reason="why",
                tries=1,
            )
            replica.promote()
            proxied.move_to(replica)
            bury(
                through._handle,
                proxied.stream._handle,
                GROUP,
                record,
                epoch=1,
                reason="why",
                tries=1,
            )
            ((letter,),) = proxied.client.stream("dead", create=True).read()
            assert letter.value == b"poison"
            epochs: Any = proxied.direct.hget(keys.meta("dead"), "epochs")
            assert diverged_at(seen, epochs.decode(), 1) == 0


# A record whose dead letter may have been lost is not confirmed


def test_record_is_not_confirmed_if_a_failover_may_have_lost_its_dead_letter(
    replicated: ReplicatedStream,
) -> None:
    """The member keeps its term, because the replica knows it."""
    proxied = replicated.proxied
    proxied.client.stream("dead", create=True)
    with proxied.stream.publisher() as pub:
        pub.publish_many([b"ok 0", b"ok 1", b"bad 2", b"ok 3"]).result(10)
    at_last, go_on = threading.Event(), threading.Event()

    def handle(record: meteor.Record) -> None:
        if record.value == b"ok 1" and not at_last.is_set():
            replicated.lag()
        if b"bad" in record.value:
            raise ValueError("cannot")
        if record.offset == 3:
            at_last.set()
            go_on.wait(30)

    through = proxied.through
    with through.stream(NAME, create=True).subscriber(
        group=GROUP, auto_confirm=True, lease_ttl=60
    ) as sub:
        receiver = sub.attach_receiver(
            handle, on_error=through.stream("dead", create=True), tries=1
        )
        assert at_last.wait(20)
        assert values_of(proxied.client.stream("dead", create=True)) == [b"bad 2"]
        replicated.fail_over()
        assert values_of(proxied.client.stream("dead", create=True)) == []
        # This record triggers one more confirm, after the one for record 3.
        with proxied.stream.publisher() as pub:
            pub.publish(b"ok 4").result(10)
        go_on.set()
        eventually(lambda: proxied.stream.group(GROUP).confirmed >= 4, 30)
        assert values_of(proxied.client.stream("dead", create=True)) == [b"bad 2"]
        assert receiver.alive


def test_dead_letter_and_confirm_that_both_survived_are_not_repeated(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    proxied.client.stream("dead", create=True)
    with proxied.stream.publisher() as pub:
        pub.publish_many([b"bad 0", b"ok 1"]).result(10)
    handled: list[int] = []

    def handle(record: meteor.Record) -> None:
        handled.append(record.offset)
        if b"bad" in record.value:
            raise ValueError("cannot")

    through = proxied.through
    with through.stream(NAME, create=True).subscriber(group=GROUP, lease_ttl=60) as sub:
        sub.attach_receiver(handle, on_error=through.stream("dead", create=True), tries=1)
        eventually(lambda: proxied.stream.group(GROUP).confirmed == 1)
        eventually(lambda: handled == [0, 1])
        replicated.lag()
        term = sub.term
        replicated.fail_over()
        assert sub.confirm(1).result(20) == 2
        assert (handled, sub.term) == ([0, 1], term)
        assert values_of(proxied.client.stream("dead", create=True)) == [b"bad 0"]


def test_record_with_a_reused_offset_gets_its_own_dead_letter(
    replicated: ReplicatedStream, private_server: ServerFactory
) -> None:
    proxied = replicated.proxied

    def fail_for(value: bytes) -> None:
        with proxied.stream.publisher() as pub:
            assert pub.publish(value).result(10) == 5
        with proxied.stream.subscriber(group=GROUP, auto_confirm=True) as sub:
            sub.attach_receiver(refuse_bad, on_error=dead, tries=1)
            eventually(lambda: sub.confirmed == 6, 20)

    with meteor.connect(private_server().url) as elsewhere:
        dead = elsewhere.stream("dead", create=True)
        with proxied.stream.publisher() as pub:
            pub.publish_many([b"ok"] * 5).result(10)
        replicated.lag()
        fail_for(b"bad one")
        replicated.fail_over()
        fail_for(b"bad two")
        assert values_of(dead) == [b"bad one", b"bad two"]


def test_record_that_survived_a_restart_gets_no_second_dead_letter(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with meteor.connect(server.url) as client:
        stream, dead = client.stream(NAME, create=True), client.stream("dead", create=True)
        for _ in range(2):
            epoch = stream.describe().epoch
            with stream.publisher() as pub:
                pub.publish(b"bad").result(10)
            assert stream.describe().epoch >= epoch
            stream.seek_group(GROUP, 0)
            with stream.subscriber(group=GROUP, auto_confirm=True) as sub:
                sub.attach_receiver(refuse_bad, on_error=dead, tries=1)
                eventually(lambda: sub.lag == 0 and sub.confirmed > 0, 20)
            server.kill()
            server.start()
        offsets = [(r.headers or {})[dead_letters.OFFSET_HEADER] for b in dead.read() for r in b]
        assert offsets == [b"0", b"1"]


# Streams that are created for dead letters


def test_receiver_creates_a_dead_letter_stream_with_room_for_many_letters(
    any_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with meteor.connect(any_url) as client, caplog.at_level(logging.INFO):
        dead = client.stream("dead")
        with client.stream(NAME, create=True).subscriber() as sub:
            sub.attach_receiver(print, on_error=dead)
        assert dead.config.capacity == dead_letters.LETTERS_CAPACITY
        assert f"keeps the newest {dead.config.capacity} dead letters" in caplog.text


def test_receiver_keeps_the_settings_of_an_existing_dead_letter_stream(any_url: str) -> None:
    with meteor.connect(any_url) as client:
        client.stream("dead", capacity=77)
        dead = client.stream("dead")
        with client.stream(NAME, create=True).subscriber() as sub:
            sub.attach_receiver(print, on_error=dead)
        assert dead.config.capacity == 77


# Replicas


def test_dead_letter_waits_for_replicas(replicated: ReplicatedStream) -> None:
    proxied = replicated.proxied
    dead = proxied.client.stream("dead", create=True)
    with proxied.stream.publisher() as pub:
        pub.publish(b"poison").result(10)
    ((record,),) = proxied.stream.read()
    settings: dict[str, Any] = {"epoch": 1, "tries": 1, "acks": 1}
    arguments = (dead._handle, proxied.stream._handle, GROUP, record)
    replicated.lag()
    with pytest.raises(meteor.ConnectionFailed, match="0 of 1 replicas"):
        bury(*arguments, reason="first", timeout_s=0.0, **settings)
    assert bury(*arguments, reason="another", epoch=1, tries=1)
    with pytest.raises(meteor.ConnectionFailed, match="0 of 1 replicas"):
        bury(*arguments, reason="another", timeout_s=0.0, **settings)
    replicated.link.resume()
    assert bury(*arguments, reason="first", **settings)
    assert values_of(dead) == [b"poison"]


@pytest.mark.parametrize("on_error", ["stop", "skip", "retry"])
def test_acks_setting_is_refused_without_a_dead_letter_stream(
    streams: DeadLetterStreams, on_error: Any
) -> None:
    with streams.source.subscriber() as sub, pytest.raises(ValueError, match="dead-letter stream"):
        sub.attach_receiver(print, on_error=on_error, acks=1)


def test_fake_server_has_no_replicas_for_dead_letters() -> None:
    with (
        meteor.connect("fake://") as client,
        client.stream(NAME, create=True).subscriber() as sub,
        pytest.raises(ValueError, match="replicas"),
    ):
        sub.attach_receiver(print, on_error=client.stream("dead", create=True), acks=1)


def refuse_bad(record: meteor.Record) -> None:
    if b"bad" in record.value:
        raise ValueError("cannot")


def values_of(stream: meteor.Stream) -> list[bytes]:
    return [value for batch in stream.read() for value in batch.values()]


# Promoted servers and killed processes


def test_server_promotion_is_detected_on_an_idle_connection(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    streams = DeadLetterStreams(server.url)
    with streams.client, Replica(server) as other:
        first, second = streams.record(), streams.record()
        streams.bury(first)
        other.wait_in_sync()
        other.promote()
        epoch = streams.target.describe().epoch
        with plain_client(server.url) as client:
            client.replicaof(HOST, str(other.port))
            eventually(lambda: client.info("replication")["master_link_status"] == "up")
            client.replicaof("NO", "ONE")
        streams.bury(second, timeout_s=0)  # there is only one attempt
        assert streams.target.describe().epoch > epoch
        assert len(streams.letters()) == 2


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
source = client.stream(sys.argv[2], create=True)
((record,),) = source.read()
letters = client.stream("dead", create=True)._handle
bury(letters, source._handle, sys.argv[3], record, epoch=1, reason="first", tries=1)
"""


@pytest.mark.parametrize("reason", ["first", "another"])
def test_crash_after_the_publish_followed_by_a_retry_adds_one_dead_letter(
    url: str, real: DeadLetterStreams, reason: str
) -> None:
    record = real.record()
    command = [sys.executable, "-W", "ignore", "-c", _KILLED, url, NAME, GROUP]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    assert len(real.letters()) == 1, "the process was killed too early"
    real.bury(record, reason=reason, tries=1)
    assert len(real.letters()) == 1


# Errors, timeouts and waits


def test_deleted_target_raises_at_once(streams: DeadLetterStreams) -> None:
    record = streams.record()
    streams.client.stream("dead", create=True).delete()
    with pytest.raises(meteor.StreamNotFound):
        streams.bury(record, stop=not_tried_again)
    streams.client.stream("dead", create=True)
    with pytest.raises(meteor.LogTruncated):
        streams.bury(record, stop=not_tried_again)


def test_unreachable_server_raises_after_the_timeout(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    streams = DeadLetterStreams(server.url)
    with streams.client:
        record = streams.record()
        server.kill()
        for timeout_s in (0.0, 0.5):
            start = time.monotonic()
            with pytest.raises(meteor.ConnectionFailed):
                streams.bury(record, timeout_s=timeout_s)
            assert timeout_s <= time.monotonic() - start < timeout_s + 5


def test_stop_ends_the_retries_early(private_server: ServerFactory) -> None:
    server = private_server()
    streams = DeadLetterStreams(server.url)
    with streams.client:
        record = streams.record()
        server.kill()
        asked: list[bool] = []

        def stop() -> bool:
            asked.append(len(asked) == 3)
            return asked[-1]

        start = time.monotonic()
        with pytest.raises(meteor.ConnectionFailed):
            streams.bury(record, stop=stop)
        assert asked == [False, False, False, True]
        assert time.monotonic() - start < 10


def test_first_attempt_is_made_even_if_stop_returns_true(streams: DeadLetterStreams) -> None:
    streams.bury(streams.record(), timeout_s=0, stop=lambda: True)
    assert len(streams.letters()) == 1


def test_bury_waits_while_the_server_is_out_of_memory(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    streams = DeadLetterStreams(server.url)
    with streams.client, plain_client(server.url) as direct:
        first, second = streams.record(b"first"), streams.record(b"second")
        streams.bury(first)
        direct.config_set("maxmemory", 1)
        streams.bury(first)
        with pytest.raises(meteor.OutOfMemory):
            streams.bury(second, timeout_s=0.1)
        streams.bury(second, stop=on_call(3, lambda: direct.config_set("maxmemory", 0)))
        assert [letter.value for letter in streams.letters()] == [b"first", b"second"]


def test_bury_waits_while_the_target_is_full(streams: DeadLetterStreams) -> None:
    first, second = streams.record(b"first"), streams.record(b"second")
    meta, redis = keys.meta("dead"), streams.client.redis
    redis.hset(meta, mapping={"archived": 0, "max_unarchived": 1})
    streams.bury(first)
    streams.bury(first, tries=4)
    with pytest.raises(meteor.StreamFull):
        streams.bury(second, timeout_s=0.1)
    streams.bury(second, stop=on_call(3, lambda: redis.hset(meta, "archived", 1)))
    assert [letter.value for letter in streams.letters()] == [b"first", b"second"]


def test_target_with_no_offsets_left_raises_at_once(streams: DeadLetterStreams) -> None:
    record = streams.record()
    streams.client.redis.hset(keys.meta("dead"), "next", str(2**53 - 1))
    with pytest.raises(meteor.ServerRefused, match="EXHAUSTED"):
        streams.bury(record, stop=not_tried_again)


def test_closed_client_raises_at_once(streams: DeadLetterStreams) -> None:
    record = streams.record()
    streams.client.close()
    with pytest.raises(meteor.MeteorError, match="closed"):
        streams.bury(record, stop=not_tried_again)


def not_tried_again() -> bool:
    pytest.fail("The library tried again.")


def on_call(number: int, work: Callable[[], object]) -> Callable[[], bool]:
    """Return a callback for ``stop``, which returns False. Call ``number`` also runs ``work``."""
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        if calls == number:
            work()
        return False

    return stop
