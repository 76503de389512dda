"""``meteor shared``: inspect shared groups, purge and resume ordering keys."""

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
from meteor_cli.commands.listing import print_list, read_streams, stream_fields
from meteor_cli.render.json import print_json, to_fields, writable
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import confirm
from meteor_cli.render.text import counted, print_facts, print_table, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import KeyState, SharedDescription, SharedGroup, Stream

#: Maximum number of consumers to list among the reasons.
_NAMED = 3
_KEY = {
    "KEY": r"""
The ordering key. Write bytes that are not text as \xNN and a backslash as \\,
in single quotes: 'cart-\xff'. Or use --hex.
""".strip("\n")
}


@click.group(cls=Group)
def shared() -> None:
    """Inspect shared groups; purge and resume ordering keys.

    A shared group's consumers work in parallel, and process each ordering key's records in order.
    Use `meteor groups rm` to delete a shared group.
    """


@command("ls", example="meteor shared ls carts")
@options.any_stream
@options.json_lines
def list_shared(session: Session, stream: str | None, as_json: bool) -> None:
    """List the shared groups of a stream, or of all streams."""
    if_none = (
        "there are no shared groups yet. In Python, `stream.shared_subscriber(GROUP)` creates one."
    )
    with session.connect() as m:
        found = read_streams(m, _shared_of, stream)
        if stream is not None and m.stream(stream, create=False).config.ordering_key is None:
            if_none = (
                f"stream {stream!r} has no ordering key, so it cannot have shared groups. Add one "
                f"with `meteor streams configure {stream} --ordering-key key`."
            )
    print_list(found, as_json, stream_fields, _print_shared, if_none)


def _shared_of(stream: Stream) -> list[tuple[str, SharedDescription]]:
    from meteor_py import GroupNotFound

    found: list[tuple[str, SharedDescription]] = []
    for name in [group.name for group in stream.groups() if group.kind == "shared"]:
        try:
            found.append((stream.name, stream.shared_group(name).describe()))
        except GroupNotFound:
            continue  # deleted in the meantime
    return found


def _print_shared(found: Sequence[tuple[str, SharedDescription]]) -> None:
    numbers = attrgetter("lag", "waiting", "ready", "blocked", "dead", "lost")
    rows = [
        [stream, one.name, sum(consumer.lease > 0 for consumer in one.consumers), *numbers(one)]
        for stream, one in found
    ]
    headings = "stream | group | consumers# | lag# | waiting# | ready# | blocked# | dead# | lost#"
    print_table(headings, rows)


@command("info", example="meteor shared info carts billing -n 20")
@options.shared_group_of_stream
@options.count(
    *("-n", "--number"),
    min=0,
    default=10,
    help="Show N ordering keys, those with the oldest records first. Default: 10.",
)
@options.json_object
def describe_shared(session: Session, stream: str, group: str, number: int, as_json: bool) -> None:
    """Show settings, consumers and keys, and why records are waiting."""
    with _opened(session, stream, group) as opened:
        keys = opened.keys()
        found = opened.describe()
        end = opened.stream.end().offset
    why = reasons(stream, found, keys)
    if as_json:
        states = [to_fields(state) | {"key": writable(state.key)} for state in keys[:number]]
        more = {"keys": states, "keys_total": len(keys), "reasons": why}
        print_json(stream_fields((stream, found)) | more)
        return
    print_facts(_facts(stream, found, end))
    if found.consumers:
        click.echo()
        rows = []
        for each in found.consumers:
            lease = f"{each.lease:.1f} s" if each.lease > 0 else "dead"
            rows.append([each.name, each.keys, each.records, lease])
        print_table("consumer | keys# | records# | lease#", rows)
    if keys and number:
        click.echo()
        _print_states(keys[:number])
        if len(keys) > number:
            click.echo(f"\u2026 and {counted(len(keys) - number, 'more key')}")
    click.echo()
    for sentence in why:  # wrapped at 80 columns, even in a pipe
        click.echo(click.wrap_text(sanitize(sentence), 80, "* ", "  "))


