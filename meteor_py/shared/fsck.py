"""A consistency check for a shared group's state.

Consumers change the state while the check reads it. The check therefore reads the state in
portions, each at a single instant, and tests the invariants that hold at every instant. A portion
is a few ordering keys with their first waiting records and their places in ``ready``, ``blocked``
and ``delayed``, or some of a consumer's batches. An ordering key with many waiting records, or a
consumer with many batches, takes several portions. Its invariants are tested only if it did not
change from the first portion to the last. The same applies to invariants of the whole state, such
as the sums of the counters. The check reports values that it cannot read, instead of raising an
error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
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

#: Number of ordering keys, chunks of waiting offsets, or batches to read in one transaction.
_KEYS = 50
_CHUNKS = 100
_BATCHES = 100
#: Number of index entries to read at a time.
_ENTRIES = 64
#: Maximum number of records with a wrong ordering key to list. Any others are only counted.
_NAMED = 10
#: Number of attempts to read a consumer or an ordering key that keeps changing.
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
        GroupNotFound, StreamNotFound: The group or the stream was deleted.
        LogTruncated: The stream was deleted and recreated.
    """
    return _Check(protocol).run()


class _Place(NamedTuple):
    """An unsettled record, and the ordering key under which the state lists it."""

    offset: int
    key: bytes


