"""``meteor top``: all streams and groups at a glance, as they change."""

from __future__ import annotations

import time

import click

from meteor_cli.args import options
from meteor_cli.command import command
from meteor_cli.live.screen import Sort, View, draw, ranked
from meteor_cli.live.top import FIRST_S, Display, Gauge, open_console
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.session import Session

#: How many times as long as for an answer to wait for a server that has gone: 30 s.
_PATIENCE = 6


@command(
    example="""\
meteor top                           # all streams, until q or Ctrl-C
meteor top orders trades --sort lag  # two, the farthest behind first
meteor top --once --json | jq '{name, rate, unarchived}'"""
)
@options.stream_names
@options.interval(2.0)
@click.option(
    "--sort",
    type=click.Choice(["name", "rate", "lag", "memory"]),
    default="name",
    help="What comes first; where there is no room for all, what is shown at all.",
)
@options.count("-n", "--number", help="Show at most N streams.")
@options.flag("--once", help="Print one look, with rates over one second, and end.")
@options.json("With --once: one JSON object per stream.")
def top(
    session: Session,
    streams: tuple[str, ...],
    interval: float,
    sort: Sort,
    number: int | None,
    once: bool,
    as_json: bool,
) -> None:
    """Show streams, their groups and their stores as they change.

    For each stream: records published per second, records in the ring and how many it holds,
    memory. Beneath it what reads it: records confirmed per second, how many wait (lag), and who
    has the lease; `(store)` is the archiver. "lost": dropped before the group had read them.
    """
    if as_json and not once:
        raise click.UsageError("--json is for one look: say --once, or use `meteor watch --json`.")
    console = None if once else open_console()
    with session.connect() as m:
        for name in streams:
            m.stream(name, create=False)  # a name that is wrong is an error now, not an empty table
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
    lines = draw(view, sort, width=width, height=None, number=number)
    # By way of click, which tells when nobody reads; rich would end the program.
    with console.capture() as capture:
        for line in lines:
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
