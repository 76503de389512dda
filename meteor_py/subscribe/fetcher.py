"""The fetcher: fills a subscriber's read buffer, in a group only while the member has the lease."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TypeVar

from meteor_py.errors import (
    ConnectionFailed,
    LeaseLost,
    LogTruncated,
    RecordsLost,
    StoreUnavailable,
)
from meteor_py.log.handle import StreamHandle
from meteor_py.log.ring_reader import OwnerChanged
from meteor_py.records.codec import Codec
from meteor_py.records.config import OFFSET_MAX, InitialOffset, SubscriberConfig, check_int
from meteor_py.records.position import Position
from meteor_py.records.record import Record
from meteor_py.redis.topology import pause_after_s
from meteor_py.runtime.clock import now
from meteor_py.subscribe.group_admin import open_group
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Term
from meteor_py.subscribe.read_buffer import Gap, ReadBuffer

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.02, 0.64)
#: Maximum number of records that an iterator takes from the buffer at a time.
_ITERATE = 10_000
#: Seconds that an iterator, or a poll without a timeout, waits for an unreachable server or store.
_RECONNECT_S = 30.0


class Fetcher:
    """A subscriber's source of records.

    The session owns this member's current term. The buffer owns the position, and the term in which
    the delivered records were read. Only ``interrupt`` and the methods that close are thread-safe.
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
        #: Set by another thread to end iterators and any wait in this object.
        self.interrupted = False
        #: The offset after the last record handed out in earlier terms.
        self.handed_out = 0
        self._config = config
        self._member = member
        self._on_assigned = on_assigned
        self._failures = 0  # consecutive failures, counted across polls
        self._announced: Term | None = None  # the last term whose ``on_assigned`` has returned
        try:
            if config.group is not None:
                self.session = self._join(config.group, stream, self.buffer, config.starts_at)
        except BaseException:
            self.buffer.close()
            raise

    def _join(
        self,
        group: str,
        stream: StreamHandle,
        buffer: ReadBuffer,
        start: InitialOffset | int | datetime,
    ) -> GroupSession:
        """Join the group, creating it at ``start`` if it does not exist."""
        config = self._config
        buffer.position = confirmed = open_group(stream, group, start)
        return GroupSession.join(
            *(stream, group, self._member),
            confirmed=confirmed,
            lease_ttl_s=config.lease_ttl,
            max_poll_interval_s=config.max_poll_interval,
        )

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, timeout_s: float | None, records: int) -> None:
        """Fetch records until some are available or the timeout expires.

        In a group, acquire the lease first.

        Args:
            timeout_s: None waits until interrupted, or until the server or the store has been
                unreachable for ``_RECONNECT_S`` seconds.
        """
        if self.session is None:
            self._fetch_until_available(timeout_s, records)
            return
        self.session.check_process()
        try:
            self.session.raise_refusal()
        except LogTruncated as error:
            self.buffer.note_gap(error)
            raise
        self.run_blocking(lambda: self._fetch_until_available(timeout_s, records))

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
            finally:
                # Reset polling even if a signal handler raises. If it stayed true, an application
                # that hangs would keep its lease forever.
                session.polling = False

    def _call_back(self, callback: Callable[[], _T]) -> _T:
        """Call an application callback, and enforce max_poll_interval during the call."""
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
        """Yield records until interrupted, moving the position past each."""
        while not self.interrupted:
            self.fetch(None, _ITERATE)
            buffer, session = self.buffer, self.session
            jumps = buffer.jumps
            for record in buffer.peek(_ITERATE, codec):
                buffer.position = after = record.offset + 1
                yield record
                if self.buffer.jumps != jumps or buffer.position != after:
                    break  # the caller has called seek() or poll() inside the loop
                if session is not None:  # inline: a method call would take 10% of the time
                    if self._config.auto_confirm:
                        self.confirm_handed_out()
                    session.alive_at = now()
                if (
                    session is not None and session.alive_at >= session.valid_until
                ) or self.interrupted:
                    break

    def confirm_handed_out(self) -> None:
        """Confirm all delivered records: a caller that asks for more has processed them."""
        assert self.session is not None, "checked with the settings"
        self.session.check_process()
        try:
            self.session.confirm(self.buffer.position, self.buffer.term)
        except LeaseLost as error:
            _log.info("%s", error)

    def _fetch_until_available(self, timeout_s: float | None, records: int) -> None:
        wait_s = _RECONNECT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        failure: ConnectionFailed | StoreUnavailable | None = None
        tried = False
        while not self.interrupted:
            left = max(deadline - time.monotonic(), 0.0)
            if left == 0 and tried:
                if failure is not None:
                    try:
                        raise failure
                    finally:
                        del failure  # see LogReader._fetch_from_store
                if not self.buffer.ready():
                    return
            tried = True
            try:
                if self._hold_lease(left):
                    if self.buffer.ready():
                        return  # an earlier fetch left records, and the lease is still ours
                    self._fetch_past_gaps(max(deadline - time.monotonic(), 0.0), records)
                    self._failures = 0
                    if self._holds_lease() and not self.interrupted and self.buffer.ready():
                        return
                failure, self._failures = None, 0
                if timeout_s is None:  # the time counts only while the server is unreachable
                    deadline = time.monotonic() + wait_s
            except (ConnectionFailed, StoreUnavailable) as error:
                failure = error
                self._failures += 1
                left = max(deadline - time.monotonic(), 0.0)
                if not self.interrupted:
                    time.sleep(min(left, pause_after_s(error, self._failures, _BACKOFF_S)))
        self.buffer.close()  # again: the buffer may have reconnected since the interruption

    def _hold_lease(self, timeout_s: float) -> bool:
        """Wait for the lease, if there is a group; return whether records may be fetched.

        In a new term, start at the confirmed offset.
        """
        if self.session is None:
            return True
        try:
            term = self.session.hold(timeout_s)
        except LogTruncated as error:  # the stream was recreated
            error.last = max(error.last, self.buffer.position - 1)
            self.buffer.note_gap(error)
            raise
        if term is None:
            self.buffer.close()  # another member may read these records now, so free their memory
            return False
        if term is not self._announced:
            self._start_term(term)
        return True

    def _holds_lease(self) -> bool:
        """Return whether the records just fetched may be delivered; in a group, check the lease."""
        session = self.session
        return session is None or (session.term is self._announced and now() < session.valid_until)

    def _start_term(self, term: Term) -> None:
        self._announced = None
        self.handed_out = max(self.handed_out, self.buffer.position)
        assert self._config.group is not None, "only groups have terms"
        self.buffer.start_term(self._config.group, term)
        start = self._call_back(self._on_assigned)
        if isinstance(start, Position):
            self.buffer.resume(start)
        elif start is not None:
            self.buffer.seek(check_int("the offset from on_assigned", start, 0, OFFSET_MAX))
        self._announced = term  # set it last: if the callback raises, it must be called again

    def _fetch_past_gaps(self, block_s: float, records: int) -> None:
        """Fetch once. With ``on_gap="skip"``, skip every gap and fetch the records after it."""
        while True:
            try:
                return self._fetch_once(block_s, records)
            except RecordsLost as gap:
                if self._config.on_gap == "raise":
                    raise
                _log.warning("Skipping a gap: %s", gap)
            self.skip_gap()
            block_s = 0.0

    def _fetch_once(self, block_s: float, records: int) -> None:
        """Fetch into the buffer. If the group has a new owner, distrust the lease instead."""
        try:
            self.buffer.fetch(block_s, records)
        except OwnerChanged:
            assert self.session is not None, "only a group's fetch raises OwnerChanged"
            self.session.distrust()
        finally:
            if self.session is not None:  # confirms must carry the epoch of the fetched records
                self.session.read_in = self.buffer.checkpoint

    # -- gaps ----------------------------------------------------------------------------------

    def skip_gap(self) -> None:
        """Continue after the gap that the last fetch found. Do nothing if it found none."""
        buffer, session, gap = self.buffer, self.session, self.buffer.gap
        if gap is None:
            return
        if gap.truncated:
            self._reopen(gap)
            self.buffer.count_skipped(gap.first, gap.last)
            return
        after = min(gap.last + 1, buffer.end_offset)
        # Do not confirm the gap while the application is still processing records before it.
        all_confirmed = session is not None and session.wanted == gap.first
        buffer.skip_to(after)
        buffer.count_skipped(gap.first, gap.last)  # report the gap before it is confirmed
        if session is not None and all_confirmed:
            session.confirm_silently(after, buffer.term)

    def _reopen(self, gap: Gap) -> None:
        """Continue with the stream's remaining records, or with its new incarnation."""
        stream = self.stream.reopen()
        buffer = ReadBuffer(stream, self._call_on_gap_skipped)
        session: GroupSession | None = None
        try:
            if self.session is None:
                buffer.skip_to(min(gap.first, buffer.end_offset))
            else:
                # Join before closing: if joining fails, the old session is still open, and the next
                # poll reports the error.
                start = self._config.starts_at
                if isinstance(start, int):  # in a new stream, this offset refers to another record
                    start = InitialOffset.EARLIEST
                session = self._join(self.session.lease.group, stream, buffer, start)
                self.session.close(0.0)
        except BaseException:
            buffer.close()
            raise
        self.buffer.close()
        buffer.skipped = self.buffer.skipped
        buffer.jumps = self.buffer.jumps + 1
        self.stream, self.buffer, self.session = stream, buffer, session

    # -- closing -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """End iterators, and interrupt a wait in another thread."""
        self.interrupted = True
        self.buffer.interrupt()
        if self.session is not None:
            self.session.interrupt()

    def stop(self) -> None:
        """Make the session's thread release the lease and end, without waiting for it."""
        self.interrupted = True
        if self.session is not None:
            self.session.stop()

    def start_closing(self, timeout_s: float) -> None:
        """Begin to leave the group, without waiting; see ``GroupSession.start_closing``."""
        self.interrupted = True
        if self.session is not None:
            self.session.start_closing(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Send the last confirm, release the lease, and close the connections."""
        self.interrupted = True
        try:
            if self.session is not None:
                self.session.close(timeout_s)
        finally:
            self.buffer.close()
