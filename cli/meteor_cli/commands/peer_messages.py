"""``meteor peers send``, ``ask`` and ``propose``: speak to the members of a peer group."""

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

#: Seconds that a member has to answer, and a group to vote.
_ANSWER_S, _VOTE_S = 10.0, 5.0
#: Seconds after which a vote whose outcome is not known by then is given up.
_GRACE_S = 15.0

_BODY = """
JSON: '{"id": 7}', 7, '"text"', null. Other words are text as they stand, but
what begins with {, [ or " must be JSON, or --text be given. Without it, null.
""".strip("\n")
_WHOM = """
any, all, leader, or the id of a member. If one is named like these words:
member:all.
""".strip("\n")
_MORE = {"BODY": _BODY, "WHOM": _WHOM}


def _text(what: str) -> options.Decorator:
    return options.flag("--text", "as_text", help=f"{what} is text, even if it could be JSON.")


#: The arguments of a message, and the first of its options.
_message = options.together(
    options.peer_group_name,
    click.argument("queue"),
    click.argument("body", required=False),
    _text("BODY"),
    click.option(
        "--to",
        default="any",
        metavar="WHOM",
        shell_complete=completion.target,
        help="any member, all, the leader, or the id of one: any.",
    ),
)


def _timeout(help: str, default: float) -> options.Decorator:
    help = f"{help}: {default:g}."
    return options.seconds("--timeout", positive=True, max=86_400, default=default, help=help)


#: The last of its options.
_handling = options.together(
    options.count(
        "--priority",
        max=256,
        default=128,
        help="1 to 256; of those that wait, lower ones come first: 128.",
    ),
    _timeout("How long to wait for it", _ANSWER_S),
)


@command(
    "send",
    short_help="Send a message to members, and wait until it is handled.",
    example="""\
meteor peers send workers jobs '{"id": 7}'  # to any member
meteor peers send workers reload --to all
meteor peers send workers jobs hello --to worker-7 --tell""",
    more=_MORE,
)
@_message
@options.flag("--tell", help="Only leave it: do not wait until it is handled.")
@_handling
def send(session: Session, group: str, to: str, tell: bool, **message: Any) -> None:
    """Send a message to members of a group, and wait until it is handled.

    QUEUE is the name under which they have a function for it: `@me.on(QUEUE)`.
    """
    _deliver(session, group, to, "tell" if tell else "send", **message)
    say(f"{'left for' if tell else 'handled by'} {_whom(to)}.")


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
    """Ask members of a group, and print the answer as JSON.

    With `--to all` an object for each member, on a line of its own: member, reply, error. The exit
    status is 1 if one of them did not answer.
    """
    answer = _deliver(session, group, to, "ask", queue, **message)
    if to == "all":
        _print_replies(answer, queue)
    else:
        print_json(writable(answer))


def _print_replies(replies: Replies, queue: str) -> None:
    for member in sorted(replies.values.keys() | replies.failed.keys()):
        error = replies.failed.get(member)
        reply = writable(replies.values.get(member))
        print_json({"member": member, "reply": reply, "error": error and str(error)})
    if not replies.ok:
        total = len(replies.values) + len(replies.failed)
        hint = _no_handler(queue) if any(map(_is_silent, replies.failed.values())) else ""
        say(f"{len(replies.failed)} of {counted(total, 'member')} did not answer.{hint}")
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
    """The answer. Of silence the error says what may be the reason."""
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
    """Whether nothing was heard; not that a member looked at the message too late."""
    from meteor_py import MessageExpired

    return isinstance(error, MessageExpired) and error.timeout is not None


def _no_handler(queue: str) -> str:
    return f" Perhaps queue {queue!r} has no handler there."


def _parse_kind(text: str) -> str | int:
    """Who must say yes."""
    if text in ("majority", "consensus"):
        return text
    if text.isdecimal() and 1 <= int(text) <= 1_000:
        return int(text)
    raise ValueError(f"{text!r} is neither majority nor consensus nor a number from 1 to 1,000.")


@command(
    "propose",
    example="""\
meteor peers propose workers '{"limit": 7}' && echo agreed
meteor peers propose workers upgrade --kind consensus --timeout 30""",
    short_help="Have the members vote, and print the outcome.",
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
    help="Who must say yes: majority, consensus (all), or so many: majority.",
)
@_timeout("How long they may take to vote", _VOTE_S)
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
    """Have all members that are alive vote on something, and print the outcome.

    The exit status is 0 if it has passed, else 1.
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
        "left": "did not pass: somebody left whose vote was needed",
        "timeout": "did not pass: not enough had voted in time",
    }
    facts: dict[str, object] = {"outcome": why[outcome.reason]}
    asked = len(outcome.voters)
    if isinstance(outcome.kind, int) and outcome.kind > asked:
        facts["outcome"] = (
            f"did not pass: {outcome.kind:,} must say yes, and there "
            f"{'is' if asked == 1 else 'are'} only {counted(asked, 'member')} to vote"
        )
    for name in ("yes", "no", "abstained", "missing"):
        members = getattr(outcome, name)
        shown = f"{len(members)}: {', '.join(members)}" if members else "0"
        if members or name in ("yes", "no"):
            facts[name] = shown
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


def _whom(to: str) -> str:
    words = {"any": "a member", "all": "all members", "leader": "the leader"}
    return words.get(to) or f"member {to.removeprefix(BY_ID)!r}"


def _outcome_fields(group: str, outcome: Outcome) -> dict[str, Any]:
    fields = to_fields(outcome, group=group)
    fields |= {"decided": round(outcome.decided * 1000), "topic": writable(outcome.topic)}
    del fields["action"], fields["at"]  # what is proposed here is no action
    return fields
