"""FastStream on Redis Streams: one publish and one handler call per record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import plain_client
from benchmarks.competitors.systems.event_loop import EventLoop

_STREAM = "faststream"


@dataclass(frozen=True)
class FastStream:
    name: str
    durability: str
    url: str

    def fresh(self) -> FastStream:
        with plain_client(self.url) as client:
            client.flushall()
        return self

    def count(self) -> int:
        with plain_client(self.url) as client:
            return int(client.xlen(_STREAM))

    def publisher(self) -> FastStreamPublisher:
        return FastStreamPublisher(self.url)

    def consumer(self) -> FastStreamConsumer:
        return FastStreamConsumer(self.url)


class FastStreamPublisher:
    def __init__(self, url: str) -> None:
        from faststream.redis import RedisBroker

        self._loop = EventLoop()
        self._broker = RedisBroker(url, logger=None)
        self._loop.run(self._broker.connect())

    def send(self, value: bytes) -> None:
        self._loop.run(self._broker.publish(value, stream=_STREAM))

    def send_all(self, values: Sequence[bytes]) -> None:
        async def publish() -> None:
            for value in values:
                await self._broker.publish(value, stream=_STREAM)

        self._loop.run(publish())

    def send_bulk(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def flush(self) -> None:
        """Do nothing, because every call waits for its reply."""

    def close(self) -> None:
        self._loop.run(self._broker.stop())
        self._loop.close()


class FastStreamConsumer:
    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = EventLoop()
        self._values: list[bytes] = []
        self._arrived = asyncio.Event()
        self._broker: Any = None

    def to_end(self) -> None:
        self._subscribe("$")

    def to_start(self) -> None:
        self._subscribe("0-0")

    def _subscribe(self, last_id: str) -> None:
        from faststream.redis import RedisBroker, StreamSub

        broker = RedisBroker(self._url, logger=None)

        @broker.subscriber(stream=StreamSub(_STREAM, last_id=last_id))  # type: ignore[untyped-decorator]
        async def handle(body: bytes) -> None:
            self._values.append(body)
            self._arrived.set()

        self._broker = broker
        self._loop.run(broker.start())

    def poll(self) -> Sequence[bytes]:
        return self._loop.run(self._poll())

    async def _poll(self) -> list[bytes]:
        try:
            await asyncio.wait_for(self._arrived.wait(), 1.0)
        except TimeoutError:
            pass
        self._arrived.clear()
        values, self._values = self._values, []
        return values

    def close(self) -> None:
        self._loop.run(self._broker.stop())
        self._loop.close()
