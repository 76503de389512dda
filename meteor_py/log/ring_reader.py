"""The ring reader: fetches frames from a stream's ring.

The server and this process hold a whole reply in memory, and frames may grow from 20 bytes to
32 MiB between two fetches. So the sizes of earlier frames do not bound the size of the next fetch.
The reader uses the ``large`` field in meta, which the appending scripts maintain: the offset after
the last frame larger than ``LARGE_FRAME`` bytes, and the size of the largest such frame. The field
says nothing about frames that are appended later. A fetch of many frames therefore stops at the end
of the log, as read together with the field. Beyond that end, a fetch asks for only a few frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meteor_py.errors import ConnectionFailed, MeteorError
from meteor_py.records.config import RECORD_BYTES_LIMIT
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection, encode

#: Target size of a fetch in bytes, and its limits in bytes and frames. A fetch may exceed the byte
#: limit if a publisher older than 0.2 appends frames at the same time.
FETCH_BYTES = 1024 * 1024
FETCH_BYTES_MAX = 128 * 1024 * 1024
FETCH_FRAMES_MAX = 256
#: Bytes above which ``_append.lua`` records a frame as large.
LARGE_FRAME = FETCH_BYTES_MAX // FETCH_FRAMES_MAX
#: Maximum number of frames to fetch if their sizes are unknown: each may have the maximum size.
_FRAMES_UNKNOWN = FETCH_BYTES_MAX // RECORD_BYTES_LIMIT

_ID_MAX = 2**64 - 1
#: Number of sequential fetches after which the reader sends the next fetch ahead.
_SEQUENTIAL_MIN = 3


class OwnerChanged(Exception):
    """The group has a new owner, or was moved or deleted. Discard the records just read."""


class RingReader:
    """Fetches frames, and meta fields in the same pipeline. Not thread-safe.

    The first three fields are the stream's incarnation, epoch and end. The reader's owner closes
    ``connection``. Methods that wait for a reply raise ``ConnectionFailed`` if none arrives.
    """

    def __init__(self, connection: Connection, stream: str, meta_fields: Sequence[str]) -> None:
        self.connection = connection
        self._log = keys.log(stream).encode()
        self._meta = keys.meta(stream)
        self._meta_fields = (*meta_fields, "large")
        self._nonce: bytes | None = None
        # The parts of the commands that all fetches share, encoded once.
        self._streams = b"$7\r\nSTREAMS\r\n$%d\r\n%b\r\n" % (len(self._log), self._log)
        self._look = self._encode_look()
        self._frames = 16  # number of frames to ask for; adapts to their sizes
        self._next = 0  # the end of the log, as of the last reply
        self._end_offset = 0  # ``large`` covers frames up to here; 0 if sizes are unknown
        self._large = (0, 0)  # the end of the last large frame, and the size of the largest
        self._large_field = b""  # the field from which ``_large`` was parsed
        self._sequential = 0  # fetches since the last ``forget_ahead``
        self._ahead: int | None = None  # the offset of the fetch that was sent in advance, if any

    def guard(self, group_key: str, nonce: bytes) -> None:
        """Make each fetch check that the group still has this nonce."""
        self._nonce = nonce
        self._look = self._encode_look(("HGET", group_key, "nonce"))

    def _encode_look(self, *more: Sequence[Any]) -> bytes:
        commands = [("HMGET", self._meta, *self._meta_fields), *more]
        return b"".join(encode(commands))

    def fetch(self, offset: int, block_s: float, records: int) -> tuple[list[Any], list[Any]]:
        """Return entries, starting at ``offset``, and the meta fields as read after them.

        Raises:
            OwnerChanged: The group's nonce has changed.
        """
        replies = self._collect_ahead(offset) or self._exchange(offset, records, block_s)
        read, meta = replies[0], replies[1]
        if not read and offset < self._end_offset:
            # The ring has dropped all frames up to the known end. Fetch the first frame after it.
            self._end_offset = 0
            read, meta, *_ = self._exchange(offset, records)
        meta = self._note_sizes(meta)
        if not read:
            return [], meta
        entries = self._entries(read)
        if int(entries[-1][0].partition(b"-")[0]) + 1 < self._next:
            meta = self._extend(entries, meta, records)
        self._adapt(entries)
        return entries, meta

    def _extend(self, entries: list[Any], meta: list[Any], records: int) -> list[Any]:
        """Fetch more if the fetch was small because sizes were unknown; return the latest meta.

        Continue until there are as many frames as the caller wants, about ``FETCH_BYTES``, or all
        frames up to the end of the log as of the first reply.
        """
        wanted = min(self._frames, records)
        end_offset = self._next
        while len(entries) < wanted and _size(entries) < FETCH_BYTES:
            after = int(entries[-1][0].partition(b"-")[0]) + 1
            if after >= end_offset:
                break
            read, later, *_ = self._exchange(after, wanted - len(entries))
            later = self._note_sizes(later)
            more = self._entries(read)
            # In a new incarnation or epoch, the first entries may be gone: return the meta that was
            # read with them.
            if later[:2] != meta[:2] or not more:
                break
            entries += more
            meta = later
        return meta

    def _entries(self, read: list[Any] | None) -> list[Any]:
        """Return the entries in a reply to XREAD, which groups them by key, or to XRANGE."""
        if not read:
            return []
        entries: list[Any] = read[0][1] if read[0][0] == self._log else read
        return entries

    def read_meta(self, *, guarded: bool) -> list[Any]:
        """Return the meta fields; if ``guarded``, check the group's nonce like ``fetch``."""
        connection = self.connection
        replies = connection.retry_idle(
            connection.pipeline_encoded, [self._look], self._replies - 1, connection.timeout_s
        )
        if guarded:
            self._check_nonce(replies)
        return self._note_sizes(replies[0])

    def epochs(self) -> str:
        """Return the stream's epoch table, for ``diverged_at``."""
        return (self.connection.call("HGET", self._meta, "epochs") or b"0:0").decode()

    def read_ahead(self, offset: int, end_offset: int) -> None:
        """Send the next fetch in advance, so that the server runs it while the caller is busy.

        Does so only if the caller reads sequentially and the records exist. A fetch that is sent
        ahead does not wait for records.
        """
        self._sequential += 1
        if self._sequential < _SEQUENTIAL_MIN or end_offset <= offset:
            return
        try:
            self.connection.send_encoded([self._request(offset, self._frames)])
            self._ahead = offset
        except ConnectionFailed:
            pass  # the next fetch reconnects, or raises
        except BaseException:  # such as Ctrl-C: the next fetch must not read replies to this one
            self.connection.close()
            raise

    def forget_ahead(self) -> None:
        """Drop a fetch that was sent ahead, because the caller seeks or reads meta."""
        self._sequential = 0
        if self._ahead is not None:
            self._ahead = None
            self.connection.close()

    def _collect_ahead(self, offset: int) -> list[Any] | None:
        """Return the replies to the fetch sent ahead; None if there is none for this offset."""
        if self._ahead is None:
            return None
        try:
            if self._ahead == offset and self.connection.connected:
                replies = self.connection.read_all(self._replies, self.connection.timeout_s)
                self._check_nonce(replies)
                return replies
            self.connection.close()
        except ConnectionFailed:
            pass  # the caller fetches again
        except MeteorError:
            raise  # all replies were read, so the connection is still usable
        except BaseException:  # such as Ctrl-C: the next fetch must not read replies to this one
            self.connection.close()
            raise
        finally:
            self._ahead = None
        return None

    @property
    def _replies(self) -> int:
        """Number of replies to a request: the frames, meta and, in a group, the nonce."""
        return 2 if self._nonce is None else 3

    def _request(self, offset: int, records: int, block_s: float = 0.0) -> bytes:
        """Return the encoded commands that read frames, and then meta and the nonce."""
        if not self.connection.connected:
            self._end_offset = 0  # after a failover, different frames may have these offsets
        frames = min(self._frames, records)
        if offset < self._end_offset:
            large_end, largest = self._large
            if offset < large_end:
                frames = max(min(frames, FETCH_BYTES_MAX // largest), 1)
            last = f"{self._end_offset - 1}-{_ID_MAX}"
            read = ("XRANGE", self._log, f"{offset}-0", last, "COUNT", frames)
            return b"".join(encode([read])) + self._look
        after = b"%d-%d" % (offset - 1, _ID_MAX) if offset else b"0-0"
        count = b"%d" % min(frames, _FRAMES_UNKNOWN)
        parts, block = 6, b""
        if block_s > 0:
            block_ms = b"%d" % max(int(block_s * 1000), 1)
            parts, block = 8, b"$5\r\nBLOCK\r\n$%d\r\n%b\r\n" % (len(block_ms), block_ms)
        return b"*%d\r\n$5\r\nXREAD\r\n$5\r\nCOUNT\r\n$%d\r\n%b\r\n%b%b$%d\r\n%b\r\n%b" % (
            *(parts, len(count), count, block),
            *(self._streams, len(after), after, self._look),
        )

    def _note_sizes(self, meta: list[Any]) -> list[Any]:
        """Note up to which offset frame sizes are known; return the fields for the caller."""
        large = meta.pop()
        self._next = int(meta[2] or 0)
        # If only older releases have written to the stream, the field is missing.
        self._end_offset = 0 if large is None else self._next
        if large is not None and large != self._large_field:
            large_end, _, largest = large.partition(b":")
            self._large = int(large_end), max(int(largest), LARGE_FRAME)
            self._large_field = large
        return meta

    def _check_nonce(self, replies: list[Any]) -> None:
        if self._nonce is not None and replies[-1] != self._nonce:
            raise OwnerChanged

    def _exchange(self, offset: int, records: int, block_s: float = 0.0) -> list[Any]:
        """Request frames and return the replies. Retry once if an idle connection has died.

        A blocking read is not retried, because it would block twice as long.
        """
        connection = self.connection
        request = self._request(offset, records, block_s)
        # Round up to whole seconds, so that the timeout rarely changes: a change is a system call.
        timeout_s = math.ceil(block_s) + connection.timeout_s
        arguments = ([request], self._replies, timeout_s)
        if block_s:
            replies = connection.pipeline_encoded(*arguments)
        else:
            replies = connection.retry_idle(connection.pipeline_encoded, *arguments)
        self._check_nonce(replies)
        return replies

    def _adapt(self, entries: list[Any]) -> None:
        """Adapt the number of frames per fetch to the size of ``entries``, growing gradually."""
        fitting = FETCH_BYTES * len(entries) // _size(entries)
        self._frames = max(1, min(fitting, self._frames * 4, FETCH_FRAMES_MAX))


def _size(entries: list[Any]) -> int:
    size = len(entries)
    for _, fields in entries:
        if len(fields) > 3:
            size += len(fields[3])
    return size
