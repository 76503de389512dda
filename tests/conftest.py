"""Fixtures for all tests: servers, seeds, and a guard against threads left behind.

`url` is the address of an empty Valkey server. `any_url` runs a test on every kind of server,
including the fake one. `private_server` is for tests that kill, pause or configure their server.
Tests draw random numbers from `rng`, and a failed test prints the seed that repeats it.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pytest
from hypothesis import settings
from redis.cluster import RedisCluster

from meteor_py.testing import Cluster
from tests.support.group_members import GroupHarness
from tests.support.java import require_java
from tests.support.proxied_stream import ReplicatedStream
from tests.support.servers import Server, binaries, plain_client
from tests.support.xdist_scheduler import workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEED = "METEOR_SEED"
#: Environment variable that replaces the shared server with a three-node cluster. It names the
#: kind of server: "redis" or "valkey".
CLUSTER = "METEOR_TEST_CLUSTER"
THREAD_GRACE_S = 2.0

settings.register_profile("meteor", deadline=None, print_blob=True, derandomize=False)
settings.load_profile("meteor")


class ServerFactory(Protocol):
    def __call__(
        self, *args: str, kind: Literal["valkey", "redis"] = "valkey", unix: bool = False
    ) -> Server: ...


# Servers


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The Valkey server that all tests in a worker share. Do not stop or configure it."""
    with Server(binaries()["valkey"]) as running:
        yield running


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """Like ``server``, but runs the Redis that is installed on this machine."""
    require_redis()
    with Server(binaries()["redis"]) as running:
        yield running


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the shared Valkey server, or of a cluster if $METEOR_TEST_CLUSTER is set."""
    kind = os.environ.get(CLUSTER)
    if kind is None:
        yield request.getfixturevalue("server").url
        return
    # By default, redis-py sends KEYS to one node, but a test must see the keys on all nodes.
    with pytest.MonkeyPatch.context() as patch, Cluster(program=binaries()[kind]) as cluster:
        patch.setitem(RedisCluster.COMMAND_FLAGS, "KEYS", RedisCluster.PRIMARIES)
        yield cluster.url


@pytest.fixture
def url(server_url: str) -> str:
    """The address of an empty server."""
    return emptied(server_url)


@pytest.fixture(params=["valkey", "redis", "fake"])
def any_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty server. The test runs once on each kind of server."""
    if request.param == "fake":
        # A named fake, which all clients in a test share.
        return f"fake://{secrets.token_hex(8)}"
    if request.param == "valkey":
        return emptied(request.getfixturevalue("server_url"))
    running: Server = request.getfixturevalue("redis_server")
    return emptied(running.url)


@pytest.fixture
def private_server() -> Iterator[ServerFactory]:
    """Start servers for one test: `private_server("--appendonly", "yes", kind="redis")`."""
    with ExitStack() as servers:

        def start(
            *args: str, kind: Literal["valkey", "redis"] = "valkey", unix: bool = False
        ) -> Server:
            if kind == "redis":
                require_redis()
            return servers.enter_context(Server(binaries()[kind], *args, unix=unix))

        yield start


def require_redis() -> None:
    """Skip the test if redis-server is not installed. In CI, fail: the whole suite must run."""
    if "redis" not in binaries():
        missing = "redis-server is not on PATH (Debian: apt-get install redis-server)."
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)


def emptied(server_url: str) -> str:
    with plain_client(server_url) as client:
        client.flushall()  # on a cluster, redis-py sends it to all primaries
    return server_url


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a cluster, run only tests that need nothing but the shared server's address."""
    if os.environ.get(CLUSTER) is None:
        return
    chosen = [item for item in items if _runs_on_cluster(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    for item in items:
        for mark in item.iter_markers("single_server"):
            item.add_marker(pytest.mark.skip(reason=f"needs a single server: {mark.args[0]}"))


def _runs_on_cluster(item: pytest.Item) -> bool:
    used = set(getattr(item, "fixturenames", ()))
    if "any_url" in used and isinstance(item, pytest.Function):
        return bool(item.callspec.params["any_url"] == "valkey")
    return used & {"server_url", "server"} == {"server_url"}


@pytest.fixture
def harness(url: str) -> Iterator[GroupHarness]:
    """A stream and its group, whose members run in other processes."""
    with GroupHarness(url) as harness:
        yield harness


@pytest.fixture
def replicated(private_server: ServerFactory) -> Iterator[ReplicatedStream]:
    """A server with a replica that can lag and be promoted."""
    with ExitStack() as stack:
        yield ReplicatedStream(stack, private_server())


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The Spark session that all tests in a worker share, since it takes seconds to start."""
    from tests.support.spark import session  # most tests do not need PySpark

    require_java()
    with session() as spark:
        yield spark


@pytest.hookimpl(optionalhook=True)  # from pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers(config, log)


# Seeds


def pytest_configure() -> None:
    # pytest-xdist starts its workers later, and they inherit the seed.
    os.environ.setdefault(SEED, str(secrets.randbelow(1 << 32)))
    # A shell's background jobs ignore Ctrl-C, and the processes that tests start inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"random seed: {SEED}={os.environ[SEED]}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend only on the run's seed and the test's name."""
    return random.Random(f"{os.environ[SEED]} {request.node.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "rng" in getattr(item, "fixturenames", ()):
        again = f"{SEED}={os.environ[SEED]} pytest '{item.nodeid}'"
        report.sections.append(("to repeat with the same seed", again))
    return report


# Threads


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Fail a test that leaves ``meteor...`` threads running: it did not close every object."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + THREAD_GRACE_S
    for thread in set(threading.enumerate()) - before:
        if thread.ident is None and not thread._started.wait(0.1):  # type: ignore[attr-defined]
            # Its start was interrupted, so it will never run. Make ``threading`` forget it.
            threading._limbo.pop(thread, None)  # type: ignore[attr-defined]
        elif thread.name.startswith("meteor"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                pytest.fail(f"The test left the thread {thread.name!r} running.")
