"""The books of a shared group at one instant, read so that nothing in them can stop a check."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from meteor_py.errors import MeteorError
from meteor_py.redis import keys, reply_errors
from meteor_py.shared.protocol import SharedProtocol

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
_GROUP = re.compile(rb"([^:]*)(?::(\d+):([^:]*):(\d*))?")
_CONSUMER = re.compile(rb"\d+:(|alone|reserved):(.*)", re.DOTALL)
_LETTER = re.compile(rb"\d+:(\d+):(.*)", re.DOTALL)


class Group(NamedTuple):
    """A group of records, as the hash ``groups`` has it."""

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

    def __init__(self, books: SharedProtocol) -> None:
        self.flaws: list[str] = []
        self._parts = parts = self._read(books)
        self.state = _mapping(parts.get(b"state", []))
        self._check_alive(books)
        groups = _mapping(parts.get(b"groups", []))
        if groups.pop(b"", None) is None:
            self.flaws.append("The hash groups has lost the field that makes it a table.")
        self.groups = {g: self._group(g, value) for g, value in groups.items()}
        #: Consumers, and whether each is "alone", or keeps a group ("reserved").
        self.consumers = {
            consumer: self._mark(consumer, value)
            for consumer, value in _mapping(parts.get(b"consumers", [])).items()
        }
        #: For each consumer its groups, and what it holds of each.
        self.held = {c: self._held(c, _mapping(value)) for c, value in self._family(b"held")}
        self.more = {consumer: _scores(value) for consumer, value in self._family(b"more")}
        self.waiting = {
            group: self._offsets(f"What waits of group {group!r}", value)
            for group, value in self._family(b"waiting")
        }
        #: Letters that are not published: offsets, and the group of each.
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

    def _read(self, books: SharedProtocol) -> dict[bytes, Any]:
        call, names = books.stream.connector.pipeline, keys.shared_groups(books.stream.name)
        for _ in range(_TRIES):
            parts = sorted(seen := books.find() - {b"bell"})
            asked = [*parts, b"bell"]
            *types, of_names = call(
                [*(("TYPE", books.whole(part)) for part in asked), ("TYPE", names)]
            )
            flaws = [*map(_misfit, asked, types)]
            good = [part for part, flaw in zip(asked, flaws, strict=True) if flaw is None]
            commands: list[tuple[Any, ...]] = [("MULTI",)]
            commands += [("HMGET", books.meta, "incarnation", "next")]
            commands += [("SISMEMBER", names, books.group)] if of_names in (b"set", b"none") else []
            commands += [_command(books, part) for part in good]
            answers = call([*commands, ("EXEC",)])[-1]
            if books.find() - {b"bell"} == seen:
                break
        else:
            raise MeteorError(
                f"Shared group {books.group!r} changes too fast to be read at one instant; check "
                "it when its consumers are idle."
            )
        self.flaws += [flaw for flaw in flaws if flaw is not None]
        self._misread = b"state" in seen and b"state" not in good
        self._incarnation, end = answers[0]
        #: The next offset of the stream.
        self.end = int(end or 0)
        self.is_listed = len(answers) > len(good) + 1 and bool(answers[1])
        return dict(zip(good, answers[len(answers) - len(good) :], strict=True))

    def _check_alive(self, books: SharedProtocol) -> None:
        stream = books.stream
        if (self._incarnation or b"").decode() != stream.incarnation:
            raise reply_errors.stream_gone(
                stream.name, b"INCARNATION" if self._incarnation else b"NOSTREAM"
            )
        found = self.state.get(b"incarnation", b"").decode(errors="replace")
        if not self._misread and books.incarnation not in (found, found.partition(".")[0]):
            raise reply_errors.group_not_found(stream.name, books.group)

    def _family(self, name: bytes) -> Iterable[tuple[bytes, Any]]:
        size = len(name) + 1
        found = self._parts.items()
        return [(part[size:], value) for part, value in found if part.startswith(name + b":")]

    # -- parsing -------------------------------------------------------------------------------

    def _group(self, group: bytes, value: bytes) -> Group | None:
        match = _GROUP.fullmatch(value)
        if match is None:
            self.flaws.append(f"Group {group!r} has an entry that cannot be read: {value!r}.")
            return None
        owner, waiting, stopped, head = match.groups()
        return Group(owner, int(waiting or 0), stopped or b"", int(head) if head else None)

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
            group: self._offsets(f"What is held of group {group!r}", _split(offsets))
            for group, offsets in held.items()
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


def _command(books: SharedProtocol, part: bytes) -> tuple[Any, ...]:
    command, options = _READ[_type(part)]
    return (command, books.whole(part), *options)


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
