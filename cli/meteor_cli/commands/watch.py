"""``meteor watch``: prints a line for each change to a stream or group, for logs and alerts."""

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
meteor watch orders --lag 10000  # also report groups that fall behind
meteor watch --json | jq -c 'select(.event == "lease_taken_over")'"""
)
@options.stream_names
@options.interval(1.0)
@options.count(
    *("--lag", "lag_max"),
    min=0,
    help="Also report when a group's lag rises above N, and when it falls back.",
)
@options.json_lines
def watch(
    session: Session, streams: tuple[str, ...], interval: float, lag_max: int | None, as_json: bool
) -> None:
    """Print a line for each change to a stream, group or lease.

    Reports streams that are created or deleted; groups that are created, deleted or moved back;
    leases that are taken, taken over or ended; records that the server lost, or that the ring
    dropped before a group confirmed them; and stores that have records waiting but no archiver.
    Does not report a change that is undone within one interval.
    """
    with session.connect() as m:
        watcher = Watcher(Observer(m, streams), lag_max, as_json=as_json)
        watcher.begin(streams)
        while True:
            time.sleep(interval)
            watcher.step()
