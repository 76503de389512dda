"""A TCP proxy that injects faults between a client and a server, or in a replication link.

One thread forwards all bytes, under a lock that every control method takes too. A fault thus
happens between two steps, never within one, and has taken effect when the method returns. Requests
and replies are counted by their boundaries in the protocol, so "the third request" means the same
in a pipeline and in single calls. After PSYNC, a replication link is plain bytes: cut, stall,
delay, chunk and chaos work there, and faults that count requests do nothing. Do not count requests
on a connection that uses SUBSCRIBE, MONITOR or CLIENT REPLY OFF, because its requests and replies
do not match.
With `plain=True`, every connection is plain bytes, for servers with another protocol.

    with Proxy(HOST, server.port) as proxy:
        proxy.cut_after_request()          # the next command is executed, its reply is lost
        plain_client(proxy.url).incr("n")  # raises ConnectionError; n is 1
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Literal, Self

from tests.support.proxy_link import (
    HELD_BYTES_MAX,
    READ_BYTES,
    Counters,
    Fault,
    Faults,
    Half,
    Link,
    Side,
)

Direction = Literal["requests", "replies", "both"]

CONNECT_S = 2.0


class Proxy:
    """Listens on a free port and forwards each connection to `host:port`."""

    def __init__(self, host: str, port: int, *, plain: bool = False) -> None:
        self._counters = Counters()
        self._plain = plain
        self._target = (host, port)
        self._faults = Faults()
        self._links: list[Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._listener.setblocking(False)
        self.host: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://{self.host}:{self.port}/0"
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> Counters:
        """A consistent copy of the counters."""
        with self._lock:
            return replace(self._counters)

    # Control methods, which any thread can call.

    def cut(self) -> None:
        """End all connections at once, losing held bytes."""
        with self._control():
            for link in self._links:
                if not link.ended:
                    link.cut = True
                    link.close()

    def cut_before_request(self, n: int = 1, match: bytes = b"") -> None:
        """Cut before the n-th request from now that contains `match`.

        That request is never executed. Earlier requests on its connection are executed and get
        their replies.
        """
        self._arm("before", n, match)

    def cut_after_request(self, n: int = 1, match: bytes = b"") -> None:
        """Cut after the n-th request from now that contains `match`, losing its reply.

        Later requests on its connection are never executed.
        """
        self._arm("after", n, match)

    def cut_mid_reply(self, after_bytes: int) -> None:
        """Cut the next connection that gets a reply, after `after_bytes` bytes of that reply."""
        with self._control():
            self._faults.mid_reply = after_bytes

    def stall(self, direction: Direction = "both") -> None:
        """Hold back bytes. Connections stay open, and new connections are accepted."""
        with self._control():
            self._faults.stalled.update(_sides(direction))

    def resume(self, direction: Direction = "both") -> None:
        """End a stall and forward the held bytes."""
        with self._control():
            self._faults.stalled.difference_update(_sides(direction))

    def refuse(self) -> None:
        """Reset new connections; existing ones stay."""
        with self._control():
            self._faults.refusing = True

    def accept(self) -> None:
        """End `refuse()`."""
        with self._control():
            self._faults.refusing = False

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Delay all bytes that arrive from now on; 0 ends the delay."""
        with self._control():
            self._faults.delay_s.update(dict.fromkeys(_sides(direction), seconds))

    def chunk(self, n_bytes: int, pause_s: float = 0.0) -> None:
        """Forward in pieces of at most `n_bytes`, `pause_s` apart; `n_bytes=0` ends this."""
        with self._control():
            self._faults.chunk_bytes, self._faults.chunk_pause_s = n_bytes, pause_s

    def chaos(
        self, rng: Random, probability: float, faults: Sequence[Fault] = ("lost_reply",)
    ) -> None:
        """For each piece of a reply, cause one of `faults` with this probability; 0 ends it.

        lost_reply: drop the piece and cut the connection. torn_reply: forward a part, then cut.
        late_reply: delay the piece by up to 50 ms. lost_request: cut before the connection's next
        request.
        The seed fixes the choices, but not the timing of clients.
        """
        with self._control():
            self._faults.rng = rng
            self._faults.probability = probability
            self._faults.chaos = tuple(faults)

    def heal(self) -> None:
        """End every fault."""
        with self._control():
            self._faults = Faults()
            for link in self._links:
                link.lose_next_request = False
                link.reply_bytes_left = None

    def retarget(self, host: str, port: int) -> None:
        """Forward new connections to another server, as after a failover."""
        with self._control():
            self._target = (host, port)

    def close(self) -> None:
        """End all connections and stop listening. Idempotent."""
        if self._closed:
            return
        with self._control():
            self._closed = True
        self._thread.join()
        for link in self._links:
            if not link.ended:
                link.close()
        for each in (self._listener, self._bell, self._rope):
            each.close()

    # The loop.

    def _arm(self, cut: Literal["before", "after"], n: int, match: bytes) -> None:
        with self._control():
            self._faults.cut_request = cut
            self._faults.countdown = n
            self._faults.match = match

    @contextmanager
    def _control(self) -> Iterator[None]:
        with self._lock:
            if self._closed or not self._thread.is_alive():
                raise RuntimeError("This proxy is closed, or its thread has died.")
            yield
        self._rope.send(b"!")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                wait_s = min((link.flush(self._faults) for link in self._links), default=math.inf)
                self._links = [link for link in self._links if not link.ended]
                poll, readers = self._interests()
            ready = poll.poll(None if wait_s == math.inf else math.ceil(wait_s * 1000))
            with self._lock:
                for descriptor, _ in ready:
                    if descriptor == self._bell.fileno():
                        self._bell.recv(READ_BYTES)
                    elif descriptor == self._listener.fileno():
                        self._connect()
                    elif descriptor in readers:
                        link, half = readers[descriptor]
                        # A control method may have ended the link or begun a stall since the poll.
                        if not link.ended and half.side not in self._faults.stalled:
                            link.read(half, self._faults)

    def _interests(self) -> tuple[select.poll, dict[int, tuple[Link, Half]]]:
        """Return a poll object, and the link and direction of each descriptor."""
        readers: dict[int, tuple[Link, Half]] = {}
        events = {self._bell.fileno(): select.POLLIN, self._listener.fileno(): select.POLLIN}
        for link in self._links:
            for half in link.halves:
                if half.side in self._faults.stalled:
                    continue
                if half.reading and half.held_bytes < HELD_BYTES_MAX:
                    source = half.source.fileno()
                    readers[source] = (link, half)
                    events[source] = events.get(source, 0) | select.POLLIN
                if half.blocked:
                    sink = half.sink.fileno()
                    events[sink] = events.get(sink, 0) | select.POLLOUT
        poll = select.poll()
        for descriptor, mask in events.items():
            poll.register(descriptor, mask)
        return poll, readers

    def _connect(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        try:
            if self._faults.refusing:
                raise ConnectionRefusedError
            server = socket.create_connection(self._target, timeout=CONNECT_S)
        except OSError:
            self._counters.refused += 1
            # With a linger time of 0, close() sends a reset (RST) instead of a FIN.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._counters.connections += 1
        self._links.append(Link(client, server, self._counters, self._plain))


def _sides(direction: Direction) -> list[Side]:
    return ["requests", "replies"] if direction == "both" else [direction]
