"""Clusters and sentinels with TLS, users and passwords."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster, Server
from tests.conftest import require_redis
from tests.support.certificates import create_certificates
from tests.support.commands import succeed
from tests.support.readers import check_values, value
from tests.support.tls_servers import TlsCluster, TlsSentinels

STREAM = "orders"
USER, PASSWORD = "app", "open sesame/@:?"
SENTINEL_USER, SENTINEL_PASSWORD = "watcher", "s&cret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_redis()
    folder = tmp_path_factory.mktemp("certificates")
    create_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with TlsCluster(folder) as cluster:
        for node in cluster.nodes:
            add_user(node, USER, PASSWORD, "~*")
        yield cluster


@pytest.fixture(scope="module")
def sentinels(folder: Path) -> Iterator[TlsSentinels]:
    with TlsSentinels(folder) as sentinels:
        for server in sentinels.servers:
            add_user(server, USER, PASSWORD, "~*")
        for sentinel in sentinels.sentinels:
            add_user(sentinel, SENTINEL_USER, SENTINEL_PASSWORD)
        yield sentinels


def add_user(server: Server, name: str, password: str, *rules: str) -> None:
    with server.client() as plain:
        plain.execute_command("ACL", "SETUSER", name, "on", f">{password}", "&*", "+@all", *rules)


def address(
    url: str, ca: Path, login: str = f"{USER}:{quote(PASSWORD, safe='')}", **more: str
) -> str:
    """Return the address with a user, a certificate authority and further options."""
    options = {"ssl_ca_certs": str(ca), **more}
    query = "&".join(f"{name}={quote(text, safe='')}" for name, text in options.items())
    return f"{url.replace('://', f'://{login}@')}?{query}"


def for_sentinels(url: str, ca: Path, password: str = SENTINEL_PASSWORD) -> str:
    return address(url, ca, sentinel_username=SENTINEL_USER, sentinel_password=password)


def refusal(url: str) -> meteor.MeteorError:
    with meteor.connect(url, timeout=2) as m, pytest.raises(meteor.MeteorError) as refused:
        m.streams()
    assert PASSWORD not in str(refused.value)
    assert SENTINEL_PASSWORD not in str(refused.value)
    return refused.value


def whoami(client: meteor.Client) -> str:
    """Return the name of the redis-py client's user."""
    found: Any = client.redis.acl_whoami()
    return str(found.decode() if isinstance(found, bytes) else found)


def test_client_uses_a_cluster_with_tls_and_a_user_while_a_slot_moves(
    cluster: Cluster, folder: Path
) -> None:
    url = address(cluster.url, folder / "ca.pem")
    with meteor.connect(url) as m, m.stream(STREAM).publisher() as pub:
        assert pub.publish(value(0)).result(10) == 0
        source = cluster.owner(STREAM)
        cluster.move_slot(cluster.slot(STREAM), cluster.others(source)[0])
        assert pub.publish(value(1)).result(10) == 1
        with m.stream(STREAM).subscriber(group="g", initial_offset="earliest") as sub:
            got: list[int] = []
            while len(got) < 2:
                got += check_values(sub.poll(10))
            sub.confirm().result(10)
        assert got == [0, 1]
        description = m.describe()
        assert [node.address for node in description.nodes] == sorted(
            f"rediss://{node.address}" for node in cluster.primaries
        )
        assert whoami(m) == USER
    shown = succeed(url, "streams", "ls", "--json").objects
    assert [each["name"] for each in shown] == [STREAM]


def test_cluster_refuses_a_wrong_password_and_the_client_an_unknown_authority(
    cluster: Cluster, folder: Path
) -> None:
    wrong = refusal(address(cluster.url, folder / "ca.pem", login=f"{USER}:wrong"))
    assert isinstance(wrong, meteor.AccessDenied)
    assert "certificate verify failed" in str(refusal(address(cluster.url, folder / "other.pem")))


def test_client_follows_sentinels_with_tls_and_a_separate_sentinel_user(
    sentinels: TlsSentinels, folder: Path
) -> None:
    url = for_sentinels(sentinels.url, folder / "ca.pem")
    with meteor.connect(url) as m, m.stream(STREAM).publisher(acks=1) as pub:
        assert pub.publish(value(0)).result(10) == 0
        assert m.describe().address == f"rediss://127.0.0.1:{sentinels.primary.port}"
        assert whoami(m) == USER
        dead = sentinels.kill_primary()
        new = sentinels.wait_for_failover(dead)
        assert m.stream(STREAM).describe().next == 1
        assert m.describe().address == f"rediss://127.0.0.1:{new.port}"


def test_sentinels_refuse_a_wrong_password_and_the_client_an_unknown_authority(
    sentinels: TlsSentinels, folder: Path
) -> None:
    wrong = refusal(for_sentinels(sentinels.url, folder / "ca.pem", "wrong"))
    assert isinstance(wrong, meteor.AccessDenied)
    unknown = refusal(for_sentinels(sentinels.url, folder / "other.pem"))
    assert "certificate verify failed" in str(unknown)
