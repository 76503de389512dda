"""``meteor peers``: look at peer groups, and speak to their members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meteor_cli.command import Group, command
from meteor_cli.completion import complete_peer, complete_peer_group
from meteor_cli.output import ask as ask_user
from meteor_cli.output import counted, print_json, print_table, say, show_age
from meteor_cli.peer_access import member_fields, opened_group
from meteor_cli.peer_messages import ask, propose, send
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_peers(session: Session, as_json: bool) -> None:
    """List the peer groups: members, leader, term."""
    from meteor_cli.hints import explain
    from meteor_py import ConnectionFailed, MeteorError, PeerGroupNotFound
    from meteor_py.peers.protocol import PeerProtocol

    found: list[tuple[str, Look, dict[str, Any]]] = []
    is_all = True
    with session.connect() as m:
        for name in m.peer_groups():
            books = PeerProtocol(m._connector, name)
            try:
                found.append((name, books.look(), _settings(books.settings())))
            except ConnectionFailed:
                raise
            except (MeteorError, ValueError) as error:
                if isinstance(error, PeerGroupNotFound) and name not in m.peer_groups():
                    continue  # deleted a moment ago
                say(f"group {name!r} is left out: {explain(error)}")
                is_all = False
    if as_json:
        for name, look, settings in found:
            print_json(_group_fields(name, look) | settings)
    elif found:
        print_table(
            ["group", "members#", "alive#", "leader", "term#"],
            [
                [name, len(look.members), _alive(look), look.leader or None, _term(look.term)]
                for name, look, _ in found
            ],
        )
    elif is_all:
        say("there is no peer group yet; `client.peer_group(NAME)` in Python begins one.")
    if not is_all:
        raise click.exceptions.Exit(1)


@command("members", example="meteor peers members workers")
@click.argument("group", shell_complete=complete_peer_group)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_members(session: Session, group: str, as_json: bool) -> None:
    """List the members of a group, in the order in which they joined.

    Who was given a name stays a member when it dies, and can come back.
    """
    with opened_group(session, group) as opened:
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
    print_table(
        ["id", "status", "leads", "priority#", "joined#", "metadata"],
        [
            [
                member.id,
                member.status.value,
                "yes" if member.id == lead else None,
                member.priority,
                f"{show_age(member.joined, now_ms)} ago",
                _metadata(member.metadata),
            ]
            for member in members
        ],
    )
    if lead is None and elects:
        say(f"group {group!r} has no leader now.")


@command(
    "watch",
    short_help="Print a line for each event, in the order that all see.",
    example="""\
