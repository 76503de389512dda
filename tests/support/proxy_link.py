"""One connection through the fault proxy, and its faults.

Nothing here takes a lock or waits: the proxy's thread drives each connection step by step.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from tests.support.resp import Splitter

Side = Literal["requests", "replies"]
Fault = Literal["lost_reply", "torn_reply", "late_reply", "lost_request"]

READ_BYTES = 65_536
HELD_BYTES_MAX = 1 << 20
LATE_REPLY_S = 0.05


@dataclass
class Faults:
    """Active faults, shared by all connections through a proxy."""

    stalled: set[Side] = field(default_factory=set)
    delay_s: dict[Side, float] = field(default_factory=lambda: {"requests": 0.0, "replies": 0.0})
    refusing: bool = False
    chunk_bytes: int = 0
    chunk_pause_s: float = 0.0
    cut_request: Literal["before", "after"] | None = None
    countdown: int = 0
    match: bytes = b""
    mid_reply: int | None = None
    rng: Random = field(default_factory=Random)
    probability: float = 0.0
    chaos: tuple[Fault, ...] = ()

    def on_request(self, request: bytes) -> Literal["before", "after"] | None:
        """Return where to cut if `cut_before/after_request` waits for this request."""
        if self.cut_request is None or self.match not in request:
            return None
        self.countdown -= 1
        if self.countdown > 0:
            return None
        cut, self.cut_request = self.cut_request, None
        return cut

    def on_reply(self) -> Fault | None:
        """Return the random fault for this piece of a reply, if any."""
        if self.chaos and self.rng.random() < self.probability:
            return self.rng.choice(self.chaos)
        return None


@dataclass
class Counters:
    connections: int = 0  # forwarded since the start
    refused: int = 0
    cuts: int = 0  # connections ended by a fault
    requests: int = 0  # complete requests that were forwarded
    request_bytes: int = 0
    reply_bytes: int = 0


class Half:
    """One direction of a connection: from `source` through a queue to `sink`."""

    def __init__(self, side: Side, source: socket.socket, sink: socket.socket) -> None:
        self.side = side
        self.source = source
        self.sink = sink
        self.reading = True
        self.blocked = False  # the sink currently accepts no more bytes
        self.held_bytes = 0
        self.pause_until = 0.0
        self.splitter = Splitter()
        # Data and when to send it. None ends the connection.
        self.queue: deque[tuple[float, memoryview | None]] = deque()

    def put(self, data: bytes, delay_s: float) -> None:
        if data:
            self.queue.append((time.monotonic() + delay_s, memoryview(data)))
            self.held_bytes += len(data)

    def end(self) -> None:
        """End the connection once the queue is sent."""
        self.reading = False
        self.queue.append((0.0, None))

    def send(self, limit: int) -> int:
        """Send at most `limit` bytes of the first item; return how many were sent."""
        due, data = self.queue.popleft()
        assert data is not None
        try:
            sent = self.sink.send(data[: limit or len(data)])
        except BlockingIOError:
            sent = 0
        self.blocked = sent == 0
        self.held_bytes -= sent
        if sent < len(data):
            self.queue.appendleft((due, data[sent:]))
        return sent


class Link:
    """A client's connection, paired with one to the server."""

    def __init__(
        self, client: socket.socket, server: socket.socket, counters: Counters, plain: bool = False
    ) -> None:
        self.requests = Half("requests", client, server)
        self.replies = Half("replies", server, client)
        self.halves = (self.requests, self.replies)
        self.ended = False
        self.cut = False  # a fault ended it
        self.lose_next_request = False
        self.reply_bytes_left: int | None = None
        self._counters = counters
        self._opaque = plain  # do not parse the bytes: a replication link, or another protocol
        self._partial = bytearray()  # the beginning of an incomplete request
        self._sent = 0
        self._answered = 0
        # After a fault on a request: how many replies to forward, and after how many to cut.
        self._replies_passing = math.inf
        self._replies_until_cut = math.inf

    def read(self, half: Half, faults: Faults) -> None:
        try:
            data = half.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            half.end()
        elif half is self.requests:
            self._take_requests(data, faults)
        else:
            self._take_replies(data, faults)

    def flush(self, faults: Faults) -> float:
        """Send due items; return the seconds until the next is due."""
        wait_s = math.inf
        for half in self.halves:
            half.blocked = False
            while half.queue and not half.blocked and half.side not in faults.stalled:
                due, data = half.queue[0]
                early_s = max(due, half.pause_until) - time.monotonic()
                if early_s > 0:
                    wait_s = min(wait_s, early_s)
                    break
                if data is None:
                    self.close()
                    return math.inf
                try:
                    sent = half.send(faults.chunk_bytes)
                except OSError:  # the receiver is gone
                    self.close()
                    return math.inf
                if half is self.requests:
                    self._counters.request_bytes += sent
                else:
                    self._counters.reply_bytes += sent
                if faults.chunk_bytes:
                    half.pause_until = time.monotonic() + faults.chunk_pause_s
        return wait_s

    def close(self) -> None:
        self.ended = True
        self._counters.cuts += self.cut
        for half in self.halves:
            try:
                # Notifies the peer at once, even while the proxy's thread polls this socket.
                half.source.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer closed it first
            half.source.close()

    def _take_requests(self, data: bytes, faults: Faults) -> None:
        """Forward complete requests, up to the one that a fault waits for."""
        known = len(self._partial)
        self._partial += data
        passing = 0
        for end in self._ends(self.requests, data):
            request = bytes(self._partial[passing : known + end])
            cut = "before" if self.lose_next_request else faults.on_request(request)
            if cut != "before":
                passing = known + end
                self._sent += 1
                self._counters.requests += 1
            if cut:
                self.requests.reading = False
                self._replies_until_cut = self._sent
                self._replies_passing = self._sent - (cut == "after")
                break
            if b"\r\nPSYNC\r\n" in request[:32].upper():
                self._opaque = True
                break
        if self._opaque:
            passing = len(self._partial)
        self.requests.put(bytes(self._partial[:passing]), faults.delay_s["requests"])
        del self._partial[:passing]
        if self._answered >= self._replies_until_cut:
            self._cut_after_replies()

    def _take_replies(self, data: bytes, faults: Faults) -> None:
        passing = self._count_replies(data)
        cut = self._answered >= self._replies_until_cut
        delay_s = faults.delay_s["replies"]
        if faults.mid_reply is not None:
            self.reply_bytes_left, faults.mid_reply = faults.mid_reply, None
        if self.reply_bytes_left is not None:
            cut = cut or passing >= self.reply_bytes_left
            passing = min(passing, self.reply_bytes_left)
            self.reply_bytes_left -= passing
        match faults.on_reply():
            case "lost_reply":
                passing, cut = 0, True
            case "torn_reply":
                passing, cut = faults.rng.randrange(passing + 1), True
            case "late_reply":
                delay_s += faults.rng.uniform(0, LATE_REPLY_S)
            case "lost_request":
                self.lose_next_request = True
        self.replies.put(data[:passing], delay_s)
        if cut:
            self._cut_after_replies()

    def _count_replies(self, data: bytes) -> int:
        """Count the replies that end in `data`; return the number of its bytes to forward."""
        ends = self._ends(self.replies, data)
        may_pass = self._replies_passing - self._answered
        self._answered += len(ends)
        if may_pass > len(ends):
            return len(data)  # including the last, incomplete one
        return ends[int(may_pass) - 1] if may_pass > 0 else 0

    def _cut_after_replies(self) -> None:
        self.cut = True
        self.requests.reading = False
        self.replies.end()

    def _ends(self, half: Half, data: bytes) -> list[int]:
        if not self._opaque:
            try:
                return half.splitter.feed(data)
            except ValueError:
                self._opaque = True
        return []
