"""``meteor archive``: move records into stores, and look after what is there."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import options
from meteor_cli.args.times import parse_time
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import look_at_streams
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import ask, progress
from meteor_cli.render.text import counted, print_table, say, show_bytes
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Archiver, Client, Description, SegmentDescription, Stream

#: Seconds between two looks at the streams: what is told, is told no more often.
LOOK_S = 1.0
#: Seconds without any progress after which ``--once`` gives up. The lease of an archiver that was
#: killed has run out by then, and a large file is uploaded.
PATIENCE_S = 60.0

_store = click.option(
    "--store",
    metavar="URI",
    help="Where the store is, if it was moved, or its address has a password; else the stream "
    "knows.",
)


@click.group(cls=Group)
def archive() -> None:
    """Archive streams, and look after what is in their stores."""


@command(
    "run",
    example="""\
meteor archive run                # all streams that have a store
meteor archive run orders --segment-age 10
meteor archive run --once orders  # what is there now; for cron""",
)
@options.stream_names
@options.flag("--once", help="Archive what is there now, and end.")
@options.count(
    "--segment-records", help="Write a file as soon as there are so many records: 1,000,000."
)
@options.size(
    "--segment-bytes", min=1, help="Or as soon as they have so many bytes, in memory: 64MiB."
)
@options.seconds("--segment-age", help="Or as soon as the first of them has waited so long: 60.")
@options.seconds(
    "--lease-ttl",
    positive=True,
    help="Let another take over so long after this one was killed: 10.",
)
@_store
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
            opened = [_open(m, name, store) for name in dict.fromkeys(streams)]
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
            _follow([_ArchiverReport(archiver) for archiver in archivers])


def _find_all(m: Client, store: str | None, settings: dict[str, Any]) -> list[Archiver]:
    """For each stream with a store that can be reached; the others are named."""

    def make(stream: Stream) -> list[Archiver]:
        has_store = stream.describe().archived is not None
        return [_open(m, stream.name, store).archiver(**settings)] if has_store else []

    found, is_all = look_at_streams(m, make)
    if not found:
        if is_all:
            say("no stream has a store; `meteor streams create NAME --store DIR` makes one.")
        raise click.exceptions.Exit(1)
    return found


class _ArchiverReport:
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
                owner = sanitize(found.archiver or "")
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


def _follow(reports: list[_ArchiverReport]) -> None:
    """Tell what goes on, as long as any archiver works."""
    while reports := [report for report in reports if report.look()]:
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


@command("ls", example="meteor archive ls orders --json | jq -r .file")
@options.stream_name
@options.json_lines
@_store
def list_segments(session: Session, stream: str, as_json: bool, store: str | None) -> None:
    """List the files that hold the history of a stream, in order."""
    with _opened(session, stream, store) as opened:
        archive = opened.store
        found, end = archive.segments(), archive.bounds()[1]
    if as_json:
        for segment in found:
            print_json(to_fields(segment, stream=stream) | {"records": segment.records})
        return
    _print_segments(found)
    say(f"{_sum(found)}, in {archive.uri}" if found else f"{_empty(stream, end)}.")


@command("verify", example="meteor archive verify orders")
@options.stream_name
@options.json("What is wrong, one JSON object on each line.")
@_store
def verify(session: Session, stream: str, as_json: bool, store: str | None) -> None:
    """Read all that is archived, and tell what is wrong.

    All checksums are compared. The exit code is 1 if a record is missing or damaged.
    """
    with _opened(session, stream, store) as opened:
        archive = opened.store
        first, end = archive.bounds()
        with progress(f"verifying {stream}", end - first) as show:
            flaws = archive.verify(lambda done, total: show(done))
    for flaw in flaws:
        if as_json:
            print_json({"stream": stream, **flaw._asdict(), "harmless": flaw.harmless})
        else:
            mark = " (harmless)" if flaw.harmless else ""
            where = f"records {flaw.first} to {flaw.last}, {flaw.place}"
            click.echo(sanitize(f"{flaw.kind}{mark}: {where}: {flaw.problem}"))
    harm = sum(not flaw.harmless for flaw in flaws)
    if harm:
        say(f"stream {stream!r} has {counted(harm, 'flaw')} that cannot be called harmless.")
        raise click.exceptions.Exit(1)
    whole = f"stream {stream!r}: records {first:,} to {end - 1:,} are whole"
    say(f"{whole if end > first else _empty(stream, end)}.")


