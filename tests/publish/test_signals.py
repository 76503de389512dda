"""A signal handler that raises leaves publishers usable, wherever it interrupts them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

import pytest

import meteor_py as meteor
from tests.support.interrupts import Interrupts

SECONDS = 1.0


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as client:
        yield client.stream("s", capacity=1_000_000)


def is_usable(pub: meteor.Publisher) -> bool:
    pub.flush(5)
    return pub.publish(b"the last").result(5) == pub.stream.describe().next - 1


def test_interrupted_result_does_not_stop_the_sender(stream: meteor.Stream, rng: Random) -> None:
    deadline = time.monotonic() + SECONDS
    with stream.publisher() as pub, Interrupts(rng) as interrupts:
        while time.monotonic() < deadline:
            interrupts.during(lambda: pub.publish(b"x").result(5))
        assert interrupts.count > 50
        assert is_usable(pub)


def test_interrupted_publish_or_flush_raises_nothing_else_and_loses_no_record(
    stream: meteor.Stream, rng: Random
) -> None:
    acks: list[meteor.Ack] = []

    def publish_and_flush() -> None:
        acks.extend(pub.publish(b"x" * 100) for _ in range(30))  # there is room for twelve
        pub.flush(5)

    deadline = time.monotonic() + SECONDS
    with stream.publisher(max_pending_bytes=2_000) as pub, Interrupts(rng) as interrupts:
        while time.monotonic() < deadline:
            interrupts.during(publish_and_flush)
        assert interrupts.count > 50
        assert is_usable(pub)
        offsets = [ack.result(5) for ack in acks]
        assert offsets == sorted(set(offsets))


def test_interrupted_close_can_be_repeated(stream: meteor.Stream, rng: Random) -> None:
    deadline = time.monotonic() + SECONDS
    rounds = 0
    with Interrupts(rng) as interrupts:
        while time.monotonic() < deadline:
            pub = stream.publisher()
            ack = pub.publish(b"x")
            for _ in range(3):
                interrupts.during(pub.close)
            pub.close(5)
            assert ack.offset == rounds
            rounds += 1
        assert interrupts.count > 20
