"""``meteor groups``: list, describe and delete subscriber groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import print_list, read_streams, stream_fields
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import counted, print_facts, print_table, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import GroupActive, GroupDescription, Stream


@click.group(cls=Group)
def groups() -> None:
    """List, describe and delete subscriber groups.

    Use `meteor seek` to move a group to another offset.
    """


@command("ls", example="meteor groups ls orders")
@options.any_stream
@options.json_lines
def list_groups(session: Session, stream: str | None, as_json: bool) -> None:
    """List the groups of a stream, or of all streams."""
    with session.connect() as m:
        found = read_streams(
            m, lambda opened: [(opened.name, group) for group in opened.groups()], stream
        )
    if_none = f"there are no groups yet. `meteor tail {stream or 'STREAM'} -g GROUP` creates one."
    print_list(found, as_json, stream_fields, print_groups, if_none)


@command("info", example="meteor groups info orders billing")
@options.group_of_stream
@options.json_object
def describe_group(session: Session, stream: str, group: str, as_json: bool) -> None:
    """Show the confirmed offset, lag and owner of a group."""
    with session.stream(stream) as opened:
        found, first = opened.group(group), opened.bounds()[0]
    if as_json:
        print_json(to_fields(found, stream=stream))
        return
    facts: dict[str, object] = {
        "stream": stream,
        "group": group,
        "confirmed": f"all records below {found.confirmed:,}",
        "lag": found.lag,
        "kind": found.kind,
    }
    if found.kind == "shared":
        facts["consumers"] = found.consumers
        facts["details"] = f"`meteor shared info {stream} {group}`"
    else:
        facts |= {"owner": found.owner or "none", "term": str(found.term)}
        if found.confirmed < first:
            lost = f"records {found.confirmed} to {first - 1}"
            facts["lost"] = f"{lost}, dropped before they were confirmed"
    print_facts(facts)


@command("rm", example="meteor groups rm orders billing")
@options.group_of_stream
@options.flag("--force", help="Delete the group even if it is active. Its members get an error.")
@options.confirmation("Show what would be deleted, and exit.")
def remove_group(
    session: Session, stream: str, group: str, force: bool, dry_run: bool, yes: bool
) -> None:
    """Delete a group and its confirmed offset. The records stay."""
    with session.stream(stream) as opened:
        found = opened.group(group)
        subject = f"group {group!r} of stream {stream!r}"
        what = f"deleted (it had confirmed all records below {found.confirmed:,})"
        if not force and (found.owner is not None or found.consumers):
            raise active(opened, found)
        if not confirm(subject, what, dry_run=dry_run, yes=yes):
            return
        opened.delete_group(group, force=force)
    say(f"{subject} {what}.")


for member in (list_groups, describe_group, remove_group):
    groups.add_command(member)


def active(stream: Stream, group: GroupDescription) -> GroupActive:
    """Return the error that the library raises if a command changes an active group."""
    from meteor_py import GroupActive

    owner, is_shared = group.owner or "", group.kind == "shared"
    if is_shared:
        consumers = stream.shared_group(group.name).describe().consumers
        owner = next((each.name for each in consumers if each.lease > 0), "a consumer")
    return GroupActive(
        f"{owner} is active.", stream=stream.name, group=group.name, owner=owner, shared=is_shared
    )


def print_groups(found: Sequence[tuple[str, GroupDescription]]) -> None:
    """Print a table of groups, each with its stream's name."""
    rows = []
    for stream, group in found:
        owner = group.owner
        if group.consumers is not None:
            owner = counted(group.consumers, "consumer")
        rows.append([stream, group.name, group.confirmed, group.lag, group.kind, owner])
    print_table("stream | group | confirmed# | lag# | kind | owner", rows)
