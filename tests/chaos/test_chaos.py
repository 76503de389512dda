"""Groups and archivers under kills, pauses and cuts, and planted bugs that must be found.

``make chaos`` runs the same tests for longer and over many seeds.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.chaos import mutants, report
from tests.chaos.mutants import CLUSTER_MUTANTS, MUTANTS, FunctionText, ScriptText, text_of
from tests.chaos.nemesis import CLUSTER_KINDS, KINDS, STORE_KINDS
from tests.chaos.run import Plan, Result, mutant_plan, run

SECONDS = 7.0
EVERY_S = (0.2, 0.4)
#: Maximum number of runs to find a planted bug. Nearly every run finds it.
TRIES = 3


@pytest.mark.slow
def test_no_record_is_lost_duplicated_reordered_or_skipped(rng: random.Random) -> None:
    plan = Plan(rng.randrange(1_000_000), seconds=SECONDS, every_s=EVERY_S, groups=10, members=3)
    print(plan.command)
    result = run(plan)
    assert not result.violations, summary(result)
    # the run caused enough faults to prove something
    assert set(result.faults) == set(KINDS), summary(result)
    assert result.records["acked"] > 100, summary(result)
    assert result.records["deliver"] >= 10 * result.records["acked"], summary(result)
    assert result.events["confirmed"] > 100, summary(result)
    assert result.take_overs >= 5, summary(result)


@pytest.mark.slow
def test_no_record_is_lost_or_duplicated_on_a_cluster(rng: random.Random) -> None:
    seed = rng.randrange(1_000_000)
    plan = Plan(seed, cluster=True, seconds=SECONDS, every_s=EVERY_S, groups=3)
    print(plan.command)
    result = run(plan)
    assert not result.violations, summary(result)
    assert set(result.faults) == set(KINDS + CLUSTER_KINDS), summary(result)
    assert result.records["acked"] > 100, summary(result)


@pytest.mark.slow
def test_no_record_is_lost_or_duplicated_with_a_store(
    rng: random.Random,
) -> None:
    seed = rng.randrange(1_000_000)
    plan = Plan(seed, store=True, seconds=6.0, every_s=(0.1, 0.25), groups=3, lease_ttl_s=0.5)
    print(plan.command)
    result = run(plan)
    assert not result.violations, summary(result)
    assert set(result.faults) == set(KINDS + STORE_KINDS), summary(result)
    assert result.records["acked"] > 100, summary(result)
    assert result.archived >= result.records["acked"], summary(result)
    assert result.archiver_terms >= 2, summary(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["unfenced-confirm", "greedy-trim", "ignored-lease", "unfenced-archiver"],
)
def test_planted_bug_is_found(rng: random.Random, name: str) -> None:
    for _ in range(TRIES):
        result = run(mutant_plan(name, rng.randrange(1_000_000)))
        if MUTANTS[name].shows_as & {violation.kind for violation in result.violations}:
            return
    pytest.fail(summary(result))


@pytest.mark.parametrize("name", MUTANTS | CLUSTER_MUTANTS)
def test_mutant_differs_from_the_original(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(name)
    original = Counter(text.get().splitlines())
    made: tuple[Any, str]
    if isinstance(text, ScriptText):
        made = text.script, "sha"
        for attribute in ("source", "sha", "plain_source"):
            monkeypatch.setattr(text.script, attribute, getattr(text.script, attribute))
    else:
        assert isinstance(text, FunctionText)
        made = text.function, "__code__"
        monkeypatch.setattr(text.function, "__code__", text.function.__code__)
        monkeypatch.setitem(text.function.__dict__, "planted", None)
    before = getattr(*made)
    changes = (MUTANTS | CLUSTER_MUTANTS)[name].changes
    mutants.plant(name)
    assert sum((original - Counter(text.get().splitlines())).values()) == len(changes)
    assert getattr(*made) != before
    with pytest.raises(AssertionError, match=name):
        mutants.plant(name)  # the text to replace is no longer there


def summary(result: Result) -> str:
    return "\n".join(report.lines(result))
