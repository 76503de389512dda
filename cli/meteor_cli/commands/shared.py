"""``meteor shared``: look at shared groups, purge and resume groups of their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.args.ids import IdType, show_id
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import look_at_streams, print_list, stream_fields
from meteor_cli.render.json import print_json, to_fields, writable
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import ask
from meteor_cli.render.text import counted, print_facts, print_table, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import GroupState, SharedDescription, SharedGroup, Stream

#: Consumers that are named in a sentence.
_NAMED = 3
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
@options.any_stream
@options.json_lines
def list_shared(session: Session, stream: str | None, as_json: bool) -> None:
    """List the shared groups of a stream, or of all."""
    if_none = (
        "there is no shared group yet; `stream.shared_subscriber(GROUP)` in Python begins one."
    )
    with session.connect() as m:
        found = look_at_streams(m, _shared_of, stream)
        if stream is not None and m.stream(stream, create=False).config.group_by is None:
            if_none = (
                f"stream {stream!r} was created without --group-by, so it has no shared groups; "
                "`meteor streams create NAME --group-by key` makes one that can have them."
            )
    print_list(found, as_json, stream_fields, _print_shared, if_none)


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
        " | ".join(["stream", "group", "consumers#", *(f"{name}#" for name in numbers)]),
        [
            [stream, one.name, sum(consumer.lease > 0 for consumer in one.consumers)]
            + [getattr(one, name) for name in numbers]
            for stream, one in found
        ],
    )


@command(
    "info",
    short_help="Show who holds what, and why nothing is delivered.",
    example="meteor shared info carts billing -n 20",
)
@options.stream_name
@options.shared_group_name
@options.count(
    *("-n", "--number"),
    min=0,
    default=10,
    help="Groups of records to show, those with the oldest first: 10.",
)
@options.json_object
def describe_shared(session: Session, stream: str, group: str, number: int, as_json: bool) -> None:
    """Show a shared group: settings, consumers, what waits, and for whom.

    And why nothing is delivered, if that is so.
    """
    with _opened(session, stream, group) as opened:
        groups = opened.groups()
        found = opened.describe()
        end = opened.stream.end().offset
    told = reasons(stream, found, groups)
    if as_json:
        shown = [to_fields(state) | {"id": writable(state.id)} for state in groups[:number]]
        more = {"groups": shown, "groups_total": len(groups), "reasons": told}
        print_json(to_fields(found, stream=stream) | more)
        return
    print_facts(_facts(stream, found, end))
    if found.consumers:
        click.echo()
        print_table(
            "consumer | groups# | records# | lease#",
            [
                [
                    one.name,
                    one.groups,
                    one.records,
                    f"{one.lease:.1f} s" if one.lease > 0 else "dead",
                ]
                for one in found.consumers
            ],
        )
    if groups and number:
        click.echo()
        _print_states(groups[:number])
        if len(groups) > number:
            click.echo(f"\u2026 and {counted(len(groups) - number, 'more group')}")
    click.echo()
    for sentence in told:  # in lines that fit a small terminal, the same in a pipe
        click.echo(click.wrap_text(sanitize(sentence), 80, "* ", "  "))


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
        "id | records# | held# | waiting# | oldest# | state | owner",
        [
            [
                *(show_id(one.id), one.count, one.acquired, one.waiting),
                *(one.oldest if one.oldest >= 0 else None, one.state, one.owner),
            ]
            for one in groups
        ],
    )


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
@options.stream_name
@options.shared_group_name
@click.argument("id", type=IdType())
@options.count("--limit", help="At most so many, the oldest: all.")
@_hex
@options.flag("--dry-run", help="Only show what would be purged, as far as that is known.")
@options.yes
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
@options.stream_name
@options.shared_group_name
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
@options.stream_name
@options.shared_group_name
@options.json_lines
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
            click.echo(sanitize(flaw))
    if flaws:
        say(f"shared group {group!r} of stream {stream!r}: {counted(len(flaws), 'contradiction')}.")
        raise click.exceptions.Exit(1)
    say(f"shared group {group!r} of stream {stream!r}: all is well.")


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


def reasons(stream: str, found: SharedDescription, groups: Sequence[GroupState]) -> list[str]:
    """Sentences, what somebody has to see to first; what others have named is in them as it came.

    Args:
        stream: Its name.
        found: The shared group.
        groups: All its groups of records.
    """
    if found.lag == 0:
        return ["All records are settled: it waits for new ones."]
    told = _stopped(stream, found, groups)
    dead = [consumer.name for consumer in found.consumers if consumer.lease <= 0]
    if len(dead) == len(found.consumers):
        told.append(f"There is no consumer, and {_lag(found)}.")
    if dead:
        told.append(
            f"{dead[0]} is dead{f', and {len(dead) - 1:,} more' if len(dead) > 1 else ''}: whoever "
            "asks for records next gets what it held."
        )
    if len(dead) == len(found.consumers):
        return told
    told += _held_back(found, groups)
    if found.ready:
        told.append(
            f"{counted(found.ready, 'group')} can be had at once: whoever asks gets records, "
            "unless it holds as many as its prefetch allows."
        )
    new = found.confirmed + found.lag - found.looked
    if new > 0 and found.waiting < _most():
        told.append(
            f"{counted(new, 'record')} {'has' if new == 1 else 'have'} not been looked at yet: "
            "consumers do that when they ask for records."
        )
    return told or [f"Nothing is in the way: {_at_work(found)}."]


def _at_work(found: SharedDescription) -> str:
    busy = [consumer for consumer in found.consumers if consumer.records]
    if not busy:
        return _lag(found)
    held = sum(consumer.records for consumer in busy)
    who = busy[0].name if len(busy) == 1 else counted(len(busy), "consumer")
    return f"{who} {'has' if len(busy) == 1 else 'have'} {counted(held, 'record')} to settle"


def _most() -> int:
    from meteor_py.shared.config import WAITING_MAX

    return WAITING_MAX


def _lag(found: SharedDescription) -> str:
    return f"{counted(found.lag, 'record')} {'is' if found.lag == 1 else 'are'} not settled"


def _stopped(stream: str, found: SharedDescription, groups: Sequence[GroupState]) -> list[str]:
    """What somebody has to act upon."""
    told: list[str] = []
    if found.waiting >= _most():
        told.append(
            f"{found.waiting:,} records wait for their groups, and more may not: nothing new is "
            "delivered before some of those are settled, resumed or purged."
        )
    parked = [group for group in groups if group.state == "parked"]
    if parked:
        told.append(
            f"{counted(len(parked), 'group')} {_is(parked)} parked, with "
            f"{counted(sum(group.count for group in parked), 'record')}: `meteor shared resume "
            f"{stream} {found.name} ID` lets one go on."
        )
    delayed = [group for group in groups if group.state == "delayed"]
    if delayed:
        told.append(
            f"{counted(len(delayed), 'group')} {_is(delayed)} delayed after a failure, with "
            f"{counted(sum(group.count for group in delayed), 'record')}, and will go on."
        )
    if found.dying:
        told.append(
            f"{counted(found.dying, 'record')} {'was' if found.dying == 1 else 'were'} given up, "
            f"and not yet published to stream {found.config.dead_letter!r}: a consumer has to, "
            "and must be allowed to."
        )
    return told


def _held_back(found: SharedDescription, groups: Sequence[GroupState]) -> list[str]:
    """Who holds what others wait for."""
    busy = [group for group in groups if group.state == "owned"]
    owners = Counter(group.owner or "somebody" for group in busy)
    told: list[str] = []
    if len(owners) == 1 and len(found.consumers) > 1 and len(busy) == len(groups) > 1:
        (name,) = owners
        told.append(f"All {counted(len(busy), 'group')} are held by {name}.")
    waiting = [group for group in busy if group.waiting]
    per_owner = Counter[str]()
    for group in waiting:
        per_owner[group.owner or "somebody"] += group.waiting
    for name, records in per_owner.most_common(_NAMED):
        told.append(
            f"{counted(records, 'record')} {'waits' if records == 1 else 'wait'} for {name}, which "
            "has to settle what it holds of their groups first."
        )
    if len(per_owner) > _NAMED:
        told.append(f"The same goes for {counted(len(per_owner) - _NAMED, 'more consumer')}.")
    return told


def _is(groups: Sequence[GroupState]) -> str:
    return "is" if len(groups) == 1 else "are"


for member in (list_shared, describe_shared, purge, resume, fsck):
    shared.add_command(member)
