"""The desk of a consumer: what it holds, and what it has settled and not yet said.

The server keeps the books. Each step has a number, one above the last that the server knows of this
consumer: so a step is never taken twice, and one whose answer was lost is made out by asking where
the consumer stands (``SharedProtocol.join``), which also tells what it holds. That answer is the
truth: what is held here and not there was taken, what is held there and not here is delivered.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.records.config import check_seconds
from meteor_py.records.ordering_index import OrderingRule
from meteor_py.redis import reply_errors
from meteor_py.redis.shared_connection import SharedConnection
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.shared.config import SharedConfig
from meteor_py.shared.gaps import Gap, Gaps, Unreadable
from meteor_py.shared.protocol import (
    Answer,
    Entry,
    Letter,
    Refused,
    Settlement,
    SharedProtocol,
    Stand,
)
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.subscribe.lease import BELIEF

if TYPE_CHECKING:
    from meteor_py.records.codec import Codec
    from meteor_py.records.record import Record
    from meteor_py.redis.connection import Connection

_log = logging.getLogger(__name__)

#: Rounds of asking where one stands, more than anything but an error can take.
_ROUNDS = 5
#: Seconds to wait for the line before the state is let go.
_TURN_S = 0.05
#: Characters of a reason that are kept.
_REASON_MAX = 1_000
#: What a step says at most, acknowledged offsets and other settlements: the server does nothing
#: else meanwhile.
_ACKS_MAX = 2_000
_OTHERS_MAX = 500


class Deliveries:
    """For several threads. ``exchange`` talks to the server, nothing else does."""

    def __init__(
        self,
        books: SharedProtocol,
        config: SharedConfig,
        grouping: OrderingRule,
        codec: Codec | None,
        name: str,
    ) -> None:
        self.books = books
        self.config = config
        self.name = name
        self._grouping = grouping
        self._codec = codec
        self._line = SharedConnection(books.stream.connector.open_connection)
        #: Notified when something is settled.
        self.state = SignalSafeCondition()
        self._told = False  # since the last step
        #: Somebody waits until less is held.
        self.waits_for_room = False
        self._held: dict[int, SharedRecord] = {}
        self._groups: dict[bytes, list[int]] = {}  # the same: offsets, rising
        #: Granted and not fetched yet: offsets, and failures of each.
        self.granted: dict[int, int] = {}
        self._acks: dict[bytes, list[int]] = {}
        self._others: list[Settlement] = []
        self._sent: tuple[dict[bytes, list[int]], list[Settlement]] = ({}, [])
        self._in_doubt = False  # what became of the last step
        # Something was rewound while some was granted and not fetched, which may be with others
        # now. Not the same as in doubt, which is so during every step.
        self._stale = False
        self._disowned = False
        self._consumer = ""
        self._left = False
        self._number = 0
        # Offsets of settlements that were refused, and what was lost, until somebody is told.
        self._refused: list[int] = []
        self._lost = Gaps()
        #: What the tender has met, for the application.
        self.failure: MeteorError | None = None
        #: Letters to publish.
        self.letters: list[Letter] = []
        #: Until then nobody else is given what is held here, by ``lease.now()``.
        self.valid_until = 0.0
        self.spoke_at = 0.0
        #: The application was last seen then: it polled, or settled something.
        self.alive_at = now()

    # -- for the application -------------------------------------------------------------------

    def ack(self, record: SharedRecord) -> None:
        with self.state:
            self._leave(record)
            self._acks.setdefault(record.group, []).append(record.offset)
            self._say()

    def release(
        self, record: SharedRecord, delay: float, *, only_this: bool = False, failed: bool = True
    ) -> None:
        check_seconds("delay", delay, zero=True)
        if only_this and delay:
            raise ValueError(
                "A delay is for a whole group; leave out delay, or only_this, in release()."
            )
        with self.state:
            self._leave(record)
            if not only_this:
                self._rewind(record)
            kind, detail = "Q" if only_this else "R" if failed else "U", b"%d" % (delay * 1000)
            self._others.append(Settlement(kind, record.group, record.offset, detail))
            self._say()

    def reject(self, record: SharedRecord, reason: str) -> None:
        with self.state:
            self._leave(record)
            if self.config.on_poison == "park":
                self._rewind(record)
            detail = reason[:_REASON_MAX].encode(errors="backslashreplace")
            self._others.append(Settlement("X", record.group, record.offset, detail))
            self._say()

    def settle_all(self, *, handed: Iterable[SharedRecord], ack: bool) -> None:
        """Acknowledge, or return, all of some that are still held."""
        with self.state:
            for record in handed:
                if record.standing is Standing.HELD:
                    if ack:
                        self.ack(record)
                    else:
                        self.release(record, 0.0, only_this=False)

    def receive(
        self,
        records: Mapping[int, Record],
        lost: Iterable[int],
        unreadable: Mapping[int, Unreadable] | None = None,
    ) -> list[SharedRecord]:
        """Records that were granted and fetched; those that are lost or unreadable are settled.

        None of them, while it is not known which are still this consumer's: see ``unsure``.
        """
        received: list[SharedRecord] = []
        with self.state:
            if self._stale:
                return []
            rewinds = self._rewinds([*self._sent[1], *self._others])
            for offset, record in records.items():
                failures = self.granted.pop(offset, None)
                group = self._group_of(record)
                if failures is None or offset > rewinds.get(group, offset):
                    continue  # taken, or returned with one before it, meanwhile
                shared = SharedRecord(self, record, group, failures, self._codec)
                self._held[offset] = shared
                insort_offset(self._groups.setdefault(group, []), offset)
                received.append(shared)
            causes: dict[int, Unreadable | None] = {**dict.fromkeys(lost), **(unreadable or {})}
            for offset, cause in causes.items():
                if self.granted.pop(offset, None) is not None:
                    # Its group is not known without it: the server is asked.
                    self._others.append(Settlement("G", b"", offset))
                    self._lost.add(offset, offset, cause)
        return received

    def letter_published(self, letter: Letter, *, lost: bool = False) -> None:
        """Nothing is left to publish; because its record is lost, perhaps."""
        with self.state:
            self._others.append(Settlement("L" if lost else "D", b"", letter.offset))
            self._say()

    def raise_failure(self) -> None:
        """Raise what the tender has met, once."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure.with_traceback(None)

    def take_refused(self) -> list[int]:
        """The offsets of settlements that were refused, once."""
        with self.state:
            refused, self._refused = self._refused, []
        return sorted(refused)

    def take_lost(self) -> Gap | None:
        """A gap that nobody was told of, once."""
        with self.state:
            return self._lost.take()

    def note_lost(self, offset: int, cause: Unreadable | None) -> None:
        with self.state:
            self._lost.add(offset, offset, cause)

    @property
    def holding(self) -> int:
        """Records that are held, fetched or not."""
        return len(self._held) + len(self.granted)

    @property
    def unsure(self) -> bool:
        """Whether some of what was granted may be with others: exchange before it is fetched."""
        return self._stale and bool(self.granted)

    @property
    def unsaid(self) -> bool:
        """Whether something was settled that the server does not know."""
        return bool(self._acks or self._others or self._in_doubt)

    # -- with the server -----------------------------------------------------------------------

    def exchange(
        self,
        want: int = 0,
        *,
        leave: bool = False,
        wake: bool = False,
        entry: Entry | None = None,
    ) -> Answer:
        """Say what was settled, renew the lease, claim up to ``want`` records.

        Args:
            leave: Give back what is held, and be no consumer any more.
            wake: Wake whoever waits in another thread here, if there may be more for it now.

        Raises:
            ConnectionFailed: No answer; the next exchange finds out what became of it.
            GroupNotFound, StreamNotFound, LogTruncated: It was deleted.
        """
        work = partial(self._exchange, want=want, leave=leave, wake=wake, entry=entry)
        while self.state.is_mine():
            # A signal handler has come while its thread had the state, and whoever has the line may
            # need that: it is let go now and then.
            try:
                return self._line.use(work, timeout_s=_TURN_S)
            except TimeoutError:
                with self.state:
                    self.state.wait(_TURN_S / 10)
        return self._line.use(work)

    def talks_here(self) -> bool:
        """Whether this thread is in the middle of an exchange, and a signal handler is asking."""
        return self._line.is_mine()

    def interrupt(self) -> None:
        self._line.interrupt()

    def close(self) -> None:
        self._line.close()

    def disown(self) -> None:
        """In a forked child: all this is the parent's."""
        self.state = SignalSafeCondition()
        self._held, self._groups, self.granted = {}, {}, {}
        self._acks, self._others, self._in_doubt = {}, [], False
        self._disowned = True

    def _exchange(
        self, connection: Connection, want: int, leave: bool, wake: bool, entry: Entry | None
    ) -> Answer:
        refusals_left = _ROUNDS
        while refusals_left:  # ends: nothing new is claimed before all is said
            self._stand(connection)
            self._name_lost(connection)
            last = self._take_part()
            started = now()
            acks, others = self._sent
            try:
                answer = self.books.step(
                    connection,
                    self._consumer,
                    self._number + 1,
                    want=want if last else 0,
                    leave=leave and last,
                    wake=wake and last,
                    entry=entry if last else None,
                    acks={group: sorted(offsets) for group, offsets in acks.items()},
                    others=others,
                )
            except Refused:
                refusals_left -= 1
                continue  # where do we stand?
            except ConnectionFailed as error:
                if error.answered:
                    self._unsend()  # it did nothing
                raise
            except MeteorError:
                self._unsend()
                raise
            self._apply(answer, started, left=leave and last, entry=entry)
            if last:
                return answer
        raise ConnectionFailed(
            f"The server does not agree with this consumer of {self.books.group!r} about its steps."
        )

    def _take_part(self) -> bool:
        """Take what the next step says; whether that is all.

        Acknowledgements come first: one that was made before a rewind counts.
        """
        with self.state:
            acks, more = self._acks, dict[bytes, list[int]]()
            others = self._others
            if sum(map(len, acks.values())) > _ACKS_MAX:
                acks, more = _split(acks, _ACKS_MAX)
                others = []
            others = others[:_OTHERS_MAX]
            self._sent = acks, others
            self._acks, self._others, self._told = more, self._others[len(others) :], False
            self._in_doubt = True  # until there is an answer
            return not (self._acks or self._others)

    def _apply(self, answer: Answer, started: float, *, left: bool, entry: Entry | None) -> None:
        with self.state:
            # What was rewound took with it whatever of its group was not fetched yet.
            if self.granted and self._rewinds(self._sent[1]):
                self._stale = True
            self._sent = {}, []
            self._number += 1
            self.spoke_at = started
            self.valid_until = started + self.config.lease_ttl * BELIEF
            for offset in answer.granted:
                self.granted[offset] = answer.failures.get(offset, 0)
            self._refused += answer.refused
            for first, last in answer.lost:
                self._lost.add(first, last, entry.cause if entry and entry.covers(first) else None)
            # One that is not published within a lease is told again.
            self.letters += [letter for letter in answer.letters if letter not in self.letters]
            if left:
                self._take_all()
                self._consumer, self._left = "", True
            self._in_doubt = False  # last: a Ctrl-C may come in between
        for offset, failures in answer.dropped:
            _log.warning(
                "Record %d of stream %r was given up by shared group %r after %d failures, and "
                "there is no dead_letter stream for it.",
                *(offset, self.books.stream.name, self.books.group, failures),
            )

    def _stand(self, connection: Connection) -> None:
        """Be a consumer, and know the number of the last step and what is held."""
        if self._left:  # another thread was waiting for the line meanwhile
            raise ConnectionFailed(f"This consumer of {self.books.group!r} has left.")
        if self._consumer and not (self._in_doubt or self._stale):
            return
        try:
            if self._consumer:
                self._compare(self.books.join(connection, self._consumer))
                return
        except Refused:
            self._be_fenced()
        consumer = secrets.token_hex(6)
        self._number = self.books.join(connection, consumer, self.name).number
        self._consumer, self._in_doubt, self._stale = consumer, False, False

    def _compare(self, stand: Stand) -> None:
        number, held, failures = stand
        with self.state:
            if number <= self._number:
                self._unsend()  # that step was not taken, or the server has lost it
            self._sent, self._number = ({}, []), number
            theirs = {offset for offsets in held.values() for offset in offsets}
            for offsets in self._acks.values():
                theirs.difference_update(offsets)
            theirs.difference_update(other.offset for other in self._others)
            for group, offset in self._rewinds(self._others).items():
                theirs.difference_update(o for o in held.get(group, ()) if o > offset)
            for offset in [offset for offset in self._held if offset not in theirs]:
                self._drop(self._held[offset], Standing.TAKEN)
            for offset in [offset for offset in self.granted if offset not in theirs]:
                del self.granted[offset]
            for offset in sorted(theirs - self._held.keys() - self.granted.keys()):
                self.granted[offset] = failures.get(offset, 0)
            self._in_doubt, self._stale = False, False  # last: a Ctrl-C may come in between

    def _be_fenced(self) -> None:
        """Taken for dead: nothing is held any more, and what was not said will not count."""
        with self.state:
            for acks, others in (self._sent, (self._acks, self._others)):
                self._refused += [offset for offsets in acks.values() for offset in offsets]
                self._refused += [other.offset for other in others if other.kind not in "GDL"]
            self._sent, self._acks, self._others = ({}, []), {}, []
            self._take_all()
            self._consumer, self._in_doubt, self._stale = "", False, False

    def _name_lost(self, connection: Connection) -> None:
        """Find the groups of records that could not be fetched."""
        if not any(other.kind == "G" and not other.group for other in self._others):
            return
        try:
            held = self.books.join(connection, self._consumer).held
        except Refused:
            self._be_fenced()
            self._stand(connection)
            return
        groups = {offset: group for group, offsets in held.items() for offset in offsets}
        with self.state:
            self._others = [
                other._replace(group=groups[other.offset]) if other.kind == "G" else other
                for other in self._others
                if other.kind != "G" or other.offset in groups
            ]

    def _unsend(self) -> None:
        """What was sent did not count: it is to be said again, before the rest."""
        with self.state:
            acks, others = self._sent
            for group, offsets in self._acks.items():
                acks.setdefault(group, []).extend(offsets)
            self._acks, self._others = acks, others + self._others
            self._sent, self._in_doubt = ({}, []), False

    # -- inside, with the lock held ------------------------------------------------------------

    def _say(self) -> None:
        """Let the tender say what was settled, and whoever waits for room look."""
        if not self._told or self.waits_for_room:
            self._told = True
            self.state.notify_all()

    def _group_of(self, record: Record) -> bytes:
        group = self._grouping.key_of(record)
        if group:
            return group
        if self.config.ungrouped == "free":
            return b"\0%d" % record.offset
        return self.config.default_group.encode()

    def _leave(self, record: SharedRecord) -> None:
        """It is settled, if it was held."""
        if self._disowned:
            raise reply_errors.of_parent(self.books.stream.name)
        if record.standing is Standing.SETTLED:
            raise ValueError(f"Record {record.offset} was settled before.")
        if record.standing is not Standing.HELD:
            raise reply_errors.taken(self.books.stream.name, self.books.group, [record.offset])
        self._drop(record, Standing.SETTLED)
        self.alive_at = now()

    def _rewind(self, record: SharedRecord) -> None:
        """Those behind it in its group go back with it."""
        for offset in list(self._groups.get(record.group, ())):
            if offset > record.offset and offset in self._held:
                self._drop(self._held[offset], Standing.REWOUND)

    def _rewinds(self, others: Iterable[Settlement]) -> dict[bytes, int]:
        """The groups that some settlements rewind, and where to."""
        found: dict[bytes, int] = {}
        for kind, group, offset, _ in others:
            if kind in "RU" or (kind == "X" and self.config.on_poison == "park"):
                found[group] = min(found.get(group, offset), offset)
        return found

    def _drop(self, record: SharedRecord, standing: Standing) -> None:
        record.standing = standing
        self._held.pop(record.offset, None)  # a signal handler may have closed in between
        offsets = self._groups.get(record.group, [])
        if record.offset in offsets:
            offsets.remove(record.offset)
        if not offsets:
            self._groups.pop(record.group, None)

    def _take_all(self) -> None:
        for record in list(self._held.values()):
            self._drop(record, Standing.TAKEN)
        self.granted.clear()


def _split(
    acks: dict[bytes, list[int]], size: int
) -> tuple[dict[bytes, list[int]], dict[bytes, list[int]]]:
    """So many of the offsets, and the rest."""
    part: dict[bytes, list[int]] = {}
    rest: dict[bytes, list[int]] = {}
    for group, offsets in acks.items():
        if size > 0:
            part[group] = offsets[:size]
        if len(offsets) > size:
            rest[group] = offsets[size:]
        size = max(size - len(offsets), 0)
    return part, rest


def insort_offset(offsets: list[int], offset: int) -> None:
    """Add an offset; it mostly is the highest."""
    offsets.append(offset)
    if len(offsets) > 1 and offsets[-2] > offset:
        offsets.sort()
