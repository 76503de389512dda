"""``meteor peers``: inspect and manage peer groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import completion, options
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import print_list, read_all
from meteor_cli.commands.peer_messages import ask, propose, send
from meteor_cli.live.peer_watch import PeerWatcher, member_fields
from meteor_cli.render.json import print_json, to_fields, to_json, writable
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import counted, print_table, say, show_age
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import PeerGroup, PeerLetter
    from meteor_py.peers.protocol import Look

#: Maximum number of members to list in an error message.
_NAMED = 3


@click.group(cls=Group)
def peers() -> None:
    """Inspect peer groups, and send messages to their members.

    GROUP is NAME or NAME/INSTANCE. These commands never create or join a group.
    """


@command("ls", example="meteor peers ls")
@options.json_lines
def list_peers(session: Session, as_json: bool) -> None:
    """List all peer groups and their leaders."""
    from meteor_py import PeerGroupNotFound
    from meteor_py.peers.protocol import PeerProtocol

    with session.connect() as m:

        def read(name: str) -> list[tuple[str, Look, dict[str, Any]]]:
            protocol = PeerProtocol(m._connector, name)
            try:
                return [(name, protocol.look(), to_fields(protocol.settings()))]
            except PeerGroupNotFound:
                if name in m.peer_groups():
                    raise
                return []  # deleted in the meantime

        found = read_all("group", m.peer_groups(), read)
    if_none = "there are no peer groups yet. In Python, `client.peer_group(NAME)` creates one."
    print_list(found, as_json, lambda one: _group_fields(*one[:2]) | one[2], _print_peers, if_none)


def _print_peers(found: Sequence[tuple[str, Look, dict[str, Any]]]) -> None:
    print_table(
        "group | members# | alive# | leader | term#",
        [
            [name, len(look.members), _alive(look), look.leader or None, str(look.term or "-")]
            for name, look, _ in found
        ],
    )


def _group_fields(name: str, look: Look) -> dict[str, Any]:
    numbers = {"members": len(look.members), "alive": _alive(look)}
    leader = {"leader": look.leader or None, "term": look.term or None}
    return {"name": name} | numbers | leader | {"view": look.view}


def _alive(look: Look) -> int:
    return sum(member.alive for member in look.members.values())


@command("members", example="meteor peers members workers")
@options.peer_group_name
@options.json_lines
def list_members(session: Session, group: str, as_json: bool) -> None:
    """List the members of a group. Those that rejoined or resigned as leader come last.

    A member that joined with a name stays in the list when it dies, and can come back.
    """
    with session.peer_group(group) as opened:
        _, members, leader, _ = opened.snapshot()
        now_ms = round(opened.now() * 1000)
        elects = opened.config.election != "none"
    leader_id = leader.id if leader else None
    if as_json:
        for member in members:
            print_json({"group": group} | member_fields(member, leader_id))
        return
    if not members:
        say(f"group {group!r} currently has no members.")
        return
    rows = [
        [
            *(member.id, member.status.value, "yes" if member.id == leader_id else None),
            *(member.priority, f"{show_age(member.joined, now_ms)} ago"),
            None if member.metadata is None else to_json(member.metadata),
        ]
        for member in members
    ]
    print_table("id | status | leader | priority# | joined# | metadata", rows)
    if leader is None and elects:
        say(f"group {group!r} currently has no leader.")


@command(
    "watch",
    example="""\
meteor peers watch workers  # until Ctrl-C
meteor peers watch workers --json | jq -c 'select(.event == "elected")'""",
)
@options.peer_group_name
@options.json_lines
def watch_peers(session: Session, group: str, as_json: bool) -> None:
    """Print the state of a group, then a line for each event.

    Reports elections, votes, server outages, and members that join, leave, die or come back.
    All observers see the same events in the same order, numbered without gaps. The exceptions are
    events that the server has lost or trimmed.
    """
    with session.peer_group(group) as opened:
        watcher = PeerWatcher(opened, as_json=as_json)
        watcher.begin()
        while True:
            watcher.step()


@command(
    "leader",
    example="""\
