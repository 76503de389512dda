"""Reports on runs: figures, lines, and a table of totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tests.chaos.run import Result

#: Maximum number of violations per run to show with the events around them.
DETAILED = 5

TOTALS = (
    "published",
    "acked",
    "unknown",
    "failed",
    "delivered",
    "confirms",
    "refused",
    "gaps",
    "terms",
    "take_overs",
    "archived",
    "segments",
    "compactions",
    "archiver_terms",
    "seen",
)


def figures(result: Result) -> dict[str, Any]:
    """Return a run as JSON data."""
    return {
        "seed": result.plan.seed,
        "published": result.records["publish"],
        "acked": result.records["acked"],
        "unknown": result.records["unknown"],
        "failed": result.records["failed"],
        "delivered": result.records["deliver"],
        "confirms": result.events["confirmed"],
        "refused": result.events["refused"],
        "gaps": result.events["gap"],
        "terms": result.terms,
        "take_overs": result.take_overs,
        "archived": result.archived,
        "segments": result.events["appended"],
        "compactions": result.events["compacted"],
        "archiver_terms": result.archiver_terms,
        "seen": result.records["seen"],
        "drain_s": round(result.drain_s, 2),
        "faults": dict(sorted(result.faults.items())),
        "violations": [str(violation) for violation in result.violations],
        "command": result.plan.command,
    }


def lines(result: Result) -> list[str]:
    """Return a line about a run, then its violations."""
    facts = figures(result)
    counts = ", ".join(f"{facts[name]} {name.replace('_', '-')}" for name in TOTALS)
    faults = ", ".join(f"{kind} {count}" for kind, count in facts["faults"].items())
    found = [
        f"seed {result.plan.seed}: {counts}; {sum(result.faults.values())} faults ({faults}); "
        f"drained in {result.drain_s:.1f} s; {len(result.violations)} violations"
    ]
    for number, violation in enumerate(result.violations):
        found.append(f"  {violation}")
        if number < DETAILED:
            found += [f"      {line}" for line in violation.around]
    if result.violations:
        found.append(f"  to repeat: {result.plan.command}")
    return found


def table(results: Sequence[Result]) -> Table:
    """Return the totals of all runs."""
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for result in results:
        facts = figures(result)
        totals.update({name: facts[name] for name in TOTALS})
        faults.update(result.faults)
    seeds = [result.plan.seed for result in results]
    found = Table(title="Chaos", show_header=False)
    found.add_row("seeds", f"{seeds[0]} to {seeds[-1]}")
    for name in TOTALS:
        found.add_row(name.replace("_", "-"), f"{totals[name]:,}")
    found.add_row("faults", f"{sum(faults.values()):,}")
    for kind, count in sorted(faults.items()):
        found.add_row(f"  {kind}", f"{count:,}")
    found.add_row("violations", str(sum(len(result.violations) for result in results)))
    return found
