"""Apache Kafka through confluent-kafka, with one partition and no consumer group.

The settings are the best ones from a sweep over linger, batch size and compression: a linger of 5
ms, batches of 1 MB, no compression, and ``consume(2000)``. When latency is measured, the consumer
takes each record as soon as it arrives, and the linger is 0 ms for single records. At a fixed rate,
lingers of 0, 1 and 5 ms are compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import cut
from benchmarks.competitors.systems import BULK

_GATHER = 2_000
_GATHER_S = 0.1
_ADMIN_S = 20.0


@dataclass(frozen=True)
class Kafka:
    name: str
    durability: str
    servers: str
    acks: str = "1"
    linger_ms: float = 5
    compression: str = "none"
    #: Whether the consumer returns what has arrived instead of waiting to gather a batch.
    at_once: bool = False
    topic: str = ""

    def fresh(self) -> Kafka:
        """Create a topic with a new name, because clients still see a deleted topic for a while."""
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient(self._client)
        old = [name for name in admin.list_topics(timeout=10).topics if name.startswith("bench-")]
        for future in (admin.delete_topics(old) if old else {}).values():
            future.result(_ADMIN_S)
        topic = f"bench-{time.time_ns()}"
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(_ADMIN_S)
        deadline = time.monotonic() + _ADMIN_S
        while time.monotonic() < deadline:
            found = admin.list_topics(topic, timeout=10).topics[topic]
            if found.error is None and found.partitions and found.partitions[0].leader >= 0:
                return replace(self, topic=topic)
            time.sleep(0.05)
        raise TimeoutError(f"Topic {topic} had no leader after {_ADMIN_S:g} seconds.")

    def count(self) -> int:
        consumer = KafkaConsumer(self)
        try:
            return consumer.end_offset()
        finally:
            consumer.close()

    def publisher(self) -> KafkaPublisher:
        return KafkaPublisher(self)

    def consumer(self) -> KafkaConsumer:
        return KafkaConsumer(self)

    @property
    def _client(self) -> dict[str, Any]:
        return {"bootstrap.servers": self.servers, "socket.nagle.disable": True}

    @property
    def producer_settings(self) -> dict[str, Any]:
        return self._client | {
            "linger.ms": self.linger_ms,
            "acks": self.acks,
            "compression.type": self.compression,
            "batch.size": 1_000_000,
            "batch.num.messages": 100_000,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2_000_000,
        }

    @property
    def consumer_settings(self) -> dict[str, Any]:
        return self._client | {
            "group.id": "unused",
            "enable.auto.commit": False,
            "fetch.min.bytes": 1,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 1_000_000,
            "max.partition.fetch.bytes": 10_000_000,
            "fetch.max.bytes": 50_000_000,
        }


class KafkaPublisher:
    def __init__(self, system: Kafka) -> None:
        from confluent_kafka import Producer

        self._topic = system.topic
        self._producer = Producer(system.producer_settings)
        self._producer.list_topics(system.topic, timeout=10)

    def send(self, value: bytes) -> None:
        self._producer.produce(self._topic, value)

    def send_all(self, values: Sequence[bytes]) -> None:
        produce, topic = self._producer.produce, self._topic
        for value in values:
            produce(topic, value)
        self.flush()

    def send_bulk(self, values: Sequence[bytes]) -> None:
        for call in cut(values, BULK):
            accepted = self._producer.produce_batch(self._topic, [{"value": v} for v in call])
            assert accepted == len(call), "the producer's queue is full"
        self.flush()

    def flush(self) -> None:
        assert self._producer.flush(60) == 0, "some records were not acknowledged"

    def close(self) -> None:
        self._producer.flush(10)


class KafkaConsumer:
    def __init__(self, system: Kafka) -> None:
        from confluent_kafka import Consumer

        self._topic = system.topic
        self._at_once = system.at_once
        self._consumer = Consumer(system.consumer_settings)
        self._consumer.list_topics(system.topic, timeout=10)

    def end_offset(self) -> int:
        from confluent_kafka import TopicPartition

        partition = TopicPartition(self._topic, 0)
        end: int = self._consumer.get_watermark_offsets(partition, timeout=10)[1]
        return end

    def to_end(self) -> None:
        self._assign(self.end_offset())
        self._consumer.poll(0.5)

    def to_start(self) -> None:
        self._assign(0)

    def _assign(self, offset: int) -> None:
        from confluent_kafka import TopicPartition

        self._consumer.assign([TopicPartition(self._topic, 0, offset)])

    def poll(self) -> Sequence[bytes]:
        if not self._at_once:
            return [message.value() for message in self._consumer.consume(_GATHER, _GATHER_S)]
        first = self._consumer.poll(1.0)
        if first is None:
            return []
        return [message.value() for message in (first, *self._consumer.consume(BULK, 0))]

    def close(self) -> None:
        self._consumer.close()
