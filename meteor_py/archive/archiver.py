"""The archiver, which copies records from the ring into the store before the ring drops them.

Any number of archivers may run, in any process. The archiver that holds the lease of the group
``.archiver`` works, and the others wait. Each term of the lease is one ``ArchiveTerm``. After any
failure (a full disk, a lost connection, a failover, another owner), the archiver abandons the term.
The next term starts at the last committed offset, with a clean state.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meteor_py.archive.archive_term import ArchiveTerm, TermTooLow
from meteor_py.archive.config import ArchiverConfig
from meteor_py.archive.expiry import RetainPolicy
from meteor_py.errors import AccessDenied, LeaseLost, LogTruncated, MeteorError, StreamNotFound
from meteor_py.log.handle import StreamHandle
from meteor_py.log.ring_reader import OwnerChanged
from meteor_py.records.config import InitialOffset
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import REQUEST_FLUSH, Script
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.base import RingbufferStore
from meteor_py.subscribe.group_admin import open_group
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import Term, member_name

if TYPE_CHECKING:
    from meteor_py.stream import Stream

_log = logging.getLogger(__name__)

#: Seconds to wait for the lease before checking whether to stop.
_HOLD_S = 0.5
#: If an append hangs, the archiver loses its lease after this many seconds.
_HANG_S = 600.0
#: Pauses after failures, in seconds: the first, which doubles each time; the longest; and the
#: longest after ``_MANY`` failures. They grow because each attempt uses up one of the million terms
#: in an epoch.
_BACKOFF_S = (0.1, 5.0, 60.0)
_MANY = 1_000
#: Seconds between two checks of whether a flush is done.
_FLUSH_CHECK_S = 0.02
#: Errors that a retry cannot fix. StoreMismatch is not among them: the store was correct when the
#: stream was opened, and the store's disk may be mounted again.
_FATAL = (StreamNotFound, AccessDenied)


class _State(enum.IntEnum):
    """The states of an archiver. An archiver never returns to an earlier state."""

    NEW = enum.auto()
    RUNNING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


class Archiver(Closeable):
    """An archiver for one stream. Get one with ``stream.archiver()``; ``run`` or ``start`` it once.

    >>> with stream.archiver(segment_age=10).start() as archiver:  # doctest: +SKIP
    ...     ...
    """

    def __init__(
        self,
        stream: Stream,
        handle: StreamHandle,
        store: RingbufferStore,
        config: ArchiverConfig,
        *,
        automatic: bool = False,
    ) -> None:
        self.stream = stream
        self.config = config
        self._handle = handle
        #: The archiver's name. ``stream.describe().archiver`` names the archiver with the lease.
        self.member = member_name()
        #: The last failure; reset to None once every record is archived.
        self.error: Exception | None = None
        self._store = store
        self._automatic = automatic  # whether the client, not the user, started it
        self._condition = SignalSafeCondition()
        self._state = _State.NEW
        self._runner: int | None = None  # the thread that runs this archiver
        self._failure: Exception | None = None  # the fatal error, until close() raises it
        self._thread: JoinableThread | None = None
        self._session: GroupSession | None = None
        self._archive_term: ArchiveTerm | None = None
        self._above = 0  # the highest term known to be in the store; the next must be higher
        self._failures = 0  # consecutive failures
        self._retain_policy = RetainPolicy(handle, store, stream.groups)
        self._pid = os.getpid()

    # -- for users -----------------------------------------------------------------------------

    def run(self) -> None:
        """Archive until another thread calls ``close()``. Retry after temporary failures.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was recreated.
            AccessDenied: The server denies this user a command that archiving needs.
            MeteorError: The archiver has already been started or closed.
        """
        self._begin()
        self._work()

    def _begin(self) -> None:
        """Mark the archiver as started. If the user started it, stop the client's own archiver."""
        with self._condition:
            if self._state is not _State.NEW:
                raise MeteorError(
                    f"This archiver for stream {self.stream.name!r} has already been started or "
                    "closed. Get another with stream.archiver()."
                )
            self._enter(_State.RUNNING)
        if not self._automatic:
            stop_archiver(self._handle)
        _opened.add(self)

    def _work(self) -> None:
        self._runner = threading.get_ident()
        try:
            while self._state < _State.STOPPING:
                try:
                    self._serve_term()
                except (Exception, OwnerChanged) as error:
                    if self._state >= _State.STOPPING:
                        break
                    if self._is_fatal(error):
                        self.error = error
                        # Stop being alive, so that reopening the stream starts a new archiver.
                        self._enter(_State.STOPPING)
                        raise
                    self._note(error)
                    self._leave()
                    first_s, longest_s, later_s = _BACKOFF_S
                    longest_s = longest_s if self._failures < _MANY else later_s
                    wait_s = pause_s(max(self._failures, 1), first_s, longest_s)
                    self._wait_for(_State.STOPPING, wait_s)
        finally:
            self._leave()
            self._enter(_State.ENDED)

    def start(self) -> Archiver:
        """Start a thread that archives until ``close()``, and return this archiver.

        Raises:
            MeteorError: The archiver has already been started or closed.
        """
        self._begin()
        try:
            name = f"meteor-archiver-{self.stream.name}"
            self._thread = JoinableThread(self._run_in_thread, name)
            self._thread.start()
        except BaseException:  # such as Ctrl-C: close() must not wait for a thread that never runs
            self._enter(_State.ENDED)
            raise
        return self

    def close(self, timeout: float = 30.0) -> None:
        """Finish a segment that is being written, then stop. Other records stay in the ring.

        Raises:
            TimeoutError: The archiver did not end within ``timeout`` seconds.
            Exception: The error that ended the thread from ``start``, unless the stream was deleted
                or recreated.
        """
        if self._pid != os.getpid():
            return  # in a forked child: thread and lease belong to the parent
        self.stop()
        if self._runner != threading.get_ident():
            if not self._wait_for(_State.ENDED, timeout):
                raise TimeoutError(
                    f"The archiver for stream {self.stream.name!r} did not end within {timeout:g} "
                    "seconds. Close it again with a longer timeout."
                )
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, timeout: float = 10.0) -> None:
        """If the server is private, and so ends with its client, archive all records.

        Log a warning if that fails.
        """
        if not self._handle.connector.is_private or self._state >= _State.STOPPING:
            return
        try:
            self._handle.check_store()  # if the store is gone, the flush would only time out
            flush(self._handle, timeout)
        except (MeteorError, ValueError) as error:
            _log.warning(
                "Unarchived records of stream %r will be lost with its private server: %s",
                *(self.stream.name, error),
            )

    def stop(self) -> None:
        """Tell the archiver to end, without waiting for it."""
        self._enter(_State.ENDED if self._state is _State.NEW else _State.STOPPING)
        session, archive_term = self._session, self._archive_term
        if session is not None:
            session.interrupt()
        if archive_term is not None:
            archive_term.interrupt()

    @property
    def alive(self) -> bool:
        """Whether the thread is running and has not been asked to stop."""
        running = self._thread is not None and self._thread.is_alive()
        return running and self._state is _State.RUNNING

    def is_of(self, stream: StreamHandle, store: RingbufferStore) -> bool:
        """Return whether this archiver is alive and archives this stream to this store."""
        same_store = store is self._store or (store.uri or "") == self._store.uri
        return same_store and stream.incarnation == self._handle.incarnation and self.alive

    def __repr__(self) -> str:
        state = "running" if _State.NEW < self._state < _State.ENDED else "not running"
        return f"<Archiver of {self.stream.name!r}, {state}>"

    # -- the work ------------------------------------------------------------------------------

    def _enter(self, state: _State) -> None:
        with self._condition:
            self._state = max(self._state, state)
            self._condition.notify_all()

    def _wait_for(self, state: _State, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._state >= state, timeout_s)

    def _run_in_thread(self) -> None:
        try:
            self._work()
        except (StreamNotFound, LogTruncated) as error:
            _log.info("The archiver has ended: %s", error)
        except Exception as error:
            _log.error("The archiver for stream %r has ended: %s", self.stream.name, error)
            self._failure = error

    def _serve_term(self) -> None:
        """Wait a short time for the lease, and archive while this archiver holds it."""
        if self._session is None:
            self._session = GroupSession.join(
                *(self._handle, keys.ARCHIVERS, self.member),
                confirmed=open_group(self._handle, keys.ARCHIVERS, InitialOffset.LATEST),
                lease_ttl_s=self.config.lease_ttl,
                max_poll_interval_s=_HANG_S,
                above=self._above,
            )
        session = self._session
        session.alive_at = now()  # a long wait is not a hang
        term = session.hold(_HOLD_S)
        if term is None:
            return
        try:
            archive_term = ArchiveTerm(self._handle, self._store, self.config, session, term)
        except TermTooLow as error:  # the server has lost terms: next time, ask for a higher term
            self._above = error.term
            self._leave()
            return
        self._archive_term = archive_term
        archive_term.retain_policy = self._retain_policy
        try:
            try:
                self._archive(archive_term, session, term)
            except MeteorError:
                # While stopping, ignore the error: stop() has interrupted a wait.
                if self._state < _State.STOPPING:
                    raise
            if self._state >= _State.STOPPING:
                archive_term.finish()
        finally:
            self._archive_term = None
            archive_term.close()
            # Give up the lease, which ends the term: another ArchiveTerm in the same term might
            # append the same offsets differently.
            self._leave()

    def _archive(self, archive_term: ArchiveTerm, session: GroupSession, term: Term) -> None:
        """Archive until the lease is lost or the archiver is stopped."""
        while self._state < _State.STOPPING and session.hold(0.0) is term:
            archive_term.step()
            if not archive_term.records:  # every record is archived
                if self._failures:
                    _log.info("Archiving works again for stream %r.", self.stream.name)
                self.error, self._failures = None, 0

    def _leave(self) -> None:
        """Leave the group and release the lease, so that another archiver can take over."""
        session, self._session = self._session, None
        if session is not None:
            session.close(0.0)

    def _is_fatal(self, error: BaseException) -> bool:
        if isinstance(error, LogTruncated):  # fatal only if the stream was deleted or recreated
            try:
                found = self._handle.connector.call(
                    "HGET", keys.meta(self._handle.name), "incarnation"
                )
            except MeteorError:
                return False  # unknown, so try another term
            return bool(found is None or found.decode() != self._handle.incarnation)
        return isinstance(error, _FATAL)

    def _note(self, error: BaseException) -> None:
        """Store and log a failure. Do not log a ``MeteorError`` that follows another failure."""
        if isinstance(error, (OwnerChanged, LeaseLost)):
            _log.info("Another archiver for stream %r has taken over.", self.stream.name)
            return
        if isinstance(error, Exception):
            self.error = error
        if self._failures == 0 or not isinstance(error, MeteorError):
            _log.warning(
                "Failed to archive stream %r; will retry: %s",
                *(self.stream.name, error),
                exc_info=not isinstance(error, MeteorError),
            )
        self._failures += 1


