"""Consistency check of a shared group's state.

Three kinds of keys hold the facts: ``held:<consumer>`` has the records that a consumer holds,
``waiting:<key>`` those that are waiting, and ``letters`` those that become dead letters. Everything
else is derived from them; the check recomputes it and compares. It reads all keys at one instant,
and reports values that it cannot read instead of raising.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple

from meteor_py.errors import MeteorError
from meteor_py.redis import keys
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.protocol import SharedProtocol

#: Index entries to read at a time: up to a megabyte each.
_ENTRIES = 8
#: Records with a wrong ordering key to list; the others are counted.
_NAMED = 10
#: Attempts to read all keys at one instant while consumers create and delete some.
_TRIES = 20

_TYPES = {
    **dict.fromkeys((b"state", b"groups", b"consumers", b"failures", b"letters"), b"hash"),
    **dict.fromkeys((b"ready", b"blocked", b"delayed", b"leases", b"dying"), b"zset"),
    b"suspects": b"set",
    b"bell": b"stream",
}
_FAMILIES = {b"held": b"hash", b"more": b"zset", b"waiting": b"list"}
_READ: dict[bytes, tuple[str, tuple[Any, ...]]] = {
    b"hash": ("HGETALL", ()),
    b"zset": ("ZRANGE", (0, -1, "WITHSCORES")),
    b"list": ("LRANGE", (0, -1)),
    b"set": ("SMEMBERS", ()),
    b"stream": ("XREVRANGE", ("+", "-", "COUNT", 1)),
}
_KEY_ENTRY = re.compile(rb"([^:]*)(?::(\d+):([^:]*):(\d*))?")
_CONSUMER = re.compile(rb"\d+:(|alone|reserved):(.*)", re.DOTALL)
_LETTER = re.compile(rb"\d+:(\d+):(.*)", re.DOTALL)


def find_flaws(protocol: SharedProtocol) -> list[str]:
    """Return one sentence for each contradiction and each unreadable value.

    Raises:
        MeteorError: The group changes too fast to be read at one instant.
        GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
    """
    found = Snapshot(protocol)
    config = _config(found)
    flaws = [*_check_state(found), *_check_offsets(found), *_check_keys(found, config)]
    flaws += [*_check_consumers(found), *_check_open(found)]
    flaws += _check_index(protocol, found, config)
    if not found.is_listed:
        flaws.append(f"The list of shared groups does not include {protocol.group!r}.")
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
        found.flaws.append(f"A setting is invalid: {error}")
    return None


def _check_state(found: Snapshot) -> Iterator[str]:
    found.number("max_waiting")
    start, scanned = found.number("start"), found.number("next")
    if not start <= scanned <= found.end:
        yield (
            f"The group started at {start} and scanned up to {scanned}, but the stream ends at "
            f"{found.end}."
        )
    if found.number("bell") != found.bell:
        yield (
            f"The state has bell number {found.number('bell')}, but the last entry of the bell is "
            f"{found.bell}."
        )


def _check_offsets(found: Snapshot) -> Iterator[str]:
    """Check that every scanned record is settled, or in exactly one place."""
    start, scanned = found.number("start"), found.number("next")
    held = [item for by_key in found.held.values() for item in by_key.items()]
    for what, lists in (("held", held), ("waiting", found.waiting.items())):
        for key, offsets in lists:
            if any(low >= high for low, high in pairwise(offsets)):
                yield f"The {what} records of key {key!r} are not in order."
    places = [*found.letters, *chain(*(offsets for _, offsets in held), *found.waiting.values())]
    if len(places) != len(set(places)):
        yield "A record is in two places."
    if places and not start <= min(places) <= max(places) < scanned:
        yield "A record is held or waiting, but was not scanned."
    waiting = sum(map(len, found.waiting.values()))
    if waiting != found.number("waiting"):
        yield f"The state counts {found.number('waiting')} waiting records, but {waiting} wait."
    counters = ("acked", "dead", "lost", "purged")
    settled = sum(found.number(name) for name in counters if name.encode() in found.state)
    if settled + len(places) != scanned - start:
        yield (
            f"The group scanned {scanned - start} records, but {settled} are settled and "
            f"{len(places)} are not."
        )


def _check_keys(found: Snapshot, config: SharedConfig | None) -> Iterator[str]:
    """Check that each ordering key is where its records are, and in the right set."""
    held_by: dict[bytes, bytes] = {}
    for consumer, by_key in found.held.items():
        for key in by_key:
            if key in held_by:
                yield f"Two consumers hold records of key {key!r}."
            held_by[key] = consumer
    ready: dict[bytes, float] = {}
    blocked: dict[bytes, float] = {}
    more: dict[bytes, dict[bytes, float]] = {}
    for key in {*found.entries, *found.waiting, *held_by}:
        entry, waiting = found.entries.get(key, KeyEntry()), found.waiting.get(key, [])
        if entry is None:
            continue  # already reported
        yield from _check_key(key, entry, held_by.get(key, b""), waiting)
        owned = len(found.held.get(entry.owner, {}).get(key, []))
        if waiting and entry.stopped:
            blocked[key] = waiting[0]
        elif waiting and not entry.owner:
            ready[key] = waiting[0]
        elif waiting and config is not None and owned < config.max_per_key:
            more.setdefault(entry.owner, {})[key] = waiting[0]
    for name, expected in ((b"ready", ready), (b"blocked", blocked)):
        if found.sets[name] != expected:
            yield f"The set {name.decode()} does not have exactly the keys that belong there."
    if config is not None and found.more != more:
        yield "The sets of keys of which consumers may claim more do not match the waiting records."
    stopped = {key: entry.stopped for key, entry in found.entries.items() if entry}
    ends = {*found.sets[b"delayed"]}
    if not {key for key, how in stopped.items() if how == b"d"} <= ends:
        yield "A delayed key has no time at which its delay ends."
    for key in sorted(ends - {key for key, how in stopped.items() if how}):
        yield f"Key {key!r} has a time at which its delay ends, but is not delayed."


def _check_key(key: bytes, entry: KeyEntry, holder: bytes, waiting: list[int]) -> Iterator[str]:
    if entry.owner != holder:
        yield f"Key {key!r} has owner {entry.owner!r}, but {holder!r} holds its records."
    if entry.waiting != len(waiting):
        yield f"Key {key!r} counts {entry.waiting} waiting records, but {len(waiting)} wait."
    head = waiting[0] if waiting else None
    if entry.head != head:
        yield f"Key {key!r} has {entry.head} as its first waiting record, but {head} is first."
    if entry.stopped not in (b"", b"d", b"p"):
        yield f"Key {key!r} has the unknown state {entry.stopped!r}."
    if not (entry.owner or entry.waiting or entry.stopped or waiting or holder):
        yield f"Key {key!r} has an entry but no records."


def _check_consumers(found: Snapshot) -> Iterator[str]:
    if {*found.sets[b"leases"]} != {*found.consumers}:
        yield "The consumers and the leases do not match."
    for consumer in sorted({*found.held, *found.consumers}):
        if consumer not in found.consumers:
            yield f"Consumer {consumer!r} holds records, but is not a member of the group."
        elif consumer not in found.held:
            yield f"Consumer {consumer!r} has no hash for the records it holds."
    for consumer, mark in found.consumers.items():
        by_key = found.held.get(consumer, {})
        reserved = [key for key, offsets in by_key.items() if not offsets]
        for key in reserved:
            if not found.waiting.get(key):
                yield f"Key {key!r} is reserved for a last try, but none of its records wait."
        if len(reserved) > 1 or (reserved and mark != b"reserved"):
            yield f"Consumer {consumer!r} reserves {len(reserved)} keys, but is marked {mark!r}."
        # A purge may have removed the reserved key; the consumer notices with its next step.
        if mark == b"reserved" and not reserved and b"purged" not in found.state:
            yield f"Consumer {consumer!r} is marked b'reserved', but reserves no key."
        if mark == b"alone" and sum(map(len, by_key.values())) > 1:
            yield f"Consumer {consumer!r} must hold the last try of a record alone, but does not."


def _check_open(found: Snapshot) -> Iterator[str]:
    """Check that nothing is stored about settled records."""
    held = (offsets for by_key in found.held.values() for offsets in by_key.values())
    opened = {*found.letters}.union(*held, *found.waiting.values())
    for name, offsets in (("suspects", found.suspects), ("failures", found.failures)):
        if not offsets <= opened:
            yield f"Settled record {min(offsets - opened)} is still in {name!r}."
    if found.dying != {*found.letters}:
        yield "The keys 'dying' and 'letters' do not have the same dead letters."


def _check_index(
    protocol: SharedProtocol, found: Snapshot, config: SharedConfig | None
) -> list[str]:
    """Check the ordering keys of unsettled records against the index, where it still has them."""
    held = (by_key.items() for by_key in found.held.values())
    lists = chain(found.waiting.items(), *held)
    places = [(offset, key) for key, offsets in lists for offset in offsets]
    places = sorted([*places, *found.letters.items()])
    flaws: list[str] = []
    at = wrong = 0
    while at < len(places):
        entries = protocol.stream.connector.call(
            *("XRANGE", keys.index(protocol.stream.name), f"{places[at][0]}-0", "+"),
            *("COUNT", _ENTRIES),
        )
        if not entries:
            break
        for name, strings in entries:
            last, size = map(int, name.split(b"-"))
            while at < len(places) and places[at][0] <= last:
                offset, key = places[at]
                at += 1
                place = offset - last + size - 1
                truth = _key_of(strings, place, offset, config) if place >= 0 else None
                if truth is not None and truth != key:
                    wrong += 1
                    flaws += [f"Record {offset} is filed under key {key!r}, not {truth!r}."]
                    del flaws[_NAMED:]
    if wrong > _NAMED:
        flaws.append(f"{wrong - _NAMED} more records are filed under wrong keys.")
    return flaws


def _key_of(
    strings: list[Any], place: int, offset: int, config: SharedConfig | None
) -> bytes | None:
    """Return the ordering key in an index entry (see ordering_index.py); None if unknown."""
    number = int.from_bytes(strings[0][2 * place : 2 * place + 2], "little")
    key: bytes = strings[number + 1] if number + 1 < len(strings) else b""
    if key:
        return key
    if config is None:
        return None
    return b"\0%d" % offset if config.keyless == "free" else config.default_key.encode()


# -- reading -----------------------------------------------------------------------------------


class KeyEntry(NamedTuple):
    """An ordering key's field of the hash ``groups``."""

    owner: bytes = b""
    waiting: int = 0
    #: b"d" if delayed, b"p" if parked, else empty.
    stopped: bytes = b""
    head: int | None = None


