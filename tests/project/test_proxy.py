"""Each fault of the test proxy works as documented, with a real server and a plain client."""

import socket
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import redis

from tests.conftest import ServerFactory
from tests.support.proxy import Proxy
from tests.support.resp import Splitter
from tests.support.servers import HOST, Replica, Server, plain_client
from tests.support.waiting import eventually


@pytest.fixture
def direct(server: Server, url: str) -> Iterator[redis.Redis]:
    """A client that bypasses the proxy and sees the server's real state."""
    with plain_client(url) as client:
        yield client


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(HOST, server.port) as running:
        yield running


@pytest.fixture
def client(proxy: Proxy, direct: redis.Redis) -> Iterator[redis.Redis]:
    """A client with an open connection through the proxy."""
    with plain_client(proxy.url, socket_timeout=0.3, single_connection_client=True) as through:
        through.ping()
        yield through


def read_to_the_end(raw: socket.socket) -> bytes:
    received = b""
    while data := raw.recv(100):
        received += data
    return received


def test_everything_passes_unchanged_without_faults(proxy: Proxy, client: redis.Redis) -> None:
    value = bytes(range(256)) * 20_000
    client.set("big", value)
    assert client.get("big") == value
    assert proxy.counters.connections == 1
    assert proxy.counters.cuts == 0
    assert proxy.counters.requests == 3
    assert proxy.counters.request_bytes > len(value)
    assert proxy.counters.reply_bytes > len(value)


def test_cut_ends_open_connections_and_allows_new_ones(proxy: Proxy, client: redis.Redis) -> None:
    proxy.cut()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert client.ping()
    assert proxy.counters.cuts == 1
    assert proxy.counters.connections == 2


