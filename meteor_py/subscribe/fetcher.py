"""The feed: what a subscriber reads from. A reader, and in a group the keeper of its lease."""

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
from meteor_py.log.log_reader import Overtaken
from meteor_py.records.codec import Codec
from meteor_py.records.config import OFFSET_MAX, SubscriberConfig, check_int
from meteor_py.records.position import Position
from meteor_py.records.record import Record
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.subscribe.group_admin import open_group
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Lease, Term
from meteor_py.subscribe.read_buffer import Gap, ReadBuffer

if TYPE_CHECKING:
    from meteor_py.log.handle import StreamHandle

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)
#: Records that iterating takes at a time.
_ITERATE = 10_000
#: How long iterating goes on without a server before it gives up.
_RECONNECT_S = 30.0


class Fetcher:
    """For one thread at a time, except ``halt`` and ``close``."""

    def __init__(
        self,
        stream: StreamHandle,
        config: SubscriberConfig,
        member: str,
        on_assigned: Callable[[], Position | int | None],
    ) -> None:
        self.stream = stream
        self.keeper: GroupSession | None = None
        self.reader = ReadBuffer(stream, self._call_on_gap_skipped)
        #: Set by another thread to end what waits here, and iterating.
        self.halted = False
        #: The end of what was handed out in any term.
        self.handed = 0
        self._config = config
        self._member = member
        self._on_assigned = on_assigned
        #: The term in which records are handed out.
        self.term: Term | None = None
        self._begun = False
        try:
            if config.group is not None:
                self.keeper = self._join(config.group, stream, self.reader)
        except BaseException:
            self.reader.close()
            raise

    def _join(self, group: str, stream: StreamHandle, reader: ReadBuffer) -> GroupSession:
        """Become a member of the group, which begins here if it is new."""
        confirmed = open_group(stream, group, self._config.starts_at)
        reader.position = confirmed
        name, life = stream.name, stream.incarnation
        lease = Lease(name, life, group, self._member, self._config.lease_ttl)
        return GroupSession(stream.connector, lease, confirmed, self._config.max_poll_interval)

    # -- reading -------------------------------------------------------------------------------

    def fetch(self, timeout_s: float, records: int, *, endless: bool = False) -> None:
        """Have something to hand out, if it comes in time; in a group, with the lease in hand.

        ``endless``: the time runs only while the server is away.
        """
        if self.keeper is not None:
            self.keeper.check_process()
            try:
                self.keeper.raise_refusal()
            except LogTruncated as error:
                self.reader.note_gap(error)
                raise
        self.patiently(lambda: self._fetch(timeout_s, records, endless))

    def patiently(self, work: Callable[[], _T]) -> _T:
        """Do what the application waits for: it does not hang meanwhile, and keeps its lease."""
        keeper = self.keeper
        if keeper is None:
            return work()
        keeper.alive_at = now()
        keeper.reading = True
        try:
            return work()
        finally:
            try:
                keeper.alive_at = now()
            finally:  # whatever interrupts: who only seems to read would keep its lease for ever
                keeper.reading = False

    def _call(self, callback: Callable[[], _T]) -> _T:
        """Call the application in the middle of what it waits for; this it may hang in."""
        keeper = self.keeper
        if keeper is None:
            return callback()
        was_reading, keeper.reading = keeper.reading, False
        keeper.alive_at = now()
        try:
            return callback()
        finally:
            keeper.reading = was_reading

    def _call_on_gap_skipped(self, first: int, last: int) -> None:
        callback = self._config.on_gap_skipped
        if callback is not None:
            self._call(lambda: callback(first, last))

    def walk(self, codec: Codec | None) -> Iterator[Record]:
        """Records one by one, the position following each, until it is halted."""
        while not self.halted:
            self.fetch(_RECONNECT_S, _ITERATE, endless=True)
            reader = self.reader
            jumps = reader.jumps
            for record in reader.peek(_ITERATE, codec):
                reader.position = record.offset + 1
                yield record
                if self.reader.jumps != jumps or reader.position != record.offset + 1:
                    break  # by the caller: seek() or poll() inside the loop
                if not self._go_on() or self.halted:
                    break

    def confirm_handed(self) -> None:
        """What was handed out is handled: the caller has come back for more."""
        assert self.keeper is not None, "checked with the settings"
        self.keeper.check_process()
        try:
            self.keeper.confirm(self.reader.position, self.term)
        except LeaseLost as error:
            _log.info("%s", error)

    def _go_on(self) -> bool:
        """A record was handled; tell whether the next may be handed out without a look."""
        keeper = self.keeper
        if keeper is None:
            return True
        if self._config.auto_confirm:
            self.confirm_handed()
        keeper.alive_at = at = now()
        return at < keeper.valid_until

    def _fetch(self, timeout_s: float, records: int, endless: bool) -> None:
        deadline = time.monotonic() + timeout_s
        failure: ConnectionFailed | StoreUnavailable | None = None
        failures = 0  # in a row
        looked = False
        while not self.halted:
            left = max(deadline - time.monotonic(), 0.0)
            if left == 0 and looked:
                if failure is not None:
                    raise failure
                if not self.reader.ready():
                    return
            looked = True
            try:
                if self._may_read(left):
                    if self.reader.ready():
                        return  # it was read before the lease was looked at
                    left = max(deadline - time.monotonic(), 0.0)
                    self._read(min(left, self.reader.block_max_s), records)
                failure, failures = None, 0
                if endless:
                    deadline = time.monotonic() + timeout_s
            except (ConnectionFailed, StoreUnavailable) as error:
                failure = error
                failures += 1
                left = max(deadline - time.monotonic(), 0.0)
                if not self.halted:
                    time.sleep(min(left, pause_s(failures, *_BACKOFF_S)))
        self.reader.close()  # halted by another thread, while this one may have connected again

    def _may_read(self, timeout_s: float) -> bool:
        """In a group: hold its lease, and start at what is confirmed if the term is new."""
        if self.keeper is None:
            return True
        try:
            term = self.keeper.hold(timeout_s)
        except LogTruncated as error:  # the stream was created anew
            error.last = max(error.last, self.reader.position - 1)
            self.reader.note_gap(error)
            raise
        if term is None:
            self.reader.close()  # what was read is for whoever has the lease, and that may last
            return False
        if term is not self.term or not self._begun:
            self._begin(term)
        return True

    def _begin(self, term: Term) -> None:
        self._begun = False
        self.handed = max(self.handed, self.reader.position)
        assert self._config.group is not None, "only groups have terms"
        self.reader.start(self._config.group, term)
        self.term = term  # not before: a confirm in another thread is for what it was given then
        start = self._call(self._on_assigned)
        if isinstance(start, Position):
            self.reader.resume(start)
        elif start is not None:
            self.reader.seek(check_int("what on_assigned returns", start, 0, OFFSET_MAX))
        self._begun = True  # not before: a callback that raised is called again

    def _read(self, block_s: float, records: int) -> None:
        """Fetch once; skip a gap if that is wanted."""
        try:
            self._ask(block_s, records)
        except RecordsLost as gap:
            if self._config.on_gap == "raise":
                raise
            self._skip_gaps(gap, records)

    def _skip_gaps(self, gap: RecordsLost, records: int) -> None:
        """Go on behind a gap, and behind those that follow it."""
        while True:
            _log.warning("Skipping a gap: %s", gap)
            self.skip_gap()
            try:
                return self._ask(0.0, records)
            except RecordsLost as another:
                gap = another

    def _ask(self, block_s: float, records: int) -> None:
        try:
            self.reader.fetch(block_s, records)
        except Overtaken:
            assert self.keeper is not None, "only groups are guarded"
            self.keeper.doubt()
        finally:
            if self.keeper is not None:  # confirms name the epoch that the records are of
                self.keeper.epoch = self.reader.epoch

    # -- gaps ----------------------------------------------------------------------------------

    def skip_gap(self) -> None:
        """Go on behind the gap that the last fetch named; without one nothing happens."""
        reader, keeper, gap = self.reader, self.keeper, self.reader.gap
        if gap is None:
            return
        if gap.truncated:
            self._reopen(gap)
            self.reader.count_skipped(gap.first, gap.last)
            return
        behind = min(gap.last + 1, reader.end)
        # What was handed out and not confirmed is not confirmed by a gap behind it.
        all_confirmed = keeper is not None and keeper.wanted == gap.first
        reader.skip_to(behind)
        reader.count_skipped(gap.first, gap.last)  # first: a gap is not done before it is told
        if keeper is not None and all_confirmed:
            keeper.want(behind, self.term)

    def _reopen(self, gap: Gap) -> None:
        """Go on in what is left of the stream, or in the one that has its name now."""
        stream = self.stream.reopen()
        reader = ReadBuffer(stream, self._call_on_gap_skipped)
        keeper: GroupSession | None = None
        try:
            if self.keeper is None:
                reader.skip_to(min(gap.first, reader.end))
            else:
                # First of all: if that fails, the old ones stay, and the next poll tells so.
                keeper = self._join(self.keeper.lease.group, stream, reader)
                self.keeper.close(0.0)
        except BaseException:
            reader.close()
            raise
        self.reader.close()
        reader.skipped = self.reader.skipped
        reader.jumps = self.reader.jumps + 1
        self.stream, self.reader, self.keeper, self.term = stream, reader, keeper, None

    # -- the end -------------------------------------------------------------------------------

    def halt(self) -> None:
        """End a wait in another thread."""
        self.halted = True
        self.reader.interrupt()
        if self.keeper is not None:
            self.keeper.interrupt()

    def disown(self) -> None:
        """In a forked child: hand out nothing more."""
        if self.keeper is not None:
            self.keeper.disown()

    def abandon(self) -> None:
        """Let the keeper's thread end by itself, and give up the lease."""
        self.halted = True
        if self.keeper is not None:
            self.keeper.abandon()

    def close(self, timeout_s: float) -> None:
        """Send the last confirm, give up the lease, close the connections."""
        self.halted = True
        try:
            if self.keeper is not None:
                self.keeper.close(timeout_s)
        finally:
            self.reader.close()
