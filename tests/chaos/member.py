"""A group member that reads, confirms, and sometimes leaves, hangs or dies on its own.

Some members poll and confirm batches; others iterate and confirm every few records. All of them
record a delivery before they confirm it, so an unrecorded delivery is always repeated.
"""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections import deque
from typing import NamedTuple

import meteor_py as meteor
from tests.chaos.archiving import UNAVAILABLE
from tests.chaos.history import Kind, Writer, now, value_of
from tests.chaos.process import DIED
from tests.chaos.worker_config import STREAM, RunSignals, WorkerConfig

#: Seconds within which a confirm must have an outcome.
OUTCOME_S = 40.0
#: Maximum seconds to handle a batch.
HANDLE_S = 0.005
#: Probabilities that a member leaves for a while, that it opens another subscriber, and that a
#: member of the worker dies: per polled batch or, for members that iterate, per 20 records.
LEAVE = 0.01
REOPEN = 0.005
DIE = 0.001

#: Errors that a member gets when it loses its server, its connection or its lease.
EXPECTED = (meteor.ConnectionFailed, meteor.LeaseLost, meteor.OutcomeUnknown)

RECORDS = (1, 7, 100, 10_000)


class PendingConfirm(NamedTuple):
    """A confirm whose outcome has not been recorded yet."""

    number: int
    began: int
    term: int
    offset: int
    ack: meteor.Ack


