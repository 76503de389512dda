"""Qpid's stress program, adapted to shared subscribers, with its matrix of settings."""

from __future__ import annotations

import random

import pytest

from tests.support.shared_stress import Row, stress

ROWS = {
    "interleaved by 3": Row(103, 13, 3, 7, 3),
    "not interleaved": Row(103, 13, 7, 7, 1),
    "alongside a second group": Row(103, 13, 7, 3, 1, second_group=True),
    "interleaved by 5": Row(103, 13, 3, 7, 5),
    "ack window larger than prefetch": Row(59, 5, 1, 3, 1),
    "one at a time": Row(59, 3, 1, 1, 1),
    "53 groups at a time": Row(211, 13, 47, 79, 53, random_sizes=False),
    "fill, then drain": Row(
        10_000, 1, 1_000, 100, 1, False, senders=1, receivers=5, fill_first=True
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_key_is_delivered_once_and_in_order_without_stalls(
    url: str, rng: random.Random, row: Row
) -> None:
    stress(url, rng, row)
