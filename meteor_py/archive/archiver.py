"""The archiver: copies records from the ring into the store, before the ring may drop them.

Any number may run, in any process; the one that holds the lease of the group ``.archiver`` works,
the others wait. A term goes like this: see where the last one ended (``archived``), read on from
there, and whenever enough is gathered append it to the store, then say so with
``advance_archived``, which is the commit. Whatever goes wrong in between (a full disk, a lost
connection, a fail-over, another owner), the term is given up, and the next one begins at what is
committed: nothing is remembered that could be wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meteor_py.archive.archive_term import ArchiveTerm, TermTooLow
from meteor_py.archive.config import ArchiverConfig
from meteor_py.errors import (
    AccessDenied,
    LeaseLost,
    LogTruncated,
    MeteorError,
    StreamNotFound,
)
from meteor_py.log.handle import StreamHandle
from meteor_py.log.ring_reader import OwnerChanged
from meteor_py.records.config import InitialOffset
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import REQUEST_FLUSH, Script
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.lifecycle import Closeable, ClosingOrder, Registry, close_each
from meteor_py.runtime.threads import JoinableThread
from meteor_py.subscribe.group_admin import open_group
from meteor_py.subscribe.group_session import GroupSession
from meteor_py.subscribe.lease import member_name

if TYPE_CHECKING:
    from meteor_py.store.base import RingbufferStore
    from meteor_py.stream import Stream

_log = logging.getLogger(__name__)

#: Seconds to wait for the lease before looking whether to stop.
_HOLD_S = 0.5
#: Seconds after which an append that does not end lets others have the lease.
_HANG_S = 600.0
#: Seconds between two tries after a failure, doubled each time up to the second figure; after very
#: many, up to the third: each try is a term, and an epoch has a million of them.
_BACKOFF_S = (0.1, 5.0, 60.0)
_MANY = 1_000
#: Seconds between two looks whether a flush is done.
_FLUSH_LOOK_S = 0.02
#: What will not get better by itself. A store that is another may: it was the right one when the
#: stream was opened, and its disk may be mounted again.
_FATAL = (StreamNotFound, AccessDenied)


class Archiver(Closeable):
    """Archives one stream. Get it with ``stream.archiver()``; ``run`` it, or ``start`` it, once.

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
        #: Its name as the owner of the lease: ``stream.describe().archiver`` while it works.
        self.member = member_name()
        #: What went wrong last; None again once nothing waits to be archived.
        self.error: Exception | None = None
        self._store = store
        self._automatic = automatic  # started by the client, not by the user
        self._begun = False
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._runner: int | None = None  # the thread that it runs in
        self._failure: Exception | None = None  # what has ended it, until close() raises it
        self._thread: JoinableThread | None = None
        self._session: GroupSession | None = None
        self._archive_term: ArchiveTerm | None = None
        self._above = 0  # terms up to this one are in the store already
        self._failures = 0  # in a row
        self._pid = os.getpid()

    # -- for users -----------------------------------------------------------------------------

    def run(self) -> None:
        """Archive until ``close()`` is called elsewhere; failures that may pass are survived.

        Raises:
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
            AccessDenied: The server does not let this user do it.
            MeteorError: It was run or started before.
        """
        self._begin()
        self._work()

    def _begin(self) -> None:
        """Each is for one run: what is known of leases and terms belongs to it."""
        if self._begun or self._stopped.is_set():
            raise MeteorError(
                f"This archiver of stream {self.stream.name!r} was started or closed before; get "
                "another with stream.archiver()."
            )
        self._begun = True
        if not self._automatic:
            stop_archiver(self._handle)
        _begun.add(self)

    def _work(self) -> None:
        self._runner = threading.get_ident()
        try:
            while not self._stopped.is_set():
                try:
                    self._serve_term()
                except (Exception, OwnerChanged) as error:
                    if self._stopped.is_set():
                        break
                    if self._is_fatal(error):
                        self.error = error
                        self._stopped.set()  # at once: opening the stream again needs another
                        raise
                    self._note(error)
                    self._leave()
                    first_s, longest_s, later_s = _BACKOFF_S
                    longest_s = longest_s if self._failures < _MANY else later_s
                    self._stopped.wait(pause_s(max(self._failures, 1), first_s, longest_s))
        finally:
            self._leave()
            self._ended.set()

    def start(self) -> Archiver:
        """The same in a thread, until ``close()``.

        Raises:
            MeteorError: It was run or started before.
        """
        self._begin()
        name = f"meteor-archiver-{self.stream.name}"
        self._thread = JoinableThread(self._run_in_thread, name)
        self._thread.start()
        return self

    def close(self, timeout: float = 30.0) -> None:
        """End it after the segment that is being written. What is in the ring stays there.

        Raises:
            TimeoutError: That takes longer than ``timeout`` seconds.
            Exception: What has ended it before, in its thread.
        """
        if self._pid != os.getpid():
            return  # a forked child: thread and lease are the parent's
        self.stop()
        thread = self._thread
        if self._begun and self._runner != threading.get_ident():
            if not self._ended.wait(timeout):
                raise TimeoutError(f"The archiver of stream {self.stream.name!r} does not end.")
            if thread is not None:
                thread.join(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, timeout: float = 10.0) -> None:
        """If the server ends with its client: archive what there is, or say that it is lost."""
        if not self._handle.connector.is_private or self._stopped.is_set():
            return
        try:
            self._handle.check_store()  # else a store that is gone would be waited for
            flush(self._handle, timeout)
        except (MeteorError, ValueError) as error:
            _log.warning(
                "What is not archived of stream %r is lost with its private server: %s",
                *(self.stream.name, error),
            )

    def stop(self) -> None:
        """Let it end soon, without waiting for that."""
        self._stopped.set()
        session, archive_term = self._session, self._archive_term
        if session is not None:
            session.interrupt()
        if archive_term is not None:
            archive_term.interrupt()

    @property
    def alive(self) -> bool:
        """Whether it runs in a thread of its own, and goes on doing so."""
        running = self._thread is not None and self._thread.is_alive()
        return running and not self._stopped.is_set()

    def is_of(self, stream: StreamHandle, store: RingbufferStore) -> bool:
        """Whether it does what one of this stream and this store would do."""
        same_store = store is self._store or (store.uri or "") == self._store.uri
        return same_store and stream.incarnation == self._handle.incarnation and self.alive

    def __repr__(self) -> str:
        state = "at work" if self._begun and not self._ended.is_set() else "not at work"
        return f"<Archiver of {self.stream.name!r}, {state}>"

    # -- the work ------------------------------------------------------------------------------

    def _run_in_thread(self) -> None:
        try:
            self._work()
        except (StreamNotFound, LogTruncated) as error:
            _log.info("The archiver has nothing more to do: %s", error)
        except Exception as error:
            _log.error("The archiver of stream %r has ended: %s", self.stream.name, error)
            self._failure = error

    def _serve_term(self) -> None:
        """Wait a little for the lease, and archive while it is ours."""
        session = self._join()
        session.alive_at = now()  # a long wait is not a hang
        term = session.hold(_HOLD_S)
        if term is None:
            return
        try:
            archive_term = ArchiveTerm(self._handle, self._store, self.config, session, term)
        except TermTooLow as error:  # the server has forgotten terms: what we write must count
            self._above = error.term
            self._leave()
            return
        self._archive_term = archive_term
        try:
            while not self._stopped.is_set() and session.hold(0.0) is term:
                archive_term.step()
                if not archive_term.records:  # all that there was is archived
                    if self._failures:
                        _log.info("Stream %r is archived again.", self.stream.name)
                    self.error, self._failures = None, 0
        finally:
            self._archive_term = None
            archive_term.close()
            # One ArchiveTerm per term: what is appended twice in one must be the same.
            self._leave()

    def _join(self) -> GroupSession:
        """Become one of the archivers."""
        if self._session is None:
            self._session = GroupSession.join(
                *(self._handle, keys.ARCHIVERS, self.member),
                confirmed=open_group(self._handle, keys.ARCHIVERS, InitialOffset.LATEST),
                lease_ttl_s=self.config.lease_ttl,
                max_poll_interval_s=_HANG_S,
                above=self._above,
            )
        return self._session

    def _leave(self) -> None:
        """Give up the lease: what fails here may work for another."""
        session, self._session = self._session, None
        if session is not None:
            session.close(0.0)

    def _is_fatal(self, error: BaseException) -> bool:
        if isinstance(error, LogTruncated):  # by a fail-over, or because it was recreated
            try:
                found = self._handle.connector.call(
                    "HGET", keys.meta(self._handle.name), "incarnation"
                )
            except MeteorError:
                return False  # the next term will tell
            return bool(found is None or found.decode() != self._handle.incarnation)
        return isinstance(error, _FATAL)

    def _note(self, error: BaseException) -> None:
        """Remember a failure, and say so: once, until something works again."""
        if isinstance(error, (OwnerChanged, LeaseLost)):
            _log.info("Another archiver of stream %r has taken over.", self.stream.name)
            return
        if isinstance(error, Exception):
            self.error = error
        if self._failures == 0 or not isinstance(error, MeteorError):
            _log.warning(
                "Nothing can be archived of stream %r now; it is tried again: %s",
                *(self.stream.name, error),
                exc_info=not isinstance(error, MeteorError),
            )
        self._failures += 1


