"""What a consumer of a shared group holds, and what it has settled and not yet sent."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meteor_py.shared.protocol import ConsumerState, Settlement, StepReply
from meteor_py.shared.record import SharedRecord, Standing

#: What one step says at most, acknowledged offsets and other settlements: the server does nothing
#: else meanwhile.
_ACKS_MAX = 2_000
_OTHERS_MAX = 500


class Sync(enum.Enum):
    """Whether this consumer and the server agree about what it holds."""

    #: They do: the reply to the last step is applied here.
    AGREED = "agreed"
    #: A step was sent and its reply is not applied. So it is during every step, and after a lost
    #: reply until ``reconcile``.
    IN_DOUBT = "in doubt"
    #: The last step has rewound an ordering key, and some of what was granted and not fetched may
    #: have gone to others with it. Nothing is received until ``reconcile``.
    STALE = "stale"


class Settlements(NamedTuple):
    """Acknowledged offsets by ordering key, and all other settlements in order."""

    acks: dict[bytes, list[int]]
    others: list[Settlement]


class Holdings:
    """Records that were granted, held and settled, from the grant until the server knows.

    Pure data: it does no I/O and has no lock; ``Deliveries`` calls it with its own.
    """

    def __init__(self, *, reject_rewinds: bool) -> None:
        """Start with nothing.

        Args:
            reject_rewinds: Whether rejecting a record stops its ordering key, so that later records
                of the key go back (``on_poison="park"``).
        """
        self.sync = Sync.AGREED
        #: Number of the last step that the server has taken, as far as is known here.
        self.number = 0
        #: Granted and not fetched yet: offsets, and the failures of each.
        self.granted: dict[int, int] = {}
        #: Said by the step that is under way.
        self.sent = Settlements({}, [])
        self._reject_rewinds = reject_rewinds
        self._held: dict[int, SharedRecord] = {}
        self._by_key: dict[bytes, list[int]] = {}  # the same: offsets, rising
        self._acks: dict[bytes, list[int]] = {}
        self._others: list[Settlement] = []

    def __len__(self) -> int:
        """Return how many records are held, fetched or not."""
        return len(self._held) + len(self.granted)

    @property
    def unsure(self) -> bool:
        """Whether others may have some of what was granted: take a step before fetching it."""
        return self.sync is Sync.STALE and bool(self.granted)

    @property
    def unsaid(self) -> bool:
        """Whether something was settled that the server does not know, or may not know."""
        return bool(self._acks or self._others or self.sync is Sync.IN_DOUBT)

    # -- receiving and settling ----------------------------------------------------------------

    def receive(self, fetched: Iterable[SharedRecord]) -> list[SharedRecord]:
        """Hold records that were granted and fetched, and return those that are held now.

        A record that was taken, or rewound with an earlier record of its key, is left out.
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
            _insert(self._by_key.setdefault(key, []), offset)
            received.append(record)
        return received

    def lose(self, offset: int) -> bool:
        """Settle a record that was granted and cannot be fetched; return whether it still was.

        Its ordering key is not known without it: see ``name_lost``.
        """
        if self.sync is Sync.STALE or self.granted.pop(offset, None) is None:
            return False
        self._others.append(Settlement("G", b"", offset))
        return True

    def ack(self, record: SharedRecord) -> None:
        """Acknowledge a record that is held."""
        self._drop(record, Standing.SETTLED)
        self._acks.setdefault(record.ordering_key, []).append(record.offset)

    def settle(self, record: SharedRecord, kind: str, detail: bytes) -> None:
        """Settle a record that is held; if that rewinds its key, later ones go back with it."""
        self._drop(record, Standing.SETTLED)
        if self._is_rewind(kind):
            for offset in list(self._by_key.get(record.ordering_key, ())):
                if offset > record.offset and offset in self._held:
                    self._drop(self._held[offset], Standing.REWOUND)
        self._others.append(Settlement(kind, record.ordering_key, record.offset, detail))

    def say(self, settlement: Settlement) -> None:
        """Say something with the next step that concerns no record held here."""
        self._others.append(settlement)

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Move what the next step says to ``sent``; return whether that is all there is.

        Acknowledgements go first: one that was made before a rewind counts.
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

        The order matters, as a Ctrl-C may come in between: while ``number`` is the old one,
        ``reconcile`` takes ``sent`` for known to the server, and afterwards for not sent.
        """
        if self.granted and self._rewinds(self.sent.others):
            self.sync = Sync.STALE
        self.sent = Settlements({}, [])
        self.number += 1
        for offset in reply.granted:
            self.granted[offset] = reply.failures.get(offset, 0)

    def end_step(self) -> None:
        """Everything in the reply is applied, here and elsewhere."""
        if self.sync is Sync.IN_DOUBT:
            self.sync = Sync.AGREED

    def withdraw_step(self) -> None:
        """Take back a step that changed nothing: the next one says the same, before the rest."""
        self._requeue_sent()
        self.sync = Sync.AGREED

    def start(self, number: int) -> None:
        """Begin as a new consumer, whose last step has this number."""
        self.number, self.sync = number, Sync.AGREED

    def reconcile(self, known: ConsumerState) -> None:
        """Adopt the server's view of this consumer, after a lost reply or a rewind.

        What is held only here was taken, and what is held only there is granted.
        """
        number, held, failures = known
        if number <= self.number:
            self._requeue_sent()  # that step was not taken, or the server has lost it
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
        self.sync = Sync.AGREED  # last: a Ctrl-C may come in between

    def settled_in_vain(self) -> list[int]:
        """Return the offsets whose settling is void if the lease has expired."""
        void: list[int] = []
        for acks, others in (self.sent, (self._acks, self._others)):
            void += [offset for offsets in acks.values() for offset in offsets]
            void += [other.offset for other in others if other.kind not in "GDL"]
        return void

    def fence(self) -> None:
        """Give up everything, as the lease has expired."""
        self.sent, self._acks, self._others = Settlements({}, []), {}, []
        self.take_all()
        self.sync = Sync.AGREED

    def take_all(self) -> None:
        """Others have everything that was held."""
        for record in list(self._held.values()):
            self._drop(record, Standing.TAKEN)
        self.granted.clear()

    # -- lost records --------------------------------------------------------------------------

    @property
    def has_unnamed_lost(self) -> bool:
        """Whether a record was lost whose ordering key is not known yet."""
        return any(other.kind == "G" and not other.ordering_key for other in self._others)

    def name_lost(self, held: Mapping[bytes, Iterable[int]]) -> None:
        """Find the ordering keys of lost records in what the server says is held.

        A lost record that is not held there is another consumer's by now: nothing is said of it.
        """
        keys = {offset: key for key, offsets in held.items() for offset in offsets}
        self._others = [
            other._replace(ordering_key=keys[other.offset]) if other.kind == "G" else other
            for other in self._others
            if other.kind != "G" or other.offset in keys
        ]

    # -- inside --------------------------------------------------------------------------------

    def _requeue_sent(self) -> None:
        acks, others = self.sent
        for key, offsets in self._acks.items():
            acks.setdefault(key, []).extend(offsets)
        self._acks, self._others = acks, others + self._others
        self.sent = Settlements({}, [])

    def _is_rewind(self, kind: str) -> bool:
        return kind in "RU" or (kind == "X" and self._reject_rewinds)

    def _rewinds(self, others: Iterable[Settlement]) -> dict[bytes, int]:
        """Return the ordering keys that some settlements rewind, and where to."""
        found: dict[bytes, int] = {}
        for kind, key, offset, _ in others:
            if self._is_rewind(kind):
                found[key] = min(found.get(key, offset), offset)
        return found

    def _drop(self, record: SharedRecord, standing: Standing) -> None:
        record.standing = standing
        self._held.pop(record.offset, None)  # a signal handler may have closed in between
        offsets = self._by_key.get(record.ordering_key, [])
        if record.offset in offsets:
            offsets.remove(record.offset)
        if not offsets:
            self._by_key.pop(record.ordering_key, None)


def _split(
    acks: dict[bytes, list[int]], size: int
) -> tuple[dict[bytes, list[int]], dict[bytes, list[int]]]:
    """Return so many of the offsets, and the rest."""
    part: dict[bytes, list[int]] = {}
    rest: dict[bytes, list[int]] = {}
    for key, offsets in acks.items():
        if size > 0:
            part[key] = offsets[:size]
        if len(offsets) > size:
            rest[key] = offsets[size:]
        size = max(size - len(offsets), 0)
    return part, rest


def _insert(offsets: list[int], offset: int) -> None:
    """Add an offset, which mostly is the highest."""
    offsets.append(offset)
    if len(offsets) > 1 and offsets[-2] > offset:
        offsets.sort()