class Snapshot:
    """All keys of a shared group; ``flaws`` has one sentence for each unreadable value."""

    def __init__(self, protocol: SharedProtocol) -> None:
        self.flaws: list[str] = []
        self._parts = parts = self._read(protocol)
        self.state = _mapping(parts.get(b"state", []))
        found = None if self._misread else self.state.get(b"incarnation", b"")
        protocol.check_incarnations(self._incarnation, found)
        entries = _mapping(parts.get(b"groups", []))
        if entries.pop(b"", None) is None:
            self.flaws.append("The hash 'groups' lacks its padding field.")
        self.entries = {key: self._entry(key, value) for key, value in entries.items()}
        #: Each consumer's mark: b"alone", b"reserved" or empty.
        self.consumers = {
            consumer: self._mark(consumer, value)
            for consumer, value in _mapping(parts.get(b"consumers", [])).items()
        }
        #: The offsets that each consumer holds, by ordering key.
        self.held = {c: self._held(c, _mapping(value)) for c, value in self._family(b"held")}
        self.more = {consumer: _scores(value) for consumer, value in self._family(b"more")}
        self.waiting = {
            key: self._offsets(f"waiting records of key {key!r}", value)
            for key, value in self._family(b"waiting")
        }
        #: Ordering keys of unpublished dead letters, by offset.
        self.letters = self._letters(_mapping(parts.get(b"letters", [])))
        self.dying = {*self._offsets("set 'dying'", _mapping(parts.get(b"dying", [])))}
        self.suspects = {*self._offsets("set 'suspects'", parts.get(b"suspects", []))}
        failures = _mapping(parts.get(b"failures", []))
        self.failures = {*self._offsets("hash 'failures'", failures)}
        self._offsets("hash 'failures'", failures.values())
        named = (b"ready", b"blocked", b"delayed", b"leases")
        self.sets = {name: _scores(parts.get(name, [])) for name in named}
        bell = parts.get(b"bell")
        self.bell = int(bell[0][0].partition(b"-")[0]) if bell else 0

    def number(self, name: str) -> int:
        """Return a number of the state; if it is missing or invalid, report a flaw and return 0."""
        value = self.state.get(name.encode())
        if value is not None and value.isdigit():
            return int(value)
        flaw = f"The state has {'no' if value is None else 'an invalid'} number {name!r}" + (
            "." if value is None else f": {value!r}."
        )
        if flaw not in self.flaws:
            self.flaws.append(flaw)
        return 0

    # -- reading -------------------------------------------------------------------------------

    def _read(self, protocol: SharedProtocol) -> dict[bytes, Any]:
        call, names = protocol.stream.connector.pipeline, keys.shared_groups(protocol.stream.name)
        for _ in range(_TRIES):
            parts = sorted(seen := protocol.find() - {b"bell"})
            asked = [*parts, b"bell"]
            *types, of_names = call(
                [*(("TYPE", protocol.whole(part)) for part in asked), ("TYPE", names)]
            )
            flaws = [*map(_misfit, asked, types)]
            good = [part for part, flaw in zip(asked, flaws, strict=True) if flaw is None]
            commands: list[tuple[Any, ...]] = [("MULTI",)]
            commands += [("HMGET", protocol.meta, "incarnation", "next")]
            commands += (
                [("SISMEMBER", names, protocol.group)] if of_names in (b"set", b"none") else []
            )
            for part in good:
                command, options = _READ[_type(part)]
                commands.append((command, protocol.whole(part), *options))
            replies = call([*commands, ("EXEC",)])[-1]
            if protocol.find() - {b"bell"} == seen:
                break
        else:
            raise MeteorError(
                f"Shared group {protocol.group!r} changes too fast to be read at one instant. "
                "Check it when its consumers are idle."
            )
        self.flaws += [flaw for flaw in flaws if flaw is not None]
        self._misread = b"state" in seen and b"state" not in good
        self._incarnation, end = replies[0]
        #: The next offset of the stream.
        self.end = int(end or 0)
        self.is_listed = len(replies) > len(good) + 1 and bool(replies[1])
        return dict(zip(good, replies[len(replies) - len(good) :], strict=True))

    def _family(self, name: bytes) -> Iterable[tuple[bytes, Any]]:
        size = len(name) + 1
        found = self._parts.items()
        return [(part[size:], value) for part, value in found if part.startswith(name + b":")]

    # -- parsing -------------------------------------------------------------------------------

    def _entry(self, key: bytes, value: bytes) -> KeyEntry | None:
        match = _KEY_ENTRY.fullmatch(value)
        if match is None:
            self.flaws.append(f"The entry of key {key!r} cannot be read: {value!r}.")
            return None
        owner, waiting, stopped, head = match.groups()
        return KeyEntry(owner, int(waiting or 0), stopped or b"", int(head) if head else None)

    def _mark(self, consumer: bytes, value: bytes) -> bytes:
        match = _CONSUMER.fullmatch(value)
        if match is None:
            self.flaws.append(f"The entry of consumer {consumer!r} cannot be read: {value!r}.")
            return b""
        return match[1]

    def _held(self, consumer: bytes, held: dict[bytes, bytes]) -> dict[bytes, list[int]]:
        if held.pop(b"", None) is None:
            self.flaws.append(f"The hash 'held' of consumer {consumer!r} lacks its padding field.")
        return {
            key: self._offsets(f"held records of key {key!r}", listed.split(b",") if listed else [])
            for key, listed in held.items()
        }

    def _letters(self, letters: dict[bytes, bytes]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for offset, detail in letters.items():
            match = _LETTER.fullmatch(detail)
            if match is None or not offset.isdigit() or int(match[1]) > len(match[2]):
                self.flaws.append(f"The dead letter {offset!r} cannot be read: {detail[:80]!r}.")
            else:
                found[int(offset)] = match[2][: int(match[1])]
        return found

    def _offsets(self, what: str, listed: Iterable[bytes]) -> list[int]:
        listed = [*listed]
        good = [number for number in listed if number.isdigit()]
        if len(good) != len(listed):
            bad = next(number for number in listed if not number.isdigit())
            self.flaws.append(f"In the {what}, {bad[:80]!r} is not a number.")
        return [*map(int, good)]


def _type(part: bytes) -> bytes:
    family, colon, _ = part.partition(b":")
    return (_FAMILIES if colon else _TYPES).get(family, b"")


def _misfit(part: bytes, found: bytes) -> str | None:
    wanted = _type(part)
    if not wanted:
        return f"The key {part!r} is not part of a shared group."
    if found not in (wanted, b"none"):
        return f"The key {part!r} is a {found.decode()}, not a {wanted.decode()}."
    return None


def _mapping(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: list[bytes]) -> dict[bytes, float]:
    return {member: float(score) for member, score in _mapping(flat).items()}
