"""``meteor seek``: let a group go on from somewhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from meteor_cli.command import command
from meteor_cli.completion import complete_group, complete_stream
from meteor_cli.groups import active
from meteor_cli.output import print_facts, print_json
from meteor_cli.position import Place, Span, SpanType
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import GroupDescription, Stream


@command(
    short_help="Let a group go on from somewhere else.",
    example="""\
meteor seek orders billing --to @-1h --dry-run
meteor seek orders billing --to earliest""",
)
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_group)
@click.option(
    "--to",
    "span",
    required=True,
    type=SpanType(ranges=False),
    metavar="POSITION",
    help="earliest, latest, N, +N (behind earliest), -N (before latest) or @TIME.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@click.option("--force", is_flag=True, help="Take the group from a member that is at work.")
@click.option("--create", is_flag=True, help="Begin the group if there is none of that name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def seek(
    session: Session,
    stream: str,
    group: str,
    span: Span,
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
        if found is not None and found.kind == "shared":
            raise ValueError(
                f"Group {group!r} of stream {stream!r} is a shared one, whose records are settled "
                "one by one: it cannot be moved; `meteor groups rm` deletes it, and it begins anew."
            )
        to = span.start.resolve(opened)
        end = opened.bounds()[1]
        if to > end:
            raise ValueError(f"Offset {to} is beyond the end of stream {stream!r}, which is {end}.")
        came_from = None if found is None else found.confirmed
        owner = None if found is None else found.owner
        if not dry_run:
            target = "earliest" if span.start == Place("earliest") else to
            opened.seek_group(group, target, force=force)
    facts: dict[str, object] = {"stream": stream, "group": group, "from": came_from, "to": to}
    if came_from is not None:
        facts["records skipped"] = max(to - came_from, 0)
        facts["records repeated"] = max(came_from - to, 0)
    facts["owner"] = owner
    facts["done"] = not dry_run
    if as_json:
        print_json({name.replace(" ", "_"): value for name, value in facts.items()})
    else:
        print_facts(facts)
    if owner is not None and not force:
        raise active(stream, group, owner)


def _find(stream: Stream, group: str, *, create: bool) -> GroupDescription | None:
    from meteor_py import GroupNotFound

    try:
        return stream.group(group)
    except GroupNotFound:
        if not create:
            raise
        return None
