"""The state: a lock, and waiting under it for what others change."""

from __future__ import annotations

import threading
from operator import attrgetter


class State(threading.Condition):
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
