"""Whatever befalls connection and server, every acknowledged record is there once and in order.

And what is not acknowledged fails with an error that tells the truth: not in the log, or unknown.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal

import pytest
import redis

import meteor_py as meteor
from meteor_py import keys
from meteor_py.config import OFFSET_MAX
from meteor_py.scripts import PUBLISH
from tests.bench import NAME, Bench, discard, failure, poll_until
from tests.conftest import ServerFactory
from tests.servers import Server
from tests.waiting import eventually

FULL = [b"x"] * 4096

Kind = Literal["valkey", "redis"]


@pytest.fixture
def bench(server: Server, url: str) -> Iterator[Bench]:
    with Bench(server) as running:
        yield running


@pytest.fixture(params=["valkey", "redis"])
def private(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Bench]:
    """A bench whose server is its own, of each kind."""
    with Bench(private_server(kind=request.param)) as running:
        yield running


def publish_bursts(pub: meteor.Publisher, rng: Random, records: int) -> dict[bytes, int]:
    """Publish numbered records in bursts of random size; return their offsets, all acknowledged."""
    places: list[tuple[int, Any]] = []
    number = 0
    while number < records:
        size = min(rng.choice([1, 1, 2, 10, 100]), records - number)
        if size == 1:
            places.append((number, pub.publish(b"%d" % number)))
        else:
            values = [b"%d" % n for n in range(number, number + size)]
            places.append((number, pub.publish_many(values)))
        number += size
        if rng.random() < 0.3:
            places[-1][1].result(30)
    pub.flush(30)
    offsets: dict[bytes, int] = {}
    for first, ack in places:
        span = [ack.result()] if isinstance(ack, meteor.Ack) else [o for r in ack.ranges for o in r]
        offsets |= {b"%d" % (first + n): offset for n, offset in enumerate(span)}
    return offsets


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` again and again in another thread."""
    stop = threading.Event()
    errors: list[Exception] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors


# Connections that are cut


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_with_replies_lost_again_and_again_every_record_is_there_once_and_in_order(
    private_server: ServerFactory, rng: Random, kind: Kind
) -> None:
    with Bench(private_server(kind=kind), capacity=20) as small:  # frames of 20: a full window
        pub = small.publisher()
        small.stream.configure(capacity=1_000_000)
        faults = ("lost_reply", "torn_reply", "late_reply", "lost_request")
        small.proxy.chaos(rng, 0.3, faults)  # type: ignore[arg-type]
        offsets = publish_bursts(pub, rng, 4000)
        assert small.proxy.counters.cuts > 10
        assert small.values() == [b"%d" % n for n in range(4000)]
        assert offsets == {b"%d" % n: n for n in range(4000)}


def test_a_cut_behind_any_batch_of_the_window_loses_and_doubles_nothing(
    server: Server, url: str, rng: Random
) -> None:
    with Bench(server, capacity=5) as bench:
        pub = bench.warm_publisher()
        bench.stream.configure(capacity=1_000_000)
        count = 1
        for which in range(1, 6):
            for cut in (bench.proxy.cut_after_request, bench.proxy.cut_before_request):
                values = [b"%d" % n for n in range(count + 1, count + 31)]
                ahead, many = bench.queue_behind_one(pub, [values])
                cut(which, match=b"EVAL")
                bench.proxy.resume()
                assert (ahead.result(10), many.result(10)) == (count, count + 1)
                assert many.ranges == [range(count + 1, count + 31)]
                count += 31
        assert bench.proxy.counters.cuts == 10
        numbers = [n for n in range(1, count) if n % 31 != 1]
        assert [v for v in bench.values() if v.isdigit()] == [b"%d" % n for n in numbers]


def test_an_interrupted_connection_is_not_made_again_behind_the_senders_back(bench: Bench) -> None:
    # redis-py would do so at the next sending, and an answer be taken for another batch's.
    link = bench.through.open_link()
    assert link.call("PING") == b"PONG"
    link.interrupt()
    with pytest.raises(meteor.ConnectionFailed):
        link.call("PING")
    assert link.call("PING") == b"PONG"
    link.close()


