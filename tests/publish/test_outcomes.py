"""A publisher reports each record's true outcome in time.

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
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream, failure
from tests.support.proxied_stream import proxied as proxied
from tests.support.waiting import eventually

# Outcomes in doubt


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_batch_sent_behind_a_temporarily_refused_one_ends_as_unknown(
    private_server: ServerFactory, kind: Literal["valkey", "redis"]
) -> None:
    """The publisher saw no reply to the second batch, which may still arrive after the first."""
    # With this capacity, two records fill a batch.
    with ProxiedStream(private_server(kind=kind), capacity=2) as proxied:
        pub = proxied.warm_publisher(delivery_timeout=3)
        proxied.set_meta(archived=0, max_unarchived=3)  # room for the first batch only
        proxied.direct.config_set("min-replicas-to-write", 1)
        first, second = pub.publish_many([b"first"] * 2), pub.publish_many([b"second"] * 2)
        refusals = refused_writes(proxied) + 2
        eventually(lambda: refused_writes(proxied) >= refusals, message="nothing was sent")
        proxied.direct.config_set("min-replicas-to-write", 0)
        assert first.result(10) == 1
        # The last reply to the second batch was FULL, but an earlier attempt might have succeeded.
        assert isinstance(failure(second), meteor.OutcomeUnknown)
        proxied.set_meta(archived=3)
        assert pub.publish(b"later").result(10) == 3


def refused_writes(proxied: ProxiedStream) -> int:
    errors: Any = proxied.direct.info("errorstats")
    return int(errors.get("errorstat_NOREPLICAS", {"count": 0})["count"])


def test_a_batch_acknowledged_by_a_demoted_server_and_then_refused_ends_as_unknown(
    replicated: ReplicatedStream,
) -> None:
    """The old server may still have the batch, and may be promoted again."""
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1, delivery_timeout=3)
    replicated.link.stall()
    ack = pub.publish(b"on the old primary only")
    proxied.wait_for_next(2)
    replicated.replica.promote()
    proxied.proxy.refuse()
    proxied.move_to(replicated.replica)
    # Make this server refuse the batch until the deadline.
    proxied.set_meta(archived=0, max_unarchived=1)
    proxied.proxy.accept()
    assert isinstance(failure(ack), meteor.OutcomeUnknown)
    assert proxied.values() == [b"first"]


def test_outcome_is_unknown_if_the_server_dies_while_the_record_waits_for_replicas(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1, delivery_timeout=3)
    replicated.link.stall()
    ack = pub.publish(b"lost with the primary")
    proxied.wait_for_next(2)
    proxied.proxy.refuse()
    proxied.server.kill()
    # NotReplicated would claim that the record is in the log.
    assert isinstance(failure(ack), meteor.OutcomeUnknown)
    replicated.replica.promote()
    proxied.move_to(replicated.replica)
    assert proxied.values() == [b"first"]


# Deadlines


def test_delivery_timeout_applies_however_many_batches_wait(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as client:
        # With this capacity, each record is a batch.
        pub = client.stream(NAME, capacity=1).publisher(delivery_timeout=1.0)
        pub.publish(b"connected").result(10)
        server.pause()
        begun = time.monotonic()
        acks = [pub.publish(b"%d" % number) for number in range(2_000)]
        errors = [failure(ack) for ack in acks]
        assert time.monotonic() - begun < 6  # expiring five batches every 50 ms would take 20 s
        server.resume()
        assert {type(error) for error in errors[10:]} == {meteor.ConnectionFailed}
        assert pub.publish(b"later").result(10) == client.stream(NAME).describe().next - 1
        assert client.stream(NAME).describe().next < 20  # no overdue record was sent
        pub.close()


# Lost records


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_publisher_that_sends_nothing_more_learns_that_its_records_are_lost(
    replicated: ReplicatedStream, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_REPLICATION_ID_S", 0.0)  # no acknowledgement is recent
    pub = replicated.proxied.warm_publisher()
    replicated.lag()
    assert pub.publish_many([b"lost"] * 5).result(10) == 1
    replicated.fail_over()
    with pytest.raises(meteor.LogTruncated) as loss:
        getattr(pub, end)()
    assert (loss.value.first, loss.value.last) == (1, 5)
    getattr(pub, end)()  # the loss is reported only once


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_loss_is_detected_even_if_the_last_acknowledgement_is_recent(
    replicated: ReplicatedStream, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_REPLICATION_ID_S", 60.0)  # every acknowledgement counts as recent
    pub = replicated.proxied.warm_publisher()
    replicated.lag()
    assert pub.publish_many([b"lost"] * 5).result(10) == 1
    assert not pub._sender.must_check
    replicated.fail_over()
    assert pub._sender._connection.connected, "the sender already knows that its connection died"
    eventually(lambda: pub._sender._connection.readable)
    with pytest.raises(meteor.LogTruncated) as loss:
        getattr(pub, end)()
    assert (loss.value.first, loss.value.last) == (1, 5)


def test_replies_to_another_thread_cause_no_check_for_lost_records(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other threads publish, the check would have to wait, and flush would wait with it."""
    pub = proxied.warm_publisher()

    def answered_meanwhile(connection: Connection) -> bool:
        """Simulate a socket that held a reply, which the sender has read by now."""
        assert pub.publish(b"next").result(10) == 1
        return True

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "readable", property(answered_meanwhile))
        assert not pub._sender.must_check
    assert proxied.next == 2
    proxied.proxy.stall("replies")
    pub.publish(b"in flight")
    eventually(lambda: pub._sender.window.sent)
    assert not pub._sender.must_check
    proxied.proxy.resume()


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_server_that_is_gone_delays_flush_and_close_by_only_a_few_seconds(
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
    """Stands for a large object in a local variable of the caller."""


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
def test_a_stored_error_does_not_keep_the_callers_variables_alive(
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
        assert document() is None, f"{kept!r} keeps its caller's variables alive"
        pub.close()


# Acknowledged batches in the window, and bounded waits


def test_acknowledged_batches_are_not_sent_again_when_an_older_one_expires(
    replicated: ReplicatedStream,
) -> None:
    """With acks, each batch stays in the window, with its own deadline, until replicas have it."""
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1, delivery_timeout=60)
    sending = pub._sender
    with sending._accumulator._lock:  # so that the sender cannot take a batch meanwhile
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
    assert [batch for batch, _ in settled] == batches, "a batch was left to be sent again"
    assert all(isinstance(error, meteor.NotReplicated) for _, error in settled)
    assert sending._acked is not None
    assert sending._acked.offset == 4, "the newest acknowledged offset was not stored"


def test_flush_returns_at_once_if_the_sender_has_ended(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    pub._sender._acknowledged_at -= 10  # as if the last reply were old
    pub.close()
    begun = time.monotonic()
    pub.flush()
    assert time.monotonic() - begun < 3


def test_a_hung_server_does_not_extend_the_timeouts_of_flush_and_close(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    pub._sender._acknowledged_at -= 10
    proxied.proxy.stall("replies")
    begun = time.monotonic()
    pub.flush(timeout=0.1)
    pub.close(timeout=0.1)
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_outcome_is_unknown_if_the_server_is_demoted_while_the_record_waits_for_replicas(
    private_server: ServerFactory, kind: Literal["valkey", "redis"]
) -> None:
    with ProxiedStream(private_server(kind=kind)) as proxied:
        pub = proxied.publisher(acks=1, delivery_timeout=2)
        ack = pub.publish(b"x")
        eventually(lambda: proxied.direct.info("clients")["blocked_clients"] == 1)
        proxied.direct.replicaof("127.0.0.1", 1)  # blocked clients get the error UNBLOCKED
        assert isinstance(failure(ack), meteor.OutcomeUnknown)
