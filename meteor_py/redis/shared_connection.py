"""Connections that several threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from meteor_py.errors import ConnectionFailed

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection

_T = TypeVar("_T")


def use_temporary(
    open_connection: Callable[[], Connection], work: Callable[[Connection], _T]
) -> _T:
    """Call ``work`` with a connection that is closed afterwards.

    A signal handler needs one: the call that it interrupted is still using the shared connection.
    """
    connection = open_connection()
    try:
        return work(connection)
    finally:
        connection.close()


class SharedConnection:
    """One connection that several threads use in turn; its timeouts bound how long others wait."""

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._open_connection = open_connection
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
            return use_temporary(self._open_connection, work)
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


class ThreadConnections:
    """One connection for the main thread, and one that the other threads use in turn.

    Signal handlers run in the main thread, between any two lines of it. What they raise would leave
    a lock taken, and what they call would wait for the lock of the code they interrupted. So the
    main thread takes no lock. Connections are opened when they are first used.
    """

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._open_connection = open_connection
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
                self._others = self._open_connection()
            return self._call(work, self._others)
        finally:
            self._lock.release()

    def _use_main(self, work: Callable[[Connection], _T]) -> _T:
        if self._main_is_used:  # a signal handler, in the middle of a call; or one has raised there
            return use_temporary(self._open_connection, work)
        if self._main is None:
            self._main = self._open_connection()
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

    def close(self) -> None:
        """Interrupt calls of other threads and close; a connection in use is closed by its user."""
        self._closed = True
        for connection in (self._others, self._main):
            if connection is not None:
                connection.interrupt()
        if self._main is not None and not self._main_is_used:
            self._main.close()
        if self._lock.acquire(blocking=False):
            try:
                if self._others is not None:
                    self._others.close()
            finally:
                self._lock.release()