def test_request_with_a_lost_reply_fails_for_the_client_and_takes_effect(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.cut_after_request()
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert direct.get("n") == b"1"
    assert client.incr("n") == 2
    assert proxy.counters.cuts == 1


def test_lost_request_fails_for_the_client_and_has_no_effect(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.cut_before_request()
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert direct.get("n") is None
    assert client.incr("n") == 1
    assert proxy.counters.cuts == 1


def test_reply_to_the_nth_request_is_lost(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.cut_after_request(3)
    assert client.incr("n") == 1
    assert client.incr("n") == 2
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert direct.get("n") == b"3"


def test_only_matching_requests_are_counted(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.cut_after_request(2, match=b"INCR")
    client.set("other", 1)
    assert client.incr("n") == 1
    client.set("other", 2)
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert direct.mget("n", "other") == [b"2", b"2"]


@pytest.mark.parametrize(("cut", "done"), [("after", 3), ("before", 2)])
def test_cut_in_a_pipeline_falls_between_two_requests(
    proxy: Proxy, server: Server, direct: redis.Redis, cut: str, done: int
) -> None:
    (proxy.cut_after_request if cut == "after" else proxy.cut_before_request)(3)
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw:
        raw.sendall(b"INCR n\r\n" * 5)
        assert read_to_the_end(raw) == b":1\r\n:2\r\n"
    assert direct.get("n") == str(done).encode()


def test_reply_larger_than_the_buffers_is_dropped_whole(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    direct.set("big", b"x" * 3_000_000)
    passed = proxy.counters.reply_bytes
    proxy.cut_after_request()
    with pytest.raises(redis.ConnectionError):
        client.get("big")
    assert proxy.counters.reply_bytes == passed


def test_request_sent_in_pieces_is_counted_once(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.cut_after_request(2)
    client.set("a", b"x" * 3_000_000)
    with pytest.raises(redis.ConnectionError):
        client.set("b", b"y" * 3_000_000)
    assert direct.strlen("b") == 3_000_000


def test_cut_mid_reply_passes_exactly_the_given_number_of_bytes(
    proxy: Proxy, direct: redis.Redis
) -> None:
    direct.set("key", "value")
    proxy.cut_mid_reply(after_bytes=6)
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw:
        raw.sendall(b"GET key\r\n")
        assert read_to_the_end(raw) == b"$5\r\nva"
    assert proxy.counters.cuts == 1


def test_stalled_requests_do_not_reach_the_server_until_resumed(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis
) -> None:
    proxy.stall("requests")
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    assert direct.get("n") is None
    proxy.resume("requests")
    eventually(lambda: direct.get("n") == b"1")
    assert proxy.counters.cuts == 0


def test_requests_take_effect_while_their_replies_are_stalled(
    proxy: Proxy, direct: redis.Redis
) -> None:
    proxy.stall("replies")
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw:
        raw.sendall(b"INCR n\r\n")
        eventually(lambda: direct.get("n") == b"1")
        assert proxy.counters.reply_bytes == 0
        proxy.resume("replies")
        assert raw.recv(10) == b":1\r\n"


def test_new_connection_during_a_stall_is_accepted_and_silent(proxy: Proxy) -> None:
    proxy.stall()
    with socket.create_connection((HOST, proxy.port), timeout=0.2) as raw:
        raw.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            raw.recv(10)
        raw.settimeout(5)
        proxy.resume()
        assert raw.recv(10) == b"+PONG\r\n"


def test_stalled_direction_is_not_read_and_blocks_the_sender(
    proxy: Proxy, direct: redis.Redis
) -> None:
    proxy.stall("requests")
    address = (HOST, proxy.port)
    with socket.create_connection(address, timeout=0.2) as raw, pytest.raises(TimeoutError):
        raw.sendall(b"x" * 50_000_000)
    assert proxy.counters.request_bytes == 0


def test_refuse_resets_new_connections_and_keeps_open_ones(
    proxy: Proxy, client: redis.Redis
) -> None:
    proxy.refuse()
    # A plain socket: redis-py's pool reconnects if the reset arrives early.
    late = (HOST, proxy.port)
    with pytest.raises(ConnectionResetError), socket.create_connection(late, 10) as raw:
        raw.recv(1)
    assert client.ping()
    assert proxy.counters.refused == 1
    proxy.accept()
    with plain_client(proxy.url) as later:
        assert later.ping()


def test_client_gets_a_connection_error_while_the_server_is_dead(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with Proxy(HOST, server.port) as proxy, plain_client(proxy.url) as client:
        assert client.ping()
        server.kill()
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.ping()
        server.restart()
        assert client.ping()


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_delay_lasts_at_least_as_long_as_requested(
    proxy: Proxy, client: redis.Redis, direction: Any
) -> None:
    proxy.delay(0.1, direction)
    begin = time.monotonic()
    assert client.ping()
    assert time.monotonic() - begin >= 0.1


def test_delayed_bytes_keep_their_order_when_the_delay_shrinks(
    proxy: Proxy, direct: redis.Redis
) -> None:
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw:
        proxy.delay(0.2, "requests")
        raw.sendall(b"RPUSH list a\r\n")
        eventually(lambda: proxy.counters.requests == 1)
        proxy.delay(0, "requests")
        raw.sendall(b"RPUSH list b\r\n")
        eventually(lambda: direct.llen("list") == 2)
    assert direct.lrange("list", 0, -1) == [b"a", b"b"]


def test_chunked_bytes_arrive_in_small_pieces_and_complete(
    proxy: Proxy, direct: redis.Redis
) -> None:
    direct.set("key", b"0123456789")
    proxy.chunk(1, pause_s=0.005)
    pieces: list[bytes] = []
    with socket.create_connection((HOST, proxy.port), timeout=5) as raw:
        raw.sendall(b"GET key\r\n")
        while len(b"".join(pieces)) < 17:
            pieces.append(raw.recv(100))
    assert b"".join(pieces) == b"$10\r\n0123456789\r\n"
    # On a loaded machine some pieces merge in the receiver's buffer, but never all.
    assert len(pieces) >= 4


def test_client_reads_one_byte_chunks_correctly(proxy: Proxy, client: redis.Redis) -> None:
    proxy.chunk(1)
    client.set("key", bytes(range(256)))
    assert client.get("key") == bytes(range(256))


def test_chaos_loses_replies_but_requests_still_take_effect(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis, rng: Random
) -> None:
    proxy.chaos(rng, 0.3)
    errors = 0
    for _ in range(200):
        try:
            client.incr("n")
        except redis.ConnectionError:
            errors += 1
    assert direct.get("n") == b"200"
    assert errors == proxy.counters.cuts
    assert 20 <= errors <= 100


def test_every_successful_call_takes_effect_under_all_kinds_of_chaos(
    proxy: Proxy, client: redis.Redis, direct: redis.Redis, rng: Random
) -> None:
    proxy.chaos(rng, 0.2, ["lost_reply", "torn_reply", "late_reply", "lost_request"])
    done = 0
    for _ in range(100):
        try:
            client.incr("n")
        except redis.ConnectionError:
            continue
        done += 1
    proxy.heal()
    assert client.ping()
    effects = int(direct.get("n") or 0)
    assert done <= effects <= 100
    assert proxy.counters.cuts > 0


def test_same_seed_gives_the_same_faults(server: Server, direct: redis.Redis, rng: Random) -> None:
    seed = rng.random()

    def outcomes() -> list[bool]:
        results = []
        with Proxy(HOST, server.port) as proxy, plain_client(proxy.url) as client:
            proxy.chaos(Random(seed), 0.3)
            for _ in range(50):
                try:
                    results.append(bool(client.incr("n")))
                except redis.ConnectionError:
                    results.append(False)
        return results

    assert outcomes() == outcomes()


def test_heal_ends_all_faults(proxy: Proxy, client: redis.Redis, rng: Random) -> None:
    proxy.cut_before_request(2)
    proxy.cut_mid_reply(50)
    proxy.chaos(rng, 1.0, ["lost_request"])
    proxy.delay(5)
    proxy.stall()
    proxy.refuse()
    proxy.heal()
    for _ in range(30):
        assert client.ping()
    with plain_client(proxy.url) as late:
        assert late.ping()


def test_retarget_connects_new_clients_to_another_server(
    proxy: Proxy, client: redis.Redis, private_server: ServerFactory
) -> None:
    other = private_server()
    other.client().set("here", "other")
    proxy.retarget(HOST, other.port)
    assert client.get("here") is None
    proxy.cut()
    with plain_client(proxy.url) as late:
        assert late.get("here") == b"other"


def test_stalled_replication_link_makes_the_replica_lag_and_loses_acknowledged_writes(
    private_server: ServerFactory,
) -> None:
    """Simulates an asynchronous failover.

    Stopping the replica would not suffice, because the writes would wait in its socket buffer.
    """
    master = private_server()
    with Proxy(HOST, master.port) as link, Replica(master, port=link.port) as replica:
        client = master.client()
        client.incr("n")
        replica.wait_in_sync()
        link.stall()
        for _ in range(99):
            client.incr("n")
        assert client.get("n") == b"100"
        assert client.wait(1, 100) == 0
        master.kill()
        replica.promote()
        assert replica.client().get("n") == b"1"


def test_replication_link_catches_up_after_stalls_and_cuts(
    private_server: ServerFactory,
) -> None:
    master = private_server()
    with Proxy(HOST, master.port) as link, Replica(master, port=link.port) as replica:
        replica.wait_in_sync()
        client = master.client()
        link.stall("replies")
        client.set("big", b"x" * 2_000_000)
        link.resume("replies")
        replica.wait_in_sync()
        link.chunk(1000)
        link.cut()
        client.set("more", b"PSYNC")
        replica.wait_in_sync()
        assert replica.client().mget("more", "big") == [b"PSYNC", b"x" * 2_000_000]
        assert link.counters.connections == 2


def test_close_can_be_repeated_and_later_calls_raise(server: Server) -> None:
    proxy = Proxy(HOST, server.port)
    proxy.close()
    proxy.close()
    with pytest.raises(RuntimeError, match="closed"):
        proxy.cut()


@pytest.mark.parametrize(
    ("message", "counted"),
    [
        (b"PING\r\n", 1),
        (b"+OK\r\n", 1),
        (b"-ERR no\r\n", 1),
        (b"$-1\r\n", 1),
        (b"$0\r\n\r\n", 1),
        (b"$6\r\n\r\n$1\r\n\r\n", 1),
        (b"*-1\r\n", 1),
        (b"*0\r\n", 1),
        (b"*2\r\n*1\r\n:1\r\n*2\r\n$1\r\na\r\n+b\r\n", 1),
        (b"%1\r\n+a\r\n*1\r\n:1\r\n", 1),
        (b"|1\r\n+ttl\r\n:1\r\n$1\r\na\r\n", 1),
        (b">2\r\n+message\r\n+x\r\n", 0),
        (b"\n", 0),
    ],
)
def test_message_ends_are_found_in_pieces_of_any_size(message: bytes, counted: int) -> None:
    stream = message * 3
    expected = [len(message) * (i + 1) for i in range(3)] if counted else []
    for size in range(1, len(stream) + 1):
        splitter = Splitter()
        found = []
        for begin in range(0, len(stream), size):
            found += [begin + end for end in splitter.feed(stream[begin : begin + size])]
        assert found == expected
