"""``meteor bench``: how fast a server is, as seen from here."""

from __future__ import annotations

from meteor_cli.args import options
from meteor_cli.command import command
from meteor_cli.session import Session
from meteor_cli.signals import cleaning_up


@command(
    example="""\
meteor bench
meteor bench --url redis://localhost:6379 --size 1000 --json"""
)
@options.count(
    "--records",
    min=1_000,
    max=1_000_000_000,
    default=1_000_000,
    help="How many to publish in each way: 1,000,000.",
)
@options.count(
    "--size", max=1_000_000, default=100, metavar="BYTES", help="Of the value of a record: 100."
)
@options.json_lines
def bench(session: Session, records: int, size: int, as_json: bool) -> None:
    """Measure the speed of publishing and reading.

    On the server that --url or $METEOR_URL names, else on a private one. Its streams have names of
    their own, and are deleted in the end; at most 256 MB of records are kept at a time.
    """
    from meteor_cli.commands.bench.benchmark import Benchmark

    with cleaning_up():
        Benchmark(session, records, size).run(as_json=as_json)
