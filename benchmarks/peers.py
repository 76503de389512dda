"""Peer groups: time to a new leader, messages, and the cost of heartbeats."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.common import Bench, Row, cheaper, connected, plain_client, within
from meteor_py import Target

#: Seconds of silence after which a leader is replaced, here and in etcd.
_TTL_S = 3
_STUCK_S = 60.0
#: Number of messages to send before the benchmark checks how many have been handled.
_PORTION = 2_000
_CONTEXT = multiprocessing.get_context("spawn")


def run(bench: Bench) -> list[Row]:
    return [fail_over(bench), *messages(bench), *heartbeats(bench)]


# -- failover ----------------------------------------------------------------------------------


def fail_over(bench: Bench) -> Row:
    """Measure the time from a leader's SIGKILL until another member is notified that it leads."""
    rounds = bench.pick(7, 2)
    etcd = shutil.which("etcd")
    ours: list[float] = []
    theirs: list[float] = []
    with etcd_server(etcd) if etcd else ExitStack() as url:
        for _ in range(rounds):
            bench.step("failover, ours")
            bench.clear()
            ours.append(killed(lead, bench.url))
            if etcd:
                bench.step("failover, etcd")
                theirs.append(killed(lead_etcd, url))
    what = f"peers: new leader after a SIGKILL, ttl {_TTL_S} s, median"
    seconds = statistics.median(ours)
    if not theirs:
        return within(what, "s", seconds)
    return cheaper(what, "s", seconds, statistics.median(theirs), "etcd's election", 1.2)


def killed(lead_it: Any, url: Any) -> float:
    """Return the seconds from the death of the leading process to the election of the other."""
    first, second = (_CONTEXT.Queue() for _ in range(2))
    leader = _CONTEXT.Process(target=lead_it, args=(url, first), daemon=True)
    heir = _CONTEXT.Process(target=lead_it, args=(url, second), daemon=True)
    try:
        leader.start()
        assert first.get(timeout=_STUCK_S) == "waits"
        assert isinstance(first.get(timeout=_STUCK_S), float)
        heir.start()
        assert second.get(timeout=_STUCK_S) == "waits"
        time.sleep(_TTL_S / 2 + time.monotonic() % 1)  # a random moment between two heartbeats
        assert leader.pid is not None
        at = time.monotonic()
        os.kill(leader.pid, signal.SIGKILL)
        elected: float = second.get(timeout=_STUCK_S)
        return elected - at
    finally:
        for process in (leader, heir):
            process.kill()
            process.join()


def lead(url: str, told: Any) -> None:
    with connected(url) as client, client.peer_group("bench", ttl=_TTL_S) as group:
        me = group.join()
        told.put("waits")
        with me.leadership():
            told.put(time.monotonic())
            time.sleep(_STUCK_S)


def lead_etcd(url: str, told: Any) -> None:
    """Win an etcd election, with a lease that is renewed as often as ours."""
    import threading

    lease = etcd_call(url, "lease/grant", {"TTL": _TTL_S})["ID"]

    def renew() -> None:
        while True:
            time.sleep(_TTL_S / 3)
            etcd_call(url, "lease/keepalive", {"ID": lease})

    threading.Thread(target=renew, daemon=True).start()
    name = base64.b64encode(b"bench").decode()
    told.put("waits")
    etcd_call(url, "election/campaign", {"name": name, "lease": lease, "value": name})
    told.put(time.monotonic())
    time.sleep(_STUCK_S)


