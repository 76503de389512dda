"""A line: one connection that several threads use in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection

_T = TypeVar("_T")


class SharedConnection:
    """Whoever uses it keeps the others waiting, for as long as the link's timeouts allow."""

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._open_link = open_connection
        self._connection = open_connection()
        self._lock = threading.RLock()
        self._user: int | None = None  # the thread that is in the middle of a call

    def use(self, work: Callable[[Connection], _T], *, timeout_s: float = -1) -> _T:
        """Call ``work`` with the connection.

        Raises:
            TimeoutError: Another thread has not left it within ``timeout_s`` seconds.
        """
        if timeout_s < 0:
            with self._lock:  # no Ctrl-C can come between taking it and giving it back
                return self._use(work)
        if not self._lock.acquire(timeout=timeout_s):
            raise TimeoutError("The connection is in use.")
        try:
            return self._use(work)
        finally:
            self._lock.release()

    def _use(self, work: Callable[[Connection], _T]) -> _T:
        if self._user is not None:  # a signal handler, in the middle of a call of this thread
            connection = self._open_link()
            try:
                return work(connection)
            finally:
                connection.close()
        self._user = threading.get_ident()
        try:
            return work(self._connection)
        finally:
            self._user = None

    def is_mine(self) -> bool:
        """Whether this thread is in the middle of a call, and a signal handler is asking."""
        return self._user == threading.get_ident()

    def interrupt(self) -> None:
        """Let a call in another thread fail."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection; the next use makes another."""
        self._connection.close()
