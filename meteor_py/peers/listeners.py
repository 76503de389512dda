"""A group handle's listeners: its callbacks and its event iterators."""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from meteor_py.errors import PeerError
from meteor_py.peers.event import Event
from meteor_py.records.config import check_function
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread
from meteor_py.runtime.weak_set import WeakSet

_log = logging.getLogger(__name__)
_F = TypeVar("_F", bound=Callable[..., object])

#: Maximum number of calls waiting for the callback thread.
_CALLS_MAX = 10_000
#: Maximum number of events waiting for an iterator.
_QUEUE_MAX = 10_000


class Listeners:
    """The listeners of one group handle. Only the handle changes them, under its lock."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._functions: dict[str, list[Callable[..., object]]] = {}
        self._queues = WeakSet[EventQueue]()
        self.thread = CallbackThread(group, lambda: list(self._functions.get("reset", ())))

    def add(self, what: str, function: _F) -> _F:
        """Register a function for ``on_<what>``."""
        check_function(f"on_{what}", function)
        self._functions.setdefault(what, []).append(function)
        return function

    def tell(self, what: str, *arguments: Any) -> None:
        """Queue a call to every function registered for ``on_<what>``."""
        for function in self._functions.get(what, ()):
            self.thread.call(function, *arguments)

    def spread(self, event: Event) -> None:
        """Pass an event to the ``on_event`` callbacks and to all iterators."""
        self.tell("event", event)
        for events in self._queues:
            if events.qsize() >= _QUEUE_MAX:
                events.behind = True
                self._queues.discard(events)
            events.put(None if events.behind else event)

    def open_queue(self) -> EventQueue:
        events = EventQueue()
        self._queues.add(events)
        return events

    def iterate(
        self, past: list[Event], events: EventQueue, timeout: float | None
    ) -> Iterator[Event]:
        """Iterate over past events, then over the events in a queue."""
        yield from past
        while True:
            try:
                event = events.get(timeout=timeout)
            except queue.Empty:
                return
            if event is None:
                break
            yield event
        if events.behind:
            raise PeerError(
                f"An iterator over the events of group {self._group!r} fell {_QUEUE_MAX:,} events "
                "behind and was stopped. Take a new snapshot and watch from there.",
                group=self._group,
            )

    def end_queues(self) -> None:
        for events in self._queues:
            events.put(None)


class EventQueue(queue.SimpleQueue["Event | None"]):
    """The events for one iterator. ``put`` is reentrant, so signal handlers may call it."""

    #: Whether too many events are waiting. If so, the queue gets no more events.
    behind = False


class CallbackThread(JoinableThread):
    """A thread that calls application functions one after another.

    If too many calls are waiting, it drops further calls. In their place, it later calls the
    functions that ``instead`` returns.
    """

    def __init__(
        self, name: str, instead: Callable[[], Iterable[Callable[[], object]]] = tuple
    ) -> None:
        super().__init__(self._call_all, f"meteor-callbacks-{name}")
        self._instead = instead
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._state = SignalSafeCondition()
        self._stopped = False
        self._holders: set[object] = set()
        self._missed = 0  # calls dropped since the queue became full

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
        """Start no call while the block runs."""
        holder = object()
        try:
            with self._state:
                self._holders.add(holder)
            yield
        finally:
            with self._state:
                self._holders.discard(holder)
                self._state.notify_all()

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            self._state.notify_all()

    def _call_all(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._stopped or (self._calls and not self._holders))
                if self._stopped:
                    return
                function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except BaseException:  # even SystemExit: it would end the thread and all further calls
                _log.exception("A peer group callback raised an exception (%s).", self.name)

    def _make_up(self) -> None:
        """Queue the functions from ``instead``, which make up for the dropped calls."""
        with self._state:
            missed, self._missed = self._missed, 0
            self._calls.extendleft((function, ()) for function in reversed([*self._instead()]))
        _log.error(
            "Peer group callbacks (%s) were %d calls behind, and %d calls were dropped.",
            self.name,
            _CALLS_MAX,
            missed,
        )
