"""``meteor shared``: look at shared groups, purge and resume ordering keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.args.keys import KeyType, show_key
from meteor_cli.command import Group, command
from meteor_cli.commands.listing import look_at_streams, print_list, stream_fields
from meteor_cli.render.json import print_json, to_fields, writable
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import ask
from meteor_cli.render.text import counted, print_facts, print_table, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import KeyState, SharedDescription, SharedGroup, Stream

#: Consumers that are named in a sentence.
_NAMED = 3
_KEY = {
    "KEY": r"""
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
        if stream is not None and m.stream(stream, create=False).config.ordering_key is None:
            if_none = (
                f"stream {stream!r} was created without --ordering-key, so it has no shared "
                "groups; `meteor streams create NAME --ordering-key key` makes one that can "
                "have them."
            )
    print_list(found, as_json, stream_fields, _print_shared, if_none)


def _shared_of(stream: Stream) -> list[tuple[str, SharedDescription]]:
    from meteor_py import GroupNotFound

    found: list[tuple[str, SharedDescription]] = []
    for name in [group.name for group in stream.groups() if group.kind == "shared"]:
        try:
            found.append((stream.name, stream.shared_group(name).describe()))
        except GroupNotFound:
            continue  # deleted a moment ago
    return found


def _print_shared(found: Sequence[tuple[str, SharedDescription]]) -> None:
    numbers = attrgetter("lag", "waiting", "ready", "blocked", "dead", "lost")
    rows = [
        [stream, one.name, sum(consumer.lease > 0 for consumer in one.consumers), *numbers(one)]
        for stream, one in found
    ]
    headings = "stream | group | consumers# | lag# | waiting# | ready# | blocked# | dead# | lost#"
    print_table(headings, rows)


@command(
    "info",
    short_help="Show who holds what, and why nothing is delivered.",
    example="meteor shared info carts billing -n 20",
)
@options.shared_group_of_stream
@options.count(
    *("-n", "--number"),
    min=0,
    default=10,
    help="Ordering keys to show, those with the oldest records first: 10.",
)
@options.json_object
def describe_shared(session: Session, stream: str, group: str, number: int, as_json: bool) -> None:
    """Show a shared group: settings, consumers, what waits, and for whom.

    And why nothing is delivered, if that is so.
    """
    with _opened(session, stream, group) as opened:
        keys = opened.keys()
        found = opened.describe()
        end = opened.stream.end().offset
    told = reasons(stream, found, keys)
    if as_json:
        shown = [to_fields(state) | {"key": writable(state.key)} for state in keys[:number]]
        more = {"keys": shown, "keys_total": len(keys), "reasons": told}
        print_json(to_fields(found, stream=stream) | more)
        return
    print_facts(_facts(stream, found, end))
    if found.consumers:
        click.echo()
        leases = [f"{one.lease:.1f} s" if one.lease > 0 else "dead" for one in found.consumers]
        consumers = [(one.name, one.keys, one.records) for one in found.consumers]
        rows = [[*one, lease] for one, lease in zip(consumers, leases, strict=True)]
        print_table("consumer | keys# | records# | lease#", rows)
    if keys and number:
        click.echo()
        _print_states(keys[:number])
        if len(keys) > number:
            click.echo(f"\u2026 and {counted(len(keys) - number, 'more key')}")
    click.echo()
    for sentence in told:  # in lines that fit a small terminal, the same in a pipe
        click.echo(click.wrap_text(sanitize(sentence), 80, "* ", "  "))


def _facts(stream: str, found: SharedDescription, end: int) -> dict[str, object]:
    config = found.config
    tries = f"after {counted(config.max_deliveries, 'failure')}" if config.max_deliveries else ""
    then = "then its key is parked" if config.on_poison == "park" else "then its key goes on"
    letters = "none: they are counted and logged"
    if config.dead_letter:
        letters = f"stream {config.dead_letter}"
    elif config.on_poison == "park":
        letters = "none: they stay at the head of their keys"
    facts: dict[str, object] = {
        "stream": stream,
        "group": found.name,
        "confirmed": f"below {found.confirmed:,} of {end:,}, lag {found.lag:,}",
        "waiting": f"{counted(found.waiting, 'record')}; {counted(found.ready, 'key')} ready, "
        f"{found.blocked:,} delayed or parked",
        "settled": f"{found.acked:,} acknowledged, {found.dead:,} given up, {found.purged:,} "
        f"purged, {found.lost:,} lost",
        "returned": f"{counted(found.returned, 'record')}; {counted(found.reaped, 'consumer')} "
        "died",
        "max per key": counted(config.max_per_key, "record"),
        "lease": f"{config.lease_ttl:g} s",
        "given up": f"{tries}, {then}" if tries else f"only if rejected, {then}",
        "dead letters": letters,
        "without key": "in no order"
        if config.keyless == "free"
        else f"as of key {config.default_key}",
    }
    if found.lost_last:
        first, last = found.lost_last
        facts["last lost"] = f"records {first} to {last} were dropped before they were delivered"
    return facts


