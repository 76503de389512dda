"""A million broken frames: each is refused as corrupt, or decoded to well-formed records."""

from __future__ import annotations

import random
import resource

import pytest

from tests.records.test_frames import BASES, decode_mutants

CASES = 1_000_000
#: Maximum growth of the process's memory, in MiB, while it decodes broken frames.
GROWTH_MAX_MB = 256


@pytest.mark.timeout(3600)
def test_a_million_broken_frames_are_refused_or_decoded_in_bounded_memory(
    rng: random.Random,
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    names = list(BASES)
    for start in range(0, CASES, 100):
        refused += len(decode_mutants(names[start // 100 % len(names)], rng, 100))
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(f"{CASES} mutants, {refused} refused, {grown_mb} MiB")
    assert refused > CASES / 2
    assert grown_mb < GROWTH_MAX_MB
