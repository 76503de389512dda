"""``meteor watch``: a line for each change of streams and groups, for logs and alerts."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import click

from meteor_cli.changes import Change, changes
from meteor_cli.command import command
from meteor_cli.completion import complete_stream
from meteor_cli.harmless import harmless, harmless_json
from meteor_cli.output import Sink, counted, say
from meteor_cli.session import Session
from meteor_cli.snapshot import Look, Observer

if TYPE_CHECKING:
    from meteor_py import MeteorError


@command(
    example="""\
meteor watch                     # all streams, until Ctrl-C
meteor watch orders --lag 10000  # also when a group falls behind
meteor watch --json | jq -c 'select(.event == "lease_taken_over")'"""
)
@click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=complete_stream)
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=3600),
    default=1.0,
    metavar="SECONDS",
    help="Time between two looks: 1.",
)
@click.option(
    "--lag",
    "lag_max",
    type=click.IntRange(min=0),
    metavar="N",
    help="Also tell when a group is more than N records behind, and when it no longer is.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
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


class Watcher:
    """Looks, compares with the look before, and prints what is new."""

    def __init__(self, observer: Observer, lag_max: int | None, *, as_json: bool) -> None:
        self._observer = observer
        self._lag_max = lag_max
        self._render = to_json if as_json else to_text
        self._sink = Sink()
        self._before = Look()
        self._is_gone = False

    def begin(self, named: tuple[str, ...]) -> None:
        """Look for the first time; a server that cannot be reached is an error now."""
        self._before = self._observer.look()
        self._print(changes(None, self._before, self._lag_max))
        found = len(self._before.streams)
        say(f"watching {counted(found, 'stream')}.")
        for name in named:
            if name not in self._before.streams and name not in self._before.unreadable:
                say(f"there is no stream {name!r} yet; waiting for it.")
        if self._before.left_off:
            say(f"{self._before.left_off:,} more are not watched; name those that matter.")

    def step(self) -> None:
        """Look again.

        Raises:
            BrokenPipeError: Nobody reads any more.
        """
        from meteor_py import ConnectionFailed

        self._sink.check_reader()
        try:
            after = self._observer.look()
        except ConnectionFailed as error:
            self._note_gone(error)
            return
        if self._is_gone:
            self._is_gone = False
            self._print([Change(None, None, "server_back", "the server answers again")])
        before, self._before = self._before, after
        self._print(changes(before, after, self._lag_max))

    def _note_gone(self, error: MeteorError) -> None:
        """A monitor that ends with what it monitors is of no use: it goes on looking."""
        if not self._is_gone:
            self._is_gone = True
            reason = str(error)
            self._print([Change(None, None, "server_gone", reason, {"reason": reason})])

    def _print(self, found: list[Change]) -> None:
        if found:
            now = datetime.now().astimezone()
            self._sink.write("".join(f"{self._render(each, now)}\n" for each in found).encode())


def to_text(change: Change, at: datetime) -> str:
    """A line for people."""
    names = [harmless(name) for name in (change.stream, change.group) if name is not None]
    where = f"{'/'.join(names)}: " if names else ""
    return f"{at.isoformat(timespec='seconds')} {where}{harmless(change.text)}"


def to_json(change: Change, at: datetime) -> str:
    """An object for programs: time, stream, group, event, and what belongs to the event."""
    import msgspec

    fields = {
        "time": at.isoformat(timespec="milliseconds"),
        "stream": change.stream,
        "group": change.group,
        "event": change.event,
        **change.facts,
    }
    return harmless_json(msgspec.json.encode(fields).decode())
