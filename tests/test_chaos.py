"""Ten groups of three members under kills, pauses and cuts; and the bugs that must not go unseen.

``make chaos`` does the same for longer, and over many seeds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from meteor_py import scripts
from tests.chaos import mutants, report
from tests.chaos.mutants import MUTANTS
from tests.chaos.nemesis import KINDS
from tests.chaos.run import Plan, Result, mutant_plan, run

SECONDS = 7.0
EVERY_S = (0.2, 0.4)
#: A planted bug shows in nearly every run; so many are tried.
TRIES = 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed_of", [lambda _: 1, lambda rng: rng.randrange(1_000_000)], ids=["fixed", "random"]
)
def test_nothing_is_lost_doubled_reordered_or_skipped_whatever_happens(
    rng: random.Random, seed_of: Callable[[random.Random], int]
) -> None:
    plan = Plan(seed_of(rng), seconds=SECONDS, every_s=EVERY_S, groups=10, members=3)
    print(plan.command)
    result = run(plan)
    assert not result.violations, told(result)
    # It was not for want of trying.
    assert set(result.faults) == set(KINDS), told(result)
    assert result.records["acked"] > 300, told(result)
    assert result.records["deliver"] >= 10 * result.records["acked"], told(result)
    assert result.events["confirmed"] > 300, told(result)
    assert result.take_overs >= 10, told(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unfenced-confirm", "greedy-trim", "ignored-lease"])
def test_a_planted_bug_is_caught(rng: random.Random, name: str) -> None:
    for _ in range(TRIES):
        result = run(mutant_plan(name, rng.randrange(1_000_000)))
        if MUTANTS[name].shows_as & {violation.kind for violation in result.violations}:
            return
    pytest.fail(told(result))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_not_the_original(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script: scripts.Script = getattr(scripts, MUTANTS[name].script)
    original = Counter(script.source.splitlines())
    sha = script.sha
    for attribute in ("source", "sha", "plain_source"):
        monkeypatch.setattr(script, attribute, getattr(script, attribute))
    mutants.plant(name)
    assert sum((original - Counter(script.source.splitlines())).values()) == len(
        MUTANTS[name].changes
    )
    assert script.sha != sha
    with pytest.raises(AssertionError, match=name):
        mutants.plant(name)  # what it replaces is not there any more


def told(result: Result) -> str:
    return "\n".join(report.lines(result))
