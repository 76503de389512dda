"""A subscriber survives interruptions and outages, and does not disturb other clients.

Covers Ctrl-C at any moment, a server that is killed, a stream that is deleted or recreated, forks,
and other readers and publishers.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.log.log_reader import LogReader
from meteor_py.redis.connection import Connection
from meteor_py.subscribe import fetcher
from tests.conftest import ServerFactory
from tests.support.forking import exit_code, fork
from tests.support.proxy import Proxy
from tests.support.readers import background, blocked, check_values, drain, everything, fill, value
from tests.support.servers import HOST, plain_client
from tests.support.waiting import eventually


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


@pytest.fixture
def stream(client: meteor.Client) -> meteor.Stream:
    return client.stream("s", create=True)


@pytest.fixture
def plain(url: str) -> Iterator[redis.Redis]:
    with plain_client(url) as p:
        yield p


def test_closed_subscriber_raises(stream: meteor.Stream) -> None:
    sub = stream.subscriber()
    sub.close()
    sub.close()
    for use in (sub.poll, lambda: sub.seek(0), sub.skip_gap):
        with pytest.raises(meteor.MeteorError, match="closed"):
            use()
    assert list(sub) == []
    assert (sub.closed, "closed" in repr(sub)) == (True, True)


def test_closing_from_another_thread_ends_a_wait(stream: meteor.Stream, plain: redis.Redis) -> None:
    sub = stream.subscriber()

    def close(_: threading.Event) -> None:
        blocked(plain)
        sub.close()

    with background(close):
        start = time.monotonic()
        assert not sub.poll(timeout=20)
        assert time.monotonic() - start < 10
    eventually(lambda: plain.info("clients")["blocked_clients"] == 0)


def interrupted_poll(
    sub: meteor.Subscriber, plain: redis.Redis, timeout: float | None = 20
) -> None:
    """Poll, and interrupt the wait with Ctrl-C."""
    main = threading.get_ident()

    def interrupt(_: threading.Event) -> None:
        blocked(plain)
        signal.pthread_kill(main, signal.SIGINT)

    with background(interrupt), pytest.raises(KeyboardInterrupt):
        sub.poll(timeout)


def test_subscriber_continues_after_ctrl_c_in_a_waiting_poll(
    stream: meteor.Stream, plain: redis.Redis
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stream.subscriber() as sub:
            for i in range(3):
                interrupted_poll(sub, plain)
                fill(stream, 1)
                assert drain(sub) == [i]
    finally:
        signal.signal(signal.SIGINT, before)


def test_poll_without_a_limit_waits_for_records_until_ctrl_c(
    stream: meteor.Stream, plain: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_RECONNECT_S", 0.2)  # used only while the server is away
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stream.subscriber() as sub:
            interrupted_poll(sub, plain, timeout=None)

            def publish(stop: threading.Event) -> None:
                blocked(plain)
                fill(stream, 1)

            with background(publish):
                assert check_values(sub.poll(None)) == [0]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("group", [None, "billing"])
def test_closing_in_another_thread_ends_a_poll_without_a_limit(
    stream: meteor.Stream, plain: redis.Redis, group: str | None
) -> None:
    sub = stream.subscriber(group=group)

    def close(stop: threading.Event) -> None:
        blocked(plain)
        sub.close()

    with background(close):
        assert not sub.poll(None)


@pytest.mark.parametrize("place", ["before the reply is read", "after everything is read"])
def test_ctrl_c_during_a_read_neither_loses_nor_mixes_up_records(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    end = fill(stream, *[40] * 3)
    read, fetch = Connection.read, LogReader.fetch

    def interrupted_read(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(Connection, "read", read)
        raise KeyboardInterrupt

    def interrupted_fetch(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(LogReader, "fetch", fetch)
        fetch(*args, **options)
        raise KeyboardInterrupt

    with stream.subscriber(initial_offset="earliest") as sub:
        if place == "after everything is read":
            monkeypatch.setattr(LogReader, "fetch", interrupted_fetch)
        else:
            monkeypatch.setattr(Connection, "read", interrupted_read)
        with pytest.raises(KeyboardInterrupt):
            sub.poll()
        assert drain(sub) == list(range(end))


def test_ctrl_c_in_a_command_does_not_mix_up_later_replies(
    client: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b"]
    for name in names:
        client.stream(name, create=True)
    read = Connection.read

    def interrupted_read(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(Connection, "read", read)
        raise KeyboardInterrupt

    for use in (client.streams, lambda: client.stream("a", create=True).describe()):
        monkeypatch.setattr(Connection, "read", interrupted_read)
        with pytest.raises(KeyboardInterrupt):
            use()
        assert client.streams() == names


def test_poll_waits_for_a_server_that_is_killed_and_restarted(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with meteor.connect(server.url) as m:
        stream = m.stream("s", create=True)
        fill(stream, 3)

        def restart(_: threading.Event) -> None:
            blocked(server.client())
            server.kill()
            server.restart()
            fill(stream, 2)

        with stream.subscriber(initial_offset="earliest") as sub:
            assert drain(sub) == [0, 1, 2]
            with background(restart):
                assert check_values(sub.poll(timeout=20)) == [3, 4]


def test_unreachable_server_raises_at_the_timeout(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m, m.stream("s", create=True).subscriber() as sub:
        server.kill()
        start = time.monotonic()
        with pytest.raises(meteor.ConnectionFailed, match=server.url):
            sub.poll(timeout=0.5)
        assert 0.4 < time.monotonic() - start < 5


def test_loop_over_an_idle_stream_waits_the_full_time_for_an_unreachable_server(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a short restart ends a loop that has already been idle for some time."""
    clock = {"now": 0.0, "down_from": 0.0, "down_until": 0.0}
    monkeypatch.setattr("meteor_py.subscribe.fetcher.time.monotonic", lambda: clock["now"])

    def pass_time(seconds: float) -> None:
        clock["now"] += seconds

    monkeypatch.setattr("meteor_py.subscribe.fetcher.time.sleep", pass_time)
    fetch = LogReader.fetch

    def fetch_from_afar(log: LogReader, offset: int, block_s: float = 0.0, **options: Any) -> Any:
        if clock["down_from"] <= clock["now"] < clock["down_until"]:
            pass_time(0.1)
            raise meteor.ConnectionFailed("The server is down.")
        if clock["now"] > clock["down_until"]:
            return fetch(log, offset, 0.0, **options)
        pass_time(block_s)
        return []

    monkeypatch.setattr(LogReader, "fetch", fetch_from_afar)
    fill(stream, 1)
    for idle_s in range(40):
        clock.update(now=0.0, down_from=float(idle_s), down_until=idle_s + 25.0)
        with stream.subscriber(initial_offset="earliest") as sub:
            assert next(iter(sub)).offset == 0
    clock.update(now=0.0, down_from=0.0, down_until=100.0)
    with stream.subscriber() as sub, pytest.raises(meteor.ConnectionFailed):
        next(iter(sub))
    assert 29 < clock["now"] < 40


