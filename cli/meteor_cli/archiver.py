"""``meteor archive run``: move records into stores, until somebody ends it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.command import command
from meteor_cli.completion import complete_stream
from meteor_cli.harmless import harmless
from meteor_cli.output import progress, say
from meteor_cli.session import Session
from meteor_cli.size import SizeType
from meteor_cli.survey import look_at_all

if TYPE_CHECKING:
    from meteor_py import Archiver, Client, Description, Stream

#: Seconds between two looks at the streams: what is told, is told no more often.
LOOK_S = 1.0
#: Seconds without any progress after which ``--once`` gives up. The lease of an archiver that was
#: killed has run out by then, and a large file is uploaded.
PATIENCE_S = 60.0

#: For all commands of ``meteor archive``.
store_option = click.option(
    "--store",
    metavar="URI",
    help="Where the store is, if it was moved, or its address has a password; else the stream "
    "knows.",
)


def open_stored(m: Client, name: str, store: str | None) -> Stream:
    """A stream whose history is looked at; nobody archives it by that alone."""
    return m.stream(name, create=False, store=store, archive=False)


@command(
    "run",
    example="""\
meteor archive run                # all streams that have a store
meteor archive run orders --segment-age 10
meteor archive run --once orders  # what is there now; for cron""",
)
@click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=complete_stream)
@click.option("--once", is_flag=True, help="Archive what is there now, and end.")
@click.option(
    "--segment-records",
    type=click.IntRange(min=1),
    metavar="N",
    help="Write a file as soon as there are so many records: 1,000,000.",
)
@click.option(
    "--segment-bytes",
    type=SizeType(min=1),
    metavar="SIZE",
    help="Or as soon as they have so many bytes, in memory: 64MiB.",
)
@click.option(
    "--segment-age",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Or as soon as the first of them has waited so long: 60.",
)
@click.option(
    "--lease-ttl",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Let another take over so long after this one was killed: 10.",
)
@store_option
def run(
    session: Session, streams: tuple[str, ...], once: bool, store: str | None, **settings: Any
) -> None:
    """Archive streams in the foreground, until Ctrl-C.

    Without names: all streams that have a store when it starts. Any number may run; of each stream
    one archives, and the others wait to take over.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if not session.verbose:  # what an archiver meets, and survives, is told by its log
        logging.getLogger("meteor_py").setLevel(logging.WARNING)
    with session.connect() as m:
        if streams:  # all, or none is begun
            opened = [open_stored(m, name, store) for name in dict.fromkeys(streams)]
            archivers = [stream.archiver(**given) for stream in opened]
        else:
            archivers = _find_all(m, store, given)
        for archiver in archivers:
            if once:
                _flush(archiver)
            else:
                archiver.start()
                uri = archiver.stream.store.uri
                say(f"stream {archiver.stream.name!r} goes to {uri}; Ctrl-C ends it.")
        if not once:
            _follow([_Watch(archiver) for archiver in archivers])


def _find_all(m: Client, store: str | None, settings: dict[str, Any]) -> list[Archiver]:
    """For each stream with a store that can be reached; the others are named."""

    def make(stream: Stream) -> Archiver | None:
        if stream.describe().archived is None:
            return None
        return open_stored(m, stream.name, store).archiver(**settings)

    made, is_all = look_at_all(m, make)
    found = [archiver for archiver in made if archiver is not None]
    if not found:
        if is_all:
            say("no stream has a store; `meteor streams create NAME --store DIR` makes one.")
        raise click.exceptions.Exit(1)
    return found


class _Watch:
    """What was told of one archiver."""

    def __init__(self, archiver: Archiver) -> None:
        self.archiver = archiver
        self._archived: int | None = None
        self._owner: str | None = None

    def look(self) -> bool:
        """Tell what is new; False if it was the last."""
        from meteor_py import MeteorError

        alive = self.archiver.alive  # before the look: what it did last is told, too
        try:
            self._tell(self.archiver.stream.describe())
        except MeteorError:
            pass  # the archiver meets the same: it goes on, and the log tells; or it ends
        if not alive:
            self._tell_end()
        return alive

    def _tell(self, found: Description) -> None:
        if found.archiver is None and self._owner is None:
            return  # nobody has begun
        archived = found.archived or 0
        state = f"archived below {archived:,}, {found.next - archived:,} wait"
        if found.archiver not in (None, self._owner):
            self._owner = found.archiver
            if found.archiver == self.archiver.member:
                state = f"this process archives it; {state}"
            else:
                owner = harmless(found.archiver or "")
                state = f"{owner} archives it, and this process waits to take over; {state}"
        elif archived == self._archived:
            return
        self._archived = archived
        say(f"stream {found.name!r}: {state}.")

    def _tell_end(self) -> None:
        from meteor_py import LogTruncated, StreamNotFound

        name, error = self.archiver.stream.name, self.archiver.error
        if isinstance(error, StreamNotFound):
            say(f"stream {name!r} was deleted, so its archiver has ended.")
        elif isinstance(error, LogTruncated):
            say(
                f"stream {name!r} was deleted and created anew, so its archiver has ended; start "
                "this command again to archive the new one."
            )
        try:
            self.archiver.close()
        except Exception:
            pass  # what has ended it, which the log has told


def _follow(watches: list[_Watch]) -> None:
    """Tell what goes on, as long as any archiver works."""
    while watches := [watch for watch in watches if watch.look()]:
        time.sleep(LOOK_S)
    say("no archiver is left.")
    raise click.exceptions.Exit(1)


def _flush(archiver: Archiver) -> None:
    """Have all archived that the stream holds now, by whoever has the lease.

    Raises:
        StoreUnavailable: Nothing has moved for a while.
    """
    from meteor_py import StoreUnavailable

    stream = archiver.stream
    archive, end = stream.store, stream.bounds()[1]
    start = archived = archive.bounds()[1]
    moved_at = time.monotonic()
    with archiver.start(), progress(f"archiving {stream.name}", end - start) as show:
        while archived < end:
            try:
                now = archive.flush(LOOK_S)
            except StoreUnavailable:
                if time.monotonic() > moved_at + PATIENCE_S or not archiver.alive:
                    raise
                now = archive.bounds()[1]
            if now > archived:
                archived, moved_at = now, time.monotonic()
                show(min(now, end) - start)
    say(f"stream {stream.name!r}: archived below {archived:,}, {archived - start:,} of that now.")
