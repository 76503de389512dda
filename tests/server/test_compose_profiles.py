"""The `cluster` and `sentinel` profiles in docker-compose.yml work on real servers, without Docker.

Each command runs as written, except that it uses this machine's programs and ports, and a temporary
directory instead of /data.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from meteor_py.testing import Server
from tests.conftest import require_redis
from tests.support.servers import HOST, binaries, free_port, plain_client
from tests.support.waiting import eventually

COMPOSE = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
NODES = [f"cluster-{n}" for n in range(1, 7)]
SERVERS = [f"sentinel-server-{n}" for n in range(1, 4)]
SENTINELS = [f"sentinel-{n}" for n in range(1, 4)]
#: Difference between a node's cluster bus port and its client port.
BUS = 10_000


def shell_line(service: str) -> str:
    """Return the line that the service's shell runs, with its variables replaced."""
    shell, option, line = SERVICES[service]["command"]
    assert (shell, option) == ("sh", "-c")
    line = line.replace("$$", "$")
    for name, value in SERVICES[service].get("environment", {}).items():
        line = line.replace(f"${name}", value)
    assert "$" not in line
    return str(line)


class Place:
    """Replaces the containers' ports and programs with this machine's."""

    def __init__(self, kind: str, services: list[str]) -> None:
        self._program = binaries()[kind]
        self.ports = {
            SERVICES[service]["environment"]["PORT"]: free_port_with_bus() for service in services
        }

    def here(self, line: str) -> str:
        line = re.sub(r"\b(7\d{3}|26\d{3})\b", lambda found: str(self.ports[found[1]]), line)
        line = line.replace("redis-sentinel sentinel.conf", "redis-server sentinel.conf --sentinel")
        line = line.replace("redis-server", str(self._program))
        return f"{line} --bind {HOST}" if "exec" in line else line

    def server(self, service: str) -> ComposeServer:
        port = self.ports[SERVICES[service]["environment"]["PORT"]]
        return ComposeServer(self.here(shell_line(service)), port)


class ComposeServer(Server):
    """A server started by a service's shell line."""

    def __init__(self, line: str, port: int) -> None:
        super().__init__(program="/bin/sh", port=port)
        self._shell_line = line

    def _options(self) -> list[str]:
        return ["-c", self._shell_line]

    def ask(self, *command: str) -> Any:
        with plain_client(self.url) as client:
            return client.execute_command(*command)


def free_port_with_bus() -> int:
    while True:
        port = free_port()
        with socket.socket() as probe:
            if port + BUS < 32_000 and probe.connect_ex((HOST, port + BUS)) != 0:
                return port


