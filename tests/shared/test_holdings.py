"""Every transition of ``Holdings``, without a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from meteor_py.shared import holdings
from meteor_py.shared.holdings import Holdings, Sync
from meteor_py.shared.protocol import ConsumerState, Settlement, StepReply
from meteor_py.shared.record import Standing


@dataclass(eq=False)
class Fake:
    """The parts of a SharedRecord that Holdings uses."""

    offset: int
    ordering_key: bytes
    standing: Standing = Standing.HELD


def fake(offset: int, key: bytes) -> Any:
    return Fake(offset, key)


def reply(*granted: int, failures: dict[int, int] | None = None) -> StepReply:
    return StepReply(
        next=0,
        end=0,
        waiting=0,
        bell=0,
        wait_s=None,
        granted=list(granted),
        failures=failures or {},
        stored_stop=0,
        refused=[],
        lost=[],
        dropped=[],
        dead_letters=[],
        epoch=0,
    )


def step(held: Holdings, *granted: int) -> None:
    """Execute a step that grants these offsets."""
    held.begin_step()
    held.apply(reply(*granted))
    held.end_step()


def receive(held: Holdings, keys: str, first: int = 0) -> list[Any]:
    """Grant and receive a record for each letter, which is its ordering key."""
    records = [fake(first + number, key.encode()) for number, key in enumerate(keys)]
    step(held, *(record.offset for record in records))
    held.receive(records)
    return records


def settle(held: Holdings, record: Any, kind: str) -> None:
    held.settle(record, kind, b"")


def ack(held: Holdings, *records: Any) -> None:
    for record in records:
        held.settle(record, "A", b"")


@pytest.fixture
def held() -> Holdings:
    return Holdings(reject_rewinds=False)


# Granted, fetched, settled


def test_granted_records_count_before_and_after_they_are_fetched(held: Holdings) -> None:
    step(held, 3, 4)
    assert (len(held), held.granted) == (2, {3: 0, 4: 0})
    three = fake(3, b"A")
    assert held.receive([three]) == [three]
    assert (len(held), held.granted) == (2, {4: 0})


def test_record_that_was_not_granted_is_not_received(held: Holdings) -> None:
    assert held.receive([fake(3, b"A")]) == []
    assert len(held) == 0


def test_acknowledgement_is_sent_with_the_next_step(held: Holdings) -> None:
    a, b = receive(held, "AB")
    assert not held.unsent
    ack(held, b, a)
    assert (a.standing, len(held), held.unsent) == (Standing.SETTLED, 0, True)
    assert held.begin_step()
    assert held.sent == ({b"A": [0], b"B": [1]}, [])
    held.apply(reply())
    held.end_step()
    assert (held.unsent, held.sync, held.number) == (False, Sync.AGREED, 2)


@pytest.mark.parametrize(
    ("kind", "parks", "rewinds"),
    [("R", 0, 1), ("U", 0, 1), ("Q", 0, 0), ("X", 0, 0), ("X", 1, 1), ("Q", 1, 0)],
)
def test_rewind_returns_later_records_of_the_key(kind: str, parks: bool, rewinds: bool) -> None:
    held = Holdings(reject_rewinds=bool(parks))
    before, middle, other, after = receive(held, "AABA")
    settle(held, middle, kind)
    assert middle.standing is Standing.SETTLED
    assert (before.standing, other.standing) == (Standing.HELD, Standing.HELD)
    assert after.standing is (Standing.REWOUND if rewinds else Standing.HELD)
    held.begin_step()
    assert held.sent.others == [Settlement(kind, b"A", 1)]


@pytest.mark.parametrize("sent", [False, True])
def test_record_fetched_after_a_rewind_of_its_key_is_not_held(held: Holdings, sent: bool) -> None:
    (first,) = receive(held, "A")
    step(held, 1, 2)
    settle(held, first, "R")
    if sent:
        held.begin_step()
    behind, other = fake(1, b"A"), fake(2, b"B")
    assert held.receive([behind, other]) == [other]
    assert held.granted == {}


# Steps


def test_step_sends_a_part_and_acknowledgements_first(
    held: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "_ACKS_MAX", 2)
    monkeypatch.setattr(holdings, "_OTHERS_MAX", 1)
    records = receive(held, "AAABCD")
    ack(held, *records[:4])
    settle(held, records[4], "Q")
    settle(held, records[5], "Q")
    said = []
    last = False
    while not last:
        last = held.begin_step()
        said.append((held.sent.acks, [other.offset for other in held.sent.others]))
        held.apply(reply())
        held.end_step()
    assert said == [
        ({b"A": [0, 1]}, []),
        ({b"A": [2], b"B": [3]}, [4]),
        ({}, [5]),
    ]


def test_withdrawn_step_is_sent_again_before_the_rest(held: Holdings) -> None:
    a, b, c, d = receive(held, "AABC")
    ack(held, a)
    settle(held, c, "Q")
    held.begin_step()
    assert held.sync is Sync.IN_DOUBT
    ack(held, b)
    settle(held, d, "Q")
    held.withdraw_step()
    assert (held.sync, held.unsent) == (Sync.AGREED, True)
    held.begin_step()
    assert held.sent.acks == {b"A": [0, 1]}
    assert [other.offset for other in held.sent.others] == [2, 3]


def test_records_are_received_while_a_step_is_in_flight(held: Holdings) -> None:
    step(held, 0)
    held.begin_step()
    assert (held.sync, held.unsure) == (Sync.IN_DOUBT, False)
    assert len(held.receive([fake(0, b"A")])) == 1


def test_rewind_makes_unfetched_records_stale_until_reconciled(held: Holdings) -> None:
    (first,) = receive(held, "A")
    step(held, 1)
    settle(held, first, "R")
    step(held)
    assert (held.sync, held.unsure) == (Sync.STALE, True)
    assert held.receive([fake(1, b"A")]) == []
    assert not held.lose(1)
    held.reconcile(ConsumerState(held.number, {b"B": [2]}, {2: 4}))
    assert (held.sync, held.granted) == (Sync.AGREED, {2: 4})


# After a lost reply


def test_step_that_the_server_executed_is_not_sent_again(held: Holdings) -> None:
    a, b = receive(held, "AB")
    ack(held, a)
    held.begin_step()
    held.reconcile(ConsumerState(held.number + 1, {b"B": [1], b"C": [7]}, {7: 2}))
    assert (held.sync, held.unsent, held.number) == (Sync.AGREED, False, 2)
    assert (b.standing, held.granted) == (Standing.HELD, {7: 2})


def test_step_that_the_server_did_not_execute_is_sent_again(held: Holdings) -> None:
    a, b = receive(held, "AB")
    ack(held, a)
    held.begin_step()
    held.reconcile(ConsumerState(held.number, {b"A": [0], b"B": [1]}, {}))
    assert (held.unsent, held.granted, b.standing) == (True, {}, Standing.HELD)
    held.begin_step()
    assert held.sent.acks == {b"A": [0]}


def test_records_that_the_server_took_back_are_not_held(held: Holdings) -> None:
    a, b = receive(held, "AB")
    step(held, 5)
    held.reconcile(ConsumerState(held.number, {b"B": [1]}, {}))
    assert (a.standing, b.standing, held.granted) == (Standing.TAKEN, Standing.HELD, {})


def test_unsent_rewind_keeps_later_records_from_being_granted(held: Holdings) -> None:
    first, behind = receive(held, "AA")
    settle(held, first, "R")
    held.reconcile(ConsumerState(held.number, {b"A": [0, 1]}, {}))
    assert (held.granted, behind.standing) == ({}, Standing.REWOUND)


def test_expired_lease_drops_all_records_and_voids_settlements(
    held: Holdings,
) -> None:
    a, b, c, d = receive(held, "ABCD")
    ack(held, a)
    held.begin_step()
    settle(held, b, "X")
    ack(held, c)
    held.add(Settlement("D", b"", 99))
    assert sorted(held.void_settlements()) == [0, 1, 2]
    held.fence()
    assert (d.standing, len(held), held.unsent) == (Standing.TAKEN, 0, False)
    held.start(0)
    assert (held.number, held.sync) == (0, Sync.AGREED)


# Dead letters


def test_dead_letters_of_another_history_are_not_settled(held: Holdings) -> None:
    here, hidden = Settlement("D", b"", 1, b"h1"), Settlement("D", b"", 2)
    lost = Settlement("L", b"", 4)
    for settlement in (here, hidden, Settlement("D", b"", 3, b"h2"), lost):
        held.add(settlement)
    assert held.has_letters
    held.keep_letters(b"")  # the server hides its history
    held.keep_letters(b"h1")
    held.begin_step()
    assert held.sent.others == [here, hidden, lost]
    assert not held.has_letters


# Lost records


def test_lost_record_is_settled_with_the_key_that_the_server_knows(held: Holdings) -> None:
    step(held, 0, 1)
    assert held.lose(0)
    assert held.lose(1)
    assert not held.lose(1)
    unnamed = held.has_unnamed_lost
    held.name_lost({b"A": [0]})  # another consumer holds 1 now
    assert (unnamed, held.has_unnamed_lost) == (True, False)
    held.begin_step()
    assert held.sent.others == [Settlement("G", b"A", 0)]
