"""The supply of a consumer: claims records, fetches them, and keeps them until they are handed out.

It also does what the server gives a consumer to do on the way: it publishes dead letters, and puts
into the index what only the store has.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

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
from meteor_py.shared.frame_cache import FrameCache
from meteor_py.shared.gaps import Gap
from meteor_py.shared.protocol import Answer, Entry, Letter, SharedProtocol
from meteor_py.shared.record import SharedRecord, Standing
from meteor_py.shared.stored_frames import cold_entry
from meteor_py.subscribe.dead_letters import bury, open_letters

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)

#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)
#: Records that are claimed in a step at most: the server does nothing else meanwhile.
_CLAIM_MAX = 1_024
#: Rounds that a poll may take though its time is up, as long as each is done with some records that
#: are not for it; it goes on at the next poll.
_ROUNDS_MIN = 8
#: Times that what was granted is made sure of and fetched again, when some was rewound meanwhile.
_AGAIN = 5
#: Seconds after which somebody who waits while it holds all it may is told so.
_STUCK_S = 10.0
_ID_MAX = 2**64 - 1


class Prefetcher:
    """For one thread at a time, except ``halt``."""

    def __init__(
        self,
        books: SharedProtocol,
        settings: SharedConfig,
        config: ConsumerConfig,
        codec: Codec | None,
        name: str,
    ) -> None:
        grouping = books.stream.config.ordering_rule
        assert grouping is not None, "checked when the group was opened"
        self.stream = books.stream
        self.group = books.group
        self.config = config
        self.settings = settings
        self.desk = Deliveries(books, settings, grouping, codec, name)
        self._grouping = grouping
        self._payloads = FrameCache(books.stream)
        self._buffer: deque[SharedRecord] = deque()  # not handed out yet
        self._handed: list[SharedRecord] = []  # handed out, and perhaps not settled
        self._entry: Entry | None = None
        self._epoch = 0
        self._letters: StreamHandle | None = None
        self._unpublished = -1  # the last letter that had to wait, so that it is said once
        self._full_since: float | None = None
        self._asked = False  # whether the last claim was for more than nothing
        self._looked = -1
        #: Set by another thread to end what waits here, and iterating.
        self.halted = False

    @property
    def handed(self) -> list[SharedRecord]:
        """What was handed out, and perhaps not settled."""
        return self._handed

    def halt(self) -> None:
        """End a wait in another thread; nothing more is handed out."""
        self.halted = True
        with self.desk.state:
            self.desk.state.notify_all()

    def interrupt(self) -> None:
        self._payloads.interrupt()

    def close(self) -> None:
        self.desk.close()
        self._payloads.close()

    def fill(self, timeout_s: float) -> None:
        """Have something in the buffer, if it comes in time."""
        deadline = time.monotonic() + timeout_s
        failures = 0
        failure: MeteorError | None = None
        rounds = 0
        again = False
        while not self.halted:
            self.raise_refusals()
            self.desk.raise_failure()
            self._drop_unheld()
            if self._buffer and now() < self.desk.valid_until:
                return
            left = max(deadline - time.monotonic(), 0.0)
            if rounds and left == 0 and not (again and rounds < _ROUNDS_MIN):
                if failure is not None:
                    raise failure
                return
            rounds, again = rounds + 1, False
            try:
                answer = self._claim()
                again = answer is None
                if not self._buffer and answer is not None:
                    self._wait(answer, max(deadline - time.monotonic(), 0.0))
                failure, failures = None, 0
            except (ConnectionFailed, StoreUnavailable) as error:
                failure = error
                failures += 1
                time.sleep(
                    min(max(deadline - time.monotonic(), 0.0), pause_s(failures, *_BACKOFF_S))
                )

    def _claim(self) -> Answer | None:
        """Exchange with the server, and fetch what was granted; None if that is to be repeated."""
        before = self._entry
        answer = self._take()
        self._fetch(answer.epoch)
        for _ in range(_AGAIN):
            if not self.desk.unsure:
                break
            answer, self._asked = self.exchange(0), False  # what was rewound may be had again
            self._fetch(answer.epoch)
        self.publish_letters()
        if answer.cold and not self._buffer:
            self._entry = self._cold_entry(answer)
            return None
        self._entry = before if answer.cold else None
        done = self._buffer or not (answer.granted or self.desk.unsure)
        return answer if done else None  # all of them were lost

    def _take(self) -> Answer:
        """Have as much granted as may be held, if there is that much."""
        while True:  # ends: each time as much as was asked for is held
            room = max(self.config.prefetch - self.desk.holding, 0)
            want = min(room, _CLAIM_MAX)
            answer = self.exchange(want)
            self._asked = want > 0
            if want == room or len(answer.granted) < want:
                return answer

    def _cold_entry(self, answer: Answer) -> Entry:
        try:
            return cold_entry(self._payloads, self._grouping, answer, self._entry)
        except CorruptSegment as error:  # nobody knows their groups, so they are given up
            stop = min(max(error.last, answer.next) + 1, answer.cold)
            return Entry(answer.next, (), stop, error)

    def exchange(self, want: int) -> Answer:
        return self.desk.exchange(want, entry=self._entry)

    def _fetch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._payloads.forget()
        if not self.desk.granted:
            return
        received = self.desk.receive(*self._payloads.fetch(sorted(self.desk.granted)))
        self._buffer = deque(sorted([*self._buffer, *received], key=_offset))

    def _wait(self, answer: Answer, left_s: float) -> None:
        """Wait until there may be something."""
        if self._buffer or left_s <= 0:
            return
        before, self._looked = self._looked, answer.next
        if before < answer.next < answer.end:
            return  # A step looks at a part of what is new, and more of it may be for this one.
        if self.desk.holding >= self.config.prefetch:
            self._wait_for_room(left_s)
            return
        self._full_since = None
        if not self._asked:
            return  # there was no room when it was claimed, and now there is
        block_s = left_s if answer.wait_s is None else min(left_s, answer.wait_s + 0.001)
        block_s = min(block_s, self.settings.lease_ttl / 3)
        streams = [(self.desk.books.key("bell"), f"{answer.bell}-0")]
        if answer.next >= answer.end:
            after = f"{answer.next - 1}-{_ID_MAX}" if answer.next else "0-0"
            streams.append((keys.index(self.stream.name), after))
        self._payloads.wait(streams, block_s)

    def _wait_for_room(self, left_s: float) -> None:
        """All that may be held is held, and handed out: somebody has to settle some."""
        self._full_since = self._full_since or time.monotonic()
        if time.monotonic() - self._full_since > _STUCK_S:
            self._full_since = time.monotonic()
            _log.warning(
                "All %d records that this consumer of shared group %r may hold are handed out and "
                "not settled: ack, release or reject some, or raise prefetch.",
                *(self.config.prefetch, self.group),
            )
        desk = self.desk
        with desk.state:
            desk.waits_for_room = True
            desk.state.wait_for(
                lambda: self.halted or desk.holding < self.config.prefetch, min(left_s, 1.0)
            )
            desk.waits_for_room = False

    def _drop_unheld(self) -> None:
        if any(record.standing is not Standing.HELD for record in self._buffer):
            held = (record for record in self._buffer if record.standing is Standing.HELD)
            self._buffer = deque(held)

    def hand_out(self, max_records: int) -> list[SharedRecord]:
        """Records of the buffer; if a Ctrl-C comes before the end of it, they are there again."""
        records = list(islice(self._buffer, max_records))
        try:
            if len(self._handed) + len(records) > 2 * self.config.prefetch:
                self._handed = [r for r in self._handed if r.standing is Standing.HELD]
            self._handed += records
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
        """Tell the application, once, what did not count, and what is lost."""
        while (gap := self.desk.take_lost()) is not None:
            self._tell_lost(gap)
        refused = self.desk.take_refused()
        if refused:
            raise reply_errors.taken(self.stream.name, self.group, refused)

    def _tell_lost(self, gap: Gap) -> None:
        error = gap.error(self.stream.name, self.group)
        if self.config.on_gap == "raise":
            raise error
        _log.warning("Skipping a gap: %s", error)
        if self.config.on_gap_skipped is not None:
            self.config.on_gap_skipped(gap.first, gap.last)

    def publish_letters(self) -> None:
        """Publish the dead letters that the server has given this consumer to publish.

        If there is no room for them they wait for the next time; records do not.
        """
        desk = self.desk
        while desk.letters:
            letter = desk.letters[0]
            opened = self._letters is not None
            try:
                is_there = self._publish_letter(letter)
            except (OutOfMemory, StreamFull) as error:
                if self._unpublished != letter.offset:
                    _log.warning("The dead letter of record %d must wait: %s", letter.offset, error)
                self._unpublished = letter.offset
                return
            except MeteorError as error:
                self._letters = None  # it may have been deleted: opened again
                if opened and isinstance(error, (StreamNotFound, LogTruncated)):
                    continue
                raise
            desk.letters.pop(0)
            desk.letter_published(letter, lost=not is_there)

    def _publish_letter(self, letter: Letter) -> bool:
        """Publish it; False if its record is gone, or cannot be read."""
        assert self.settings.dead_letter is not None, "only then are there letters"
        fetched = self._payloads.fetch([letter.offset])
        record = fetched.found.get(letter.offset)
        if record is None:
            self.desk.note_lost(letter.offset, fetched.unreadable.get(letter.offset))
            return False
        if self._letters is None:
            self._letters = open_letters(self.stream.connector, self.settings.dead_letter)
        bury(
            *(self._letters, self.stream, self.group, record),
            reason=letter.reason,
            tries=letter.failures,
            timeout_s=0.0,  # once: the application waits for its records
        )
        return True


def _offset(record: SharedRecord) -> int:
    return record.offset
