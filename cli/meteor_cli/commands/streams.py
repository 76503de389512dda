"""``meteor streams``: list, describe, create, change, repair and delete streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from meteor_cli.args import completion, options
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import print_list, read_streams
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import (
    counted,
    print_facts,
    print_table,
    say,
    show_age,
    show_bytes,
    show_exactly,
)
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Description

T = TypeVar("T")


@click.group(cls=Group)
def streams() -> None:
    """List, describe, create, change, repair and delete streams."""


@command("ls", example="meteor streams ls --json | jq -r .name")
@options.json_lines
def list_streams(session: Session, as_json: bool) -> None:
    """List the streams."""
    with session.connect() as m:
        found = read_streams(m, lambda stream: [stream.describe()])
    if_none = "there are no streams yet. `meteor publish NAME hello` creates one."
    print_list(found, as_json, to_fields, _print_streams, if_none)


def _print_streams(found: Sequence[Description]) -> None:
    now_ms = int(time.time() * 1000)
    print_table(
        "stream | first# | next# | in ring# | memory# | archived# | groups# | lag# | idle#",
        [
            [
                *(one.name, one.first, one.next, one.length, show_bytes(one.bytes), one.archived),
                len(one.groups),
                max((group.lag for group in one.groups), default=None),
                show_age(one.appended, now_ms),
            ]
            for one in found
        ],
    )


@command("info", example="meteor streams info orders")
@options.stream_name
@options.json_object
def describe_stream(session: Session, stream: str, as_json: bool) -> None:
    """Show the bounds, size, settings and groups of a stream."""
    with session.stream(stream) as opened:
        found = opened.describe()
    if as_json:
        print_json(to_fields(found))
        return
    print_facts(_facts(found))
    if found.groups:
        from meteor_cli.commands.groups import print_groups

        click.echo()
        print_groups([(stream, group) for group in found.groups])


def _facts(found: Description) -> dict[str, object]:
    now_ms, config = int(time.time() * 1000), found.config
    facts: dict[str, object] = {
        "stream": found.name,
        "records": f"{found.next - found.first:,} (first offset {found.first}, next {found.next})",
        "in ring": f"{found.length:,} of {config.capacity:,}, in {counted(found.frames, 'frame')}",
        "memory": show_bytes(found.bytes),
        "max age": _limit(config.max_age, show_exactly),
        "max bytes": _limit(config.max_bytes, show_bytes),
        "last append": f"{show_age(found.appended, now_ms)} ago" if found.appended else "never",
        "codec": config.codec,
        "compression": config.compression,
        "checksum": config.checksum,
        "ordering key": config.ordering_key,
        "incarnation": found.incarnation,
        "epoch": str(found.epoch),
    }
    if found.archived is not None:
        facts["store"] = config.store or "without an address"
        waiting = found.next - found.archived
        facts["archived"] = f"all records below {found.archived:,}; {waiting:,} waiting"
        facts["max unarchived"] = config.max_unarchived
        facts["retain"] = _limit(config.retain, show_exactly)
        facts["retain bytes"] = _limit(config.retain_bytes, show_bytes)
    return facts


def _limit(limit: T | None, show: Callable[[T], str]) -> str:
    return "no limit" if limit is None else show(limit)


#: Limits that the value 0 removes.
_LIMITS = ("max_age", "max_bytes", "retain", "retain_bytes")
#: Options for the settings that can be changed later.
_settings = options.together(
    options.count("--capacity", help="Number of records that the ring keeps. Default: 10,000."),
    options.duration(
        "--max-age",
        help="How long the ring keeps a record, such as 3600, 12h or 7d. Default: 0, no limit.",
    ),
    options.size(
        "--max-bytes", help="Maximum size of the ring, such as 500MB. Default: 0, no limit."
    ),
    options.compression,
    click.option("--checksum/--no-checksum", default=None, help="Store a CRC-32 with each frame."),
    click.option(
        "--ordering-key",
        type=options.rule,
        metavar="RULE",
        help="Where to find a record's ordering key, for shared groups: key or header:NAME. "
        "Can be added later, but not changed.",
    ),
    options.count(
        "--max-unarchived",
        help="Maximum number of unarchived records in the ring. Default: 10 times the capacity.",
    ),
    options.duration(
        "--retain",
        help="How long the store keeps records, such as 30d. Unconfirmed records stay longer. "
        "Default: 0, no limit.",
    ),
    options.size(
        "--retain-bytes",
        help="Maximum size of the files in the store, such as 1TB. Default: 0, no limit.",
    ),
)


@command(
    "create",
    example="""\
