"""Reading frames from the ring of a stream, in Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection

#: The size that a fetch aims at, in bytes and in frames. Frames may grow from small to large
#: between two fetches, so the second bounds the memory: 256 frames of 1 MiB at the very worst.
FETCH_BYTES = 1024 * 1024
FETCH_FRAMES_MAX = 256

_ID_MAX = 2**64 - 1
#: Consecutive fetches after which the next one is sent in advance.
_STRAIGHT = 3


class OwnerChanged(Exception):
    """The group has another owner, or it was moved or deleted: what was read is not for us."""


class RingReader:
    """Fetches frames, and in the same pipeline fields of meta. For one thread at a time.

    Owns its connection. Every method raises ``ConnectionFailed`` if the server does not reply.
    """

    def __init__(self, connection: Connection, stream: str, meta_fields: Sequence[str]) -> None:
        self._connection = connection
        self._log = keys.log(stream)
        self._meta = keys.meta(stream)
        self._meta_fields = meta_fields
        self._guard: tuple[str, bytes] | None = None  # the key of a group, and its owner's nonce
        self._frames = 16  # to ask for; follows their size
        self._straight = 0  # fetches since the last jump
        self._ahead: int | None = None  # the offset of a fetch that was sent in advance

    @property
    def block_max_s(self) -> float:
        """As ``Connection.block_max_s``."""
        return self._connection.block_max_s

    def guard(self, group_key: str, nonce: str) -> None:
        """From here on, check with each read that the group still has this nonce."""
        self._guard = (group_key, nonce.encode())

    def fetch(self, offset: int, block_s: float, records: int) -> tuple[list[Any], list[Any]]:
        """Return the entries from ``offset`` on, and the fields of meta as seen after them.

        Raises:
            OwnerChanged: The group has another nonce.
        """
        replies = self._collect_ahead(offset)
        if replies is None:
            frames = min(self._frames, records)
            replies = self._pipeline(self._request(offset, frames, block_s), block_s)
        read, meta, *nonce = replies
        self._check_nonce(nonce)
        if not read:
            return [], meta
        entries: list[Any] = read[0][1]
        self._adapt(entries)
        return entries, meta

    def look(self, *, guarded: bool) -> list[Any]:
        """Return the fields of meta; if ``guarded``, check the group's nonce as ``fetch`` does."""
        commands: list[Sequence[Any]] = [("HMGET", self._meta, *self._meta_fields)]
        if guarded and self._guard is not None:
            commands.append(("HGET", self._guard[0], "nonce"))
        replies = self._pipeline(commands)
        if guarded:
            self._check_nonce(replies[1:])
        meta: list[Any] = replies[0]
        return meta

    def epochs(self) -> str:
        """Return the epochs of the stream, as ``diverged_at`` takes them."""
        return (self._connection.call("HGET", self._meta, "epochs") or b"0:0").decode()

    def read_ahead(self, offset: int, end_offset: int) -> None:
        """Let the server prepare the next fetch while the caller works on this one.

        Only for a caller that reads straight on, and only what is known to be there: nothing waits.
        """
        self._straight += 1
        if self._straight < _STRAIGHT or end_offset <= offset:
            return
        try:
            self._connection.send(self._request(offset, self._frames))
            self._ahead = offset
        except ConnectionFailed:
            pass  # the next fetch connects again, or raises
        except BaseException:  # Ctrl-C: the next fetch must not read the reply to this
            self._connection.close()
            raise

    def forget_ahead(self) -> None:
        """Drop a fetch that was sent in advance: the caller jumps, or looks at the stream."""
        self._straight = 0
        if self._ahead is not None:
            self._ahead = None
            self._connection.close()

    def interrupt(self) -> None:
        """End a wait in another thread."""
        self._connection.interrupt()

    def close(self) -> None:
        self._connection.close()

    def _collect_ahead(self, offset: int) -> list[Any] | None:
        """The replies to a fetch sent in advance; None if there was none, or of another offset."""
        if self._ahead is None:
            return None
        try:
            if self._ahead == offset and self._connection.connected:
                count = 2 if self._guard is None else 3
                return self._connection.read_all(count, self._connection.timeout_s)
            self._connection.close()
        except ConnectionFailed:
            pass  # tried again in the ordinary way
        except MeteorError:
            raise  # all replies were read
        except BaseException:  # Ctrl-C: the next fetch must not read the reply to this
            self._connection.close()
            raise
        finally:
            self._ahead = None
        return None

    def _request(self, offset: int, frames: int, block_s: float = 0.0) -> list[Sequence[Any]]:
        after = f"{offset - 1}-{_ID_MAX}" if offset else "0-0"
        block = ("BLOCK", max(int(block_s * 1000), 1)) if block_s > 0 else ()
        read = ("XREAD", "COUNT", frames, *block, "STREAMS", self._log, after)
        commands: list[Sequence[Any]] = [read, ("HMGET", self._meta, *self._meta_fields)]
        if self._guard is not None:
            commands.append(("HGET", self._guard[0], "nonce"))
        return commands

    def _check_nonce(self, nonce: list[Any]) -> None:
        if self._guard is not None and nonce != [self._guard[1]]:
            raise OwnerChanged

    def _pipeline(self, commands: list[Sequence[Any]], block_s: float = 0.0) -> list[Any]:
        """Once more on a new connection, where there is no waiting: an idle one may have died."""
        timeout_s = block_s + self._connection.timeout_s
        if block_s:
            return self._connection.pipeline(commands, timeout_s)
        return self._connection.retry_idle(self._connection.pipeline, commands, timeout_s)

    def _adapt(self, entries: list[Any]) -> None:
        """Ask for as many frames next time as make a good fetch, growing by steps."""
        size = sum(len(fields[3]) for _, fields in entries if len(fields) > 3) + len(entries)
        fitting = FETCH_BYTES * len(entries) // size
        self._frames = max(1, min(fitting, self._frames * 4, FETCH_FRAMES_MAX))
