"""Tests of shared subscribers that take too long for ``make test``; part of ``make chaos``."""

from __future__ import annotations

import random

import pytest

from tests.shared.test_model import walk
from tests.support.shared_fleet import Fleet
from tests.support.shared_stress import Row, stress

SOAK = [
    Row(10_007, 211, cap, ack, 1, senders=5, receivers=3)
    for cap, ack in ((47, 97), (79, 79), (97, 47))
]
SOAK.append(Row(40_000, 13, 23, 7, 1, senders=5, receivers=3, fill_first=True))


@pytest.mark.parametrize("run", range(3))
def test_200_000_records_in_200_keys_survive_kills_and_pauses(
    url: str, rng: random.Random, run: int
) -> None:
    with Fleet(url, rng) as fleet:
        fleet.publish(200_000)
        fleet.drain(every_s=0.2)
        fleet.check()
        assert fleet.done["killed"] + fleet.done["paused"] > 5


@pytest.mark.parametrize("run", range(5))
def test_50_000_records_survive_lost_replies_short_visits_and_poison(
    url: str, rng: random.Random, run: int
) -> None:
    """Consumers come and go, die on poison records, and lose both replies and leases."""
    with Fleet(url, rng, consumers=6, lease_ttl=0.5, visits=True, lossy=True) as fleet:
        fleet.publish(50_000, poison=rng.sample(range(50_000), 5))
        fleet.drain(every_s=0.1)
        fleet.check()
        assert fleet.done["killed"] + fleet.done["paused"] > 20
        assert fleet.done["cut off"]


@pytest.mark.parametrize("number", range(100))
def test_long_random_walks_match_the_model(url: str, rng: random.Random, number: int) -> None:
    walk(url, f"{rng.randrange(1 << 32)}", 300)


@pytest.mark.parametrize("row", SOAK)
def test_each_key_is_delivered_once_and_in_order_in_long_stress_runs(
    url: str, rng: random.Random, row: Row
) -> None:
    stress(url, rng, row)
