"""``meteor top``: a live table of all streams and groups."""

from __future__ import annotations

import time

import click

from meteor_cli.args import options
from meteor_cli.command import command
from meteor_cli.live.screen import Sort, View, draw, ranked
from meteor_cli.live.top import FIRST_S, Display, Gauge, open_console
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.session import Session

#: Maximum time to wait for an unreachable server, as a multiple of ``--timeout``. By default, this
#: is 30 s.
_PATIENCE = 6


@command(
    example="""\
meteor top                           # all streams, until q or Ctrl-C
meteor top orders trades --sort lag  # two streams, the largest lag first
meteor top --once --json | jq '{name, rate, unarchived}'"""
)
@options.stream_names
@options.interval(2.0)
@click.option(
    "--sort",
    type=click.Choice(["name", "rate", "lag", "memory"]),
    default="name",
    help="Sort order. If the screen is too small, the last streams are hidden. Default: name.",
)
@options.count("-n", "--number", help="Show at most N streams.")
@options.flag("--once", help="Measure for one second, print the table once, and exit.")
@options.json("With --once: print one JSON object per stream.")
def top(
    session: Session,
    streams: tuple[str, ...],
    interval: float,
    sort: Sort,
    number: int | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show a live table of streams, groups and stores.

    For each stream, the table shows the records published per second, the records in the ring, and
    the ring's capacity and memory. For each group below the stream, it shows the records confirmed
    per second, the lag, and the lease owner. The row `(store)` shows the archiver. "lost" counts
    records that were dropped before the group confirmed them.
    """
    if as_json and not once:
        raise click.UsageError("--json needs --once; for a live feed, use `meteor watch --json`.")
    console = None if once else open_console()
    with session.connect() as m:
        for name in streams:
            m.stream(name, create=False)  # a wrong name is an error, not an empty table
        gauge = Gauge(m, streams)
        view = gauge.measure()
        if console is not None:
            patience_s = _PATIENCE * session.timeout
            Display(console, gauge, view, sort, number).run(interval, patience_s)
            return
        time.sleep(FIRST_S)
        view = gauge.measure()
    if as_json:
        _print_json(view, sort, number)
    else:
        _print_text(view, sort, number)


def _print_text(view: View, sort: Sort, number: int | None) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    width = console.width if console.is_terminal else None
    # Print with click: on a closed pipe, rich would end the process.
    with console.capture() as capture:
        for line in draw(view, sort, width=width, height=None, number=number):
            console.print(line, soft_wrap=True)
    click.echo(capture.get(), nl=False)


def _print_json(view: View, sort: Sort, number: int | None) -> None:
    for name, seen in ranked(view, sort)[:number]:
        rates = view.rates[name]
        fields = to_fields(seen.stream) | {
            "rate": rates.published,
            "unarchived": None if seen.stream.archived is None else seen.unarchived,
            "archive_rate": rates.archived,
        }
        for group in fields["groups"]:
            group["rate"] = rates.confirmed.get(group["name"])
        print_json(fields)
