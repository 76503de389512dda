"""Failovers under load, on a cluster and with sentinels; part of ``make chaos``.

A primary is killed while its replicas lag, or is cut off together with some clients. With
``acks=0``, the records that no replica has are lost, and both the publisher and the group must
learn of every lost record. With ``acks=1``, no acknowledged record may be lost. Planned failovers
lose nothing on a cluster and, if writes are paused first, with sentinels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster, Node, Sentinels, Server
from tests.chaos.backend import Proxies
from tests.conftest import require_redis
from tests.support.client_load import (
    STREAM,
    GroupReading,
    Load,
    Publishing,
    duplicates,
    lost,
    read_log,
    unreported,
    wait_until,
)
from tests.support.partition import PartitionedCluster
from tests.support.servers import HOST, binaries, plain_client

TRIALS = 2
#: Seconds of load before and after a failover, and seconds for which the replicas lag.
CALM_S = 0.5
LAG_S = 0.4
#: Seconds within which publishing must work again.
RECOVERY_S = 30.0
PLANNED = 5
NODE_TIMEOUT_S = 1.0
TIMEOUT_S = 2.0


class Service(Protocol):
    """A cluster, or a primary with sentinels."""

    @property
    def url(self) -> str: ...

    def primary(self) -> Server:
        """Return the server that has the stream."""

    def replicas(self) -> list[Server]: ...

    def wait_for_failover(self, dead: Server) -> Server: ...

    def wait_until_stable(self) -> None: ...


class ClusterService:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.url = cluster.url

    def primary(self) -> Server:
        return self.cluster.owner(STREAM)

    def replicas(self) -> list[Server]:
        return list(self.cluster.replicas_of(self.cluster.owner(STREAM)))

    def wait_for_failover(self, dead: Server) -> Server:
        return self.cluster.wait_for_failover(next(n for n in self.cluster.nodes if n is dead))

    def wait_until_stable(self) -> None:
        self.cluster.wait_until_stable()


class SentinelService:
    def __init__(self, sentinels: Sentinels) -> None:
        self.sentinels = sentinels
        self.url = sentinels.url

    def primary(self) -> Server:
        return self.sentinels.primary

    def replicas(self) -> list[Server]:
        return self.sentinels.replicas

    def wait_for_failover(self, dead: Server) -> Server:
        return self.sentinels.wait_for_failover(dead)

    def wait_until_stable(self) -> None:
        self.sentinels.wait_until_stable()


@contextmanager
def start(kind: str, program: Path, acks: int) -> Iterator[Service]:
    if kind == "cluster":
        # A failover uses up one replica. The others must still be able to acknowledge records.
        with Cluster(replicas=1 + acks, program=program) as cluster:
            yield ClusterService(cluster)
    else:
        with Sentinels(program=program) as sentinels:
            yield SentinelService(sentinels)


@pytest.fixture(params=["valkey", "redis"])
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "redis":
        require_redis()
    return binaries()[request.param]


class Trial:
    """A stream with a busy publisher, an idle publisher and a group, during one failover."""

    def __init__(self, stream: meteor.Stream, acks: int) -> None:
        self.stream = stream
        self.publishing = Publishing(stream, window=20, batch=500, acks=acks)
        self.group = GroupReading(stream)
        self.idle = stream.publisher(acks=acks)
        self.idle_offset: int | None = None
        self.idle_was_told = False

    def run(self, service: Service) -> float:
        """Kill the primary while its replicas lag; return the seconds until publishing resumes."""
        self.publishing.start()
        self.group.start()
        time.sleep(CALM_S)
        primary, replicas = service.primary(), service.replicas()
        for replica in replicas:
            replica.pause()
        # Cut the connections to the replicas, so that no record waits in a socket buffer.
        with plain_client(primary.url) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        self._publish_idly()
        time.sleep(LAG_S)
        primary.kill()
        killed_at = time.monotonic()
        for replica in replicas:
            replica.resume()
        service.wait_for_failover(primary)
        before = len(self.publishing.acked) + len(self.publishing.unknown)
        recovered = wait_until(
            lambda: len(self.publishing.acked) + len(self.publishing.unknown) > before, RECOVERY_S
        )
        recovery_s = time.monotonic() - killed_at
        assert recovered, f"nothing was published within {RECOVERY_S:g} s"
        time.sleep(CALM_S)
        primary.start()
        service.wait_until_stable()
        self._end()
        return recovery_s

    def _publish_idly(self) -> None:
        try:
            self.idle_offset = self.idle.publish(b"idle").result(1)
        except (meteor.MeteorError, TimeoutError):
            pass  # not replicated, so not acknowledged

    def _end(self) -> None:
        self.publishing.stop()
        self.group.reach(self.stream.end().offset)
        self.group.stop()
        for last_chance in (self.idle.flush, self.idle.close):
            try:
                last_chance(10)
            except meteor.LogTruncated:
                self.idle_was_told = True
            except meteor.MeteorError:
                pass  # the idle record was not acknowledged

    def check(self) -> tuple[int, int]:
        """Check that every loss was reported; return how many records were acked, and lost."""
        log, publishing = read_log(self.stream), self.publishing
        assert publishing.problems == self.group.problems == []
        assert unreported(publishing.acked, log, publishing.reported) == []
        assert unreported(self.group.seen, log, self.group.reported) == []
        assert duplicates(log.values()) == []
        assert not publishing.refused & set(log.values())
        if self.idle_offset is not None and log.get(self.idle_offset) != b"idle":
            assert self.idle_was_told, "the idle publisher did not learn of its loss"
        return len(publishing.acked), len(lost(publishing.acked, log))


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
@pytest.mark.parametrize("acks", [0, 1])
def test_losses_are_reported_if_a_primary_is_killed_and_acks_1_prevents_losses(
    kind: str, acks: int, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acked = gone = 0
    recoveries = []
    with (
        start(kind, program, acks) as service,
        meteor.connect(service.url, timeout=TIMEOUT_S) as client,
    ):
        for number in range(TRIALS):
            # All trials use the same name, so that their streams are in the same slot.
            trial = Trial(client.stream(STREAM, capacity=10_000_000), acks)
            recoveries.append(trial.run(service))
            told, missing = trial.check()
            acked, gone = acked + told, gone + missing
            if acks:
                assert missing == 0, f"trial {number}"
                assert trial.publishing.reported == [], f"trial {number}"
            trial.stream.delete()
    assert acked > 0
    if not acks:
        assert gone > 0, "the replicas did not lag, so this run proves nothing"
    with capsys.disabled():
        print(
            f"\n{kind}, {program.name}, acks={acks}: {acked:,} records acknowledged, {gone:,} lost "
            f"and reported; publishing resumed within {max(recoveries):.1f} s"
        )


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_planned_cluster_failovers_lose_nothing(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "redis":
        require_redis()
    pauses = []
    with (
        Cluster(replicas=1, program=binaries()[kind], node_timeout_s=NODE_TIMEOUT_S) as cluster,
        meteor.connect(cluster.url) as client,
    ):
        with Load(client) as load:
            for number in range(PLANNED):
                load.publishing.longest_pause_s = 0.0
                cluster.failover(cluster.owner(STREAM))
                assert load.publishing.continues(), f"nothing was published after failover {number}"
                pauses.append(load.publishing.longest_pause_s)
                cluster.wait_until_stable()
                # The primaries vote again only after two node timeouts.
                time.sleep(2 * NODE_TIMEOUT_S)
        load.check_nothing_lost()
    with capsys.disabled():
        print(
            f"\n{kind}: {PLANNED} planned failovers, pauses "
            f"{', '.join(f'{pause * 1000:.0f}' for pause in pauses)} ms, median "
            f"{statistics.median(pauses) * 1000:.0f} ms"
        )


@pytest.mark.parametrize("paused", [True, False], ids=["client pause", "no client pause"])
def test_planned_sentinel_failover_reports_losses_and_pausing_writes_prevents_them(
    paused: bool, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        Sentinels(program=program) as sentinels,
        meteor.connect(sentinels.url, timeout=TIMEOUT_S) as client,
    ):
        stream = client.stream(STREAM, capacity=10_000_000)
        # Wait until all replicas have the stream.
        with plain_client(sentinels.primary.url) as plain:
            plain.set("written", 1)
            assert plain.wait(len(sentinels.replicas), 10_000) == len(sentinels.replicas)
        publishing, group = Publishing(stream, window=20, batch=100), GroupReading(stream)
        publishing.start()
        group.start()
        time.sleep(CALM_S)
        if paused:
            with plain_client(sentinels.primary.url) as plain:
                plain.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
            time.sleep(0.3)  # time for the replicas to receive the last records
        sentinels.failover()
        assert publishing.continues(), publishing.problems
        sentinels.wait_until_stable()
        publishing.stop()
        group.reach(stream.end().offset)
        group.stop()
        log = read_log(stream)
    gone = lost(publishing.acked, log)
    assert publishing.problems == group.problems == []
    assert unreported(publishing.acked, log, publishing.reported) == []
    assert unreported(group.seen, log, group.reported) == []
    assert duplicates(log.values()) == []
    if paused:
        assert gone == []
        assert publishing.reported == group.reported == []
    with capsys.disabled():
        print(
            f"\n{program.name}, {'writes paused' if paused else 'writes not paused'}: "
            f"{len(publishing.acked):,} records acknowledged, {len(gone):,} lost and reported, "
            f"longest pause {publishing.longest_pause_s:.1f} s"
        )


@pytest.mark.parametrize("acks", [0, 1])
def test_losses_are_reported_if_a_primary_is_cut_off_together_with_clients(
    acks: int, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(PartitionedCluster(program, NODE_TIMEOUT_S))
        sides = Sides(cluster, stack)
        inside, outside = sides.start_clients(acks)
        time.sleep(CALM_S)
        old = sides.divide()
        new = cluster.wait_for_failover(old)
        if not acks:  # with acks=1, nothing is acknowledged until the new primary has a replica
            assert outside.publishing.continues(), outside.publishing.problems
        sides.heal()
        cluster.wait_until_stable()
        for client in (inside, outside):
            assert client.publishing.continues(), client.publishing.problems
        for client in (inside, outside):
            client.stop()
        log = read_log(outside.stream)
        assert cluster.owner(STREAM) is new
    gone = [len(client.check(log)) for client in (inside, outside)]
    assert duplicates(log.values()) == []
    if acks:
        assert gone == [0, 0]
    else:
        assert gone[0] > 0, "the primary accepted nothing while it was cut off"
    with capsys.disabled():
        print(
            f"\n{program.name}, acks={acks}: a primary was cut off. Lost and reported: {gone[0]:,} "
            f"of {len(inside.publishing.acked):,} records from the clients on its side, and "
            f"{gone[1]:,} of {len(outside.publishing.acked):,} records from other clients"
        )


class Side:
    """The clients on one side of a partition."""

    def __init__(self, stream: meteor.Stream, acks: int, name: str) -> None:
        self.stream = stream
        self.publishing = Publishing(stream, window=5, batch=50, acks=acks, prefix=name.encode())
        self.group = GroupReading(stream, name)
        self.publishing.start()
        self.group.start()

    def stop(self) -> None:
        self.publishing.stop()
        self.group.reach(self.stream.end().offset)
        self.group.stop()

    def check(self, log: dict[int, bytes]) -> list[int]:
        """Check that every loss was reported, and return the lost offsets."""
        assert self.publishing.problems == self.group.problems == []
        assert unreported(self.publishing.acked, log, self.publishing.reported) == []
        assert unreported(self.group.seen, log, self.group.reported) == []
        return lost(self.publishing.acked, log)


class Sides:
    """A partition: the stream's primary and some clients inside, everything else outside."""

    def __init__(self, cluster: PartitionedCluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        ports = [node.port for node in cluster.nodes]
        self._inside, self._outside = (Proxies.to(ports, stack) for _ in range(2))

    def start_clients(self, acks: int) -> tuple[Side, Side]:
        inside = self._connect(self._inside).stream(STREAM, capacity=10_000_000)
        outside = self._connect(self._outside).stream(STREAM, create=False)
        return Side(inside, acks, "inside"), Side(outside, acks, "outside")

    def _connect(self, proxies: Proxies) -> meteor.Client:
        # The client uses proxies for its first contact and for the addresses that nodes announce.
        to_proxy = {(HOST, port): (HOST, proxy) for port, proxy in proxies.remap.items()}
        remap = to_proxy | {door: to_proxy[real] for door, real in self._cluster.remap.items()}
        url = self._cluster.url
        return self._stack.enter_context(meteor.connect(url, timeout=TIMEOUT_S, remap=remap))

    def divide(self) -> Node:
        """Cut off the stream's primary, and return it."""
        primary = self._cluster.owner(STREAM)
        self._cluster.cut_off(primary)
        self._outside.isolate(primary.port)
        for node in self._cluster.nodes:
            if node is not primary:
                self._inside.isolate(node.port)
        return primary

    def heal(self) -> None:
        self._cluster.network.heal()
        self._inside.heal()
        self._outside.heal()
