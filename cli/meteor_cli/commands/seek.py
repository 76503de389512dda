"""``meteor seek``: let a group go on from somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.args.positions import Place, parse_place
from meteor_cli.command import command
from meteor_cli.commands.groups import active
from meteor_cli.render.json import print_json
from meteor_cli.render.text import print_facts
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import GroupDescription, Stream


@command(
    short_help="Let a group go on from somewhere else.",
    example="""\
meteor seek orders billing --to @-1h --dry-run
meteor seek orders billing --to earliest""",
)
@options.group_of_stream
@click.option(
    "--to",
    "place",
    required=True,
    type=options.Parsed("position", parse_place),
    metavar="POSITION",
    help="earliest, latest, N, +N (behind earliest), -N (before latest) or @TIME.",
)
@options.flag("--dry-run", help="Only show what would be done.")
@options.flag("--force", help="Take the group from a member that is at work.")
@options.flag("--create", help="Begin the group if there is none of that name.")
@options.json_object
def seek(
    session: Session,
    stream: str,
    group: str,
    place: Place,
    dry_run: bool,
    force: bool,
    create: bool,
    as_json: bool,
) -> None:
    """Let a group go on from somewhere else: skip records, or have them read again.

    It shows where the group stood, so that it can be put back.
    """
    with session.stream(stream) as opened:
        found = _find(opened, group, create=create)
        to = place.resolve(opened)
        end = opened.bounds()[1]
        if to > end:
            raise ValueError(f"Offset {to} is beyond the end of stream {stream!r}, which is {end}.")
        came_from = None if found is None else found.confirmed
        owner = None if found is None else found.owner
        if not dry_run:
            target = "earliest" if place == Place("earliest") else to
            opened.seek_group(group, target, force=force)
    facts: dict[str, object] = {"stream": stream, "group": group, "from": came_from, "to": to}
    if came_from is not None:
        facts["records skipped"] = max(to - came_from, 0)
        facts["records repeated"] = max(came_from - to, 0)
    facts |= {"owner": owner, "done": not dry_run}
    if as_json:
        print_json({name.replace(" ", "_"): value for name, value in facts.items()})
    else:
        print_facts(facts)
    if owner is not None and not force:
        raise active(stream, group, owner)


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
            f"Group {group!r} of stream {stream.name!r} is a shared one, whose records are settled "
            "one by one: it cannot be moved; `meteor groups rm` deletes it, and it begins anew."
        )
    return found
