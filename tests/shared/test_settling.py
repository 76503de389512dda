"""Settling records of a shared group: acknowledge, release, reject, commit, roll back."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.shared import holdings, lease_renewer, prefetcher
from meteor_py.subscribe import dead_letters
from tests.support.sharing import (
    GROUP,
    STREAM,
    Queue,
    Steps,
    die,
    drain,
    expire,
    make_due,
    offsets,
)
from tests.support.waiting import eventually


def letters(queue: Queue, name: str = "dead") -> list[meteor.Record]:
    return [record for batch in queue.client.stream(name, create=True).read() for record in batch]


# Acknowledging


def test_acknowledgements_are_sent_in_the_background(any_url: str) -> None:
    with Queue(any_url, "AB") as queue:
        c1 = queue.consumer()
        for record in c1.poll(5):
            record.ack()
        eventually(lambda: queue.shared.confirmed == 2)


def test_acknowledgements_are_sent_with_the_next_poll(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_renewer, "_GATHER_S", 60.0)
    monkeypatch.setattr(lease_renewer, "_HURRY_S", 60.0)
    with Queue(any_url, "AB") as queue:
        c1 = queue.consumer(prefetch=1)
        (first,) = c1.poll(5)
        first.ack()
        assert queue.shared.confirmed == 0
        (second,) = c1.poll(5)
        assert (queue.shared.confirmed, second.offset) == (1, 1)


def test_records_can_be_acknowledged_in_any_order(any_url: str) -> None:
    with Queue(any_url, "AAAA") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        for number in (2, 0, 3):
            records[number].ack()
            c1.flush()
            queue.check()
        assert c1.confirmed == 1
        records[1].ack()
        c1.flush()
        assert c1.confirmed == 4


@pytest.mark.parametrize("first", ["ack", "release", "reject"])
@pytest.mark.parametrize("second", ["ack", "release", "reject"])
@pytest.mark.parametrize("flushed", [False, True])
def test_record_can_be_settled_only_once(url: str, first: str, second: str, flushed: bool) -> None:
    with Queue(url, "A") as queue:
        c1 = queue.consumer()
        (record,) = c1.poll(5)
        getattr(record, first)()
        if flushed:
            c1.flush()
        with pytest.raises(ValueError, match="Record 0 was already settled"):
            getattr(record, second)()


def test_consumer_holds_at_most_max_per_key_records_of_a_key(any_url: str) -> None:
    with Queue(any_url, "AAAAAB", max_per_key=2) as queue:
        c1, c2 = queue.consumers(2)
        records = c1.poll(5)
        assert offsets(records) == [0, 1, 5]
        assert c2.poll(0) == []
        records[0].ack()
        assert offsets(c1.poll(5)) == [2]
        c1.commit()
        assert offsets(c2.poll(5)) == [3, 4]


# Releasing


def test_release_counts_a_failure_for_its_record_only(any_url: str) -> None:
    with Queue(any_url, "AAA") as queue:
        c1 = queue.consumer()
        c1.poll(5)[1].release()
        again = c1.poll(5)
        assert [(record.offset, record.failures) for record in again] == [(1, 1), (2, 0)]
        c1.commit()
        assert c1.confirmed == 3


def test_delayed_key_does_not_delay_other_keys(any_url: str) -> None:
    with Queue(any_url, "AABB") as queue:
        c1, c2 = queue.consumers(2)
        a0, a1, b2, b3 = c1.poll(5)
        a0.release(delay=60.0)
        b2.ack()
        b3.ack()
        queue.publish("AB")
        assert offsets(c2.poll(5)) == [5]
        assert c1.poll(0) == []
        assert (queue.keys()["A"].state, queue.keys()["A"].waiting) == ("delayed", 3)
        assert queue.shared.describe().blocked == 1
        queue.check()
        assert c1.resume("A")
        assert not c1.resume("A")
        assert offsets(c1.poll(5)) == [0, 1, 4]
        with pytest.raises(meteor.Fenced):
            a1.ack()


def test_waiting_consumer_gets_a_key_after_its_delay(any_url: str) -> None:
    with Queue(any_url, "AA") as queue:
        c1, c2 = queue.consumers(2)
        c1.poll(5)[0].release(delay=0.05)
        c1.flush()
        assert offsets(c2.poll(20)) == [0, 1]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ({"delay": -1}, ValueError),
        ({"delay": "1"}, TypeError),
        ({"delay": 1.0, "only_this": True}, ValueError),
    ],
)
def test_release_with_invalid_arguments_leaves_the_record_held(
    any_url: str, how: dict[str, Any], error: type[Exception]
) -> None:
    with Queue(any_url, "A") as queue:
        c1 = queue.consumer()
        (record,) = c1.poll(5)
        with pytest.raises(error):
            record.release(**how)
        record.ack()
        c1.flush()
        assert c1.confirmed == 1


def test_rewound_records_are_not_delivered_from_the_buffer(any_url: str) -> None:
    """The rewound records leave the buffer, so that another consumer can get them in order."""
    with Queue(any_url, "AAAB") as queue:
        c1, c2 = queue.consumers(2)
        (first,) = c1.poll(5, max_records=1)
        first.release()
        c1.flush()
        assert offsets(c2.poll(5)) == [0, 1, 2]
        assert offsets(c1.poll(5)) == [3]


def test_record_released_alone_is_redelivered_in_order(any_url: str) -> None:
    with Queue(any_url, "AAAA") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        records[1].release(only_this=True)
        records[2].release(only_this=True)
        again = c1.poll(5)
        assert [(record.offset, record.failures) for record in again] == [(1, 1), (2, 1)]
        records[0].ack()
        records[3].ack()
        c1.commit()
        assert c1.confirmed == 4


# Dead letters


def test_record_becomes_a_dead_letter_after_max_deliveries_and_later_ones_are_delivered(
    any_url: str,
) -> None:
    with Queue(any_url, "AAB", max_deliveries=3, dead_letter="dead") as queue:
        c1 = queue.consumer()
        for failures in range(3):
            records = c1.poll(5)
            assert (records[0].offset, records[0].failures) == (0, failures)
            for record in records:
                if record.offset == 2:
                    record.ack()
            records[0].release()
        assert offsets(drain(c1)) == [1]
        assert c1.confirmed == 3
        (letter,) = letters(queue)
        assert (letter.value, letter.key) == (b"A", b"A")
        assert letter.headers == {
            dead_letters.STREAM_HEADER: STREAM.encode(),
            dead_letters.GROUP_HEADER: GROUP.encode(),
            dead_letters.OFFSET_HEADER: b"0",
            dead_letters.REASON_HEADER: b"It failed max_deliveries times.",
            dead_letters.TRIES_HEADER: b"3",
        }
        found = queue.shared.describe()
        assert (found.dead, found.acked, found.dead_letters_pending) == (1, 2, 0)


def test_record_is_redelivered_forever_without_a_limit(any_url: str) -> None:
    with Queue(any_url, "A", max_deliveries=0, dead_letter="dead") as queue:
        c1 = queue.consumer()
        for failures in range(20):
            (record,) = c1.poll(5)
            assert record.failures == failures
            record.release()
        assert [record.failures for record in drain(c1)] == [20]


def test_acknowledging_a_record_removes_its_failures(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        c1 = queue.consumer()
        c1.poll(5)[0].release()
        drain(c1)
        c1.flush()
        assert queue.client._connector.call("HLEN", queue.key("failures")) == 0


def test_rejected_record_becomes_a_dead_letter_with_its_reason(any_url: str) -> None:
    with Queue(any_url, dead_letter="dead") as queue:
        with queue.stream.publisher() as pub:
            pub.publish(b"v", key=b"A", headers={"trace": b"42", "meteor-reason": b"an old one"})
            pub.publish(b"w", key=b"A")
        c1 = queue.consumer()
        c1.poll(5, max_records=1)[0].reject("no such customer: \u00e9\ud800")
        assert offsets(drain(c1)) == [1]
        (letter,) = letters(queue)
        assert letter.headers is not None
        assert letter.headers["trace"] == b"42"
        reason = letter.headers[dead_letters.REASON_HEADER].decode()
        assert reason == "no such customer: \u00e9\\ud800"
        assert letter.headers[dead_letters.TRIES_HEADER] == b"1"
        assert letter.timestamp == next(iter(queue.stream.read()))[0].timestamp


def test_long_reason_is_truncated(any_url: str) -> None:
    with Queue(any_url, "A", dead_letter="dead") as queue:
        c1 = queue.consumer()
        c1.poll(5)[0].reject("\u20ac" * 5_000)
        c1.poll(0)
        (letter,) = letters(queue)
        assert letter.headers is not None
        assert len(letter.headers[dead_letters.REASON_HEADER].decode()) == 1024 // 3


def test_rejected_record_without_a_dead_letter_stream_is_counted_and_logged(
    any_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue(any_url, "AA") as queue:
        c1 = queue.consumer()
        c1.poll(5)[0].reject("why")
        c1.flush()
        assert "discarded record 0 of stream 'orders'" in caplog.text
        assert queue.shared.describe().dead == 1
        c1.commit()
        assert c1.confirmed == 2


def test_close_after_reject_publishes_the_dead_letter(any_url: str) -> None:
    with Queue(any_url, "AB", dead_letter="dead") as queue:
        with queue.consumer() as c1:
            first, second = c1.poll(5)
            first.reject("one")
            c1.flush()
            second.reject("two")
        assert [letter.value for letter in letters(queue)] == [b"A", b"B"]
        found = queue.shared.describe()
        assert (found.dead, found.dead_letters_pending, found.confirmed) == (2, 0, 2)


def test_a_dead_consumers_dead_letter_is_published_once_by_another_consumer(
    any_url: str,
) -> None:
    with Queue(any_url, "A", dead_letter="dead") as queue:
        c1, c2 = queue.consumers(2)
        c1.poll(5)[0].reject("why")
        c1.flush()  # the server assigns the dead letter to c1
        die(c1)
        assert queue.shared.describe().dead_letters_pending == 1
        assert (letters(queue), queue.shared.confirmed) == ([], 0)
        queue.check()
        # As if lease_ttl had passed: the server assigns the dead letter to the next consumer.
        make_due(queue.client._connector, queue.shared._protocol, "dying", 0)
        assert c2.poll(0) == []
        c2.flush()
        assert len(letters(queue)) == 1
        make_due(queue.client._connector, queue.shared._protocol, "dying", 0)
        c2.poll(0)
        assert len(letters(queue)) == 1
        assert queue.shared.confirmed == 1


def test_record_that_kills_its_consumers_becomes_one_dead_letter(any_url: str) -> None:
    with Queue(any_url, "ABCAAB", max_deliveries=3, dead_letter="dead") as queue:
        deaths = 0
        while True:  # ends because each death counts as a failure of record 0
            consumer = queue.consumer()
            records = consumer.poll(0) or consumer.poll(0)
            if not any(record.offset == 0 for record in records):
                break
            if records[0].failures == 2:
                assert offsets(records) == [0]  # the last try is granted alone
            die(consumer)
            deaths += 1
        assert deaths == 3
        for record in records:
            record.ack()
        assert sorted(offsets([*records, *drain(consumer, 0.5)])) == [1, 2, 3, 4, 5]
        eventually(lambda: queue.shared.confirmed == 6)
        (letter,) = letters(queue)
        assert letter.headers is not None
        assert letter.headers[dead_letters.OFFSET_HEADER] == b"0"
        assert letter.headers[dead_letters.REASON_HEADER] == b"Its consumer died."
        assert letter.headers[dead_letters.TRIES_HEADER] == b"3"


@pytest.mark.parametrize("dead_letter", ["dead", None])
def test_poisoned_key_is_parked_until_resumed(any_url: str, dead_letter: str | None) -> None:
    with Queue(any_url, "AABA", on_poison="park", dead_letter=dead_letter) as queue:
        c1, c2 = queue.consumers(2)
        a0, a1, b2, a3 = c1.poll(5)
        a0.reject("poison")
        b2.ack()
        for later in (a1, a3):
            with pytest.raises(meteor.Fenced):
                later.ack()
        queue.publish("AB")
        assert offsets(c1.poll(5)) == [5]
        assert c2.poll(0) == []
        state = queue.keys()["A"]
        # Without a dead-letter stream, record 0 keeps its place.
        expected = [1, 3, 4] if dead_letter else [0, 1, 3, 4]
        assert (state.state, state.waiting, state.oldest) == ("parked", len(expected), expected[0])
        queue.check()
        assert queue.shared.resume("A")
        again = c2.poll(5)
        assert offsets(again) == expected
        assert again[0].failures == 0  # resume() resets its failures
        assert len(letters(queue)) == (1 if dead_letter else 0)
        c1.commit()
        c2.commit()
        c1.poll(0)
        c1.flush()
        assert queue.shared.confirmed == 6


def test_delayed_key_that_is_parked_is_no_longer_delayed(any_url: str) -> None:
    with Queue(any_url, "AA", on_poison="park", dead_letter=None) as queue:
        c1 = queue.consumer()
        a0, a1 = c1.poll(5)
        a1.release(delay=600)
        c1.flush()
        a0.reject("poison")
        c1.flush()
        assert queue.keys()["A"].state == "parked"
        queue.check()
        assert queue.shared.resume("A")
        assert offsets(c1.poll(5)) == [0, 1]


def test_parked_key_without_records_stays_parked(any_url: str) -> None:
    with Queue(any_url, "A", on_poison="park", dead_letter="dead") as queue:
        c1 = queue.consumer()
        c1.poll(5)[0].reject()
        assert c1.poll(0) == []
        queue.publish("A")
        (state,) = c1.keys(look_ahead=True)  # no consumer has scanned the record yet
        assert (state.state, state.waiting, state.oldest) == ("parked", 1, 1)
        assert c1.poll(0) == []
        assert queue.keys()["A"].state == "parked"
        assert c1.resume(b"A")
        assert offsets(c1.poll(5)) == [1]


def test_waiting_records_of_a_parked_key_can_be_purged(any_url: str) -> None:
    with Queue(any_url, "AAA", on_poison="park", dead_letter="dead") as queue:
        c1 = queue.consumer()
        c1.poll(5)[0].reject()
        c1.poll(0)
        assert c1.purge("A") == 2
        queue.check()
        c1.flush()  # tells the server that the dead letter was published
        assert c1.confirmed == 3
        assert [state.state for state in c1.keys()] == ["parked"]
        assert c1.resume("A")
        queue.publish("A")
        assert offsets(c1.poll(5)) == [3]


def test_resuming_an_active_key_does_nothing(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        c1 = queue.consumer()
        assert not c1.resume("A")
        c1.poll(5)
        assert not c1.resume("A")
        assert not c1.resume("never seen")


# Commit and rollback


def test_commit_acknowledges_delivered_records_only(any_url: str) -> None:
    with Queue(any_url, "ABCD") as queue:
        c1 = queue.consumer()
        first, _ = c1.poll(5, max_records=2)
        first.release()
        c1.commit()
        assert queue.shared.describe().acked == 1
        assert sorted(offsets(c1.poll(5)) + offsets(c1.poll(5))) == [0, 2, 3]


def test_rollback_returns_delivered_records_in_order(any_url: str) -> None:
    with Queue(any_url, "ABAB") as queue:
        c1 = queue.consumer()
        records = c1.poll(5)
        records[0].ack()
        c1.rollback()
        again = c1.poll(5)
        assert [(r.offset, r.failures) for r in again] == [(1, 1), (2, 1), (3, 0)]
        c1.commit()
        assert c1.confirmed == 4


def test_more_records_than_prefetch_can_be_acked_before_a_flush(any_url: str) -> None:
    """In Qpid's stress program, the acknowledgement window can exceed the prefetch window."""
    with Queue(any_url, "ABCDEF") as queue:
        c1 = queue.consumer(prefetch=1)
        found: list[meteor.SharedRecord] = []
        for _ in range(6):
            (record,) = c1.poll(5)
            record.ack()
            found.append(record)
        c1.flush()
        assert (offsets(found), c1.confirmed) == ([0, 1, 2, 3, 4, 5], 6)


