"""The socket of one connection: sends encoded commands, and parses replies.

redis-py opens the connection, including TLS and authentication. From then on, redis-py's layers
would spend more time on a single record than the server does. For example, they change the socket's
timeout twice per reply, with a system call each time. ``Wire`` therefore uses the socket directly,
with its own hiredis reader, and changes the timeout only if it differs from the last one.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Any

import hiredis
import redis
from redis.connection import DefaultParser

#: Bytes to receive at a time.
READ_SIZE = 262_144

#: Returned if no complete reply has arrived.
NO_REPLY = object()


class Wire:
    """A connected socket and a reply parser. Only one thread may use it at a time."""

    __slots__ = ("_buffer", "_reader", "_socket", "_timeout_s", "_unread")

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._timeout_s = connected.gettimeout()
        self._buffer = bytearray(READ_SIZE)
        self._reader = hiredis.Reader(
            protocolError=redis.InvalidResponse,
            replyError=DefaultParser.parse_error,
            notEnoughData=NO_REPLY,
        )
        self._unread: list[Any] = []

    def send(self, chunks: Iterable[bytes | memoryview], timeout_s: float) -> None:
        """Send all chunks, waiting up to ``timeout_s`` seconds for space in the send buffer."""
        if timeout_s != self._timeout_s:
            self._set_timeout(timeout_s)
        try:
            for chunk in chunks:
                self._socket.sendall(chunk)
        except TimeoutError:
            raise redis.TimeoutError("Timeout writing to socket") from None

    def send_at_once(self, data: bytes) -> bool:
        """Send a short request; return whether the send buffer had space for all of it."""
        return self._socket.send(data) == len(data)

    def read(self, timeout_s: float) -> Any:
        """Return the next reply, waiting up to ``timeout_s`` seconds for each part of it.

        Return an error reply as a redis-py exception, without raising it.
        """
        if self._unread:
            return self._unread.pop()
        while (reply := self._reader.gets()) is NO_REPLY:
            if timeout_s != self._timeout_s:
                self._set_timeout(timeout_s)
            try:
                self._receive()
            except TimeoutError:
                raise redis.TimeoutError("Timeout reading from socket") from None
        return reply

    def read_now(self) -> Any:
        """Return the next reply, or ``NO_REPLY`` if no complete reply has arrived."""
        reply = self._reader.gets()
        if reply is NO_REPLY:
            self._set_timeout(0.0)
            try:
                self._receive()
            except (BlockingIOError, ssl.SSLWantReadError):
                return NO_REPLY
            reply = self._reader.gets()
        return reply

    def unread(self, reply: Any) -> None:
        """Put a reply back, so that the next ``read`` returns it."""
        self._unread.append(reply)

    def _receive(self) -> None:
        size = self._socket.recv_into(self._buffer)
        if not size:
            raise redis.ConnectionError("Connection closed by server.")
        self._reader.feed(self._buffer, 0, size)  # type: ignore[arg-type]  # takes any buffer

    def _set_timeout(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        self._timeout_s = timeout_s