def test_a_reconnect_that_is_refused_for_a_while_changes_nothing(bench: Bench) -> None:
    pub = bench.warm_publisher()
    bench.proxy.refuse()
    bench.proxy.cut_after_request(match=b"EVAL")
    acks = [pub.publish(b"%d" % n) for n in range(100)]
    eventually(lambda: bench.proxy.counters.refused >= 3)
    bench.proxy.accept()
    assert [ack.result(10) for ack in acks] == list(range(1, 101))
    assert bench.values()[1:] == [b"%d" % n for n in range(100)]


# The producer's state, the script


def test_a_publisher_forgotten_by_the_server_with_nothing_in_doubt_does_not_notice(
    bench: Bench,
) -> None:
    pub = bench.warm_publisher()
    for offset in range(1, 6):
        bench.forget_producers()
        assert pub.publish(b"%d" % offset).result(5) == offset
    bench.forget_producers()
    assert pub.publish_many(FULL * 6).result(5) == 6
    pub.close()
    assert bench.next == 6 + 6 * 4096


def test_a_publisher_forgotten_with_batches_in_doubt_says_which_and_delivers_the_rest(
    bench: Bench,
) -> None:
    pub = bench.warm_publisher()
    ahead, sent = bench.queue_behind_one(pub, [FULL * 5])
    unsent = pub.publish_many(FULL)
    bench.direct.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
    requests = bench.proxy.counters.requests
    bench.proxy.resume()
    assert ahead.result(5) == 1
    eventually(lambda: bench.proxy.counters.requests == requests + 5)
    bench.proxy.stall("replies")
    bench.direct.execute_command("CLIENT", "UNPAUSE")
    bench.wait_for_next(2 + 5 * 4096)
    bench.proxy.refuse()
    bench.proxy.cut()
    bench.forget_producers()
    bench.proxy.heal()
    assert isinstance(failure(sent), meteor.OutcomeUnknown)
    assert not sent.ranges
    assert unsent.result(5) == 2 + 5 * 4096
    assert pub.publish(b"last").result(5) == bench.next - 1


def test_a_script_that_is_flushed_again_and_again_is_sent_again(bench: Bench, rng: Random) -> None:
    pub = bench.publisher()
    with meanwhile(bench.direct.script_flush):
        offsets = publish_bursts(pub, rng, 3000)
    assert bench.values() == [b"%d" % n for n in range(3000)]
    assert offsets == {b"%d" % n: n for n in range(3000)}


def test_a_batch_taken_behind_a_repeat_that_was_refused_is_not_sent_as_a_new_one(
    private: Bench,
) -> None:
    pub = private.warm_publisher()
    ahead, behind = private.queue_behind_one(pub, [FULL])
    private.direct.execute_command("ACL", "SETUSER", "default", "-evalsha")
    private.proxy.chunk(1000, 0.02)  # the batch behind arrives in half a second
    private.proxy.cut()
    private.proxy.resume()
    eventually(lambda: "errorstat_NOPERM" in private.direct.info("errorstats"))
    private.direct.execute_command("ACL", "SETUSER", "default", "+evalsha")
    for ack in (ahead, behind):  # both are in the log, and the publisher cannot know
        assert isinstance(failure(ack), meteor.OutcomeUnknown)
    private.proxy.heal()
    assert pub.publish(b"last").result(5) == 2 + 4096


# Refused for good


def test_a_batch_refused_for_good_fails_alone_and_those_behind_follow_in_a_new_epoch(
    server: Server, url: str
) -> None:
    with Bench(server, capacity=4) as bench:
        pub = bench.warm_publisher()
        bench.set_meta(next=OFFSET_MAX - 6)  # the last offset there is has number OFFSET_MAX - 1
        bench.direct.delete(keys.log(NAME))
        ahead, fits, refused = bench.queue_behind_one(pub, [[b"a"] * 4, [b"b"] * 4])
        behind = pub.publish(b"c")
        bench.proxy.resume()
        assert (ahead.result(5), fits.result(5)) == (OFFSET_MAX - 6, OFFSET_MAX - 5)
        error = failure(refused)
        assert isinstance(error, meteor.ServerRefused)
        assert "used up its offsets" in str(error)
        assert behind.result(5) == OFFSET_MAX - 1
        producer = bench.producer()
        assert (producer[b"epoch"], producer[b"last"]) == (b"1", b"0")
        assert isinstance(failure(pub.publish(b"d")), meteor.ServerRefused)
        assert bench.values() == [b"a"] * 4 + [b"c"]


