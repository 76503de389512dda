"""``python -m tests.chaos``: chaos runs over many seeds. Exits with 1 if one finds a violation."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos import report
from tests.chaos.mutants import MUTANTS
from tests.chaos.nemesis import CLUSTER_KINDS, KINDS, STORE_KINDS
from tests.chaos.run import Plan, Result, mutant_plan, run
from tests.support.servers import binaries


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    plans = [make_plan(options, options.first_seed + n) for n in range(options.seeds)]
    console = Console(stderr=True)
    results: list[Result] = []
    interrupted = False
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        try:
            for result in each_run(plans, bar, options.keep):
                results.append(result)
                for line in [] if options.json else report.lines(result):
                    bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        except KeyboardInterrupt:
            interrupted = True  # report the runs that have finished
    summarize(results, as_json=options.json)
    if any(result.violations for result in results):
        return 1
    return 130 if interrupted else 0


def each_run(plans: Sequence[Plan], bar: Progress, keep: Path | None) -> Iterator[Result]:
    task = bar.add_task("", total=len(plans))
    for number, plan in enumerate(plans):

        def show(phase: str, share: float, plan: Plan = plan, number: int = number) -> None:
            text = f"seed {plan.seed} ({number + 1} of {len(plans)}): {phase}"
            bar.update(task, description=text, completed=number + share)

        yield run(plan, show, keep)
        bar.update(task, completed=number + 1)


def summarize(results: Sequence[Result], *, as_json: bool) -> None:
    wrong = [result for result in results if result.violations]
    if as_json:
        runs = [report.figures(result) for result in results]
        print(json.dumps({"runs": runs, "wrong": [result.plan.seed for result in wrong]}))
    elif results:
        Console().print(report.table(results))
        for result in wrong:
            print(f"WRONG: {result.plan.command}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="number of runs (default: 3)")
    parser.add_argument("--first-seed", type=int, help="seed of the first run (default: random)")
    parser.add_argument("--seconds", type=float, help="seconds of faults per run (default: 20)")
    parser.add_argument("--groups", type=int, help="number of subscriber groups (default: 10)")
    parser.add_argument("--members", type=int, help="members per group (default: 3)")
    parser.add_argument("--publishers", type=int, help="number of publishers (default: 2)")
    parser.add_argument(
        "--server", choices=sorted(binaries()), help="server to use (default: valkey)"
    )
    parser.add_argument(
        "--cluster",
        action=argparse.BooleanOptionalAction,
        help="use a cluster with replicas (default: every third seed)",
    )
    parser.add_argument(
        "--small-ring",
        action="store_true",
        help="use a ring that drops records before slow groups read them",
    )
    parser.add_argument(
        "--store",
        action=argparse.BooleanOptionalAction,
        help="use a small ring with a store (default: every second seed)",
    )
    names = ", ".join(KINDS + STORE_KINDS + CLUSTER_KINDS)
    parser.add_argument(
        "--faults", type=kinds, help=f"cause only these faults, comma-separated: {names}"
    )
    parser.add_argument(
        "--every", type=span, help="minimum and maximum seconds between faults (default: 0.3,1)"
    )
    parser.add_argument("--mutant", choices=sorted(MUTANTS), default="", help="plant this bug")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--keep", type=Path, help="directory for the histories of failed runs")
    options = parser.parse_args(arguments)
    if options.small_ring and options.store:
        parser.error("--small-ring drops records and --store keeps them; choose one")
    if set(options.faults or ()) & set(STORE_KINDS) and not (options.store or options.mutant):
        parser.error("archiver and store faults need --store")
    if set(options.faults or ()) & set(CLUSTER_KINDS) and not (options.cluster or options.mutant):
        parser.error("cluster faults need --cluster")
    if options.first_seed is None:
        options.first_seed = secrets.randbelow(1_000_000)
    return options


def kinds(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := set(chosen) - set(KINDS + STORE_KINDS + CLUSTER_KINDS):
        raise argparse.ArgumentTypeError(f"unknown fault: {', '.join(sorted(unknown))}")
    return chosen


def span(text: str) -> tuple[float, float]:
    low, high = (float(part) for part in text.split(","))
    return low, high


def make_plan(options: argparse.Namespace, seed: int) -> Plan:
    plan = mutant_plan(options.mutant, seed) if options.mutant else Plan(seed)
    names = ("seconds", "groups", "members", "publishers", "server")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.cluster is not None:
        given["cluster"] = options.cluster
    elif not (options.mutant or options.faults):
        given["cluster"] = seed % 3 == 2
    if options.small_ring:
        given["small_ring"] = True
    elif options.store is not None:
        given["store"] = options.store
    elif not options.mutant:
        given["store"] = seed % 2 == 1
    if options.faults:
        given["kinds"] = options.faults
    if options.every:
        given["every_s"] = options.every
    return replace(plan, **given)


if __name__ == "__main__":
    sys.exit(main())
