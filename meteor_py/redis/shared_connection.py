"""Connections that several threads share.

Threads take turns on a ``SharedConnection``. ``ThreadConnections`` adds a separate connection for
the main thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from meteor_py.errors import ConnectionFailed
from meteor_py.runtime.locks import LockBusy, run_locked

if TYPE_CHECKING:
    from meteor_py.redis.connection import Connection

_T = TypeVar("_T")


def use_temporary(
    open_connection: Callable[[], Connection], work: Callable[..., _T], *args: Any
) -> _T:
    """Call ``work`` with a new connection and ``args``, then close the connection.

    Signal handlers need this: the code that they interrupt may be using the shared connection.
    """
    connection = open_connection()
    try:
        return work(connection, *args)
    finally:
        connection.close()


class ConnectionBusy(TimeoutError):
    """Another thread is using the connection."""


class SharedConnection:
    """One connection that threads use in turn. Its timeouts limit how long each turn can take."""

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._open_connection = open_connection
        self._connection = open_connection()
        self._lock = threading.RLock()
        self._user: int | None = None  # the id of the thread that is in the middle of a call

    def use(self, work: Callable[..., _T], *args: Any, timeout_s: float = -1) -> _T:
        """Call ``work`` with the connection and ``args``. A negative ``timeout_s`` waits for other
        threads indefinitely.

        Raises:
            ConnectionBusy: Another thread used the connection for ``timeout_s`` seconds.
        """
        if timeout_s >= 0:
            try:
                return run_locked(self._lock, timeout_s, lambda: self.use(work, *args))
            except LockBusy:
                raise ConnectionBusy("The connection is in use.") from None
        with self._lock:  # use ``with``, so that Ctrl-C cannot leave the lock locked
            if self._user is not None:  # this is a signal handler that interrupted a call
                return use_temporary(self._open_connection, work, *args)
            try:
                self._user = threading.get_ident()
                return work(self._connection, *args)
            finally:
                self._user = None

    def is_mine(self) -> bool:
        """Return whether the caller is a signal handler that has interrupted a call."""
        return self._user == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether a thread is in the middle of a call."""
        return self._user is not None

    @property
    def connected(self) -> bool:
        return self._connection.connected

    def interrupt(self) -> None:
        """Make another thread's call on this connection fail."""
        self._connection.interrupt()

    def close(self) -> None:
        """Close the connection. The next use reconnects."""
        self._connection.close()

    def close_after_use(self) -> None:
        """Wait until no other thread is in the middle of a call, then close the connection."""
        with self._lock:
            self._connection.close()

    def close_if_idle(self) -> None:
        """Close the connection unless some thread, even this one, is in the middle of a call."""
        if self._user is not None:
            return
        try:
            run_locked(self._lock, 0.0, self._connection.close)
        except LockBusy:
            pass


class ThreadConnections:
    """One connection for the main thread, and one that the other threads use in turn.

    Signal handlers run in the main thread, between any two lines of its code. Therefore, the main
    thread must never wait for a lock that another thread holds while talking to the server.
    """

    def __init__(self, open_connection: Callable[[], Connection]) -> None:
        self._main = SharedConnection(open_connection)
        self._others = SharedConnection(open_connection)
        self._closed = False

    def use(self, work: Callable[[Connection], _T], timeout_s: float) -> _T:
        """Call ``work`` with a connection.

        Raises:
            ConnectionFailed: Other threads kept the connection busy for ``timeout_s`` seconds.
        """

        def call(connection: Connection) -> _T:
            try:
                return work(connection)
            finally:
                if self._closed:
                    connection.close()

        if threading.current_thread() is threading.main_thread():
            return self._main.use(call)
        try:
            return self._others.use(call, timeout_s=max(timeout_s, 0.0))
        except ConnectionBusy:
            raise ConnectionFailed(
                "Other threads of this process kept the connection busy until the deadline."
            ) from None

    def close(self) -> None:
        """Interrupt calls in progress, and close the connections that are idle."""
        self._closed = True
        for connection in (self._main, self._others):
            connection.interrupt()
            connection.close_if_idle()
