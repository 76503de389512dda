"""A signal handler that raises leaves group members usable, wherever it interrupts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest

import meteor_py as meteor
from tests.support.interrupts import Interrupts, interrupt_everywhere
from tests.support.waiting import ends, eventually

SECONDS = 1.5

# A signal during connect may leave a socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as client:
        stream = client.stream("s", capacity=1_000_000)
        with stream.publisher() as pub:
            pub.publish_many([b"%d" % number for number in range(300_000)]).result(10)
        yield stream


def works(sub: meteor.Subscriber) -> bool:
    """Return whether the member gets and confirms a record; False if it has lost its lease."""
    try:
        batch = sub.poll(1, 1)
        return bool(batch) and sub.confirm().result(5) == batch.last_offset + 1
    except meteor.LeaseLost:
        return False


def test_interrupted_poll_or_confirm_leaves_the_member_usable(
    stream: meteor.Stream, rng: Random
) -> None:
    def work() -> None:
        batch = sub.poll(rng.choice((0.0, 0.5)), rng.choice((1, 7)))
        assert [int(value) for value in batch.values()] == list(batch.offsets)
        if batch and rng.random() < 0.5:
            # Without a timeout, this thread sends the confirm.
            sub.confirm().result(rng.choice((5, None)))

    with stream.subscriber(group="g", initial_offset="earliest") as sub:
        with Interrupts(rng) as interrupts:
            for _ in interrupts.rounds(50, SECONDS):
                interrupts.during(work, 2e-3)
        eventually(lambda: works(sub), 10, "the member is stuck")


@pytest.mark.parametrize("call", ["poll", "confirm", "deactivate"])
def test_each_member_call_can_be_interrupted_at_any_moment(
    stream: meteor.Stream, call: str
) -> None:
    def confirm() -> None:
        sub.confirm().result(5)

    def deactivate() -> None:
        sub.deactivate(5)

    with stream.subscriber(group="g", initial_offset="earliest", lease_ttl=20) as sub:
        calls: dict[str, Callable[[], object]] = {"poll": partial(sub.poll, 0, 1)}
        calls |= {"confirm": confirm, "deactivate": deactivate}
        sub.poll(5, 1)
        moments = 0
        for _ in interrupt_everywhere(calls[call]):
            assert ends(lambda: sub.confirm(0).exception(5), 10), "another thread is stuck"
            sub.reactivate()
            eventually(lambda: sub.poll(1, 1), 10, "the member is stuck")
            if call == "poll":  # make the next poll acquire the lease and fetch
                sub.deactivate(5)
                sub.reactivate()
            moments += 1
        assert moments > 30
        sub.reactivate()
        eventually(lambda: works(sub), 10, "the member is stuck")


def test_interrupted_deactivate_leaves_the_connection_usable(
    stream: meteor.Stream, rng: Random
) -> None:
    with stream.subscriber(group="g", initial_offset="earliest", lease_ttl=5) as sub:
        with Interrupts(rng) as interrupts:
            for _ in interrupts.rounds(20, SECONDS):
                sub.poll(1, 1)
                interrupts.during(lambda: sub.deactivate(2.0))
                sub.reactivate()
        eventually(lambda: works(sub), 10, "the member is stuck")


def test_interrupted_member_close_can_be_repeated(stream: meteor.Stream, rng: Random) -> None:
    with Interrupts(rng) as interrupts:
        for _ in interrupts.rounds(20, SECONDS):
            sub = stream.subscriber(group="g", initial_offset="earliest", lease_ttl=20)
            eventually(lambda sub=sub: sub.poll(1, 1), 10, "the lease was not released")  # type: ignore[misc]
            for _ in range(3):
                interrupts.during(sub.close)
            sub.close()