def test_a_publisher_without_the_right_is_told_and_goes_on_when_it_has_it(private: Bench) -> None:
    pub = private.warm_publisher()
    private.direct.execute_command("ACL", "SETUSER", "default", "-xadd")
    acks: list[meteor.Ack | meteor.ManyAck] = [pub.publish(b"x"), pub.publish_many(FULL * 2)]
    for ack in acks:
        error = failure(ack)
        assert isinstance(error, meteor.ServerRefused)
        assert not error.retriable
    private.direct.execute_command("ACL", "SETUSER", "default", "+xadd")
    assert pub.publish(b"again").result(5) == 1
    assert private.values() == [b"first", b"again"]


def test_a_publisher_that_may_not_look_at_the_history_doubles_nothing(private: Bench) -> None:
    pub = private.warm_publisher()
    ahead, many = private.queue_behind_one(pub, [FULL * 4])
    private.direct.hset(keys.meta(NAME), mapping={"epoch": "99", "epochs": "1:0,99:1"})
    private.direct.execute_command("ACL", "SETUSER", "default", "-hget")
    private.proxy.resume()
    assert (ahead.result(5), many.result(5)) == (1, 2)
    assert pub.publish(b"last").result(5) == 2 + 4 * 4096


# Deadlines


def test_at_the_deadline_what_was_sent_is_unknown_and_what_was_not_failed(bench: Bench) -> None:
    pub = bench.warm_publisher(delivery_timeout=0.4)
    bench.proxy.stall("requests")
    sent = pub.publish(b"sent")
    eventually(lambda: sent._batch.encoded)
    unsent = pub.publish(b"unsent")
    begun = time.monotonic()
    assert isinstance(failure(sent), meteor.OutcomeUnknown)
    error = failure(unsent)
    assert isinstance(error, meteor.ConnectionFailed)
    assert str(bench.proxy.port) in str(error)
    assert time.monotonic() - begun < 1.5
    bench.proxy.resume()
    assert pub.publish(b"later").result(5) == bench.next - 1
    assert bench.values() in ([b"first", b"later"], [b"first", b"sent", b"later"])


def test_what_arrives_after_its_deadline_is_fenced_off(bench: Bench) -> None:
    pub = bench.warm_publisher(delivery_timeout=0.3)
    bench.proxy.delay(1.0, "requests")
    late = pub.publish(b"late")
    assert isinstance(failure(late), meteor.OutcomeUnknown)
    bench.proxy.delay(0)
    assert pub.publish(b"next").result(5) == 1
    calls = bench.direct.info("commandstats")["cmdstat_evalsha"]["calls"]
    eventually(lambda: bench.direct.info("commandstats")["cmdstat_evalsha"]["calls"] > calls)
    assert pub.publish(b"last").result(5) == 2
    assert bench.values() == [b"first", b"next", b"last"]


def test_a_server_that_is_stopped_for_a_while_changes_nothing(private: Bench) -> None:
    pub = private.warm_publisher()
    sub = private.subscriber(initial_offset="earliest")
    private.server.pause()
    acks = [pub.publish(b"%d" % n) for n in range(1000)]
    with pytest.raises(TimeoutError):
        acks[-1].result(0.3)
    private.server.resume()
    assert [ack.result(10) for ack in acks] == list(range(1, 1001))
    expected = [b"first", *(b"%d" % n for n in range(1000))]
    assert poll_until(sub, lambda values: len(values) > 1000) == expected


