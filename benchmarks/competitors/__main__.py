"""``python -m benchmarks.competitors``: run all jobs, write ``RESULTS-competitors.md``."""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from benchmarks.competitors import fetch, spark, takeover
from benchmarks.competitors.jobs import JOBS, Figures, Job
from benchmarks.competitors.servers import Addresses, Idle, running
from benchmarks.competitors.systems import System
from benchmarks.competitors.systems.faststream import FastStream
from benchmarks.competitors.systems.kafka import Kafka
from benchmarks.competitors.systems.nats import Nats
from benchmarks.competitors.systems.ours import Meteor
from benchmarks.competitors.systems.redis_py import RedisPy

RESULTS = Path(__file__).parent.parent / "RESULTS-competitors.md"
CACHE = Path("benchmarks", ".cache")
#: Divisors for the record counts of systems with slower Python clients, so that a run ends in
#: minutes.
FEWER = {RedisPy: 5, Nats: 20, FastStream: 100}
EXTRAS = ("takeover", "spark")
PACKAGES = ("confluent-kafka", "nats-py", "faststream", "redis", "pyspark", "pyarrow")

_MEMORY = "memory"
_PAGE_CACHE = "page cache"
NOTES = """\
- Each cell is the median of {rounds} rounds, with the lowest and highest in brackets. All systems
  in a job take turns, in a different order in each round. Ratios are ours / theirs. Where we are
  behind, the ratio is bold. Rounds of one system differ by 1.1x to 2x, so a ratio of 1.2x may be
  noise.
- Everything runs on one machine, over TCP on loopback. meteor_py uses its defaults; Kafka uses the
  best settings from a sweep. The column `acknowledged in` says where a record is stored when it is
  acknowledged. Compare Kafka with `meteor_py, aof`, which is at least as durable: it also writes to
  the disk every second. That server rewrites its append-only file when it exceeds 1 GB, as our
  documentation recommends. A rewrite takes a core, and raises the p99 of the job that it is in.
- NATS and FastStream are measured through their Python clients, which limit their speed.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(stderr=True)
    load_before = os.getloadavg()[0]
    sections: list[str] = []
    chosen = options.only or [*JOBS, *EXTRAS]
    with running(fetch.libraries("kafka", CACHE)) as (addresses, idle):
        for name, job in JOBS.items():
            if name in chosen:
                sections += job_table(job, measure(name, job, addresses, options, console))
        if "takeover" in chosen:
            sections += takeover_table(addresses, options.rounds, console)
        if "spark" in chosen:
            sections += spark_tables(addresses, options, console)
    text = "\n".join([*header(load_before, options.rounds), *sections, *idle_table(idle)])
    print(text)
    if not options.only and not options.quick:
        RESULTS.write_text(text + "\n")
        console.print(f"Wrote {RESULTS}.")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.competitors",
        description="Compare meteor_py with Kafka, NATS JetStream, redis-py and FastStream on one "
        "machine. A complete run takes about half an hour. Run nothing else at the same time.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds per job (default: 3)")
    parser.add_argument("--quick", action="store_true", help="use a tenth of the records")
    names = [*JOBS, *EXTRAS]
    parser.add_argument(
        "--only", action="append", choices=names, metavar="NAME",
        help=f"run only this job, one of {', '.join(names)}; can be repeated",
    )  # fmt: skip
    return parser.parse_args(arguments)


def systems(job: str, at: Addresses) -> Iterator[System]:
    """Yield a job's systems, ours first."""
    memory = Meteor("meteor_py, memory", _MEMORY, at.memory)
    aof = Meteor("meteor_py, aof", _PAGE_CACHE, at.aof)
    if job == "read":
        yield memory
        yield Meteor("meteor_py, Record objects", _MEMORY, at.memory, form="records")
    else:
        yield memory
        yield aof
    if job == "latency" or job.startswith("open"):
        lingers = (0,) if job == "latency" else (0, 1, 5)
        for linger in lingers:
            name = f"Kafka, linger {linger} ms"
            yield Kafka(name, _PAGE_CACHE, at.kafka, linger_ms=linger, at_once=True)
    else:
        yield Kafka("Kafka, acks=1", _PAGE_CACHE, at.kafka)
        yield Kafka("Kafka, acks=all", _PAGE_CACHE, at.kafka, acks="all")
    if job == "fan_out" or job.startswith("open"):
        return
    yield Nats("NATS, memory", _MEMORY, at.nats)
    yield Nats("NATS, file", _PAGE_CACHE, at.nats, storage="file")
    yield RedisPy("redis-py", _MEMORY, at.memory)
    if job in ("publish_loop", "latency"):
        yield FastStream("FastStream", _MEMORY, at.memory)


def measure(
    name: str, job: Job, at: Addresses, options: argparse.Namespace, console: Console
) -> dict[System, list[Figures]]:
    found: dict[System, list[Figures]] = {system: [] for system in systems(name, at)}
    for number in range(options.rounds):
        order = list(found)
        random.shuffle(order)
        for system in order:
            count = job.records // (10 if options.quick else 1)
            if job.higher_is_better:
                count //= FEWER.get(type(system), 1)
            console.print(f"{name}, round {number + 1}: {system.name}")
            found[system].append(job.run(system.fresh(), count))
    return found


