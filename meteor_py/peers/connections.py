"""Links: the connections that the threads of an application talk to the server on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from meteor_py.errors import ConnectionFailed

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection
    from meteor_py.redis.connector import Connector

_T = TypeVar("_T")


class Links:
    """One for the main thread, and one for all others in turn.

    Signal handlers run in the main thread, between any two lines of it. What they raise would leave
    a lock taken, and what they call would wait for the lock of what they came into: so that thread
    takes none.
    """

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._lock = threading.Lock()
        self._others: Connection | None = None
        self._main: Connection | None = None
        self._main_is_used = False
        self._closed = False

    def use(self, work: Callable[[Connection], _T], timeout_s: float) -> _T:
        """Call ``work`` with a connection.

        Raises:
            ConnectionFailed: Other threads had it for ``timeout_s`` seconds.
        """
        if threading.current_thread() is threading.main_thread():
            return self._use_main(work)
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise ConnectionFailed("Other threads of this process use the connection all the time.")
        try:
            if self._others is None:
                self._others = self._connector.open_connection()
            return self._call(work, self._others)
        finally:
            self._lock.release()

    def _use_main(self, work: Callable[[Connection], _T]) -> _T:
        if self._main_is_used:  # a signal handler, in the middle of a call; or one has raised there
            connection = self._connector.open_connection()
            try:
                return work(connection)
            finally:
                connection.close()
        if self._main is None:
            self._main = self._connector.open_connection()
        self._main_is_used = True
        try:
            return self._call(work, self._main)
        finally:
            self._main_is_used = False

    def _call(self, work: Callable[[Connection], _T], connection: Connection) -> _T:
        try:
            return work(connection)
        finally:
            if self._closed:
                connection.close()

    def interrupt(self) -> None:
        """Let calls of other threads fail."""
        for connection in (self._others, self._main):
            if connection is not None:
                connection.interrupt()

    def close(self) -> None:
        """Close them; one that is in use is closed by who uses it."""
        self._closed = True
        self.interrupt()
        if self._main is not None and not self._main_is_used:
            self._main.close()
        if self._lock.acquire(blocking=False):
            try:
                if self._others is not None:
                    self._others.close()
            finally:
                self._lock.release()
