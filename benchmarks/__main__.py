"""``python -m benchmarks``: run benchmarks and print a table; a full run writes ``RESULTS*.md``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import (
    archive,
    cli,
    cluster,
    fanout,
    groups,
    imports,
    latency,
    memory,
    one_record,
    one_to_one,
    peers,
    publish,
    read,
    ring,
    shared,
    spark,
)
from benchmarks.common import Bench, Row, plain_client
from meteor_py.server import open_embedded

FAMILIES: dict[str, Callable[[Bench], list[Row]]] = {
    "publish": publish.run,
    "read": read.run,
    "one_to_one": one_to_one.run,
    "one_record": one_record.run,
    "latency": latency.run,
    "fanout": fanout.run,
    "groups": groups.run,
    "shared": shared.run,
    "peers": peers.run,
    "archive": archive.run,
    "ring": ring.run,
    "memory": memory.run,
    "import": imports.run,
    "cli": cli.run,
    "spark": spark.run,
    "cluster": cluster.run,
}
HEADER = ("what", "ours", "peer", "ratio", "goal", "met")
NOTES = (
    "- Records are distinct, 100 bytes long, and created before the clock starts. The server",
    "  has no persistence and listens on a unix socket. redis-py uses hiredis and RESP2,",
    "  without retries and health checks, which would make it slower.",
    "- Rates are the best of several runs; latencies are percentiles of all samples. Our runs and",
    "  the peer's alternate.",
    "- 1 publisher and 1 subscriber: our ring is full before the clock starts, so each new frame",
    "  reuses the memory of an old one. The peer's stream starts empty and is not trimmed.",
    "- 4 x 16: the benchmark in Meteor's README, where ring and clients share one JVM. Here each",
    "  publisher is a process. The subscribers share one process per core (with one call per",
    "  record, each is a process); each has its own connection and reads every record itself. A",
    "  separate run checks the order of records.",
    "- With idle groups: each group has a member in another process that holds its lease and",
    "  reads nothing. Medians of 16 runs each; four runs with groups alternate with four without.",
    "- Requests by an idle group: scripts and blocking reads, with lease_ttl 10 s. Between polls,",
    "  the owner sends only renewals.",
    "- Archiver: one process publishes, and another archives into Parquet on the local disk.",
    "  History: 10 M records in files of up to 1 M, read after the ring has dropped them.",
    "  meteor_py compares checksums here; pyarrow does not.",
    "- meteor publish and tail: whole processes, 1 M lines of 100 bytes, from a pipe or to",
    "  /dev/null. Their time includes about 0.2 s for starting Python and for imports.",
    "- Spark, in local mode, reads all columns of 2 M rows from the ring into the noop sink. The",
    "  in-memory source yields batches of the same size; Spark wrote the Parquet files.",
    "  Micro-batches have one row each and no pause between them; the Python source generates its",
    "  row. Batches without rows run because offsets move (in the rate source once a second, in",
    "  the others four times a second), although there is nothing to read. Our offsets move when",
    "  a stream is created. An empty trigger finds no records, so Spark runs no batch.",
    "  Figures are medians (empty triggers: averages) of several alternating runs.",
    "- Shared, processes: both sides acknowledge a whole batch with one call. Script CPU: from",
    "  INFO commandstats, the lowest of five runs.",
    "- Cluster: all servers listen on TCP. Medians of alternating runs, except for three nodes,",
    "  which are faster than one server only if there is a core for each node and each publisher.",
    "  The pause in a failover is the longest time between two acknowledgements of a publisher",
    "  that waits for each of its records.",
    "- Server CPU, total: CPU time of the server while records are published one by one, minus",
    "  the CPU time of an idle server. Inside the command: usec_per_call from INFO commandstats.",
)
RESULTS = {"valkey": "RESULTS.md", "redis": "RESULTS-redis.md"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.server == "redis":
        found = shutil.which("redis-server")
        if found is None:
            print("redis-server was not found on PATH. Install Redis.", file=sys.stderr)
            return 2
        os.environ["METEOR_SERVER"] = found
    facts = {"load average before the run": f"{os.getloadavg()[0]:.2f}"}
    with open_embedded() as server:
        facts |= describe(server.url)
        rows = measure(options, server.url)
    show(rows, facts)
    if options.json:
        found_rows = [asdict(row) for row in rows]
        options.json.write_text(json.dumps({"facts": facts, "rows": found_rows}, indent=2) + "\n")
    if not options.quick and not options.only:
        path = Path(__file__).parent / RESULTS[options.server]
        path.write_text(markdown(rows, facts))
        print(f"Wrote {path}.", file=sys.stderr)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare meteor_py with redis-py on a private server. A complete run takes "
        "about 20 minutes and writes benchmarks/RESULTS.md, or RESULTS-redis.md with --server "
        "redis. Run nothing else at the same time.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="take fewer measurements, in about a minute"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=FAMILIES,
        metavar="NAME",
        help=f"measure only this family, one of {', '.join(FAMILIES)}; can be repeated",
    )
    parser.add_argument(
        "--server",
        choices=RESULTS,
        default="valkey",
        help="the bundled Valkey (default), or the redis-server on PATH",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def describe(url: str) -> dict[str, str]:
    with plain_client(url) as client:
        info = client.info("server")
    name = "Valkey" if "valkey_version" in info else "Redis"
    return {
        name: str(info.get("valkey_version", info["redis_version"])),
        "CPUs": str(os.cpu_count()),
        "Python": platform.python_version(),
        "redis-py": version("redis"),
        "hiredis": version("hiredis"),
        "pyarrow": version("pyarrow"),
    }


def measure(options: argparse.Namespace, url: str) -> list[Row]:
    console = Console(stderr=True)
    names = options.only or list(FAMILIES)
    if not options.only and not spark.possible():
        names.remove("spark")
        console.print("Java was not found, so Spark is skipped. `make spark` installs Java.")
    rows: list[Row] = []
    # Draw only between measurements: a drawing thread would affect them.
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[family]}: {task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None, family="")

        def step(description: str) -> None:
            progress.update(task, description=description, refresh=True)

        bench = Bench(url, options.server, options.quick, step)
        for name in names:
            progress.update(task, family=name)
            rows += FAMILIES[name](bench)
            bench.clear()
    return rows


def show(rows: list[Row], facts: dict[str, str]) -> None:
    table = Table(*HEADER)
    for row in rows:
        style = {True: "green", False: "red", None: ""}[row.met]
        table.add_row(*row.cells, style=style)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(one_line(facts), highlight=False)
    console.print(table)


def markdown(rows: list[Row], facts: dict[str, str]) -> str:
    """Return the text of RESULTS.md."""
    lines = [
        "# Results of `make bench`",
        "",
        one_line(facts) + ".",
        "Only the ratios are comparable across machines.",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{'---|' * len(HEADER)}",
        *(f"| {' | '.join(row.cells)} |" for row in rows),
        "",
        *NOTES,
    ]
    return "\n".join(lines) + "\n"


def one_line(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


if __name__ == "__main__":
    sys.exit(main())
