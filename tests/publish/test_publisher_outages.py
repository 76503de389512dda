"""Publishers wait for a server that is full, busy or gone, until a record's deadline.

They write nothing to a stream that was deleted or recreated.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from random import Random
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.redis.scripts import PUBLISH
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ProxiedStream, discard, failure, poll_until
from tests.support.proxied_stream import private as private
from tests.support.proxied_stream import proxied as proxied
from tests.support.waiting import eventually

# A server that is full


def test_publishing_to_a_stream_full_of_unarchived_records_waits_until_archiving_advances(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    proxied.set_meta(archived=0, max_unarchived=3)
    assert [pub.publish(b"0").result(5), pub.publish(b"1").result(5)] == [1, 2]
    blocked = pub.publish(b"2")
    with pytest.raises(TimeoutError):
        blocked.result(0.2)
    proxied.set_meta(archived=3)
    assert blocked.result(5) == 3
    assert proxied.values() == [b"first", b"0", b"1", b"2"]


def test_publishing_to_a_full_stream_fails_at_the_deadline_and_works_later(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.4)
    proxied.set_meta(archived=0, max_unarchived=1)
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.StreamFull)
    assert error.retriable
    assert "archiver" in str(error)
    proxied.set_meta(archived=1)
    assert pub.publish(b"y").result(5) == 1
    assert proxied.values() == [b"first", b"y"]


def test_a_server_out_of_memory_refuses_until_there_is_room(
    private: ProxiedStream,
) -> None:
    pub = private.warm_publisher(delivery_timeout=0.4)
    patient = private.publisher()
    private.direct.config_set("maxmemory", 1)
    waiting = patient.publish(b"patient")
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.OutOfMemory)
    assert error.retriable
    assert "maxmemory" in str(error)
    assert not waiting.done()
    private.direct.config_set("maxmemory", 0)
    assert waiting.result(5) == 1
    assert pub.publish(b"y").result(5) == 2
    assert private.values() == [b"first", b"patient", b"y"]


def test_on_a_full_server_a_retry_gets_its_reply_and_a_new_batch_leaves_no_trace(
    private: ProxiedStream,
) -> None:
    history = private.meta("history")

    def publish(sequence: int) -> Any:
        return private.direct.eval(
            PUBLISH.source.decode(), 3,
            keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "p"),
            private.stream.incarnation, str(history), 0, sequence, 1, 99, 60_000, "0v", "x", "",
        )  # fmt: skip

    replies = [publish(0), publish(1)]
    private.direct.config_set("maxmemory", 1)
    assert [publish(0), publish(1)] == replies
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        publish(2)
    private.direct.config_set("maxmemory", 0)
    assert (private.next, private.frames(), private.producer()[b"last"]) == (2, [1, 1], b"1")
    assert publish(2) == [b"OK", 2, 1]


# A server that temporarily refuses writes


NOT_NOW = [
    (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "replica"),
    (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "NOREPLICAS",
    ),
]


@pytest.mark.parametrize(("begin", "end", "word"), NOT_NOW)
def test_publisher_waits_for_a_server_that_briefly_refuses_writes(
    private: ProxiedStream, begin: tuple[str, ...], end: tuple[str, ...], word: str
) -> None:
    pub = private.warm_publisher()
    private.direct.execute_command(*begin)
    acks = [pub.publish(b"%d" % n) for n in range(10)]
    with pytest.raises(TimeoutError):
        acks[0].result(0.2)
    private.direct.execute_command(*end)
    assert [ack.result(5) for ack in acks] == list(range(1, 11))


@pytest.mark.parametrize(("begin", "end", "word"), NOT_NOW)
def test_records_fail_with_a_known_outcome_if_the_server_keeps_refusing_writes(
    private: ProxiedStream, begin: tuple[str, ...], end: tuple[str, ...], word: str
) -> None:
    pub = private.warm_publisher(delivery_timeout=0.4)
    private.direct.execute_command(*begin)
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.ConnectionFailed)
    assert word in str(error)
    private.direct.execute_command(*end)
    assert pub.publish(b"y").result(5) == 1
    assert private.values() == [b"first", b"y"]


def test_publisher_waits_for_a_server_busy_with_a_script(private: ProxiedStream) -> None:
    pub = private.warm_publisher()
    private.direct.config_set("busy-reply-threshold", 20)

    def spin() -> None:
        with contextlib.suppress(redis.RedisError), private.server.client() as client:
            client.eval("while true do end", 0)

    def busy() -> bool:
        try:
            private.direct.ping()
        except redis.exceptions.ResponseError as error:
            return "BUSY" in str(error)
        return False

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        eventually(busy)
        ack = pub.publish(b"x")
        with pytest.raises(TimeoutError):
            ack.result(0.2)
    finally:
        private.direct.script_kill()
        thread.join(10)
    assert ack.result(5) == 1


def test_publisher_waits_for_a_server_that_is_loading_its_data(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--key-load-delay", "300")
    with ProxiedStream(server) as proxied:
        pub = proxied.warm_publisher()
        proxied.direct.config_set("loading-process-events-interval-bytes", 1024)
        proxied.direct.mset({f"k{n}": n for n in range(10)})
        for start in range(0, 3000, 100):
            with proxied.direct.pipeline(transaction=False) as pipe:
                for n in range(start, start + 100):
                    pipe.set(f"key{n}", n)
                pipe.execute()
        server.kill()
        ack = pub.publish(b"x")
        server.start()
        assert ack.result(10) == 1


# No server, wrong server


def test_connection_errors_fit_on_one_line_and_show_no_password(
    private_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "s3cr3t-Pa55word"
    server = private_server()
    server.client().config_set("requirepass", secret)
    address = f"redis://:{secret}@127.0.0.1:{server.port}/0"
    shown: list[str] = []
    with meteor.connect(address) as m:
        stream = m.stream(NAME, create=True)
        pub = stream.publisher(delivery_timeout=0.4)
        pub.publish(b"x").result(5)
        server.kill()
        error = failure(pub.publish(b"y"))
        assert isinstance(error, (meteor.ConnectionFailed, meteor.OutcomeUnknown))
        discard(pub)
        with pytest.raises(meteor.ConnectionFailed) as caught:
            stream.describe()
        shown += [repr(m), repr(stream), repr(pub), repr(m.address), str(m.address)]
        for each in (error, caught.value):
            shown += [str(each), repr(each), *traceback.format_exception(each)]
    assert f"127.0.0.1:{server.port}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("127.0.0.1") <= 2
    wrong = meteor.connect(f"redis://:{secret}-wrong@127.0.0.1:{server.start().port}/0")
    server.client().config_set("requirepass", secret)
    with wrong, pytest.raises(meteor.AccessDenied) as denied:
        wrong.stream(NAME, create=True)
    shown += [str(denied.value), *traceback.format_exception(denied.value), caplog.text]
    assert not [text for text in shown if secret in text]


def test_publishing_to_a_deleted_stream_fails_at_once(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.stream.delete()
    for _ in range(2):
        error = failure(pub.publish(b"x"))
        assert isinstance(error, meteor.StreamNotFound)
    assert proxied.client.streams() == []
    assert proxied.direct.keys("meteor:*") == []


def test_old_publisher_writes_nothing_to_a_recreated_stream(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    sub = proxied.subscriber(initial_offset="earliest")
    assert sub.poll().values() == [b"first"]
    proxied.stream.delete()
    proxied.stream = proxied.client.stream(NAME, create=True)
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.LogTruncated)
    assert (error.first, error.last) == (0, 0)
    with pytest.raises(meteor.LogTruncated) as caught:
        sub.poll()
    assert (caught.value.first, caught.value.last) == (0, 0)
    assert proxied.values() == []
    with proxied.stream.publisher() as recreated:
        assert recreated.publish(b"new").result(5) == 0
    sub.skip_gap()
    assert sub.poll().values() == [b"new"]


def test_killed_server_with_an_append_only_file_loses_nothing(
    private_server: ServerFactory, rng: Random
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with ProxiedStream(server) as proxied:
        pub = proxied.publisher()
        sub = proxied.subscriber(initial_offset="earliest")
        acks: list[meteor.Ack] = []
        epochs = [proxied.meta("epoch")]
        for _ in range(3):
            acks += [pub.publish(b"%d" % n) for n in range(len(acks), len(acks) + 500)]
            if rng.random() < 0.7:
                acks[-rng.randint(1, 400)].result(10)
            server.kill()
            acks += [pub.publish(b"%d" % n) for n in range(len(acks), len(acks) + 500)]
            server.start()
            assert acks[-1].result(20) == len(acks) - 1
            epochs.append(proxied.meta("epoch"))
        assert [ack.result(5) for ack in acks] == list(range(len(acks)))
        expected = [b"%d" % n for n in range(len(acks))]
        assert proxied.values() == expected
        assert poll_until(sub, lambda values: len(values) >= len(acks)) == expected
        assert len(set(epochs)) == 4


def test_publish_error_names_an_entry_beyond_the_end_as_the_cause(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", create=True)
        with m.redis as client:
            client.xadd("meteor:{s}:log", {"user": "1"})
        with stream.publisher() as pub, pytest.raises(meteor.CorruptStream, match="beyond the end"):
            pub.publish(b"x").result()


def test_publishers_of_a_closed_client_give_up_on_a_hung_server_concurrently(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    client = meteor.connect(server.url)
    stream = client.stream(NAME, create=True)
    pubs = [stream.publisher(delivery_timeout=1.0) for _ in range(6)]
    for pub in pubs:
        pub.publish(b"x").result(10)
    # After a second without an acknowledgement, each publisher must check its server.
    eventually(lambda: all(pub._sender._idle_s() > 1.0 for pub in pubs))
    server.pause()
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 10.0  # one after another, they would take 18 seconds
    server.resume()
