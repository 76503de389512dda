"""The state: a lock, and waiting under it for what others change; a flag, the smallest."""

from __future__ import annotations

import threading
from operator import attrgetter


class SignalSafeCondition(threading.Condition):
    """A condition that what a signal handler raises does not leave locked.

    The handler of a SIGTERM calls ``sys.exit``, that of a Ctrl-C raises, and Python lets them come
    wherever a function of Python begins or one of C has returned. ``Condition.__enter__`` and
    ``__exit__`` are of Python: what came there, with the lock taken or not yet given back, would
    leave it to the interrupted thread for ever, and let all others wait. So ``with`` gets those of
    the lock itself, which are of C, as is the way to them: nothing comes in between.
    """

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self) -> None:
        self._rlock = threading.RLock()  # a signal handler may come while its thread has it
        super().__init__(self._rlock)

    def is_mine(self) -> bool:
        """Whether this thread has the lock: a signal handler that must not wait asks."""
        return bool(self._rlock._is_owned())  # type: ignore[attr-defined]


class SignalSafeEvent:
    """``threading.Event`` that a signal handler may set, or raise in, at any time: that one would
    wait for itself, or stay locked."""

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
        """Wait until it is set, ``timeout`` seconds at most; whether it is."""
        with self._state:
            return self._state.wait_for(self.is_set, timeout)
