"""Time until the next group member gets a record after the active one closes or is killed.

All failure detectors are set to 2 seconds: lease_ttl for ours, session.timeout.ms for Kafka's.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import meteor_py as meteor
from benchmarks.competitors.systems.kafka import Kafka
from benchmarks.competitors.systems.ours import Meteor

End = Literal["closed", "killed"]
ENDS: tuple[End, ...] = ("closed", "killed")

DETECTION_S = 2.0
_GROUP = "takeover"
_WAIT_S = 60.0
_CONTEXT = multiprocessing.get_context("spawn")


def measure(system: Meteor | Kafka, end: End, protocol: str = "") -> float:
    """End the active member; return the seconds until the other member gets a record."""
    fresh = system.fresh()
    seen = [_CONTEXT.Value("d", 0.0) for _ in range(2)]
    closing = [_CONTEXT.Event() for _ in range(2)]
    members = [
        _CONTEXT.Process(target=_member, args=(fresh, protocol, *shared), daemon=True)
        for shared in zip(seen, closing, strict=True)
    ]
    stop = threading.Event()
    feeder = threading.Thread(target=_feed, args=(fresh, stop))
    feeder.start()
    try:
        members[0].start()
        _wait(lambda: seen[0].value)
        members[1].start()
        # Give the second member time to join. Then end the active one at a random time between
        # heartbeats.
        time.sleep(2.5 + random.random())
        active = 0 if seen[0].value > seen[1].value else 1
        began = time.monotonic()
        if end == "killed":
            members[active].kill()
        else:
            closing[active].set()
        other = seen[1 - active]
        _wait(lambda: other.value > began)
        return float(other.value - began)
    finally:
        for event in closing:
            event.set()
        for member in members:
            if member.pid is not None:
                member.join(8)
                member.kill()
        stop.set()
        feeder.join()


def _feed(system: Meteor | Kafka, stop: threading.Event) -> None:
    publisher = system.publisher()
    while not stop.wait(0.01):
        publisher.send(b"x" * 100)
    publisher.close()


def _member(system: Meteor | Kafka, protocol: str, last: Any, closing: Any) -> None:
    if isinstance(system, Meteor):
        _our_member(system, last, closing)
    else:
        _kafka_member(system, protocol, last, closing)


def _our_member(system: Meteor, last: Any, closing: Any) -> None:
    with meteor.connect(system.url) as client:
        subscriber = client.stream("bench").subscriber(group=_GROUP, lease_ttl=DETECTION_S)
        while not closing.is_set():
            if subscriber.poll(0.05):
                last.value = time.monotonic()
                subscriber.confirm()


def _kafka_member(system: Kafka, protocol: str, last: Any, closing: Any) -> None:
    from confluent_kafka import Consumer

    settings = {
        "bootstrap.servers": system.servers,
        "group.id": f"{_GROUP}-{protocol}",
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": True,
    }
    if protocol == "classic":  # with the consumer protocol, the broker has these settings
        detection = {"session.timeout.ms": int(DETECTION_S * 1000), "heartbeat.interval.ms": 600}
        settings |= detection
    consumer = Consumer(settings)
    consumer.subscribe([system.topic])
    while not closing.is_set():
        message = consumer.poll(0.05)
        if message is not None and message.error() is None:
            last.value = time.monotonic()
    consumer.close()


def _wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No member got a record within {_WAIT_S:g} seconds.")
        time.sleep(0.002)
