"""``meteor peers``: look at distributed groups, and speak to their members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.command import Group, command
from meteor_cli.completion import complete_peer, complete_peer_group, complete_target
from meteor_cli.output import ask as ask_user
from meteor_cli.output import counted, print_facts, print_json, print_table, say, show_age
from meteor_cli.session import Session

if TYPE_CHECKING:
    from concurrent.futures import Future

    from meteor_py import Client, Member, Outcome, PeerGroup, Replies, Target
    from meteor_py.peers.books import Look

#: Seconds that a member has to answer, and a group to vote.
_ANSWER_S, _VOTE_S = 10.0, 5.0
#: Seconds after which a vote whose outcome is not known by then is given up.
_GRACE_S = 15.0

_BODY = {
    "BODY": """
JSON: '{"id": 7}', 7, '"text"', null. What is no JSON is text as it stands.
Without it, null.
""".strip("\n")
}


@click.group(cls=Group)
def peers() -> None:
    """Distributed groups: members, leaders, messages, votes.

    GROUP is a name, or name/instance. Looking at a group does not begin it, and does not join.
    """


@command("ls", example="meteor peers ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_peers(session: Session, as_json: bool) -> None:
    """List the distributed groups: members, leader, term."""
    from meteor_cli.hints import explain
    from meteor_py import ConnectionFailed, MeteorError, PeerGroupNotFound
    from meteor_py.peers.books import Books

    found: list[tuple[str, Look, dict[str, Any]]] = []
    is_all = True
    with session.connect() as m:
        for name in m.groups():
            books = Books(m, name)
            try:
                found.append((name, books.look(), _settings(books.settings())))
            except PeerGroupNotFound:
                continue  # deleted a moment ago
            except ConnectionFailed:
                raise
            except (MeteorError, ValueError) as error:
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
        say("there is no distributed group yet; `client.group(NAME)` in Python begins one.")
    if not is_all:
        raise click.exceptions.Exit(1)


@command("members", example="meteor peers members workers")
@click.argument("group", shell_complete=complete_peer_group)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_members(session: Session, group: str, as_json: bool) -> None:
    """List the members of a group, in the order in which they joined.

    Who was given a name stays a member when it dies, and can come back.
    """
    with _opened(session, group) as opened:
        _, members, leader, _ = opened.snapshot()
        now_ms = round(opened.now() * 1000)
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
    if lead is None:
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

    with _opened(session, group) as opened:
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
    with _opened(session, group) as opened:
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


_to = click.option(
    "--to",
    default="any",
    metavar="WHOM",
    shell_complete=complete_target,
    help="any member, all, the leader, or the id of one: any.",
)
_timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=86_400),
    default=_ANSWER_S,
    metavar="SECONDS",
    help=f"How long to wait for it: {_ANSWER_S:g}.",
)
_priority = click.option(
    "--priority",
    type=click.IntRange(1, 256),
    default=128,
    metavar="N",
    help="1 to 256; of those that wait, lower ones come first: 128.",
)


@command(
    "send",
    short_help="Send a message to members, and wait until it is handled.",
    example="""\
meteor peers send workers jobs '{"id": 7}'  # to any member
meteor peers send workers reload --to all
meteor peers send workers jobs hello --to worker-7 --tell""",
    more=_BODY,
)
@click.argument("group", shell_complete=complete_peer_group)
@click.argument("queue")
@click.argument("body", required=False)
@_to
@click.option("--tell", is_flag=True, help="Only leave it: do not wait until it is handled.")
@_priority
@_timeout
def send(
    session: Session,
    group: str,
    queue: str,
    body: str | None,
    to: str,
    tell: bool,
    priority: int,
    timeout: float,
) -> None:
    """Send a message to members of a group, and wait until it is handled.

    QUEUE is the name under which they have a function for it: `@me.on(QUEUE)`.
    """
    with _opened(session, group) as opened:
        target = _target(opened, to)
        verb = target.tell if tell else target.send
        future: Future[Any] = verb(queue, parse(body), timeout=timeout, priority=priority)
        future.result()
    say(f"{'left for' if tell else 'handled by'} {_whom(to)}.")


@command(
    "ask",
    example="""\
