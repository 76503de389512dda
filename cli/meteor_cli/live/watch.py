"""Output of ``meteor watch``: a line for each change to a stream or group."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from meteor_cli.live.changes import Change, changes
from meteor_cli.live.snapshot import Observer, Snapshot
from meteor_cli.render.json import to_json as encode
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import Sink
from meteor_cli.render.text import counted, say

if TYPE_CHECKING:
    from meteor_py import MeteorError


class Watcher:
    """Takes snapshots and prints the changes between them."""

    def __init__(self, observer: Observer, lag_max: int | None, *, as_json: bool) -> None:
        self._observer = observer
        self._lag_max = lag_max
        self._render = to_json if as_json else to_text
        self._sink = Sink()
        self._before = Snapshot()
        self._is_gone = False

    def begin(self, named: tuple[str, ...]) -> None:
        """Print existing problems. Raises the same errors as ``Observer.snapshot``."""
        self._before = self._observer.snapshot()
        say(f"watching {counted(len(self._before.streams), 'stream')}.")
        for name in named:
            if name not in self._before.streams and name not in self._before.unreadable:
                say(f"there is no stream {name!r} yet; waiting for it.")
        if self._before.left_off:
            more = counted(self._before.left_off, "more stream", "is", "are")
            say(f"{more} not watched. Pass the names of the streams to watch.")
        self._print(changes(None, self._before, self._lag_max))

    def step(self) -> None:
        """Print the changes since the last snapshot.

        Raises ``BrokenPipeError`` if the pipe no longer has a reader.
        """
        from meteor_py import ConnectionFailed

        self._sink.check_reader()
        try:
            after = self._observer.snapshot()
        except ConnectionFailed as error:
            self._note_gone(error)
            return
        if self._is_gone:
            self._is_gone = False
            self._print([Change(None, None, "server_back", "the server is back")])
        before, self._before = self._before, after
        self._print(changes(before, after, self._lag_max))

    def _note_gone(self, error: MeteorError) -> None:
        """Report once that the server is gone. A monitor must survive an outage."""
        if not self._is_gone:
            self._is_gone = True
            reason = str(error)
            self._print([Change(None, None, "server_gone", reason, {"reason": reason})])

    def _print(self, found: list[Change]) -> None:
        if found:
            now = datetime.now().astimezone()
            self._sink.write("".join(f"{self._render(each, now)}\n" for each in found).encode())


def to_text(change: Change, at: datetime) -> str:
    """Format a change as human-readable text."""
    names = [name for name in (change.stream, change.group) if name is not None]
    where = f"{'/'.join(names)}: " if names else ""
    return f"{at.isoformat(timespec='seconds')} {sanitize(where + change.text)}"


def to_json(change: Change, at: datetime) -> str:
    """Format a change as JSON: time, stream, group, event, and the event's facts."""
    where = {"stream": change.stream, "group": change.group, "event": change.event}
    return encode({"time": at.isoformat(timespec="milliseconds")} | where | change.facts)
