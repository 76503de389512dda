"""A consumer's prefetcher: claims records, fetches them, and buffers them for ``poll()``.

It also does two jobs that the server assigns to consumers: it publishes dead letters, and it sends
index entries that the server lacks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

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
from meteor_py.records.position import epoch_of, newest_epoch
from meteor_py.redis import keys, reply_errors
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.shared.ack_timeouts import TimeLimit
from meteor_py.shared.config import ConsumerConfig, SharedConfig
from meteor_py.shared.deliveries import Deliveries
from meteor_py.shared.frame_cache import FrameCache, entry_from_store
from meteor_py.shared.protocol import DeadLetter, Entry, SharedProtocol, StepReply
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.subscribe.dead_letters import bury, open_letters

_log = logging.getLogger(__name__)

#: First and longest pause between retries, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.64)
#: The maximum number of records to claim in one step. Steps must be short, because the server runs
#: nothing else during a step.
_CLAIM_MAX = 512
#: A poll whose timeout has expired still makes up to this many rounds in total, as long as each
#: round makes progress but finds no records for this consumer. The next poll continues from there.
_ROUNDS_MIN = 8
#: Seconds that a consumer waits for the application to settle records, because it holds as many as
#: it may, before it logs a warning.
_STUCK_S = 10.0
_ID_MAX = 2**64 - 1
_OFFSET = attrgetter("offset")
_HELD = Standing.HELD  # looking up an enum member is slower


class Prefetcher:
    """One consumer's record buffer.

    Except for ``halt`` and ``interrupt``, only one thread may use it at a time.
    """

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
        #: A lower limit than ``prefetch``, which ``run()`` sets; None if there is no such limit.
        self.target: int | None = None
        self.settings = settings
        self.deliveries = Deliveries(protocol, settings, ordering_rule, codec, name)
        self._ordering_rule = ordering_rule
        self._frame_cache = FrameCache(protocol.stream)
        self._buffer: deque[SharedRecord] = deque()  # not delivered yet
        #: Records delivered to the application. Some may already be settled.
        self.handed: list[SharedRecord] = []
        self._entry: Entry | None = None
        self._epoch = 0
        self._dead_letter_stream: StreamHandle | None = None
        self._postponed = -1  # offset of the last postponed dead letter, to log it only once
        self._full_since: float | None = None
        self._scanned = -1  # where the last step stopped scanning the index
        self._woken = "0-0"  # the ID of the last wake-up that was seen
        self._idle_until = 0.0  # when to claim again, even without a wake-up
        #: Set by another thread to end waits and iteration in this thread.
        self.halted = False

    @property
    def limit(self) -> int:
        """The maximum number of records that the consumer may hold at the moment."""
        most = self.config.prefetch
        return most if self.target is None else min(self.target, most)

    def halt(self) -> None:
        """End a wait in another thread and deliver no more records."""
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
            while self._buffer and self._buffer[0].standing is not _HELD:
                self._buffer.popleft()
            if self._buffer and now() < self.deliveries.valid_until:
                return
            left = max(deadline - time.monotonic(), 0.0)
            if rounds and left == 0 and not (again and rounds < _ROUNDS_MIN):
                if failure is not None:
                    raise failure
                return
            rounds, again = rounds + 1, False
            try:
                idle = self.deliveries.idle
                if idle is None or left == 0 or not self._may_stay_idle(idle):
                    reply = self._claim(wait=left > 0)
                    again = reply is None
                    idle = self.deliveries.idle
                if not (self._buffer or again):
                    self._wait(idle, max(deadline - time.monotonic(), 0.0))
                failure, failures = None, 0
            except (ConnectionFailed, StoreUnavailable) as error:
                failure = error
                failures += 1
                time.sleep(
                    min(max(deadline - time.monotonic(), 0.0), pause_s(failures, *_BACKOFF_S))
                )

    def _may_stay_idle(self, idle: StepReply) -> bool:
        """Whether to keep waiting for the same wake-up as an earlier poll."""
        unsent = self.deliveries.holdings.unsent
        return now() < self._idle_until and not (idle.repeated or unsent)

    def _claim(self, *, wait: bool) -> StepReply | None:
        """Claim and fetch records; return the last reply, or None to try again at once."""
        entry = self._entry
        reply = self._claim_all(wait=wait)
        self._fetch(reply)
        self.publish_dead_letters()
        if reply.stored_stop and not self._buffer:
            self._entry = self._entry_from_store(reply)
            return None
        self._entry = entry if reply.stored_stop else None
        before, self._scanned = self._scanned, reply.next
        if self._buffer or reply.idle or self._is_full:
            return reply
        # Try again: a step scans only a limited number of new records, so the next may find some.
        return None if reply.granted or wait or before < reply.next < reply.end else reply

    @property
    def _is_full(self) -> bool:
        return len(self.deliveries.holdings) >= self.limit

    def _claim_all(self, *, wait: bool) -> StepReply:
        """Claim as many records as there is room for; return the last reply."""
        while True:  # terminates, because each round except the last reduces the room
            room = max(self.limit - len(self.deliveries.holdings), 0)
            want = min(room, _CLAIM_MAX)
            # Do not register for a wake-up while there are records to deliver.
            mode = "wait" if wait and not (self._buffer or self.deliveries.holdings.granted) else ""
            reply = self.exchange(want, mode)
            if reply.idle:
                self._idle_until = now() + self._patience_s(reply)
            if want == room or reply.granted < want:
                return reply

    def _patience_s(self, reply: StepReply) -> float:
        """Return the number of seconds that an idle consumer waits before it claims again.

        This is less than the lease renewer's interval, so that the claim renews the lease instead.
        """
        patience = 0.9 * self.settings.lease_ttl / 3
        return patience if reply.wait_s is None else min(patience, reply.wait_s + 0.001)

    def _entry_from_store(self, reply: StepReply) -> Entry:
        try:
            return entry_from_store(self._frame_cache, self._ordering_rule, reply, self._entry)
        except CorruptSegment as error:  # without ordering keys, the records count as lost
            stop = min(max(error.last, reply.next) + 1, reply.stored_stop)
            return Entry(reply.next, (), stop, error)

    def exchange(self, want: int, mode: str = "") -> StepReply:
        return self.deliveries.exchange(want, mode=mode, entry=self._entry)

    def _fetch(self, reply: StepReply) -> None:
        """Fetch granted records until the buffer reaches its limit in bytes."""
        if reply.epoch != self._epoch:
            self._epoch = reply.epoch
            self._frame_cache.forget()
        self._frame_cache.note_large(reply.large)
        granted = self.deliveries.holdings.granted
        while granted:
            buffered = sum(len(record.record.value) for record in self._buffer)
            room = self.config.prefetch_bytes - buffered
            if room <= 0:
                return
            fetched = self._frame_cache.fetch(sorted(granted), room)
            try:
                self.keep(self.deliveries.receive(*fetched))
            except BaseException:  # after a Ctrl-C, the next poll delivers them
                handed = set(self.handed)
                held = list(self.deliveries.holdings.held())
                self.keep(record for record in held if record not in handed)
                raise
            granted = self.deliveries.holdings.granted

    def _wait(self, idle: StepReply | None, left_s: float) -> None:
        """Wait until records may be available."""
        if left_s <= 0:
            return
        if idle is None:
            if self._is_full:
                self._wait_for_room(left_s)
            return
        self._full_since = None
        block_s = min(left_s, self._idle_until - now())
        if block_s <= 0:
            return
        streams = [(self._wake_key, self._woken)]
        if idle.watches:
            # Wait from the end of the stream: the server may leave older records unscanned on
            # purpose.
            after = f"{idle.end - 1}-{_ID_MAX}" if idle.end else "0-0"
            streams.append((keys.index(self.stream.name), after))
        found = self._frame_cache.wait(streams, block_s)
        if found:
            self._idle_until = 0.0  # claim at once
            self._woken = found.get(self._wake_key, self._woken)

    @property
    def _wake_key(self) -> str:
        return self.deliveries.protocol.key(f"wake:{self.deliveries.consumer}")

    def _wait_for_room(self, left_s: float) -> None:
        """Wait until the application settles some records, because the consumer holds too many."""
        self._full_since = self._full_since or time.monotonic()
        if time.monotonic() - self._full_since > _STUCK_S:
            self._full_since = time.monotonic()
            _log.warning(
                "This consumer in shared group %r holds %d unsettled records, which is its limit. "
                "Ack, release or reject some, or raise prefetch.",
                *(self.group, self.limit),
            )
        deliveries = self.deliveries
        with deliveries.condition:
            deliveries.waits_for_room = True
            deliveries.condition.wait_for(
                lambda: self.halted or len(deliveries.holdings) < self.limit,
                min(left_s, 1.0),
            )
            deliveries.waits_for_room = False

    def hand_out(self, max_records: int, limit: TimeLimit | None) -> list[SharedRecord]:
        """Take records from the buffer, and deliver them with a time limit.

        If ``limit`` is None, the caller delivers them later. If a Ctrl-C interrupts this method,
        the records stay in the buffer.
        """
        taken = list(islice(self._buffer, max_records))
        records = [record for record in taken if record.standing is _HELD]
        try:
            if len(self.handed) + len(records) > 2 * self.config.prefetch:
                self.handed = [r for r in self.handed if r.standing is _HELD]
            self.handed += records
            for _ in taken:
                self._buffer.popleft()
            return records if limit is None else self.deliveries.deliver(records, limit)
        except BaseException:
            self.keep(records)
            raise

    def keep(self, records: Iterable[SharedRecord]) -> None:
        """Put records into the buffer, unless they are there already."""
        kept = dict.fromkeys([*records, *self._buffer])
        self._buffer = deque(sorted(kept, key=_OFFSET))

    def raise_refusals(self) -> None:
        """Raise an error about lost records, or about settlements that were refused or in doubt.

        Each of them is reported once. With ``on_gap="skip"``, gaps are only logged and passed to
        ``on_gap_skipped``.
        """
        truncated = self.deliveries.take_truncated()
        if truncated is not None:
            raise reply_errors.delivered_records_lost(self.stream.name, self.group, *truncated)
        while (gap := self.deliveries.take_lost()) is not None:
            error = gap.error(self.stream.name, self.group)
            if self.config.on_gap == "raise":
                raise error
            _log.warning("Skipping a gap: %s", error)
            if self.config.on_gap_skipped is not None:
                self.config.on_gap_skipped(gap.first, gap.last)
        unknown = self.deliveries.take_unknown()
        if unknown:
            raise reply_errors.settlements_unknown(self.stream.name, self.group, unknown)
        refused = self.deliveries.take_refused()
        if refused:
            raise reply_errors.records_fenced(self.stream.name, self.group, refused)

    def publish_dead_letters(self) -> None:
        """Publish the dead letters that the server has assigned to this consumer.

        If their stream or the server is full, they wait for the next call, without delaying other
        records.
        """
        deliveries = self.deliveries
        # The lease renewer may clear the list at any time.
        while (letter := next(iter(deliveries.dead_letters), None)) is not None:
            opened = self._dead_letter_stream is not None
            try:
                history = self._publish_dead_letter(letter)
            except (OutOfMemory, StreamFull) as error:
                if self._postponed != letter.offset:
                    _log.warning("Postponed the dead letter of record %d: %s", letter.offset, error)
                self._postponed = letter.offset
                return
            except MeteorError as error:
                self._dead_letter_stream = None  # it may have been deleted, so open it again
                if opened and isinstance(error, (StreamNotFound, LogTruncated)):
                    continue
                raise
            deliveries.dead_letter_settled(letter, history)

    def _publish_dead_letter(self, letter: DeadLetter) -> str | None:
        """Publish a dead letter; return None if its record is lost or unreadable.

        Otherwise return the server's replication history, because the dead letter must be settled
        in the same history. The result is '' if the dead letter is on another node of a cluster.
        """
        assert self.settings.dead_letter is not None, "no dead letters without a stream"
        fetched = self._frame_cache.fetch([letter.offset])
        record = fetched.found.get(letter.offset)
        if record is None:
            self.deliveries.note_lost(letter.offset, fetched.unreadable.get(letter.offset))
            return None
        epochs = self.stream.connector.call("HGET", keys.meta(self.stream.name), "epochs")
        if epochs is None or newest_epoch(epochs.decode()) != self._epoch:
            raise ConnectionFailed(  # after a failover, another record may have this offset
                f"The server for stream {self.stream.name!r} is failing over. Try again."
            )
        if self._dead_letter_stream is None:
            self._dead_letter_stream = open_letters(
                self.stream.connector, self.settings.dead_letter
            )
        history = bury(
            *(self._dead_letter_stream, self.stream, self.group, record),
            epoch=epoch_of(epochs.decode(), letter.offset),
            incarnation=self.deliveries.protocol.incarnation,
            reason=letter.reason,
            tries=letter.failures,
            timeout_s=0.0,  # one try: the application is waiting for records
        )
        # The history shows whether a failover may have lost the dead letter only if both streams
        # are on the same server.
        letters = self._dead_letter_stream.name
        return history if self.stream.connector.is_same_server(self.stream.name, letters) else ""
