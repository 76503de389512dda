"""``meteor peers``: look at peer groups, and speak to their members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import completion, options
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import look_at_all, print_list
from meteor_cli.commands.peer_messages import ask, propose, send
from meteor_cli.live.peer_watch import PeerWatcher, member_fields
from meteor_cli.render.json import print_json, to_fields, to_json, writable
from meteor_cli.render.terminal import ask as ask_user
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import counted, print_table, say, show_age
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import PeerGroup, PeerLetter
    from meteor_py.peers.protocol import Look

#: Members that are named in a sentence.
_NAMED = 3


@click.group(cls=Group)
def peers() -> None:
    """Peer groups: members, leaders, messages, votes.

    GROUP is a name, or name/instance. Looking at a group does not begin it, and does not join.
    """


@command("ls", example="meteor peers ls")
@options.json_lines
def list_peers(session: Session, as_json: bool) -> None:
    """List the peer groups: members, leader, term."""
    from meteor_py import PeerGroupNotFound
    from meteor_py.peers.protocol import PeerProtocol

    with session.connect() as m:

        def look(name: str) -> list[tuple[str, Look, dict[str, Any]]]:
            books = PeerProtocol(m._connector, name)
            try:
                return [(name, books.look(), to_fields(books.settings()))]
            except PeerGroupNotFound:
                if name in m.peer_groups():
                    raise
                return []  # deleted a moment ago

        found = look_at_all("group", m.peer_groups(), look)
    if_none = "there is no peer group yet; `client.peer_group(NAME)` in Python begins one."
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
    """List the members of a group, in the order in which they joined.

    Who was given a name stays a member when it dies, and can come back.
    """
    with session.peer_group(group) as opened:
        _, members, leader, _ = opened.snapshot()
        now_ms = round(opened.now() * 1000)
        elects = opened.config.election != "none"
    lead = leader.id if leader else None
    if as_json:
        for member in members:
            print_json({"group": group} | member_fields(member, lead))
        return
    if not members:
        say(f"group {group!r} has no members now.")
        return
    rows = [
        [
            *(member.id, member.status.value, "yes" if member.id == lead else None),
            *(member.priority, f"{show_age(member.joined, now_ms)} ago"),
            None if member.metadata is None else to_json(member.metadata),
        ]
        for member in members
    ]
    print_table("id | status | leads | priority# | joined# | metadata", rows)
    if lead is None and elects:
        say(f"group {group!r} has no leader now.")


@command(
    "watch",
    short_help="Print a line for each event, in the order that all see.",
    example="""\
meteor peers watch workers  # until Ctrl-C
meteor peers watch workers --json | jq -c 'select(.event == "elected")'""",
)
@options.peer_group_name
@options.json_lines
def watch_peers(session: Session, group: str, as_json: bool) -> None:
    """Print how a group stands, and then a line for each event of it.

    All who watch see the same events in the same order; their numbers rise by one. Members that
    join, leave, die and come back; leaders; votes. It also tells when the server is away.
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
    *("--wait", "wait_s"), max=86_400, default=0.0, help="If nobody leads, wait for so long: 0."
)
@options.json("One JSON object, with the term.")
def show_leader(session: Session, group: str, wait_s: float, as_json: bool) -> None:
    """Print the id of the leader.

    The exit status is 1 if nobody leads. Who leads may change at any time: what must not be done
    by two has to be fenced by the term.
    """
    with session.peer_group(group) as opened:
        if opened.config.election == "none":
            raise _failed(f"Group {group!r} elects nobody: it was begun with election=None.")
        found = opened.snapshot()
        if found.leader is None and wait_s > 0:
            _wait_for_leader(opened, wait_s)
            found = opened.snapshot()
        smallest = opened.config.min_size
    alive = sum(member.alive for member in found.members)
    if found.leader is None:
        count = f"{counted(alive, 'member')} {'is' if alive == 1 else 'are'} alive"
        needed = f", and it needs {smallest} to elect one" if alive < smallest > 1 else ""
        raise _failed(f"Group {group!r} has no leader now; {count}{needed}.")
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
@options.json("One JSON object on each line, with the body.")
def list_dead(session: Session, group: str, as_json: bool) -> None:
    """List the messages that nobody could take.

    Their type was not known to who got them, or member after member left with them. The last
    thousand or so are kept.
    """
    with session.peer_group(group) as opened:
        letters = opened.dead_letters()
        now_ms = round(opened.now() * 1000)

    def table(found: Sequence[PeerLetter]) -> None:
        rows = [
            [
                f"{show_age(round(one.buried_at * 1000), now_ms)} ago",
                *(one.member, one.queue, one.verb, one.sender, one.type or None),
                *(len(one.body), one.reason),
            ]
            for one in found
        ]
        print_table("buried# | member | queue | verb | sender | type | bytes# | reason", rows)

    def fields(letter: PeerLetter) -> dict[str, Any]:
        return {"group": group} | _letter_fields(letter)

    print_list((letters, True), as_json, fields, table, f"group {group!r} has no dead letters.")


