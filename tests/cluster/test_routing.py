"""Commands reach the node that has their keys, even if the client's slot map is out of date."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys, scripts
from meteor_py.redis.address import parse
from meteor_py.redis.slot_map import SlotMap
from meteor_py.redis.topology import RefreshTimer, Search
from meteor_py.testing import Cluster, Node
from tests.support.forking import in_child
from tests.support.proxied_cluster import ProxiedCluster
from tests.support.proxy import Proxy
from tests.support.readers import check_values, value
from tests.support.servers import HOST
from tests.support.waiting import eventually

NAMES = [f"s{number}" for number in range(12)]


def test_streams_in_these_tests_are_spread_over_all_nodes(cluster: Cluster) -> None:
    assert {cluster.owner(name).port for name in NAMES} == {n.port for n in cluster.primaries}


def test_single_server_address_of_a_node_is_refused_and_the_cluster_address_suggested(
    cluster: Cluster,
) -> None:
    node = cluster.primaries[0]
    with meteor.connect(node.url) as m, pytest.raises(meteor.ServerRefused) as refused:
        m.streams()
    assert f"redis+cluster://{node.address}" in str(refused.value)
    assert not refused.value.retriable


def test_cluster_address_of_a_single_server_is_refused(url: str) -> None:
    single = url.replace("redis://", "redis+cluster://").removesuffix("/0")
    with meteor.connect(single) as m, pytest.raises(meteor.ServerRefused, match="use a redis://"):
        m.streams()


def test_node_whose_slot_map_led_to_a_failure_is_asked_last(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = SlotMap(parse(cluster.url))
    asked: list[object] = []
    ask = SlotMap._ask

    def note(slots: SlotMap, node: Any, search: Search, timeout_s: float) -> Any:
        asked.append(node)
        return ask(slots, node, search, timeout_s)

    monkeypatch.setattr(SlotMap, "_ask", note)
    for _ in range(3):  # a call fails with each node's slot map
        slots.note_failed(slots.locate("orders", Search(5.0)))
        slots._timer = RefreshTimer()  # allow the next refresh at once
    assert asked[0] != asked[1]


def test_streams_and_peer_groups_on_all_nodes_are_listed(
    cluster: Cluster, client: meteor.Client
) -> None:
    for name in NAMES:
        client.stream(name, create=True)
        client.peer_group(name).close()
    assert client.streams() == sorted(NAMES)
    assert client.peer_groups() == sorted(NAMES)


def test_pipeline_to_all_nodes_takes_one_round_trip(
    cluster: Cluster, client: meteor.Client
) -> None:
    for name in NAMES:
        client.stream(name, create=True)
    commands = [("HGET", keys.meta(name), "next") for name in NAMES]
    with proxied(cluster) as (through, proxies):
        assert through._connector.pipeline(commands) == [b"0"] * len(NAMES)
        for proxy in proxies:
            proxy.stall("replies")  # all requests must be sent before the first reply is read
        before = [proxy.counters.requests for proxy in proxies]
        with ExitStack() as stack:
            for proxy in proxies:
                stack.callback(proxy.heal)
            done: list[Any] = []
            thread = threading.Thread(
                target=lambda: done.append(through._connector.pipeline(commands))
            )
            thread.start()
            eventually(
                lambda: all(
                    proxy.counters.requests > count
                    for proxy, count in zip(proxies, before, strict=True)
                )
            )
        thread.join(10)
        assert done == [[b"0"] * len(NAMES)]


def test_replies_to_a_failed_pipeline_are_not_mistaken_for_later_ones(
    client: meteor.Client,
) -> None:
    for name in NAMES:
        client.stream(name, create=True)
    commands = [("HGET", keys.meta(name), "next") for name in NAMES]
    with pytest.raises(meteor.ServerRefused, match="WRONGTYPE"):
        client._connector.pipeline([*commands, ("LLEN", keys.meta(NAMES[0]))])
    assert client._connector.pipeline(commands) == [b"0"] * len(NAMES)


def test_client_with_an_outdated_slot_map_finds_every_stream(
    cluster: Cluster, client: meteor.Client, rng: random.Random
) -> None:
    streams = {name: client.stream(name, create=True) for name in NAMES}
    publishers = {name: stream.publisher() for name, stream in streams.items()}
    for pub in publishers.values():
        pub.publish(value(0)).result()
    for name in NAMES:
        slot = cluster.slot(name)
        cluster.move_slot(slot, rng.choice(cluster.others(cluster.owner(slot))))
    for name, pub in publishers.items():
        assert pub.publish(value(1)).result(10) == 1
        with streams[name].subscriber(initial_offset="earliest") as sub:
            got: list[int] = []
            while len(got) < 2:
                got += check_values(sub.poll(10))
        assert got == [0, 1]
        pub.close()
    assert client.streams() == sorted(NAMES)


def test_deleting_a_stream_deletes_all_its_keys_and_no_others(
    cluster: Cluster, client: meteor.Client
) -> None:
    for name in NAMES:
        stream = client.stream(name, ordering_key="key")
        with stream.publisher() as pub:
            pub.publish(b"x", key=b"k").result()
        with stream.shared_subscriber("g") as shared:
            shared.poll(5)
    client.stream(NAMES[0]).delete()
    found = {key for node in cluster.primaries for key in all_keys(node)}
    names = {key.partition(b"{")[2].partition(b"}")[0].decode() for key in found} - {""}
    assert names == set(NAMES[1:])
    for name in NAMES[1:]:
        client.stream(name).delete()
    assert {key for node in cluster.primaries for key in all_keys(node)} == set()


def test_deleting_a_stream_waits_until_its_slot_has_moved(cluster: Cluster) -> None:
    with meteor.connect(cluster.url) as m:
        stream = m.stream(NAMES[0], create=True)
        with stream.publisher() as pub:
            pub.publish(b"x").result()
        slot = cluster.slot(NAMES[0])
        cluster.begin_move(slot, cluster.others(cluster.owner(slot))[0]).migrate(1)
        thread = threading.Thread(target=stream.delete)
        thread.start()
        cluster.repair()
        thread.join(10)
        assert not thread.is_alive()
    assert {key for node in cluster.primaries for key in all_keys(node)} == set()


def all_keys(node: Node) -> list[bytes]:
    with node.client() as plain:
        found: list[bytes] = plain.keys("*")
        return found


def test_scripts_are_loaded_into_every_primary(cluster: Cluster, client: meteor.Client) -> None:
    client.load_scripts()
    for node in cluster.primaries:
        with node.client() as plain:
            known = plain.script_exists(*(script.guarded.sha for script in scripts.ALL))
            assert all(known)


def test_description_covers_all_primaries_even_if_one_does_not_reply(cluster: Cluster) -> None:
    with meteor.connect(cluster.url, timeout=0.5) as m:
        whole = m.describe()
        assert len(whole.nodes) == 3
        assert whole.memory == sum(node.memory or 0 for node in whole.nodes)
        paused = cluster.primaries[0]
        paused.pause()
        try:
            partial = m.describe()
        finally:
            paused.resume()
    assert len(partial.nodes) == 3
    assert [node.address for node in partial.nodes if node.memory is None] == [
        f"redis://{paused.address}"
    ]
    assert partial.memory is None


def test_plain_redis_client_reaches_all_nodes(cluster: Cluster, client: meteor.Client) -> None:
    for name in NAMES:
        client.stream(name, create=True)
        assert client.redis.hget(keys.meta(name), "next") == b"0"


def test_client_works_in_a_forked_child(cluster: Cluster, client: meteor.Client) -> None:
    client.stream(NAMES[0], create=True)
    assert in_child(lambda: client.stream(NAMES[1], create=True)) == 0
    assert client.streams() == sorted(NAMES[:2])


def test_lost_reply_from_a_cluster_does_not_duplicate_a_record(
    cluster: Cluster, client: meteor.Client
) -> None:
    # This also tests ``remap``: the client reaches the nodes only through proxies.
    stream = client.stream(NAMES[0], create=True)
    with (
        proxied(cluster) as (through, proxies),
        through.stream(NAMES[0], create=False).publisher() as pub,
    ):
        pub.publish(value(0)).result()
        for proxy in proxies:
            proxy.cut_mid_reply(0)
        assert pub.publish(value(1)).result(10) == 1
        for proxy in proxies:
            proxy.heal()
    got = [n for batch in stream.read(0) for n in check_values(batch)]
    assert got == [0, 1]


@contextmanager
def proxied(cluster: Cluster, timeout: float = 5.0) -> Iterator[tuple[meteor.Client, list[Proxy]]]:
    """Yield a client that reaches the nodes only through proxies, and the proxies."""
    with (
        ProxiedCluster(cluster) as made,
        meteor.connect(made.seed_url, timeout=timeout, remap=made.remap) as through,
    ):
        yield through, made.proxies


def test_opening_the_plain_redis_client_delays_no_other_call(cluster: Cluster) -> None:
    with (
        # The client uses the seed only to find the nodes. ``m.redis`` asks the seed again.
        Proxy(HOST, cluster.primaries[0].port) as seed,
        meteor.connect(f"redis+cluster://{HOST}:{seed.port}", timeout=60) as m,
    ):
        stream = m.stream(NAMES[0], create=True)
        seed.stall("replies")
        before = seed.counters.requests
        opening = threading.Thread(target=lambda: m.redis, daemon=True)
        opening.start()
        eventually(lambda: seed.counters.requests > before)
        found: list[int] = []

        def publish() -> None:
            with stream.publisher() as pub:
                found.append(pub.publish(b"x").result())

        publishing = threading.Thread(target=publish, daemon=True)
        publishing.start()
        publishing.join(10)
        assert found == [0]
        seed.heal()
        opening.join(10)
        assert m.redis.hget(keys.meta(NAMES[0]), "next") == b"1"