# -- archivers that a client runs by itself ------------------------------------------------------

#: By connector and stream.
_running: dict[tuple[int, str], Archiver] = {}
_lock = threading.RLock()  # a signal handler may close the client in the middle


def start_archiver(stream: Stream, handle: StreamHandle, store: RingbufferStore) -> None:
    """Let an archiver of the stream run in this process until its client is closed."""
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
    """End the one that runs by itself, if one does."""
    with _lock:
        found = _running.pop((id(handle.connector), handle.name), None)
    if found is not None:
        found.close()


def flush(stream: StreamHandle, timeout_s: float) -> int:
    """Ask the stream's archiver, wherever it runs, to archive all records now, and wait for it.

    Returns:
        The end of the archived records.

    Raises:
        StoreUnavailable: The archiver did not finish within ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    end = int(run_archive_script(stream, REQUEST_FLUSH)[1])
    while (archived := stream.archived_bounds()[1]) < end:
        if time.monotonic() >= deadline:
            error = _error_of(stream)
            raise reply_errors.not_archived(stream.name, archived, end, timeout_s, error)
        time.sleep(_FLUSH_LOOK_S)
    return archived


def run_archive_script(
    stream: StreamHandle, script: Script, *args: int, group_keys: list[str] | None = None
) -> list[bytes]:
    """Run a script that works on the archive of a stream and return its reply.

    Raises:
        StoreMismatch: The stream has no store.
        StreamNotFound, LogTruncated: The stream was deleted, or recreated.
    """
    script_keys = [keys.meta(stream.name), *(group_keys or [])]
    reply: list[bytes] = stream.run(script, [stream.incarnation, *args], script_keys)
    if reply[0] == b"NOSTORE":
        raise reply_errors.no_store(stream.name)
    return reply


def _error_of(handle: StreamHandle) -> Exception | None:
    """What keeps an archiver of this process from archiving the stream, if something does."""
    errors = (x.error for x in _begun.objects() if x._handle.incarnation == handle.incarnation)
    return next((error for error in errors if error is not None), None)


def _close(archivers: Sequence[Archiver]) -> None:
    closing = set(archivers)
    with _lock:
        for key in [key for key, archiver in _running.items() if archiver in closing]:
            del _running[key]
    for archiver in archivers:
        archiver.save()
    for archiver in archivers:
        archiver.stop()  # all at once: one that hangs does not keep the others
    close_each(archivers, _close_one)


def _close_one(archiver: Archiver) -> None:
    _begun.discard(archiver)
    archiver.close()


def _at_exit(archivers: Sequence[Archiver]) -> None:
    """Let other archivers have the leases at once."""
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


#: Archivers of this process that were begun and not closed.
_begun: Registry[Archiver] = Registry(
    ClosingOrder.ARCHIVERS,
    owner=lambda archiver: archiver._handle.connector,
    close=_close,
    at_exit=_at_exit,
    after_fork=_after_fork,
)
