"""A dispatcher: the messages that wait for a handler, lower priorities first, and its threads."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from meteor_py.peers.messaging.message import Message
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread


class Dispatcher:
    """Of one queue, or of all queues whose handlers have a priority and take turns."""

    def __init__(self, name: str, handle: Callable[[Message], None], workers: int) -> None:
        self._state = SignalSafeCondition()
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, int, Message]] = []
        self._later: list[tuple[float, int, Message]] = []
        self._stopped = False
        self._handle = handle
        #: Threads that handle a message now.
        self._at_work: set[threading.Thread] = set()
        self._threads = [JoinableThread(self._run, f"{name}-{n}") for n in range(workers)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._state:
            self._stopped = True
            self._waiting.clear()
            self._later.clear()
            self._state.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait for the threads until then, by ``now()``; whether all have ended."""
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - now(), 0.0))
        return not any(thread.is_alive() for thread in others)

    @property
    def busy(self) -> bool:
        """Whether a thread but this one handles a message."""
        return bool(self._at_work - {threading.current_thread()})

    def put(self, message: Message, priority: int, delay: float = 0.0) -> None:
        """Let it wait; ``priority`` is that of its handler."""
        with self._state:
            if self._stopped:
                return
            if delay > 0:
                heapq.heappush(self._later, (now() + delay, next(self._numbers), message))
            else:
                self._push(message, priority)
            self._state.notify_all()

    def take(self, timeout: float | None) -> Message | None:
        """The next message; None if none comes in time, or at the end."""
        deadline = None if timeout is None else now() + timeout
        with self._state:
            while not self._stopped:
                self._wake()
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

    def _push(self, message: Message, priority: int) -> None:
        item = (priority, message.priority, next(self._numbers), message)
        heapq.heappush(self._waiting, item)

    def _wake(self) -> None:
        """Those that were to wait, and have."""
        while self._later and self._later[0][0] <= now():
            message = heapq.heappop(self._later)[-1]
            self._push(
                message, message.queue_state.priority if message.queue_state is not None else 0
            )

    def _run(self) -> None:
        while True:
            message = self.take(None)
            if message is None:
                return
            self._at_work.add(threading.current_thread())
            try:
                self._handle(message)
            finally:
                self._at_work.discard(threading.current_thread())
