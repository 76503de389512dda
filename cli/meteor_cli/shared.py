"""``meteor shared``: look at shared groups, purge and resume groups of their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.command import Group, command
from meteor_cli.completion import complete_shared_group, complete_stream
from meteor_cli.group_id import IdType, show_id
from meteor_cli.harmless import harmless
from meteor_cli.output import ask, counted, print_facts, print_json, print_table, say
from meteor_cli.session import Session
from meteor_cli.survey import look_at_all

if TYPE_CHECKING:
    from meteor_py import Consumer, GroupState, SharedDescription, SharedGroup, Stream

_ID = {
    "ID": r"""
The key, or header, of the records. Bytes that are no text are written as they
are shown, in single quotes: 'cart-\xff'; a backslash is \\. Or with --hex.
""".strip("\n")
}


@click.group(cls=Group)
def shared() -> None:
    """Shared groups: who holds what, purge, resume, check.

    Their consumers work in parallel, and records of one key in order. `meteor groups rm`
    deletes them.
    """


@command("ls", example="meteor shared ls carts")
@click.argument("stream", required=False, shell_complete=complete_stream)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def list_shared(session: Session, stream: str | None, as_json: bool) -> None:
    """List the shared groups of a stream, or of all."""
    is_all, no_groups = True, False
    with session.connect() as m:
        if stream is None:
            parts, is_all = look_at_all(m, _shared_of)
        else:
            opened = m.stream(stream, create=False)
            no_groups = opened.config.ordering_key is None
            parts = [_shared_of(opened)]
    found = [one for part in parts for one in part]
    if as_json:
        for name, one in found:
            print_json(to_fields(name, one))
    elif found:
        _print_shared(found)
    elif no_groups:
        say(
            f"stream {stream!r} was created without --ordering-key, so it has no shared groups; "
            "`meteor streams create NAME --ordering-key key` makes one that can have them."
        )
    elif is_all:
        say("there is no shared group yet; `stream.shared_subscriber(GROUP)` in Python begins one.")
    if not is_all:
        raise click.exceptions.Exit(1)


def _shared_of(stream: Stream) -> list[tuple[str, SharedDescription]]:
    from meteor_py import GroupNotFound

    found: list[tuple[str, SharedDescription]] = []
    for group in stream.groups():
        if group.kind == "shared":
            try:
                found.append((stream.name, stream.shared_group(group.name).describe()))
            except GroupNotFound:
                continue  # deleted a moment ago
    return found


def _print_shared(found: Sequence[tuple[str, SharedDescription]]) -> None:
    numbers = ("lag", "waiting", "ready", "blocked", "dead", "lost")
    print_table(
        ["stream", "group", "consumers#", *(f"{name}#" for name in numbers)],
        [
            [stream, one.name, _alive(one), *(getattr(one, name) for name in numbers)]
            for stream, one in found
        ],
    )


def _alive(found: SharedDescription) -> int:
    return sum(consumer.lease > 0 for consumer in found.consumers)


@command(
    "info",
    short_help="Show who holds what, and why nothing is delivered.",
    example="meteor shared info carts billing -n 20",
)
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_shared_group)
@click.option(
    "-n",
    "--number",
    type=click.IntRange(min=0),
    default=10,
    metavar="N",
    help="Groups of records to show, those with the oldest first: 10.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def describe_shared(session: Session, stream: str, group: str, number: int, as_json: bool) -> None:
    """Show a shared group: settings, consumers, what waits, and for whom.

    And why nothing is delivered, if that is so.
    """
    from meteor_cli.reasons import reasons

    with _opened(session, stream, group) as opened:
        groups = opened.groups()
        found = opened.describe()
        end = opened.stream.end().offset
    told = reasons(stream, found, groups)
    if as_json:
        shown = [_state_fields(state) for state in groups[:number]]
        more = {"groups": shown, "groups_total": len(groups), "reasons": told}
        print_json(to_fields(stream, found) | more)
        return
    print_facts(_facts(stream, found, end))
    if found.consumers:
        click.echo()
        print_table(
            ["consumer", "groups#", "records#", "lease#"],
            [[one.name, one.groups, one.records, _lease(one)] for one in found.consumers],
        )
    if groups and number:
        click.echo()
        _print_states(groups[:number])
        if len(groups) > number:
            click.echo(f"\u2026 and {counted(len(groups) - number, 'more group')}")
    click.echo()
    for sentence in told:
        _echo_sentence(sentence)


def _lease(consumer: Consumer) -> str:
    return f"{consumer.lease:.1f} s" if consumer.lease > 0 else "dead"


def _facts(stream: str, found: SharedDescription, end: int) -> dict[str, object]:
    config = found.config
    tries = f"after {counted(config.max_deliveries, 'failure')}" if config.max_deliveries else ""
    then = "then its group is parked" if config.on_poison == "park" else "then its group goes on"
    letters = "none: they are counted and logged"
    if config.dead_letter:
        letters = f"stream {config.dead_letter}"
    elif config.on_poison == "park":
        letters = "none: they stay at the head of their groups"
    free = "in no group, and in no order"
    facts: dict[str, object] = {
        "stream": stream,
        "group": found.name,
        "confirmed": f"below {found.confirmed:,} of {end:,}, lag {found.lag:,}",
        "waiting": f"{counted(found.waiting, 'record')}; {counted(found.ready, 'group')} ready, "
        f"{found.blocked:,} delayed or parked",
        "settled": f"{found.acked:,} acknowledged, {found.dead:,} given up, {found.purged:,} "
        f"purged, {found.lost:,} lost",
        "returned": f"{counted(found.returned, 'record')}; {counted(found.reaped, 'consumer')} "
        "died",
        "group cap": counted(config.group_cap, "record"),
        "lease": f"{config.lease_ttl:g} s",
        "given up": f"{tries}, {then}" if tries else f"only if rejected, {then}",
        "dead letters": letters,
        "ungrouped": free if config.ungrouped == "free" else f"in group {config.default_group}",
    }
    if found.lost_last:
        first, last = found.lost_last
        facts["last lost"] = f"records {first} to {last} were dropped before they were delivered"
    return facts


def _print_states(groups: Sequence[GroupState]) -> None:
    print_table(
        ["id", "records#", "held#", "waiting#", "oldest#", "state", "owner"],
        [
            [
                show_id(state.id),
                state.count,
                state.acquired,
                state.waiting,
                state.oldest if state.oldest >= 0 else None,
                state.state,
                state.owner,
            ]
            for state in groups
        ],
    )


def _echo_sentence(text: str) -> None:
    """A sentence in lines that fit a small terminal, the same in a pipe."""
    click.echo(click.wrap_text(harmless(text), 80, "* ", "  "))


_hex = click.option(
    "--hex", "as_hex", is_flag=True, is_eager=True, help="ID is written in hexadecimal."
)


@command(
    "purge",
    example=r"""