def test_waiting_poll_raises_if_the_stream_is_deleted(
    stream: meteor.Stream, plain: redis.Redis
) -> None:
    def delete(_: threading.Event) -> None:
        blocked(plain)
        stream.delete()

    with stream.subscriber() as sub, background(delete):
        with pytest.raises(meteor.StreamNotFound, match="'s' no longer exists"):
            sub.poll(timeout=20)
        with pytest.raises(meteor.StreamNotFound):
            sub.poll(timeout=0)


@pytest.mark.parametrize("read", [0, 5])
def test_recreated_stream_is_not_mistaken_for_the_deleted_stream(
    client: meteor.Client, stream: meteor.Stream, read: int
) -> None:
    if read:
        fill(stream, read)
    with stream.subscriber() as sub:
        stream.delete()
        again = client.stream("s", create=True)
        fill(again, 10)
        for _ in range(2):
            with pytest.raises(meteor.LogTruncated, match="deleted and recreated") as caught:
                sub.poll()
            assert (caught.value.first, caught.value.last) == (0, read - 1)
        sub.skip_gap()
        assert drain(sub) == list(range(10))


def test_slow_reader_blocks_neither_publishers_nor_other_readers(client: meteor.Client) -> None:
    stream = client.stream("busy", capacity=1000)
    with stream.subscriber() as slow, stream.subscriber() as fast, stream.publisher() as pub:
        for i in range(50):
            first = pub.publish_many([value(i * 100 + j) for j in range(100)]).result()
            assert drain(fast) == list(range(first, first + 100))
        with pytest.raises(meteor.RecordsLost) as caught:
            slow.poll()
        assert (caught.value.first, caught.value.last) == (0, 3999)


