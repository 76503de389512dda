"""Signals, finalizers and retries leave the state intact.

Ctrl-C can interrupt a call in the main thread between any two steps, and a signal handler or a
finalizer can call the library in the middle of another call in the same thread.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import meteor_py as meteor
from meteor_py.log.log_reader import LogReader
from meteor_py.publish.accumulator import Accumulator
from meteor_py.publish.batch import Batch
from meteor_py.records.position import Position, diverged_at
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from tests.conftest import ServerFactory
from tests.support.servers import Replica, Server
from tests.support.waiting import eventually


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as m:
        yield m.stream("s", capacity=1_000_000)


# Ctrl-C


@pytest.fixture
def no_finalizers() -> Iterator[None]:
    """Disable garbage collection: Python swallows exceptions in finalizers, and pytest warns."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_finalizers")
@pytest.mark.parametrize("many", [False, True])
def test_ctrl_c_in_publish_neither_damages_a_frame_nor_shifts_an_ack(
    stream: meteor.Stream, rng: random.Random, many: bool
) -> None:
    acks: list[tuple[int, meteor.Ack | meteor.ManyAck]] = []
    number = interrupts = 0
    with stream.publisher() as pub:
        for _ in range(50):
            timer = threading.Timer(rng.uniform(0.0005, 0.004), interrupt_main)
            try:
                timer.start()
                while timer.is_alive():
                    number += 1
                    value, key = b"v%d" % number, b"k%d" % number
                    if many:
                        acks.append((number, pub.publish_many([value, value], keys=[key, key])))
                    else:
                        acks.append((number, pub.publish(value, key=key)))
            except KeyboardInterrupt:
                interrupts += 1
            timer.join()
        pub.flush()
    assert interrupts > 10
    log = {record.offset: record for batch in stream.read() for record in batch}
    for number, ack in acks:
        offset = ack.result()
        assert log[offset].value == b"v%d" % number
        assert log[offset].key == b"k%d" % number