def _facts(stream: str, found: SharedDescription, end: int) -> dict[str, object]:
    config = found.config
    parks = config.on_poison == "park"
    when = "only if rejected"
    if config.max_deliveries:
        when = f"after {counted(config.max_deliveries, 'failure')}"
    letters = "none; counted and logged"
    if parks:
        letters = "none; records stay at the head of their keys"
    if config.dead_letter:
        letters = f"stream {config.dead_letter}"
    is_free = config.keyless == "free"
    facts: dict[str, object] = {
        "stream": stream,
        "group": found.name,
        "confirmed": f"all records below {found.confirmed:,} of {end:,}, lag {found.lag:,}",
        "waiting": f"{counted(found.waiting, 'record')}; {counted(found.ready, 'key')} ready, "
        f"{found.blocked:,} blocked",
        "settled": f"{found.acked:,} acknowledged, {found.dead:,} dead, {found.purged:,} "
        f"purged, {found.lost:,} lost",
        "returned": f"{counted(found.returned, 'record')}; {counted(found.reaped, 'consumer')} "
        "died",
        "max per key": _most(config.max_per_key),
        "lease": f"{config.lease_ttl:g} s",
        "give up": f"{when}, then {'park' if parks else 'continue with'} the key",
        "dead letters": letters,
        "without key": "unordered" if is_free else f"in order, as key {config.default_key}",
    }
    if found.lost_last:
        first, last = found.lost_last
        facts["last lost"] = f"records {first} to {last}, dropped before delivery"
    return facts


def _most(max_per_key: int) -> str:
    from meteor_py.shared.config import PREFETCH_MAX

    return "up to prefetch" if max_per_key == PREFETCH_MAX else counted(max_per_key, "record")


def _print_states(keys: Sequence[KeyState]) -> None:
    numbers, state = attrgetter("count", "acquired", "waiting"), attrgetter("state", "owner")
    rows = [
        [show_key(one.key), *numbers(one), one.oldest if one.oldest >= 0 else None, *state(one)]
        for one in keys
    ]
    print_table("key | records# | held# | waiting# | oldest# | state | owner", rows)


_hex = click.option("--hex", "as_hex", is_flag=True, is_eager=True, help="KEY is hexadecimal.")


@command(
    "purge",
    example=r"""
meteor shared purge carts billing cart-7 --dry-run
meteor shared purge carts billing 'cart-\xff' --limit 1""".strip(),
    more=_KEY,
)
@options.shared_group_of_stream
@click.argument("key", type=KeyType())
@options.count("--limit", help="Purge only the N oldest. Default: all.")
@_hex
@options.confirmation("Show what would be purged, and exit.")
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
    """Settle the waiting records of an ordering key without processing them.

    Does not affect records that a consumer holds. Other groups still receive the records.
    """
    name = show_key(key)
    with _opened(session, stream, group) as opened:
        found = opened.keys(look_ahead=True)
        state = next((one for one in found if one.key == key), None)
        waiting = state.waiting if state else 0
        stay = ""
        if state and state.acquired:
            stay = f"; {counted(state.acquired, 'record', 'stays', 'stay')} with {state.owner}"
        if not waiting:
            say(f"no records of {name} are waiting in shared group {group!r}{stay}.")
            return
        count = min(limit or waiting, waiting)
        what = f"{counted(waiting, 'waiting record')} of {name}"
        if count < waiting:
            what = f"the oldest {count:,} of {what}"
        done = f"purged from shared group {group!r} of stream {stream!r}{stay}"
        if not confirm(what, done, dry_run=dry_run, yes=yes):
            return
        purged = opened.purge(key, count)  # no more than the user has confirmed
    say(f"{counted(purged, 'record')} of {name} {done}.")


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
    """Resume delivery of an ordering key that is parked or delayed.

    Resets the failure count of its first record.
    """
    with _opened(session, stream, group) as opened:
        was_stopped = opened.resume(key)
    state = "resumed" if was_stopped else "is neither parked nor delayed"
    say(f"{show_key(key)} {state} in shared group {group!r}.")


@command("fsck", example="meteor shared fsck carts billing")
@options.shared_group_of_stream
@options.json_lines
def fsck(session: Session, stream: str, group: str, as_json: bool) -> None:
    """Check a shared group's state for contradictions.

    The exit status is 1 if there are any. The command reads the state in portions, while consumers
    work.
    """
    with _opened(session, stream, group) as opened:
        flaws = opened.fsck()
    for flaw in flaws:
        if as_json:
            print_json({"stream": stream, "group": group, "flaw": flaw})
        else:
            click.echo(sanitize(flaw))
    count = counted(len(flaws), "contradiction") if flaws else "no contradictions"
    say(f"shared group {group!r} of stream {stream!r}: {count}.")
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
                f"Stream {stream!r} has no shared group {group!r}. `meteor shared ls {stream}` "
                "lists its shared groups."
            ) from None


