"""The command line covers all primaries of a cluster."""

from __future__ import annotations

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster, Node
from tests.support.commands import meteor as run
from tests.support.commands import succeed
from tests.support.proxied_cluster import ProxiedCluster

NAMES = [f"s{number}" for number in range(12)]
#: A short --timeout in seconds, for commands that wait for a silent node.
SHORT_S = "0.5"


@pytest.fixture
def filled(cluster: Cluster, client: meteor.Client) -> Cluster:
    """A cluster whose primaries all have streams, each with one record."""
    for name in NAMES:
        with client.stream(name).publisher() as pub:
            pub.publish(b"x").result()
    assert {cluster.owner(name).port for name in NAMES} == {n.port for n in cluster.primaries}
    return cluster


def test_streams_on_all_primaries_are_listed(filled: Cluster) -> None:
    found = succeed(filled.url, "streams", "ls", "--json").objects
    assert {each["name"]: each["next"] for each in found} == dict.fromkeys(NAMES, 1)
    assert [line.split()[0] for line in succeed(filled.url, "streams", "ls").lines[1:]] == sorted(
        NAMES
    )


def test_top_shows_the_streams_on_all_primaries(filled: Cluster) -> None:
    shown = succeed(filled.url, "top", "--once")
    assert shown.lines[1].startswith("3 nodes")
    assert {line.split()[0] for line in shown.lines[4:]} == set(NAMES)
    found = succeed(filled.url, "top", "--once", "--json").objects
    assert [each["name"] for each in found] == sorted(NAMES)


def test_server_info_describes_each_primary(filled: Cluster) -> None:
    found = succeed(filled.url, "server", "info", "--json").objects
    by_address = {each["address"].removeprefix("redis://"): each for each in found}
    assert by_address.keys() == {node.address for node in filled.primaries}
    for node in filled.primaries:
        info, each = node.info("all"), by_address[node.address]
        own = {slot for first, last in each["slots"] for slot in range(first, last + 1)}
        assert own == node.own_slots()
        assert each["streams"] == sum(filled.owner(name) is node for name in NAMES) > 0
        assert each["stream_bytes"] > 0
        assert each["memory"] > each["stream_bytes"]
        assert (each["role"], each["append_only"]) == ("primary", False)
        assert (each["memory_policy"], each["memory_max"]) == ("noeviction", None)
        assert each["version"] == info.get(f"{each['product']}_version")
        assert each["clients"] >= 1


def test_server_info_prints_a_paragraph_for_each_primary(filled: Cluster) -> None:
    paragraphs = succeed(filled.url, "server", "info").text.split("\n\n")
    assert [each.split()[1] for each in paragraphs] == sorted(
        node.url.removesuffix("/0") for node in filled.primaries
    )
    for paragraph, node in zip(paragraphs, sorted_by_address(filled), strict=True):
        assert f"{len(node.own_slots()):,} (" in paragraph


def sorted_by_address(cluster: Cluster) -> list[Node]:
    return sorted(cluster.primaries, key=lambda node: node.url)


def test_server_info_names_a_primary_that_does_not_reply(filled: Cluster) -> None:
    paused = filled.primaries[1]
    paused.pause()
    try:
        shown = run(filled.url, "server", "info", "--timeout", SHORT_S)
        found = run(filled.url, "server", "info", "--timeout", SHORT_S, "--json").objects
    finally:
        paused.resume()
    assert shown.code == 1
    assert "cannot list the streams" in shown.err
    paragraphs = shown.text.split("\n\n")
    assert [paused.address in each for each in paragraphs if "no reply" in each] == [True]
    assert [each["role"] for each in found].count("primary") == 2
    assert [each["streams"] for each in found] == [None] * 3


def test_commands_reach_remapped_nodes_if_the_address_contains_remap(filled: Cluster) -> None:
    with ProxiedCluster(filled) as proxied:
        found = succeed(proxied.url, "streams", "ls", "--json").objects  # passed in $METEOR_URL
        assert [each["name"] for each in found] == sorted(NAMES)
        by_option = succeed(None, "streams", "ls", "--json", "--url", proxied.url).objects
        assert by_option == found
        assert all(proxied.requests)
        shown = succeed(proxied.url, "server", "info", "--json").objects
        assert {each["address"] for each in shown} == {
            f"redis://{host}:{port}" for host, port in proxied.remap.values()
        }