def _letter_fields(letter: PeerLetter) -> dict[str, Any]:
    fields = vars(letter) | {"body": writable(letter.body)}
    times = {name: round(fields.pop(f"{name}_at") * 1000) for name in ("buried", "sent")}
    return times | fields


@command("remove", example="meteor peers remove workers worker-7 --dry-run")
@options.peer_group_name
@click.argument("member", shell_complete=completion.member)
@options.confirmation("Only show who would be removed.")
def remove(session: Session, group: str, member: str, dry_run: bool, yes: bool) -> None:
    """Take a member out of a group, dead or alive.

    Its messages fail, but those to any member, which go to another. It is told, and does not join
    again by itself.
    """
    no_member = _failed(
        f"There is no member {member!r} in group {group!r}; `meteor peers members {group}` shows "
        "who is."
    )
    with session.peer_group(group) as opened:
        found = opened.find(member)
        if found is None:
            raise no_member
        leads = opened.leader is not None and opened.leader.id == member
        state = f"{found.status.value}, and leads" if leads else found.status.value
        if dry_run:
            say(f"member {member!r} of group {group!r} ({state}) would be removed.")
            return
        ask_user(f"Member {member!r} ({state}) will be removed from group {group!r}.", yes=yes)
        if not opened.remove(member):
            raise no_member
    say(f"member {member!r} removed from group {group!r}.")


@command(
    "delete",
    short_help="Delete a group with all that it has.",
    example="meteor peers delete workers --dry-run",
)
@options.peer_group_name
@options.flag("--force", help="Even if members are alive; they join again, and begin it anew.")
@options.confirmation("Only show what would be deleted.")
def delete(session: Session, group: str, force: bool, dry_run: bool, yes: bool) -> None:
    """Delete a group, with its members, their messages, and what is guarded."""
    with session.peer_group(group) as opened:
        members = opened.snapshot().members
        alive = [member.id for member in members if member.alive]
        if alive and not force:
            more = f" and {len(alive) - _NAMED:,} more" if len(alive) > _NAMED else ""
            raise _failed(
                f"Group {group!r} has members that are alive: {', '.join(alive[:_NAMED])}{more}. "
                "End them first, or delete it all the same with --force; they would join again, "
                "and begin it anew."
            )
        what = counted(len(members), "member") + (f" ({len(alive):,} alive)" if alive else "")
        what = f"deleted: {what}, all messages, all guarded values"
        if not confirm(f"group {group!r}", what, dry_run=dry_run, yes=yes):
            return
        opened.delete(force=force)
    say(f"group {group!r} deleted.{' Who is alive joins it again.' if alive else ''}")


def _failed(text: str) -> Exception:
    from meteor_py import MeteorError

    return MeteorError(text)


for made in (list_peers, list_members, watch_peers, show_leader, list_dead):
    peers.add_command(made)
for made in (send, ask, propose, remove, delete):
    peers.add_command(made)
