"""A hundred thousand broken segment files: each is refused as corrupt, or read as a segment."""

from __future__ import annotations

import random

import pytest

from tests.support.parquet_mutants import fuzz

CASES, PROCESSES = 100_000, 4
#: Maximum growth of a process's memory, in MiB, while it reads broken files.
GROWTH_MAX_MB = 512


@pytest.mark.timeout(3600)
def test_a_hundred_thousand_broken_files_are_refused_or_read_in_bounded_memory(
    rng: random.Random,
) -> None:
    outcomes = [fuzz(rng.randrange(2**32), CASES // PROCESSES) for _ in range(PROCESSES)]
    refused = sum(outcome.refused for outcome in outcomes)
    grown_mb = max(outcome.grown_mb for outcome in outcomes)
    print(f"{CASES} mutants, {refused} refused, {grown_mb} MiB")
    assert CASES / 2 < refused < CASES
    assert grown_mb < GROWTH_MAX_MB
