"""``meteor watch``: a line for each change of streams and groups, for logs and alerts."""

from __future__ import annotations

import time

from meteor_cli.args import options
from meteor_cli.command import command
from meteor_cli.live.snapshot import Observer
from meteor_cli.live.watch import Watcher
from meteor_cli.session import Session


@command(
    example="""\
meteor watch                     # all streams, until Ctrl-C
meteor watch orders --lag 10000  # also when a group falls behind
meteor watch --json | jq -c 'select(.event == "lease_taken_over")'"""
)
@options.stream_names
@options.interval(1.0)
@options.count(
    *("--lag", "lag_max"),
    min=0,
    help="Also tell when a group is more than N records behind, and when it no longer is.",
)
@options.json_lines
def watch(
    session: Session, streams: tuple[str, ...], interval: float, lag_max: int | None, as_json: bool
) -> None:
    """Print a line for each change of streams, groups and leases.

    Streams created, deleted, created anew; records that the server lost, or that the ring dropped
    before a group had read them; groups begun, deleted, moved back; leases taken, taken over and
    ended; records that nobody archives. What comes and goes between two looks is not seen.
    """
    with session.connect() as m:
        watcher = Watcher(Observer(m, streams), lag_max, as_json=as_json)
        watcher.begin(streams)
        while True:
            time.sleep(interval)
            watcher.step()
