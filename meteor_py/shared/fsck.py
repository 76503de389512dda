"""A check of the books of a shared group: each fact is written once, the rest is derived from it.

What a consumer holds stands in ``held:<consumer>``, what waits in ``waiting:<group>``, what is to
be a dead letter in ``letters``. All else says where to find these, and must agree with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from meteor_py.redis import keys
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.protocol import SharedProtocol
from meteor_py.shared.snapshot import Group, Snapshot

#: Entries of the index that are read at a time: up to a megabyte each.
_ENTRIES = 8
#: Records that are named for being in the wrong group.
_NAMED = 10


def find_flaws(books: SharedProtocol) -> list[str]:
    """A sentence for each contradiction, and for whatever cannot be read.

    Raises:
        MeteorError: The group changes too fast to be read at one instant.
        GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
    """
    found = Snapshot(books)
    config = _config(found)
    flaws = [*_check_state(found), *_check_offsets(found), *_check_groups(found, config)]
    flaws += [*_check_consumers(found), *_check_open(found)]
    flaws += _check_index(books, found, config)
    if not found.is_listed:
        flaws.append(f"{books.group!r} is not among the names of the shared groups.")
    return found.flaws + flaws


def _config(found: Snapshot) -> SharedConfig | None:
    fields = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in found.state.items()
    }
    try:
        return SharedConfig.from_fields(fields)
    except KeyError as error:
        found.flaws.append(f"The setting {error} is missing.")
    except (TypeError, ValueError) as error:
        found.flaws.append(f"A setting cannot be: {error}")
    return None


def _check_state(found: Snapshot) -> Iterator[str]:
    found.number("max_waiting")
    start, looked = found.number("start"), found.number("next")
    if not start <= looked <= found.end:
        yield (
            f"It began at {start} and looked at all below {looked}, which does not fit a stream "
            f"that ends at {found.end}."
        )
    if found.number("bell") != found.rung:
        yield f"The bell is at {found.number('bell')}, and its last ringing was {found.rung}."


def _check_offsets(found: Snapshot) -> Iterator[str]:
    """Every record that was looked at is held once, waits once, is dying, or settled."""
    start, looked = found.number("start"), found.number("next")
    held = [item for groups in found.held.values() for item in groups.items()]
    for what, lists in (("is held", held), ("waits", found.waiting.items())):
        for group, offsets in lists:
            if any(low >= high for low, high in pairwise(offsets)):
                yield f"What {what} of group {group!r} is not in order."
    places = [*found.letters, *chain(*(offsets for _, offsets in held), *found.waiting.values())]
    if len(places) != len(set(places)):
        yield "A record is in two places."
    if places and not start <= min(places) <= max(places) < looked:
        yield "A record is open that was not looked at."
    waiting = sum(map(len, found.waiting.values()))
    if waiting != found.number("waiting"):
        yield f"{found.number('waiting')} records are said to wait, and {waiting} do."
    counters = ("acked", "dead", "lost", "purged")
    settled = sum(found.number(name) for name in counters if name.encode() in found.state)
    if settled + len(places) != looked - start:
        yield (
            f"Of {looked - start} records {settled} are settled and {len(places)} open, which does "
            "not add up."
        )


def _check_groups(found: Snapshot, config: SharedConfig | None) -> Iterator[str]:
    """Each group is where its records are, and in the set in which it is looked for."""
    held_by: dict[bytes, bytes] = {}
    for consumer, groups in found.held.items():
        for group in groups:
            if group in held_by:
                yield f"Group {group!r} is with two consumers."
            held_by[group] = consumer
    ready: dict[bytes, float] = {}
    blocked: dict[bytes, float] = {}
    more: dict[bytes, dict[bytes, float]] = {}
    for group in {*found.groups, *found.waiting, *held_by}:
        entry, waiting = found.groups.get(group, Group()), found.waiting.get(group, [])
        if entry is None:
            continue  # said before
        yield from _check_group(group, entry, held_by.get(group, b""), waiting)
        owned = len(found.held.get(entry.owner, {}).get(group, []))
        if waiting and entry.stopped:
            blocked[group] = waiting[0]
        elif waiting and not entry.owner:
            ready[group] = waiting[0]
        elif waiting and config is not None and owned < config.group_cap:
            more.setdefault(entry.owner, {})[group] = waiting[0]
    for name, expected in ((b"ready", ready), (b"blocked", blocked)):
        if found.sets[name] != expected:
            yield f"The set {name.decode()} does not have the groups that it should."
    if config is not None and found.more != more:
        yield "The sets of groups of which consumers may have more are not as they should be."
    stopped = {group: entry.stopped for group, entry in found.groups.items() if entry}
    ends = {*found.sets[b"delayed"]}
    if not {group for group, how in stopped.items() if how == b"d"} <= ends:
        yield "A delayed group has no end of its delay."
    for group in sorted(ends - {group for group, how in stopped.items() if how}):
        yield f"Group {group!r} has the end of a delay, and is not delayed."


def _check_group(group: bytes, entry: Group, holder: bytes, waiting: list[int]) -> Iterator[str]:
    if entry.owner != holder:
        yield f"Group {group!r} has owner {entry.owner!r}, and is held by {holder!r}."
    if entry.waiting != len(waiting):
        yield f"Group {group!r} counts {entry.waiting} waiting records, and has {len(waiting)}."
    if entry.head != (waiting[0] if waiting else None):
        yield f"Group {group!r} has the head {entry.head}, and {waiting[:1]} waits first."
    if entry.stopped not in (b"", b"d", b"p"):
        yield f"Group {group!r} is in a state that there is not: {entry.stopped!r}."
    if not (entry.owner or entry.waiting or entry.stopped or waiting or holder):
        yield f"Group {group!r} has an entry, and no record."


def _check_consumers(found: Snapshot) -> Iterator[str]:
    if {*found.sets[b"leases"]} != {*found.consumers}:
        yield "The consumers are not those that have leases."
    for consumer in sorted({*found.held, *found.consumers}):
        if consumer not in found.consumers:
            yield f"Consumer {consumer!r} holds records, and is none."
        elif consumer not in found.held:
            yield f"Consumer {consumer!r} has no place for what it holds."
    for consumer, mark in found.consumers.items():
        groups = found.held.get(consumer, {})
        kept = [group for group, offsets in groups.items() if not offsets]
        for group in kept:
            if not found.waiting.get(group):
                yield f"Group {group!r} is kept for a last try, and nothing of it waits."
        if len(kept) > 1 or (kept and mark != b"reserved"):
            yield f"Consumer {consumer!r} keeps {len(kept)} groups, and is {mark!r}."
        # What is kept may be purged, and its consumer finds that out later.
        if mark == b"reserved" and not kept and b"purged" not in found.state:
            yield f"Consumer {consumer!r} is to keep a group for a last try, and keeps none."
        if mark == b"alone" and sum(map(len, groups.values())) > 1:
            yield f"Consumer {consumer!r} has a last try, and not alone."


def _check_open(found: Snapshot) -> Iterator[str]:
    """What is known of a record goes when that is settled."""
    held = (offsets for groups in found.held.values() for offsets in groups.values())
    opened = {*found.letters}.union(*held, *found.waiting.values())
    for what, offsets in (("suspected", found.suspects), ("said to have failed", found.failures)):
        if not offsets <= opened:
            yield f"A record is {what} that is settled: {min(offsets - opened)}."
    if found.dying != {*found.letters}:
        yield "The letters are not those that are to be published."


def _check_index(books: SharedProtocol, found: Snapshot, config: SharedConfig | None) -> list[str]:
    """Open records are in their groups, as far as the index still has them.

    It is read in parts, and only where records are open.
    """
    held = (groups.items() for groups in found.held.values())
    lists = chain(found.waiting.items(), *held)
    places = [(offset, group) for group, offsets in lists for offset in offsets]
    places = sorted([*places, *found.letters.items()])
    flaws: list[str] = []
    at = wrong = 0
    while at < len(places):
        entries = books.stream.connector.call(
            *("XRANGE", keys.index(books.stream.name), f"{places[at][0]}-0", "+"),
            *("COUNT", _ENTRIES),
        )
        if not entries:
            break
        for name, strings in entries:
            last, size = map(int, name.split(b"-"))
            while at < len(places) and places[at][0] <= last:
                offset, group = places[at]
                at += 1
                place = offset - last + size - 1
                truth = _group_of(strings, place, offset, config) if place >= 0 else None
                if truth is not None and truth != group:
                    wrong += 1
                    flaws += [f"Record {offset} is with group {group!r}, and of {truth!r}."]
                    del flaws[_NAMED:]
    if wrong > _NAMED:
        flaws.append(f"{wrong - _NAMED} more records are with groups that they do not belong to.")
    return flaws


def _group_of(
    strings: list[Any], place: int, offset: int, config: SharedConfig | None
) -> bytes | None:
    """The group of a record in an entry of ordering_index.py; None if nobody can tell."""
    number = int.from_bytes(strings[0][2 * place : 2 * place + 2], "little")
    group: bytes = strings[number + 1] if number + 1 < len(strings) else b""
    if group:
        return group
    if config is None:
        return None
    return b"\0%d" % offset if config.ungrouped == "free" else config.default_group.encode()
