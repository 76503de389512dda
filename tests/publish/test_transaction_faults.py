"""Committed frames are in the log exactly once, wherever connections and servers fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import commit
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream
from tests.support.servers import Server
from tests.support.transactions import begin, contents, fence, lasting, numbers, stage


@pytest.fixture
def frame_by_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each script call of a commit move only one frame."""
    monkeypatch.setattr(transaction, "MOVE_BYTES", 1)


@pytest.fixture
def proxied(server: Server, url: str) -> Iterator[ProxiedStream]:
    with ProxiedStream(server) as proxied:
        proxied.through.load_scripts()
        yield proxied


# The script calls of this commit are: plan, three moves, plan, discard.
@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_is_applied_once_if_a_request_or_reply_is_lost(
    proxied: ProxiedStream, frame_by_frame: None, cut: str, call: int
) -> None:
    stream = proxied.through.stream(NAME, create=True)
    staged = [stage(stream, "a", "0", "1"), stage(stream, "b", "2 3")]
    getattr(proxied.proxy, f"cut_{cut}_request")(call, match=b"EVALSHA")
    assert commit(stream._handle, "w", 1, staged)
    assert proxied.proxy.counters.cuts == 1
    assert contents(proxied.stream) == numbers(4)
    assert not commit(stream._handle, "w", 1, staged)


def test_commits_are_applied_once_if_requests_and_replies_are_lost_at_random(
    proxied: ProxiedStream, frame_by_frame: None, rng: Random
) -> None:
    stream = proxied.through.stream(NAME, create=True)
    versions = 15

    def until_done(work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except meteor.ConnectionFailed:
                pass

    proxied.proxy.chaos(rng, 0.2, ("lost_reply", "torn_reply", "lost_request"))
    for version in range(versions):
        first = 3 * version

        def write(first: int = first, version: int = version) -> None:
            frames = [str(first + i) for i in range(3)]
            name = f"{version}.{rng.random()}"
            commit(stream._handle, "w", version, [stage(stream, name, *frames)])

        until_done(write)
    proxied.proxy.heal()
    assert contents(proxied.stream) == numbers(3 * versions)
    assert all(proxied.direct.pttl(key) > 0 for key in proxied.direct.scan_iter("*stage*"))


def test_a_worker_disconnected_while_staging_leaves_no_key_without_expiry(
    proxied: ProxiedStream,
) -> None:
    stream = proxied.through.stream(NAME, create=True)
    proxied.proxy.cut_before_request(match=b"PEXPIRE")
    proxied.proxy.refuse()
    with pytest.raises(meteor.ConnectionFailed):
        stage(stream, "a", "0")
    assert list(proxied.direct.scan_iter("*stage*")) == []


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_server_out_of_memory_finishes_a_commit_and_stages_nothing(
    private_server: ServerFactory, kind: Any, frame_by_frame: None
) -> None:
    server = private_server(kind=kind)
    with meteor.connect(server.url) as m, server.client() as plain:
        stream = m.stream("s", create=True)
        a = stage(stream, "a", "0 1", "2", "3")
        begin(stream, 1, a, moves=1)
        plain.config_set("maxmemory", 1)
        with pytest.raises(meteor.OutOfMemory):
            stage(stream, "b", "x")
        assert commit(stream._handle, "w", 1, [a])  # the commit frees the stage's memory
        assert fence(stream) == b"1:3:3:4"
        plain.config_set("maxmemory", 0)
        assert contents(stream) == numbers(4)
        assert lasting(stream) == set(plain.keys("*"))


@pytest.mark.parametrize("kind", ["valkey", "redis"])
@pytest.mark.parametrize("moves", [0, 1])
def test_a_server_restart_during_a_commit_begins_an_epoch_and_loses_nothing(
    private_server: ServerFactory, kind: Any, frame_by_frame: None, moves: int
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always", kind=kind)
    with meteor.connect(server.url) as m:
        stream = m.stream("s", create=True)
        a, b = stage(stream, "a", "0", "1 2"), stage(stream, "b", "3")
        begin(stream, 1, a, b, moves=moves)
        epoch = stream.describe().epoch
        server.kill()
        server.restart()
        assert commit(stream._handle, "w", 1, [a, b])
        assert contents(stream) == numbers(4)
        assert stream.describe().epoch > epoch


def test_a_version_confirmed_by_replicas_survives_the_loss_of_the_primary(
    replicated: ReplicatedStream,
) -> None:
    stream = replicated.proxied.stream
    assert commit(stream._handle, "w", 1, [stage(stream, "a", "0", "1")], replicas=1)
    replicated.lag()
    replicated.fail_over()
    with meteor.connect(replicated.replica.url) as m:
        stream = m.stream(NAME, create=False)
        assert contents(stream) == numbers(2)
        assert not commit(stream._handle, "w", 1, [stage(stream, "b", "x")])


def test_a_lagging_replica_is_also_reported_for_a_repeated_version(
    replicated: ReplicatedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_REPLICAS_S", 0.05)
    stream = replicated.proxied.stream
    replicated.lag()
    for name in ("a", "again"):
        with pytest.raises(meteor.NotReplicated, match="0 of 1 replicas") as caught:
            commit(stream._handle, "w", 1, [stage(stream, name, "0", "1")], replicas=1)
        assert caught.value.offset == 1
    assert contents(stream) == numbers(2)