def interrupt_main() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_ctrl_c_between_request_and_replies_leaves_no_reply_for_the_next_request(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: Connection, count: int, timeout_s: float) -> list[object]:
        monkeypatch.undo()
        raise KeyboardInterrupt

    m = stream.client
    m.streams()
    monkeypatch.setattr(Connection, "read_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        m._connector.pipeline([("ECHO", "one"), ("ECHO", "two")])
    assert m._connector.call("ECHO", "three") == b"three"


# Reentrant calls


def test_signal_handler_that_publishes_during_a_publish_gets_an_error(
    stream: meteor.Stream,
) -> None:
    outcomes: list[object] = []
    with stream.publisher() as pub, alarms(lambda: outcomes.append(attempt(pub))):
        eventually(lambda: pub.publish(b"x", key=b"k") and RuntimeError in map(type, outcomes))
    assert {type(outcome) for outcome in outcomes} <= {RuntimeError, meteor.Ack}


def attempt(pub: meteor.Publisher) -> object:
    try:
        return pub.publish(b"from the handler", key=b"k")
    except RuntimeError as error:
        return error


def test_finalizer_that_publishes_does_not_hang(stream: meteor.Stream) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            attempt(pub)

    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        with stream.publisher() as pub:
            for _ in range(3_000):
                Cycle()
                pub.publish(b"x", key=b"k", headers={"a": b"1"})
            gc.collect()
            pub.flush()
    finally:
        gc.set_threshold(*threshold)
    assert stream.describe().next > 3_000


def test_signal_handler_that_closes_a_closing_publisher_does_not_hang(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        pub = m.stream("s").publisher()
        pub.publish(b"connected").result()
        server.pause()
        ack = pub.publish(b"x")
        begun = time.monotonic()
        with alarms(lambda: pub.close(0.1), first_s=0.2), pytest.raises(meteor.OutcomeUnknown):
            pub.close(1)
        assert time.monotonic() - begun < 8
        assert isinstance(ack.exception(), meteor.OutcomeUnknown)
        server.resume()


def test_signal_handler_that_uses_the_client_during_a_call_gets_its_own_reply(
    stream: meteor.Stream,
) -> None:
    m = stream.client
    inner: list[bytes] = []
    with alarms(lambda: inner.append(m._connector.call("ECHO", "inner"))):
        eventually(lambda: m._connector.call("ECHO", "outer") == b"outer" and len(inner) > 50)
    assert set(inner) == {b"inner"}


class alarms:  # in lower case, because it is used like a function
    """Calls a function from a signal handler: repeatedly, or once if ``first_s`` is 0.1 or more."""

    def __init__(self, action: Callable[[], object], first_s: float = 0.001) -> None:
        self._action = action
        self._first_s = first_s

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self._first_s)

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _handle(self, *_: object) -> None:
        self._action()
        if self._first_s < 0.1:  # set the next alarm only now, so that calls do not overlap
            signal.setitimer(signal.ITIMER_REAL, self._first_s)


# Losses and failures


def lose_tail(stream: meteor.Stream) -> None:
    """Simulate a failover that loses records 100 to 149; publish 100 others in their place."""
    plain = stream.client.redis
    plain.delete(keys.log(stream.name), *plain.keys(keys.producer(stream.name, "*")))
    plain.hset(keys.meta(stream.name), mapping={"next": 100, "history": "f" * 40})
    with stream.publisher() as pub:
        pub.publish_many([b"new %d" % n for n in range(100)]).result()


@pytest.fixture
def ahead(stream: meteor.Stream) -> Iterator[meteor.Subscriber]:
    """A subscriber that started at the end of a log, which has since lost its last 50 records."""
    with stream.publisher() as pub:
        pub.publish_many([b"old %d" % n for n in range(150)]).result()
    with stream.subscriber() as sub:
        lose_tail(stream)
        yield sub


def test_failed_seek_does_not_hide_a_loss(ahead: meteor.Subscriber) -> None:
    with pytest.raises(ValueError, match="beyond the end"):
        ahead.seek(10**6)
    with pytest.raises(meteor.LogTruncated) as loss:
        ahead.poll()
    assert (loss.value.first, loss.value.last) == (100, 149)


def test_failed_skip_gap_can_be_repeated(
    ahead: meteor.Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(log: LogReader, offset: int) -> None:
        raise meteor.ConnectionFailed("The server is unreachable.")

    with pytest.raises(meteor.LogTruncated):
        ahead.poll()
    with monkeypatch.context() as patch:
        patch.setattr(LogReader, "seek", gone)
        with pytest.raises(meteor.ConnectionFailed):
            ahead.skip_gap()
    ahead.skip_gap()
    assert ahead.poll().values()[0] == b"new 0"
    assert ahead.skipped == 50


def test_publish_failure_does_not_hide_a_loss() -> None:
    accumulator = Accumulator(
        stream="s",
        records_max=10,
        bytes_max=1_000,
        pending_max=10_000,
        linger_s=0,
        delivery_timeout_s=1,
    )
    unknown = meteor.OutcomeUnknown("Unknown.", stream="s")
    loss = meteor.LogTruncated("Lost.", stream="s", first=3, last=5)
    accumulator.settle(Batch(0, 1), unknown)
    accumulator.report_loss(loss)
    assert [accumulator.take_failure() for _ in range(3)] == [unknown, loss, None]


def test_epoch_unknown_to_the_server_counts_as_lost() -> None:
    # The server's clock was set back, so the new epoch has the lower number.
    assert diverged_at(Position("i", 2_000, 200), "1:0,1500:100", 300) == 100
    assert diverged_at(Position("i", 2_000, 100), "1:0,1500:100", 300) is None


def test_idle_publisher_detects_its_servers_demotion_and_promotion(
    private_server: ServerFactory,
) -> None:
    first = private_server()
    with Replica(first) as second, meteor.connect(first.url) as m:
        stream = m.stream("s", capacity=1_000)
        idle, busy = stream.publisher(), stream.publisher()
        busy.publish_many([b"common"] * 99).result()
        idle.publish(b"common").result()
        second.wait_in_sync()
        second.promote()
        busy.publish_many([b"lost"] * 50).result()  # these records are on the first server only
        busy.close()
        with stream.subscriber() as sub:
            make_replica(first, second)
            with first.client() as client:
                client.replicaof("NO", "ONE")
            eventually(lambda: idle._sender._idle_s() > 1.1, message="the publisher was not idle")
            with pytest.raises(meteor.LogTruncated):
                sub.poll()
            idle.publish_many([b"new"] * 150).result()
            with pytest.raises(meteor.LogTruncated) as loss:
                sub.poll()
            assert (loss.value.first, loss.value.last) == (100, 149)
        idle.close()


def make_replica(server: Server, of: Server) -> None:
    with server.client() as client:
        client.replicaof("127.0.0.1", str(of.port))
    wanted = of.info("replication")["master_repl_offset"]

    def in_sync() -> bool:
        info = server.info("replication")
        return info.get("master_link_status") == "up" and info["slave_repl_offset"] >= wanted

    eventually(in_sync, 30, f"pid {os.getpid()}: the former primary did not sync with the new one")