# -- archivers that clients start automatically --------------------------------------------------

#: Archivers that clients started automatically, by connector and stream.
_running: dict[tuple[int, str], Archiver] = {}
_lock = threading.RLock()  # reentrant: a signal handler may close the client while it is held


def start_archiver(stream: Stream, handle: StreamHandle, store: RingbufferStore) -> None:
    """Run an archiver for the stream in this process until the client is closed."""
    key = (id(handle.connector), handle.name)
    with _lock:
        found = _running.get(key)
        if found is not None and found.is_of(handle, store):
            return
        archiver = Archiver(stream, handle, store, ArchiverConfig(), automatic=True)
        _running[key] = archiver.start()
    if found is not None:
        found.close()


def stop_archiver(handle: StreamHandle) -> None:
    """Close the archiver that the client started automatically for this stream, if any."""
    with _lock:
        found = _running.pop((id(handle.connector), handle.name), None)
    if found is not None:
        found.close()


def flush(stream: StreamHandle, timeout_s: float) -> int:
    """Make the stream's archiver, in any process, archive all existing records, and wait for it.

    Returns:
        The end of the archived records.

    Raises:
        StoreUnavailable: The archiver did not finish within ``timeout_s`` seconds.
        StoreMismatch, StreamNotFound, LogTruncated: See ``run_archive_script``.
    """
    deadline = time.monotonic() + timeout_s
    end = int(run_archive_script(stream, REQUEST_FLUSH)[1])
    while (archived := stream.archived_bounds()[1]) < end:
        if time.monotonic() >= deadline:
            error = _error_of(stream)
            raise reply_errors.not_archived(stream.name, archived, end, timeout_s, error)
        time.sleep(_FLUSH_CHECK_S)
    return archived


