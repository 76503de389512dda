"""The testing kit's clusters and sentinels work. These tests use only redis-py as a client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from meteor_py.errors import ServerStartFailed
from meteor_py.testing import Cluster, Node, Sentinels, Server, eventually
from tests.conftest import require_redis
from tests.project.test_testing_kit import is_gone, run_pytest
from tests.support.servers import binaries

NAME = "orders"
KEYS = 250
SLOT = Cluster.slot(NAME)


@pytest.fixture(scope="module", params=["valkey", "redis"])
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "redis":
        require_redis()
    return binaries()[request.param]


@pytest.fixture(scope="module")
def shared_cluster(program: Path) -> Iterator[Cluster]:
    with Cluster(replicas=1, program=program) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """A cluster with KEYS keys in the slot for NAME."""
    shared_cluster.repair()
    shared_cluster.flush()
    with shared_cluster.owner(NAME).client() as client:
        for number in range(KEYS):
            client.set(f"{{{NAME}}}:{number}", number)
    return shared_cluster


def values(node: Node) -> list[int]:
    """Return the values of the slot's keys that a node holds."""
    with node.client() as client:
        keys = client.execute_command("CLUSTER", "GETKEYSINSLOT", SLOT, KEYS)
        return sorted(int(client.get(key)) for key in keys)


def answer(node: Node, number: int) -> str:
    """Return the error with which a node replies to GET for one of the slot's keys, or "OK"."""
    with node.client() as client:
        try:
            client.get(f"{{{NAME}}}:{number}")
        except redis.ResponseError as error:
            return type(error).__name__
    return "OK"


# Slots


def test_slots_are_divided_among_the_primaries_and_each_has_a_replica(cluster: Cluster) -> None:
    counts = [len(node.own_slots()) for node in cluster.primaries]
    assert sum(counts) == 16384
    assert max(counts) - min(counts) <= 1
    for primary in cluster.primaries:
        (replica,) = cluster.replicas_of(primary)
        assert replica.info("replication")["master_port"] == primary.port


def test_cluster_address_contains_nodes_that_redis_py_can_use(cluster: Cluster) -> None:
    assert cluster.url.startswith("redis+cluster://127.0.0.1:")
    address = cluster.url.removeprefix("redis+cluster://").split(",")[0]
    with redis.RedisCluster.from_url(f"redis://{address}") as client:
        assert int(client.get(f"{{{NAME}}}:17")) == 17


def test_moving_a_slot_moves_its_keys(cluster: Cluster) -> None:
    source = cluster.owner(SLOT)
    target = cluster.others(source)[0]
    steps: list[int] = []
    cluster.move_slot(SLOT, target, keys_per_step=100, on_step=lambda: steps.append(1))
    assert cluster.owner(NAME) is target
    assert values(target) == list(range(KEYS))
    assert answer(source, 0) == "MovedError"
    assert len(steps) == 1 + 3
    cluster.move_slot(SLOT, target)  # the target already has the slot
    cluster.wait_until_stable()


def test_abandoned_move_can_be_finished(cluster: Cluster) -> None:
    source = cluster.owner(SLOT)
    target = cluster.others(source)[0]
    move = cluster.begin_move(SLOT, target)
    assert move.migrate(keys=60) == 60
    assert cluster.owner(SLOT) is source
    replies = [answer(source, number) for number in range(KEYS)]
    assert replies.count("AskError") == 60
    assert replies.count("OK") == KEYS - 60
    move.finish()
    assert cluster.owner(SLOT) is target
    assert values(target) == list(range(KEYS))


def test_repair_finishes_an_abandoned_move(cluster: Cluster) -> None:
    source = cluster.owner(SLOT)
    target = cluster.others(source)[0]
    cluster.begin_move(SLOT, target).migrate(keys=60)
    cluster.repair()
    assert cluster.owner(SLOT) is target
    assert values(target) == list(range(KEYS))


def test_move_can_be_finished_after_its_source_has_failed_over(cluster: Cluster) -> None:
    source = cluster.owner(SLOT)
    target = cluster.others(source)[0]
    move = cluster.begin_move(SLOT, target)
    move.migrate(keys=60)
    promoted = cluster.failover(source)
    move.finish()
    assert values(promoted) == []
    assert values(target) == list(range(KEYS))


def test_valkey_moves_slots_atomically_and_redis_refuses(cluster: Cluster, program: Path) -> None:
    source = cluster.owner(SLOT)
    target = cluster.others(source)[0]
    if program.name == "redis-server":
        with pytest.raises(redis.ResponseError, match=r"(?i)unknown subcommand"):
            cluster.move_slot(SLOT, target, atomic=True)
        return
    cluster.move_slots([SLOT, SLOT + 1], target, atomic=True)
    assert {SLOT, SLOT + 1} <= target.own_slots()
    assert values(target) == list(range(KEYS))


# Nodes


def test_a_planned_failover_loses_nothing(cluster: Cluster) -> None:
    old = cluster.owner(SLOT)
    new = cluster.failover(old)
    assert new is not old
    assert cluster.owner(SLOT) is new
    assert values(new) == list(range(KEYS))
    cluster.wait_until_stable()
    assert cluster.replicas_of(new) == [old]