meteor peers watch workers  # until Ctrl-C
meteor peers watch workers --json | jq -c 'select(.event == "elected")'""",
)
@click.argument("group", shell_complete=complete_peer_group)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def watch_peers(session: Session, group: str, as_json: bool) -> None:
    """Print how a group stands, and then a line for each event of it.

    All who watch see the same events in the same order; their numbers rise by one. Members that
    join, leave, die and come back; leaders; votes. It also tells when the server is away.
    """
    from meteor_cli.peer_lines import PeerWatcher

    with opened_group(session, group) as opened:
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
@click.argument("group", shell_complete=complete_peer_group)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, max=86_400),
    default=0.0,
    metavar="SECONDS",
    help="If nobody leads, wait for so long: 0.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the term.")
def show_leader(session: Session, group: str, wait_s: float, as_json: bool) -> None:
    """Print the id of the leader.

    The exit status is 1 if nobody leads. Who leads may change at any time: what must not be done
    by two has to be fenced by the term.
    """
    with opened_group(session, group) as opened:
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
@click.argument("group", shell_complete=complete_peer_group)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on each line, with the body."
)
def list_dead(session: Session, group: str, as_json: bool) -> None:
    """List the messages that nobody could take.

    Their type was not known to who got them, or member after member left with them. The last
    thousand or so are kept.
    """
    with opened_group(session, group) as opened:
        letters = opened.dead_letters()
        now_ms = round(opened.now() * 1000)
    if as_json:
        for letter in letters:
            print_json({"group": group} | _letter_fields(letter))
    elif letters:
        print_table(
            ["buried#", "member", "queue", "verb", "sender", "type", "bytes#", "reason"],
            [
                [
                    f"{show_age(round(letter.buried_at * 1000), now_ms)} ago",
                    *(letter.member, letter.queue, letter.verb, letter.sender, letter.type or None),
                    *(len(letter.body), letter.reason),
                ]
                for letter in letters
            ],
        )
    else:
        say(f"group {group!r} has no dead letters.")


@command("remove", example="meteor peers remove workers worker-7 --dry-run")
@click.argument("group", shell_complete=complete_peer_group)
@click.argument("member", shell_complete=complete_peer)
@click.option("--dry-run", is_flag=True, help="Only show who would be removed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def remove(session: Session, group: str, member: str, dry_run: bool, yes: bool) -> None:
    """Take a member out of a group, dead or alive.

    Its messages fail, but those to any member, which go to another. It is told, and does not join
    again by itself.
    """
    with opened_group(session, group) as opened:
        found = opened.find(member)
        if found is None:
            raise _no_member(group, member)
        leads = opened.leader is not None and opened.leader.id == member
        state = f"{found.status.value}, and leads" if leads else found.status.value
        if dry_run:
            say(f"member {member!r} of group {group!r} ({state}) would be removed.")
            return
        ask_user(f"Member {member!r} ({state}) will be removed from group {group!r}.", yes=yes)
        if not opened.remove(member):
            raise _no_member(group, member)
    say(f"member {member!r} removed from group {group!r}.")


for made in (list_peers, list_members, watch_peers, show_leader, list_dead):
    peers.add_command(made)


@command(
    "delete",
    short_help="Delete a group with all that it has.",
    example="meteor peers delete workers --dry-run",
)
@click.argument("group", shell_complete=complete_peer_group)
@click.option(
    "--force", is_flag=True, help="Even if members are alive; they join again, and begin it anew."
)
@click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def delete(session: Session, group: str, force: bool, dry_run: bool, yes: bool) -> None:
    """Delete a group, with its members, their messages, and what is guarded."""
    with opened_group(session, group) as opened:
        members = opened.snapshot().members
        alive = [member.id for member in members if member.alive]
        if alive and not force:
            raise _has_members(group, alive)
        what = counted(len(members), "member") + (f" ({len(alive):,} alive)" if alive else "")
        what += ", all messages, all guarded values"
        if dry_run:
            say(f"group {group!r} would be deleted: {what}.")
            return
        ask_user(f"Group {group!r} will be deleted: {what}.", yes=yes)
        opened.delete(force=force)
    say(f"group {group!r} deleted.{' Who is alive joins it again.' if alive else ''}")


for made in (send, ask, propose, remove, delete):
    peers.add_command(made)


def _failed(text: str) -> Exception:
    from meteor_py import MeteorError

    return MeteorError(text)


def _has_members(group: str, alive: list[str]) -> Exception:
    more = f" and {len(alive) - _NAMED:,} more" if len(alive) > _NAMED else ""
    return _failed(
        f"Group {group!r} has members that are alive: {', '.join(alive[:_NAMED])}{more}. End them "
        "first, or delete it all the same with --force; they would join again, and begin it anew."
    )


def _no_member(group: str, member: str) -> Exception:
    return _failed(
        f"There is no member {member!r} in group {group!r}; `meteor peers members {group}` shows "
        "who is."
    )


def _alive(look: Look) -> int:
    return sum(member.alive for member in look.members.values())


def _term(number: int) -> str | None:
    return str(number) if number else None


def _metadata(metadata: object) -> str | None:
    import msgspec

    return None if metadata is None else msgspec.json.encode(metadata).decode()


def _settings(config: Any) -> dict[str, Any]:
    import msgspec

    settings: dict[str, Any] = msgspec.to_builtins(config)
    return settings


def _group_fields(name: str, look: Look) -> dict[str, Any]:
    return {
        "name": name,
        "members": len(look.members),
        "alive": _alive(look),
        "leader": look.leader or None,
        "term": look.term or None,
        "view": look.view,
    }


def _letter_fields(letter: PeerLetter) -> dict[str, Any]:
    from meteor_cli.jsonl import to_data

    fields = vars(letter) | {"body": to_data(letter.body)}
    times = {name: round(fields.pop(f"{name}_at") * 1000) for name in ("buried", "sent")}
    return times | fields
