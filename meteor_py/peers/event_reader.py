"""The watch of a group handle: reads its events, and answers to its messages, as they come."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meteor_py.errors import ConnectionFailed
from meteor_py.peers.event import read_event
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup

_log = logging.getLogger(__name__)

WATCH_PREFIX = "meteor-watch"
_BACKOFF_S = (0.02, 0.64)
#: Events that are read at a time.
_COUNT = 500
#: Before all answers.
_FIRST = "0-0"
#: Calls that may wait for those before them.
_CALLS_MAX = 10_000


class EventReader:
    """Owned by its group handle. Has a connection of its own; calls nobody that could block it."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._connection = group.books.connector.open_connection()
        self._ended = False
        #: Where it reads on among the answers to messages.
        self._answers = _FIRST
        self._anew = False
        self._thread = JoinableThread(self._run, f"{WATCH_PREFIX}-{group.name}")

    def start(self) -> None:
        self._thread.start()

    def read_anew(self) -> None:
        """Read all answers that are there, soon: the server may have begun their stream anew, and
        its clock, which numbers them, be behind. Those that are known do no harm."""
        self._anew = True

    def end(self) -> None:
        self._ended = True
        self._connection.interrupt()

    def join(self, timeout_s: float) -> bool:
        # Again and again: it may have connected only now.
        return self._thread.ends_within(timeout_s, self._connection.interrupt)

    def _run(self) -> None:
        failures = 0
        while not self._ended:
            try:
                self._read()
                failures = 0
            except ConnectionFailed:
                self.read_anew()  # it may be another server
                failures += 1
                time.sleep(0.0 if self._ended else pause_s(failures, *_BACKOFF_S))
            except Exception:
                if not self._ended:
                    _log.exception("The watch of group %r failed.", self._group.name)
                failures += 1
                time.sleep(pause_s(failures, *_BACKOFF_S))
        self._connection.close()

    def _read(self) -> None:
        group = self._group
        events, answers = group.books.key("events"), group.books.key(f"replies:{group.session}")
        block_s = min(self._connection.block_max_s, group.config.ttl / 2)
        view = group.picture.view
        if self._anew:
            self._anew = False
            self._answers = _FIRST
        self._connection.connect()
        if self._ended:
            return  # whoever ended it may have found no connection to interrupt
        found = self._connection.call(
            *("XREAD", "COUNT", _COUNT, "BLOCK", max(int(block_s * 1000), 1)),
            *("STREAMS", events, answers, f"{view}-0", self._answers),
            timeout_s=block_s + self._connection.timeout_s,
        )
        for key, entries in found or ():
            if key.decode() == events:
                self._take_events(view, entries)
            else:
                for entry_id, flat in entries:
                    group.mail.answered(flat[1].decode())
                    self._answers = entry_id.decode()

    def _take_events(self, view: int, entries: list[Any]) -> None:
        group = self._group
        for entry_id, flat in entries:
            event = read_event(entry_id, flat)
            with group.lock:
                if group.picture.view != view:
                    return  # it was looked at anew meanwhile
                trimmed = event.view != view + 1
                replaced = not trimmed and not group.picture.continues(event)
                if not trimmed and not replaced:
                    group.apply(event)
                    view = event.view
            if trimmed or replaced:
                group.resync(reset=replaced, connection=self._connection)
                return


class CallbackThread:
    """Calls the functions of the application, one after the other, in a thread of its own.

    When too many wait, further calls are left out, and in their place those are made that
    ``instead`` gives.
    """

    def __init__(
        self, name: str, instead: Callable[[], Iterable[Callable[[], object]]] = tuple
    ) -> None:
        self._instead = instead
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._state = SignalSafeCondition()
        self._ended = False
        self._holders: set[object] = set()
        self._missed = 0  # calls, since one that hangs has let so many wait
        self._thread = JoinableThread(self._run, f"meteor-caller-{name}")

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        with self._state:
            if len(self._calls) >= _CALLS_MAX:
                if not self._missed:
                    self._calls.append((self._make_up, ()))
                self._missed += 1
                return
            self._calls.append((function, arguments))
            self._state.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin no call inside the block."""
        holder = object()
        try:
            with self._state:
                self._holders.add(holder)
            yield
        finally:
            with self._state:
                self._holders.discard(holder)
                self._state.notify_all()

    def end(self) -> None:
        with self._state:
            self._ended = True
            self._state.notify_all()

    def join(self, timeout_s: float) -> bool:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._ended or (self._calls and not self._holders))
                if self._ended:
                    return
                function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except BaseException:  # also SystemExit: there would be no more calls
                _log.exception("A callback of a group failed.")

    def _make_up(self) -> None:
        """In the place of calls that were left out."""
        with self._state:
            missed, self._missed = self._missed, 0
            self._calls.extendleft((function, ()) for function in reversed([*self._instead()]))
        _log.error(
            "The callbacks of a group were %d events behind: %d calls were left out.",
            *(_CALLS_MAX, missed),
        )