def test_a_pause_longer_than_the_socket_timeout_doubles_nothing(
    private: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meteor_py.sender.SOCKET_TIMEOUT_S", 0.2)
    pub = private.warm_publisher()
    private.server.pause()
    connections = private.proxy.counters.connections
    acks = [pub.publish(b"%d" % n) for n in range(1000)]
    eventually(lambda: private.proxy.counters.connections >= connections + 3)
    private.server.resume()
    assert [ack.result(10) for ack in acks] == list(range(1, 1001))
    assert private.next == 1001


# A server that is full


def test_a_stream_full_of_unarchived_records_blocks_until_the_archive_advances(
    bench: Bench,
) -> None:
    pub = bench.warm_publisher()
    bench.set_meta(archived=0, max_unarchived=3)
    assert [pub.publish(b"0").result(5), pub.publish(b"1").result(5)] == [1, 2]
    blocked = pub.publish(b"2")
    with pytest.raises(TimeoutError):
        blocked.result(0.2)
    bench.set_meta(archived=3)
    assert blocked.result(5) == 3
    assert bench.values() == [b"first", b"0", b"1", b"2"]


def test_a_stream_that_stays_full_fails_at_the_deadline_and_goes_on_later(bench: Bench) -> None:
    pub = bench.warm_publisher(delivery_timeout=0.4)
    bench.set_meta(archived=0, max_unarchived=1)
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.StreamFull)
    assert error.retriable
    assert "archiver" in str(error)
    bench.set_meta(archived=1)
    assert pub.publish(b"y").result(5) == 1
    assert bench.values() == [b"first", b"y"]


def test_a_server_out_of_memory_refuses_clearly_and_goes_on_when_there_is_room(
    private: Bench,
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


def test_out_of_memory_a_repeat_gets_its_answer_and_a_new_batch_leaves_nothing(
    private: Bench,
) -> None:
    history = private.meta("history")

    def publish(sequence: int) -> Any:
        return private.direct.eval(
            PUBLISH.source.decode(), 3,
            keys.log(NAME), keys.meta(NAME), keys.producer(NAME, "p"),
            private.stream.incarnation, str(history), 0, sequence, 1, 99, 60_000, "0v", "x", "",
        )  # fmt: skip

    answers = [publish(0), publish(1)]
    private.direct.config_set("maxmemory", 1)
    assert [publish(0), publish(1)] == answers
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        publish(2)
    private.direct.config_set("maxmemory", 0)
    assert (private.next, private.frames(), private.producer()[b"last"]) == (2, [1, 1], b"1")
    assert publish(2) == [b"OK", 2, 1]


# A server that cannot do it now


NOT_NOW = [
    (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "replica"),
    (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
        "NOREPLICAS",
    ),
]


@pytest.mark.parametrize(("begin", "end", "word"), NOT_NOW)
def test_a_server_that_takes_no_writes_for_a_while_is_waited_for(
    private: Bench, begin: tuple[str, ...], end: tuple[str, ...], word: str
) -> None:
    pub = private.warm_publisher()
    private.direct.execute_command(*begin)
    acks = [pub.publish(b"%d" % n) for n in range(10)]
    with pytest.raises(TimeoutError):
        acks[0].result(0.2)
    private.direct.execute_command(*end)
    assert [ack.result(5) for ack in acks] == list(range(1, 11))


@pytest.mark.parametrize(("begin", "end", "word"), NOT_NOW)
def test_a_server_that_goes_on_to_take_no_writes_says_so_and_nothing_is_in_doubt(
    private: Bench, begin: tuple[str, ...], end: tuple[str, ...], word: str
) -> None:
    pub = private.warm_publisher(delivery_timeout=0.4)
    private.direct.execute_command(*begin)
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.ConnectionFailed)
    assert word in str(error)
    private.direct.execute_command(*end)
    assert pub.publish(b"y").result(5) == 1
    assert private.values() == [b"first", b"y"]


def test_a_server_busy_with_a_script_is_waited_for(private: Bench) -> None:
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