def test_reading_never_changes_a_stream(stream: meteor.Stream, plain: redis.Redis) -> None:
    fill(stream, 5, 50, 1)
    before = everything(plain)
    with stream.subscriber(initial_offset="earliest") as sub:
        drain(sub, max_records=7)
        sub.seek(3)
        list(islice(sub, 5))
        sub.seek(datetime.now(UTC))
        sub.poll(timeout=0.05)
        _ = sub.lag, sub.position
    list(stream.read())
    stream.offset_at(datetime.now(UTC))
    stream.describe()
    stream.client.streams()
    assert everything(plain) == before


def test_subscriber_continues_independently_in_a_forked_child(stream: meteor.Stream) -> None:
    fill(stream, 10)
    with stream.subscriber(initial_offset="earliest") as sub:
        sub.poll(max_records=3)
        child = fork()
        if child == 0:
            try:
                os._exit(0 if drain(sub) == list(range(3, 10)) else 1)
            finally:
                os._exit(2)
        assert exit_code(child) == 0
        fill(stream, 1)
        assert drain(sub) == list(range(3, 11))


@pytest.mark.single_server("a proxy in front of it")
def test_records_arrive_once_and_in_order_over_a_faulty_connection(
    url: str, rng: random.Random
) -> None:
    with meteor.connect(url) as m:
        end = fill(
            m.stream("s", capacity=100_000), *(rng.choice([1, 3, 40, 400]) for _ in range(60))
        )
    port = int(url.rpartition(":")[2].partition("/")[0])
    with Proxy(HOST, port) as proxy, meteor.connect(proxy.url, timeout=1) as m:
        stream = m.stream("s", create=False)
        troubles: list[Callable[[], None]] = [
            lambda: proxy.cut_mid_reply(rng.randrange(20_000)),
            lambda: proxy.cut_after_request(rng.randrange(1, 4)),
            lambda: proxy.cut_before_request(rng.randrange(1, 4)),
            lambda: proxy.chunk(rng.randrange(1, 2000)),
            proxy.cut,
        ]
        for trouble in troubles:
            proxy.heal()
            with stream.subscriber(initial_offset="earliest") as sub:
                got: list[int] = []
                while len(got) < end:
                    trouble()
                    got += check_values(sub.poll(timeout=10, max_records=rng.choice([1, 500])))
                assert got == list(range(end))


@pytest.mark.single_server("a proxy in front of it")
def test_missing_reply_times_out_and_is_requested_again(url: str) -> None:
    with meteor.connect(url) as m:
        fill(m.stream("s", create=True), 3)
    port = int(url.rpartition(":")[2].partition("/")[0])
    with (
        Proxy(HOST, port) as proxy,
        meteor.connect(proxy.url, timeout=0.5) as m,
        m.stream("s", create=True).subscriber(initial_offset="earliest") as sub,
    ):
        proxy.stall("replies")
        with pytest.raises(meteor.ConnectionFailed):
            sub.poll(timeout=0)
        proxy.resume()
        assert drain(sub) == [0, 1, 2]
