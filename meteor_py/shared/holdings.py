"""Records that a consumer of a shared group holds, and its settlements that are not sent yet."""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meteor_py.shared.protocol import ConsumerState, Settlement, StepReply
from meteor_py.shared.record import SharedRecord, Standing

#: The most acknowledged offsets, and other settlements, in one step: the server runs nothing else
#: meanwhile.
_ACKS_MAX = 2_000
_OTHERS_MAX = 500


class Sync(enum.Enum):
    """Whether this consumer and the server agree about the records that it holds."""

    #: The reply to the last step is applied here.
    AGREED = "agreed"
    #: A step was sent, and its reply is not applied: during every step, and after a lost reply
    #: until ``reconcile``.
    IN_DOUBT = "in doubt"
    #: The last step rewound an ordering key, so other consumers may have got records that were
    #: granted here and not fetched. No record is received until ``reconcile``.
    STALE = "stale"


class Settlements(NamedTuple):
    """Acknowledged offsets by ordering key, and all other settlements in order."""

    acks: dict[bytes, list[int]]
    others: list[Settlement]


class Holdings:
    """Records and settlements of one consumer, from the grant to the server's confirmation.

    Pure data without I/O or locks; ``Deliveries`` guards it with its lock.
    """

    def __init__(self, *, reject_rewinds: bool) -> None:
        """Start with nothing.

        Args:
            reject_rewinds: Whether rejecting a record stops its ordering key, so that later records
                of the key are returned (``on_poison="park"``).
        """
        self.sync = Sync.AGREED
        #: Number of the last step that the server is known to have taken.
        self.number = 0
        #: Failures of each granted record that is not fetched yet, by offset.
        self.granted: dict[int, int] = {}
        #: Settlements in the step in flight.
        self.sent = Settlements({}, [])
        self._reject_rewinds = reject_rewinds
        self._held: dict[int, SharedRecord] = {}
        self._by_key: dict[bytes, list[int]] = {}  # the offsets of _held, ascending
        self._acks: dict[bytes, list[int]] = {}
        self._others: list[Settlement] = []

    def __len__(self) -> int:
        """Return the number of records held, fetched or not."""
        return len(self._held) + len(self.granted)

    @property
    def unsure(self) -> bool:
        """Whether other consumers may have got granted records: take a step before fetching."""
        return self.sync is Sync.STALE and bool(self.granted)

    @property
    def unsent(self) -> bool:
        """Whether there are settlements that the server does not have, or may not have."""
        return bool(self._acks or self._others or self.sync is Sync.IN_DOUBT)

    # -- receiving and settling ----------------------------------------------------------------

    def receive(self, fetched: Iterable[SharedRecord]) -> list[SharedRecord]:
        """Hold granted records that were fetched, and return them.

        Leaves out records that were taken, or rewound with an earlier record of their key.
        """
        if self.sync is Sync.STALE:
            return []
        received: list[SharedRecord] = []
        rewinds = self._rewinds([*self.sent.others, *self._others])
        for record in fetched:
            offset, key = record.offset, record.ordering_key
            if self.granted.pop(offset, None) is None or offset > rewinds.get(key, offset):
                continue
            self._held[offset] = record
            insort(self._by_key.setdefault(key, []), offset)
            received.append(record)
        return received

    def lose(self, offset: int) -> bool:
        """Settle a granted record that cannot be fetched; return whether it was still granted.

        Its ordering key is unknown until ``name_lost``.
        """
        if self.sync is Sync.STALE or self.granted.pop(offset, None) is None:
            return False
        self._others.append(Settlement("G", b"", offset))
        return True

    def settle(self, record: SharedRecord, kind: str, detail: bytes) -> None:
        """Settle a held record; ``kind`` is "A" to acknowledge it, or one of ``Settlement``.

        If that rewinds its ordering key, later records of the key are returned.
        """
        self._drop(record, Standing.SETTLED)
        if kind == "A":
            self._acks.setdefault(record.ordering_key, []).append(record.offset)
            return
        if self._is_rewind(kind):
            for offset in list(self._by_key.get(record.ordering_key, ())):
                if offset > record.offset and offset in self._held:
                    self._drop(self._held[offset], Standing.REWOUND)
        self._others.append(Settlement(kind, record.ordering_key, record.offset, detail))

    def add(self, settlement: Settlement) -> None:
        """Queue a settlement of a record that is not held here, such as a dead letter."""
        self._others.append(settlement)

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Move settlements for the next step to ``sent``; return whether none is left.

        Acknowledgements go first: one made before a rewind must count.
        """
        acks, more = self._acks, dict[bytes, list[int]]()
        others = self._others
        if sum(map(len, acks.values())) > _ACKS_MAX:
            acks, more = _split(acks, _ACKS_MAX)
            others = []
        others = others[:_OTHERS_MAX]
        self.sent = Settlements(acks, others)
        self._acks, self._others = more, self._others[len(others) :]
        self.sync = Sync.IN_DOUBT
        return not (self._acks or self._others)

    def apply(self, reply: StepReply) -> None:
        """Apply the reply to a step. ``end_step`` must follow.

        The order matters, because a Ctrl-C may interrupt it: until ``number`` changes,
        ``reconcile`` assumes that the server has ``sent``, and afterwards that it has not.
        """
        if self.granted and self._rewinds(self.sent.others):
            self.sync = Sync.STALE
        self.sent = Settlements({}, [])
        self.number += 1
        for offset in reply.granted:
            self.granted[offset] = reply.failures.get(offset, 0)

    def end_step(self) -> None:
        """Mark the reply as applied, here and in ``Deliveries``."""
        if self.sync is Sync.IN_DOUBT:
            self.sync = Sync.AGREED

    def withdraw_step(self) -> None:
        """Requeue the settlements of a step that changed nothing, before all others."""
        self._requeue_sent()
        self.sync = Sync.AGREED

    def start(self, number: int) -> None:
        """Start as a new consumer whose last step has this number."""
        self.number, self.sync = number, Sync.AGREED

    def reconcile(self, known: ConsumerState) -> None:
        """Adopt the server's view of this consumer, after a lost reply or a rewind.

        Records held only here were taken; records held only there are granted.
        """
        number, held, failures = known
        if number <= self.number:
            self._requeue_sent()  # the server did not take that step, or a failover lost it
        self.sent, self.number = Settlements({}, []), number
        theirs = {offset for offsets in held.values() for offset in offsets}
        for offsets in self._acks.values():
            theirs.difference_update(offsets)
        theirs.difference_update(other.offset for other in self._others)
        for key, offset in self._rewinds(self._others).items():
            theirs.difference_update(o for o in held.get(key, ()) if o > offset)
        for offset in [offset for offset in self._held if offset not in theirs]:
            self._drop(self._held[offset], Standing.TAKEN)
        for offset in [offset for offset in self.granted if offset not in theirs]:
            del self.granted[offset]
        for offset in sorted(theirs - self._held.keys() - self.granted.keys()):
            self.granted[offset] = failures.get(offset, 0)
        self.sync = Sync.AGREED  # last: a Ctrl-C may interrupt the lines above

    def void_settlements(self) -> list[int]:
        """Return the offsets whose settlements are void if the lease has expired."""
        void: list[int] = []
        for acks, others in (self.sent, (self._acks, self._others)):
            void += [offset for offsets in acks.values() for offset in offsets]
            void += [other.offset for other in others if other.kind not in "GDL"]
        return void

    def fence(self) -> None:
        """Drop all records and settlements, because the lease has expired."""
        self.sent, self._acks, self._others = Settlements({}, []), {}, []
        self.take_all()
        self.sync = Sync.AGREED

    def take_all(self) -> None:
        """Mark all records as taken."""
        for record in list(self._held.values()):
            self._drop(record, Standing.TAKEN)
        self.granted.clear()

    # -- dead letters --------------------------------------------------------------------------

    @property
    def has_letters(self) -> bool:
        """Whether published dead letters are to be settled."""
        return any(other.kind == "D" for other in self._others)

    def keep_letters(self, history: bytes) -> None:
        """Drop settlements of dead letters that were published in another history."""
        self._others = [
            other
            for other in self._others
            if other.kind != "D" or b"" in (other.detail, history) or other.detail == history
        ]

    # -- lost records --------------------------------------------------------------------------

    @property
    def has_unnamed_lost(self) -> bool:
        """Whether the ordering key of a lost record is still unknown."""
        return any(other.kind == "G" and not other.ordering_key for other in self._others)

    def name_lost(self, held: Mapping[bytes, Iterable[int]]) -> None:
        """Find the ordering keys of lost records among those that the server says are held.

        A lost record that is not among them belongs to another consumer now, and is not settled.
        """
        keys = {offset: key for key, offsets in held.items() for offset in offsets}
        self._others = [
            other._replace(ordering_key=keys[other.offset]) if other.kind == "G" else other
            for other in self._others
            if other.kind != "G" or other.offset in keys
        ]

    # -- internals -----------------------------------------------------------------------------

    def _requeue_sent(self) -> None:
        acks, others = self.sent
        for key, offsets in self._acks.items():
            acks.setdefault(key, []).extend(offsets)
        self._acks, self._others = acks, others + self._others
        self.sent = Settlements({}, [])

    def _is_rewind(self, kind: str) -> bool:
        return kind in "RU" or (kind == "X" and self._reject_rewinds)

    def _rewinds(self, others: Iterable[Settlement]) -> dict[bytes, int]:
        """Return the offsets to which settlements rewind their ordering keys."""
        found: dict[bytes, int] = {}
        for kind, key, offset, _ in others:
            if self._is_rewind(kind):
                found[key] = min(found.get(key, offset), offset)
        return found

    def _drop(self, record: SharedRecord, standing: Standing) -> None:
        record.standing = standing
        self._held.pop(record.offset, None)  # a signal handler's close() may have dropped it
        offsets = self._by_key.get(record.ordering_key, [])
        if record.offset in offsets:
            offsets.remove(record.offset)
        if not offsets:
            self._by_key.pop(record.ordering_key, None)


def _split(
    acks: dict[bytes, list[int]], size: int
) -> tuple[dict[bytes, list[int]], dict[bytes, list[int]]]:
    """Split off the first ``size`` offsets; return them and the rest."""
    part: dict[bytes, list[int]] = {}
    rest: dict[bytes, list[int]] = {}
    for key, offsets in acks.items():
        if size > 0:
            part[key] = offsets[:size]
        if len(offsets) > size:
            rest[key] = offsets[size:]
        size = max(size - len(offsets), 0)
    return part, rest
