"""Fetching records for a subscriber: from its read buffer, and in a group under a lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from meteor_py.errors import (
    ConnectionFailed,
    LeaseLost,
    LogTruncated,
    RecordsLost,
    StoreUnavailable,
)
from meteor_py.log.ring_reader import OwnerChanged
from meteor_py.records.codec import Codec
from meteor_py.records.config import OFFSET_MAX, SubscriberConfig, check_int
from meteor_py.records.position import Position
from meteor_py.records.record import Record
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.subscribe.group_admin import open_group
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Term
from meteor_py.subscribe.read_buffer import Gap, ReadBuffer

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)
#: Records that an iterator takes from the buffer at a time.
_ITERATE = 10_000
#: Seconds that an iterator waits for a server that is away.
_RECONNECT_S = 30.0


class Fetcher:
    """What a subscriber reads from. For one thread at a time, except ``interrupt`` and ``close``.

    The session owns the term that this member has; the buffer owns the position, and the term in
    which the records handed out were read.
    """

    def __init__(
        self,
        stream: StreamHandle,
        config: SubscriberConfig,
        member: str,
        on_assigned: Callable[[], Position | int | None],
    ) -> None:
        self.stream = stream
        self.session: GroupSession | None = None
        self.buffer = ReadBuffer(stream, self._call_on_gap_skipped)
        #: Set by another thread to end a wait here, and iterators.
        self.interrupted = False
        #: The end of the records handed out in any term.
        self.handed_out = 0
        self._config = config
        self._member = member
        self._on_assigned = on_assigned
        self._announced: Term | None = None  # the last term whose ``on_assigned`` has returned
        try:
            if config.group is not None:
                self.session = self._join(config.group, stream, self.buffer)
        except BaseException:
            self.buffer.close()
            raise

    def _join(self, group: str, stream: StreamHandle, buffer: ReadBuffer) -> GroupSession:
        """Become a member of the group, which begins here if it is new."""
        config = self._config
        buffer.position = confirmed = open_group(stream, group, config.starts_at)
        return GroupSession.join(
            *(stream, group, self._member),
            confirmed=confirmed,
            lease_ttl_s=config.lease_ttl,
            max_poll_interval_s=config.max_poll_interval,
        )

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, timeout_s: float, records: int, *, endless: bool = False) -> None:
        """Fetch records until some are available or the timeout expires.

        In a group, acquire the lease first.

        Args:
            endless: The time runs only while the server is away.
        """
        if self.session is not None:
            self.session.check_process()
            try:
                self.session.raise_refusal()
            except LogTruncated as error:
                self.buffer.note_gap(error)
                raise
        self.run_blocking(lambda: self._fetch(timeout_s, records, endless))

    def run_blocking(self, work: Callable[[], _T]) -> _T:
        """Run a blocking call without letting max_poll_interval expire."""
        session = self.session
        if session is None:
            return work()
        session.alive_at = now()
        session.polling = True
        try:
            return work()
        finally:
            try:
                session.alive_at = now()
            finally:  # whatever interrupts: a poll that seems to last would keep the lease forever
                session.polling = False

    def _call_back(self, callback: Callable[[], _T]) -> _T:
        """Call the application in the middle of a blocking call: here it may hang."""
        session = self.session
        if session is None:
            return callback()
        was_polling, session.polling = session.polling, False
        session.alive_at = now()
        try:
            return callback()
        finally:
            session.polling = was_polling

    def _call_on_gap_skipped(self, first: int, last: int) -> None:
        callback = self._config.on_gap_skipped
        if callback is not None:
            self._call_back(lambda: callback(first, last))

    def iterate(self, codec: Codec | None) -> Iterator[Record]:
        """Yield records one by one, the position following each, until it is interrupted."""
        while not self.interrupted:
            self.fetch(_RECONNECT_S, _ITERATE, endless=True)
            buffer = self.buffer
            jumps = buffer.jumps
            for record in buffer.peek(_ITERATE, codec):
                buffer.position = record.offset + 1
                yield record
                if self.buffer.jumps != jumps or buffer.position != record.offset + 1:
                    break  # by the caller: seek() or poll() inside the loop
                if not self._may_continue() or self.interrupted:
                    break

    def confirm_handed_out(self) -> None:
        """Confirm what was handed out: the caller has processed it, and asks for more."""
        assert self.session is not None, "checked with the settings"
        self.session.check_process()
        try:
            self.session.confirm(self.buffer.position, self.buffer.term)
        except LeaseLost as error:
            _log.info("%s", error)

    def _may_continue(self) -> bool:
        """A record was processed; tell whether the next may be handed out without a look."""
        session = self.session
        if session is None:
            return True
        if self._config.auto_confirm:
            self.confirm_handed_out()
        session.alive_at = at = now()
        return at < session.valid_until

    def _fetch(self, timeout_s: float, records: int, endless: bool) -> None:
        deadline = time.monotonic() + timeout_s
        failure: ConnectionFailed | StoreUnavailable | None = None
        failures = 0  # in a row
        looked = False
        while not self.interrupted:
            left = max(deadline - time.monotonic(), 0.0)
            if left == 0 and looked:
                if failure is not None:
                    raise failure
                if not self.buffer.ready():
                    return
            looked = True
            try:
                if self._hold_lease(left):
                    if self.buffer.ready():
                        return  # it was read before the lease was looked at
                    left = max(deadline - time.monotonic(), 0.0)
                    self._read(min(left, self.buffer.block_max_s), records)
                failure, failures = None, 0
                if endless:
                    deadline = time.monotonic() + timeout_s
            except (ConnectionFailed, StoreUnavailable) as error:
                failure = error
                failures += 1
                left = max(deadline - time.monotonic(), 0.0)
                if not self.interrupted:
                    time.sleep(min(left, pause_s(failures, *_BACKOFF_S)))
        self.buffer.close()  # interrupted by another thread; this one may have connected again

    def _hold_lease(self, timeout_s: float) -> bool:
        """In a group, hold its lease, and start at the confirmed offset if the term is new."""
        if self.session is None:
            return True
        try:
            term = self.session.hold(timeout_s)
        except LogTruncated as error:  # the stream was recreated
            error.last = max(error.last, self.buffer.position - 1)
            self.buffer.note_gap(error)
            raise
        if term is None:
            self.buffer.close()  # what was read is for the lease's owner, and the wait may be long
            return False
        if term is not self._announced:
            self._start_term(term)
        return True

    def _start_term(self, term: Term) -> None:
        self._announced = None
        self.handed_out = max(self.handed_out, self.buffer.position)
        assert self._config.group is not None, "only groups have terms"
        self.buffer.start_term(self._config.group, term)
        start = self._call_back(self._on_assigned)
        if isinstance(start, Position):
            self.buffer.resume(start)
        elif start is not None:
            self.buffer.seek(check_int("what on_assigned returns", start, 0, OFFSET_MAX))
        self._announced = term  # not before: a callback that raised is called again

    def _read(self, block_s: float, records: int) -> None:
        """Fetch once; skip a gap if that is wanted."""
        try:
            self._fill(block_s, records)
        except RecordsLost as gap:
            if self._config.on_gap == "raise":
                raise
            self._skip_gaps(gap, records)

    def _skip_gaps(self, gap: RecordsLost, records: int) -> None:
        """Continue after a gap, and after those that follow it."""
        while True:
            _log.warning("Skipping a gap: %s", gap)
            self.skip_gap()
            try:
                return self._fill(0.0, records)
            except RecordsLost as another:
                gap = another

    def _fill(self, block_s: float, records: int) -> None:
        try:
            self.buffer.fetch(block_s, records)
        except OwnerChanged:
            assert self.session is not None, "only groups are guarded"
            self.session.distrust()
        finally:
            if self.session is not None:  # confirms name the epoch of the records
                self.session.epoch = self.buffer.epoch

    # -- gaps ----------------------------------------------------------------------------------

    def skip_gap(self) -> None:
        """Continue after the gap that the last fetch found; without one nothing happens."""
        buffer, session, gap = self.buffer, self.session, self.buffer.gap
        if gap is None:
            return
        if gap.truncated:
            self._reopen(gap)
            self.buffer.count_skipped(gap.first, gap.last)
            return
        behind = min(gap.last + 1, buffer.end_offset)
        # Records that were handed out and not confirmed are not confirmed by a gap after them.
        all_confirmed = session is not None and session.wanted == gap.first
        buffer.skip_to(behind)
        buffer.count_skipped(gap.first, gap.last)  # first: a gap is confirmed after it was reported
        if session is not None and all_confirmed:
            session.confirm_silently(behind, buffer.term)

    def _reopen(self, gap: Gap) -> None:
        """Continue in what is left of the stream, or in the one that has its name now."""
        stream = self.stream.reopen()
        buffer = ReadBuffer(stream, self._call_on_gap_skipped)
        session: GroupSession | None = None
        try:
            if self.session is None:
                buffer.skip_to(min(gap.first, buffer.end_offset))
            else:
                # First of all: if that fails, the old ones stay, and the next poll reports it.
                session = self._join(self.session.lease.group, stream, buffer)
                self.session.close(0.0)
        except BaseException:
            buffer.close()
            raise
        self.buffer.close()
        buffer.skipped = self.buffer.skipped
        buffer.jumps = self.buffer.jumps + 1
        self.stream, self.buffer, self.session = stream, buffer, session

    # -- the end -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End a wait in another thread, and iterators."""
        self.interrupted = True
        self.buffer.interrupt()
        if self.session is not None:
            self.session.interrupt()

    def abandon(self) -> None:
        """In a forked child: hand out nothing more."""
        if self.session is not None:
            self.session.abandon()

    def stop(self) -> None:
        """Let the session's thread end by itself, and give up the lease."""
        self.interrupted = True
        if self.session is not None:
            self.session.stop()

    def close(self, timeout_s: float) -> None:
        """Send the last confirm, give up the lease, close the connections."""
        self.interrupted = True
        try:
            if self.session is not None:
                self.session.close(timeout_s)
        finally:
            self.buffer.close()
