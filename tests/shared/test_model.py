"""Shared groups compared with a model under random operations."""

from __future__ import annotations

import random

import pytest

import meteor_py as meteor
from tests.support.servers import plain_client
from tests.support.shared_walk import Walk

WALKS = 14
STEPS = 90


@pytest.mark.parametrize("number", range(WALKS))
def test_each_record_is_settled_once_in_order_and_by_one_consumer(
    url: str, rng: random.Random, number: int
) -> None:
    walk(url, f"{rng.randrange(1 << 32)}", STEPS)


def walk(url: str, seed: str, steps: int) -> None:
    print(f"seed of the walk: {seed!r}, steps: {steps}")
    with meteor.connect(url) as client, plain_client(url) as plain:
        walk = Walk(client, plain, seed)
        try:
            walk.run(steps)
        except BaseException:
            print(f"after: {walk.done}")
            raise
        finally:
            walk.close()
