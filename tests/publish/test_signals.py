"""Signal handlers can raise, flush and close, wherever they interrupt a publisher."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.runtime import completion
from meteor_py.runtime.locks import SignalSafeEvent
from tests.support.interrupts import Interrupts, interrupt_at, interrupt_everywhere
from tests.support.proxied_stream import ProxiedStream
from tests.support.proxied_stream import proxied as proxied
from tests.support.waiting import ends, eventually, running_threads

SECONDS = 1.0


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as client:
        yield client.stream("s", capacity=1_000_000)


# Handlers that raise


def open_sockets() -> set[str]:
    folder = Path("/proc/self/fd")
    links = set()
    for descriptor in folder.iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the folder itself
            links.add(os.readlink(descriptor))
    return {link for link in links if link.startswith("socket:")}


def is_usable(pub: meteor.Publisher) -> bool:
    pub.flush(5)
    return pub.publish(b"the last").result(5) == pub.stream.describe().next - 1


def test_interrupted_result_does_not_stop_the_sender(stream: meteor.Stream, rng: Random) -> None:
    with stream.publisher() as pub, Interrupts(rng) as interrupts:
        for _ in interrupts.rounds(50, SECONDS):
            interrupts.during(lambda: pub.publish(b"x").result(5))
        assert is_usable(pub)


def test_interrupted_publish_or_flush_raises_no_other_error_and_loses_no_record(
    stream: meteor.Stream, rng: Random
) -> None:
    acks: list[meteor.Ack] = []

    def publish_and_flush() -> None:
        acks.extend(pub.publish(b"x" * 100) for _ in range(30))  # there is room for twelve
        pub.flush(5)

    with stream.publisher(max_pending_bytes=2_000) as pub, Interrupts(rng) as interrupts:
        for _ in interrupts.rounds(50, SECONDS):
            interrupts.during(publish_and_flush)
        assert is_usable(pub)
        offsets = [ack.result(5) for ack in acks]
        assert offsets == sorted(set(offsets))


def test_interrupted_close_can_be_repeated(stream: meteor.Stream, rng: Random) -> None:
    with Interrupts(rng) as interrupts:
        for number, _ in enumerate(interrupts.rounds(20, SECONDS)):
            pub = stream.publisher()
            ack = pub.publish(b"x")
            for _ in range(3):
                interrupts.during(pub.close)
            pub.close(5)
            assert ack.offset == number


def test_flush_can_be_interrupted_at_any_moment(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")

    def flush() -> None:
        with suppress(TimeoutError):
            pub.flush(0.001)

    for _ in interrupt_everywhere(flush):
        assert not pub._accumulator._room.is_mine(), "the publisher is still locked"
    proxied.proxy.resume()
    pub.flush(5)
    assert ack.offset == 1


def test_close_can_be_interrupted_at_any_moment(stream: meteor.Stream) -> None:
    publishers = [stream.publisher()]
    publishers[-1].publish(b"0")
    for _ in interrupt_everywhere(lambda: publishers[-1].close(5)):
        assert ends(publishers[-1].close, 15), "another thread cannot close the publisher"
        publishers.append(stream.publisher())
        publishers[-1].publish(b"%d" % len(publishers))
    assert stream.describe().next == len(publishers) > 10


# redis-py leaves the socket of an interrupted connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_opening_a_publisher_can_be_interrupted_at_any_moment(stream: meteor.Stream) -> None:
    """The interrupted call must not leave a thread or a socket behind."""
    before, sockets = running_threads(), open_sockets()
    opened: list[meteor.Publisher] = []
    for _ in interrupt_everywhere(lambda: opened.append(stream.publisher())):
        while opened:
            opened.pop().close()
    opened.pop().close()
    stream.client.close()  # closes a publisher whose opening was interrupted at the last moment
    eventually(lambda: running_threads() <= before, 5, "a sender thread was left running")
    gc.collect()
    assert open_sockets() <= sockets, "a socket was left open"


# Handlers that flush or close

Publish = Callable[[meteor.Publisher, bytes], "meteor.Ack | meteor.ManyAck"]

#: One call for each way to add records to a batch. The ack's first record has the given value.
CALLS: dict[str, Publish] = {
    "value": lambda pub, value: pub.publish(value),
    "value after another": lambda pub, value: [pub.publish(b""), pub.publish(value)][1],
    "key": lambda pub, value: pub.publish(value, key=b"k"),
    "few": lambda pub, value: pub.publish_many([value, b""], keys=[None, b"k"]),
    "many": lambda pub, value: pub.publish_many([value] * 300),
}


def value_at(stream: meteor.Stream, offset: int) -> bytes:
    (batch,) = stream.read(offset, offset + 1)
    return bytes(batch.values()[0])


@pytest.mark.parametrize("call", CALLS)
def test_record_whose_publish_is_interrupted_by_close_is_in_the_log_or_refused(
    stream: meteor.Stream, call: str
) -> None:
    """When the signal handler returns, the publish that it interrupted continues."""
    acks: list[Any] = []
    refused = 0

    def publish(pub: meteor.Publisher, value: bytes) -> None:
        acks.append((value, CALLS[call](pub, value)))

    for moment in itertools.count(1):
        pub = stream.publisher()
        value = b"%d" % moment
        try:
            more = interrupt_at(
                moment,
                partial(pub.close, 5),
                partial(publish, pub, value),
            )
        except meteor.PublisherClosed:
            refused, more = refused + 1, True
        pub.close()
        if not more:
            break
    assert all(ack.done() for _, ack in acks), "an ack is pending after its publisher closed"
    assert [value_at(stream, ack.result()) for _, ack in acks] == [value for value, _ in acks]
    assert refused > 10
    assert len(acks) > 5


@pytest.mark.parametrize("call", CALLS)
def test_flush_in_a_signal_handler_during_publish_keeps_every_threads_records(
    stream: meteor.Stream, call: str
) -> None:
    """While the signal handler waits, another thread publishes through the same publisher."""
    acks: deque[tuple[bytes, Any]] = deque()
    stopped = threading.Event()

    def publish(value: bytes) -> None:
        acks.append((value, CALLS[call](pub, value)))

    def publish_beside() -> None:
        for number in itertools.count():
            if stopped.is_set():
                break
            value = b"beside %d" % number
            acks.append((value, pub.publish(value, key=None if number % 3 else b"k")))

    with stream.publisher(max_pending_bytes=100_000) as pub:
        thread = threading.Thread(target=publish_beside)
        thread.start()
        try:
            for moment in itertools.count(1):
                acks.append((b"", pub.publish(b"")))  # so that there is something to wait for
                value = b"%d" % moment
                if not interrupt_at(moment, partial(pub.flush, 10), partial(publish, value)):
                    break
        finally:
            stopped.set()
            thread.join()
    log = [value for batch in stream.read() for value in batch.values()]
    offsets = [ack.result(0) for _, ack in acks]
    assert [log[offset] for offset in offsets] == [value for value, _ in acks]
    assert len(set(offsets)) == len(offsets)


def test_publish_in_another_thread_during_a_signal_handler_keeps_both_records(
    proxied: ProxiedStream,
) -> None:
    """Both records go to the same open batch, because the sender is waiting for a reply."""
    pub = proxied.warm_publisher()
    acks: list[tuple[bytes, meteor.Ack]] = []

    def publish(value: bytes) -> None:
        acks.append((value, pub.publish(value, key=b"k")))

    def publish_in_another_thread() -> None:
        thread = threading.Thread(target=publish, args=(b"other",))
        thread.start()
        # That thread needs the lock, which flush() releases while it waits.
        while thread.is_alive():
            with pytest.raises(TimeoutError):
                pub.flush(0.001)

    proxied.proxy.stall("replies")
    pub.publish(b"without a reply")
    eventually(lambda: pub._sender.window.sent)
    for moment in itertools.count(1):
        value = b"%d" % moment
        if not interrupt_at(moment, publish_in_another_thread, partial(publish, value)):
            break
    proxied.proxy.resume()
    offsets = [ack.result(10) for _, ack in acks]
    log = proxied.values()
    assert [log[offset] for offset in offsets] == [value for value, _ in acks]
    assert len(set(offsets)) == 2 * moment - 1


@pytest.mark.parametrize("how", ["wait", "callback"])
def test_signal_handler_can_close_the_publisher_while_its_thread_starts_to_wait_for_an_ack(
    proxied: ProxiedStream, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted code holds the completions' shared lock, so the sender must not need it."""
    pub = proxied.warm_publisher()
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    called: list[meteor.Ack] = []

    def handle(*_: object) -> None:
        proxied.proxy.resume()
        pub.close(5)

    class InterruptedEvent(SignalSafeEvent):
        def __init__(self) -> None:
            super().__init__()
            signal.raise_signal(signal.SIGUSR1)

    class InterruptedDeque(deque[Any]):
        def __init__(self) -> None:
            super().__init__()
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(completion, "SignalSafeEvent", InterruptedEvent)
    monkeypatch.setattr(completion, "deque", InterruptedDeque)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        if how == "wait":
            assert ack.result(5) == 1
        else:
            ack.add_done_callback(called.append)
            assert called == [ack]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (pub.closed, ack.offset) == (True, 1)
