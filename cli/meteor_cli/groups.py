"""``meteor groups``: list, describe and delete subscriber groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meteor_cli.command import Group, command
from meteor_cli.completion import complete_group, complete_stream
from meteor_cli.output import ask, counted, print_facts, print_json, print_table, say
from meteor_cli.session import Session
from meteor_cli.survey import look_at_all

if TYPE_CHECKING:
    from meteor_py import GroupActive, GroupDescription, Stream


@click.group(cls=Group)
def groups() -> None:
    """List, describe and delete subscriber groups.

    `meteor seek` moves them.
    """


@command("ls", example="meteor groups ls orders")
@click.argument("stream", required=False, shell_complete=complete_stream)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_groups(session: Session, stream: str | None, as_json: bool) -> None:
    """List the groups of a stream, or of all."""
    is_all = True
    with session.connect() as m:
        if stream is None:
            parts, is_all = look_at_all(m, _groups_of)
        else:
            parts = [_groups_of(m.stream(stream, create=False))]
    found = [group for part in parts for group in part]
    if as_json:
        for name, group in found:
            print_json(to_fields(name, group))
    elif found:
        print_groups(found)
    elif is_all:
        say(f"there is no group yet; `meteor tail {stream or 'STREAM'} -g GROUP` begins one.")
    if not is_all:
        raise click.exceptions.Exit(1)


def _groups_of(stream: Stream) -> list[tuple[str, GroupDescription]]:
    return [(stream.name, group) for group in stream.groups()]


@command("info", example="meteor groups info orders billing")
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_group)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def describe_group(session: Session, stream: str, group: str, as_json: bool) -> None:
    """Show where a group stands, and who reads for it."""
    with session.stream(stream) as opened:
        found, first = opened.group(group), opened.bounds()[0]
    if as_json:
        print_json(to_fields(stream, found))
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
    if found.kind != "shared" and found.confirmed < first:
        facts["lost"] = f"records {found.confirmed} to {first - 1} are gone before it read them"
    print_facts(facts)


@command("rm", example="meteor groups rm orders billing")
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_group)
@click.option("--force", is_flag=True, help="Even if a member is at work; it will be told.")
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def remove_group(
    session: Session, stream: str, group: str, force: bool, dry_run: bool, yes: bool
) -> None:
    """Delete a group, with what it has confirmed; the records stay."""
    with session.stream(stream) as opened:
        found = opened.group(group)
        what = f"it had confirmed all below {found.confirmed}"
        if found.owner is not None and not force:
            raise active(stream, group, found.owner)
        if found.consumers and not force:
            raise _shared_active(opened, group)
        if dry_run:
            say(f"group {group!r} of stream {stream!r} would be deleted: {what}.")
            return
        ask(f"Group {group!r} of stream {stream!r} will be deleted: {what}.", yes=yes)
        opened.delete_group(group, force=force)
    say(f"group {group!r} of stream {stream!r} deleted: {what}.")


for member in (list_groups, describe_group, remove_group):
    groups.add_command(member)


def active(stream: str, group: str, owner: str) -> GroupActive:
    """The error that the library raises when it is asked to change such a group."""
    from meteor_py import GroupActive

    return GroupActive(f"{owner} has the lease.", stream=stream, group=group, owner=owner)


def _shared_active(stream: Stream, group: str) -> GroupActive:
    """The same of a shared group."""
    from meteor_py import GroupActive

    found = stream.shared_group(group).describe().consumers
    owner = next((one.name for one in found if one.lease > 0), "nobody, a moment later,")
    return GroupActive(f"Shared with {owner}.", stream=stream.name, group=group, owner=owner)


def print_groups(found: list[tuple[str, GroupDescription]]) -> None:
    """A table of groups, each with the name of its stream."""
    print_table(
        ["stream", "group", "confirmed#", "lag#", "kind", "owner", "term#"],
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


def to_fields(stream: str, group: GroupDescription) -> dict[str, Any]:
    """The fields of ``GroupDescription``, and the stream: what ``--json`` shows."""
    import msgspec

    fields: dict[str, Any] = {"stream": stream}
    fields |= msgspec.to_builtins(group)
    return fields
