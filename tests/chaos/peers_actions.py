"""A thousand coordinated actions by five processes; part of ``make chaos``.

Prints the spread of each action's start times, the delays, and the error bounds of the clocks.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from meteor_py.peers.voting.proposal import Outcome
from tests.support.peer_voters import RESULT_S, Panel
from tests.support.waiting import eventually

ACTIONS = 1_000
PROCESSES = 5
#: Number of action names, more than there are actions in progress at any time.
NAMES = 40
#: Seconds between actions, and from the proposal to the action.
EVERY_S = 0.05
AHEAD_S = 1.0


@pytest.mark.timeout(300)
def test_each_action_is_performed_or_reported_as_missed_and_none_is_early(url: str) -> None:
    with Panel(url) as panel:
        processes = panel.processes(PROCESSES)
        for process in processes:
            for name in range(NAMES):
                process.ask("act", f"action-{name}")
        outcomes = [future.result(RESULT_S) for future in _propose(panel)]
        passed = {outcome.poll: outcome for outcome in outcomes if outcome.passed}
        assert len(passed) > 0.9 * ACTIONS  # on a busy machine, late votes make some fail

        def settled() -> bool:
            counts = [len(p.ask("actions")) + len(p.ask("missed")) for p in processes]
            return counts == [len(passed)] * PROCESSES

        eventually(settled, RESULT_S, "some actions were neither performed nor missed")
        done = [one for process in processes for one in process.ask("actions")]
        for one in done:
            assert one["true"] >= one["at"] - one["error_bound"] - 1e-6
        _report(done, len(passed) * PROCESSES)


def _propose(panel: Panel) -> list[Future[Outcome]]:
    futures: list[Future[Outcome]] = []
    begin = panel.peer_group.now() + AHEAD_S
    for number in range(ACTIONS):
        at = begin + number * EVERY_S
        time.sleep(max(at - AHEAD_S - panel.peer_group.now(), 0.0))  # propose at a steady rate
        futures.append(panel.peer_group.propose_action(f"action-{number % NAMES}", number, at=at))
    return futures


def _report(done: list[dict[str, Any]], expected: int) -> None:
    by_poll: dict[str, list[float]] = {}
    for one in done:
        by_poll.setdefault(one["poll"], []).append(one["true"])
    spreads = sorted(max(starts) - min(starts) for starts in by_poll.values())
    late = sorted(one["true"] - one["at"] for one in done)
    bounds = sorted(one["error_bound"] for one in done)
    print(f"{len(done)} of {expected} done, {expected - len(done)} missed; times in us:")
    for what, figures in (("spread", spreads), ("actual - planned", late), ("bound", bounds)):
        cuts = (figures[int(len(figures) * part)] * 1e6 for part in (0.5, 0.9, 0.99))
        low, high = figures[0] * 1e6, figures[-1] * 1e6
        print(f"{what:>17}: " + "  ".join(f"{cut:7.0f}" for cut in (low, *cuts, high)))
    print(" " * 19 + "  ".join(f"{name:>7}" for name in ("min", "p50", "p90", "p99", "max")))