# -- tables ------------------------------------------------------------------------------------


def header(load: float, rounds: int) -> list[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return [
        "# meteor_py compared with its competitors",
        "",
        f"Results of `make bench-competitors`: {os.cpu_count()} CPUs, load average before the run "
        f"{load:.2f}, Python {platform.python_version()}, Kafka 4.3.1, {packages}.",
        "",
        NOTES.format(rounds=rounds),
    ]


def job_table(job: Job, found: dict[System, list[Figures]]) -> list[str]:
    ours_names = [system.name for system in found if isinstance(system, Meteor)]
    figures = list(next(iter(found.values()))[0])
    ratios = [f"{name} / theirs, {figure}" for figure in figures for name in ours_names]
    lines = [
        f"## {job.title}",
        "",
        f"| system | acknowledged in | {' | '.join([*figures, *ratios])} |",
        f"|---|---|{'--:|' * len([*figures, *ratios])}",
    ]
    medians = {
        system.name: {figure: statistics.median(run[figure] for run in runs) for figure in figures}
        for system, runs in found.items()
    }
    for system, runs in found.items():
        cells = [spread([run[figure] for run in runs]) for figure in figures]
        for figure in figures:
            for name in ours_names:
                if isinstance(system, Meteor):
                    cells.append("")
                    continue
                ratio = medians[name][figure] / medians[system.name][figure]
                cells.append(ratio_cell(ratio, job.higher_is_better))
        lines.append(f"| {system.name} | {system.durability} | {' | '.join(cells)} |")
    return [*lines, ""]


def spread(values: Sequence[float]) -> str:
    return f"{show(statistics.median(values))} ({show(min(values))}..{show(max(values))})"


def show(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.0f} k" if value >= 1e4 else f"{value:,.0f}"


def ratio_cell(ratio: float, higher_is_better: bool) -> str:
    text = f"{ratio:.{1 if ratio >= 10 else 2}f}x"
    behind = ratio < 1 if higher_is_better else ratio > 1
    return f"**{text}**" if behind else text


def takeover_table(at: Addresses, rounds: int, console: Console) -> list[str]:
    ours = Meteor("meteor_py, memory", _MEMORY, at.memory)
    kafka = Kafka("Kafka", _PAGE_CACHE, at.kafka, linger_ms=0)
    cases: dict[str, tuple[Meteor | Kafka, str]] = {
        "meteor_py": (ours, ""),
        "Kafka, classic protocol": (kafka, "classic"),
        "Kafka, consumer protocol": (kafka, "consumer"),
    }
    lines = [
        "## The next member's first record after the active member ends",
        "",
        f"All failure detectors are set to {takeover.DETECTION_S:g} s.",
        "",
        "| group | active member closed, s | killed, s |",
        "|---|--:|--:|",
    ]
    for name, (system, protocol) in cases.items():
        cells = []
        for end in takeover.ENDS:
            console.print(f"takeover: {name}, {end}")
            times = [takeover.measure(system, end, protocol) for _ in range(rounds)]
            cells.append(f"{statistics.median(times):.3f} ({min(times):.3f}..{max(times):.3f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def spark_tables(at: Addresses, options: argparse.Namespace, console: Console) -> list[str]:
    ours = Meteor("meteor_py", _MEMORY, at.memory)
    kafka = Kafka("Kafka", _PAGE_CACHE, at.kafka)
    count = 100_000 if options.quick else 1_000_000
    with spark.session(fetch.libraries("spark", CACHE)) as session:
        console.print("spark: reading")
        rows = spark.read_rows(session, ours, kafka, count, options.rounds)
        console.print("spark: micro-batches")
        batches = spark.micro_batches(session, ours, kafka, options.rounds)
    lines = ["## Spark, two local cores", ""]
    lines += ["| read all columns into noop | rows/s | ours / theirs |", "|---|--:|--:|"]
    for name, rate in rows.items():
        ratio = ratio_cell(rows["meteor_py"] / rate, True) if name != "meteor_py" else ""
        lines.append(f"| {name} | {show(rate)} | {ratio} |")
    lines += ["", "| a micro-batch of one row | ms | ours / theirs |", "|---|--:|--:|"]
    for name, took in batches.items():
        ratio = ratio_cell(batches["meteor_py"] / took, False) if name != "meteor_py" else ""
        lines.append(f"| {name} | {took:.0f} | {ratio} |")
    return [*lines, ""]


def idle_table(idle: Sequence[Idle]) -> list[str]:
    return [
        "## Idle servers",
        "",
        "| server | replies after, s | memory, MiB |",
        "|---|--:|--:|",
        *(f"| {server.name} | {server.start_s:.2f} | {server.mib:.0f} |" for server in idle),
    ]


if __name__ == "__main__":
    sys.exit(main())