meteor peers ask workers stats --to all
meteor peers ask workers price '{"item": "book"}' --to leader --timeout 2""",
    more=_BODY,
)
@click.argument("group", shell_complete=complete_peer_group)
@click.argument("queue")
@click.argument("body", required=False)
@_to
@_priority
@_timeout
def ask(
    session: Session,
    group: str,
    queue: str,
    body: str | None,
    to: str,
    priority: int,
    timeout: float,
) -> None:
    """Ask members of a group, and print the answer as JSON.

    With `--to all` an object for each member, on a line of its own: member, reply, error. The exit
    status is 1 if one of them did not answer.
    """
    with _opened(session, group) as opened:
        target = _target(opened, to)
        answer = target.ask(queue, parse(body), timeout=timeout, priority=priority).result()
    if to == "all":
        _print_replies(answer)
    else:
        print_json(_writable(answer))


def _print_replies(replies: Replies) -> None:
    for member in sorted(replies.values.keys() | replies.failed.keys()):
        error = replies.failed.get(member)
        reply = _writable(replies.values.get(member))
        print_json({"member": member, "reply": reply, "error": str(error) if error else None})
    if not replies.ok:
        total = len(replies.values) + len(replies.failed)
        say(f"{len(replies.failed)} of {counted(total, 'member')} did not answer.")
        raise click.exceptions.Exit(1)


class _KindType(click.ParamType["str | int"]):
    """Who must say yes."""

    name = "kind"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> str | int:
        if value in ("majority", "consensus"):
            return str(value)
        if str(value).isdecimal() and 1 <= int(value) <= 1_000:
            return int(value)
        raise click.BadParameter(
            f"{value!r} is neither majority nor consensus nor a number.", context, param
        )


@command(
    "propose",
    example="""\
meteor peers propose workers '{"limit": 7}' && echo agreed
meteor peers propose workers upgrade --kind consensus --timeout 30""",
    short_help="Have the members vote, and print the outcome.",
    more={"TOPIC": _BODY["BODY"]},
)
@click.argument("group", shell_complete=complete_peer_group)
@click.argument("topic", required=False)
@click.option(
    "--kind",
    type=_KindType(),
    default="majority",
    metavar="KIND",
    help="Who must say yes: majority, consensus (all), or so many: majority.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True, max=86_400),
    default=_VOTE_S,
    metavar="SECONDS",
    help=f"How long they may take to vote: {_VOTE_S:g}.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def propose(
    session: Session, group: str, topic: str | None, kind: Any, timeout: float, as_json: bool
) -> None:
    """Have all members that are alive vote on something, and print the outcome.

    The exit status is 0 if it has passed, else 1.
    """
    with _opened(session, group) as opened:
        future = opened.propose(parse(topic), kind=kind, timeout=timeout)
        outcome = future.result(timeout + _GRACE_S)
    if as_json:
        print_json(_outcome_fields(group, outcome))
    else:
        _print_outcome(outcome)
    if not outcome.passed:
        raise click.exceptions.Exit(1)


def _print_outcome(outcome: Outcome) -> None:
    why = {
        "passed": "passed",
        "rejected": "did not pass",
        "left": "did not pass: somebody left whose vote was needed",
        "timeout": "did not pass: not enough had voted in time",
    }
    facts: dict[str, object] = {"outcome": why[outcome.reason]}
    for name in ("yes", "no", "abstained", "missing"):
        members = getattr(outcome, name)
        shown = f"{len(members)}: {', '.join(members)}" if members else "0"
        if members or name in ("yes", "no"):
            facts[name] = shown
    print_facts(facts)


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
    with _opened(session, group) as opened:
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


for made in (list_peers, list_members, watch_peers, show_leader, send, ask, propose, remove):
    peers.add_command(made)


@contextmanager
def _opened(session: Session, name: str) -> Iterator[PeerGroup]:
    """A group that exists; nothing is begun."""
    with session.connect() as m, open_existing(m, name) as group:
        yield group


def open_existing(m: Client, name: str) -> PeerGroup:
    """The group NAME or NAME/INSTANCE."""
    kind, slash, instance = name.partition("/")
    return m.group(kind, instance=instance if slash else None, create=False)


def _target(group: PeerGroup, to: str) -> Target:
    match to:
        case "any":
            return group.any
        case "all":
            return group.all
        case "leader":
            return group.leader_proxy
    return group.member(to)


def _whom(to: str) -> str:
    words = {"any": "a member", "all": "all members", "leader": "the leader"}
    return words.get(to) or f"member {to!r}"


def parse(text: str | None) -> Any:
    """A body or topic as it is written on the command line."""
    import msgspec

    if text is None:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return text


def _writable(value: object) -> object:
    """Of an answer in bytes the same form as of records."""
    from meteor_cli.jsonl import to_data

    return to_data(value) if isinstance(value, bytes) else value


def _failed(text: str) -> Exception:
    from meteor_py import MeteorError

    return MeteorError(text)


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


def member_fields(member: Member, leader: str | None) -> dict[str, Any]:
    """A member as ``--json`` shows it."""
    return {
        "id": member.id,
        "status": member.status.value,
        "leads": member.id == leader,
        "persistent": member.persistent,
        "priority": member.priority,
        "joined": member.joined,
        "metadata": member.metadata,
    }


def _outcome_fields(group: str, outcome: Outcome) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = {"group": group}
    fields |= msgspec.to_builtins(outcome, builtin_types=(bytes,))
    fields["decided"] = round(outcome.decided * 1000)
    fields["topic"] = _writable(outcome.topic)
    for name in ("action", "at"):
        del fields[name]  # what is proposed here is no action
    return fields