meteor shared purge carts billing cart-7 --dry-run
meteor shared purge carts billing 'cart-\xff' --limit 1""".strip(),
    more=_ID,
)
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_shared_group)
@click.argument("id", type=IdType())
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="At most so many, the oldest: all."
)
@_hex
@click.option(
    "--dry-run", is_flag=True, help="Only show what would be purged, as far as that is known."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def purge(
    session: Session,
    stream: str,
    group: str,
    id: bytes,
    limit: int | None,
    as_hex: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Settle the waiting records of one group of records, unprocessed.

    What a consumer holds stays with it. The records stay in the stream, for others.
    """
    name = show_id(id)
    with _opened(session, stream, group) as opened:
        found = opened.groups(look_ahead=not dry_run)  # which writes
        state = next((one for one in found if one.id == id), None)
        if dry_run:
            _say_unknown(opened)
        waiting = state.waiting if state else 0
        stay = f"; {_held(state)}" if state and state.acquired else ""
        if not waiting:
            say(f"nothing of {name} waits in shared group {group!r}{stay}.")
            return
        count = min(limit or waiting, waiting)
        what = f"the oldest {count:,} of {counted(waiting, 'waiting record')} of {name}"
        if count == waiting:
            what = f"{counted(waiting, 'waiting record')} of {name}"
        if dry_run:
            say(f"would be purged from shared group {group!r}: {what}{stay}.")
            return
        ask(f"Shared group {group!r} of stream {stream!r} will not process {what}{stay}.", yes=yes)
        purged = opened.purge(id, count)  # no more than was shown, however long that took
    say(f"purged from shared group {group!r}: {counted(purged, 'record')} of {name}{stay}.")