def test_a_replica_replaces_a_killed_primary(cluster: Cluster) -> None:
    old = cluster.owner(SLOT)
    (replica,) = cluster.replicas_of(old)
    eventually(lambda: values_of_replica(replica) == KEYS)
    old.kill()
    assert cluster.wait_for_failover(old) is replica
    assert values(replica) == list(range(KEYS))
    with pytest.raises(AssertionError, match="is not running"):
        cluster.wait_until_stable(0.1)
    old.restart()
    cluster.wait_until_stable()
    assert cluster.replicas_of(replica) == [old]


def values_of_replica(replica: Node) -> int:
    with replica.client() as client:
        return int(client.dbsize())


def test_removed_node_leaves_its_slots_to_other_nodes(cluster: Cluster) -> None:
    node = cluster.add_node()
    assert node not in cluster.primaries
    cluster.move_slots([SLOT, 0, 1], node)
    assert cluster.owner(SLOT) is node
    pid, directory = node.pid, node.directory
    cluster.remove_node(node)
    assert is_gone(pid)
    assert not directory.exists()
    assert values(cluster.owner(SLOT)) == list(range(KEYS))
    assert sum(len(each.own_slots()) for each in cluster.primaries) == 16384


def test_replica_can_join_and_leave(cluster: Cluster) -> None:
    primary = cluster.owner(SLOT)
    replica = cluster.add_node(replica_of=primary)
    assert replica in cluster.replicas_of(primary)
    cluster.remove_node(replica)
    assert replica not in cluster.replicas_of(primary)


def test_misusing_a_cluster_raises(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="has already been started"):
        cluster.start()
    with pytest.raises(ValueError, match="primaries must be at least 1"):
        Cluster(primaries=0)
    with pytest.raises(ServerStartFailed, match="no-such"), Cluster(args=["--no-such", "1"]):
        pass


def test_a_primary_without_replicas_cannot_fail_over() -> None:
    with Cluster(primaries=1) as cluster:
        with pytest.raises(LookupError, match="no running replica"):
            cluster.failover(cluster.nodes[0])
        cluster.nodes[0].kill()
        with pytest.raises(LookupError, match="No running node owns slot 0"):
            cluster.owner(0)


# Sentinels


@pytest.fixture
def sentinels(program: Path) -> Iterator[Sentinels]:
    with Sentinels(program=program) as sentinels:
        yield sentinels


def test_sentinels_know_the_primary_and_replace_it_when_it_dies(sentinels: Sentinels) -> None:
    old = sentinels.primary
    assert old is sentinels.servers[0]
    assert sentinels.replicas == sentinels.servers[1:]
    old.client().set("key", "value")
    eventually(lambda: all(each.client().get("key") == b"value" for each in sentinels.replicas))
    assert sentinels.kill_primary() is old
    new = sentinels.wait_for_failover(old)
    assert new is sentinels.primary
    assert new.client().get("key") == b"value"
    assert new.client().set("key", "other")


def test_sentinel_address_contains_sentinels_that_redis_py_can_use(sentinels: Sentinels) -> None:
    seeds, service = sentinels.url.removeprefix("redis+sentinel://").split("/")
    places = [(host, int(port)) for host, port in (seed.split(":") for seed in seeds.split(","))]
    assert service == "mymaster"
    found = redis.Sentinel(places).discover_master(service)
    assert found == ("127.0.0.1", sentinels.primary.port)


def test_a_planned_failover_promotes_a_replica(sentinels: Sentinels) -> None:
    old = sentinels.primary
    new = sentinels.failover()
    assert new is not old
    assert new.info("replication")["role"] == "master"
    old.kill()
    with pytest.raises(AssertionError, match="is not stable"):
        sentinels.wait_until_stable(0.1)


def test_restarted_sentinel_learns_of_the_new_primary(sentinels: Sentinels) -> None:
    first, *others = sentinels.sentinels
    first.kill()
    old = sentinels.kill_primary()
    new = sentinels.wait_for_failover(old)
    first.restart()
    eventually(lambda: first.primary_port(sentinels.service) == new.port, 20)
    assert others[0].primary_port(sentinels.service) == new.port


# Fixtures


def test_fixtures_start_clusters_and_sentinels_and_clean_up(tmp_path: Path) -> None:
    program = """
import pytest

@pytest.mark.parametrize("_", range(2))
def test_shared_cluster_is_empty(meteor_cluster, _):
    for node in meteor_cluster.primaries:
        report(node)
        assert node.client().dbsize() == 0
    meteor_cluster.owner("orders").client().set("orders", 1)

def test_private_cluster_and_sentinels(meteor_private_cluster, meteor_private_sentinels):
    for node in meteor_private_cluster(primaries=1).nodes:
        report(node)
    started = meteor_private_sentinels(replicas=1, sentinels=1)
    for server in (*started.servers, *started.sentinels):
        report(server)
"""
    assert "3 passed" in run_pytest(tmp_path, program)
    lines = (tmp_path / "servers").read_text().splitlines()
    servers = {(int(pid), Path(place)) for pid, place in (line.split() for line in lines)}
    assert len(servers) == 3 + 1 + 3
    for pid, directory in servers:
        assert is_gone(pid)
        assert not directory.exists()


def test_server_does_not_run_in_cluster_mode_by_default() -> None:
    with Server() as server:
        assert server.info("cluster") == {"cluster_enabled": 0}
