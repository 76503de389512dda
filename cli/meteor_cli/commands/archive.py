"""``meteor archive``: archives streams and maintains their stores."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import options
from meteor_cli.args.times import parse_time
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import read_streams
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import confirm, progress
from meteor_cli.render.text import counted, print_table, say, show_bytes
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Archiver, Client, Description, SegmentDescription, Stream

#: Seconds between reports on a stream.
_REPORT_S = 1.0
#: Seconds without progress after which ``--once`` fails. Long enough for a killed
#: archiver's lease to expire, and for a large file to be uploaded.
_PATIENCE_S = 60.0

_store = click.option(
    "--store",
    metavar="URI",
    help="Address of the store. Needed if the store was moved or the address has a password.",
)


@click.group(cls=Group)
def archive() -> None:
    """Archive streams and maintain their stores."""


@command(
    "run",
    example="""\
meteor archive run                # all streams that have a store
meteor archive run orders --segment-age 10
meteor archive run --once orders  # for cron""",
)
@options.stream_names
@options.flag("--once", help="Archive the existing records, and exit.")
@options.count(
    "--segment-records", help="Write a file once N records are waiting. Default: 1,000,000."
)
@options.size(
    "--segment-bytes",
    min=1,
    help="Write a file once the waiting records use SIZE of memory. Default: 64MiB.",
)
@options.seconds(
    "--segment-age", help="Write a file once a record has waited this long. Default: 60."
)
@options.seconds(
    "--lease-ttl",
    positive=True,
    help="If this archiver is killed, another takes over after this time. Default: 10.",
)
@_store
def run(
    session: Session, streams: tuple[str, ...], once: bool, store: str | None, **settings: Any
) -> None:
    """Archive streams in the foreground until Ctrl-C.

    Without names, archives all streams that have a store when the command starts. You can run
    several archivers. For each stream, one is active and the others wait to take over.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if not session.verbose:  # show errors after which the archiver continues: it only logs them
        logging.getLogger("meteor_py").setLevel(logging.WARNING)
    with session.connect() as m:
        if streams:  # open all of them first: a wrong name must fail before any archiver starts
            archivers = [_archiver(m, name, store, given) for name in dict.fromkeys(streams)]
        else:
            archivers = _find_all(m, store, given)
        for archiver in archivers:
            if once:
                _flush(archiver)
            else:
                archiver.start()
                uri = archiver.stream.store.uri
                say(f"archiving stream {archiver.stream.name!r} to {uri}. Press Ctrl-C to stop.")
        if not once:
            _follow([_ArchiverReport(archiver) for archiver in archivers])


def _archiver(m: Client, name: str, store: str | None, settings: dict[str, Any]) -> Archiver:
    return m.stream(name, create=False, store=store, archive=False).archiver(**settings)


def _find_all(m: Client, store: str | None, settings: dict[str, Any]) -> list[Archiver]:
    """Return an archiver for each stream that has a store. Report streams that cannot be opened."""

    def make(stream: Stream) -> list[Archiver]:
        has_store = stream.describe().archived is not None
        return [_archiver(m, stream.name, store, settings)] if has_store else []

    found, is_complete = read_streams(m, make)
    if not found:
        if is_complete:
            say(
                "no stream has a store. `meteor streams create NAME --store DIR` creates such a "
                "stream."
            )
        raise click.exceptions.Exit(1)
    return found


class _ArchiverReport:
    """Reports one archiver's progress."""

    def __init__(self, archiver: Archiver) -> None:
        self.archiver = archiver
        self._archived: int | None = None
        self._owner: str | None = None

    def update(self) -> bool:
        """Report changes; return whether the archiver is alive."""
        from meteor_py import MeteorError

        alive = self.archiver.alive  # read first, so that the archiver's last progress is reported
        try:
            self._report(self.archiver.stream.describe())
        except MeteorError:
            pass  # the archiver gets the same error, and logs it or stops
        if not alive:
            self._report_end()
        return alive

    def _report(self, found: Description) -> None:
        if found.archiver is None and self._owner is None:
            return  # no archiver has the lease yet
        archived = found.archived or 0
        state = f"all records below {archived:,} are archived, {found.next - archived:,} waiting"
        if found.archiver not in (None, self._owner):
            self._owner = found.archiver
            if found.archiver == self.archiver.member:
                state = f"this process is the archiver; {state}"
            else:
                owner = sanitize(found.archiver or "")
                state = f"{owner} is the archiver, and this process is standing by; {state}"
        elif archived == self._archived:
            return
        self._archived = archived
        say(f"stream {found.name!r}: {state}.")

    def _report_end(self) -> None:
        from meteor_py import LogTruncated, StreamNotFound

        name, error = self.archiver.stream.name, self.archiver.error
        if isinstance(error, StreamNotFound):
            say(f"stream {name!r} was deleted; its archiver stopped.")
        elif isinstance(error, LogTruncated):
            say(
                f"stream {name!r} was deleted and recreated; its archiver stopped. Run the command "
                "again to archive the new stream."
            )
        try:
            self.archiver.close()
        except Exception:
            pass  # the error that stopped the archiver was logged


