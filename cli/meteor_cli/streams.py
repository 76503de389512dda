"""``meteor streams``: list, describe, create, change and delete streams."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.command import Group, command
from meteor_cli.completion import complete_stream
from meteor_cli.group_id import RuleType
from meteor_cli.output import (
    ask,
    counted,
    print_facts,
    print_json,
    print_table,
    say,
    show_age,
    show_bytes,
)
from meteor_cli.session import Session
from meteor_cli.survey import look_at_all

if TYPE_CHECKING:
    from meteor_py import Description


@click.group(cls=Group)
def streams() -> None:
    """List, describe, create and delete streams."""


@command("ls", example="meteor streams ls --json | jq -r .name")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_streams(session: Session, as_json: bool) -> None:
    """List the streams."""
    with session.connect() as m:
        found, is_all = look_at_all(m, lambda stream: stream.describe())
    if as_json:
        for description in found:
            print_json(to_fields(description))
    else:
        _print_streams(found)
        if not found and is_all:
            say("there is no stream yet; `meteor publish NAME hello` makes one.")
    if not is_all:
        raise click.exceptions.Exit(1)


def _print_streams(found: list[Description]) -> None:
    now_ms = int(time.time() * 1000)
    print_table(
        [
            "stream",
            "first#",
            "next#",
            "in ring#",
            "memory#",
            "archived#",
            "groups#",
            "lag#",
            "idle#",
        ],
        [
            [
                found_one.name,
                found_one.first,
                found_one.next,
                found_one.length,
                show_bytes(found_one.bytes),
                found_one.archived,
                len(found_one.groups),
                max((group.lag for group in found_one.groups), default=None),
                show_age(found_one.appended, now_ms),
            ]
            for found_one in found
        ],
    )


@command("info", example="meteor streams info orders")
@click.argument("stream", shell_complete=complete_stream)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def describe_stream(session: Session, stream: str, as_json: bool) -> None:
    """Show what a stream is like: bounds, size, settings, groups."""
    with session.stream(stream) as opened:
        found = opened.describe()
    if as_json:
        print_json(to_fields(found))
        return
    now_ms = int(time.time() * 1000)
    facts: dict[str, object] = {
        "stream": found.name,
        "records": f"{found.next - found.first:,} (offsets {found.first} to before {found.next})",
        "in ring": f"{found.length:,} of {found.config.capacity:,}, "
        f"in {counted(found.frames, 'frame')}",
        "memory": show_bytes(found.bytes),
        "last append": f"{show_age(found.appended, now_ms)} ago" if found.appended else "never",
        "codec": found.config.codec,
        "compression": found.config.compression,
        "checksum": found.config.checksum,
        "group by": found.config.ordering_key,
        "incarnation": found.incarnation,
        "epoch": str(found.epoch),
    }
    if found.archived is not None:
        facts["store"] = found.config.store or "of another process"
        facts["archived"] = f"below {found.archived:,}, {found.next - found.archived:,} wait"
        facts["max unarchived"] = found.config.max_unarchived
    print_facts(facts)
    if found.groups:
        from meteor_cli.groups import print_groups

        click.echo()
        print_groups([(stream, group) for group in found.groups])


_SETTINGS = [
    click.option(
        "--capacity",
        type=click.IntRange(min=1),
        metavar="N",
        help="Records that the ring keeps: 10,000.",
    ),
    click.option("--compression", type=click.Choice(["none", "lz4", "zstd"]), help="Of frames."),
    click.option("--checksum/--no-checksum", default=None, help="A crc32 with each frame."),
    click.option(
        "--max-unarchived",
        type=click.IntRange(min=1),
        metavar="N",
        help="Records that may wait for the archiver: 10 x capacity.",
    ),
]


def _settings(function: Any) -> Any:
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


@command(
    "create",
    example="""\
meteor streams create orders --capacity 100000 --codec json
meteor streams create trades --store s3://bucket/meteor
meteor streams create carts --ordering-key key""",
)
@click.argument("stream")
@_settings
@click.option(
    "--codec",
    type=click.Choice(["bytes", "text", "json", "msgpack"]),
    help="What values are: bytes. Cannot be changed later.",
)
@click.option(
    "--ordering-key",
    type=RuleType(),
    metavar="RULE",
    help="What makes groups for shared subscribers: key or header:NAME. Cannot be changed later.",
)
@click.option("--store", metavar="URI", help="Where records go that the ring drops: DIR, s3://...")
@click.option("--resume", is_flag=True, help="Go on with the history that is in the store.")
def create_stream(session: Session, stream: str, **settings: Any) -> None:
    """Create a stream. One that exists with the same settings is left as it is."""
    from meteor_py import StreamNotFound

    with session.connect(writing=True) as m:
        try:
            m.stream(stream, create=False)
            there = True
        except StreamNotFound:
            there = False
        opened = m.stream(stream, archive=False, **settings)
        capacity = opened.config.capacity
    verb = "exists already" if there else "created"
    say(f"stream {stream!r} {verb}, with a ring of {capacity:,} records.")


@command("configure", example="meteor streams configure orders --capacity 1000000")
@click.argument("stream", shell_complete=complete_stream)
@_settings
@click.option("--dry-run", is_flag=True, help="Only show what would be changed, and what dropped.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before records are dropped.")
def configure_stream(
    session: Session, stream: str, dry_run: bool, yes: bool, **settings: Any
) -> None:
    """Change settings of a stream. A smaller ring drops its oldest records at once."""
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        raise click.UsageError("Nothing to change; name a setting, such as --capacity.")
    with session.stream(stream, writing=True) as opened:
        found = opened.describe()
        what = ", ".join(
            f"{name} from {getattr(found.config, name)} to {value}" for name, value in given.items()
        )
        dropped = found.length - given.get("capacity", found.length)
        is_loss = dropped > 0 and found.archived is None
        if is_loss:
            what += f"; the oldest {counted(dropped, 'record')} will be dropped"
        if dry_run:
            say(f"stream {stream!r} would be changed: {what}.")
            return
        if is_loss:
            ask(f"Stream {stream!r} will be changed: {what}.", yes=yes)
        opened.configure(**given)
    say(f"stream {stream!r} changed: {what}.")


@command("rm", example="meteor streams rm orders --dry-run")
@click.argument("streams", nargs=-1, required=True, shell_complete=complete_stream)
@click.option("--history", is_flag=True, help="Also what is in the store; else the files stay.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def remove_streams(
    session: Session, streams: tuple[str, ...], history: bool, dry_run: bool, yes: bool
) -> None:
    """Delete streams with all their records and groups."""
    with session.connect() as m:
        opened = [m.stream(name, create=False) for name in streams]  # all, or none is touched
        for stream in opened:
            found = stream.describe()
            what = f"{counted(found.next - found.first, 'record')}, "
            what += counted(len(found.groups), "group")
            if found.archived is not None:
                what += ", the files in its store too" if history else "; files in its store stay"
            if dry_run:
                say(f"stream {stream.name!r} would be deleted: {what}.")
                continue
            ask(f"Stream {stream.name!r} will be deleted: {what}.", yes=yes)
            stream.delete(history=history)
            say(f"stream {stream.name!r} deleted.")


for member in (list_streams, describe_stream, create_stream, configure_stream, remove_streams):
    streams.add_command(member)


def to_fields(description: Description) -> dict[str, Any]:
    """The fields of ``Description``, those of its settings among them: what ``--json`` shows."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(description)
    fields |= fields.pop("config")
    return fields
