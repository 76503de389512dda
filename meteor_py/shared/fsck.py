"""Consistency check of a shared group's state, in portions.

Consumers change the state while it is read. Each portion is therefore read at one instant, and
checked for what must be true at every instant: an ordering key with its waiting records and its
places in the sets, or a consumer with its batches. What only the whole state can tell, such as
whether the counters add up, is checked if nothing has changed between the first portion and the
last. Values that cannot be read are reported, not raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any, NamedTuple

from meteor_py.records.ordering_index import read_entry
from meteor_py.redis import keys
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.group_state import (
    BEHIND,
    DELAYED,
    NOBODY,
    PARKED,
    KeyEntry,
    Member,
    Progress,
    read_batch,
    read_line,
)
from meteor_py.shared.protocol import SharedProtocol

#: Ordering keys to check at one instant, and the most chunks of one key.
_KEYS = 50
_CHUNKS = 2_000
#: Index entries to read at a time.
_ENTRIES = 64
#: Records with a wrong ordering key to list; the others are counted.
_NAMED = 10
#: Times to read a consumer again that takes steps meanwhile.
_TRIES = 5

_TYPES = {
    **dict.fromkeys((b"meta", b"members", b"keys", b"waiting", b"failures", b"letters"), b"hash"),
    **dict.fromkeys(
        (b"ready", b"blocked", b"delayed", b"leases", b"idle", b"unsettled", b"dying", b"purges"),
        b"zset",
    ),
    b"state": b"string",
}
_FAMILIES = {b"batches": b"hash", b"more": b"list", b"wake": b"stream"}
_SETS = ("ready", "blocked", "delayed")


def find_flaws(protocol: SharedProtocol) -> list[str]:
    """Return one sentence for each contradiction and each unreadable value.

    Raises:
        GroupNotFound, StreamNotFound, LogTruncated: The group or the stream was deleted.
    """
    return _Check(protocol).run()


class _Place(NamedTuple):
    """Where an unsettled record is."""

    offset: int
    key: bytes


class _Check:
    """One run of the check."""

    def __init__(self, protocol: SharedProtocol) -> None:
        self._protocol = protocol
        self._connector = protocol.stream.connector
        self._flaws: dict[str, None] = {}
        self._config: SharedConfig | None = None
        self._waiting: list[_Place] = []
        self._held: list[_Place] = []
        self._letters: list[_Place] = []
        self._marks: dict[bytes, int] = {}  # what `unsettled` must have

    def run(self) -> list[str]:
        protocol = self._protocol
        protocol.require()
        if not self._check_types():
            return list(self._flaws)
        before = self._read_meta()
        if before is None:
            return list(self._flaws)
        members = self._check_members()
        self._check_keys(members)
        self._check_letters()
        whole = self._whole_flaws(before)
        if self._connector.call("HGET", protocol.key("meta"), "progress") == before[0]:
            self._flaws |= dict.fromkeys(whole)
        self._check_index()
        listed = ("SISMEMBER", keys.shared_groups(protocol.stream.name), protocol.group)
        if not self._connector.call(*listed):
            self._add(f"The list of shared groups does not include {protocol.group!r}.")
        return list(self._flaws)

    def _add(self, flaw: str) -> None:
        self._flaws[flaw] = None

    def _at_once(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Run commands at one instant."""
        found: list[Any] = self._connector.pipeline([("MULTI",), *commands, ("EXEC",)])[-1]
        return found

    # -- parts of the state --------------------------------------------------------------------

    def _check_types(self) -> bool:
        """Check the types of all keys; return whether the rest can be read."""
        parts = sorted(self._protocol.find())
        types = self._connector.pipeline([("TYPE", self._protocol.whole(p)) for p in parts])
        good = True
        for part, found in zip(parts, types, strict=True):
            family, colon, _ = part.partition(b":")
            wanted = (_FAMILIES if colon else _TYPES).get(family)
            if wanted is None:
                self._add(f"The key {part!r} is not part of a shared group.")
            elif found not in (wanted, b"none"):
                self._add(f"The key {part!r} is a {found.decode()}, not a {wanted.decode()}.")
                good = False
        return good

    def _read_meta(self) -> tuple[bytes, Progress, int] | None:
        """Return the progress, raw and read, and the first offset of the group."""
        protocol = self._protocol
        (end,), flat = self._at_once(
            [("HMGET", protocol.meta, "next"), ("HGETALL", protocol.key("meta"))]
        )
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        raw = fields.pop(b"progress", b"")
        state = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in fields.items()}
        try:
            self._config = SharedConfig.from_fields(state)
        except KeyError as error:
            self._add(f"The setting {error} is missing.")
        except (TypeError, ValueError) as error:
            self._add(f"A setting is invalid: {error}")
        for name in ("start", "max_waiting"):
            if not state.get(name, "").isdigit():
                self._add(f"The meta has no number {name!r}.")
        try:
            progress = Progress.parse(raw)
        except ValueError as error:
            self._add(f"The progress cannot be read: {error}")
            return None
        start = int(state["start"]) if state.get("start", "").isdigit() else 0
        if not start <= progress.next <= int(end or 0):
            self._add(
                f"The group started at {start} and scanned up to {progress.next}, but the stream "
                f"ends at {int(end or 0)}."
            )
        return raw, progress, start

    def _check_members(self) -> dict[bytes, Counter[bytes] | None]:
        """Check consumers; return how many records of each key they hold, None if they change."""
        protocol, found = self._protocol, dict[bytes, Counter[bytes] | None]()
        members, leases = self._at_once(
            [("HKEYS", protocol.key("members")), ("ZRANGE", protocol.key("leases"), 0, -1)]
        )
        if {*members} != {*leases}:
            self._add("The members and the leases do not match.")
        for part in self._protocol.find():
            family, _, id = part.partition(b":")
            if family == b"batches" and id not in members:
                exists = ("HEXISTS", protocol.key("members"), id)
                if self._at_once([exists, ("EXISTS", protocol.whole(part))]) == [0, 1]:
                    self._add(f"Consumer {id!r} holds records, but is not a member of the group.")
        for id in members:
            found[id] = self._check_member(id)
        return found

    def _check_member(self, id: bytes) -> Counter[bytes] | None:
        protocol = self._protocol
        batches = protocol.whole(b"batches:" + id)
        raw, flat = self._at_once([("HGET", protocol.key("members"), id), ("HGETALL", batches)])
        if raw is None:
            return None
        try:
            member = Member.parse(raw)
        except ValueError as error:
            self._add(f"The entry of consumer {id!r} cannot be read: {error}")
            return None
        held: Counter[bytes] = Counter()
        for number, batch in zip(flat[::2], flat[1::2], strict=True):
            try:
                records = read_batch(batch)
            except ValueError as error:
                self._add(f"Batch {number!r} of consumer {id!r} cannot be read: {error}")
                continue
            held.update(key for _, key in records if key)
            self._held += [_Place(offset, key) for offset, key in records]
            self._marks[id + b":" + number] = min(offset for offset, _ in records)
        size = sum(batch[0] for batch in flat[1::2] if batch)
        if not member.dead and member.holding != size:
            self._add(f"Consumer {id!r} counts {member.holding} held records, but has {size}.")
        if member.alone and size > 1:
            self._add(f"Consumer {id!r} must hold the last try of a record alone, but does not.")
        return None if member.dead else held

    def _check_keys(self, members: dict[bytes, Counter[bytes] | None]) -> None:
        protocol = self._protocol
        seen: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, flat = self._connector.call(
                "HSCAN", protocol.key("keys"), cursor, "COUNT", _KEYS
            )
            names = [name for name in flat[::2] if name not in seen]  # HSCAN may repeat one
            seen.update(names)
            for part in _batched(names, _KEYS):
                self._check_some_keys(part)
            if cursor == b"0":
                break
        if b"" not in seen:
            self._add("The hash 'keys' lacks its padding field.")
        for id, held in members.items():
            if held is not None:
                self._check_held(id, held)
        for name in ("ready", "blocked"):
            self._check_strays(name, seen)

    def _check_some_keys(self, names: Iterable[bytes]) -> None:
        names = [name for name in names if name]
        protocol = self._protocol
        entries = self._connector.call("HMGET", protocol.key("keys"), *names) if names else []
        commands: list[tuple[Any, ...]] = []
        for name, raw in zip(names, entries, strict=True):
            fields = _chunk_fields(name, raw)
            commands.append(("HGET", protocol.key("keys"), name))
            commands.append(("HMGET", protocol.key("waiting"), *(fields or [b""])))
            commands += [("ZSCORE", protocol.key(part), name) for part in _SETS]
        replies = self._at_once(commands) if commands else []
        for number, name in enumerate(names):
            raw, chunks, *scores = replies[5 * number : 5 * number + 5]
            if raw is not None and _chunk_fields(name, raw) == _chunk_fields(name, entries[number]):
                self._check_key(name, raw, chunks, scores)

    def _check_key(
        self, key: bytes, raw: bytes, chunks: list[bytes | None], scores: list[bytes | None]
    ) -> None:
        try:
            entry = KeyEntry.parse(raw)
            lines = [read_line(line) for line in chunks if line is not None]
        except ValueError as error:
            self._add(f"The entry of key {key!r} cannot be read: {error}")
            return
        if entry.far and (None in chunks or sum(map(len, lines)) != entry.far):
            self._add(f"Key {key!r} counts {entry.far} further waiting records, but others wait.")
        waiting = [*entry.waiting, *(offset for line in lines for offset in line)]
        if any(low >= high for low, high in pairwise(waiting)):
            self._add(f"The waiting records of key {key!r} are not in order.")
        if entry.stop not in (0, DELAYED, PARKED, BEHIND):
            self._add(f"Key {key!r} has the unknown state {entry.stop}.")
        if not (entry.held or waiting or entry.stop):
            self._add(f"Key {key!r} has an entry but no records.")
        if entry.held and entry.owner == NOBODY:
            self._add(f"Key {key!r} has {entry.held} held records, but no owner.")
        self._waiting += [_Place(offset, key) for offset in waiting]
        place = "blocked" if entry.stop else "ready" if entry.owner == NOBODY else ""
        for name, score in zip(_SETS[:2], scores, strict=False):
            wanted = waiting[0] if waiting and name == place else None
            if (None if score is None else float(score)) != wanted:
                self._add(f"The set {name} does not have key {key!r} where it belongs.")
        if (entry.stop == DELAYED) != (scores[2] is not None):
            ends = "has no time at which its delay ends" if scores[2] is None else "is not delayed"
            self._add(f"Key {key!r} is delayed or has an end of a delay, but {ends}.")

    def _check_held(self, id: bytes, held: Counter[bytes]) -> None:
        """Compare the number of held records in key entries with the batches of their owner."""
        protocol = self._protocol
        member = ("HGET", protocol.key("members"), id)
        batches = ("HVALS", protocol.whole(b"batches:" + id))
        for _ in range(_TRIES):
            raw, values = self._at_once([member, batches])
            try:
                held = Counter(key for value in values for _, key in read_batch(value) if key)
            except ValueError:
                return  # reported already
            for part in _batched(held, _KEYS):
                now, entries = self._at_once([member, ("HMGET", protocol.key("keys"), *part)])
                if now != raw:
                    break
                self._compare_held(id, part, held, entries)
            else:
                return

    def _compare_held(
        self, id: bytes, part: Iterable[bytes], held: Counter[bytes], entries: list[bytes | None]
    ) -> None:
        for key, raw in zip(part, entries, strict=True):
            try:
                entry = KeyEntry.parse(raw) if raw else KeyEntry(NOBODY, 0, [])
            except ValueError:
                continue
            if entry.owner != id:
                self._add(f"Key {key!r} has owner {entry.owner!r}, but {id!r} holds its records.")
            elif entry.held != held[key]:
                self._add(f"Key {key!r} counts {entry.held} held records, not {held[key]}.")

    def _check_strays(self, name: str, seen: set[bytes]) -> None:
        """Find members of a set that have no key entry."""
        protocol = self._protocol
        for key in self._connector.call("ZRANGE", protocol.key(name), 0, -1):
            if key not in seen:
                exists, score = self._at_once(
                    [
                        ("HEXISTS", protocol.key("keys"), key),
                        ("ZSCORE", protocol.key(name), key),
                    ]
                )
                if not exists and score is not None:
                    self._add(f"The set {name} has key {key!r}, which has no records.")

    def _check_letters(self) -> None:
        protocol = self._protocol
        flat, dying = self._at_once(
            [("HGETALL", protocol.key("letters")), ("ZRANGE", protocol.key("dying"), 0, -1)]
        )
        if {*flat[::2]} != {*dying}:
            self._add("The keys 'dying' and 'letters' do not have the same dead letters.")
        for offset, detail in zip(flat[::2], flat[1::2], strict=True):
            failures, _, rest = detail.partition(b":")
            size, _, rest = rest.partition(b":")
            good = offset.isdigit() and failures.isdigit() and size.isdigit()
            if not good or int(size) > len(rest):
                self._add(f"The dead letter {offset!r} cannot be read: {detail[:80]!r}.")
                continue
            self._letters.append(_Place(int(offset), rest[: int(size)]))
            self._marks[b"letter:" + offset] = int(offset)

    # -- the whole state -----------------------------------------------------------------------

    def _whole_flaws(self, meta: tuple[bytes, Progress, int]) -> list[str]:
        """Return contradictions that count only if nothing has changed meanwhile."""
        _, progress, start = meta
        flaws: list[str] = []
        places = [*self._waiting, *self._held, *self._letters]
        offsets = {place.offset for place in places}
        if len(offsets) != len(places):
            flaws.append("A record is in two places.")
        if offsets and not start <= min(offsets) <= max(offsets) < progress.next:
            flaws.append("A record is held or waiting, but was not scanned.")
        if progress.waiting != len(self._waiting):
            count = len(self._waiting)
            flaws.append(f"The group counts {progress.waiting} waiting records, but {count} wait.")
        settled = progress.acked + progress.dead + progress.lost + progress.purged
        if settled + len(places) != progress.next - start:
            flaws.append(
                f"The group scanned {progress.next - start} records, but {settled} are settled and "
                f"{len(places)} are not."
            )
        call, protocol = self._connector.call, self._protocol
        failures = call("HKEYS", protocol.key("failures"))
        if len(failures) != progress.failing:
            flaws.append(
                f"The group counts {progress.failing} failed records, but {len(failures)} have."
            )
        flaws += [
            f"Settled record {offset.decode(errors='replace')} is in 'failures'."
            for offset in failures
            if not offset.isdigit() or int(offset) not in offsets
        ]
        flat = call("ZRANGE", protocol.key("unsettled"), 0, -1, "WITHSCORES")
        marks = {mark: int(float(s)) for mark, s in zip(flat[::2], flat[1::2], strict=True)}
        if marks != self._marks:
            flaws.append("The set 'unsettled' does not list exactly the batches and dead letters.")
        if call("ZCARD", protocol.key("purges")) != progress.purging:
            flaws.append(f"The group counts {progress.purging} purged keys, but others are listed.")
        return flaws

    def _check_index(self) -> None:
        """Check the ordering keys of unsettled records against the index, where it has them."""
        if self._config is None:
            return
        keyless = self._config.default_key.encode()
        free = self._config.keyless == "free"
        places = sorted({*self._waiting, *self._held, *self._letters})
        at = wrong = 0
        while at < len(places):
            entries = self._connector.call(
                *("XRANGE", keys.index(self._protocol.stream.name), f"{places[at].offset}-0", "+"),
                *("COUNT", _ENTRIES),
            )
            if not entries:
                break
            for first, found in (read_entry(*entry) for entry in entries):
                while at < len(places) and places[at].offset < first + len(found):
                    offset, key = places[at]
                    at += 1
                    if offset < first:
                        continue
                    truth = found[offset - first]
                    if not truth and free:
                        truth = b"" if not key else b"\0%d" % offset
                    truth = truth or (b"" if free else keyless)
                    if truth != key:
                        wrong += 1
                        if wrong <= _NAMED:
                            self._add(f"Record {offset} is filed under key {key!r}, not {truth!r}.")
        if wrong > _NAMED:
            self._add(f"{wrong - _NAMED} more records are filed under wrong keys.")


def _chunk_fields(key: bytes, raw: bytes | None) -> list[bytes]:
    """Return the fields that hold the further waiting offsets of a key, a bounded number."""
    try:
        return KeyEntry.parse(raw or b"").chunks(key)[:_CHUNKS]
    except ValueError:
        return []


def _batched(names: Iterable[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    left = iter(names)
    while part := tuple(islice(left, size)):
        yield part
