"""meteor_py with its defaults, except for the capacity of the stream."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import meteor_py as meteor
from benchmarks.common import cut, plain_client
from benchmarks.competitors.systems import BULK

_STREAM = "bench"
#: Large enough for all records in a job, because the competitors keep all of them too.
_CAPACITY = 4_000_000


@dataclass(frozen=True)
class Meteor:
    name: str
    durability: str
    url: str
    #: How the consumer reads: a list of values per batch, or an object per record.
    form: Literal["values", "records"] = "values"

    def fresh(self) -> Meteor:
        with plain_client(self.url) as client:
            client.flushall()
        with self._connect() as client:
            client.stream(_STREAM, capacity=_CAPACITY)
        return self

    def count(self) -> int:
        with self._connect() as client:
            return client.stream(_STREAM).bounds()[1]

    def publisher(self) -> MeteorPublisher:
        return MeteorPublisher(self._connect())

    def consumer(self) -> MeteorConsumer:
        return MeteorConsumer(self._connect(), self.form)

    def _connect(self) -> meteor.Client:
        # The in-memory server deliberately loses its data when it ends.
        warnings.simplefilter("ignore", meteor.DataSafetyWarning)
        return meteor.connect(self.url)


class MeteorPublisher:
    def __init__(self, client: meteor.Client) -> None:
        self._client = client
        self._publisher = client.stream(_STREAM).publisher()

    def send(self, value: bytes) -> None:
        self._publisher.publish(value)

    def send_all(self, values: Sequence[bytes]) -> None:
        publish = self._publisher.publish
        for value in values:
            publish(value)
        self.flush()

    def send_bulk(self, values: Sequence[bytes]) -> None:
        for call in cut(values, BULK):
            self._publisher.publish_many(call)
        self.flush()

    def flush(self) -> None:
        self._publisher.flush()

    def close(self) -> None:
        self._client.close()


class MeteorConsumer:
    def __init__(self, client: meteor.Client, form: str) -> None:
        self._client = client
        self._stream = client.stream(_STREAM)
        self._as_records = form == "records"
        self._subscriber: meteor.Subscriber | None = None

    def to_end(self) -> None:
        self._subscriber = self._stream.subscriber(initial_offset="latest")

    def to_start(self) -> None:
        self._subscriber = self._stream.subscriber(initial_offset="earliest")

    def poll(self) -> Sequence[bytes]:
        assert self._subscriber is not None, "the consumer has no position yet"
        batch = self._subscriber.poll(1.0)
        return [record.value for record in batch] if self._as_records else batch.values()

    def close(self) -> None:
        self._client.close()
