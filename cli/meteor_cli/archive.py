"""``meteor archive``: the history of streams in their stores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.archiver import open_stored, run, store_option
from meteor_cli.command import Group, command
from meteor_cli.completion import complete_stream
from meteor_cli.harmless import harmless
from meteor_cli.output import ask, counted, print_json, print_table, progress, say, show_bytes
from meteor_cli.position import TimeType
from meteor_cli.session import Session
from meteor_cli.size import SizeType

if TYPE_CHECKING:
    from meteor_py import Flaw, SegmentDescription, Stream


@click.group(cls=Group)
def archive() -> None:
    """Archive streams, and look after what is in their stores."""


@command("ls", example="meteor archive ls orders --json | jq -r .file")
@click.argument("stream", shell_complete=complete_stream)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
@store_option
def list_segments(session: Session, stream: str, as_json: bool, store: str | None) -> None:
    """List the files that hold the history of a stream, in order."""
    with _opened(session, stream, store) as opened:
        archive = opened.store
        found, end = archive.segments(), archive.bounds()[1]
    if as_json:
        for segment in found:
            print_json(segment_fields(stream, segment))
        return
    _print_segments(found)
    if found:
        say(f"{_sum(found)}, in {archive.uri}")
    else:
        say(f"{_empty(stream, end)}.")


@command("verify", example="meteor archive verify orders")
@click.argument("stream", shell_complete=complete_stream)
@click.option(
    "--json", "as_json", is_flag=True, help="What is wrong, one JSON object on each line."
)
@store_option
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
            print_json(flaw_fields(stream, flaw))
        else:
            click.echo(_show_flaw(flaw))
    harm = sum(not flaw.harmless for flaw in flaws)
    if harm:
        say(f"stream {stream!r} has {counted(harm, 'flaw')} that cannot be called harmless.")
        raise click.exceptions.Exit(1)
    whole = f"stream {stream!r}: records {first:,} to {end - 1:,} are whole"
    say(f"{whole if end > first else _empty(stream, end)}.")


@command("compact", example="meteor archive compact orders --max-bytes 1GiB")
@click.argument("stream", shell_complete=complete_stream)
@click.option(
    "--max-records",
    type=click.IntRange(min=1),
    metavar="N",
    help="The largest file to make, in records: 1,000,000.",
)
@click.option(
    "--max-bytes", type=SizeType(min=1), metavar="SIZE", help="The same in bytes: 256MiB."
)
@store_option
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
    if saved:
        say(f"stream {stream!r}: {counted(saved, 'file')} fewer to read, {left:,} in all.")
    else:
        say(f"stream {stream!r}: nothing to merge; {counted(left, 'file')}.")


@command(
    "expire",
    example="""\
meteor archive expire orders --before -30d --dry-run
meteor archive expire orders --max-bytes 500GB --yes""",
)
@click.argument("stream", shell_complete=complete_stream)
@click.option(
    "--before",
    type=TimeType(),
    metavar="TIME",
    help="What was appended before this time: -30d, 2026-11-16, 2026-11-16T14:30:00Z.",
)
@click.option(
    "--max-bytes",
    type=SizeType(),
    metavar="SIZE",
    help="So much that the files which stay are not larger together: 500GB, 1TiB.",
)
@click.option("--offset", type=click.IntRange(min=0), metavar="N", help="What lies below.")
@click.option("--force", is_flag=True, help="Also what a group has not confirmed yet.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@store_option
def expire(
    session: Session,
    stream: str,
    before: datetime | None,
    max_bytes: int | None,
    offset: int | None,
    force: bool,
    dry_run: bool,
    yes: bool,
    store: str | None,
) -> None:
    """Delete the oldest records from the store, in whole files.

    What the ring still holds can be read from there as long as it does.
    """
    criteria: dict[str, Any] = {"before": before, "max_bytes": max_bytes, "offset": offset}
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


for member in (run, list_segments, verify, compact, expire):
    archive.add_command(member)


@contextmanager
def _opened(session: Session, name: str, store: str | None) -> Iterator[Stream]:
    with session.connect() as m:
        yield open_stored(m, name, store)


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
    print_table(
        ["first#", "last#", "records#", "size#", "term#", "file"],
        [
            [
                segment.first,
                segment.last,
                segment.records,
                show_bytes(segment.size),
                segment.term,
                _name(segment.file),
            ]
            for segment in segments
        ],
        whole=True,
    )


def _name(file: str) -> str:
    """The last part of a path, or of a URI, which may have a query with paths in it."""
    return (file.partition("?")[0] if "://" in file else file).rpartition("/")[2]


def _sum(segments: Sequence[SegmentDescription]) -> str:
    size = show_bytes(sum(segment.size for segment in segments))
    records = sum(segment.records for segment in segments)
    return f"{counted(records, 'record')} in {counted(len(segments), 'file')}, {size}"


def _show_flaw(flaw: Flaw) -> str:
    mark = " (harmless)" if flaw.harmless else ""
    text = f"{flaw.kind}{mark}: records {flaw.first} to {flaw.last}, {flaw.place}: {flaw.problem}"
    return harmless(text)


def segment_fields(stream: str, segment: SegmentDescription) -> dict[str, Any]:
    """The fields of ``SegmentDescription``, its records, and the stream: what ``--json`` shows."""
    import msgspec

    return {"stream": stream, **msgspec.to_builtins(segment), "records": segment.records}


def flaw_fields(stream: str, flaw: Flaw) -> dict[str, Any]:
    """The fields of ``Flaw``, whether it is harmless, and the stream: what ``--json`` shows."""
    return {"stream": stream, **flaw._asdict(), "harmless": flaw.harmless}
