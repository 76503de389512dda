"""``meteor groups``: list, describe and delete subscriber groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import look_at_streams, print_list, stream_fields
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import counted, print_facts, print_table, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import GroupActive, GroupDescription, MeteorError, Stream


@click.group(cls=Group)
def groups() -> None:
    """List, describe and delete subscriber groups.

    `meteor seek` moves them.
    """


@command("ls", example="meteor groups ls orders")
@options.any_stream
@options.json_lines
def list_groups(session: Session, stream: str | None, as_json: bool) -> None:
    """List the groups of a stream, or of all."""
    with session.connect() as m:
        found = look_at_streams(
            m, lambda opened: [(opened.name, group) for group in opened.groups()], stream
        )
    if_none = f"there is no group yet; `meteor tail {stream or 'STREAM'} -g GROUP` begins one."
    print_list(found, as_json, stream_fields, print_groups, if_none)


@command("info", example="meteor groups info orders billing")
@options.group_of_stream
@options.json_object
def describe_group(session: Session, stream: str, group: str, as_json: bool) -> None:
    """Show where a group stands, and who reads for it."""
    with session.stream(stream) as opened:
        found, first = opened.group(group), opened.bounds()[0]
    if as_json:
        print_json(to_fields(found, stream=stream))
        return
    facts: dict[str, object] = {
        "stream": stream,
        "group": group,
        "confirmed": f"below {found.confirmed}",
        "lag": found.lag,
        "kind": found.kind,
    }
    if found.kind == "shared":
        facts["consumers"] = found.consumers
        facts["more"] = f"`meteor shared info {stream} {group}`"
    else:
        facts |= {"owner": found.owner or "nobody", "term": str(found.term)}
        if found.confirmed < first:
            facts["lost"] = f"records {found.confirmed} to {first - 1} are gone before it read them"
    print_facts(facts)


@command("rm", example="meteor groups rm orders billing")
@options.group_of_stream
@options.flag("--force", help="Even if a member is at work; it will be told.")
@options.confirmation("Only show what would be deleted.")
def remove_group(
    session: Session, stream: str, group: str, force: bool, dry_run: bool, yes: bool
) -> None:
    """Delete a group, with what it has confirmed; the records stay."""
    from meteor_py import GroupActive

    with session.stream(stream) as opened:
        found = opened.group(group)
        subject = f"group {group!r} of stream {stream!r}"
        what = f"deleted: it had confirmed all below {found.confirmed}"
        if found.owner is not None and not force:
            raise active(stream, group, found.owner)
        if found.consumers and not force:
            raise _has_consumers(opened, group)
        if not confirm(subject, what, dry_run=dry_run, yes=yes):
            return
        try:
            opened.delete_group(group, force=force)
        except GroupActive:
            if found.kind == "shared":  # a consumer has come while we asked
                raise _has_consumers(opened, group) from None
            raise
    say(f"{subject} {what}.")


for member in (list_groups, describe_group, remove_group):
    groups.add_command(member)


def active(stream: str, group: str, owner: str) -> GroupActive:
    """The error that the library raises when it is asked to change such a group."""
    from meteor_py import GroupActive

    return GroupActive(f"{owner} has the lease.", stream=stream, group=group, owner=owner)


def _has_consumers(stream: Stream, group: str) -> MeteorError:
    """The same of a shared group."""
    from meteor_py import MeteorError

    found = stream.shared_group(group).describe().consumers
    owner = next((one.name for one in found if one.lease > 0), "nobody, a moment later,")
    return MeteorError(
        f"Shared group {group!r} of stream {stream.name!r} is active: {owner} is one of its "
        "consumers. Stop them first, or delete it all the same with --force; they will be told."
    )


def print_groups(found: Sequence[tuple[str, GroupDescription]]) -> None:
    """A table of groups, each with the name of its stream."""
    print_table(
        "stream | group | confirmed# | lag# | kind | owner | term#",
        [
            [stream, group.name, group.confirmed, group.lag, group.kind, *_holding(group)]
            for stream, group in found
        ],
    )


def _holding(group: GroupDescription) -> tuple[str | None, str | None]:
    """Who reads for it, and the term."""
    if group.consumers is not None:
        return counted(group.consumers, "consumer"), None
    return group.owner, str(group.term)
