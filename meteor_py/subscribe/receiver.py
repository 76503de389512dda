"""A background thread that passes a subscriber's records to a handler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

from meteor_py.errors import ConnectionFailed, LeaseLost
from meteor_py.log.handle import StreamHandle
from meteor_py.records.codec import Codec
from meteor_py.records.config import check_choice, check_int
from meteor_py.records.record import Record, decode_record
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.threads import JoinableThread
from meteor_py.subscribe.dead_letters import bury

if TYPE_CHECKING:
    from meteor_py.stream import Stream
    from meteor_py.subscribe.fetcher import Fetcher
    from meteor_py.subscribe.subscriber import Subscriber

_log = logging.getLogger(__name__)

Handler = Callable[[Record], object]
#: What to do about a record that the handler raises for. A stream takes dead letters.
OnError: TypeAlias = "Literal['stop', 'skip', 'retry'] | Stream"

#: How often dead letters are tried before.
_TRIES = 3
#: Seconds to wait for the last confirm.
_FLUSH_S = 5.0
#: Seconds between two tries of a record, doubled each time up to the second figure.
_BACKOFF_S = (0.05, 5.0)


class Receiver:
    """Made by ``Subscriber.attach_receiver``, and closed with the subscriber.

    Ends with the subscriber, or with an ``error``: one of the handler, or one of reading.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        fetcher: Fetcher,
        codec: Codec | None,
        handler: Handler,
        on_error: OnError,
        tries: int | None,
    ) -> None:
        if not callable(handler):
            raise TypeError("The handler of a receiver must be a function of one record.")
        self._letters: StreamHandle | None = None
        if isinstance(on_error, str):
            check_choice("on_error", on_error, ("stop", "skip", "retry"))
        elif hasattr(on_error, "publisher"):
            self._letters = on_error._handle
            if (on_error.name, on_error.incarnation) == (
                subscriber.stream.name,
                subscriber.stream.incarnation,
            ):
                raise ValueError("The dead letters of a stream cannot go to the stream itself.")
        else:
            raise TypeError('on_error must be "stop", "skip", "retry", or a stream.')
        if tries is not None:
            check_int("tries", tries, 1, 1_000_000)
        elif on_error != "retry":
            tries = _TRIES if self._letters is not None else 1
        self._subscriber = subscriber
        self._fetcher = fetcher
        self._codec = codec
        self._handler = handler
        self._skips = on_error == "skip"
        self._tries = tries
        self._error: BaseException | None = None
        self._raised = False
        #: Records that the handler failed for, and that were skipped or published as dead letters.
        self.failed = 0
        self._stop = threading.Event()
        self._thread = JoinableThread(self._run, f"meteor-receiver-{subscriber.stream.name}")

    @property
    def error(self) -> BaseException | None:
        """What ended it, if it did not end by being closed."""
        return self._error

    @property
    def alive(self) -> bool:
        """Whether it is at work."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it ends; tell whether it did.

        Args:
            timeout: At most so many seconds; None waits for as long as it works.
        """
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self, timeout: float = 5.0) -> None:
        """Let the handler finish its record, and end. Closing twice is fine.

        Args:
            timeout: Seconds to wait for the handler.

        Raises:
            TimeoutError: The handler does not return.
            Exception: What ended the receiver before, once.
        """
        self.stop()
        if self.is_current_thread():
            return  # by the handler: it ends when that returns
        if not self.join(timeout):
            raise TimeoutError(
                f"The handler of stream {self._subscriber.stream.name!r} did not return within "
                f"{timeout:g} seconds."
            )
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def __repr__(self) -> str:
        state = "at work" if self.alive else "ended" if self._error is None else "failed"
        return f"<Receiver of {self._subscriber.stream.name!r} ({state})>"

    # -- for the subscriber --------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let it end after its record, without waiting for that."""
        self._stop.set()
        self._fetcher.interrupt()

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._receive()
        finally:
            self._leave()

    def _receive(self) -> None:
        failures = 0  # in a row
        while not self._stop.is_set():
            try:
                for record in self._fetcher.iterate(None):
                    failures = 0
                    handled = False
                    try:
                        handled = self._handle(record)
                    finally:
                        if not handled:
                            self._fetcher.buffer.position = record.offset
                    if not handled:
                        break
            except BaseException as error:
                # The server will come back, or another member has the lease: wait for either.
                if not isinstance(error, LeaseLost) and not getattr(error, "retriable", False):
                    self._fail(error)
                    return
                _log.warning("The receiver of stream %r: %s", self._subscriber.stream.name, error)
                failures += 1
                self._stop.wait(pause_s(failures, *_BACKOFF_S))

    def _leave(self) -> None:
        """Give up the lease: this member reads no more."""
        session = self._fetcher.session
        if session is None:
            return
        try:
            session.deactivate(_FLUSH_S)
        except Exception as error:
            _log.warning("The receiver of %s ended badly: %s", session.lease, error)

    def _handle(self, raw: Record) -> bool:
        """Have one record handled, or see to it that it is not; False if it is to be left."""
        failures = 0
        while True:
            error = self._call(raw)
            if error is None:
                return True
            failures += 1
            if isinstance(error, LeaseLost):
                self._stop.wait(_BACKOFF_S[0])  # it may be about another lease, and come again
                return False
            if not self._ours():
                return False
            if failures == self._tries:
                return self._give_up(raw, error, failures)
            pause = partial(self._stop.wait, pause_s(failures, *_BACKOFF_S))
            if self._fetcher.run_blocking(pause):
                return False

    def _call(self, raw: Record) -> Exception | None:
        try:
            codec, stream = self._codec, self._subscriber.stream.name
            self._handler(raw if codec is None else decode_record(stream, codec, raw))
        except Exception as error:
            name = self._subscriber.stream.name
            _log.info("The handler failed for record %d of stream %r: %r", raw.offset, name, error)
            return error
        return None

    def _give_up(self, raw: Record, error: Exception, failures: int) -> bool:
        if self._letters is not None:
            self._bury(raw, error, failures)
        elif not self._skips:
            self._fail(error)
            return False
        self._confirm_failed(raw)
        self.failed += 1
        name = self._subscriber.stream.name
        fate = "skipped" if self._letters is None else f"in stream {self._letters.name!r}"
        _log.warning(
            "Record %d of stream %r failed %d times and is %s now.",
            *(raw.offset, name, failures, fate),
            exc_info=error,
        )
        return True

    def _bury(self, raw: Record, error: Exception, failures: int) -> None:
        assert self._letters is not None, "there is a stream of dead letters"
        subscriber = self._subscriber
        letter = partial(
            bury,
            *(self._letters, subscriber._handle, subscriber.config.group, raw),
            member=subscriber.member,
            reason=f"{type(error).__name__}: {error}",
            tries=failures,
            stop=self._stop.is_set,
        )
        self._fetcher.run_blocking(letter)

    def _fail(self, error: BaseException) -> None:
        name = self._subscriber.stream.name
        _log.error("The receiver of stream %r has ended.", name, exc_info=error)
        self._error = error
        self._stop.set()

    def _confirm_failed(self, raw: Record) -> None:
        """It is done, unless the application has something before it to confirm."""
        session = self._fetcher.session
        if session is not None and session.wanted == raw.offset:
            session.confirm_silently(raw.offset + 1, self._fetcher.buffer.term)

    def _ours(self) -> bool:
        """Whether this record is still ours to handle."""
        session = self._fetcher.session
        if session is None:
            return True
        term = session.term
        try:
            return term is not None and session.hold(0.0) is term
        except ConnectionFailed:
            return True  # not known; if it was lost, the confirm will be refused
