"""``meteor bench``: how fast a server is, as seen from here."""

from __future__ import annotations

import click

from meteor_cli.command import command
from meteor_cli.interrupts import cleaning_up
from meteor_cli.session import Session


@command(
    example="""\
meteor bench
meteor bench --url redis://localhost:6379 --size 1000 --json"""
)
@click.option(
    "--records",
    type=click.IntRange(1_000, 1_000_000_000),
    default=1_000_000,
    metavar="N",
    help="How many to publish in each way: 1,000,000.",
)
@click.option(
    "--size",
    type=click.IntRange(1, 1_000_000),
    default=100,
    metavar="BYTES",
    help="Of the value of a record: 100.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def bench(session: Session, records: int, size: int, as_json: bool) -> None:
    """Measure the speed of publishing and reading.

    On the server that --url or $METEOR_URL names, else on a private one. Its streams have names of
    their own, and are deleted in the end; at most 256 MB of records are kept at a time.
    """
    from meteor_cli.bench.benchmark import Benchmark

    with cleaning_up():
        Benchmark(session, records, size).run(as_json=as_json)