@command("compact", example="meteor archive compact orders --max-bytes 1GiB")
@options.stream_name
@options.count("--max-records", help="The largest file to make, in records: 1,000,000.")
@options.size("--max-bytes", min=1, help="The same in bytes: 256MiB.")
@_store
def compact(session: Session, stream: str, store: str | None, **limits: int | None) -> None:
    """Merge small files into larger ones. Nobody who reads notices.

    The small ones stay for ten minutes, for whoever has a list of them; then an archiver removes
    them.
    """
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    with _opened(session, stream, store) as opened:
        archive = opened.store
        first, end = archive.bounds()
        with progress(f"compacting {stream}", end - first) as show:
            saved = archive.compact(**given, progress=lambda done, total: show(done))
        left = len(archive.segments())
    result = f"nothing to merge; {counted(left, 'file')}"
    if saved:
        result = f"{counted(saved, 'file')} fewer to read, {left:,} in all"
    say(f"stream {stream!r}: {result}.")


@command(
    "expire",
    example="""\
meteor archive expire orders --before -30d --dry-run
meteor archive expire orders --max-bytes 500GB --yes""",
)
@options.stream_name
@click.option(
    "--before",
    type=options.Parsed("time", lambda text: parse_time(text.removeprefix("@"))),
    metavar="TIME",
    help="What was appended before this time: -30d, 2026-11-16, 2026-11-16T14:30:00Z.",
)
@options.size(
    "--max-bytes", help="So much that the files which stay are not larger together: 500GB, 1TiB."
)
@options.count("--offset", min=0, help="What lies below.")
@options.flag("--force", help="Also what a group has not confirmed yet.")
@options.confirmation("Only show what would be deleted.")
@_store
def expire(
    session: Session,
    stream: str,
    force: bool,
    dry_run: bool,
    yes: bool,
    store: str | None,
    **criteria: Any,
) -> None:
    """Delete the oldest records from the store, in whole files.

    What the ring still holds can be read from there as long as it does.
    """
    if all(value is None for value in criteria.values()):
        raise click.UsageError("Say what may go: --before, --max-bytes or --offset.")
    with _opened(session, stream, store) as opened:
        archive = opened.store
        first = archive.bounds()[0]
        stays = archive.expire(**criteria, force=force, dry_run=True)
        wanted = archive.expire(**criteria, force=True, dry_run=True)
        if wanted > stays:
            _tell_held_back(opened, stays, wanted)
        if stays <= first:
            why = "" if wanted > stays else "; no whole file lies before that"
            say(f"stream {stream!r}: nothing to delete{why}.")
            return
        doomed = [segment for segment in archive.segments() if segment.last < stays]
        what = f"records {first:,} to {stays - 1:,} of stream {stream!r}, {_sum(doomed)}"
        if dry_run:
            _print_segments(doomed)
            say(f"would be deleted: {what}.")
            return
        ask(f"This will be deleted from the store: {what}.", yes=yes)
        # By the offset: no more than what was shown, however long the answer took.
        stays = archive.expire(offset=stays, force=force)
    say(f"deleted from the store: records {first:,} to {stays - 1:,} of stream {stream!r}.")


@contextmanager
def _opened(session: Session, name: str, store: str | None) -> Iterator[Stream]:
    with session.connect() as m:
        yield _open(m, name, store)


def _open(m: Client, name: str, store: str | None) -> Stream:
    """A stream whose history is looked at; nobody archives it by that alone."""
    return m.stream(name, create=False, store=store, archive=False)


def _tell_held_back(stream: Stream, stays: int, wanted: int) -> None:
    names = [repr(group.name) for group in stream.groups() if group.confirmed < wanted]
    groups = f"group {names[0]} has" if len(names) == 1 else f"groups {', '.join(names)} have"
    say(
        f"records {stays:,} to {wanted - 1:,} stay, because {groups} not confirmed all of them; "
        "--force would delete them, too."
    )


def _empty(stream: str, end: int) -> str:
    if end:
        return f"the store of stream {stream!r} is empty: all below {end:,} has expired"
    return f"nothing of stream {stream!r} is archived yet; `meteor archive run {stream}` does it"


def _print_segments(segments: Sequence[SegmentDescription]) -> None:
    rows = [
        [one.first, one.last, one.records, show_bytes(one.size), one.term, _name(one.file)]
        for one in segments
    ]
    print_table("first# | last# | records# | size# | term# | file", rows, whole=True)


def _name(file: str) -> str:
    """The last part of a path, or of a URI, which may have a query with paths in it."""
    return (file.partition("?")[0] if "://" in file else file).rpartition("/")[2]


def _sum(segments: Sequence[SegmentDescription]) -> str:
    size = show_bytes(sum(segment.size for segment in segments))
    records = sum(segment.records for segment in segments)
    return f"{counted(records, 'record')} in {counted(len(segments), 'file')}, {size}"


for member in (run, list_segments, verify, compact, expire):
    archive.add_command(member)