meteor peers leader workers
meteor peers leader workers --wait 10 --json""",
)
@options.peer_group_name
@options.seconds(
    *("--wait", "wait_s"), max=86_400, default=0.0, help="Time to wait for a leader. Default: 0."
)
@options.json("Print a JSON object, with the term.")
def show_leader(session: Session, group: str, wait_s: float, as_json: bool) -> None:
    """Print the id of the leader.

    The exit status is 1 if there is no leader. The leader may change at any time. If two processes
    must not do the same work at once, use the term as a fencing token.
    """
    with session.peer_group(group) as opened:
        if opened.config.election == "none":
            raise _failed(f"Group {group!r} has no elections: it was created with election=None.")
        found = opened.snapshot()
        if found.leader is None and wait_s > 0:
            _wait_for_leader(opened, wait_s)
            found = opened.snapshot()
        smallest = opened.config.min_size
    if found.leader is None:
        alive = sum(member.alive for member in found.members)
        needed = f"; an election needs {smallest}" if alive < smallest > 1 else ""
        raise _failed(
            f"Group {group!r} currently has no leader. "
            f"{counted(alive, 'member', 'is', 'are')} alive{needed}."
        )
    if as_json:
        fields = member_fields(found.leader, found.leader.id)
        print_json({"group": group, "leader": fields.pop("id"), "term": found.term} | fields)
    else:
        click.echo(found.leader.id)


def _wait_for_leader(group: PeerGroup, wait_s: float) -> None:
    import threading

    elected = threading.Event()
    group.on_elected(lambda member, term: elected.set())
    elected.wait(wait_s)


@command("dead", example="meteor peers dead workers --json | jq -r .reason")
@options.peer_group_name
@options.json("Print one JSON object per line, with the body.")
def list_dead(session: Session, group: str, as_json: bool) -> None:
    """List the messages that no member could handle.

    For example, the receiver did not know the message's type, the message was delivered too often
    without being settled, or no member was left to receive it. The group keeps about a thousand of
    the most recent dead letters.
    """
    with session.peer_group(group) as opened:
        letters = opened.dead_letters()
        now_ms = round(opened.now() * 1000)

    def table(found: Sequence[PeerLetter]) -> None:
        rows = [
            [
                f"{show_age(round(one.failed_at * 1000), now_ms)} ago",
                *(one.member, one.queue, one.verb, one.sender, one.type or None),
                *(len(one.body), one.reason),
            ]
            for one in found
        ]
        print_table("failed# | member | queue | verb | sender | type | bytes# | reason", rows)

    def fields(letter: PeerLetter) -> dict[str, Any]:
        return {"group": group} | _letter_fields(letter)

    print_list((letters, True), as_json, fields, table, f"group {group!r} has no dead letters.")


def _letter_fields(letter: PeerLetter) -> dict[str, Any]:
    fields = vars(letter) | {"body": writable(letter.body)}
    times = {"failed": fields.pop("failed_at"), "sent": fields.pop("sent_at")}
    return {name: round(seconds * 1000) for name, seconds in times.items()} | fields


@command("remove", example="meteor peers remove workers worker-7 --dry-run")
@options.peer_group_name
@click.argument("member", shell_complete=completion.member)
@options.confirmation("Show which member would be removed, and exit.")
def remove(session: Session, group: str, member: str, dry_run: bool, yes: bool) -> None:
    """Remove a live or dead member from a group.

    Messages to the member fail, except those sent to `any`, which go to another member. A live
    member is notified, and does not rejoin automatically.
    """
    from meteor_py import MemberUnknown

    unknown = MemberUnknown(f"There is no member {member!r}.", group=group, member=member)
    with session.peer_group(group) as opened:
        found = opened.find(member)
        if found is None:
            raise unknown
        leads = opened.leader is not None and opened.leader.id == member
        state = f"{found.status.value}, the leader" if leads else found.status.value
        subject, what = f"member {member!r} ({state})", f"removed from group {group!r}"
        if not confirm(subject, what, dry_run=dry_run, yes=yes):
            return
        if not opened.remove(member):
            raise unknown
    say(f"member {member!r} {what}.")


@command("delete", example="meteor peers delete workers --dry-run")
@options.peer_group_name
@options.flag("--force", help="Delete the group even if live members would recreate it.")
@options.confirmation("Show what would be deleted, and exit.")
def delete(session: Session, group: str, force: bool, dry_run: bool, yes: bool) -> None:
    """Delete a group with its members, messages and guarded values."""
    with session.peer_group(group) as opened:
        members = opened.snapshot().members
        alive = [member.id for member in members if member.alive]
        if alive and not force:
            more = f" and {len(alive) - _NAMED:,} more" if len(alive) > _NAMED else ""
            raise _failed(
                f"Group {group!r} has live members: {', '.join(alive[:_NAMED])}{more}. Stop them "
                "first, or delete the group with --force. Live members will then recreate it."
            )
        what = counted(len(members), "member") + (f" ({len(alive):,} alive)" if alive else "")
        what = f"deleted: {what}, all messages, all guarded values"
        if not confirm(f"group {group!r}", what, dry_run=dry_run, yes=yes):
            return
        opened.delete(force=force)
    say(f"group {group!r} deleted.{' Live members will rejoin it.' if alive else ''}")


def _failed(text: str) -> Exception:
    from meteor_py import MeteorError

    return MeteorError(text)


for made in (list_peers, list_members, watch_peers, show_leader, list_dead):
    peers.add_command(made)
for made in (send, ask, propose, remove, delete):
    peers.add_command(made)