def _print_states(keys: Sequence[KeyState]) -> None:
    numbers, state = attrgetter("count", "acquired", "waiting"), attrgetter("state", "owner")
    rows = [
        [show_key(one.key), *numbers(one), one.oldest if one.oldest >= 0 else None, *state(one)]
        for one in keys
    ]
    print_table("key | records# | held# | waiting# | oldest# | state | owner", rows)


_hex = click.option(
    "--hex", "as_hex", is_flag=True, is_eager=True, help="KEY is written in hexadecimal."
)


@command(
    "purge",
    example=r"""
meteor shared purge carts billing cart-7 --dry-run
meteor shared purge carts billing 'cart-\xff' --limit 1""".strip(),
    more=_KEY,
)
@options.shared_group_of_stream
@click.argument("key", type=KeyType())
@options.count("--limit", help="At most so many, the oldest: all.")
@_hex
@options.confirmation("Only show what would be purged, as far as that is known.")
def purge(
    session: Session,
    stream: str,
    group: str,
    key: bytes,
    limit: int | None,
    as_hex: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Settle the waiting records of one ordering key, unprocessed.

    What a consumer holds stays with it. The records stay in the stream, for others.
    """
    name = show_key(key)
    with _opened(session, stream, group) as opened:
        found = opened.keys(look_ahead=not dry_run)  # which writes
        state = next((one for one in found if one.key == key), None)
        unknown = opened.stream.end().offset - opened.describe().looked
        if dry_run and unknown > 0:
            not_seen = counted(unknown, "record", "has", "have")
            say(f"{not_seen} not been looked at, and may be of any key.")
        waiting = state.waiting if state else 0
        stay = ""
        if state and state.acquired:
            stay = f"; {counted(state.acquired, 'record', 'stays', 'stay')} with {state.owner}"
        if not waiting:
            say(f"nothing of {name} waits in shared group {group!r}{stay}.")
            return
        count = min(limit or waiting, waiting)
        what = f"{counted(waiting, 'waiting record')} of {name}"
        if count < waiting:
            what = f"the oldest {count:,} of {what}"
        if dry_run:
            say(f"would be purged from shared group {group!r}: {what}{stay}.")
            return
        ask(f"Shared group {group!r} of stream {stream!r} will not process {what}{stay}.", yes=yes)
        purged = opened.purge(key, count)  # no more than was shown, however long that took
    say(f"purged from shared group {group!r}: {counted(purged, 'record')} of {name}{stay}.")


@command(
    "resume",
    example=r"""
meteor shared resume carts billing cart-7
meteor shared resume carts billing 636172742dff --hex""".strip(),
    more=_KEY,
)
@options.shared_group_of_stream
@click.argument("key", type=KeyType())
@_hex
def resume(session: Session, stream: str, group: str, key: bytes, as_hex: bool) -> None:
    """Let an ordering key that is parked or delayed go on now.

    The failures of its first record are forgotten.
    """
    with _opened(session, stream, group) as opened:
        was_stopped = opened.resume(key)
    state = "goes on" if was_stopped else "is neither parked nor delayed"
    say(f"{show_key(key)} {state} in shared group {group!r}.")


@command("fsck", example="meteor shared fsck carts billing")
@options.shared_group_of_stream
@options.json_lines
def fsck(session: Session, stream: str, group: str, as_json: bool) -> None:
    """Check the state of a shared group for contradictions.

    The exit status is 1 if there are any. Of a large group the server is busy for a moment.
    """
    with _opened(session, stream, group) as opened:
        flaws = opened.fsck()
    for flaw in flaws:
        if as_json:
            print_json({"stream": stream, "group": group, "flaw": flaw})
        else:
            click.echo(sanitize(flaw))
    outcome = counted(len(flaws), "contradiction") if flaws else "all is well"
    say(f"shared group {group!r} of stream {stream!r}: {outcome}.")
    if flaws:
        raise click.exceptions.Exit(1)


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


def reasons(stream: str, found: SharedDescription, keys: Sequence[KeyState]) -> list[str]:
    """Why a shared group delivers nothing, or not all, in sentences; what somebody has to see to
    comes first. What others have named is in them as it came."""
    if found.lag == 0:
        return ["All records are settled: it waits for new ones."]
    told = _stopped(stream, found, keys)
    lag = f"{counted(found.lag, 'record', 'is', 'are')} not settled"
    dead = [consumer.name for consumer in found.consumers if consumer.lease <= 0]
    is_deserted = len(dead) == len(found.consumers)
    if is_deserted:
        told.append(f"There is no consumer, and {lag}.")
    if dead:
        more = f", and {len(dead) - 1:,} more" if len(dead) > 1 else ""
        told.append(f"{dead[0]} is dead{more}: whoever asks for records next gets what it held.")
    if is_deserted:
        return told
    told += _held_back(found, keys)
    if found.ready:
        told.append(
            f"{counted(found.ready, 'key')} can be had at once: whoever asks gets records, unless "
            "it holds as many as its prefetch allows."
        )
    new = found.confirmed + found.lag - found.looked
    if new > 0 and found.waiting < _most():
        told.append(
            f"{counted(new, 'record', 'has', 'have')} not been looked at yet: consumers do that "
            "when they ask for records."
        )
    busy = [consumer for consumer in found.consumers if consumer.records]
    if busy and not told:
        who = f"{busy[0].name} has" if len(busy) == 1 else f"{len(busy):,} consumers have"
        lag = f"{who} {counted(sum(one.records for one in busy), 'record')} to settle"
    return told or [f"Nothing is in the way: {lag}."]


def _most() -> int:
    from meteor_py.shared.config import WAITING_MAX

    return WAITING_MAX


def _stopped(stream: str, found: SharedDescription, keys: Sequence[KeyState]) -> list[str]:
    """What somebody has to act upon."""
    told: list[str] = []
    if found.waiting >= _most():
        told.append(
            f"{found.waiting:,} records wait for their keys, and more may not: nothing new is "
            "delivered before some of those are settled, resumed or purged."
        )
    for state, why, then in (
        ("parked", "", f": `meteor shared resume {stream} {found.name} KEY` lets one go on."),
        ("delayed", " after a failure", ", and will go on."),
    ):
        stopped = [key.count for key in keys if key.state == state]
        if stopped:
            records = counted(sum(stopped), "record")
            these = counted(len(stopped), "key", "is", "are")
            told.append(f"{these} {state}{why}, with {records}{then}")
    if found.dying:
        told.append(
            f"{counted(found.dying, 'record', 'was', 'were')} given up, and not yet published to "
            f"stream {found.config.dead_letter!r}: a consumer has to, and must be allowed to."
        )
    return told


def _held_back(found: SharedDescription, keys: Sequence[KeyState]) -> list[str]:
    """Who holds what others wait for."""
    owned = [key for key in keys if key.state == "owned"]
    owners = {key.owner or "somebody" for key in owned}
    told: list[str] = []
    if len(owners) == 1 and len(found.consumers) > 1 and len(owned) == len(keys) > 1:
        told.append(f"All {counted(len(owned), 'key')} are held by {owners.pop()}.")
    waiting = Counter[str]()
    for key in owned:
        if key.waiting:
            waiting[key.owner or "somebody"] += key.waiting
    for name, records in waiting.most_common(_NAMED):
        told.append(
            f"{counted(records, 'record', 'waits', 'wait')} for {name}, which has to settle what "
            "it holds of their keys first."
        )
    if len(waiting) > _NAMED:
        told.append(f"The same goes for {counted(len(waiting) - _NAMED, 'more consumer')}.")
    return told


for member in (list_shared, describe_shared, purge, resume, fsck):
    shared.add_command(member)
