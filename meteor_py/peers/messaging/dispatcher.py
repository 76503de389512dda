"""A dispatcher: a priority queue of messages, and the threads that handle them."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from meteor_py.peers.messaging.message import Message
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

#: If some threads cannot be started, seconds to wait until the others have ended.
_JOIN_S = 1.0


class Dispatcher:
    """The dispatcher for one queue, or for all queues whose handlers have a priority and take
    turns."""

    def __init__(self, name: str, handle: Callable[[Message], None], workers: int) -> None:
        self._state = SignalSafeCondition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, int, Message]] = []
        self._later: list[tuple[float, int, Message]] = []
        self._stopped = False
        self._handle = handle
        #: Threads that are handling a message.
        self._working: set[threading.Thread] = set()
        self._threads = [JoinableThread(self._run, f"{name}-{n}") for n in range(workers)]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # such as Ctrl-C, or RuntimeError if no thread can be started
            self.stop()
            self.join(now() + _JOIN_S)
            raise

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            self._waiting.clear()
            self._later.clear()
            self._state.notify_all()

    def join(self, deadline: float) -> bool:
        """Join the threads until ``deadline`` (``now()`` clock); return whether all have ended."""
        return all(t.ends_within(max(deadline - now(), 0.0), self.stop) for t in self._threads)

    @property
    def busy(self) -> bool:
        """Whether a thread other than the current one is handling a message."""
        return bool(self._working - {threading.current_thread()})

    @property
    def has_waiting(self) -> bool:
        """Whether a message is waiting for a thread."""
        return bool(self._waiting)

    def put(self, message: Message, delay: float = 0.0) -> None:
        with self._state:
            if self._stopped:
                return
            if delay > 0:
                heapq.heappush(self._later, (now() + delay, next(self._numbers), message))
            else:
                self._push(message)
            self._state.notify_all()

    def take(self, timeout: float | None) -> Message | None:
        """Return the next message; None after ``timeout`` seconds, or when stopped."""
        deadline = None if timeout is None else now() + timeout
        with self._state:
            while not self._stopped:
                self._push_delayed()
                while self._waiting:
                    message = heapq.heappop(self._waiting)[-1]
                    if not message.dropped:
                        message.taken = True
                        return message
                ends = [self._later[0][0]] if self._later else []
                if deadline is not None:
                    if now() >= deadline:
                        return None
                    ends.append(deadline)
                self._state.wait(max(min(ends) - now(), 0.0) if ends else None)
        return None

    def _push(self, message: Message) -> None:
        item = (message.queue_state.priority, message.priority, next(self._numbers), message)
        heapq.heappush(self._waiting, item)

    def _push_delayed(self) -> None:
        """Queue the messages whose delay is over."""
        while self._later and self._later[0][0] <= now():
            self._push(heapq.heappop(self._later)[-1])

    def _run(self) -> None:
        while True:
            message = self.take(None)
            if message is None:
                return
            self._working.add(threading.current_thread())
            try:
                self._handle(message)
            finally:
                self._working.discard(threading.current_thread())