def reasons(stream: str, found: SharedDescription, keys: Sequence[KeyState]) -> list[str]:
    """Return the reasons why a shared group does not deliver all records, most urgent first.

    The sentences contain untrusted names and are not sanitized.
    """
    from meteor_py.shared.config import WAITING_MAX

    if found.lag == 0:
        return ["All records are settled. The group is waiting for new ones."]
    why: list[str] = []
    if found.waiting >= WAITING_MAX:
        why.append(
            f"{found.waiting:,} records are waiting for their keys, which is the maximum. The "
            "group delivers no new records until some of these are settled, resumed or purged."
        )
    why += _stopped(stream, found, keys)
    lag = f"{counted(found.lag, 'record', 'is', 'are')} not settled"
    dead = [consumer.name for consumer in found.consumers if consumer.lease <= 0]
    has_live = len(dead) < len(found.consumers)
    if not has_live:
        why.append(f"There are no live consumers, and {lag}.")
    if dead:
        lost, their = f"{dead[0]} is dead", "its"
        if len(dead) > 1:
            lost, their = f"{len(dead):,} consumers are dead, such as {dead[0]}", "their"
        why.append(f"{lost}. Other consumers get {their} records when they poll.")
    if not has_live:
        return why
    why += _held_back(found, keys)
    if found.ready:
        why.append(
            f"{counted(found.ready, 'key', 'is', 'are')} ready for the next consumer that polls "
            "and has room for more records."
        )
    new = found.confirmed + found.lag - found.scanned
    if new > 0 and found.waiting < WAITING_MAX:
        why.append(
            f"{counted(new, 'record', 'is', 'are')} not scanned yet. Consumers scan new records "
            "when they poll."
        )
    busy = [consumer for consumer in found.consumers if consumer.records]
    if busy and not why:
        holders = f"{busy[0].name} has" if len(busy) == 1 else f"{len(busy):,} consumers have"
        lag = f"{holders} {counted(sum(one.records for one in busy), 'record')} to settle"
    return why or [f"Nothing is blocked: {lag}."]


def _stopped(stream: str, found: SharedDescription, keys: Sequence[KeyState]) -> list[str]:
    """Return sentences about parked and delayed keys and unpublished dead letters."""
    why: list[str] = []
    for state, then in (
        ("parked", f"Resume one with `meteor shared resume {stream} {found.name} KEY`."),
        ("delayed", "The group resumes delivery when the delay ends."),
    ):
        stopped = [key.count for key in keys if key.state == state]
        if stopped:
            records = counted(sum(stopped), "record")
            these = counted(len(stopped), "key", "is", "are")
            why.append(f"{these} {state}, with {records}. {then}")
    if pending := found.dead_letters_pending:
        why.append(
            f"{counted(pending, 'record', 'is', 'are')} waiting to be published to the "
            f"dead-letter stream {found.config.dead_letter!r}. A consumer that has permission to "
            "publish there must poll."
        )
    return why


def _held_back(found: SharedDescription, keys: Sequence[KeyState]) -> list[str]:
    """Return sentences about consumers that hold all keys, or keys with waiting records."""
    owned = [key for key in keys if key.state == "owned"]
    owners = {key.owner or "a consumer" for key in owned}
    why: list[str] = []
    if len(owners) == 1 and len(found.consumers) > 1 and len(owned) == len(keys) > 1:
        why.append(f"{owners.pop()} holds all {counted(len(owned), 'key')}.")
    waiting = Counter[str]()
    for key in owned:
        if key.waiting:
            waiting[key.owner or "a consumer"] += key.waiting
    for name, records in waiting.most_common(_NAMED):
        why.append(
            f"{counted(records, 'record', 'waits', 'wait')} until {name} settles earlier records "
            "of the same keys."
        )
    if len(waiting) > _NAMED:
        why.append(f"The same applies to {counted(len(waiting) - _NAMED, 'more consumer')}.")
    return why


for member in (list_shared, describe_shared, purge, resume, fsck):
    shared.add_command(member)
