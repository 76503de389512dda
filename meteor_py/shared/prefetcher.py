"""The prefetcher of a consumer: claims records, fetches them, and buffers them for ``poll()``.

It also does what the server asks of a consumer on the way: it publishes dead letters, and puts into
the index what only the store has.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from meteor_py.errors import (
    ConnectionFailed,
    CorruptSegment,
    LogTruncated,
    MeteorError,
    OutOfMemory,
    StoreUnavailable,
    StreamFull,
    StreamNotFound,
)
from meteor_py.log.handle import StreamHandle
from meteor_py.records.codec import Codec
from meteor_py.redis import keys, reply_errors
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.shared.config import ConsumerConfig, SharedConfig
from meteor_py.shared.deliveries import Deliveries
from meteor_py.shared.frame_cache import FrameCache, entry_from_store
from meteor_py.shared.gaps import Gap
from meteor_py.shared.protocol import DeadLetter, Entry, SharedProtocol, StepReply
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.subscribe.dead_letters import bury, open_letters

_log = logging.getLogger(__name__)

#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)
#: Records that are claimed in a step at most: the server does nothing else meanwhile.
_CLAIM_MAX = 1_024
#: Rounds that a poll may take though its time is up, as long as each is done with some records that
#: are not for it; the next poll continues there.
_ROUNDS_MIN = 8
#: Times that what was granted is made sure of and fetched again, when some was rewound meanwhile.
_AGAIN = 5
#: Seconds that a full consumer waits before it logs a warning.
_STUCK_S = 10.0
_ID_MAX = 2**64 - 1


class Prefetcher:
    """For one thread at a time, except ``halt``."""

    def __init__(
        self,
        protocol: SharedProtocol,
        settings: SharedConfig,
        config: ConsumerConfig,
        codec: Codec | None,
        name: str,
    ) -> None:
        ordering_rule = protocol.stream.config.ordering_rule
        assert ordering_rule is not None, "checked when the group was opened"
        self.stream = protocol.stream
        self.group = protocol.group
        self.config = config
        self.settings = settings
        self.deliveries = Deliveries(protocol, settings, ordering_rule, codec, name)
        self._ordering_rule = ordering_rule
        self._frame_cache = FrameCache(protocol.stream)
        self._buffer: deque[SharedRecord] = deque()  # not handed out yet
        #: Handed out, and perhaps not settled.
        self.handed: list[SharedRecord] = []
        self._entry: Entry | None = None
        self._epoch = 0
        self._dead_letter_stream: StreamHandle | None = None
        self._postponed = -1  # the last dead letter that had to wait, so that it is logged once
        self._full_since: float | None = None
        self._asked = False  # whether the last claim was for more than nothing
        self._looked = -1
        #: Set by another thread to end what waits here, and iterating.
        self.halted = False

    def halt(self) -> None:
        """End a wait in another thread; nothing more is handed out."""
        self.halted = True
        with self.deliveries.condition:
            self.deliveries.condition.notify_all()

    def interrupt(self) -> None:
        self._frame_cache.interrupt()

    def close(self) -> None:
        self.deliveries.close()
        self._frame_cache.close()

    def fill(self, timeout_s: float) -> None:
        """Fetch records until the buffer has some or the timeout expires."""
        deadline = time.monotonic() + timeout_s
        failures = 0
        failure: MeteorError | None = None
        rounds = 0
        again = False
        while not self.halted:
            self.raise_refusals()
            self.deliveries.raise_failure()
            self._drop_unheld()
            if self._buffer and now() < self.deliveries.valid_until:
                return
            left = max(deadline - time.monotonic(), 0.0)
            if rounds and left == 0 and not (again and rounds < _ROUNDS_MIN):
                if failure is not None:
                    raise failure
                return
            rounds, again = rounds + 1, False
            try:
                reply = self._claim()
                again = reply is None
                if not self._buffer and reply is not None:
                    self._wait(reply, max(deadline - time.monotonic(), 0.0))
                failure, failures = None, 0
            except (ConnectionFailed, StoreUnavailable) as error:
                failure = error
                failures += 1
                time.sleep(
                    min(max(deadline - time.monotonic(), 0.0), pause_s(failures, *_BACKOFF_S))
                )

    def _claim(self) -> StepReply | None:
        """Exchange with the server, and fetch what was granted; None if that is to be repeated."""
        before = self._entry
        reply = self._claim_all()
        self._fetch(reply.epoch)
        for _ in range(_AGAIN):
            if not self.deliveries.holdings.unsure:
                break
            reply, self._asked = self.exchange(0), False  # what was rewound may be had again
            self._fetch(reply.epoch)
        self.publish_dead_letters()
        if reply.stored_stop and not self._buffer:
            self._entry = self._entry_from_store(reply)
            return None
        self._entry = before if reply.stored_stop else None
        done = self._buffer or not (reply.granted or self.deliveries.holdings.unsure)
        return reply if done else None  # all of them were lost

    def _claim_all(self) -> StepReply:
        """Claim as many records as may be held, in parts."""
        while True:  # ends: each time as much as was asked for is held
            room = max(self.config.prefetch - len(self.deliveries.holdings), 0)
            want = min(room, _CLAIM_MAX)
            reply = self.exchange(want)
            self._asked = want > 0
            if want == room or len(reply.granted) < want:
                return reply

    def _entry_from_store(self, reply: StepReply) -> Entry:
        try:
            return entry_from_store(self._frame_cache, self._ordering_rule, reply, self._entry)
        except CorruptSegment as error:  # their ordering keys are not known, so they are given up
            stop = min(max(error.last, reply.next) + 1, reply.stored_stop)
            return Entry(reply.next, (), stop, error)

    def exchange(self, want: int) -> StepReply:
        return self.deliveries.exchange(want, entry=self._entry)

    def _fetch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._frame_cache.forget()
        if not self.deliveries.holdings.granted:
            return
        received = self.deliveries.receive(
            *self._frame_cache.fetch(sorted(self.deliveries.holdings.granted))
        )
        self._buffer = deque(sorted([*self._buffer, *received], key=_offset))

    def _wait(self, reply: StepReply, left_s: float) -> None:
        """Wait until there may be something."""
        if self._buffer or left_s <= 0:
            return
        before, self._looked = self._looked, reply.next
        if before < reply.next < reply.end:
            return  # A step looks at a part of what is new, and more of it may be for this one.
        if len(self.deliveries.holdings) >= self.config.prefetch:
            self._wait_for_room(left_s)
            return
        self._full_since = None
        if not self._asked:
            return  # there was no room when it was claimed, and now there is
        block_s = left_s if reply.wait_s is None else min(left_s, reply.wait_s + 0.001)
        block_s = min(block_s, self.settings.lease_ttl / 3)
        streams = [(self.deliveries.protocol.key("bell"), f"{reply.bell}-0")]
        if reply.next >= reply.end:
            after = f"{reply.next - 1}-{_ID_MAX}" if reply.next else "0-0"
            streams.append((keys.index(self.stream.name), after))
        self._frame_cache.wait(streams, block_s)

    def _wait_for_room(self, left_s: float) -> None:
        """Wait until the application settles some of what is held: that is all it may hold."""
        self._full_since = self._full_since or time.monotonic()
        if time.monotonic() - self._full_since > _STUCK_S:
            self._full_since = time.monotonic()
            _log.warning(
                "All %d records that this consumer of shared group %r may hold are handed out and "
                "not settled: ack, release or reject some, or raise prefetch.",
                *(self.config.prefetch, self.group),
            )
        deliveries = self.deliveries
        with deliveries.condition:
            deliveries.waits_for_room = True
            deliveries.condition.wait_for(
                lambda: self.halted or len(deliveries.holdings) < self.config.prefetch,
                min(left_s, 1.0),
            )
            deliveries.waits_for_room = False

    def _drop_unheld(self) -> None:
        if any(record.standing is not Standing.HELD for record in self._buffer):
            held = (record for record in self._buffer if record.standing is Standing.HELD)
            self._buffer = deque(held)

    def hand_out(self, max_records: int) -> list[SharedRecord]:
        """Records of the buffer; if a Ctrl-C comes before the end of it, they are there again."""
        records = list(islice(self._buffer, max_records))
        try:
            if len(self.handed) + len(records) > 2 * self.config.prefetch:
                self.handed = [r for r in self.handed if r.standing is Standing.HELD]
            self.handed += records
            for _ in records:
                self._buffer.popleft()
            return records
        except BaseException:
            self.keep(records)
            raise

    def keep(self, records: Iterable[SharedRecord]) -> None:
        """Hand these out again, before others."""
        kept = dict.fromkeys([*records, *self._buffer])
        self._buffer = deque(sorted(kept, key=_offset))

    def raise_refusals(self) -> None:
        """Report to the application, once, what is lost and which settlements were refused."""
        while (gap := self.deliveries.take_lost()) is not None:
            self._report_gap(gap)
        refused = self.deliveries.take_refused()
        if refused:
            raise reply_errors.records_fenced(self.stream.name, self.group, refused)

    def _report_gap(self, gap: Gap) -> None:
        error = gap.error(self.stream.name, self.group)
        if self.config.on_gap == "raise":
            raise error
        _log.warning("Skipping a gap: %s", error)
        if self.config.on_gap_skipped is not None:
            self.config.on_gap_skipped(gap.first, gap.last)

    def publish_dead_letters(self) -> None:
        """Publish the dead letters that the server has assigned to this consumer.

        If there is no room for them, they wait for the next call; records do not wait for them.
        """
        deliveries = self.deliveries
        while deliveries.dead_letters:
            letter = deliveries.dead_letters[0]
            opened = self._dead_letter_stream is not None
            try:
                was_there = self._publish_dead_letter(letter)
            except (OutOfMemory, StreamFull) as error:
                if self._postponed != letter.offset:
                    _log.warning("The dead letter of record %d must wait: %s", letter.offset, error)
                self._postponed = letter.offset
                return
            except MeteorError as error:
                self._dead_letter_stream = None  # it may have been deleted: opened again
                if opened and isinstance(error, (StreamNotFound, LogTruncated)):
                    continue
                raise
            deliveries.dead_letters.pop(0)
            deliveries.dead_letter_published(letter, lost=not was_there)

    def _publish_dead_letter(self, letter: DeadLetter) -> bool:
        """Publish it; False if its record is gone, or cannot be read."""
        assert self.settings.dead_letter is not None, "only then are there dead letters"
        fetched = self._frame_cache.fetch([letter.offset])
        record = fetched.found.get(letter.offset)
        if record is None:
            self.deliveries.note_lost(letter.offset, fetched.unreadable.get(letter.offset))
            return False
        if self._dead_letter_stream is None:
            self._dead_letter_stream = open_letters(
                self.stream.connector, self.settings.dead_letter
            )
        bury(
            *(self._dead_letter_stream, self.stream, self.group, record),
            reason=letter.reason,
            tries=letter.failures,
            timeout_s=0.0,  # once: the application waits for its records
        )
        return True


def _offset(record: SharedRecord) -> int:
    return record.offset
