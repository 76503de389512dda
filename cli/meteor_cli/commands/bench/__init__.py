"""``meteor bench``: measures a server's speed as seen from this machine."""

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
    help="Number of records to publish in each test. Default: 1,000,000.",
)
@options.count(
    "--size", max=1_000_000, default=100, metavar="BYTES", help="Size of values. Default: 100."
)
@options.json_lines
def bench(session: Session, records: int, size: int, as_json: bool) -> None:
    """Measure the speed of publishing and reading.

    Uses the server given by --url or $METEOR_URL, or a private server if neither is set. Creates
    streams with random names, keeps at most 256 MB of records at a time, and deletes the streams
    at the end.
    """
    from meteor_cli.commands.bench.benchmark import Benchmark

    with cleaning_up():
        Benchmark(session, records, size).run(as_json=as_json)
