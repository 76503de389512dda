"""NATS JetStream through nats-py: asynchronous publishing, and an ordered push consumer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.competitors.systems import BULK
from benchmarks.competitors.systems.event_loop import EventLoop

_STREAM = "bench"
_SUBJECT = "bench.records"
#: Maximum number of unacknowledged records; a higher limit makes the client slower.
_PENDING = 4_000


@dataclass(frozen=True)
class Nats:
    name: str
    durability: str
    url: str
    storage: Literal["memory", "file"] = "memory"

    def fresh(self) -> Nats:
        from nats.js.api import StorageType, StreamConfig
        from nats.js.errors import NotFoundError

        client = NatsClient(self.url)
        try:
            try:
                client.run(client.jetstream.delete_stream(_STREAM))
            except NotFoundError:
                pass
            storage = StorageType.MEMORY if self.storage == "memory" else StorageType.FILE
            config = StreamConfig(name=_STREAM, subjects=[_SUBJECT], storage=storage)
            client.run(client.jetstream.add_stream(config))
        finally:
            client.close()
        return self

    def count(self) -> int:
        client = NatsClient(self.url)
        try:
            return int(client.run(client.jetstream.stream_info(_STREAM)).state.messages)
        finally:
            client.close()

    def publisher(self) -> NatsPublisher:
        return NatsPublisher(NatsClient(self.url))

    def consumer(self) -> NatsConsumer:
        return NatsConsumer(NatsClient(self.url))


class NatsClient:
    def __init__(self, url: str) -> None:
        import nats

        self._loop = EventLoop()
        self.run = self._loop.run
        self._connection = self.run(nats.connect(url))
        self.jetstream: Any = self._connection.jetstream(publish_async_max_pending=_PENDING)

    def close(self) -> None:
        self.run(self._connection.close())
        self._loop.close()


class NatsPublisher:
    def __init__(self, client: NatsClient) -> None:
        self._client = client

    def send(self, value: bytes) -> None:
        # Wait for the acknowledgement: the client writes only while its event loop runs.
        self._client.run(self._client.jetstream.publish(_SUBJECT, value))

    def send_all(self, values: Sequence[bytes]) -> None:
        async def publish() -> None:
            jetstream = self._client.jetstream
            for value in values:
                await jetstream.publish_async(_SUBJECT, value, wait_stall=60)
            await jetstream.publish_async_completed()

        self._client.run(publish())

    def send_bulk(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def flush(self) -> None:
        """Do nothing, because every call waits for its acknowledgement."""

    def close(self) -> None:
        self._client.close()


class NatsConsumer:
    def __init__(self, client: NatsClient) -> None:
        self._client = client
        self._subscription: Any = None

    def to_end(self) -> None:
        from nats.js.api import DeliverPolicy

        self._subscribe(DeliverPolicy.NEW)

    def to_start(self) -> None:
        from nats.js.api import DeliverPolicy

        self._subscribe(DeliverPolicy.ALL)

    def _subscribe(self, policy: Any) -> None:
        self._subscription = self._client.run(
            self._client.jetstream.subscribe(
                _SUBJECT,
                ordered_consumer=True,
                deliver_policy=policy,
                pending_msgs_limit=10_000_000,
                pending_bytes_limit=2**31,
            )
        )

    def poll(self) -> Sequence[bytes]:
        return self._client.run(self._poll())

    async def _poll(self) -> list[bytes]:
        from nats.errors import TimeoutError as NatsTimeout

        values: list[bytes] = []
        try:
            values.append((await self._subscription.next_msg(timeout=1)).data)
            while self._subscription.pending_msgs and len(values) < BULK:
                values.append((await self._subscription.next_msg(timeout=1)).data)
        except NatsTimeout:
            pass
        return values

    def close(self) -> None:
        self._client.close()
