"""What a consumer holds and has settled, without a server: every transition of ``Holdings``."""

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
    """As much of a SharedRecord as is needed here."""

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
    """Take a step that grants these offsets."""
    held.begin_step()
    held.apply(reply(*granted))
    held.end_step()


def receive(held: Holdings, keys: str, first: int = 0) -> list[Any]:
    """Have a record granted and fetched for each letter, its ordering key."""
    records = [fake(first + number, key.encode()) for number, key in enumerate(keys)]
    step(held, *(record.offset for record in records))
    held.receive(records)
    return records


def settle(held: Holdings, record: Any, kind: str) -> None:
    held.settle(record, kind, b"")


def ack(held: Holdings, *records: Any) -> None:
    for record in records:
        held.ack(record)


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


def test_a_record_that_was_not_granted_is_not_received(held: Holdings) -> None:
    assert held.receive([fake(3, b"A")]) == []
    assert len(held) == 0


def test_an_acknowledged_record_is_said_with_the_next_step(held: Holdings) -> None:
    a, b = receive(held, "AB")
    assert not held.unsaid
    ack(held, b, a)
    assert (a.standing, len(held), held.unsaid) == (Standing.SETTLED, 0, True)
    assert held.begin_step()
    assert held.sent == ({b"A": [0], b"B": [1]}, [])
    held.apply(reply())
    held.end_step()
    assert (held.unsaid, held.sync, held.number) == (False, Sync.AGREED, 2)


@pytest.mark.parametrize(
    ("kind", "parks", "rewinds"),
    [("R", 0, 1), ("U", 0, 1), ("Q", 0, 0), ("X", 0, 0), ("X", 1, 1), ("Q", 1, 0)],
)
def test_a_rewind_takes_later_records_of_the_key_along(
    kind: str, parks: bool, rewinds: bool
) -> None:
    held = Holdings(reject_rewinds=bool(parks))
    before, middle, other, after = receive(held, "AABA")
    settle(held, middle, kind)
    assert middle.standing is Standing.SETTLED
    assert (before.standing, other.standing) == (Standing.HELD, Standing.HELD)
    assert after.standing is (Standing.REWOUND if rewinds else Standing.HELD)
    held.begin_step()
    assert held.sent.others == [Settlement(kind, b"A", 1)]


@pytest.mark.parametrize("sent", [False, True])
def test_what_is_fetched_behind_a_rewind_of_its_key_is_not_held(held: Holdings, sent: bool) -> None:
    (first,) = receive(held, "A")
    step(held, 1, 2)
    settle(held, first, "R")
    if sent:
        held.begin_step()
    behind, other = fake(1, b"A"), fake(2, b"B")
    assert held.receive([behind, other]) == [other]
    assert held.granted == {}


# Steps


def test_a_step_says_a_part_and_acknowledgements_first(
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


def test_a_withdrawn_step_is_said_again_before_the_rest(held: Holdings) -> None:
    a, b, c, d = receive(held, "AABC")
    ack(held, a)
    settle(held, c, "Q")
    held.begin_step()
    assert held.sync is Sync.IN_DOUBT
    ack(held, b)
    settle(held, d, "Q")
    held.withdraw_step()
    assert (held.sync, held.unsaid) == (Sync.AGREED, True)
    held.begin_step()
    assert held.sent.acks == {b"A": [0, 1]}
    assert [other.offset for other in held.sent.others] == [2, 3]


def test_while_a_step_is_under_way_records_are_received(held: Holdings) -> None:
    step(held, 0)
    held.begin_step()
    assert (held.sync, held.unsure) == (Sync.IN_DOUBT, False)
    assert len(held.receive([fake(0, b"A")])) == 1


def test_a_rewind_makes_what_is_not_fetched_stale_until_reconciled(held: Holdings) -> None:
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


def test_a_step_that_the_server_has_taken_is_not_said_again(held: Holdings) -> None:
    a, b = receive(held, "AB")
    ack(held, a)
    held.begin_step()
    held.reconcile(ConsumerState(held.number + 1, {b"B": [1], b"C": [7]}, {7: 2}))
    assert (held.sync, held.unsaid, held.number) == (Sync.AGREED, False, 2)
    assert (b.standing, held.granted) == (Standing.HELD, {7: 2})


def test_a_step_that_the_server_has_not_taken_is_said_again(held: Holdings) -> None:
    a, b = receive(held, "AB")
    ack(held, a)
    held.begin_step()
    held.reconcile(ConsumerState(held.number, {b"A": [0], b"B": [1]}, {}))
    assert (held.unsaid, held.granted, b.standing) == (True, {}, Standing.HELD)
    held.begin_step()
    assert held.sent.acks == {b"A": [0]}


def test_what_the_server_has_taken_back_is_not_held(held: Holdings) -> None:
    a, b = receive(held, "AB")
    step(held, 5)
    held.reconcile(ConsumerState(held.number, {b"B": [1]}, {}))
    assert (a.standing, b.standing, held.granted) == (Standing.TAKEN, Standing.HELD, {})


def test_what_was_rewound_and_not_said_is_not_granted_again(held: Holdings) -> None:
    first, behind = receive(held, "AA")
    settle(held, first, "R")
    held.reconcile(ConsumerState(held.number, {b"A": [0, 1]}, {}))
    assert (held.granted, behind.standing) == ({}, Standing.REWOUND)


def test_when_the_lease_has_expired_nothing_is_held_and_what_was_settled_is_void(
    held: Holdings,
) -> None:
    a, b, c, d = receive(held, "ABCD")
    ack(held, a)
    held.begin_step()
    settle(held, b, "X")
    ack(held, c)
    held.say(Settlement("D", b"", 99))
    assert sorted(held.settled_in_vain()) == [0, 1, 2]
    held.fence()
    assert (d.standing, len(held), held.unsaid) == (Standing.TAKEN, 0, False)
    held.start(0)
    assert (held.number, held.sync) == (0, Sync.AGREED)


# Lost records


def test_a_lost_record_is_said_with_the_key_that_the_server_knows(held: Holdings) -> None:
    step(held, 0, 1)
    assert held.lose(0)
    assert held.lose(1)
    assert not held.lose(1)
    unnamed = held.has_unnamed_lost
    held.name_lost({b"A": [0]})  # another consumer has 1 by now
    assert (unnamed, held.has_unnamed_lost) == (True, False)
    held.begin_step()
    assert held.sent.others == [Settlement("G", b"A", 0)]
