"""A check of the books of a shared group: each fact is written once, the rest is derived from it.

What a consumer holds stands in ``held:<consumer>``, what waits in ``waiting:<group>``, what is to
be a dead letter in ``letters``. All else says where to find these, and must agree with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meteor_py.errors import MeteorError
from meteor_py.shared.books import Books

#: Tries to see all keys at one instant while consumers make and remove some.
_TRIES = 20

_HASHES = ("state", "groups", "consumers", "failures", "letters")
_SETS = ("ready", "blocked", "delayed", "leases", "dying")


def find_flaws(books: Books) -> list[str]:
    """A sentence for each contradiction.

    Raises:
        MeteorError: The group changes too fast to be read at one instant.
    """
    return list(_check(_Snapshot(books)))


class _Snapshot:
    """All keys of a shared group at one instant."""

    def __init__(self, books: Books) -> None:
        for _ in range(_TRIES):
            parts = sorted(names := books.find() - {b"bell"})
            commands: list[tuple[Any, ...]] = [("MULTI",)]
            commands += [_command(books.whole(part), part) for part in parts]
            answers = books.stream.client.pipeline([*commands, ("EXEC",)])[-1]
            found = dict(zip(parts, answers, strict=True))
            if books.find() - {b"bell"} == names:
                break
        else:
            raise MeteorError(
                f"Shared group {books.group!r} changes too fast to be read at one instant; check "
                "it when its consumers are idle."
            )
        self.state = _mapping(found.get(b"state", []))
        self.groups = _mapping(found.get(b"groups", []))
        self.groups.pop(b"", None)  # see shared_join.lua
        self.consumers = _mapping(found.get(b"consumers", []))
        self.letters = {int(offset) for offset in _mapping(found.get(b"letters", []))}
        self.suspects = {int(offset) for offset in found.get(b"suspects", [])}
        self.sets = {name: _scores(found.get(name.encode(), [])) for name in _SETS}
        self.held = {
            part[5:]: {g: _list(h) for g, h in _mapping(value).items() if g}
            for part, value in found.items()
            if part.startswith(b"held:")
        }
        self.more = {
            part[5:]: _scores(value) for part, value in found.items() if part.startswith(b"more:")
        }
        self.waiting = {
            part[8:]: [int(offset) for offset in value]
            for part, value in found.items()
            if part.startswith(b"waiting:")
        }


def _command(key: bytes, part: bytes) -> tuple[Any, ...]:
    if part.startswith(b"waiting:"):
        return ("LRANGE", key, 0, -1)
    if part == b"suspects":
        return ("SMEMBERS", key)
    if part.startswith(b"held:") or part.decode(errors="replace") in _HASHES:
        return ("HGETALL", key)
    return ("ZRANGE", key, 0, -1, "WITHSCORES")


def _check(books: _Snapshot) -> Iterator[str]:
    yield from _check_offsets(books)
    cap = int(books.state[b"group_cap"])
    held_by: dict[bytes, bytes] = {}
    for consumer, groups in books.held.items():
        if consumer not in books.consumers:
            yield f"Consumer {consumer.decode()} holds records, and is none."
        for group in groups:
            if group in held_by:
                yield f"Group {group!r} is with two consumers."
            held_by[group] = consumer
    ready: dict[bytes, int] = {}
    blocked: dict[bytes, int] = {}
    more: dict[bytes, dict[bytes, int]] = {}
    for group in {*books.groups, *books.waiting, *held_by}:
        owner, count, stopped, head = _parse(books.groups.get(group, b""))
        waiting = books.waiting.get(group, [])
        if owner != held_by.get(group, b""):
            yield f"Group {group!r} has owner {owner!r}, and is held by {held_by.get(group)!r}."
        if count != len(waiting):
            yield f"Group {group!r} counts {count} waiting records, and has {len(waiting)}."
        if head != (waiting[0] if waiting else None):
            yield f"Group {group!r} has the head {head}, and {waiting[:1]} waits first."
        if waiting and stopped:
            blocked[group] = waiting[0]
        elif waiting and not owner:
            ready[group] = waiting[0]
        elif waiting and len(books.held.get(owner, {}).get(group, [])) < cap:
            more.setdefault(owner, {})[group] = waiting[0]
    for name, expected in (("ready", ready), ("blocked", blocked)):
        if books.sets[name] != expected:
            yield f"The set {name} does not have the groups that it should."
    if books.more != more:
        yield "The sets of groups of which consumers may have more are not as they should be."
    if {*books.sets["leases"]} != {*books.consumers}:
        yield "The consumers are not those that have leases."
    delayed = {group for group, value in books.groups.items() if _parse(value)[2] == b"d"}
    if not delayed <= {*books.sets["delayed"]}:
        yield "A delayed group has no end of its delay."
    if not books.suspects <= _open(books):
        yield "A record is suspected that is settled."
    if {int(offset) for offset in books.sets["dying"]} != books.letters:
        yield "The letters are not those that are to be published."


def _open(books: _Snapshot) -> set[int]:
    """All records that are not settled."""
    held = (offsets for groups in books.held.values() for offsets in groups.values())
    return books.letters.union(*held, *books.waiting.values())


def _check_offsets(books: _Snapshot) -> Iterator[str]:
    """Every record that was looked at is held once, waits once, is dying, or settled."""
    start, looked = int(books.state[b"start"]), int(books.state[b"next"])
    places: list[int] = [*books.letters]
    for groups in books.held.values():
        for group, offsets in groups.items():
            places += offsets
            if offsets != sorted(offsets):
                yield f"What is held of group {group!r} is not in order."
    waiting = 0
    for group, offsets in books.waiting.items():
        places += offsets
        waiting += len(offsets)
        if offsets != sorted(offsets):
            yield f"What waits of group {group!r} is not in order."
    if len(places) != len(set(places)):
        yield "A record is in two places."
    if places and not start <= min(places) <= max(places) < looked:
        yield "A record is open that was not looked at."
    if waiting != int(books.state[b"waiting"]):
        yield f"{books.state[b'waiting'].decode()} records are said to wait, and {waiting} do."
    counters = (b"acked", b"dead", b"lost", b"purged")
    settled = sum(int(books.state.get(counter, 0)) for counter in counters)
    if settled + len(places) != looked - start:
        yield (
            f"Of {looked - start} records {settled} are settled and {len(places)} open, which does "
            "not add up."
        )


def _parse(value: bytes) -> tuple[bytes, int, bytes, int | None]:
    owner, waiting, stopped, head = (*value.split(b":"), b"", b"", b"")[:4]
    return owner, int(waiting or 0), stopped, int(head) if head else None


def _mapping(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: list[bytes]) -> dict[bytes, int]:
    return {member: int(float(score)) for member, score in _mapping(flat).items()}


def _list(held: bytes) -> list[int]:
    return [int(offset) for offset in held.split(b",")] if held else []
