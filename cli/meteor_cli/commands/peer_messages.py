"""``meteor peers send``, ``ask`` and ``propose``: messages to a peer group, and votes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import completion, options
from meteor_cli.args.completion import BY_ID
from meteor_cli.args.input import parse_body
from meteor_cli.command import command
from meteor_cli.render.json import print_json, to_fields, writable
from meteor_cli.render.text import counted, print_facts, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Outcome, PeerGroup, Replies, Target

#: Default times to wait for a reply and for votes, in seconds.
_REPLY_S, _VOTE_S = 10.0, 5.0
#: Seconds to wait for the outcome after the vote has ended.
_GRACE_S = 15.0

_BODY = """
JSON: '{"id": 7}', 7, '"text"', null. Anything else is sent as text.
To send text that starts with {, [ or ", use --text. The default is null.
""".strip("\n")
_TARGET = """
any, all, leader, or a member id. If an id is one of these words, write
member: before it, as in member:all.
""".strip("\n")
_MORE = {"BODY": _BODY, "TARGET": _TARGET}


def _text(what: str) -> options.Decorator:
    return options.flag("--text", "as_text", help=f"Send {what} as text, even if it is JSON.")


#: The arguments and leading options that all message commands share.
_message = options.together(
    options.peer_group_name,
    click.argument("queue"),
    click.argument("body", required=False),
    _text("BODY"),
    click.option(
        "--to",
        default="any",
        metavar="TARGET",
        shell_complete=completion.target,
        help="Receiver: any, all, leader, or a member id. Default: any.",
    ),
)


def _timeout(help: str, default: float) -> options.Decorator:
    help = f"{help} Default: {default:g}."
    return options.seconds("--timeout", positive=True, max=86_400, default=default, help=help)


#: Last options of the message commands.
_handling = options.together(
    options.count(
        "--priority",
        max=256,
        default=128,
        help="1 to 256. Lower numbers are handled first. Default: 128.",
    ),
    _timeout("How long to wait.", _REPLY_S),
    options.flag(
        "--wait-for-handler",
        help="Wait for a handler, even if no receiver currently has one for QUEUE.",
    ),
)


@command(
    "send",
    example="""\
meteor peers send workers jobs '{"id": 7}'  # to any member
meteor peers send workers reload --to all
meteor peers send workers jobs hello --to worker-7 --tell""",
    more=_MORE,
)
@_message
@options.flag("--tell", help="Do not wait until the message is handled.")
@_handling
def send(session: Session, group: str, to: str, tell: bool, **message: Any) -> None:
    """Send a message to members, and wait until it is handled.

    QUEUE is the name of the members' handler: `@me.on(QUEUE)`.
    """
    message["wait_for_handler"] |= tell
    _deliver(session, group, to, "tell" if tell else "send", **message)
    words = {"any": "a member", "all": "all members", "leader": "the leader"}
    receiver = words.get(to) or f"member {to.removeprefix(BY_ID)!r}"
    say(f"{'sent to' if tell else 'handled by'} {receiver}.")


@command(
    "ask",
    example="""\
meteor peers ask workers stats --to all
meteor peers ask workers price '{"item": "book"}' --to leader --timeout 2""",
    more=_MORE,
)
@_message
@_handling
def ask(session: Session, group: str, to: str, queue: str, **message: Any) -> None:
    """Send a request to members, and print the reply as JSON.

    With `--to all`, prints one object per member, with the fields member, reply and error. The
    exit status is 1 if a member did not reply.
    """
    reply = _deliver(session, group, to, "ask", queue, **message)
    if to == "all":
        _print_replies(reply, queue)
    else:
        print_json(writable(reply))


def _print_replies(replies: Replies, queue: str) -> None:
    for member in sorted(replies.values.keys() | replies.failed.keys()):
        error = replies.failed.get(member)
        reply = writable(replies.values.get(member))
        print_json({"member": member, "reply": reply, "error": error and str(error)})
    if not replies.ok:
        total = len(replies.values) + len(replies.failed)
        hint = _no_handler(queue) if any(map(_is_silent, replies.failed.values())) else ""
        say(f"{len(replies.failed)} of {counted(total, 'member')} did not reply.{hint}")
        raise click.exceptions.Exit(1)


def _deliver(
    session: Session,
    group: str,
    to: str,
    verb: str,
    queue: str,
    body: str | None,
    as_text: bool,
    **settings: Any,
) -> Any:
    """Deliver a message and return the reply. If none arrives, the error suggests a reason."""
    from meteor_py import MessageExpired, MeteorError, PartialFailure

    value = parse_body(body, "BODY", as_text=as_text)
    with session.peer_group(group) as opened:
        deliver = getattr(_target(opened, to), verb)
        try:
            return deliver(queue, value, **settings).result()
        except (MessageExpired, PartialFailure) as error:
            failed = error.failed.values() if isinstance(error, PartialFailure) else (error,)
            first = next(iter(failed))
            if not _is_silent(first):
                raise
            raise MeteorError(f"{error}{_no_handler(queue)}") from error


def _is_silent(error: Exception) -> bool:
    """Return whether no reply arrived. A member's refusal of an expired message is a reply."""
    from meteor_py import MessageExpired

    return isinstance(error, MessageExpired) and error.timeout is not None


def _no_handler(queue: str) -> str:
    return f" There may be no handler for queue {queue!r}."


def _parse_kind(text: str) -> str | int:
    if text in ("majority", "consensus"):
        return text
    if text.isdecimal() and 1 <= int(text) <= 1_000:
        return int(text)
    raise ValueError(f"{text!r} is not majority, consensus, or a number from 1 to 1,000.")


@command(
    "propose",
    example="""\
meteor peers propose workers '{"limit": 7}' && echo agreed
meteor peers propose workers upgrade --kind consensus --timeout 30""",
    more={"TOPIC": _BODY},
)
@options.peer_group_name
@click.argument("topic", required=False)
@_text("TOPIC")
@click.option(
    "--kind",
    type=options.Parsed("kind", _parse_kind),
    default="majority",
    metavar="KIND",
    help="Votes needed: majority, consensus (all members), or a number. Default: majority.",
)
@_timeout("How long members can vote.", _VOTE_S)
@options.json_object
def propose(
    session: Session,
    group: str,
    topic: str | None,
    as_text: bool,
    kind: Any,
    timeout: float,
    as_json: bool,
) -> None:
    """Ask all live members to vote on a topic, and print the outcome.

    The exit status is 0 if the vote passed, and 1 otherwise.
    """
    value = parse_body(topic, "TOPIC", as_text=as_text)
    with session.peer_group(group) as opened:
        future = opened.propose(value, kind=kind, timeout=timeout)
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
        "left": "did not pass: a member whose vote was needed left",
        "timeout": "did not pass: too few members voted in time",
        "no leader": "did not pass: the group has no leader",
    }
    facts: dict[str, object] = {"outcome": why[outcome.reason]}
    voters = len(outcome.voters)
    if isinstance(outcome.kind, int) and outcome.kind > voters:
        needed = f"{outcome.kind:,} votes needed"
        facts["outcome"] = f"did not pass: {needed}, but only {counted(voters, 'member')} can vote"
    for name in ("yes", "no", "abstained", "missing"):
        members = getattr(outcome, name)
        if members or name in ("yes", "no"):
            facts[name] = f"{len(members)}: {', '.join(members)}" if members else "0"
    print_facts(facts)


def _target(group: PeerGroup, to: str) -> Target:
    match to:
        case "any":
            return group.any
        case "all":
            return group.all
        case "leader":
            return group.leader_proxy
    return group.member(to.removeprefix(BY_ID))


def _outcome_fields(group: str, outcome: Outcome) -> dict[str, Any]:
    fields = to_fields(outcome, group=group)
    fields |= {"decided": round(outcome.decided * 1000), "topic": writable(outcome.topic)}
    del fields["action"], fields["at"]  # only the outcomes of action proposals use these fields
    return fields
