"""A failover that loses records: consumers learn which ones, and late acks settle no new record.

A lagging replica is promoted and its primary killed. The records that only the primary had are
lost, together with the group's latest state, and other records get their offsets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.shared.delivered_position import DeliveredPosition
from meteor_py.shared.protocol import SharedProtocol
from meteor_py.subscribe.dead_letters import bury
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ReplicatedStream
from tests.support.proxy import Proxy
from tests.support.servers import Replica, binaries
from tests.support.sharing import GROUP, discard, offsets
from tests.support.waiting import eventually


class Failover:
    """A group that has settled record 0, and a replica to which the server can fail over."""

    def __init__(self, stack: ExitStack, replicated: ReplicatedStream) -> None:
        self._stack = stack
        self._replicated = replicated
        self.proxied = replicated.proxied
        self.publish("a", 0, 1)
        self.first = self.consumer()
        self.settle(self.first, 1)

    def consumer(self, **options: Any) -> meteor.SharedSubscriber:
        stream = self.proxied.through.stream(NAME, create=False)
        consumer = stream.shared_subscriber(GROUP, **options)
        self._stack.callback(discard, consumer)
        return consumer

    def settle(self, consumer: meteor.SharedSubscriber, count: int) -> None:
        """Receive and acknowledge this many records."""
        records = consumer.poll(10, count)
        assert len(records) == count
        consumer.ack(records)
        consumer.flush()

    def publish(self, branch: str, start: int, stop: int) -> None:
        """Publish records that name their branch and offset."""
        with self.proxied.client.stream(NAME, create=False).publisher() as pub:
            values = [f"{branch}{number}".encode() for number in range(start, stop)]
            assert pub.publish_many(values).result(10) == start

    def add_replica(self) -> tuple[Proxy, Replica]:
        return self._replicated.add_replica()

    def lag(self) -> None:
        self._replicated.lag()

    def fail_over(self, new: int = 0) -> None:
        """Fail over, and publish this many records on the new primary, from offset 1 on."""
        self._replicated.fail_over()
        if new:
            self.publish("b", 1, 1 + new)

    def state(self) -> meteor.SharedDescription:
        return self.proxied.stream.shared_group(GROUP).describe()


@pytest.fixture
def failover(private_server: ServerFactory) -> Iterator[Failover]:
    # Use Redis if it is installed, because its replicas sync a second faster than Valkey's.
    server = private_server(kind="redis" if "redis" in binaries() else "valkey")
    with ExitStack() as stack:
        yield Failover(stack, ReplicatedStream(stack, server, ordering_key="key"))


def error_of(call: Callable[[], object]) -> meteor.MeteorError | None:
    """Repeat a call until the server replies; return the error that the call raised, or None."""
    errors: list[meteor.MeteorError | None] = []

    def replied() -> bool:
        try:
            call()
            errors.append(None)
        except meteor.ConnectionFailed:
            return False
        except meteor.MeteorError as error:
            errors.append(error)
        return True

    eventually(replied, 30)
    return errors[0]


def lost_range(error: meteor.MeteorError | None) -> tuple[int, int]:
    assert isinstance(error, meteor.LogTruncated), repr(error)
    assert f"{error.first} to {error.last}" in str(error)
    return error.first, error.last


@pytest.mark.parametrize("new", [0, 5, 50])
def test_consumer_learns_once_which_delivered_records_a_failover_lost(
    failover: Failover, new: int
) -> None:
    consumer = failover.first
    failover.lag()
    failover.publish("a", 1, 21)
    failover.settle(consumer, 20)
    failover.fail_over(new)
    assert lost_range(error_of(lambda: consumer.poll(0))) == (1, 20)
    failover.publish("c", 1 + new, 3 + new)  # starts the new epoch if no record has done so
    values = [b"b%d" % offset for offset in range(1, 1 + new)]
    values += [b"c%d" % (1 + new), b"c%d" % (2 + new)]
    received: list[bytes] = []

    def all_received() -> bool:
        records = consumer.poll(0.5)
        received.extend(record.value for record in records)
        consumer.ack(records)
        return len(received) >= len(values)

    eventually(all_received, 20)
    assert received == values
    consumer.flush()
    assert failover.state().acked == 3 + new


def test_failover_that_loses_no_record_raises_no_error(failover: Failover) -> None:
    failover.publish("a", 1, 21)
    failover.settle(failover.first, 20)
    failover.lag()
    failover.fail_over()
    failover.publish("b", 21, 22)
    assert error_of(lambda: failover.settle(failover.first, 1)) is None


def test_each_consumer_learns_of_the_loss_up_to_its_last_record(failover: Failover) -> None:
    low, none = failover.consumer(prefetch=3), failover.consumer()
    failover.lag()
    failover.publish("a", 1, 21)
    failover.settle(low, 3)
    failover.settle(failover.first, 10)
    failover.fail_over(30)
    later = failover.consumer()
    assert lost_range(error_of(low.flush)) == (1, 3)
    assert lost_range(error_of(failover.first.flush)) == (1, 13)
    for consumer in (low, failover.first, none, later):
        assert error_of(consumer.flush) is None


def test_records_that_the_application_did_not_receive_are_not_reported(
    failover: Failover,
) -> None:
    failover.lag()
    failover.publish("a", 1, 21)
    # Records 5 to 20 stay in the buffer.
    assert offsets(failover.first.poll(10, 4)) == [1, 2, 3, 4]
    failover.fail_over(30)
    assert lost_range(error_of(failover.first.flush)) == (1, 4)
    records = failover.first.poll(10)
    assert [record.value for record in records] == [b"b%d" % offset for offset in range(1, 31)]


def test_loss_that_the_lease_renewer_finds_is_raised_by_close(failover: Failover) -> None:
    consumer = failover.consumer()
    failover.lag()
    failover.publish("a", 1, 5)
    failover.settle(consumer, 4)
    failover.fail_over(10)
    eventually(lambda: consumer._deliveries._truncated != [], 30)
    assert lost_range(error_of(consumer.close)) == (1, 4)


def test_run_raises_the_loss_and_continues_when_called_again(failover: Failover) -> None:
    consumer, received = failover.first, list[bytes]()
    done = threading.Event()

    def handle(record: meteor.SharedRecord) -> None:
        received.append(record.value)
        if record.value == b"b3":
            consumer.stop()

    def run() -> None:
        with pytest.raises(meteor.LogTruncated) as loss:
            consumer.run(handle)
        assert lost_range(loss.value) == (1, 5)
        consumer.run(handle)
        done.set()

    failover.lag()
    failover.publish("a", 1, 6)
    runner = threading.Thread(target=run)
    runner.start()
    try:
        eventually(lambda: failover.state().acked == 6, 20)
        failover.fail_over(3)
        runner.join(30)
    finally:
        consumer.stop()
        runner.join(10)
    assert done.is_set()
    assert received == [b"a%d" % o for o in range(1, 6)] + [b"b1", b"b2", b"b3"]


def test_loss_is_reported_once_if_the_connection_fails_during_the_check(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([True, True])
    read_epochs = SharedProtocol.read_epochs

    def fail_twice(protocol: SharedProtocol, connection: Any) -> tuple[str, int]:
        found = read_epochs(protocol, connection)
        if next(failures, False):
            raise meteor.ConnectionFailed("The reply was lost.")
        return found

    failover.lag()
    failover.publish("a", 1, 5)
    failover.settle(failover.first, 4)
    monkeypatch.setattr(SharedProtocol, "read_epochs", fail_twice)
    failover.fail_over(2)
    assert lost_range(error_of(lambda: failover.first.poll(0))) == (1, 4)
    records = failover.first.poll(10)
    assert [record.value for record in records] == [b"b1", b"b2"]
    assert not next(failures, False), "the check did not fail"


def test_failover_that_loses_the_group_is_reported_as_a_missing_group(
    private_server: ServerFactory,
) -> None:
    server = private_server(kind="redis" if "redis" in binaries() else "valkey")
    with ExitStack() as stack:
        replicated = ReplicatedStream(stack, server, ordering_key="key")
        replicated.lag()
        failover = Failover(stack, replicated)
        failover.fail_over()
        assert isinstance(error_of(failover.first.flush), meteor.GroupNotFound)


# Settlements


@pytest.mark.parametrize("settle", ["ack", "release", "reject"])
@pytest.mark.parametrize("when", ["before the failover", "after the failover"])
def test_settlement_of_a_lost_record_does_not_settle_the_new_record_at_its_offset(
    failover: Failover, settle: str, when: str
) -> None:
    consumer = failover.first
    failover.lag()
    failover.publish("a", 1, 6)
    records = consumer.poll(10)
    assert len(records) == 5
    failover.proxied.proxy.stall("requests")
    if when == "before the failover":
        for record in records:
            getattr(record, settle)()
    failover.fail_over(5)
    if when == "after the failover":
        for record in records:
            with suppress(meteor.Fenced):  # the lease renewer may have noticed the failover
                getattr(record, settle)()
    assert lost_range(error_of(consumer.flush)) == (1, 5)
    assert error_of(consumer.flush) is None, "the loss was reported twice"
    state = failover.state()
    assert (state.acked, state.dead, state.returned) == (1, 0, 0)
    new = consumer.poll(10)  # records with the offsets of the lost ones
    assert [record.value for record in new] == [b"b%d" % offset for offset in range(1, 6)]
    for record in records:
        with pytest.raises((meteor.Fenced, ValueError)):
            record.ack()
    consumer.flush()
    assert failover.state().acked == 1
    consumer.ack(new)
    consumer.flush()
    assert failover.state().acked == 6


def test_late_ack_of_a_lost_record_does_not_settle_the_record_that_another_consumer_holds(
    failover: Failover,
) -> None:
    failover.lag()
    failover.publish("a", 1, 6)
    records = failover.first.poll(10)
    failover.fail_over(5)
    other = failover.consumer()
    new = other.poll(10)
    assert len(new) == 5
    with suppress(meteor.Fenced):  # the lease renewer may have noticed the failover
        failover.first.ack(records)
    assert lost_range(error_of(failover.first.flush)) == (1, 5)
    assert failover.state().acked == 1
    other.ack(new)
    other.flush()
    assert failover.state().acked == 6


def test_ack_does_not_settle_records_that_a_second_failover_brings_back(
    failover: Failover,
) -> None:
    consumer = failover.first
    link, sibling = failover.add_replica()
    failover.lag()
    failover.publish("a", 1, 6)
    assert len(consumer.poll(10)) == 5  # the sibling replica will know of this delivery
    sibling.wait_in_sync()
    taken = consumer._deliveries.holdings.number
    link.stall()
    failover.fail_over(5)
    assert lost_range(error_of(consumer.flush)) == (1, 5)
    records = consumer.poll(10)
    assert [record.value for record in records] == [b"b%d" % offset for offset in range(1, 6)]
    while consumer._deliveries.holdings.number < taken:
        consumer.flush()
    failover.proxied.proxy.stall("requests")
    consumer.ack(records)
    sibling.promote()
    failover.proxied.server.kill()
    failover.proxied.move_to(sibling)
    assert lost_range(error_of(consumer.flush)) == (1, 5)
    assert failover.state().acked == 1
    records = consumer.poll(10)
    assert [record.value for record in records] == [b"a%d" % offset for offset in range(1, 6)]
    consumer.ack(records)
    consumer.flush()
    assert failover.state().acked == 6
    assert failover.proxied.stream.shared_group(GROUP).fsck() == []


def test_dead_letter_of_a_lost_record_is_not_published_with_the_new_record_at_its_offset(
    failover: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    failover.proxied.client.stream("dead", create=True)
    stream = failover.proxied.through.stream(NAME, create=False)
    consumer = stream.shared_subscriber("other", dead_letter="dead", initial_offset=1)
    failover._stack.callback(discard, consumer)
    failed_over = False

    def fail_over_first(*args: Any, **options: Any) -> str:
        nonlocal failed_over
        if not failed_over:
            failed_over = True
            failover.fail_over(3)
            raise meteor.ConnectionFailed("The server is failing over.")
        return bury(*args, **options)

    monkeypatch.setattr("meteor_py.shared.prefetcher.bury", fail_over_first)
    failover.lag()
    failover.publish("a", 1, 2)
    (record,) = consumer.poll(10)
    record.reject("bad")
    received: list[bytes] = []
    error_of(lambda: received.extend(r.value for r in consumer.poll(0)))
    eventually(lambda: _extend(received, consumer) >= 3, 20)
    assert failed_over
    assert received == [b"b1", b"b2", b"b3"]
    assert list(failover.proxied.client.stream("dead").read()) == []


def _extend(received: list[bytes], consumer: meteor.SharedSubscriber) -> int:
    try:
        received.extend(record.value for record in consumer.poll(0.2))
    except (meteor.ConnectionFailed, meteor.LogTruncated, meteor.Fenced):
        pass
    return len(received)


# The delivered position


def test_loss_is_exact_if_the_new_primary_does_not_know_the_epoch_of_the_records() -> None:
    delivered = DeliveredPosition("i", "1:0,+2:90,+3:100")
    delivered.advance(109)
    assert not delivered.is_valid(4, 300)
    assert delivered.loss("1:0,+2:90,+4:105", 300) == (100, 109)
    assert not delivered.is_valid(4, 300)
    delivered.enter("1:0,+2:90,+4:105", 300)
    assert delivered.is_valid(4, 300)
    assert delivered.loss("1:0,+2:90,+4:105,+5:300", 300) is None


def test_loss_is_noticed_before_a_publisher_begins_the_new_epoch() -> None:
    delivered = DeliveredPosition("i", "1:0")
    delivered.advance(19)
    delivered.advance(12)  # does not move the position back
    assert delivered.is_valid(1, 20)
    assert not delivered.is_valid(1, 19)
    assert delivered.loss("1:0", 10) == (10, 19)
    delivered.enter("1:0", 10)
    assert delivered.is_valid(1, 10)
    assert delivered.loss("1:0,+2:10", 30) is None