def etcd_call(url: str, what: str, fields: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/v3/{what}", json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=_STUCK_S) as answer:
        return json.loads(answer.readline())


@contextmanager
def etcd_server(program: str) -> Iterator[str]:
    ports = [free_port(), free_port()]
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [
                *(program, "--data-dir", folder, "--listen-client-urls", client),
                *("--advertise-client-urls", client, "--listen-peer-urls", peer),
                *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + _STUCK_S
            while True:
                try:
                    etcd_call(client, "lease/grant", {"TTL": 10})
                    break
                except OSError:
                    assert time.monotonic() < deadline, "etcd did not start"
                    time.sleep(0.1)
            yield client
        finally:
            server.terminate()
            server.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- messages ----------------------------------------------------------------------------------


def messages(bench: Bench) -> list[Row]:
    """Measure messages to a member in another process.

    The names and windows follow Atomix's three kinds of execution: one request at a time, 16
    requests at a time, and ASYNC messages, of which up to 256 are not yet stored. A request ends
    with its reply, an ASYNC message when it is handled.
    """
    bench.clear()
    told = _CONTEXT.Queue()
    process = _CONTEXT.Process(target=answer, args=(bench.url, told), daemon=True)
    process.start()
    try:
        with (
            connected(bench.url) as client,
            plain_client(bench.url) as plain,
            client.peer_group("bench") as group,
        ):
            assert told.get(timeout=_STUCK_S) == "ready"
            member = group.member("answerer")
            for _ in range(200):
                member.ask("echo", "x", timeout=_STUCK_S).result()
            return [
                *asking_one_at_a_time(bench, member),
                *asking_16_at_a_time(bench, member, plain),
                *telling(bench, member, plain),
            ]
    finally:
        process.kill()
        process.join()


def asking_one_at_a_time(bench: Bench, member: Target) -> list[Row]:
    bench.step("requests, one at a time")
    seconds: list[float] = []
    for _ in range(bench.pick(3_000, 500)):
        start = time.perf_counter()
        member.ask("echo", "x", timeout=_STUCK_S).result()
        seconds.append(time.perf_counter() - start)
    cuts = statistics.quantiles(seconds, n=100)
    return [
        Row("peers: request and reply, one at a time, p50", "us", cuts[49] * 1e6),
        Row("peers: request and reply, one at a time, p99", "us", cuts[98] * 1e6),
    ]


def asking_16_at_a_time(bench: Bench, member: Target, plain: Any) -> list[Row]:
    bench.step("requests, 16 at a time")
    count = bench.pick(10_000, 1_000)
    start, before = time.perf_counter(), used(plain)
    keep_pending(16, count, lambda: member.ask("echo", "x", timeout=_STUCK_S))
    rate, cost = count / (time.perf_counter() - start), (used(plain) - before) / count * 1e6
    what = "peers: requests and replies, 16 at a time"
    return [Row(what, "/s", rate), Row(f"{what}, server CPU", "us", cost)]


def telling(bench: Bench, member: Target, plain: Any) -> list[Row]:
    bench.step("messages without replies")
    count = bench.pick(30_000, 2_000)
    start, before = time.perf_counter(), used(plain)
    for sent in range(_PORTION, count + 1, _PORTION):
        keep_pending(256, _PORTION, lambda: member.tell("count", "x", timeout=_STUCK_S))
        # The sender may be faster than the receiver, whose inbox holds 10,000 messages.
        left = 0 if sent == count else 2 * _PORTION
        while member.ask("counted", timeout=_STUCK_S).result() < sent - left:
            time.sleep(0.002)
    rate, cost = count / (time.perf_counter() - start), (used(plain) - before) / count * 1e6
    what = "peers: messages until they are handled"
    return [Row(what, "/s", rate), Row(f"{what}, server CPU", "us", cost)]


def keep_pending(window: int, count: int, send: Callable[[], Future[Any]]) -> None:
    """Send messages, keeping up to ``window`` of them unfinished."""
    pending: deque[Future[Any]] = deque()
    for _ in range(count):
        if len(pending) >= window:
            pending.popleft().result()
        pending.append(send())
    while pending:
        pending.popleft().result()


def answer(url: str, told: Any) -> None:
    with (
        connected(url) as client,
        client.peer_group("bench") as group,
        group.join("answerer") as me,
    ):
        counted: list[None] = []
        me.on("echo")(lambda message: message.body)
        me.on("count")(lambda message: counted.append(None))
        me.on("counted")(lambda message: len(counted))
        told.put("ready")
        time.sleep(2 * _STUCK_S)


# -- heartbeats --------------------------------------------------------------------------------


def heartbeats(bench: Bench) -> list[Row]:
    """Measure the server's CPU time per heartbeat in groups of different sizes."""
    from meteor_py.peers.config import PeersConfig
    from meteor_py.peers.protocol import PeerProtocol
    from meteor_py.redis.scripts import PEERS_JOIN

    rows: list[Row] = []
    first: float | None = None
    for size in (10, 100, 1_000):
        bench.step(f"heartbeats of {size:,} members")
        bench.clear()
        with connected(bench.url) as client, plain_client(bench.url) as plain:
            protocol = PeerProtocol(client._connector, "bench")
            protocol.open(PeersConfig(ttl=600))
            for number in range(size):
                protocol.run(PEERS_JOIN, [f"m{number}", "s", "0", 0, b"null", "fail", size])
            connection = protocol.open_connection()
            count, before = bench.pick(5_000, 1_000), used(plain)
            for number in range(count):
                protocol.heartbeat(connection, "s", [f"m{number % size}"])
            cost = (used(plain) - before) / count * 1e6
            connection.close()
        what = f"peers: a heartbeat, server CPU, {size:,} members"
        if first is None:
            first = cost
            rows.append(within(what, "us", cost))
        else:
            rows.append(cheaper(what, "us", cost, first, "10 members"))
    return rows


def used(plain: Any) -> float:
    facts = plain.info("cpu")
    return float(facts["used_cpu_sys"] + facts["used_cpu_user"])
