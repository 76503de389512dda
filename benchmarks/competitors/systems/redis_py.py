"""Plain Redis Streams through redis-py with hiredis: pipelines of 500 XADD, and XREAD COUNT 500."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import PIPELINE, cut, plain_client

_STREAM = "plain"
_FIELD = b"v"


@dataclass(frozen=True)
class RedisPy:
    name: str
    durability: str
    url: str

    def fresh(self) -> RedisPy:
        with plain_client(self.url) as client:
            client.flushall()
        return self

    def count(self) -> int:
        with plain_client(self.url) as client:
            return int(client.xlen(_STREAM))

    def publisher(self) -> RedisPublisher:
        return RedisPublisher(plain_client(self.url))

    def consumer(self) -> RedisConsumer:
        return RedisConsumer(plain_client(self.url))


class RedisPublisher:
    def __init__(self, client: Any) -> None:
        self._client = client
        client.ping()

    def send(self, value: bytes) -> None:
        self._client.xadd(_STREAM, {_FIELD: value})

    def send_all(self, values: Sequence[bytes]) -> None:
        for part in cut(values, PIPELINE):
            pipeline = self._client.pipeline(transaction=False)
            for value in part:
                pipeline.xadd(_STREAM, {_FIELD: value})
            pipeline.execute()

    def send_bulk(self, values: Sequence[bytes]) -> None:
        self.send_all(values)

    def flush(self) -> None:
        """Do nothing, because every call waits for its reply."""

    def close(self) -> None:
        self._client.close()


class RedisConsumer:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._after = b"0-0"
        client.ping()

    def to_end(self) -> None:
        last = self._client.xrevrange(_STREAM, count=1)
        self._after = last[0][0] if last else b"0-0"

    def to_start(self) -> None:
        self._after = b"0-0"

    def poll(self) -> Sequence[bytes]:
        found = self._client.xread({_STREAM: self._after}, count=PIPELINE, block=1000)
        if not found:
            return []
        entries = found[0][1]
        self._after = entries[-1][0]
        return [fields[_FIELD] for _, fields in entries]

    def close(self) -> None:
        self._client.close()