def test_a_server_that_loads_its_data_is_waited_for(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes", "--key-load-delay", "300")
    with Bench(server) as bench:
        pub = bench.warm_publisher()
        bench.direct.config_set("loading-process-events-interval-bytes", 1024)
        bench.direct.mset({f"k{n}": n for n in range(10)})
        for start in range(0, 3000, 100):
            with bench.direct.pipeline(transaction=False) as pipe:
                for n in range(start, start + 100):
                    pipe.set(f"key{n}", n)
                pipe.execute()
        server.kill()
        ack = pub.publish(b"x")
        server.start()
        assert ack.result(10) == 1


# No server, wrong server


def test_a_connection_refused_is_one_clear_sentence_without_the_password(
    private_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "s3cr3t-Pa55word"
    server = private_server()
    server.client().config_set("requirepass", secret)
    address = f"redis://:{secret}@127.0.0.1:{server.port}/0"
    shown: list[str] = []
    with meteor.connect(address) as m:
        stream = m.stream(NAME)
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
        wrong.stream(NAME)
    shown += [str(denied.value), *traceback.format_exception(denied.value), caplog.text]
    assert not [text for text in shown if secret in text]


def test_a_stream_deleted_under_a_publisher_is_missed_at_once(bench: Bench) -> None:
    pub = bench.warm_publisher()
    bench.stream.delete()
    for _ in range(2):
        error = failure(pub.publish(b"x"))
        assert isinstance(error, meteor.StreamNotFound)
    assert bench.client.streams() == []
    assert bench.direct.keys("meteor:*") == []


def test_a_stream_created_anew_under_a_publisher_gets_nothing_of_it(bench: Bench) -> None:
    pub = bench.warm_publisher()
    sub = bench.subscriber(initial_offset="earliest")
    assert sub.poll().values() == [b"first"]
    bench.stream.delete()
    bench.stream = bench.client.stream(NAME)
    error = failure(pub.publish(b"x"))
    assert isinstance(error, meteor.LogTruncated)
    assert (error.first, error.last) == (0, 0)
    with pytest.raises(meteor.LogTruncated) as caught:
        sub.poll()
    assert (caught.value.first, caught.value.last) == (0, 0)
    assert bench.values() == []
    with bench.stream.publisher() as anew:
        assert anew.publish(b"new").result(5) == 0
    sub.skip_gap()
    assert sub.poll().values() == [b"new"]


def test_kill_and_restart_with_an_append_only_file_lose_nothing(
    private_server: ServerFactory, rng: Random
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with Bench(server) as bench:
        pub = bench.publisher()
        sub = bench.subscriber(initial_offset="earliest")
        acks: list[meteor.Ack] = []
        epochs = [bench.meta("epoch")]
        for _ in range(3):
            acks += [pub.publish(b"%d" % n) for n in range(len(acks), len(acks) + 500)]
            if rng.random() < 0.7:
                acks[-rng.randint(1, 400)].result(10)
            server.kill()
            acks += [pub.publish(b"%d" % n) for n in range(len(acks), len(acks) + 500)]
            server.start()
            assert acks[-1].result(20) == len(acks) - 1
            epochs.append(bench.meta("epoch"))
        assert [ack.result(5) for ack in acks] == list(range(len(acks)))
        expected = [b"%d" % n for n in range(len(acks))]
        assert bench.values() == expected
        assert poll_until(sub, lambda values: len(values) >= len(acks)) == expected
        assert len(set(epochs)) == 4


def test_an_entry_above_the_end_is_named_as_what_stops_publishing(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s")
        with m.redis as client:
            client.xadd("meteor:{s}:log", {"user": "1"})
        with stream.publisher() as pub, pytest.raises(meteor.StreamCorrupt, match="above its end"):
            pub.publish(b"x").result()


def test_closing_the_client_delivers_what_its_publishers_still_have() -> None:
    with meteor.connect("embedded://") as m:
        pub = m.stream("s").publisher(linger=5)
        acks = [pub.publish(b"%d" % number) for number in range(100)]
    assert [ack.offset for ack in acks] == list(range(100))
    assert pub.closed