def _say_unknown(shared: SharedGroup) -> None:
    unknown = shared.stream.end().offset - shared.describe().looked
    if unknown > 0:
        verb = "has" if unknown == 1 else "have"
        say(f"{counted(unknown, 'record')} {verb} not been looked at, and may be of any group.")


def _held(state: GroupState) -> str:
    stay = "stays" if state.acquired == 1 else "stay"
    return f"{counted(state.acquired, 'record')} {stay} with {state.owner}"


@command(
    "resume",
    example=r"""
meteor shared resume carts billing cart-7
meteor shared resume carts billing 636172742dff --hex""".strip(),
    more=_ID,
)
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_shared_group)
@click.argument("id", type=IdType())
@_hex
def resume(session: Session, stream: str, group: str, id: bytes, as_hex: bool) -> None:
    """Let a group of records that is parked or delayed go on now.

    The failures of its first record are forgotten.
    """
    with _opened(session, stream, group) as opened:
        was_stopped = opened.resume(id)
    if was_stopped:
        say(f"{show_id(id)} goes on in shared group {group!r}.")
    else:
        say(f"{show_id(id)} is neither parked nor delayed in shared group {group!r}.")


@command("fsck", example="meteor shared fsck carts billing")
@click.argument("stream", shell_complete=complete_stream)
@click.argument("group", shell_complete=complete_shared_group)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on each line.")
def fsck(session: Session, stream: str, group: str, as_json: bool) -> None:
    """Check the books of a shared group for contradictions.

    The exit status is 1 if there are any. Of a large group the server is busy for a moment.
    """
    with _opened(session, stream, group) as opened:
        flaws = opened.fsck()
    for flaw in flaws:
        if as_json:
            print_json({"stream": stream, "group": group, "flaw": flaw})
        else:
            click.echo(harmless(flaw))
    if flaws:
        say(f"shared group {group!r} of stream {stream!r}: {counted(len(flaws), 'contradiction')}.")
        raise click.exceptions.Exit(1)
    say(f"shared group {group!r} of stream {stream!r}: all is well.")


for member in (list_shared, describe_shared, purge, resume, fsck):
    shared.add_command(member)


@contextmanager
def _opened(session: Session, stream: str, group: str) -> Iterator[SharedGroup]:
    from meteor_py import GroupNotFound, MeteorError

    with session.stream(stream) as opened:
        try:
            yield opened.shared_group(group)
        except GroupNotFound:
            raise MeteorError(
                f"Stream {stream!r} has no shared group {group!r}; `meteor shared ls {stream}` "
                "shows those it has."
            ) from None


def to_fields(stream: str, found: SharedDescription) -> dict[str, Any]:
    """The fields of ``SharedDescription``, its settings among them: what ``--json`` shows."""
    import msgspec

    fields: dict[str, Any] = {"stream": stream}
    fields |= msgspec.to_builtins(found)
    fields |= fields.pop("config")
    return fields


def _state_fields(state: GroupState) -> dict[str, Any]:
    """The fields of ``GroupState``; its id as keys are in records."""
    import msgspec

    from meteor_cli.jsonl import to_data

    fields: dict[str, Any] = msgspec.to_builtins(state)
    fields["id"] = msgspec.to_builtins(to_data(state.id))
    return fields