# Late settlements


def test_late_settlement_is_refused_and_changes_nothing(any_url: str) -> None:
    with Queue(any_url, "AAA") as queue:
        c1, c2 = queue.consumers(2)
        records = c1.poll(5)
        expire(c1)
        assert offsets(c2.poll(5)) == [0]  # a dead consumer's records are granted one by one
        records[0].ack()  # c1 has not noticed yet
        records[1].release(only_this=True)
        records[2].reject("bad")
        with pytest.raises(meteor.Fenced) as refused:
            c1.flush()
        assert refused.value.offsets == (0, 1, 2)
        found = queue.shared.describe()
        assert (found.acked, found.dead, found.confirmed, found.reaped) == (0, 0, 0, 1)
        c1.flush()  # Fenced is raised only once
        c2.commit()
        assert offsets(drain(c2)) == [1, 2]
        assert queue.shared.confirmed == 3


def test_expired_consumer_is_fenced_by_its_next_poll_and_continues(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        c1, c2 = queue.consumers(2)
        (record,) = c1.poll(5)
        expire(c1)
        assert offsets(c2.poll(5)) == [0]
        record.ack()
        with pytest.raises(meteor.Fenced):
            c1.poll(0)
        queue.publish("B")
        assert offsets(c1.poll(5)) == [1]
        names = {consumer.name for consumer in queue.shared.describe().consumers}
        assert names == {c1.member, c2.member}


def test_expired_consumer_that_was_not_reaped_continues(any_url: str) -> None:
    with Queue(any_url, "A") as queue:
        c1 = queue.consumer()
        (record,) = c1.poll(5)
        expire(c1)
        record.ack()
        c1.flush()
        assert c1.confirmed == 1


def test_expired_consumer_does_not_deliver_buffered_records(any_url: str) -> None:
    with Queue(any_url, "ABC") as queue:
        c1, c2 = queue.consumers(2)
        assert offsets(c1.poll(5, max_records=1)) == [0]  # 1 and 2 are buffered
        expire(c1)
        assert offsets(c2.poll(5)) == [0, 1, 2]
        c1.flush()
        assert c1.poll(0) == []


# Step size


def test_settlements_are_sent_in_parts_with_acknowledgements_first(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "_ACKS_MAX", 8)
    monkeypatch.setattr(holdings, "_OTHERS_MAX", 3)
    monkeypatch.setattr(prefetcher, "_CLAIM_MAX", 5)  # a claim gets a batch of up to 5
    with Queue(url, "ABCDEABCDE" + "FFFF", lease_ttl=60.0) as queue:
        consumer = queue.consumer()
        records = consumer.poll(5)
        steps = Steps(monkeypatch, consumer)
        with consumer._deliveries.condition:  # so that the lease renewer sends nothing in between
            records[13].ack()
            records[12].release()  # rewinds no record, because record 13 is settled
            for record in records[:5]:
                record.reject("no")
            for record in records[5:10]:
                record.ack()
            consumer.flush()
        assert steps.acks == [1, 5, 0]  # a part of a batch, then a whole batch
        assert steps.others == [0, 3, 3]
        state = queue.shared.describe()
        assert (state.acked, state.dead) == (6, 5)
        assert offsets(consumer.poll(5)) == [12]


def test_only_the_last_part_claims_records(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "_ACKS_MAX", 2)
    monkeypatch.setattr(prefetcher, "_CLAIM_MAX", 2)
    with Queue(url, "ABCDEFGH") as queue:
        consumer = queue.consumer(prefetch=5)
        records = consumer.poll(5)
        steps = Steps(monkeypatch, consumer)
        with consumer._deliveries.condition:
            for record in records:
                record.ack()
            assert offsets(consumer.poll(5)) == [5, 6, 7]
        assert steps.wants[:3] == [0, 0, 2]


def test_large_claims_are_made_in_parts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetcher, "_CLAIM_MAX", 4)
    with Queue(url, "AB" * 10) as queue:
        consumer = queue.consumer(prefetch=10)
        steps = Steps(monkeypatch, consumer)
        assert offsets(consumer.poll(5)) == [*range(10)]
        assert steps.wants == [4, 4, 2]
