"""A background thread that passes a subscriber's records to a handler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from meteor_py.errors import ConnectionFailed, LeaseLost, OutcomeUnknown
from meteor_py.log.handle import StreamHandle
from meteor_py.records.codec import Codec
from meteor_py.records.config import check_choice, check_int
from meteor_py.records.record import Record, decode_record
from meteor_py.redis.connection import Connection
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.locks import SignalSafeEvent
from meteor_py.runtime.threads import JoinableThread
from meteor_py.subscribe.dead_letters import bury, reason_of

if TYPE_CHECKING:
    from meteor_py.stream import Stream
    from meteor_py.subscribe.fetcher import Fetcher
    from meteor_py.subscribe.subscriber import Subscriber

_log = logging.getLogger(__name__)

Handler = Callable[[Record], object]
#: What to do with a record if the handler raises an exception. If this is a stream, the record is
#: published there as a dead letter.
OnError: TypeAlias = "Literal['stop', 'skip', 'retry'] | Stream"

#: Default number of tries before a record becomes a dead letter.
_TRIES = 3
#: Seconds to wait for the last confirm when the thread ends.
_FLUSH_S = 5.0
#: Shortest and longest pause between attempts, in seconds. The pause doubles each time.
_BACKOFF_S = (0.05, 5.0)


class Receiver:
    """A background thread that passes a subscriber's records to a handler.

    Create one with ``Subscriber.attach_receiver``. The thread ends when the receiver or the
    subscriber is closed, or after an error that neither ``on_error`` nor a retry can handle; see
    ``error``.

    >>> receiver = sub.attach_receiver(print)    # doctest: +SKIP
    >>> receiver.join(60), receiver.error    # doctest: +SKIP
    (False, None)
    """

    def __init__(
        self,
        subscriber: Subscriber,
        fetcher: Fetcher,
        codec: Codec | None,
        handler: Handler,
        on_error: OnError,
        tries: int | None,
        acks: int,
    ) -> None:
        if not callable(handler):
            raise TypeError("A receiver's handler must be callable with one record.")
        self._letters: StreamHandle | None = None
        if isinstance(on_error, str):
            check_choice("on_error", on_error, ("stop", "skip", "retry"))
        elif hasattr(on_error, "publisher"):
            self._letters = on_error._open_for_dead_letters()
            if (on_error.name, on_error.incarnation) == (
                subscriber.stream.name,
                subscriber.stream.incarnation,
            ):
                raise ValueError(
                    f"Stream {on_error.name!r} cannot receive its own dead letters. Pass another "
                    "stream as on_error."
                )
        else:
            raise TypeError('on_error must be "stop", "skip", "retry", or a stream.')
        if check_int("acks", acks, 0, 1_000) and self._letters is None:
            raise ValueError("acks needs a dead-letter stream. Pass one as on_error.")
        if acks and self._letters is not None and self._letters.connector.address.scheme == "fake":
            raise ValueError("fake:// has no replicas. Publish dead letters there with acks=0.")
        if tries is not None:
            check_int("tries", tries, 1, 1_000_000)
        elif on_error != "retry":
            tries = _TRIES if self._letters is not None else 1
        self._subscriber = subscriber
        self._stream = subscriber.stream.name
        self._fetcher = fetcher
        # Called with each raw record. Without a codec, this is the handler itself.
        self._call = (
            handler if codec is None else partial(_decode_and_call, self._stream, codec, handler)
        )
        self._skips = on_error == "skip"
        self._tries = tries
        self._acks = acks
        self._error: BaseException | None = None
        self._raised = False
        #: Number of records that the receiver skipped or dead-lettered after the handler failed.
        self.failed = 0
        self._stop = SignalSafeEvent()
        self._thread = JoinableThread(self._run, f"meteor-receiver-{self._stream}")

    @property
    def error(self) -> BaseException | None:
        """The error that ended the receiver; None while it runs, and after a normal close."""
        return self._error

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end, for at most ``timeout`` seconds; return whether it has."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float = 5.0) -> None:
        """Let the handler finish its record, then stop the thread. Idempotent.

        Args:
            timeout: Seconds to wait for the handler.

        Raises:
            TimeoutError: The handler did not return in time.
            Exception: The error that ended the receiver; raised once.
        """
        self.stop()
        if self.is_current_thread():
            return  # called by the handler; the thread ends when the handler returns
        if not self.join(timeout):
            raise TimeoutError(
                f"The handler for stream {self._stream!r} did not return within {timeout:g} "
                "seconds. Close again with a longer timeout."
            )
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def __repr__(self) -> str:
        state = "running" if self.alive else "ended" if self._error is None else "failed"
        return f"<Receiver of {self._stream!r} ({state})>"

    # -- for the subscriber --------------------------------------------------------------------

    def start(self) -> None:
        try:
            self._thread.start()
        except BaseException:  # such as Ctrl-C; the thread may already be running
            self.stop()
            raise

    def stop(self) -> None:
        """Make the thread end after the current record, without waiting for it."""
        self._stop.set()
        self._fetcher.interrupt()

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._receive()
        finally:
            session = self._fetcher.session
            if session is not None:
                try:
                    session.deactivate(_FLUSH_S)
                except Exception as error:
                    _log.warning("The receiver could not leave %s: %s", session.lease, error)

    def _receive(self) -> None:
        failures = 0  # consecutive failures
        while not self._stop.is_set():
            try:
                for record in self._fetcher.iterate(None):
                    failures = 0
                    handled = False
                    try:
                        self._call(record)
                        handled = True
                    except Exception as error:
                        handled = self._handle_failure(record, error)
                    finally:
                        if not handled:
                            self._fetcher.buffer.position = record.offset
                    if not handled:
                        break
            except BaseException as error:
                # Retry: the server may become reachable, and a lost lease may become free.
                left = isinstance(error, (LeaseLost, OutcomeUnknown))
                if not left and not getattr(error, "retriable", False):
                    self._fail(error)
                    return
                _log.warning("The receiver for stream %r will retry: %s", self._stream, error)
                failures += 1
                self._stop.wait(pause_s(failures, *_BACKOFF_S))

    def _handle_failure(self, raw: Record, error: Exception) -> bool:
        """Retry, skip or dead-letter a record; return False if it must be read again."""
        failures = 0
        while True:
            failures += 1
            _log.info(
                "The handler failed for record %d of stream %r: %r",
                *(raw.offset, self._stream, error),
            )
            if isinstance(error, LeaseLost):
                self._stop.wait(_BACKOFF_S[0])  # avoid a busy loop: each try may raise this again
                return False
            if not self._holds_lease():
                return False
            if failures == self._tries:
                return self._give_up(raw, error, failures)
            pause = partial(self._stop.wait, pause_s(failures, *_BACKOFF_S))
            if self._fetcher.run_blocking(pause):
                return False
            try:
                self._call(raw)
                return True
            except Exception as next_error:
                error = next_error

    def _give_up(self, raw: Record, error: Exception, failures: int) -> bool:
        """Apply ``on_error`` to a record after its last failure; return whether it is settled."""
        subscriber, session = self._subscriber, self._fetcher.session
        fate = "skipped"
        if self._letters is not None:
            letter = partial(
                bury,
                *(self._letters, subscriber._handle, subscriber.config.group, raw),
                epoch=self._fetcher.buffer.epoch_of(raw.offset),
                member=subscriber.member,
                reason=reason_of(error),
                tries=failures,
                acks=self._acks,
                stop=self._stop.is_set,
            )
            history = self._fetcher.run_blocking(letter)
            if session is not None and self._is_on_server(self._letters, history):
                session.note_letter(raw.offset, history, self._fetcher.buffer.term)
            fate = f"moved to stream {self._letters.name!r}"
        elif not self._skips:
            self._fail(error)
            return False
        # If earlier records are unconfirmed, the application must confirm this record itself.
        if session is not None and session.wanted == raw.offset:
            session.confirm_silently(raw.offset + 1, self._fetcher.buffer.term)
        self.failed += 1
        _log.warning(
            "Record %d of stream %r failed %d times and was %s.",
            *(raw.offset, self._stream, failures, fate),
            exc_info=error,
        )
        return True

    def _is_on_server(self, letters: StreamHandle, history: str) -> bool:
        """Return whether dead letters and records are on the same server, in that history."""
        records = self._subscriber._handle
        if not history:
            return False
        if letters.connector.address == records.connector.address:
            return records.connector.is_same_server(records.name, letters.name)
        return records.use(Connection.refresh_history) == history

    def _fail(self, error: BaseException) -> None:
        _log.error("The receiver for stream %r has ended.", self._stream, exc_info=error)
        self._error = error
        self._stop.set()

    def _holds_lease(self) -> bool:
        """Return whether, as far as this member knows, it still holds the lease."""
        session = self._fetcher.session
        if session is None:
            return True
        term = session.term
        try:
            return term is not None and session.hold(0.0) is term
        except ConnectionFailed:
            return True  # if the lease was lost, the server will refuse the confirm


def _decode_and_call(stream: str, codec: Codec, handler: Handler, raw: Record) -> object:
    return handler(decode_record(stream, codec, raw))