class _Check:
    """One run of the check."""

    def __init__(self, protocol: SharedProtocol) -> None:
        self._protocol = protocol
        self._connector = protocol.stream.connector
        self._flaws: dict[str, None] = {}
        self._config: SharedConfig | None = None
        self._parts: list[bytes] = []
        self._waiting: list[_Place] = []
        self._held: dict[bytes, list[_Place]] = {}  # by consumer
        self._letters: list[_Place] = []
        self._marks: dict[bytes, int] = {}  # the expected content of `unsettled`

    def run(self) -> list[str]:
        protocol = self._protocol
        protocol.require()
        if not self._check_types():
            return list(self._flaws)
        before = self._read_meta()
        if before is None:
            return list(self._flaws)
        self._check_members()
        self._check_keys()
        self._check_letters()
        whole = self._whole_flaws(before)
        if self._connector.call("HGET", protocol.key("meta"), "progress") == before[0]:
            self._flaws |= dict.fromkeys(whole)
        self._check_index()
        listed = ("SISMEMBER", keys.shared_groups(protocol.stream.name), protocol.group)
        if not self._connector.call(*listed):
            self._add(f"The list of shared groups does not include {protocol.group!r}.")
        return list(self._flaws)

    def _places(self) -> list[_Place]:
        """Return the unsettled records that were found."""
        held = [place for places in self._held.values() for place in places]
        return [*self._waiting, *held, *self._letters]

    def _add(self, flaw: str) -> None:
        self._flaws[flaw] = None

    def _at_once(self, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Run commands in one transaction; return their replies."""
        found: list[Any] = self._connector.pipeline([("MULTI",), *commands, ("EXEC",)])[-1]
        return found

    # -- parts of the state --------------------------------------------------------------------

    def _check_types(self) -> bool:
        """Check the types of all keys; return whether the rest of the check can run."""
        parts = self._parts = sorted(self._protocol.find())
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
        """Return the raw and the parsed progress, and the group's first offset.

        Returns None if the progress cannot be read.
        """
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
                self._add(f"The meta hash has no numeric field {name!r}.")
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

    def _check_members(self) -> None:
        """Check the consumers, their batches, and the held-record counts in key entries."""
        protocol = self._protocol
        members = {id for portion in protocol.scan("HSCAN", "members") for id, _ in portion}
        leases = {id for portion in protocol.scan("ZSCAN", "leases") for id, _ in portion}
        for id in members ^ leases:
            commands = [("HEXISTS", protocol.key("members"), id)]
            commands.append(("ZSCORE", protocol.key("leases"), id))
            member, lease = self._at_once(commands)
            if bool(member) != (lease is not None):
                self._add("The members and the leases do not match.")
        for part in self._parts:
            family, colon, id = part.partition(b":")
            if colon and family in _FAMILIES and id not in members:
                exists = ("HEXISTS", protocol.key("members"), id)
                if self._at_once([exists, ("EXISTS", protocol.whole(part))]) == [0, 1]:
                    self._add(
                        f"Consumer {id!r} holds records, but is not a member of the group."
                        if family == b"batches"
                        else f"The key {part!r} belongs to no consumer of the group."
                    )
        for id in sorted(members):
            self._check_member(id)

    def _check_member(self, id: bytes) -> None:
        protocol = self._protocol
        for _ in range(_TRIES):
            raw, batches = self._read_member(id)
            if raw is None:
                return  # the consumer has left, or keeps changing
            try:
                member = Member.parse(raw)
            except ValueError as error:
                self._add(f"The entry of consumer {id!r} cannot be read: {error}")
                return
            held = self._check_batches(id, member, batches)
            if held is None or member.dead:
                return
            for part in _batched(held, _KEYS):
                now, entries = self._at_once(
                    [
                        ("HGET", protocol.key("members"), id),
                        ("HMGET", protocol.key("keys"), *part),
                    ]
                )
                if now != raw:
                    break  # the consumer has taken a step, so read it again
                self._compare_held(id, part, held, entries)
            else:
                return

    def _read_member(self, id: bytes) -> tuple[bytes | None, dict[bytes, bytes]]:
        """Return a consumer's entry and batches. The entry is None if it is gone or keeps changing.

        Reads the batches in portions, so it starts again if the entry changes.
        """
        protocol = self._protocol
        key = protocol.whole(b"batches:" + id)
        for _ in range(_TRIES):
            cursor, before, batches = b"0", None, dict[bytes, bytes]()
            while True:
                entry = ("HGET", protocol.key("members"), id)
                raw, (cursor, flat) = self._at_once(
                    [entry, ("HSCAN", key, cursor, "COUNT", _BATCHES)]
                )
                before = before or raw
                batches |= zip(flat[::2], flat[1::2], strict=True)
                if raw is None or raw != before:
                    break
                if cursor == b"0":
                    return raw, batches
        return None, {}

    def _check_batches(
        self, id: bytes, member: Member, batches: dict[bytes, bytes]
    ) -> Counter[bytes] | None:
        """Return the number of held records by key, or None if a batch cannot be read."""
        held: Counter[bytes] = Counter()
        readable = True
        places = list[_Place]()
        for number, batch in batches.items():
            try:
                records = read_batch(batch)
            except ValueError as error:
                self._add(f"Batch {number!r} of consumer {id!r} cannot be read: {error}")
                readable = False
                continue
            held.update(key for _, key in records if key)
            places += [_Place(offset, key) for offset, key in records]
            self._marks[id + b":" + number] = min(offset for offset, _ in records)
        self._held[id] = places
        size = sum(batch[0] for batch in batches.values() if batch)
        if not member.dead and member.holding != size:
            self._add(f"Consumer {id!r} should hold {member.holding} records, but holds {size}.")
        if member.alone and size > 1:
            self._add(
                f"Consumer {id!r} holds {size} records, but one of them is on its last delivery "
                "attempt and must be held alone."
            )
        return held if readable else None

    def _check_keys(self) -> None:
        protocol = self._protocol
        seen: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, flat = self._connector.call(
                "HSCAN", protocol.key("keys"), cursor, "COUNT", _KEYS
            )
            names = [name for name in flat[::2] if name not in seen]  # HSCAN may repeat a field
            seen.update(names)
            for part in _batched(names, _KEYS):
                self._check_some_keys(part)
            if cursor == b"0":
                break
        if b"" not in seen:
            self._add("The hash 'keys' lacks its padding field.")
        for name in _SETS:
            self._check_strays(name, seen)

    def _check_some_keys(self, names: Iterable[bytes]) -> None:
        protocol, names = self._protocol, [name for name in names if name]
        commands: list[tuple[Any, ...]] = []
        for name in names:
            commands.append(("HGET", protocol.key("keys"), name))
            commands += [("ZSCORE", protocol.key(part), name) for part in _SETS]
        replies = self._at_once(commands)
        for number, name in enumerate(names):
            raw, *scores = replies[4 * number : 4 * number + 4]
            if raw is None:
                continue
            try:
                entry = KeyEntry.parse(raw)
            except ValueError as error:
                self._add(f"The entry of key {name!r} cannot be read: {error}")
                continue
            self._check_key(name, entry, scores)
            if entry.far:
                self._check_chunks(name)

    def _check_key(self, key: bytes, entry: KeyEntry, scores: list[bytes | None]) -> None:
        waiting = entry.waiting
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
                self._add(f"The set {name} has a wrong entry, or none, for key {key!r}.")
        if entry.stop == DELAYED and scores[2] is None:
            self._add(f"Key {key!r} is delayed, but the set delayed does not list it.")
        if entry.stop != DELAYED and scores[2] is not None:
            self._add(f"The set delayed lists key {key!r}, which is not delayed.")

    def _check_chunks(self, key: bytes) -> None:
        """Check the chunks that hold the waiting offsets that did not fit in the key's entry."""
        protocol = self._protocol
        get = ("HGET", protocol.key("keys"), key)
        for _ in range(_TRIES):
            raw = self._connector.call(*get)
            if raw is None:
                return
            entry, chunks = KeyEntry.parse(raw), list[bytes | None]()
            for fields in _batched(entry.chunks(key), _CHUNKS):
                now, found = self._at_once([get, ("HMGET", protocol.key("waiting"), *fields)])
                if now != raw:
                    break
                chunks += found
                if None in found:  # stop: a damaged entry may list any number of chunks
                    self._compare_chunks(key, entry, chunks)
                    return
            else:
                self._compare_chunks(key, entry, chunks)
                return

    def _compare_chunks(self, key: bytes, entry: KeyEntry, chunks: list[bytes | None]) -> None:
        try:
            far = [offset for chunk in chunks for offset in read_line(chunk or b"")]
        except ValueError as error:
            self._add(f"A chunk of key {key!r} cannot be read: {error}")
            return
        if None in chunks or len(far) != entry.far:
            self._add(
                f"Key {key!r} counts {entry.far} further waiting records, which does not match its "
                "chunks."
            )
        if any(low >= high for low, high in pairwise([*entry.waiting[-1:], *far])):
            self._add(f"The waiting records of key {key!r} are not in order.")
        self._waiting += [_Place(offset, key) for offset in far]

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
        """Find the ordering keys in a set that lack an entry in ``keys``."""
        protocol = self._protocol
        for portion in protocol.scan("ZSCAN", name):
            for key in {key for key, _ in portion} - seen:
                exists = ("HEXISTS", protocol.key("keys"), key)
                found, score = self._at_once([exists, ("ZSCORE", protocol.key(name), key)])
                if not found and score is not None:
                    self._add(f"The set {name} lists key {key!r}, which has no entry.")

    def _check_letters(self) -> None:
        protocol, letters = self._protocol, dict[bytes, bytes]()
        scans = (protocol.scan("HSCAN", "letters"), protocol.scan("ZSCAN", "dying"))
        for portion in chain(*scans):
            names = list({name for name, _ in portion} - letters.keys())
            if not names:
                continue
            details, times = self._at_once(
                [
                    ("HMGET", protocol.key("letters"), *names),
                    ("ZMSCORE", protocol.key("dying"), *names),
                ]
            )
            for name, detail, due in zip(names, details, times, strict=True):
                if (detail is None) != (due is None):
                    self._add("The keys 'dying' and 'letters' do not have the same dead letters.")
                if detail is not None:
                    letters[name] = detail
        for offset, detail in letters.items():
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
        """Return contradictions that count only if nothing changed during the check."""
        _, progress, start = meta
        flaws: list[str] = []
        places = self._places()
        offsets = {place.offset for place in places}
        if len(offsets) != len(places):
            flaws.append("A record is listed twice.")
        if offsets and not start <= min(offsets) <= max(offsets) < progress.next:
            flaws.append("An unsettled record is outside the range that the group has scanned.")
        if progress.waiting != len(self._waiting):
            count = len(self._waiting)
            flaws.append(
                f"The group counts {progress.waiting} waiting records, but {count} are waiting."
            )
        settled = progress.acked + progress.dead + progress.lost + progress.purged
        if settled + len(places) != progress.next - start:
            flaws.append(
                f"The group scanned {progress.next - start} records, but {settled} are settled and "
                f"{len(places)} are not."
            )
        protocol = self._protocol
        portions = protocol.scan("HSCAN", "failures")
        failures = {offset for portion in portions for offset, _ in portion}
        if len(failures) != progress.failing:
            flaws.append(
                f"The group counts {progress.failing} failed records, but 'failures' lists "
                f"{len(failures)}."
            )
        flaws += [
            f"Settled record {offset.decode(errors='replace')} is in 'failures'."
            for offset in sorted(failures)
            if not offset.isdigit() or int(offset) not in offsets
        ]
        portions = protocol.scan("ZSCAN", "unsettled")
        marks = {mark: int(float(score)) for portion in portions for mark, score in portion}
        if marks != self._marks:
            flaws.append("The set 'unsettled' does not list exactly the batches and dead letters.")
        if self._connector.call("ZCARD", protocol.key("purges")) != progress.purging:
            flaws.append(
                f"The group counts {progress.purging} purged keys, but 'purges' lists a different "
                "number."
            )
        return flaws

    def _check_index(self) -> None:
        """Check the ordering keys of unsettled records that the index has."""
        if self._config is None:
            return
        keyless = self._config.default_key.encode()
        free = self._config.keyless == "free"
        places = sorted({*self._places()})
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


def _batched(names: Iterable[bytes], size: int) -> Iterator[tuple[bytes, ...]]:
    left = iter(names)
    while part := tuple(islice(left, size)):
        yield part
