"""A publisher reports the true outcome of each record, and in time.

It reports an outcome in doubt as unknown, even if the last reply was a refusal.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest

import meteor_py as meteor
from meteor_py.publish import sender
from meteor_py.publish.batch import Batch
from meteor_py.publish.in_flight import InFlightWindow
from meteor_py.redis.connection import Connection
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, Bench, Pair, failure
from tests.support.proxied_stream import bench as bench
from tests.support.waiting import eventually

# Doubts


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_batch_sent_behind_one_that_is_refused_for_now_ends_as_unknown(
    private_server: ServerFactory, kind: Literal["valkey", "redis"]
) -> None:
    """The publisher saw no reply to the second batch, which may arrive late, after the first."""
    with Bench(private_server(kind=kind), capacity=2) as bench:  # two records fill a batch
        pub = bench.warm_publisher(delivery_timeout=3)
        bench.set_meta(archived=0, max_unarchived=3)  # room for the first batch only
        bench.direct.config_set("min-replicas-to-write", 1)
        first, second = pub.publish_many([b"first"] * 2), pub.publish_many([b"second"] * 2)
        refusals = refused_writes(bench) + 2
        eventually(lambda: refused_writes(bench) >= refusals, message="nothing is sent")
        bench.direct.config_set("min-replicas-to-write", 0)
        assert first.result(10) == 1
        assert isinstance(failure(second), meteor.OutcomeUnknown)  # although the last reply is FULL
        bench.set_meta(archived=3)
        assert pub.publish(b"later").result(10) == 3


def refused_writes(bench: Bench) -> int:
    errors: Any = bench.direct.info("errorstats")
    return int(errors.get("errorstat_NOREPLICAS", {"count": 0})["count"])


def test_a_batch_acknowledged_by_a_demoted_server_and_then_refused_ends_as_unknown(
    pair: Pair,
) -> None:
    """The old server may still have the batch, and may be promoted again."""
    bench = pair.bench
    pub = bench.warm_publisher(acks=1, delivery_timeout=3)
    pair.link.stall()
    ack = pub.publish(b"on the old primary only")
    bench.wait_for_next(2)
    pair.replica.promote()
    bench.proxy.refuse()
    bench.move_to(pair.replica)
    bench.set_meta(archived=0, max_unarchived=1)  # this server refuses the batch until the deadline
    bench.proxy.accept()
    assert isinstance(failure(ack), meteor.OutcomeUnknown)
    assert bench.values() == [b"first"]


def test_record_whose_server_dies_while_waiting_for_replicas_is_unknown(pair: Pair) -> None:
    bench = pair.bench
    pub = bench.warm_publisher(acks=1, delivery_timeout=3)
    pair.link.stall()
    ack = pub.publish(b"lost with the primary")
    bench.wait_for_next(2)
    bench.proxy.refuse()
    bench.server.kill()
    assert isinstance(failure(ack), meteor.OutcomeUnknown)  # not NotReplicated
    pair.replica.promote()
    bench.move_to(pair.replica)
    assert bench.values() == [b"first"]


# Deadlines


def test_delivery_timeout_holds_however_many_batches_wait(private_server: ServerFactory) -> None:
    server = private_server()
    with meteor.connect(server.url) as client:
        pub = client.stream(NAME, capacity=1).publisher(delivery_timeout=1.0)  # a batch per record
        pub.publish(b"connected").result(10)
        server.pause()
        begun = time.monotonic()
        acks = [pub.publish(b"%d" % number) for number in range(2_000)]
        errors = [failure(ack) for ack in acks]
        assert time.monotonic() - begun < 6  # at five per 50 ms, they would take 20 seconds
        server.resume()
        assert {type(error) for error in errors[10:]} == {meteor.ConnectionFailed}
        assert pub.publish(b"later").result(10) == client.stream(NAME).describe().next - 1
        assert client.stream(NAME).describe().next < 20  # no overdue record was sent
        pub.close()


# Lost records


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_publisher_that_sends_nothing_more_learns_that_its_records_are_lost(
    pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_REPLICATION_ID_S", 0.0)  # do not wait until the reply is old
    pub = pair.bench.warm_publisher()
    pair.lag()
    assert pub.publish_many([b"lost"] * 5).result(10) == 1
    pair.fail_over()
    with pytest.raises(meteor.LogTruncated) as loss:
        getattr(pub, end)()
    assert (loss.value.first, loss.value.last) == (1, 5)
    getattr(pub, end)()  # reported once


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_loss_is_learned_even_if_the_last_acknowledgement_is_recent(
    pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_REPLICATION_ID_S", 60.0)  # as if it were less than a second old
    pub = pair.bench.warm_publisher()
    pair.lag()
    assert pub.publish_many([b"lost"] * 5).result(10) == 1
    assert not pub._sender.must_check
    pair.fail_over()
    assert pub._sender._connection.connected, "the sender has not noticed that its connection died"
    eventually(lambda: pub._sender._connection.readable)
    with pytest.raises(meteor.LogTruncated) as loss:
        getattr(pub, end)()
    assert (loss.value.first, loss.value.last) == (1, 5)


def test_replies_to_another_thread_are_no_reason_to_check(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other threads publish, the check would have to wait, and flush with it."""
    pub = bench.warm_publisher()

    def answered_meanwhile(connection: Connection) -> bool:
        """As if the socket had held the reply that the sender then read."""
        assert pub.publish(b"next").result(10) == 1
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "readable", property(answered_meanwhile))
        assert not pub._sender.must_check
    assert bench.next == 2
    bench.proxy.stall("replies")
    pub.publish(b"in flight")
    eventually(lambda: pub._sender.window.sent)
    assert not pub._sender.must_check
    bench.proxy.resume()


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_server_that_is_gone_delays_flush_and_close_by_a_few_seconds_only(
    private_server: ServerFactory, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_REPLICATION_ID_S", 0.0)
    server = private_server()
    with meteor.connect(server.url) as client, client.stream(NAME).publisher() as pub:
        pub.publish(b"acknowledged").result(10)
        server.pause()
        begun = time.monotonic()
        getattr(pub, end)()
        assert time.monotonic() - begun < 6
        server.resume()


# Memory


class Document:
    """Something large in the variables of a caller."""


def fail_in_result(pub: meteor.Publisher) -> object:
    ack = pub.publish(b"nowhere to go")
    with pytest.raises(meteor.ConnectionFailed):
        ack.result(10)
    return ack


def fail_in_flush(pub: meteor.Publisher) -> object:
    ack = pub.publish(b"nowhere to go")
    with pytest.raises(meteor.ConnectionFailed):
        pub.flush()
    return ack


def fail_in_publish(pub: meteor.Publisher) -> object:
    pub.close()
    with pytest.raises(meteor.PublisherClosed):
        pub.publish(b"too late")
    return pub


@pytest.mark.parametrize("fail", [fail_in_result, fail_in_flush, fail_in_publish])
def test_an_error_that_is_kept_does_not_keep_its_callers_variables(
    private_server: ServerFactory, fail: Callable[[meteor.Publisher], object]
) -> None:
    server = private_server()
    with meteor.connect(server.url) as client:
        pub = client.stream(NAME).publisher(delivery_timeout=0.2)
        server.kill()

        def call() -> tuple[object, weakref.ref[Document]]:
            document = Document()
            return fail(pub), weakref.ref(document)

        kept, document = call()
        gc.collect()
        assert document() is None, f"{kept!r} keeps the variables of its caller"
        pub.close()


# Acknowledged batches in the window, and waits


def test_acknowledged_batches_are_not_sent_again_when_an_older_one_expires(pair: Pair) -> None:
    """With acks, batches stay in the window until replicas have them, each with its deadline."""
    bench = pair.bench
    pub = bench.warm_publisher(acks=1, delivery_timeout=60)
    sending = pub._sender
    with sending._accumulator._lock:  # the sender can take no batch meanwhile
        batches = [Batch(0.0, time.monotonic() + 60) for _ in range(3)]
        for index, batch in enumerate(batches):
            batch.count, batch.base_offset = 1, 1 + index
        window = InFlightWindow()
        window.add(batches)
        window.sent = window.acknowledged = 3
        original, sending.window = sending.window, window
        settled: list[tuple[Batch, object]] = []
        keep = sending._accumulator.settle
        sending._accumulator.settle = lambda batch, error=None: settled.append((batch, error))  # type: ignore[method-assign]
        try:
            batches[0].deadline = 0.0
            sending._expire()
        finally:
            sending._accumulator.settle = keep  # type: ignore[method-assign]
            sending.window = original
    assert [batch for batch, _ in settled] == batches, "none of them is left to be sent again"
    assert all(isinstance(error, meteor.NotReplicated) for _, error in settled)
    assert sending._acked is not None
    assert sending._acked.offset == 4, "so that a later loss is reported"


def test_flush_returns_at_once_when_no_sender_is_left_to_check(bench: Bench) -> None:
    pub = bench.warm_publisher()
    pub._sender._acknowledged_at -= 10  # as if it were long ago
    pub.close()
    begun = time.monotonic()
    pub.flush()
    assert time.monotonic() - begun < 3


def test_a_hung_server_does_not_stretch_the_timeouts_of_flush_and_close(bench: Bench) -> None:
    pub = bench.warm_publisher()
    pub._sender._acknowledged_at -= 10
    bench.proxy.stall("replies")
    begun = time.monotonic()
    pub.flush(timeout=0.1)
    pub.close(timeout=0.1)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_record_whose_server_is_demoted_while_it_waits_for_replicas_is_unknown(
    private_server: ServerFactory, kind: Literal["valkey", "redis"]
) -> None:
    with Bench(private_server(kind=kind)) as bench:
        pub = bench.publisher(acks=1, delivery_timeout=2)
        ack = pub.publish(b"x")
        eventually(lambda: bench.direct.info("clients")["blocked_clients"] == 1)
        bench.direct.replicaof("127.0.0.1", 1)  # every blocked client gets UNBLOCKED
        assert isinstance(failure(ack), meteor.OutcomeUnknown)
