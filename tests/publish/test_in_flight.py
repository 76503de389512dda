"""The in-flight window keeps order, numbers and progress, and knows which batches are in doubt."""

from __future__ import annotations

import pytest

from meteor_py.publish.batch import Batch
from meteor_py.publish.in_flight import WINDOW_BATCHES, InFlightWindow


def filled(count: int, sent: int = 0) -> tuple[InFlightWindow, list[Batch]]:
    window = InFlightWindow()
    batches = [Batch(0.0, 1.0) for _ in range(count)]
    for batch in batches:
        window.add([batch])
        window.number_newest()
    for _ in range(sent):
        window.sent += 1
    return window, batches


def numbers(batches: list[Batch]) -> list[int]:
    return [batch.sequence for batch in batches]


def doubts(batches: list[Batch]) -> list[bool]:
    return [batch.in_doubt for batch in batches]


def test_batches_are_numbered_in_order_until_the_window_is_full() -> None:
    window, batches = filled(WINDOW_BATCHES - 1)
    assert window.has_room()
    window.add([Batch(0.0, 1.0)])
    assert not window.has_room()
    window.pop_newest()  # a batch without a number leaves no gap
    window.add([last := Batch(0.0, 1.0)])
    window.number_newest()
    assert numbers([*batches, last]) == list(range(WINDOW_BATCHES))
    assert list(window) == [*batches, last]


def test_replies_match_batches_in_sending_order() -> None:
    window, batches = filled(4, sent=3)
    assert window.unsent() == batches[3:]
    assert window.next_to_reply is batches[0]
    window.mark_acknowledged(10)
    assert (batches[0].acknowledged, batches[0].base_offset) == (True, 10)
    assert window.next_to_reply is batches[1]
    assert window.behind_next_to_reply() == [batches[2]]
    assert (window.acknowledged, window.sent) == (1, 3)


def test_removing_the_oldest_batch_keeps_the_others_progress() -> None:
    window, batches = filled(4, sent=3)
    window.mark_acknowledged(10)
    window.mark_acknowledged(11)
    assert window.pop_oldest() is batches[0]
    assert (window.acknowledged, window.sent, window.oldest) == (1, 2, batches[1])
    for _ in range(3):
        window.pop_oldest()
    assert (window.acknowledged, window.sent, len(window)) == (0, 0, 0)


def test_a_rewound_window_is_sent_again_under_the_same_numbers() -> None:
    window, batches = filled(3, sent=3)
    window.mark_acknowledged(10)
    window.rewind()
    assert window.unsent() == batches
    assert (numbers(batches), window.epoch) == ([0, 1, 2], 0)


def test_only_sent_batches_can_be_in_doubt() -> None:
    window, batches = filled(3, sent=2)
    window.doubt_sent()
    assert doubts(batches) == [True, True, False]
    window.mark_acknowledged(10)
    assert doubts(batches) == [False, True, False]
    window.clear_doubts()
    assert doubts(batches) == [False, False, False]


def test_batches_marked_as_unsent_after_a_refusal_are_not_in_doubt() -> None:
    window, batches = filled(3, sent=3)
    window.mark_acknowledged(10)
    window.rewind_to_acknowledged()
    window.doubt_sent()
    assert doubts(batches) == [True, False, False]
    assert window.unsent() == batches[1:]


def test_acknowledged_batches_can_be_put_in_doubt_for_another_server() -> None:
    window, batches = filled(2, sent=2)
    window.mark_acknowledged(10)
    window.doubt_acknowledged()
    assert doubts(batches) == [True, False]
    assert not batches[0].acknowledged


@pytest.mark.parametrize("left", [0, 2])
def test_a_new_epoch_numbers_the_remaining_batches_from_zero(left: int) -> None:
    window, batches = filled(3, sent=3)
    for _ in range(3 - left):
        window.pop_oldest()
    window.renumber()
    assert (window.epoch, window.sent, window.acknowledged) == (1, 0, 0)
    assert numbers(batches[3 - left :]) == list(range(left))
    window.add([batch := Batch(0.0, 1.0)])
    window.number_newest()
    assert batch.sequence == left
