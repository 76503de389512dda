"""A node that does not reply delays only calls for its own keys."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.testing import Cluster
from tests.cluster.test_routing import NAMES, proxied
from tests.support.waiting import eventually


def command(name: str) -> tuple[str, str, str]:
    return ("HGET", keys.meta(name), "next")


class Call(threading.Thread):
    """A call in its own thread, with its result or the error that ended it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.result = error

    def outcome(self) -> Any:
        self.join(10)
        assert not self.is_alive(), "the call is still waiting"
        return self.result


def test_calls_for_other_nodes_do_not_wait_for_a_frozen_one(
    cluster: Cluster, client: meteor.Client
) -> None:
    for name in NAMES:
        client.stream(name, create=True)
    frozen = cluster.primaries[0]
    others = [name for name in NAMES if cluster.owner(name) is not frozen]
    with proxied(cluster, timeout=60) as (through, proxies):
        connector = through._connector
        assert connector.pipeline([command(name) for name in NAMES]) == [b"0"] * len(NAMES)
        proxies[0].stall("replies")
        before = [proxy.counters.requests for proxy in proxies]
        waiting = [
            Call(lambda: connector.pipeline([command(name) for name in NAMES])) for _ in range(6)
        ]
        eventually(
            lambda: all(
                proxy.counters.requests >= count + len(waiting)
                for proxy, count in zip(proxies, before, strict=True)
            )
        )
        for name in others:
            assert Call(partial(connector.call, *command(name))).outcome() == b"0"
        part = Call(lambda: connector.pipeline([command(name) for name in others]))
        assert part.outcome() == [b"0"] * len(others)
        assert all(call.is_alive() for call in waiting)
        proxies[0].heal()
        for call in waiting:
            assert call.outcome() == [b"0"] * len(NAMES)


@pytest.mark.parametrize("frozen", [[0], [1, 2], [0, 1, 2]])
def test_pipeline_over_all_nodes_fails_in_time_and_names_a_node_that_does_not_reply(
    cluster: Cluster, client: meteor.Client, frozen: list[int]
) -> None:
    for name in NAMES:
        client.stream(name, create=True)
    with proxied(cluster, timeout=1) as (through, proxies):
        assert through.streams() == sorted(NAMES)
        for number in frozen:
            proxies[number].stall("replies")
        work = [command(name) for name in NAMES]
        error = Call(lambda: through._connector.pipeline(work)).outcome()
        for proxy in proxies:
            proxy.heal()
        assert isinstance(error, meteor.ConnectionFailed)
        assert any(f":{proxies[number].port} " in str(error) for number in frozen)
        assert through.streams() == sorted(NAMES)


def test_describing_a_frozen_cluster_takes_one_timeout_instead_of_one_per_node(
    cluster: Cluster, client: meteor.Client
) -> None:
    # Three timeouts of 4 s would take longer than outcome() waits.
    with proxied(cluster, timeout=4) as (through, proxies):
        assert all(node.version for node in through.describe().nodes)
        for proxy in proxies:
            proxy.stall("replies")
        described = Call(through.describe).outcome()
        for proxy in proxies:
            proxy.heal()
        assert [node.version for node in described.nodes] == [None] * len(proxies)
        assert all(node.version for node in through.describe().nodes)
