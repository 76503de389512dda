"""Shared subscribers in processes that are killed and paused keep order and lose no record."""

from __future__ import annotations

import random

from tests.conftest import ServerFactory
from tests.support.shared_fleet import Fleet
from tests.support.shared_hot_key import others_per_second


def test_each_record_is_settled_once_and_in_order_despite_kills_and_pauses(
    url: str, rng: random.Random
) -> None:
    with Fleet(url, rng, keys=50) as fleet:
        fleet.publish(20_000)
        fleet.drain(every_s=0.2)
        fleet.check()
        assert fleet.done["killed"]
        assert fleet.done["paused"]


def test_record_that_kills_its_consumer_is_the_only_dead_letter(
    url: str, rng: random.Random
) -> None:
    poison = rng.randrange(500, 1_000)
    with Fleet(url, rng, keys=40, lease_ttl=0.5, max_deliveries=3, run=True) as fleet:
        fleet.publish(2_000, poison=[poison])
        fleet.drain()
        assert fleet.letters() == [poison]
        fleet.check()
        assert fleet.done["killed"] >= 3


def test_other_keys_are_processed_while_the_owner_of_a_hot_key_sleeps(
    url: str, private_server: ServerFactory
) -> None:
    held = others_per_second(url, "held", 1_000)
    worked = others_per_second(private_server().url, "worked", 1_000)
    print(f"rate for other keys: {held / worked:.2f} of the rate while the hot key is processed")
