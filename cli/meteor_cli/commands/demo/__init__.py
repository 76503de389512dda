"""``meteor demo``: a short tour of the features."""

from __future__ import annotations

from meteor_cli.args import options
from meteor_cli.command import command
from meteor_cli.session import Session
from meteor_cli.signals import cleaning_up


@command(
    short_help="Take a tour of the features, with live measurements.",
    example="""\
meteor demo
meteor demo --records 100000 --url redis://localhost:6379""",
)
@options.count(
    "--records",
    min=1_000,
    max=10_000_000,
    default=1_000_000,
    help="Number of records to publish. Default: 1,000,000.",
)
@options.flag("--no-spark", help="Skip Spark, which is slow to start.")
def demo(session: Session, records: int, no_spark: bool) -> None:
    """Take a tour: publish, tail, kill and recover, archive. Every figure is measured.

    Runs on a private server unless you pass --url, and leaves nothing behind.
    """
    from meteor_cli.commands.demo.tour import Tour

    with cleaning_up():
        Tour(session, records, spark=not no_spark).run()