@pytest.fixture(params=["valkey", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        require_redis()
    if not shutil.which("redis-cli"):
        require_redis()  # redis-cli is in the same package
    return str(request.param)


@pytest.fixture
def cluster(kind: str) -> Iterator[dict[str, ComposeServer]]:
    """The nodes, after `cluster-create` has assigned the slots."""
    place = Place(kind, NODES)
    with ExitStack() as stack:
        nodes = {name: stack.enter_context(place.server(name)) for name in NODES}
        create = place.here(shell_line("cluster-create"))
        for _ in range(2):  # the service runs again at each `docker compose up`
            subprocess.run(["sh", "-c", create], check=True, timeout=60, stdout=subprocess.DEVNULL)
        yield nodes


@pytest.fixture
def sentinel(kind: str) -> Iterator[dict[str, ComposeServer]]:
    place = Place(kind, SERVERS + SENTINELS)
    with ExitStack() as stack:
        yield {name: stack.enter_context(place.server(name)) for name in SERVERS + SENTINELS}


def test_cluster_has_three_primaries_with_a_replica_each(
    cluster: dict[str, ComposeServer],
) -> None:
    def places() -> list[tuple[bytes, int]]:
        rows = cluster["cluster-1"].ask("CLUSTER", "SLOTS")
        return [(host, port) for row in rows for host, port, *_ in row[2:]]

    # Redis lists a replica only after hearing from it.
    eventually(lambda: len(places()) == len(NODES), 20, "a primary has no replica")
    assert {(HOST.encode(), server.port) for server in cluster.values()} == set(places())
    for server in cluster.values():
        assert server.ask("CONFIG", "GET", "appendonly")[1] == b"yes"
        assert server.ask("CONFIG", "GET", "maxmemory-policy")[1] == b"noeviction"


def test_sentinels_find_each_other_and_the_replicas(sentinel: dict[str, ComposeServer]) -> None:
    def state() -> dict[bytes, bytes]:
        reply = sentinel["sentinel-3"].ask("SENTINEL", "MASTER", "mymaster")
        return dict(zip(reply[::2], reply[1::2], strict=True))

    eventually(
        lambda: (state()[b"num-slaves"], state()[b"num-other-sentinels"]) == (b"2", b"2"), 20
    )
    assert int(state()[b"port"]) == sentinel["sentinel-server-1"].port
    assert state()[b"quorum"] == b"2"
    replicas = sentinel["sentinel-1"].ask("SENTINEL", "REPLICAS", "mymaster")
    found = [dict(zip(row[::2], row[1::2], strict=True)) for row in replicas]
    assert {int(row[b"port"]) for row in found} == {sentinel[name].port for name in SERVERS[1:]}


def test_restarted_sentinel_keeps_its_identity(
    sentinel: dict[str, ComposeServer],
) -> None:
    one = sentinel["sentinel-1"]
    identity = one.ask("SENTINEL", "MYID")
    one.restart()
    assert one.ask("SENTINEL", "MYID") == identity


def test_primary_without_replicas_refuses_writes(
    sentinel: dict[str, ComposeServer],
) -> None:
    primary = sentinel["sentinel-server-1"]
    eventually(lambda: primary.info("replication")["connected_slaves"] == 2, 20)
    eventually(lambda: accepts_writes(primary), 10)
    for name in SERVERS[1:]:
        sentinel[name].kill()
    eventually(lambda: not accepts_writes(primary), 10)


def accepts_writes(server: ComposeServer) -> bool:
    try:
        return bool(server.ask("SET", "key", "value"))
    except redis.ResponseError:
        return False


def test_health_checks_fail_for_a_dead_server(sentinel: dict[str, ComposeServer]) -> None:
    for name in ("sentinel-server-2", "sentinel-2"):
        how, line = SERVICES[name]["healthcheck"]["test"]
        assert how == "CMD-SHELL"
        here = line.replace("$$PORT", str(sentinel[name].port))
        assert subprocess.run(["sh", "-c", here], capture_output=True).returncode == 0
        sentinel[name].kill()
        assert subprocess.run(["sh", "-c", here], capture_output=True).returncode != 0


@pytest.mark.parametrize(
    ("profile", "names"), [("cluster", NODES), ("sentinel", SERVERS + SENTINELS)]
)
def test_every_server_in_a_profile_has_a_published_port_and_its_own_volume(
    profile: str, names: list[str]
) -> None:
    network = f"{profile}-network"
    published: list[str] = []
    for entry in SERVICES[network]["ports"]:
        host, outside, inside = entry.split(":")
        assert host == "127.0.0.1"
        assert outside == inside, "the published port is not the announced one"
        first, last = map(int, inside.split("-"))
        published += [str(port) for port in range(first, last + 1)]
    assert sorted(published) == sorted(SERVICES[name]["environment"]["PORT"] for name in names)
    volumes = [SERVICES[name]["volumes"] for name in names]
    assert [[f"{name}-data:/data"] for name in names] == volumes
    for name in (*names, network):
        assert SERVICES[name]["profiles"] == [profile]
    for name in names:
        assert SERVICES[name]["network_mode"] == f"service:{network}"
        assert SERVICES[name]["depends_on"] == [network]
        assert f"{name}-data" in COMPOSE["volumes"]


def test_cluster_create_waits_until_all_nodes_are_healthy() -> None:
    waits = SERVICES["cluster-create"]["depends_on"]
    assert waits == {name: {"condition": "service_healthy"} for name in NODES}
