"""``meteor streams``: list, describe, create, change and delete streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import completion, options
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import look_at_streams, print_list
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import counted, print_facts, print_table, say, show_age, show_bytes
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Description


@click.group(cls=Group)
def streams() -> None:
    """List, describe, create and delete streams."""


@command("ls", example="meteor streams ls --json | jq -r .name")
@options.json_lines
def list_streams(session: Session, as_json: bool) -> None:
    """List the streams."""
    with session.connect() as m:
        found = look_at_streams(m, lambda stream: [stream.describe()])
    if_none = "there is no stream yet; `meteor publish NAME hello` makes one."
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
    """Show what a stream is like: bounds, size, settings, groups."""
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
        "records": f"{found.next - found.first:,} (offsets {found.first} to before {found.next})",
        "in ring": f"{found.length:,} of {config.capacity:,}, in {counted(found.frames, 'frame')}",
        "memory": show_bytes(found.bytes),
        "last append": f"{show_age(found.appended, now_ms)} ago" if found.appended else "never",
        "codec": config.codec,
        "compression": config.compression,
        "checksum": config.checksum,
        "group by": config.ordering_key,
        "incarnation": found.incarnation,
        "epoch": str(found.epoch),
    }
    if found.archived is not None:
        facts["store"] = config.store or "of another process"
        facts["archived"] = f"below {found.archived:,}, {found.next - found.archived:,} wait"
        facts["max unarchived"] = config.max_unarchived
    return facts


#: The settings that can be changed later.
_settings = options.together(
    options.count("--capacity", help="Records that the ring keeps: 10,000."),
    options.compression,
    click.option("--checksum/--no-checksum", default=None, help="A crc32 with each frame."),
    options.count(
        "--max-unarchived", help="Records that may wait for the archiver: 10 x capacity."
    ),
)


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
    type=options.rule,
    metavar="RULE",
    help="What makes groups for shared subscribers: key or header:NAME. Cannot be changed later.",
)
@click.option("--store", metavar="URI", help="Where records go that the ring drops: DIR, s3://...")
@options.flag("--resume", help="Go on with the history that is in the store.")
def create_stream(session: Session, stream: str, **settings: Any) -> None:
    """Create a stream. One that exists with the same settings is left as it is."""
    from meteor_py import StreamNotFound

    with session.connect(writing=True) as m:
        try:
            m.stream(stream, create=False)
            verb = "exists already"
        except StreamNotFound:
            verb = "created"
        opened = m.stream(stream, archive=False, **settings)
        capacity = opened.config.capacity
    say(f"stream {stream!r} {verb}, with a ring of {capacity:,} records.")


@command("configure", example="meteor streams configure orders --capacity 1000000")
@options.stream_name
@_settings
@options.confirmation(
    "Only show what would be changed, and what dropped.", "Do not ask before records are dropped."
)
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
        yes |= not is_loss
        if not confirm(f"stream {stream!r}", f"changed: {what}", dry_run=dry_run, yes=yes):
            return
        opened.configure(**given)
    say(f"stream {stream!r} changed: {what}.")


@command("rm", example="meteor streams rm orders --dry-run")
@click.argument("streams", nargs=-1, required=True, shell_complete=completion.stream)
@options.flag("--history", help="Also what is in the store; else the files stay.")
@options.confirmation("Only show what would be deleted.")
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
            subject = f"stream {stream.name!r}"
            if confirm(subject, f"deleted: {what}", dry_run=dry_run, yes=yes):
                stream.delete(history=history)
                say(f"{subject} deleted.")


for member in (list_streams, describe_stream, create_stream, configure_stream, remove_streams):
    streams.add_command(member)
