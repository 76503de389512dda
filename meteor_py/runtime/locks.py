"""Condition and event that stay usable when a signal handler raises."""

from __future__ import annotations

import threading
from operator import attrgetter


class SignalSafeCondition(threading.Condition):
    """``threading.Condition`` whose lock a signal handler cannot leave locked.

    The hazard: a handler for SIGTERM calls ``sys.exit``, and the one for Ctrl-C raises. Python runs
    handlers wherever a Python function begins or a C function has returned. The standard
    ``Condition.__enter__`` and ``__exit__`` are Python functions. If a handler raises inside them,
    with the lock acquired or not yet released, the lock stays locked and every other thread waits
    forever. Here, ``with`` uses the methods of the lock itself. They and the lookup that finds them
    are C, so no handler can run in between.

    The lock is reentrant: a handler may run while its own thread holds it.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self) -> None:
        self._rlock = threading.RLock()
        super().__init__(self._rlock)

    def is_mine(self) -> bool:
        """Whether this thread holds the lock; for signal handlers, which must not wait."""
        return bool(self._rlock._is_owned())  # type: ignore[attr-defined]


class SignalSafeEvent:
    """An event that a signal handler may set, or raise in, at any time.

    The hazard: the lock of ``threading.Event`` is not reentrant. A handler that sets the event
    while its own thread is inside ``set`` or ``wait`` would wait for itself, and one that raises
    there would leave the event locked.
    """

    def __init__(self) -> None:
        self._state = SignalSafeCondition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._state:
            self._is_set = True
            self._state.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, ``timeout`` seconds at most; return whether it is."""
        with self._state:
            return self._state.wait_for(self.is_set, timeout)