def _follow(reports: list[_ArchiverReport]) -> None:
    """Report on the archivers until all of them have stopped."""
    while reports := [report for report in reports if report.update()]:
        time.sleep(_REPORT_S)
    say("all archivers have stopped.")
    raise click.exceptions.Exit(1)


def _flush(archiver: Archiver) -> None:
    """Wait until this or another archiver has archived all records that the stream has now.

    Raises:
        StoreUnavailable: There was no progress for ``_PATIENCE_S`` seconds, or this archiver
            stopped.
    """
    from meteor_py import StoreUnavailable

    stream = archiver.stream
    archive, end = stream.store, stream.bounds()[1]
    start = archived = archive.bounds()[1]
    moved_at = time.monotonic()
    with archiver.start(), progress(f"archiving {stream.name}", end - start) as show:
        while archived < end:
            try:
                now = archive.flush(_REPORT_S)
            except StoreUnavailable:
                if time.monotonic() > moved_at + _PATIENCE_S or not archiver.alive:
                    raise
                now = archive.bounds()[1]
            if now > archived:
                archived, moved_at = now, time.monotonic()
                show(min(now, end) - start)
    new = counted(archived - start, "new record")
    say(f"stream {stream.name!r}: archived {new}. All records below {archived:,} are in the store.")


@command("ls", example="meteor archive ls orders --json | jq -r .file")
@options.stream_name
@options.json_lines
@_store
def list_segments(session: Session, stream: str, as_json: bool, store: str | None) -> None:
    """List a stream's archive files in offset order."""
    with session.stream(stream, store=store, archive=False) as opened:
        archive = opened.store
        found, end = archive.segments(), archive.bounds()[1]
    if as_json:
        for segment in found:
            print_json(to_fields(segment, stream=stream) | {"records": segment.records})
        return
    _print_segments(found)
    say(f"{_sum(found)}, in {archive.uri}." if found else _empty(stream, end))


@command("verify", example="meteor archive verify orders")
@options.stream_name
@options.json("Print one JSON object per flaw.")
@_store
def verify(session: Session, stream: str, as_json: bool, store: str | None) -> None:
    """Read the whole archive, verify its checksums, and report flaws.

    The exit status is 1 if a record is missing or damaged.
    """
    with session.stream(stream, store=store, archive=False) as opened:
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
        say(f"stream {stream!r}: {counted(harm, 'harmful flaw')}.")
        raise click.exceptions.Exit(1)
    whole = f"stream {stream!r}: records {first:,} to {end - 1:,} are intact."
    say(whole if end > first else _empty(stream, end))


