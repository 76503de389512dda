"""State transitions of ``Holdings``, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from meteor_py.shared import holdings
from meteor_py.shared.holdings import Holdings
from meteor_py.shared.protocol import Settlement, StepReply, StepReport, StepRequest
from meteor_py.shared.record import Standing


@dataclass(eq=False)
class Fake:
    """The parts of a SharedRecord that Holdings uses."""

    offset: int
    ordering_key: bytes
    standing: Standing = Standing.HELD


def fake(offset: int, key: bytes) -> Any:
    return Fake(offset, key)


def report(failures: dict[int, int] | None = None, refused: list[int] | None = None) -> StepReport:
    return StepReport(failures or {}, refused or [], [], [])


def reply(batches: dict[int, list[int]], failures: dict[int, int] | None = None) -> StepReply:
    return StepReply(
        next=0,
        end=0,
        batches=batches,
        report=report(failures),
        stored_stop=0,
        maintenance_due=False,
        idle=False,
        watches=False,
        wait_s=None,
        epoch=0,
        large=(0, 0),
    )


def step(held: Holdings, *granted: int, batch: int = 1) -> StepRequest:
    """Execute a step that grants these offsets in one batch."""
    request, _ = held.begin_step(len(granted))
    held.apply(reply({batch: list(granted)} if granted else {}), held.request)
    held.end_step()
    return request


def receive(held: Holdings, keys: str, first: int = 0, batch: int = 1) -> list[Any]:
    """Grant and receive one record per letter, with that letter as its ordering key."""
    records = [fake(first + number, key.encode()) for number, key in enumerate(keys)]
    step(held, *(record.offset for record in records), batch=batch)
    held.receive(records)
    return records


def settle(held: Holdings, record: Any, kind: str, *, alone: bool = False) -> None:
    held.settle(record, kind, b"", alone=alone)


def ack(held: Holdings, *records: Any) -> None:
    held.ack(records)


@pytest.fixture
def held() -> Holdings:
    return Holdings(reject_rewinds=False)


# Granted, fetched, settled


def test_granted_records_count_before_and_after_they_are_fetched(held: Holdings) -> None:
    step(held, 3, 4)
    assert (len(held), list(held.granted)) == (2, [3, 4])
    assert held.receive([fake(3, b"A")])
    assert (len(held), list(held.granted)) == (2, [4])


def test_record_that_was_not_granted_is_not_received(held: Holdings) -> None:
    step(held, 3)
    assert held.receive([fake(7, b"A")]) == []


def test_whole_batch_is_acknowledged_by_its_number(held: Holdings) -> None:
    records = receive(held, "ABC")
    ack(held, *records)
    assert held.unsent
    request = step(held)
    assert (request.acks, request.settlements) == ((1,), ())
    assert (held.unsent, len(held)) == (False, 0)


def test_part_of_a_batch_is_acknowledged_by_its_offsets(held: Holdings) -> None:
    records = receive(held, "ABC")
    ack(held, records[1])
    assert step(held).settlements == (Settlement("A", 1, (1,)),)
    ack(held, records[0], records[2])
    assert step(held).acks == (1,), "the rest of the batch was not acked as a whole"


@pytest.mark.parametrize(
    ("kind", "alone", "parks", "rewinds"),
    [
        *(("R", False, False, True), ("U", False, False, True)),
        *(("R", True, False, False), ("U", True, False, False)),
        *(("X", False, False, False), ("X", False, True, True)),
    ],
)
def test_only_a_rewind_returns_later_records_of_the_key(
    kind: str, alone: bool, parks: bool, rewinds: bool
) -> None:
    held = Holdings(reject_rewinds=parks)
    records = receive(held, "ABAA")
    settle(held, records[2], kind, alone=alone)
    expected = Standing.REWOUND if rewinds else Standing.HELD
    assert [r.standing for r in records] == [
        *(Standing.HELD, Standing.HELD, Standing.SETTLED, expected)
    ]
    returned = [one for one in step(held).settlements if not one.asked_for]
    assert [one.offsets for one in returned] == ([(3,)] if rewinds else [])


def test_rewind_also_returns_records_received_after_an_earlier_rewind(held: Holdings) -> None:
    records = receive(held, "AAB")
    settle(held, records[1], "R")
    ack(held, records[0])
    step(held)
    more = receive(held, "BABA", first=3, batch=2)
    settle(held, records[2], "R")
    settle(held, more[1], "R")
    assert [r.standing for r in more] == [
        *(Standing.REWOUND, Standing.SETTLED, Standing.REWOUND, Standing.REWOUND)
    ]


# A signal handler may run at any moment, and use the subscriber.


def test_record_is_not_held_if_a_handler_closes_the_subscriber_as_it_arrives(
    held: Holdings,
) -> None:
    class Granted(dict[int, int]):
        def pop(self, *args: Any) -> Any:
            found = super().pop(*args)
            held.take_all()
            return found

    step(held, 0)
    held.granted = Granted(held.granted)
    assert [r.standing for r in held.receive([fake(0, b"A")])] == [Standing.TAKEN]
    assert list(held.held()) == []


def test_rewind_by_a_handler_returns_records_that_are_being_received(held: Holdings) -> None:
    records = receive(held, "AAB")
    settle(held, records[2], "R")  # builds the index by ordering key
    more = [fake(3, b"A"), fake(4, b"A")]
    step(held, 3, 4, batch=2)

    def arriving() -> Iterator[Any]:
        yield more[0]
        settle(held, records[0], "R")
        yield more[1]

    received = held.receive(arriving())
    assert [r.standing for r in (records[1], more[0])] == [Standing.REWOUND] * 2
    assert received == [more[0]], "receive() returned a record that arrived after the rewind"


def test_rewind_leaves_out_a_record_that_a_handler_acks_at_the_same_time(held: Holdings) -> None:
    class Held(dict[int, Any]):
        def values(self) -> Any:
            found = list(super().values())
            if records[1].standing is Standing.HELD:
                held.ack([records[1]])
            return found

    records = receive(held, "AAA")
    held._held = Held(held._held)
    settle(held, records[0], "R")
    assert [r.standing for r in records] == [
        *(Standing.SETTLED, Standing.SETTLED, Standing.REWOUND)
    ]


@pytest.mark.parametrize("sent", [False, True])
def test_record_fetched_after_its_key_was_rewound_is_returned(held: Holdings, sent: bool) -> None:
    (first,) = receive(held, "A")
    step(held, 1, 2, batch=2)
    settle(held, first, "R")
    if sent:
        step(held)
    assert [r.offset for r in held.receive([fake(1, b"A"), fake(2, b"B")])] == [2]
    assert Settlement("U", 2, (1,), asked_for=False) in step(held).settlements


def test_record_granted_while_its_key_is_rewound_is_returned(held: Holdings) -> None:
    (first,) = receive(held, "A")
    held.begin_step(5)
    settle(held, first, "R")  # while the step is in flight
    held.apply(reply({2: [1]}), held.request)
    held.end_step()
    assert held.receive([fake(1, b"A")]) == []


def test_record_granted_after_a_rewind_was_sent_is_held(held: Holdings) -> None:
    (first,) = receive(held, "A")
    settle(held, first, "R")
    held.begin_step(5)
    held.apply(reply({2: [0, 1]}, {0: 1}), held.request)
    held.end_step()
    assert held.granted == {0: 1, 1: 0}
    assert [r.offset for r in held.receive([fake(0, b"A"), fake(1, b"A")])] == [0, 1]


# Steps


def test_large_step_is_sent_in_parts_with_acknowledgements_first(
    held: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "_ACKS_MAX", 3)
    monkeypatch.setattr(holdings, "_OTHERS_MAX", 1)
    one, two = receive(held, "AB"), receive(held, "CD", 2, batch=2)
    settle(held, one[0], "R", alone=True)
    ack(held, one[1], *two)
    sent = [held.begin_step(7)]
    held.apply(reply({}), held.request)
    held.end_step()
    sent.append(held.begin_step(7))
    assert [(request.acks, len(request.settlements), last) for request, last in sent] == [
        ((), 1, False),
        ((2,), 1, True),
    ]
    assert [request.want for request, _ in sent] == [0, 7]


def test_withdrawn_step_is_sent_again_before_the_rest(held: Holdings) -> None:
    records = receive(held, "ABCD")
    ack(held, records[0])
    settle(held, records[1], "X")
    held.begin_step(0)
    settle(held, records[2], "X")
    held.withdraw_step()
    request, _ = held.begin_step(0)
    assert [(one.kind, one.offsets) for one in request.settlements] == [
        *(("A", (0,)), ("X", (1,)), ("X", (2,)))
    ]


def test_step_whose_reply_is_lost_is_sent_again_unchanged(held: Holdings) -> None:
    records = receive(held, "AB")
    ack(held, records[0])
    request, _ = held.begin_step(3)
    ack(held, records[1])
    assert held.begin_step(9) == (request, False)
    held.apply(reply({}), held.request)
    held.end_step()
    assert held.begin_step(9)[0].number == request.number + 1


def test_reply_can_be_applied_twice(held: Holdings) -> None:
    ack(held, *receive(held, "A"))
    held.begin_step(2)
    held.apply(reply({2: [5]}), held.request)
    held.receive([fake(5, b"B")])
    # If a Ctrl-C interrupts the application here, the consumer sends the step again.
    held.apply(reply({2: [5]}), held.request)
    held.end_step()
    assert (len(held), held.granted) == (1, {})


# Replies from the server


def test_records_whose_grant_a_failover_lost_are_no_longer_held(held: Holdings) -> None:
    records = receive(held, "ABC")
    ack(held, records[2])
    assert held.reconcile(7, {1: [0]}) == [2]
    assert held.number == 7
    assert [r.standing for r in records[:2]] == [Standing.HELD, Standing.TAKEN]


def test_records_whose_settlement_a_failover_lost_are_granted_again(held: Holdings) -> None:
    ack(held, *receive(held, "AB"))
    step(held)
    assert held.reconcile(1, {1: [0, 1]}) == []
    assert held.granted == {0: 0, 1: 0}


def test_first_step_after_a_failover_skips_step_numbers(held: Holdings) -> None:
    held.reconcile(7, {})
    request, _ = held.begin_step(0)
    assert request.number == 8 + request.skipped > 8
    held.withdraw_step()  # the server did not execute it, so the next step skips the same numbers
    assert held.begin_step(0)[0].skipped == request.skipped
    held.end_step()
    assert held.begin_step(0)[0] == StepRequest(request.number + 1)


@pytest.mark.parametrize(
    ("step_known", "void", "unknown"), [(2, [1], []), (1, [0, 1], []), (-1, [1], [0])]
)
def test_expired_lease_voids_only_settlements_that_certainly_had_no_effect(
    held: Holdings, step_known: int, void: list[int], unknown: list[int]
) -> None:
    records = receive(held, "AB")
    ack(held, records[0])
    held.begin_step(0)  # step 2, whose reply is lost
    ack(held, records[1])
    assert held.fence(step_known, report()) == (void, unknown)
    assert len(held) == 0
    assert not held.unsent


def test_expired_lease_reports_settlements_that_its_last_step_refused(held: Holdings) -> None:
    ack(held, *receive(held, "AB"))
    held.begin_step(0)
    assert held.fence(2, report(refused=[1])) == ([1], [])


# Dead letters and lost records


def test_dead_letters_from_another_history_are_not_settled(held: Holdings) -> None:
    held.add(Settlement("D", 0, (1,), b"old"))
    held.add(Settlement("D", 0, (2,), b"new"))
    held.add(Settlement("D", 0, (3,), b""))
    held.keep_letters(b"new")
    assert [one.offsets for one in held.begin_step(0)[0].settlements] == [(2,), (3,)]


def test_lost_record_is_settled_as_gone_once(held: Holdings) -> None:
    step(held, 3, 4)
    assert held.lose(3)
    assert not held.lose(3)
    assert step(held).settlements == (Settlement("G", 1, (3,)),)
    assert len(held) == 1
