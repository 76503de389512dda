"""Peer groups: time to a new leader, requests and replies, and the cost of heartbeats."""

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.common import Bench, Row, cheaper, connected, plain_client, within

#: Seconds of silence after which a leader is replaced, here and in etcd.
_TTL_S = 3
_STUCK_S = 60.0
_CONTEXT = multiprocessing.get_context("spawn")


def run(bench: Bench) -> list[Row]:
    return [fail_over(bench), asking(bench), *heartbeats(bench)]


# -- failover ----------------------------------------------------------------------------------


def fail_over(bench: Bench) -> Row:
    """Measure from the SIGKILL of a leader until another member knows that it leads."""
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
    """Returns the seconds from the death of the leading process to the election of the other."""
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
    """Become leader in an etcd election, whose leases are renewed as often as ours."""
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


# -- requests ----------------------------------------------------------------------------------


def asking(bench: Bench) -> Row:
    """Measure sequential requests to a member in another process."""
    bench.step("asking")
    bench.clear()
    told = _CONTEXT.Queue()
    process = _CONTEXT.Process(target=answer, args=(bench.url, told), daemon=True)
    process.start()
    try:
        with connected(bench.url) as client, client.peer_group("bench") as group:
            assert told.get(timeout=_STUCK_S) == "ready"
            member = group.member("answerer")
            for _ in range(100):
                member.ask("echo", "x", timeout=_STUCK_S).result()
            count, start = bench.pick(3_000, 500), time.perf_counter()
            for _ in range(count):
                member.ask("echo", "x", timeout=_STUCK_S).result()
            rate = count / (time.perf_counter() - start)
    finally:
        process.kill()
        process.join()
    return Row("peers: request and reply, one at a time", "/s", rate)


def answer(url: str, told: Any) -> None:
    with (
        connected(url) as client,
        client.peer_group("bench") as group,
        group.join("answerer") as me,
    ):
        me.on("echo")(lambda message: message.body)
        told.put("ready")
        time.sleep(_STUCK_S)


# -- heartbeats --------------------------------------------------------------------------------


def heartbeats(bench: Bench) -> list[Row]:
    """Measure the server's cost of a heartbeat, in groups of different sizes."""
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
            connection = client._connector.open_connection()
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
