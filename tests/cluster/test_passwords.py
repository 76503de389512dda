"""A changed password ends no connection, but every new connection needs the new password."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster, Sentinels, Server
from tests.support.servers import plain_client

USER = "app"
RULES = ("on", "~*", "&*", "+@all")


@pytest.fixture(scope="module", params=["cluster", "sentinels"])
def servers(request: pytest.FixtureRequest, program: Path) -> Iterator[Cluster | Sentinels]:
    kind = Cluster if request.param == "cluster" else Sentinels
    with kind(program=program) as running:
        yield running


def data_servers(servers: Cluster | Sentinels) -> list[Server]:
    return list(servers.nodes if isinstance(servers, Cluster) else servers.servers)


def set_password(servers: Cluster | Sentinels, password: str) -> None:
    for server in data_servers(servers):
        with plain_client(server.url) as plain:
            plain.execute_command("ACL", "SETUSER", USER, *RULES, "resetpass", f">{password}")


def cut_connections(servers: Cluster | Sentinels) -> None:
    for server in data_servers(servers):
        with plain_client(server.url) as plain:
            plain.execute_command("CLIENT", "KILL", "USER", USER)


def connect(servers: Cluster | Sentinels, password: str) -> meteor.Client:
    return meteor.connect(servers.url.replace("://", f"://{USER}:{password}@"), timeout=3)


def test_changed_password_ends_no_connection_and_is_needed_for_new_ones(
    servers: Cluster | Sentinels,
) -> None:
    set_password(servers, "old")
    with connect(servers, "old") as old:
        stream = old.stream("orders", create=True)
        with stream.publisher(delivery_timeout=10) as pub:
            assert pub.publish(b"0").result(10) == 0
            set_password(servers, "new")
            assert pub.publish(b"1").result(10) == 1, "the open connection did not continue"
            assert stream.describe().next == 2
            with connect(servers, "new") as new:
                assert new.stream("orders", create=False).describe().next == 2
            cut_connections(servers)
            with pytest.raises(meteor.AccessDenied) as denied:
                stream.describe()
            assert "password" in str(denied.value)
            assert not denied.value.retriable
            # The publisher may have sent this record just before it noticed the cut.
            with pytest.raises((meteor.AccessDenied, meteor.OutcomeUnknown), match="denied access"):
                pub.publish(b"2").result(10)
            with pytest.raises(meteor.AccessDenied, match="denied access"):
                pub.publish(b"3").result(10)
            set_password(servers, "old")  # the administrator changes it back
            assert stream.describe().next == 2, "the refused client did not continue"
            assert pub.publish(b"4").result(10) == 2
        stream.delete()


def test_client_with_a_wrong_password_gets_a_clear_error(servers: Cluster | Sentinels) -> None:
    set_password(servers, "right")
    with connect(servers, "wrong") as m, pytest.raises(meteor.AccessDenied, match="password"):
        m.streams()


def test_deleted_user_is_refused_until_it_exists_again(servers: Cluster | Sentinels) -> None:
    set_password(servers, "secret")
    with connect(servers, "secret") as m:
        assert m.streams() == []
        for server in data_servers(servers):
            with plain_client(server.url) as plain:
                plain.execute_command("ACL", "DELUSER", USER)  # also ends its connections
        with pytest.raises(meteor.AccessDenied):
            m.streams()
        set_password(servers, "secret")
        assert m.streams() == []


def test_no_client_is_refused_while_a_user_has_the_old_and_the_new_password(
    servers: Cluster | Sentinels,
) -> None:
    set_password(servers, "old")
    with connect(servers, "old") as old:
        assert old.streams() == []
        for server in data_servers(servers):
            with plain_client(server.url) as plain:
                plain.execute_command("ACL", "SETUSER", USER, ">new")
        cut_connections(servers)
        with connect(servers, "new") as new:
            assert new.streams() == old.streams() == []
