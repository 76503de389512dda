"""``meteor demo``: a tour of what there is, in a few seconds."""

from __future__ import annotations

import click

from meteor_cli.command import command
from meteor_cli.interrupts import cleaning_up
from meteor_cli.session import Session


@command(
    short_help="Take a tour; every figure is measured.",
    example="""\
meteor demo
meteor demo --records 100000 --url redis://localhost:6379""",
)
@click.option(
    "--records",
    type=click.IntRange(1_000, 10_000_000),
    default=1_000_000,
    metavar="N",
    help="How many to publish: 1,000,000.",
)
@click.option("--no-spark", is_flag=True, help="Leave Spark out, which is slow to start.")
def demo(session: Session, records: int, no_spark: bool) -> None:
    """Take a tour: publish, tail, kill and recover, archive; every figure is measured.

    On a private server of its own, unless --url names one. Nothing is left behind.
    """
    from meteor_cli.demo.tour import Tour

    with cleaning_up():
        Tour(session, records, spark=not no_spark).run()