def run_archive_script(
    stream: StreamHandle, script: Script, *args: int, group_keys: list[str] | None = None
) -> list[bytes]:
    """Run a script on a stream's archive and return its reply.

    Raises:
        StoreMismatch: The stream has no store.
        StreamNotFound: The stream was deleted.
        LogTruncated: The stream was recreated.
    """
    script_keys = [keys.meta(stream.name), *(group_keys or [])]
    reply: list[bytes] = stream.run(script, [stream.incarnation, *args], script_keys)
    if reply[0] == b"NOSTORE":
        raise reply_errors.no_store(stream.name)
    return reply


def _error_of(handle: StreamHandle) -> Exception | None:
    """Return the last error of an archiver for the stream in this process, if any."""
    archivers = (x for x in _opened.objects() if x._handle.incarnation == handle.incarnation)
    return next((x.error for x in archivers if x.error is not None), None)


def _close(archivers: Sequence[Archiver]) -> None:
    closing = set(archivers)
    with _lock:
        for key in [key for key, archiver in _running.items() if archiver in closing]:
            del _running[key]
    for archiver in archivers:
        archiver.save()
    for archiver in archivers:
        archiver.stop()  # stop all before closing any, so that the waits do not add up
    close_each(archivers, _close_one)


def _close_one(archiver: Archiver) -> None:
    _opened.discard(archiver)
    archiver.close()


def _at_exit(archivers: Sequence[Archiver]) -> None:
    """Close the archivers, so that other processes need not wait for their leases to expire."""
    for archiver in archivers:
        try:
            archiver.save(5.0)
            archiver.close(5.0)
        except Exception as error:
            _log.warning("%s", error)


def _after_fork(_: Sequence[Archiver]) -> None:
    global _lock
    _lock = threading.RLock()
    _running.clear()


#: Archivers that were started in this process, to be closed with their client or at exit.
_opened: Registry[Archiver] = Registry(
    ClosingOrder.ARCHIVERS,
    owner=lambda archiver: archiver._handle.connector,
    close=_close,
    at_exit=_at_exit,
    after_fork=_after_fork,
)
