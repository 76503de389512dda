"""A check of the state of a shared group: each fact is stored once, everything else is derived.

The records that a consumer holds are in ``held:<consumer>``, those that wait in ``waiting:<key>``,
and those that become dead letters in ``letters``. Everything else says where to find these; the
check recomputes it and compares. It reads all keys at one instant, and nothing in them can stop it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Any, NamedTuple

from meteor_py.errors import MeteorError
from meteor_py.redis import keys, reply_errors
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.protocol import SharedProtocol

#: Entries of the index that are read at a time: up to a megabyte each.
_ENTRIES = 8
#: Records with the wrong ordering key that are named.
_NAMED = 10
#: Tries to see all keys at one instant while consumers make and remove some.
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
    """Return a sentence for each contradiction, and for everything that cannot be read.

    Raises:
        MeteorError: The group changes too fast to be read at one instant.
        GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
    """
    found = Snapshot(protocol)
    config = _config(found)
    flaws = [*_check_state(found), *_check_offsets(found), *_check_keys(found, config)]
    flaws += [*_check_consumers(found), *_check_open(found)]
    flaws += _check_index(protocol, found, config)
    if not found.is_listed:
        flaws.append(f"{protocol.group!r} is not among the names of the shared groups.")
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
    held = [item for by_key in found.held.values() for item in by_key.items()]
    for what, lists in (("is held", held), ("waits", found.waiting.items())):
        for key, offsets in lists:
            if any(low >= high for low, high in pairwise(offsets)):
                yield f"What {what} of key {key!r} is not in order."
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


def _check_keys(found: Snapshot, config: SharedConfig | None) -> Iterator[str]:
    """Each ordering key is where its records are, and in the set in which it is looked for."""
    held_by: dict[bytes, bytes] = {}
    for consumer, by_key in found.held.items():
        for key in by_key:
            if key in held_by:
                yield f"Key {key!r} is with two consumers."
            held_by[key] = consumer
    ready: dict[bytes, float] = {}
    blocked: dict[bytes, float] = {}
    more: dict[bytes, dict[bytes, float]] = {}
    for key in {*found.entries, *found.waiting, *held_by}:
        entry, waiting = found.entries.get(key, KeyEntry()), found.waiting.get(key, [])
        if entry is None:
            continue  # said before
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
            yield f"The set {name.decode()} does not have the keys that it should."
    if config is not None and found.more != more:
        yield "The sets of keys of which consumers may have more are not as they should be."
    stopped = {key: entry.stopped for key, entry in found.entries.items() if entry}
    ends = {*found.sets[b"delayed"]}
    if not {key for key, how in stopped.items() if how == b"d"} <= ends:
        yield "A delayed key has no end of its delay."
    for key in sorted(ends - {key for key, how in stopped.items() if how}):
        yield f"Key {key!r} has the end of a delay, and is not delayed."


def _check_key(key: bytes, entry: KeyEntry, holder: bytes, waiting: list[int]) -> Iterator[str]:
    if entry.owner != holder:
        yield f"Key {key!r} has owner {entry.owner!r}, and is held by {holder!r}."
    if entry.waiting != len(waiting):
        yield f"Key {key!r} counts {entry.waiting} waiting records, and has {len(waiting)}."
    if entry.head != (waiting[0] if waiting else None):
        yield f"Key {key!r} has the head {entry.head}, and {waiting[:1]} waits first."
    if entry.stopped not in (b"", b"d", b"p"):
        yield f"Key {key!r} is in a state that there is not: {entry.stopped!r}."
    if not (entry.owner or entry.waiting or entry.stopped or waiting or holder):
        yield f"Key {key!r} has an entry, and no record."


def _check_consumers(found: Snapshot) -> Iterator[str]:
    if {*found.sets[b"leases"]} != {*found.consumers}:
        yield "The consumers are not those that have leases."
    for consumer in sorted({*found.held, *found.consumers}):
        if consumer not in found.consumers:
            yield f"Consumer {consumer!r} holds records, and is none."
        elif consumer not in found.held:
            yield f"Consumer {consumer!r} has no place for what it holds."
    for consumer, mark in found.consumers.items():
        by_key = found.held.get(consumer, {})
        kept = [key for key, offsets in by_key.items() if not offsets]
        for key in kept:
            if not found.waiting.get(key):
                yield f"Key {key!r} is kept for a last try, and nothing of it waits."
        if len(kept) > 1 or (kept and mark != b"reserved"):
            yield f"Consumer {consumer!r} keeps {len(kept)} keys, and is {mark!r}."
        # What is kept may be purged, and its consumer finds that out later.
        if mark == b"reserved" and not kept and b"purged" not in found.state:
            yield f"Consumer {consumer!r} is to keep a key for a last try, and keeps none."
        if mark == b"alone" and sum(map(len, by_key.values())) > 1:
            yield f"Consumer {consumer!r} has a last try, and not alone."


def _check_open(found: Snapshot) -> Iterator[str]:
    """What is known of a record goes when that is settled."""
    held = (offsets for by_key in found.held.values() for offsets in by_key.values())
    opened = {*found.letters}.union(*held, *found.waiting.values())
    for what, offsets in (("suspected", found.suspects), ("said to have failed", found.failures)):
        if not offsets <= opened:
            yield f"A record is {what} that is settled: {min(offsets - opened)}."
    if found.dying != {*found.letters}:
        yield "The letters are not those that are to be published."


def _check_index(
    protocol: SharedProtocol, found: Snapshot, config: SharedConfig | None
) -> list[str]:
    """Open records have the ordering keys that the index says, as far as it still has them.

    It is read in parts, and only where records are open.
    """
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
                    flaws += [f"Record {offset} is with key {key!r}, and of {truth!r}."]
                    del flaws[_NAMED:]
    if wrong > _NAMED:
        flaws.append(f"{wrong - _NAMED} more records are with keys that are not theirs.")
    return flaws


def _key_of(
    strings: list[Any], place: int, offset: int, config: SharedConfig | None
) -> bytes | None:
    """Return the ordering key that an index entry (ordering_index.py) has; None if unknown."""
    number = int.from_bytes(strings[0][2 * place : 2 * place + 2], "little")
    key: bytes = strings[number + 1] if number + 1 < len(strings) else b""
    if key:
        return key
    if config is None:
        return None
    return b"\0%d" % offset if config.keyless == "free" else config.default_key.encode()


# -- reading -----------------------------------------------------------------------------------


class KeyEntry(NamedTuple):
    """An ordering key, as the hash ``groups`` has it."""

    owner: bytes = b""
    waiting: int = 0
    #: Empty, "d" delayed, "p" parked.
    stopped: bytes = b""
    head: int | None = None


class Snapshot:
    """All keys of a shared group; a sentence in ``flaws`` for each thing that cannot be read.

    Raises:
        MeteorError: The group changes too fast.
        GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
    """

    def __init__(self, protocol: SharedProtocol) -> None:
        self.flaws: list[str] = []
        self._parts = parts = self._read(protocol)
        self.state = _mapping(parts.get(b"state", []))
        self._check_alive(protocol)
        entries = _mapping(parts.get(b"groups", []))
        if entries.pop(b"", None) is None:
            self.flaws.append("The hash groups has lost the field that makes it a table.")
        self.entries = {key: self._entry(key, value) for key, value in entries.items()}
        #: Consumers, and whether each is "alone", or keeps a key ("reserved").
        self.consumers = {
            consumer: self._mark(consumer, value)
            for consumer, value in _mapping(parts.get(b"consumers", [])).items()
        }
        #: For each consumer its keys, and what it holds of each.
        self.held = {c: self._held(c, _mapping(value)) for c, value in self._family(b"held")}
        self.more = {consumer: _scores(value) for consumer, value in self._family(b"more")}
        self.waiting = {
            key: self._offsets(f"What waits of key {key!r}", value)
            for key, value in self._family(b"waiting")
        }
        #: Letters that are not published: offsets, and the key of each.
        self.letters = self._letters(_mapping(parts.get(b"letters", [])))
        self.dying = {*self._offsets("The set dying", _mapping(parts.get(b"dying", [])))}
        self.suspects = {*self._offsets("The set suspects", parts.get(b"suspects", []))}
        failures = _mapping(parts.get(b"failures", []))
        self.failures = {*self._offsets("The hash failures", failures)}
        self._offsets("The hash failures", failures.values())
        named = (b"ready", b"blocked", b"delayed", b"leases")
        self.sets = {name: _scores(parts.get(name, [])) for name in named}
        self.rung = self._ringing(parts.get(b"bell", []))

    def number(self, name: str) -> int:
        """A number of the state; one that is not there is a flaw, and 0."""
        value = self.state.get(name.encode())
        if value is not None and value.isdigit():
            return int(value)
        flaw = f"The state has no number {name!r}" + ("." if value is None else f", but {value!r}.")
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
            commands += [_command(protocol, part) for part in good]
            replies = call([*commands, ("EXEC",)])[-1]
            if protocol.find() - {b"bell"} == seen:
                break
        else:
            raise MeteorError(
                f"Shared group {protocol.group!r} changes too fast to be read at one instant; "
                "check it when its consumers are idle."
            )
        self.flaws += [flaw for flaw in flaws if flaw is not None]
        self._misread = b"state" in seen and b"state" not in good
        self._incarnation, end = replies[0]
        #: The next offset of the stream.
        self.end = int(end or 0)
        self.is_listed = len(replies) > len(good) + 1 and bool(replies[1])
        return dict(zip(good, replies[len(replies) - len(good) :], strict=True))

    def _check_alive(self, protocol: SharedProtocol) -> None:
        stream = protocol.stream
        if (self._incarnation or b"").decode() != stream.incarnation:
            raise reply_errors.stream_gone(
                stream.name, b"INCARNATION" if self._incarnation else b"NOSTREAM"
            )
        found = self.state.get(b"incarnation", b"").decode(errors="replace")
        if not self._misread and protocol.incarnation not in (found, found.partition(".")[0]):
            raise reply_errors.group_not_found(stream.name, protocol.group)

    def _family(self, name: bytes) -> Iterable[tuple[bytes, Any]]:
        size = len(name) + 1
        found = self._parts.items()
        return [(part[size:], value) for part, value in found if part.startswith(name + b":")]

    # -- parsing -------------------------------------------------------------------------------

    def _entry(self, key: bytes, value: bytes) -> KeyEntry | None:
        match = _KEY_ENTRY.fullmatch(value)
        if match is None:
            self.flaws.append(f"Key {key!r} has an entry that cannot be read: {value!r}.")
            return None
        owner, waiting, stopped, head = match.groups()
        return KeyEntry(owner, int(waiting or 0), stopped or b"", int(head) if head else None)

    def _mark(self, consumer: bytes, value: bytes) -> bytes:
        match = _CONSUMER.fullmatch(value)
        if match is None:
            self.flaws.append(f"Consumer {consumer!r} has an entry that cannot be read: {value!r}.")
            return b""
        return match[1]

    def _held(self, consumer: bytes, held: dict[bytes, bytes]) -> dict[bytes, list[int]]:
        if held.pop(b"", None) is None:
            self.flaws.append(
                f"What consumer {consumer!r} holds has lost the field that makes it a table."
            )
        return {
            key: self._offsets(f"What is held of key {key!r}", _split(offsets))
            for key, offsets in held.items()
        }

    def _letters(self, letters: dict[bytes, bytes]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for offset, detail in letters.items():
            match = _LETTER.fullmatch(detail)
            if match is None or not offset.isdigit() or int(match[1]) > len(match[2]):
                self.flaws.append(f"The letter {offset!r} cannot be read: {detail[:80]!r}.")
            else:
                found[int(offset)] = match[2][: int(match[1])]
        return found

    def _offsets(self, what: str, listed: Iterable[bytes]) -> list[int]:
        listed = [*listed]
        good = [number for number in listed if number.isdigit()]
        if len(good) != len(listed):
            bad = next(number for number in listed if not number.isdigit())
            self.flaws.append(f"{what} has something that is no number: {bad[:80]!r}.")
        return [*map(int, good)]

    def _ringing(self, entries: list[Any]) -> int:
        """The number of the last ringing; 0 if there was none."""
        return int(entries[0][0].partition(b"-")[0]) if entries else 0


def _command(protocol: SharedProtocol, part: bytes) -> tuple[Any, ...]:
    command, options = _READ[_type(part)]
    return (command, protocol.whole(part), *options)


def _type(part: bytes) -> bytes:
    family, colon, _ = part.partition(b":")
    return (_FAMILIES if colon else _TYPES).get(family, b"")


def _misfit(part: bytes, found: bytes) -> str | None:
    wanted = _type(part)
    if not wanted:
        return f"There is a key {part!r}, which no shared group has."
    if found not in (wanted, b"none"):
        return f"The key {part!r} is a {found.decode()}, and not a {wanted.decode()}."
    return None


def _split(listed: bytes) -> list[bytes]:
    return listed.split(b",") if listed else []


def _mapping(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _scores(flat: list[bytes]) -> dict[bytes, float]:
    return {member: float(score) for member, score in _mapping(flat).items()}