class Member(threading.Thread):
    """A thread that runs one member after another, each with a unique name."""

    def __init__(
        self,
        config: WorkerConfig,
        group: str,
        client: meteor.Client,
        writer: Writer,
        signals: RunSignals,
        rng: random.Random,
    ) -> None:
        super().__init__(name=f"member-{group}", daemon=True)
        self.group = group
        self.who = ""
        self._config = config
        self._client = client
        self._writer = writer
        self._signals = signals
        self._rng = rng
        self._incarnation = 0
        self._lock = threading.RLock()  # guards the fields below, which the main thread uses too
        self._subscriber: meteor.Subscriber | None = None
        self._assigned = -1  # the term in the last call of on_assigned; -1 if none
        self._delivered = (-1, -1)  # the term of the last delivery, and the offset after it
        self._confirmed = -1  # the highest offset that the member asked to confirm in that term
        self._pending: deque[PendingConfirm] = deque()
        self._number = 0

    def run(self) -> None:
        while not self._signals.end():
            try:
                self._live()
            except EXPECTED:
                time.sleep(0.05)
            except Exception as error:
                # At the end of the run, interrupt() closes the subscriber during a call.
                if not (self._signals.end() and isinstance(error, meteor.MeteorError)):
                    self._note("error", text=traceback.format_exc(limit=-4))
                time.sleep(0.5)

    def interrupt(self) -> None:
        """Close the subscriber from another thread, to end a loop that waits for a record."""
        with self._lock:
            subscriber = self._subscriber
        if subscriber is not None:
            try:
                subscriber.close()
            except meteor.MeteorError:
                pass  # the member's own thread handles errors when it closes the subscriber

    def confirm_rest(self) -> None:
        """Confirm all deliveries from another thread: the member may be waiting for records."""
        with self._lock:
            subscriber, (term, end) = self._subscriber, self._delivered
            if subscriber is not None and subscriber.term == term and self._confirmed < end:
                self._confirm(subscriber, end)
            self._collect()

    # One member

    def _live(self) -> None:
        self._incarnation += 1
        self.who = f"{self._config.name}.{self.group}.{self._incarnation}"
        stream = self._client.stream(STREAM, create=False)
        silence_s = self._rng.choice((0.5, 1.0, 2.0, 60.0))
        subscriber = stream.subscriber(
            group=self.group,
            initial_offset="earliest",
            lease_ttl=self._config.lease_ttl_s,
            max_poll_interval=silence_s,
            on_assigned=self._on_assigned if self._rng.random() < 0.7 else None,
            on_gap_skipped=self._on_gap,
        )
        with self._lock:
            self._subscriber = subscriber
            self._delivered, self._confirmed, self._assigned = (-1, -1), -1, -1
        try:
            if self._rng.random() < 0.6:
                self._poll(subscriber, silence_s)
            else:
                self._iterate(subscriber, silence_s)
        finally:
            self._leave(subscriber)

    def _leave(self, subscriber: meteor.Subscriber) -> None:
        with self._lock:
            self._subscriber = None
        try:
            subscriber.close()
        except EXPECTED:
            pass
        finally:
            self._collect(wait=True)
            self._note("released")

    def _poll(self, subscriber: meteor.Subscriber, silence_s: float) -> None:
        while not self._signals.end():
            began = now()
            try:
                batch = subscriber.poll(self._rng.choice((0.02, 0.3)), self._rng.choice(RECORDS))
            except meteor.RecordsLost as error:
                self._skip(subscriber, error)
                continue
            except EXPECTED as error:
                self._note("lease_lost", text=type(error).__name__)
                continue
            except UNAVAILABLE as error:
                self._wait_for_store(error, began)
                continue
            if batch:
                with self._lock:
                    self._take(subscriber, batch.first_offset, batch.values(), began)
                self._handle(silence_s)
            with self._lock:
                if batch and (self._signals.calm() or self._rng.random() < 0.9):
                    self._confirm_some(subscriber, batch)
                self._collect()
            if batch and self._had_enough(subscriber):
                return

    def _confirm_some(self, subscriber: meteor.Subscriber, batch: meteor.RecordBatch) -> None:
        """Confirm a batch, in one of two ways, or only part of it."""
        way = self._rng.random()
        if way < 0.6 or self._signals.calm():
            self._confirm(subscriber, None)
        elif way < 0.8:
            self._confirm(subscriber, batch[len(batch) - 1])
        else:
            self._confirm(subscriber, batch[self._rng.randrange(len(batch))])
        if self._rng.random() < 0.1 and self._pending:
            self._pending[-1].ack.exception(OUTCOME_S)

    def _iterate(self, subscriber: meteor.Subscriber, silence_s: float) -> None:
        every = self._rng.choice((1, 10, 100))
        while not self._signals.end():
            began = now()
            try:
                if self._iterate_on(subscriber, silence_s, every):
                    return
            except meteor.RecordsLost as error:
                self._skip(subscriber, error)
            except EXPECTED as error:
                self._note("lease_lost", text=type(error).__name__)
            except UNAVAILABLE as error:
                self._wait_for_store(error, began)

    def _iterate_on(self, subscriber: meteor.Subscriber, silence_s: float, every: int) -> bool:
        """Take records one by one until the member leaves or the subscriber ends; return True."""
        began = now()
        for record in subscriber:
            with self._lock:
                self._take(subscriber, record.offset, [record.value], began)
            if record.offset % 20 == 0:
                self._handle(silence_s)
            with self._lock:
                if record.offset % every == 0:
                    self._confirm(subscriber, record if self._rng.random() < 0.5 else None)
                self._collect()
            if record.offset % 20 == 0 and self._had_enough(subscriber):
                return True
            began = now()
        return True

    def _skip(self, subscriber: meteor.Subscriber, lost: meteor.RecordsLost) -> None:
        """Skip a gap. Skipping confirms it, so record it first."""
        self._note("missing", term=self._term(subscriber), first=lost.first, last=lost.last)
        try:
            subscriber.skip_gap()
        except EXPECTED as error:
            self._note("lease_lost", text=type(error).__name__)

    def _wait_for_store(self, error: Exception, began: int) -> None:
        self._note("unavailable", began=began, text=repr(error))
        time.sleep(0.05)

    def _handle(self, silence_s: float) -> None:
        """Simulate handling: take some time, sometimes too much, and occasionally die."""
        time.sleep(self._rng.uniform(0, HANDLE_S))
        if self._signals.calm():
            return
        chance = self._rng.random()
        if chance < DIE / len(self._config.groups):
            os._exit(DIED)
        if chance > 1 - self._config.hang:
            time.sleep(min(silence_s, 2.0) * 1.2)

    def _had_enough(self, subscriber: meteor.Subscriber) -> bool:
        """Sometimes leave the group for a while. Return whether to close the subscriber."""
        chance = 1.0 if self._signals.calm() else self._rng.random()
        if chance < LEAVE:
            subscriber.deactivate()
            self._note("released")
            time.sleep(self._rng.uniform(0, 0.5))
            subscriber.reactivate()
        return LEAVE <= chance < LEAVE + REOPEN

    # Recording

    def _take(
        self, subscriber: meteor.Subscriber, first: int, values: list[bytes], began: int
    ) -> None:
        term = self._term(subscriber, first)
        names = [value_of(value) for value in values]
        self._note("deliver", term=term, first=first, values=names, began=began)
        if term != self._delivered[0]:
            self._confirmed = -1
        self._delivered = (term, first + len(values))

    def _term(self, subscriber: meteor.Subscriber, first: int = -1) -> int:
        """Return the term of the last delivery; -1 if it is unknown.

        The subscriber may already know that the term has ended, and then has no current term.
        """
        term = subscriber.term
        if term is not None:
            return term
        if self._assigned >= 0:
            return self._assigned
        return self._delivered[0] if self._delivered[1] == first else -1

    def _confirm(self, subscriber: meteor.Subscriber, what: meteor.Record | int | None) -> None:
        """Confirm a record, all records below an offset, or, for None, all deliveries."""
        term, end = self._delivered
        if isinstance(what, meteor.Record):
            end, what = what.offset + 1, what
        elif what is not None:
            end, what = what, what - 1
        self._number += 1
        asked = self._note("confirm", term=term, first=end, number=self._number)
        try:
            ack = subscriber.confirm(what)
        except meteor.LeaseLost as error:
            self._note("refused", term=term, first=end, number=self._number, text=repr(error))
        except ValueError as error:  # only a lost lease may prevent confirming a delivery
            self._note("error", text=f"confirm of {end} in term {term} failed: {error!r}")
        else:
            self._confirmed = max(self._confirmed, end)
            self._pending.append(PendingConfirm(self._number, asked, term, end, ack))

    def _collect(self, *, wait: bool = False) -> None:
        """Record the outcomes of completed confirms or, with ``wait``, of all confirms."""
        while self._pending and (wait or self._pending[0].ack.done()):
            asked = self._pending.popleft()
            error = asked.ack.exception(OUTCOME_S)
            kind: Kind = "confirmed" if error is None else "refused"
            self._note(
                kind,
                term=asked.term,
                number=asked.number,
                began=asked.began,
                first=asked.ack.result(0) if error is None else asked.offset,
                text="" if error is None else type(error).__name__,
            )
            if error is not None and not isinstance(error, EXPECTED):
                self._note("error", text=f"confirm of {asked.offset} failed: {error!r}")

    def _on_assigned(self, subscriber: meteor.Subscriber) -> None:
        term = subscriber.term
        self._assigned = -1 if term is None else term
        if term is not None:  # otherwise the term has already ended
            self._note("assigned", term=term, first=subscriber.position)

    def _on_gap(self, first: int, last: int) -> None:
        assert self._subscriber is not None
        self._note("gap", term=self._term(self._subscriber, first), first=first, last=last)

    def _note(self, kind: Kind, **fields: object) -> int:
        event = self._writer.add(kind, who=self.who, group=self.group, **fields)
        return event.t
