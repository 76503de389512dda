"""The records that a consumer in a shared group holds, and the settlements that it has not sent."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter

from meteor_py.shared.protocol import Entry, Settlement, StepReply, StepReport, StepRequest
from meteor_py.shared.record import SharedRecord, Standing

#: Maximum numbers per step: records in the batches to acknowledge, other settlements, and batches
#: that these other settlements refer to. Steps must be short, because the server runs nothing else
#: during a step.
_ACKS_MAX = 512
_OTHERS_MAX = 128
_OTHER_BATCHES_MAX = 32
#: The maximum number of step numbers to leave out after a failover. Numbers go up to 2**53.
_SKIP_MAX = 2**32


_HELD, _SETTLED = Standing.HELD, Standing.SETTLED  # looking up an enum member is slower


class DeliveryBatch:
    """Up to 32 records that the server granted together. Settlements refer to it by number."""

    __slots__ = ("acked", "number", "open")

    def __init__(self, number: int, offsets: Iterable[int]) -> None:
        self.number = number
        #: The offsets still in the server's copy of this batch, as far as the consumer knows.
        self.open = set(offsets)
        #: Offsets whose acknowledgements have not been sent yet.
        self.acked: list[int] = []


class Holdings:
    """One consumer's records and settlements, from the grant to the server's confirmation.

    This class has no I/O and no locks. ``Deliveries`` guards it with its lock.
    """

    def __init__(self, *, reject_rewinds: bool) -> None:
        """Start without any records.

        Args:
            reject_rewinds: Whether rejecting a record stops its ordering key, so that later records
                of the key are returned (``on_poison="park"``).
        """
        #: Number of the last step that the server is known to have executed.
        self.number = 0
        # How many numbers the next step leaves out. If two servers continue the group after a
        # failover, they must not assign the same numbers to different steps and batches.
        self._skip = 0
        #: The step whose reply has not been applied yet; set during each step, and after a lost
        #: reply.
        self.request: StepRequest | None = None
        #: Failure count of each granted record that has not been fetched yet, by offset.
        self.granted: dict[int, int] = {}
        self._reject_rewinds = reject_rewinds
        self._batches: dict[int, DeliveryBatch] = {}
        self._batch_of: dict[int, DeliveryBatch] = {}  # by offset of a granted or held record
        self._held: dict[int, SharedRecord] = {}
        self._receipts = 0  # how many records have ever been added to _held
        # An index of _held by ordering key, built when _receipts had the value _indexed. Only
        # rewinds need it, so a rewind builds it. Records that are no longer held may remain in it.
        self._by_key: dict[bytes, list[SharedRecord]] = {}
        self._indexed = 0
        self._dirty: dict[DeliveryBatch, None] = {}  # batches with unsent acknowledgements
        self._others: list[Settlement] = []
        # Keys that were rewound before all their granted records were fetched. The value is the
        # offset to which the key was rewound, and the last batch granted before the rewind.
        self._rewound: dict[bytes, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Return the number of records held, fetched or not."""
        return len(self._held) + len(self.granted)

    @property
    def queued(self) -> bool:
        """Whether there are settlements that no step has sent."""
        return bool(self._dirty or self._others)

    @property
    def unsent(self) -> bool:
        """Whether there are settlements that may not have reached the server."""
        request = self.request
        return self.queued or bool(request and (request.acks or request.settlements))

    def held(self) -> Collection[SharedRecord]:
        """Return the records that are held and fetched."""
        return self._held.values()

    # -- receiving and settling ----------------------------------------------------------------

    def receive(self, fetched: Iterable[SharedRecord]) -> list[SharedRecord]:
        """Hold the granted records that were fetched, and return them.

        Leaves out records that this consumer no longer holds. Returns records to the group if they
        were rewound with an earlier record of their key.
        """
        received: list[SharedRecord] = []
        granted, batch_of, held = self.granted, self._batch_of, self._held
        for record in fetched:
            offset = record.offset
            if offset not in granted:
                continue
            # The first condition may be false because a signal handler's close() has returned the
            # record, the second because a Ctrl-C interrupted an earlier call between these lines.
            if offset in batch_of and offset not in held:
                if self._rewound and self._was_rewound(record):
                    self._return(offset)
                else:
                    held[offset] = record
                    self._receipts += 1
                    received.append(record)
            granted.pop(offset, None)
        if not granted:
            self._rewound.clear()
        return received

    def _was_rewound(self, record: SharedRecord) -> bool:
        """Whether a record was granted before its key was rewound to an earlier record."""
        to, last = self._rewound.get(record.ordering_key, (record.offset, 0))
        batch = self._batch_of.get(record.offset)
        return record.offset > to and batch is not None and batch.number <= last

    def lose(self, offset: int) -> bool:
        """Settle a granted record that cannot be fetched; return whether it was still granted."""
        if self.granted.pop(offset, None) is None:
            return False
        batch = self._batch_of.pop(offset)
        self._others.append(Settlement("G", batch.number, (offset,)))
        return True

    def ack(self, records: Iterable[SharedRecord]) -> None:
        """Acknowledge those of the records that are held."""
        # This repeats the code of _drop, because a call for every record would take longer.
        held, batch_of, dirty = self._held, self._batch_of, self._dirty
        for record in records:
            if record.standing is not _HELD:
                continue
            offset = record.offset
            record.standing = _SETTLED
            held.pop(offset, None)
            batch = batch_of.pop(offset, None)
            if batch is not None:  # else a signal handler's close() has returned it
                batch.acked.append(offset)
                dirty[batch] = None

    def settle(
        self, record: SharedRecord, kind: str, detail: bytes, *, alone: bool = False
    ) -> None:
        """Release or reject a held record. ``kind`` is "R", "U" or "X" (see ``Settlement``).

        Some settlements rewind the record's ordering key, so that later records of the key are
        returned with it. These are "R" and "U" unless ``alone`` is true, and "X" if rejecting stops
        the key.
        """
        offset, key = record.offset, record.ordering_key
        batch = self._batch_of.get(offset)
        self._drop(record, Standing.SETTLED)
        if batch is None:
            return  # a signal handler's close() has returned it
        rewinds = not alone if kind in "RU" else kind == "X" and self._reject_rewinds
        rewound = key if rewinds else None
        self._others.append(Settlement(kind, batch.number, (offset,), detail, rewound))
        if rewinds:
            for other in self._held_after(offset, key):
                self._drop(other, Standing.REWOUND, keep_batch=True)
                self._return(other.offset)
            if self.granted or self.request is not None:
                to = min(offset, self._rewound.get(key, (offset, 0))[0])
                self._rewound[key] = (to, max(self._batches, default=0))

    def _held_after(self, offset: int, key: bytes) -> list[SharedRecord]:
        """Return the held records of a key after an offset, in order."""
        while self._indexed != self._receipts:  # a signal handler may receive more records
            receipts, by_key = self._receipts, dict[bytes, list[SharedRecord]]()
            for record in list(self._held.values()):  # a list: a signal handler may settle some
                by_key.setdefault(record.ordering_key, []).append(record)
            self._by_key, self._indexed = by_key, receipts
        later = [record for record in self._by_key.get(key, ()) if record.offset > offset]
        return sorted((r for r in later if r.offset in self._held), key=attrgetter("offset"))

    def add(self, settlement: Settlement) -> None:
        """Queue the settlement of a record that is not held here, such as that of a dead letter."""
        self._others.append(settlement)

    # -- steps ---------------------------------------------------------------------------------

    def begin_step(
        self, want: int, mode: str = "", entry: Entry | None = None
    ) -> tuple[StepRequest, bool]:
        """Return the next step, and whether it includes everything that has to be sent.

        If the reply to the last step was lost, this returns the same step again. Of several steps,
        only the one that sends the last settlements claims records. Acknowledgements come first,
        because an acknowledgement that was made before a rewind must take effect.
        """
        if self.request is not None:
            self._clear_sent(self.request)  # a Ctrl-C may have interrupted the first call
            return self.request, False
        acks: list[int] = []
        partial: list[Settlement] = []
        size = 0
        for batch in list(self._dirty):  # a copy: a signal handler may flush
            if size and size + len(batch.open) > _ACKS_MAX:
                break
            size += len(batch.open)  # the server reads the whole batch, even to ack a part of it
            if len(batch.acked) == len(batch.open):
                acks.append(batch.number)
            else:
                partial.append(Settlement("A", batch.number, tuple(batch.acked)))
        sent = [*acks, *(settlement.batch for settlement in partial)]
        last = len(sent) == len(self._dirty)
        others = self._next_others() if last else []
        last = last and len(others) == len(self._others)
        request = StepRequest(
            self.number + 1 + self._skip,
            want if last else 0,
            mode if last else "",
            tuple(acks),
            (*partial, *others),
            entry if last else None,
            self._skip,
        )
        self.request = request  # after a Ctrl-C from here on, the step is sent again
        self._clear_sent(request)
        return request, last

    def _next_others(self) -> list[Settlement]:
        """Return the first settlements in the queue, as many as fit in one step."""
        batches: set[int] = set()
        for number, other in enumerate(self._others[:_OTHERS_MAX]):
            batches.add(other.batch)
            if len(batches) > _OTHER_BATCHES_MAX:
                return self._others[:number]
        return self._others[:_OTHERS_MAX]

    def _clear_sent(self, request: StepRequest) -> None:
        """Remove a request's settlements from the queues. A second call changes nothing."""
        sent = dict.fromkeys(request.acks)  # the value None stands for the whole batch
        partial = {one.batch: {*one.offsets} for one in request.settlements if one.kind == "A"}
        for number, offsets in {**sent, **partial}.items():
            batch = self._batches.get(number)
            if batch is not None:
                batch.acked = [o for o in batch.acked if offsets is not None and o not in offsets]
                if not batch.acked:
                    self._dirty.pop(batch, None)
        others = {id(one) for one in request.settlements}
        self._others = [one for one in self._others if id(one) not in others]

    def apply(self, reply: StepReply, request: StepRequest | None) -> None:
        """Apply the reply to a step. ``end_step`` must follow.

        If a Ctrl-C interrupts this method, the step is sent again, and its reply applied again.
        """
        if request is None or self.request is not request:
            return  # a signal handler has sent the step again and applied the reply
        self._close_sent(request)
        batch_of, granted = self._batch_of, self.granted
        for number, offsets in reply.batches.items():
            if number not in self._batches:
                batch = DeliveryBatch(number, offsets)
                for offset in offsets:
                    batch_of[offset] = batch
                    granted[offset] = 0
                self._batches[number] = batch
        for offset, failures in reply.report.failures.items():
            if offset in granted:
                granted[offset] = failures
        if self._rewound:
            last = max(self._batches, default=0)
            # These settlements were made after the step was sent, so they also rewind the records
            # that it granted.
            for other in self._others:
                if other.rewinds is not None and other.rewinds in self._rewound:
                    self._rewound[other.rewinds] = (self._rewound[other.rewinds][0], last)

    def end_step(self) -> None:
        """End the step, after its reply was applied here and in ``Deliveries``."""
        if self.request is not None:
            self.number = self.request.number
            self.request, self._skip = None, 0

    def withdraw_step(self) -> None:
        """Put the settlements of a step that changed nothing back at the front of the queue."""
        request, self.request = self.request, None
        if request is None:
            return
        others = [one for one in request.settlements if one.kind != "A"]
        for one in request.settlements:
            if one.kind == "A":
                self._acknowledge(self._batches.get(one.batch), one.offsets)
        for number in request.acks:
            batch = self._batches.get(number)
            self._acknowledge(batch, () if batch is None else tuple(batch.open))
        self._others = others + self._others

    def start(self) -> None:
        """Start over as a new consumer."""
        self.number, self.request, self._skip = 0, None, 0

    def reconcile(self, number: int, theirs: Mapping[int, list[int]]) -> list[int]:
        """Adopt the server's view of this consumer, after a failover has lost steps.

        Records that only this consumer lists are marked as taken. Records that only the server
        lists are granted again. Settlements of dead letters are dropped, because their offsets may
        now refer to other records.

        Returns:
            The offsets whose settlements are void.
        """
        self.withdraw_step()
        self.number, self._skip = number, 1 + secrets.randbelow(_SKIP_MAX)
        known = {(batch, offset) for batch, offsets in theirs.items() for offset in offsets}
        void: list[int] = []
        for batch in list(self._batches.values()):
            acked = [offset for offset in batch.acked if (batch.number, offset) in known]
            void += [offset for offset in batch.acked if (batch.number, offset) not in known]
            for offset in [o for o in batch.open if (batch.number, o) not in known]:
                self._take(offset)
                batch.open.discard(offset)
            batch.acked = acked
            if not acked:
                self._dirty.pop(batch, None)
            if not batch.open:
                self._batches.pop(batch.number, None)
        kept: list[Settlement] = []
        for other in self._others:
            if (other.batch, other.offsets[0]) in known:
                kept.append(other)
            else:
                void += other.asked
        self._others = kept
        pending = {offset for other in kept for offset in other.offsets}
        for batch_number, offsets in theirs.items():
            batch = self._batches.setdefault(batch_number, DeliveryBatch(batch_number, ()))
            batch.open = set(offsets)
            settled = {*batch.acked, *pending}
            for offset in offsets:
                if offset not in settled and offset not in self._held:
                    self._batch_of[offset] = batch
                    self.granted.setdefault(offset, 0)
        return void

    def fence(self, step: int, report: StepReport) -> tuple[list[int], list[int]]:
        """Drop all records and settlements, because the lease has expired.

        Args:
            step: The last step that the server executed; -1 if it does not know the consumer.
            report: The report of that step.

        Returns:
            The offsets whose settlements are void, and those whose settlements may have taken
            effect.
        """
        void, unknown = list[int](), list[int]()
        request = self.request
        if request is not None:
            sent = self._offsets_sent(request)
            if step == request.number:
                void += report.refused  # the step was executed before the lease expired
            elif step >= 0:
                void += sent
            else:
                unknown += sent
        for batch in list(self._dirty):
            void += batch.acked
        void += [offset for other in self._others for offset in other.asked]
        self.request, self._others = None, []
        self.take_all()
        return void, unknown

    def take_all(self) -> None:
        """Mark all records as taken: this consumer no longer holds them."""
        for record in list(self._held.values()):
            self._drop(record, Standing.TAKEN)
        # Empty the dicts instead of replacing them: in a signal handler, this may have interrupted
        # code that uses them.
        for each in (self.granted, self._batches, self._batch_of, self._dirty, self._rewound):
            each.clear()

    # -- dead letters --------------------------------------------------------------------------

    @property
    def has_letters(self) -> bool:
        """Whether any published dead letters remain to be settled."""
        return any(other.kind == "D" for other in self._others)

    def keep_letters(self, history: bytes) -> None:
        """Drop settlements of dead letters that were published in another replication history.

        A dead letter on another node has no history, and its settlement is kept. If ``history`` is
        empty, because it is unknown, all settlements are kept.
        """
        self._others = [
            other
            for other in self._others
            if other.kind != "D" or b"" in (other.detail, history) or other.detail == history
        ]

    def drop_letters(self) -> None:
        """Drop all settlements of dead letters. The server reassigns the letters that it has."""
        self._others = [other for other in self._others if other.kind not in "DL"]

    # -- internals -----------------------------------------------------------------------------

    def _return(self, offset: int) -> None:
        """Return a record without counting a failure."""
        batch = self._batch_of.pop(offset, None)
        if batch is not None:  # else a signal handler's close() has returned it
            self._others.append(Settlement("U", batch.number, (offset,), asked_for=False))

    def _acknowledge(self, batch: DeliveryBatch | None, offsets: Iterable[int]) -> None:
        if batch is not None:
            batch.acked = [*offsets, *batch.acked]
            self._dirty[batch] = None

    def _close_sent(self, request: StepRequest) -> None:
        for number in request.acks:
            self._batches.pop(number, None)
        for settlement in request.settlements:
            batch = self._batches.get(settlement.batch)
            if batch is not None:
                batch.open.difference_update(settlement.offsets)
                if not batch.open:
                    del self._batches[batch.number]

    def _offsets_sent(self, request: StepRequest) -> list[int]:
        closed = DeliveryBatch(0, ())  # stands for a batch that an interrupted ``apply`` removed
        sent = [o for number in request.acks for o in self._batches.get(number, closed).open]
        return sent + [offset for one in request.settlements for offset in one.asked]

    def _take(self, offset: int) -> None:
        record = self._held.get(offset)
        if record is not None:
            self._drop(record, Standing.TAKEN)
        self.granted.pop(offset, None)
        self._batch_of.pop(offset, None)

    def _drop(self, record: SharedRecord, standing: Standing, *, keep_batch: bool = False) -> None:
        record.standing = standing
        offset = record.offset
        self._held.pop(offset, None)  # a signal handler's close() may have dropped it
        if not keep_batch:
            self._batch_of.pop(offset, None)
