"""Settling batches, errors that say why a record is no longer held, and options of release()."""

from __future__ import annotations

import pytest

import meteor_py as meteor
from meteor_py.shared.record import Standing
from tests.support.sharing import Queue, Steps, drain, expire, offsets


def test_batch_is_acknowledged_in_one_call(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Queue(any_url, "ABAB") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        steps = Steps(monkeypatch, c1)
        c1.ack(record for record in records if record.offset < 3)
        c1.flush()
        assert max(steps.acks) == 3  # one step acknowledged all three
        assert c1.confirmed == 3
        c1.ack([records[3], records[3]])
        c1.ack([])
        c1.flush()
        assert c1.confirmed == 4


def test_application_that_acks_and_polls_sends_both_in_one_step(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(url, settings={"capacity": 100_000}) as queue:
        queue.publish([str(number % 500) for number in range(40_000)], frame=4_000)
        consumer, polls = queue.consumer(prefetch=256), 0
        steps = Steps(monkeypatch, consumer)
        while records := consumer.poll(1):
            consumer.ack(records)
            polls += 1
        assert polls > 150
        # The lease renewer, whose steps request no records, sends acks only if this thread pauses
        # between an ack and the next poll.
        assert steps.wants.count(0) < polls / 10


def test_batch_with_a_settled_record_is_refused_as_a_whole(url: str) -> None:
    with Queue(url, "ABC") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        records[1].ack()
        for settle in (c1.ack, c1.release):
            with pytest.raises(ValueError, match="Record 1 was already settled"):
                settle(records)
        c1.commit()
        assert queue.shared.describe().acked == 3


def test_batch_with_another_consumers_record_is_refused_as_a_whole(url: str) -> None:
    with Queue(url, "AB") as queue:
        c1, c2 = queue.consumers(2, prefetch=1)
        records = [*c1.poll(5), *c2.poll(5)]
        with pytest.raises(ValueError, match="Record 1 belongs to another consumer"):
            c1.ack(records)
        c1.commit()
        c2.commit()
        assert queue.shared.describe().acked == 2


def test_batch_is_released_in_order_with_one_failure_per_key(any_url: str) -> None:
    with Queue(any_url, "ABAB") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        c1.release(reversed(records))
        c1.flush()
        again = c1.poll(5)
        assert [(r.offset, r.failures) for r in again] == [(0, 1), (1, 1), (2, 0), (3, 0)]
        c1.release(again, failed=False)
        c1.flush()
        assert [r.failures for r in c1.poll(5)] == [1, 1, 0, 0]


def test_batch_is_released_even_if_some_records_were_rewound(url: str) -> None:
    with Queue(url, "AAB") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        records[0].release()
        c1.release(records[1:])
        c1.flush()
        assert [(r.offset, r.failures) for r in c1.poll(5)] == [(0, 1), (1, 0), (2, 1)]


def test_ack_of_a_batch_settles_held_records_and_names_the_rest(url: str) -> None:
    with Queue(url, "AABAB") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        records[0].release()
        with pytest.raises(meteor.Rewound, match="1, 3 together with an earlier") as caught:
            c1.ack(records[1:])
        assert caught.value.offsets == (1, 3)
        c1.flush()
        assert offsets(drain(c1)) == [0, 1, 3]
        assert queue.shared.describe().acked == 5


# Errors


def test_release_rewinds_later_records_of_the_key_and_keeps_the_lease(url: str) -> None:
    with Queue(url, "AAB") as queue:
        c1 = queue.consumer()
        first, second, third = c1.poll(5)
        first.release()
        for settle in (second.ack, second.release, second.reject):
            with pytest.raises(
                meteor.Rewound, match="earlier record that has the same ordering key"
            ):
                settle()
        third.ack()
        c1.flush()  # raises nothing
        assert offsets(c1.poll(5)) == [0, 1]


def test_reject_rewinds_later_records_if_it_parks_their_key(url: str) -> None:
    with Queue(url, "AA", on_poison="park") as queue:
        c1 = queue.consumer()
        first, second = c1.poll(5)
        first.reject()
        with pytest.raises(meteor.Rewound):
            second.ack()


def test_settling_after_the_lease_expired_raises_fenced_and_not_rewound(url: str) -> None:
    with Queue(url, "AA") as queue:
        c1 = queue.consumer()
        first, second = c1.poll(5)
        expire(c1)
        queue.consumer().poll(0)
        c1.flush()  # learns that it is fenced
        for settle in (first.ack, lambda: c1.ack([first, second])):
            with pytest.raises(meteor.Fenced, match="silent for longer than lease_ttl") as caught:
                settle()
            assert type(caught.value) is meteor.Fenced


def test_rewound_and_ack_timeout_are_kinds_of_fenced() -> None:
    assert issubclass(meteor.Rewound, meteor.Fenced)
    assert issubclass(meteor.AckTimeout, meteor.Fenced)


# Without a failure


def test_release_with_failed_false_counts_no_failure(any_url: str) -> None:
    with Queue(any_url, "AA", max_deliveries=2) as queue:
        c1 = queue.consumer()
        for _ in range(5):
            first, second = c1.poll(5)
            assert (first.failures, second.failures) == (0, 0)
            first.release(failed=False)
            c1.flush()
        assert offsets(drain(c1)) == [0, 1]


def test_release_without_a_failure_delays_its_key(url: str) -> None:
    with Queue(url, "A") as queue:
        c1 = queue.consumer()
        (record,) = c1.poll(5)
        record.release(3600, failed=False)
        c1.flush()
        assert queue.keys()["A"].state == "delayed"


def test_releasing_only_one_record_without_a_failure_keeps_later_ones_held(any_url: str) -> None:
    with Queue(any_url, "AA", max_deliveries=2) as queue:
        c1 = queue.consumer()
        for _ in range(3):
            first, second = c1.poll(5)
            assert (first.offset, first.failures) == (0, 0)
            first.release(only_this=True, failed=False)
            assert second.standing is Standing.HELD
            second.release(failed=False)
            c1.flush()
        first, second = c1.poll(5)
        first.release(only_this=True, failed=False)
        second.ack()
        assert offsets(c1.poll(5)) == [0]


def test_refused_release_with_only_this_and_failed_false_is_reported(url: str) -> None:
    with Queue(url, "A") as queue:
        c1, c2 = queue.consumers(2)
        (record,) = c1.poll(5)
        expire(c1)
        c2.flush()
        record.release(only_this=True, failed=False)
        with pytest.raises(meteor.Fenced) as refused:
            c1.flush()
        assert refused.value.offsets == (0,)


# Reasons


def test_dead_letter_has_the_reason_from_the_last_release(any_url: str) -> None:
    with Queue(any_url, "A", max_deliveries=2, dead_letter="dead") as queue:
        c1 = queue.consumer()
        for reason in ("first: no", "x" * 5_000 + "\ud800"):
            (record,) = c1.poll(5)
            record.release(reason=reason)
            c1.flush()
        c1.poll(0)
        (letter,) = next(queue.client.stream("dead").read())
        assert letter.headers is not None
        assert letter.headers["meteor-reason"] == b"x" * 1_000


def test_dead_letter_without_a_reason_says_that_it_failed_too_often(url: str) -> None:
    with Queue(url, "AB", max_deliveries=2, dead_letter="dead") as queue:
        c1 = queue.consumer()
        for _ in range(2):
            for record in c1.poll(5):
                record.release(only_this=record.ordering_key == b"B")
            c1.flush()
        c1.poll(0)
        for letter in next(queue.client.stream("dead").read()):
            assert letter.headers is not None
            assert letter.headers["meteor-reason"] == b"It failed max_deliveries times."
