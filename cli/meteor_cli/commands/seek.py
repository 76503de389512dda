"""``meteor seek``: move a group to another position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.args.positions import Position, parse_position
from meteor_cli.command import command
from meteor_cli.commands.groups import active
from meteor_cli.render.json import print_json
from meteor_cli.render.text import print_facts
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import GroupDescription, Stream


@command(
    short_help="Move a group to another position.",
    example="""\
meteor seek orders billing --to @-1h --dry-run
meteor seek orders billing --to earliest""",
)
@options.group_of_stream
@click.option(
    "--to",
    "position",
    required=True,
    type=options.Parsed("position", parse_position),
    metavar="POSITION",
    help="earliest, latest, N, +N (after earliest), -N (before latest) or @TIME.",
)
@options.flag("--dry-run", help="Show what would change, and exit.")
@options.flag("--force", help="Move the group even if a member holds its lease.")
@options.flag("--create", help="Create the group if it does not exist.")
@options.json_object
def seek(
    session: Session,
    stream: str,
    group: str,
    position: Position,
    dry_run: bool,
    force: bool,
    create: bool,
    as_json: bool,
) -> None:
    """Move a group to another position, to skip records or to read them again.

    Prints the previous offset, so that you can undo the move.
    """
    with session.stream(stream) as opened:
        found = _find(opened, group, create=create)
        to = position.resolve(opened)
        end = opened.bounds()[1]
        if to > end:
            raise ValueError(
                f"Offset {to} is beyond the end of stream {stream!r}, which ends at {end}."
            )
        before = None if found is None else found.confirmed
        if not dry_run:
            target = "earliest" if position == Position("earliest") else to
            opened.seek_group(group, target, force=force)
        facts: dict[str, object] = {"stream": stream, "group": group, "from": before, "to": to}
        if before is not None:
            facts["records skipped"] = max(to - before, 0)
            facts["records repeated"] = max(before - to, 0)
        facts |= {"owner": found and found.owner, "done": not dry_run}
        if as_json:
            print_json({name.replace(" ", "_"): value for name, value in facts.items()})
        else:
            print_facts(facts)
        if found and found.owner is not None and not force:
            raise active(opened, found)


def _find(stream: Stream, group: str, *, create: bool) -> GroupDescription | None:
    from meteor_py import GroupNotFound

    try:
        found = stream.group(group)
    except GroupNotFound:
        if not create:
            raise
        return None
    if found.kind == "shared":
        raise ValueError(
            f"Group {group!r} of stream {stream.name!r} is a shared group. It settles records one "
            "by one, so it cannot be moved. To start over, delete it with `meteor groups rm`."
        )
    return found
