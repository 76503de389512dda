"""Being told of what happens in a peer group: callbacks, and iterating over its events."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from meteor_py.errors import PeerError
from meteor_py.peers.event import Event, read_event
from meteor_py.peers.event_reader import CallbackThread
from meteor_py.peers.protocol import PeerProtocol
from meteor_py.peers.view import GroupView
from meteor_py.peers.voting.polls import Polls
from meteor_py.records.config import check_function, check_int, check_seconds

_F = TypeVar("_F", bound=Callable[..., object])


#: The largest number of an event: more cannot be counted.
_VIEW_MAX = 2**53
#: Events that may wait for who watches.
_QUEUE_MAX = 10_000


class Listening:
    """What a group handle tells to its process."""

    name: str
    books: PeerProtocol
    picture: GroupView
    lock: threading.RLock
    caller: CallbackThread
    ballots: Polls

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[str, list[Callable[..., object]]] = {}
        self._queues: weakref.WeakSet[_Queue] = weakref.WeakSet()

    def on_join(self, function: _F) -> _F:
        """Call a function with each ``Member`` that joins, also one that comes back from the dead.

        Like all of these it is called in the order of the events, in one thread of the group; the
        members are as they were after the event, or later.
        """
        return self._listen("join", function)

    def on_leave(self, function: _F) -> _F:
        """Call a function with each ``Member`` that leaves, and "left", "expired" or "removed"."""
        return self._listen("leave", function)

    def on_status(self, function: _F) -> _F:
        """Call a function with a named ``Member`` that dies or comes back, and its ``Status``."""
        return self._listen("status", function)

    def on_elected(self, function: _F) -> _F:
        """Call a function with the leader and the number of its term; at once if there is one."""
        check_function("on_elected", function)
        with self.lock:
            leader = self.picture.members.get(self.picture.leader or "")
            if leader is not None:
                self.caller.call(function, leader, self.picture.term)
            return self._listen("elected", function)

    def on_resigned(self, function: _F) -> _F:
        """Call a function with the id, term, and reason of each leader that leads no more."""
        return self._listen("resigned", function)

    def on_decision(self, function: _F) -> _F:
        """Call a function with the ``Outcome`` of each vote, whoever proposed it."""
        self.ballots.use()
        return self._listen("decision", function)

    def on_event(self, function: _F) -> _F:
        """Call a function with each ``Event``."""
        return self._listen("event", function)

    def on_reset(self, function: _F) -> _F:
        """Call a function, without arguments, when all has to be looked at anew.

        The server has lost what was known of the group: what has changed by that is told after it,
        and members that joined here join again. Or callbacks took so long that 10,000 calls waited,
        and further ones were left out.
        """
        return self._listen("reset", function)

    def watch(self, timeout: float | None = None, *, since: int | None = None) -> Iterator[Event]:
        """Iterate over the events from now on; ends when none comes for ``timeout`` seconds, or
        when the group is closed.

        Everybody sees the same events in the same order, their ``view`` rising by one.

        Args:
            timeout: Seconds; None waits for as long as it takes.
            since: Begin after the event of that number, as ``snapshot()`` or ``view`` told it.

        Raises:
            PeerError: The server does not have all events since then any more: it keeps 10,000.
        """
        if timeout is not None:
            check_seconds("timeout", timeout, zero=True)
        if since is not None and check_int("since", since, 0, _VIEW_MAX) > self.picture.view:
            self.catch_up()  # somebody else may have told it
        events = _Queue()
        with self.lock:
            self._check_open()
            last = self.picture.view
            self._queues.add(events)
        if since is not None and since > last:
            raise ValueError(f"Group {self.name!r} has no event {since} yet; the last is {last}.")
        return self._iterate(self._past(last if since is None else since, last), events, timeout)

    def _past(self, since: int, until: int) -> list[Event]:
        if since >= until:
            return []
        names = (self.books.key("events"), f"{since + 1}-0", f"{until}-0")
        found = [read_event(*entry) for entry in self.books.connector.call("XRANGE", *names)]
        if [event.view for event in found] != list(range(since + 1, until + 1)):
            raise PeerError(
                f"Group {self.name!r} has no longer all events since number {since}; take another "
                "snapshot.",
                group=self.name,
            )
        return found

    def _iterate(self, past: list[Event], events: _Queue, timeout: float | None) -> Iterator[Event]:
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
                f"Who watches group {self.name!r} was {_QUEUE_MAX:,} events behind, and is told no "
                "more; watch again from a snapshot.",
                group=self.name,
            )

    def _spread(self, event: Event) -> None:
        self._tell("event", event)
        for events in list(self._queues):
            if events.qsize() >= _QUEUE_MAX:
                events.behind = True
                self._queues.discard(events)
            events.put(None if events.behind else event)

    def _end_watching(self) -> None:
        for events in list(self._queues):
            events.put(None)

    def _tell(self, what: str, *arguments: Any) -> None:
        for function in self._listeners.get(what, ()):
            self.caller.call(function, *arguments)

    def _look_anew(self) -> list[Callable[..., object]]:
        return list(self._listeners.get("reset", ()))

    def _listen(self, what: str, function: _F) -> _F:
        check_function(f"on_{what}", function)
        with self.lock:
            self._listeners.setdefault(what, []).append(function)
        return function

    def _check_open(self) -> None:
        raise NotImplementedError  # pragma: no cover

    def catch_up(self) -> None:
        raise NotImplementedError  # pragma: no cover


class _Queue(queue.SimpleQueue["Event | None"]):
    """The events of one who watches. A signal handler may put one, too: its lock is of C."""

    #: Too many events wait in it: it gets no more.
    behind = False