meteor streams create orders --capacity 100000 --codec json
meteor streams create trades --store s3://bucket/meteor --retain 90d
meteor streams create logs --capacity 10000000 --max-age 24h --max-bytes 2GB
meteor streams create carts --ordering-key key""",
)
@click.argument("stream")
@_settings
@click.option(
    "--codec",
    type=click.Choice(["bytes", "text", "json", "msgpack"]),
    help="Type of values. Cannot be changed later. Default: bytes.",
)
@click.option("--store", metavar="URI", help="Archive records to this DIR or s3://... address.")
@options.flag("--resume", help="Continue the stream that is archived in the store.")
def create_stream(session: Session, stream: str, **settings: Any) -> None:
    """Create a stream. Succeeds if it already exists with the same settings."""
    from meteor_py import StreamNotFound

    with session.connect(writing=True) as m:
        try:
            m.stream(stream, create=False)
            verb = "already exists"
        except StreamNotFound:
            verb = "created"
        limits = {name: settings[name] or None for name in _LIMITS}
        opened = m.stream(stream, archive=False, create=True, **settings | limits)
        capacity = opened.config.capacity
    say(f"stream {stream!r} {verb} with a ring of {capacity:,} records.")


@command(
    "configure",
    example="""\
meteor streams configure orders --capacity 1000000
meteor streams configure orders --ordering-key key""",
)
@options.stream_name
@_settings
@options.confirmation(
    "Show what would be changed and dropped, and exit.", "Drop records without asking."
)
def configure_stream(
    session: Session, stream: str, dry_run: bool, yes: bool, **settings: Any
) -> None:
    """Change a stream's settings. A smaller ring drops its oldest records immediately."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        raise click.UsageError("Nothing to change. Pass a setting, such as --capacity.")
    with session.stream(stream, writing=True) as opened:
        found = opened.describe()
        what = ", ".join(
            f"{name} from {getattr(found.config, name)} to {value}" for name, value in given.items()
        )
        dropped = found.length - given.get("capacity", found.length)
        is_loss = dropped > 0 and found.archived is None
        if is_loss:
            what += f"; the oldest {counted(dropped, 'record')} will be dropped"
        elif found.archived is None and found.length and _tightens(found, given):
            is_loss = True
            what += "; records beyond the limit will be dropped"
        yes |= not is_loss
        if not confirm(f"stream {stream!r}", f"changed: {what}", dry_run=dry_run, yes=yes):
            return
        opened.configure(**given)
    say(f"stream {stream!r} changed: {what}.")


def _tightens(found: Description, given: dict[str, Any]) -> bool:
    """Return whether a ring limit is new or lower than before."""
    return any(
        0 < (given.get(name) or 0) < (getattr(found.config, name) or float("inf"))
        for name in ("max_age", "max_bytes")
    )


@command("rm", example="meteor streams rm orders --dry-run")
@click.argument(
    "streams", nargs=-1, required=True, metavar="STREAM...", shell_complete=completion.stream
)
@options.flag("--history", help="Also delete the files in the store.")
@options.confirmation("Show what would be deleted, and exit.")
def remove_streams(
    session: Session, streams: tuple[str, ...], history: bool, dry_run: bool, yes: bool
) -> None:
    """Delete streams with all their records and groups."""
    with session.connect() as m:
        # Open all streams first: a wrong name must fail before any stream is deleted.
        opened = [m.stream(name, create=False) for name in streams]
        for stream in opened:
            found = stream.describe()
            what = f"{counted(found.next - found.first, 'record')}, "
            what += counted(len(found.groups), "group")
            if found.archived is not None:
                what += ", and the files in its store" if history else "; files in its store stay"
            subject = f"stream {stream.name!r}"
            if confirm(subject, f"deleted: {what}", dry_run=dry_run, yes=yes):
                stream.delete(history=history)
                say(f"{subject} deleted.")


@command(
    "repair",
    example="""\
meteor streams repair orders
meteor streams repair orders --apply --yes""",
)
@options.stream_name
@options.flag("--apply", help="Remove the entries instead of only reporting them.")
@options.flag("-y", "--yes", help="Do not ask for confirmation.")
def repair_stream(session: Session, stream: str, apply: bool, yes: bool) -> None:
    """Find entries in the log that no publisher wrote. With --apply, remove them.

    Such an entry blocks publishing or reading. Without --apply, the exit status is 1 if there is
    something to repair. The repair copies the ring on the server, which needs memory for both
    copies.
    """
    with session.stream(stream, writing=apply) as opened:
        found = opened.repair()
        kept = counted(found.frames, "frame")
        if found.healthy:
            say(f"stream {stream!r}: nothing to repair in {kept}.")
            return
        what = "1 foreign entry" if found.foreign == 1 else f"{found.foreign:,} foreign entries"
        for entry in found.entries:
            click.echo(entry)
        if not apply:
            stops = "Publishing" if found.blocked else "Reading"
            say(
                f"stream {stream!r} has {what} besides {kept}. {stops} has stopped. Repair it with "
                f"`meteor streams repair {stream} --apply`."
            )
            raise click.exceptions.Exit(1)
        if confirm(f"stream {stream!r}", f"repaired: {what} removed", dry_run=False, yes=yes):
            opened.repair(dry_run=False)
    say(f"stream {stream!r} repaired: {what} removed, {kept} kept.")


for member in (
    *(list_streams, describe_stream, create_stream, configure_stream, remove_streams),
    repair_stream,
):
    streams.add_command(member)
