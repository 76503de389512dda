"""A member of a group: reads, confirms, and now and then leaves, hangs or dies of its own accord.

Some poll and confirm batches, some iterate and confirm every so many records. All of them write
down what they were given before they confirm it, so what nobody has written down is read again.
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
from tests.chaos.orders import STREAM, Orders, Signs
from tests.chaos.process import DIED

#: Seconds after which a confirm must have been answered, one way or the other.
ANSWER_S = 40.0
#: The longest time that handling takes.
HANDLE_S = 0.005
#: How often, of the batches or records handled.
LEAVE = 0.01
REOPEN = 0.005
DIE = 0.001

#: What a member meets when its server, its connection or its lease goes away.
EXPECTED = (meteor.ConnectionFailed, meteor.LeaseLost)

RECORDS = (1, 7, 100, 10_000)


class Asked(NamedTuple):
    """A confirm whose outcome has not been written down."""

    number: int
    began: int
    term: int
    offset: int
    ack: meteor.Ack


class Member(threading.Thread):
    """One member after the other, in a thread: each has a name that is not used again."""

    def __init__(
        self,
        orders: Orders,
        group: str,
        client: meteor.Client,
        writer: Writer,
        signs: Signs,
        rng: random.Random,
    ) -> None:
        super().__init__(name=f"member-{group}", daemon=True)
        self.group = group
        self.who = ""
        self._orders = orders
        self._client = client
        self._writer = writer
        self._signs = signs
        self._rng = rng
        self._lives = 0
        self._lock = threading.RLock()  # of what follows: the main thread confirms the rest
        self._subscriber: meteor.Subscriber | None = None
        self._assigned = -1  # the term that on_assigned has named last
        self._given = (-1, -1)  # the term of the last record handed out, and the offset behind it
        self._confirmed = -1  # asked to be confirmed, of that term
        self._asked: deque[Asked] = deque()
        self._number = 0

    def run(self) -> None:
        while not self._signs.end():
            try:
                self._live()
            except EXPECTED:
                time.sleep(0.05)
            except Exception as error:
                # At the end it is closed under its feet.
                if not (self._signs.end() and isinstance(error, meteor.MeteorError)):
                    self._note("error", text=traceback.format_exc(limit=-4))
                time.sleep(0.5)

    def interrupt(self) -> None:
        """Close what it has, from another thread: ends a loop that waits for a record."""
        with self._lock:
            subscriber = self._subscriber
        if subscriber is not None:
            try:
                subscriber.close()
            except meteor.MeteorError:
                pass  # the member's own close() is told as well

    def confirm_rest(self) -> None:
        """Confirm what was handed out, from another thread: its own may wait for more records."""
        with self._lock:
            subscriber, (term, end) = self._subscriber, self._given
            if subscriber is not None and subscriber.term == term and self._confirmed < end:
                self._confirm(subscriber, end)
            self._collect()

    # One life

    def _live(self) -> None:
        self._lives += 1
        self.who = f"{self._orders.name}.{self.group}.{self._lives}"
        stream = self._client.stream(STREAM, create=False)
        silence_s = self._rng.choice((0.5, 1.0, 2.0, 60.0))
        subscriber = stream.subscriber(
            group=self.group,
            initial_offset="earliest",
            lease_ttl=self._orders.lease_ttl_s,
            max_poll_interval=silence_s,
            on_assigned=self._on_assigned if self._rng.random() < 0.7 else None,
            on_gap_skipped=self._on_gap,
        )
        with self._lock:
            self._subscriber = subscriber
            self._given, self._confirmed, self._assigned = (-1, -1), -1, -1
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
        while not self._signs.end():
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
                if batch and (self._signs.calm() or self._rng.random() < 0.9):
                    self._confirm_some(subscriber, batch)
                self._collect()
            if batch and self._had_enough(subscriber):
                return

    def _confirm_some(self, subscriber: meteor.Subscriber, batch: meteor.RecordBatch) -> None:
        """All of a batch, in one of two ways, or a part of it."""
        way = self._rng.random()
        if way < 0.6 or self._signs.calm():
            self._confirm(subscriber, None)
        elif way < 0.8:
            self._confirm(subscriber, batch[len(batch) - 1])
        else:
            self._confirm(subscriber, batch[self._rng.randrange(len(batch))])
        if self._rng.random() < 0.1 and self._asked:
            self._asked[-1].ack.exception(ANSWER_S)

    def _iterate(self, subscriber: meteor.Subscriber, silence_s: float) -> None:
        every = self._rng.choice((1, 10, 100))
        while not self._signs.end():
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
        """Take records one by one until something comes between; whether to close."""
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
        """Go on behind a gap, which is confirmed by that: so it is written down before."""
        self._note("missing", term=self._term(subscriber), first=lost.first, last=lost.last)
        try:
            subscriber.skip_gap()
        except EXPECTED as error:
            self._note("lease_lost", text=type(error).__name__)

    def _wait_for_store(self, error: Exception, began: int) -> None:
        self._note("unavailable", began=began, text=repr(error))
        time.sleep(0.05)

    def _handle(self, silence_s: float) -> None:
        """Take some time; now and then too long; or die of it."""
        time.sleep(self._rng.uniform(0, HANDLE_S))
        if self._signs.calm():
            return
        chance = self._rng.random()
        if chance < DIE / len(self._orders.groups):
            os._exit(DIED)
        if chance > 1 - self._orders.hang:
            time.sleep(min(silence_s, 2.0) * 1.2)

    def _had_enough(self, subscriber: meteor.Subscriber) -> bool:
        """Now and then leave the group for a while; tell whether to close."""
        chance = 1.0 if self._signs.calm() else self._rng.random()
        if chance < LEAVE:
            subscriber.deactivate()
            self._note("released")
            time.sleep(self._rng.uniform(0, 0.5))
            subscriber.reactivate()
        return LEAVE <= chance < LEAVE + REOPEN

    # What is written down

    def _take(
        self, subscriber: meteor.Subscriber, first: int, values: list[bytes], began: int
    ) -> None:
        term = self._term(subscriber, first)
        names = [value_of(value) for value in values]
        self._note("deliver", term=term, first=first, values=names, began=began)
        if term != self._given[0]:
            self._confirmed = -1
        self._given = (term, first + len(values))

    def _term(self, subscriber: meteor.Subscriber, first: int = -1) -> int:
        """The term to which what was just handed out belongs; -1 if that cannot be told.

        Its end may be known already, while this record was still handed out in it.
        """
        term = subscriber.term
        if term is not None:
            return term
        if self._assigned >= 0:
            return self._assigned
        return self._given[0] if self._given[1] == first else -1

    def _confirm(self, subscriber: meteor.Subscriber, what: meteor.Record | int | None) -> None:
        """Confirm a record, or all below an offset, or (None) all that was given."""
        term, end = self._given
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
        except ValueError as error:  # what was given can be confirmed, or the lease is lost
            self._note("error", text=f"A confirm of {end} in term {term}: {error!r}")
        else:
            self._confirmed = max(self._confirmed, end)
            self._asked.append(Asked(self._number, asked, term, end, ack))

    def _collect(self, *, wait: bool = False) -> None:
        """Write down what became of the confirms that are done; of all, if told to wait."""
        while self._asked and (wait or self._asked[0].ack.done()):
            asked = self._asked.popleft()
            error = asked.ack.exception(ANSWER_S)
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
                self._note("error", text=f"A confirm of {asked.offset}: {error!r}")

    def _on_assigned(self, subscriber: meteor.Subscriber) -> None:
        term = subscriber.term
        self._assigned = -1 if term is None else term
        if term is not None:  # else it is over already, and will be followed by another
            self._note("assigned", term=term, first=subscriber.position)

    def _on_gap(self, first: int, last: int) -> None:
        assert self._subscriber is not None
        self._note("gap", term=self._term(self._subscriber, first), first=first, last=last)

    def _note(self, kind: Kind, **fields: object) -> int:
        event = self._writer.add(kind, who=self.who, group=self.group, **fields)
        return event.t
