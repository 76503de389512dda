"""Cluster and sentinel addresses: how they are parsed, masked and remapped."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis.address import mask, parse

SECRET = "open-sesame"


@pytest.mark.parametrize(
    ("url", "seeds"),
    [
        ("redis+cluster://a", [("a", 6379)]),
        ("redis+cluster://a,b:7001/", [("a", 6379), ("b", 7001)]),
        ("redis+cluster://a:1,b:2,a:1/0", [("a", 1), ("b", 2)]),
        ("redis+cluster://[::1]:7000,[fe80::1]", [("::1", 7000), ("fe80::1", 6379)]),
        ("rediss+cluster://user:p%40ss@a:1,b?ssl_cert_reqs=none", [("a", 1), ("b", 6379)]),
        ("redis+sentinel://a,b:5/mymaster", [("a", 26379), ("b", 5)]),
        ("rediss+sentinel://:pw@[::1]/mymaster/3", [("::1", 26379)]),
    ],
)
def test_hosts_get_default_ports_and_duplicates_are_dropped(
    url: str, seeds: list[tuple[str, int]]
) -> None:
    assert list(parse(url).seeds) == seeds


def test_login_and_tls_options_apply_to_every_node() -> None:
    address = parse("rediss+cluster://user:p%40ss@a:1,b?ssl_cert_reqs=none&client_name=c")
    node = address.at(("b", 6379))
    assert node.scheme == "rediss"
    wanted = {"username": "user", "password": "p@ss", "host": "b", "port": 6379}
    assert node.options == wanted | {"ssl_cert_reqs": "none", "client_name": "c"}
    assert str(node) == "rediss://b:6379"
    assert (address.kind, address.uses_tls) == ("cluster", True)


def test_sentinels_have_their_own_login() -> None:
    address = parse(
        f"redis+sentinel://app:{SECRET}@a,b/mymaster/3?sentinel_username=s&sentinel_password=t%2Bu"
    )
    assert address.service == "mymaster"
    assert address.options == {"username": "app", "password": SECRET, "db": 3}
    assert address.sentinel_options == {"username": "s", "password": "t+u"}
    assert address.sentinel_at(("a", 26379)).options["password"] == "t+u"
    assert SECRET not in f"{address} {address!r}"
    assert "t%2Bu" not in f"{address} {address!r}"


def test_nodes_are_reached_at_their_remapped_addresses() -> None:
    address = parse("redis+cluster://localhost", {("10.0.0.5", 6379): ("localhost", 7005)})
    assert address.at(("10.0.0.5", 6379)).options == {"host": "localhost", "port": 7005}
    assert address.at(("10.0.0.6", 6379)).options == {"host": "10.0.0.6", "port": 6379}
    assert str(address.at(("::1", 1))) == "redis://[::1]:1"


def test_address_can_contain_remapped_addresses() -> None:
    url = "redis+cluster://a?remap=10.0.0.5:6379=localhost:7005,[::1]:1=b:2&client_name=c"
    address = parse(url, {("::1", 1): ("d", 3)})
    assert address.at(("10.0.0.5", 6379)).options["port"] == 7005
    assert address.at(("::1", 1)).options["host"] == "d", "the argument did not take precedence"
    assert address.options == {"client_name": "c"}
    assert str(address) == url, "a part that is not secret was masked"
    sentinels = parse("redis+sentinel://a/m?remap=s:26379=localhost:5&sentinel_password=p")
    assert sentinels.sentinel_at(("s", 26379)).options["port"] == 5
    assert sentinels.sentinel_options == {"password": "p"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+cluster://", "is not a host"),
        ("redis+cluster://a,,b", "is not a host"),
        ("redis+cluster://a:x", "is not a host"),
        ("redis+cluster://a:70000", "is not a host"),
        ("redis+cluster://::1", "in brackets"),
        ("redis+cluster://a/1", "a cluster has only database 0"),
        ("redis+cluster://a?db=1", "a cluster has only database 0"),
        ("redis+cluster://a/name/0", "must be a database number"),
        ("redis+cluster://a?sentinel_password=x", "is for redis+sentinel:// addresses only"),
        ("redis+cluster://a?ssl_cert_reqs=none", "Use rediss+cluster:// for TLS"),
        ("redis+cluster://a?socket_timeout=1", "cannot be set in the URL"),
        ("redis+sentinel://a", "the name of the primary is missing"),
        ("redis+sentinel://a/name/x", "must be a database number"),
        ("redis+cluster://a#b", "unescaped character"),
        ("redis+cluster://a?remap=b:1", "is not announced_host:port=reachable_host:port"),
        ("redis+cluster://a?remap=b=c", "is not announced_host:port=reachable_host:port"),
        ("redis+sentinel://a/m?remap=b:1=c:70000", "is not announced_host:port="),
    ],
)
def test_malformed_address_is_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"not a valid address|cannot be|TLS") as refused:
        parse(url)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        f"redis+cluster://user:{SECRET}/x@a",
        f"redis+cluster://user:{SECRET}@a:x",
        f"redis+cluster://{SECRET}@a:x",
        f"redis+sentinel://user:{SECRET}@a,b",
        f"redis+sentinel://a/m/x?sentinel_password={SECRET}",
    ],
)
def test_no_error_quotes_a_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"not a valid address") as refused:
        parse(url)
    assert SECRET not in str(refused.value)
    assert SECRET not in mask(url)


@pytest.mark.parametrize("remap", [{"a": ("b", 1)}, {("a", 1): "b:1"}, {("a", "1"): ("b", 1)}])
def test_remap_of_the_wrong_type_is_refused(remap: Any) -> None:
    with pytest.raises(TypeError, match="remap must map"):
        meteor.connect("redis+cluster://a", remap=remap)


def test_remap_needs_a_cluster_or_sentinels() -> None:
    with pytest.raises(ValueError, match="remap is for"):
        meteor.connect("redis://a", remap={("a", 1): ("b", 1)})
    with pytest.raises(ValueError, match="remap is for"):
        meteor.connect("redis://a?remap=a:1=b:1")
