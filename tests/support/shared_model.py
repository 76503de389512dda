"""A model of the records in a shared group that follows the documented rules."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any


class Model:
    """Every record's fate, holder and failure count."""

    def __init__(self, *, tries: int, parks: bool, letters: bool) -> None:
        self.tries, self.parks, self.letters = tries, parks, letters
        self.key_of: dict[int, bytes] = {}
        self.fate: dict[int, str] = {}  # outcome of each settled record
        self.failures: Counter[int] = Counter()
        self.holder: dict[int, str] = {}  # the consumer that holds each record
        self.bounds: dict[bytes, int] = {}  # by key: the last record that a dead consumer held
        self.marks: dict[bytes, int] = {}  # by key: a scan purges records below this offset
        self.dying: set[int] = set()
        self.stopped: dict[bytes, str] = {}  # by key: "d" (delayed) or "p" (parked)

    def tell(self, consumer: str, kind: str, offset: int, how: dict[str, Any]) -> None:
        """Apply a settlement that the server has accepted."""
        key = self.key_of[offset]
        assert self.holder.pop(offset) == consumer
        if kind == "ack":
            self.close_record(offset, "acked")
        elif kind == "gone":
            self.close_record(offset, "lost")
        elif kind == "reject":
            self.failures[offset] += 1
            self.give_up(offset)
        else:
            self.fail(offset)
        if kind == "rewind" or (kind == "reject" and self.parks):
            behind = [o for o in self.holder if o > offset and self.key_of[o] == key]
            for other in behind:
                assert self.holder.pop(other) == consumer
            back = [*behind, offset] if self.is_waiting(offset) else behind
            if how.get("delay") and back and key not in self.stopped:
                self.stopped[key] = "d"

    def fail(self, offset: int) -> None:
        self.failures[offset] += 1
        if self.tries and self.failures[offset] >= self.tries:
            self.give_up(offset)

    def give_up(self, offset: int) -> None:
        if self.parks:
            self.stopped[self.key_of[offset]] = "p"
        if self.letters:
            self.dying.add(offset)
        elif not self.parks:
            self.close_record(offset, "dropped")

    def give_back(self, consumer: str, *, died: bool) -> None:
        heads: dict[bytes, int] = {}
        bounds = dict(self.bounds)
        for offset in sorted(o for o, c in self.holder.items() if c == consumer):
            key = self.key_of[offset]
            heads.setdefault(key, offset)
            if died:
                self.bounds[key] = max(self.bounds.get(key, -1), offset)
            del self.holder[offset]
        if died:  # only the first record of each key can have been in progress
            for key, offset in heads.items():
                # A death counts as the last failure only for a suspect, because only a suspect's
                # last try is delivered alone.
                suspected = offset <= bounds.get(key, -1)
                if suspected or self.failures[offset] + 1 != self.tries:
                    self.fail(offset)

    def is_suspect(self, offset: int) -> bool:
        """Return whether a dead consumer held this record, or a later one of its key."""
        return offset <= self.bounds.get(self.key_of[offset], -1)

    def close_record(self, offset: int, fate: str) -> None:
        assert offset not in self.fate, f"{offset} was {self.fate[offset]}, now {fate}"
        self.fate[offset] = fate
        self.failures.pop(offset, None)

    def open(self) -> list[int]:
        return [offset for offset in self.key_of if offset not in self.fate]

    def is_waiting(self, offset: int) -> bool:
        return not (offset in self.fate or offset in self.dying or offset in self.holder)

    def waiting(self, key: bytes) -> list[int]:
        return [o for o, g in self.key_of.items() if g == key and self.is_waiting(o)]

    @property
    def by_key(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = defaultdict(list)
        for offset, key in self.key_of.items():
            found[key].append(offset)
        return found
