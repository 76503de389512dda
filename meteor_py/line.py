"""A line: one connection that several threads use in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from meteor_py.link import Link

_T = TypeVar("_T")


class Line:
    """Whoever uses it keeps the others waiting, for as long as the link's timeouts allow."""

    def __init__(self, open_link: Callable[[], Link]) -> None:
        self._open_link = open_link
        self._link = open_link()
        self._lock = threading.RLock()
        self._user: int | None = None  # the thread that is in the middle of a call

    def use(self, work: Callable[[Link], _T], *, timeout_s: float = -1) -> _T:
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

    def _use(self, work: Callable[[Link], _T]) -> _T:
        if self._user is not None:  # a signal handler, in the middle of a call of this thread
            link = self._open_link()
            try:
                return work(link)
            finally:
                link.close()
        self._user = threading.get_ident()
        try:
            return work(self._link)
        finally:
            self._user = None

    def is_mine(self) -> bool:
        """Whether this thread is in the middle of a call, and a signal handler is asking."""
        return self._user == threading.get_ident()

    def interrupt(self) -> None:
        """Let a call in another thread fail."""
        self._link.interrupt()

    def close(self) -> None:
        """Close the connection; the next use makes another."""
        self._link.close()
