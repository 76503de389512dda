"""Leases and clocks in shared groups, and what an expired consumer learns about its last step."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import ConnectionFailed
from meteor_py.shared.protocol import StepReply, StepRequest
from tests.support.readers import blocked
from tests.support.sharing import Queue, Runner, change_progress, expire, offsets
from tests.support.waiting import eventually


def lose_next_reply(
    monkeypatch: pytest.MonkeyPatch, consumer: meteor.SharedSubscriber, *, request: bool = False
) -> None:
    """Lose the reply to the consumer's next step or, with ``request``, the step itself."""
    protocol = consumer._deliveries.protocol
    real = protocol.step
    left = [True]

    def step(connection: Any, id: str, asked: StepRequest) -> StepReply:
        if not left:
            return real(connection, id, asked)
        left.clear()
        if not request:
            real(connection, id, asked)
        raise ConnectionFailed("Cut.")

    monkeypatch.setattr(protocol, "step", step)


def cut_off(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, *, request: bool
) -> tuple[meteor.SharedSubscriber, meteor.SharedSubscriber]:
    """Return a consumer whose lease expired while its ack was in doubt, and one that reaped it."""
    late, other = queue.consumers(2)
    late._lease_renewer.stop()
    late._lease_renewer.join(20)
    (record,) = late.poll(5)
    record.ack()
    lose_next_reply(monkeypatch, late, request=request)
    with pytest.raises(ConnectionFailed):
        late.flush()
    expire(late)
    other.flush()
    assert queue.shared.describe().reaped == 1
    return late, other


def forget(queue: Queue, consumer: meteor.SharedSubscriber) -> None:
    """Make the server forget a consumer, as it does ten lease TTLs after the lease expired."""
    queue.client._connector.call("HDEL", queue.key("members"), consumer._deliveries.consumer)
    queue.client._connector.call("ZREM", queue.key("leases"), consumer._deliveries.consumer)


def test_ack_that_took_effect_is_not_reported_as_refused_after_the_lease_expired(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(any_url, "A") as queue:
        late, other = cut_off(queue, monkeypatch, request=False)
        late.flush()  # raises nothing: the server reports that it executed the last step
        assert queue.shared.describe().acked == 1
        assert other.poll(0) == []


def test_ack_that_had_no_effect_is_reported_as_refused_after_the_lease_expired(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(any_url, "A") as queue:
        late, other = cut_off(queue, monkeypatch, request=True)
        with pytest.raises(meteor.Fenced) as fenced:
            late.flush()
        assert fenced.value.offsets == (0,)
        assert queue.shared.describe().acked == 0
        assert offsets(other.poll(5)) == [0]


def test_ack_in_doubt_is_reported_as_unknown_if_the_server_forgot_the_consumer(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(any_url, "A") as queue:
        late, _ = cut_off(queue, monkeypatch, request=False)
        forget(queue, late)
        with pytest.raises(meteor.OutcomeUnknown):
            late.flush()


def test_run_continues_after_an_ack_in_doubt(
    any_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue(any_url, "A") as queue:
        consumer = queue.consumer()
        protocol = consumer._deliveries.protocol
        real = protocol.step
        lost: list[StepReply] = []

        def step(connection: Any, id: str, asked: StepRequest) -> StepReply:
            reply = real(connection, id, asked)
            if lost or not (asked.acks or asked.settlements):
                return reply
            lost.append(reply)
            forget(queue, consumer)
            raise ConnectionFailed("Cut.")

        monkeypatch.setattr(protocol, "step", step)
        seen: list[int] = []
        with Runner(consumer, lambda record: seen.append(record.offset)) as runner:
            eventually(lambda: "these settlements took effect" in caplog.text, 20)
            queue.publish("B")
            eventually(lambda: 1 in seen, 20)
        assert runner.error is None


def test_run_only_logs_that_its_last_ack_was_refused(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue(url, "A") as queue:
        late, other = queue.consumers(2)
        late._lease_renewer.stop()
        late._lease_renewer.join(20)

        def handle(record: meteor.SharedRecord) -> None:
            # While run() waits for records, it sends no acks. It sends this one when it ends.
            blocked(queue.client.redis)
            expire(late)
            other.flush()
            record.ack()
            late.stop()

        late.run(handle)
        assert "no longer holds record 0" in caplog.text


def test_expired_consumer_is_forgotten_after_ten_lease_ttls(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        late, other = queue.consumers(2)
        expire(late)
        other.flush()
        members = ("HLEN", queue.key("members"))
        assert queue.client._connector.call(*members) == 2, (
            "the expired consumer was forgotten before it learned its last step's outcome"
        )
        protocol = other._shared._protocol
        for _ in range(25):  # each call ages the leases by at most half a TTL
            change_progress(queue.client._connector, protocol, last=-120_000)
            other.flush()
        assert queue.client._connector.call(*members) == 1


def test_consumers_that_come_and_go_do_not_prolong_a_dead_consumers_lease(any_url: str) -> None:
    with Queue(any_url, "A", lease_ttl=60.0) as queue:
        dead = queue.consumer()
        assert offsets(dead.poll(5)) == [0]
        dead._lease_renewer.stop()  # from now on, the consumer sends nothing
        dead._lease_renewer.join(20)
        found: list[int] = []
        visits = 0
        while not found and visits < 5:
            visits += 1
            change_progress(queue.client._connector, queue.shared._protocol, last=-50_000)
            with queue.stream.shared_subscriber("billing") as job:
                found += offsets(job.poll(0))
        assert (found, visits) == ([0], 3), "a visit did not age the lease by half its duration"


@pytest.mark.parametrize("hour", [-1, 1])
def test_delay_is_not_prolonged_when_the_clock_jumps(any_url: str, hour: int) -> None:
    with Queue(any_url, "A") as queue:
        consumer = queue.consumer()
        consumer.poll(5)[0].release(delay=0.3)
        consumer.flush()
        # Make it look as if the server's clock had moved by an hour since the last call.
        change_progress(queue.client._connector, queue.shared._protocol, last=-hour * 3_600_000)
        eventually(lambda: offsets(consumer.poll(0.2)) == [0], 10)
        consumer.commit()
        assert queue.shared.describe().reaped == 0