@command("compact", example="meteor archive compact orders --max-bytes 1GiB")
@options.stream_name
@options.count("--max-records", help="Maximum records per file. Default: 1,000,000.")
@options.size("--max-bytes", min=1, help="Maximum file size. Default: 256MiB.")
@_store
def compact(session: Session, stream: str, store: str | None, **limits: int | None) -> None:
    """Merge small files into larger ones.

    The stream stays readable. The small files stay for at least ten minutes, because readers may be
    using them. Then an archiver removes them.
    """
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    with session.stream(stream, store=store, archive=False) as opened:
        archive = opened.store
        first, end = archive.bounds()
        with progress(f"compacting {stream}", end - first) as show:
            saved = archive.compact(**given, progress=lambda done, total: show(done))
        left = len(archive.segments())
    result = f"nothing to merge; {counted(left, 'file')}"
    if saved:
        result = f"{counted(saved, 'file')} fewer, {left:,} left"
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
    help="Delete records appended before a time: -30d, 2026-11-16, 2026-11-16T14:30:00Z.",
)
@options.size(
    "--max-bytes", help="Delete the oldest files until the rest use at most SIZE: 500GB, 1TiB."
)
@options.count("--offset", min=0, help="Delete records below this offset.")
@options.flag("--force", help="Also delete records that a group has not confirmed.")
@options.confirmation("Show what would be deleted, and exit.")
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

    Records that are still in the ring stay readable.
    """
    if all(value is None for value in criteria.values()):
        raise click.UsageError("Pass --before, --max-bytes or --offset.")
    with session.stream(stream, store=store, archive=False) as opened:
        archive = opened.store
        first = archive.bounds()[0]
        stop = archive.expire(**criteria, force=force, dry_run=True)
        wanted = archive.expire(**criteria, force=True, dry_run=True)
        if wanted > stop:
            _report_held_back(opened, stop, wanted)
        if stop <= first:
            why = "" if wanted > stop else "; no whole file matches"
            say(f"stream {stream!r}: nothing to delete{why}.")
            return
        doomed = [segment for segment in archive.segments() if segment.last < stop]
        subject = f"records {first:,} to {stop - 1:,} of stream {stream!r}"
        if dry_run:
            _print_segments(doomed)
        if not confirm(
            subject, f"deleted from the store: {_sum(doomed)}", dry_run=dry_run, yes=yes
        ):
            return
        # Delete by offset, so that no more is deleted than the user has confirmed.
        stop = archive.expire(offset=stop, force=force)
    say(f"records {first:,} to {stop - 1:,} of stream {stream!r} deleted from the store.")


def _report_held_back(stream: Stream, stop: int, wanted: int) -> None:
    names = [repr(group.name) for group in stream.groups() if group.confirmed < wanted]
    groups = f"group {names[0]} has" if len(names) == 1 else f"groups {', '.join(names)} have"
    say(
        f"records {stop:,} to {wanted - 1:,} stay, because {groups} not confirmed all of them. "
        "Use --force to delete them anyway."
    )


def _empty(stream: str, end: int) -> str:
    if end:
        return f"the store of stream {stream!r} is empty: all records below {end:,} have expired."
    return (
        f"stream {stream!r} has no archived records yet. Archive it: `meteor archive run {stream}`."
    )


def _print_segments(segments: Sequence[SegmentDescription]) -> None:
    rows = [
        [one.first, one.last, one.records, show_bytes(one.size), one.term, _name(one.file)]
        for one in segments
    ]
    print_table("first# | last# | records# | size# | term# | file", rows, whole=True)


def _name(file: str) -> str:
    """Return the last part of a path or URI. A URI's query may also contain slashes."""
    return (file.partition("?")[0] if "://" in file else file).rpartition("/")[2]


def _sum(segments: Sequence[SegmentDescription]) -> str:
    size = show_bytes(sum(segment.size for segment in segments))
    records = sum(segment.records for segment in segments)
    return f"{counted(records, 'record')} in {counted(len(segments), 'file')}, {size}"


for member in (run, list_segments, verify, compact, expire):
    archive.add_command(member)
