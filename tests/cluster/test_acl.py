"""The roles in docs/acl.md work on a cluster, with the changes that the page describes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.support.acl_server import PAGE, roles
from tests.support.servers import binaries

GUARD = "~meteor:{orders}:guard"
LISTING = ["+cluster|countkeysinslot", "+cluster|getkeysinslot"]


def on_a_cluster(role: str, rules: list[str]) -> list[str]:
    """Change a role's rules as the page describes."""
    outer, *selectors = re.split(r" (?=\()", " ".join(rules))
    parts = [outer, *(selector.strip("()") for selector in selectors)]
    for number, part in enumerate(parts):
        words = part.split()
        if "+evalsha" in words and not {"~meteor:*", "~meteor:group:{workers}:*"} & set(words):
            parts[number] = f"{GUARD} {part}"
    outer, *rest = parts
    words = [*outer.split(), "+cluster|slots", *(LISTING if role == "admin" else [])]
    return [*words, *(f"({part})" for part in rest)]


@pytest.fixture(scope="module", params=["valkey", "redis"])
def guarded(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster on which the roles are defined."""
    program = binaries().get(request.param)
    if program is None:
        pytest.skip("redis-server is not on PATH.")
    with Cluster(program=program) as cluster:
        for node in cluster.nodes:
            for name, rules in roles().items():
                if name != "default":  # stays enabled for the tests' own clients
                    node.ask("ACL", "SETUSER", name, "reset", *on_a_cluster(name, rules))
        with connect(cluster, "admin") as admin:
            admin.stream("orders", capacity=100, ordering_key="key")
        with connect(cluster, "loader") as loader:
            loader.load_scripts()
        yield cluster


def connect(cluster: Cluster, role: str) -> meteor.Client:
    return meteor.connect(cluster.url.replace("://", f"://{role}:{role}-password@"))


def test_page_describes_every_change_to_the_roles() -> None:
    (section,) = re.findall(r"^## On a cluster\n(.*?)^## ", PAGE.read_text(), re.DOTALL | re.M)
    for rule in (GUARD, "+cluster|slots", *LISTING):
        assert rule in section


def test_roles_can_publish_read_confirm_and_consume(guarded: Cluster) -> None:
    with connect(guarded, "publisher") as m, m.stream("orders", create=False).publisher() as pub:
        first = pub.publish(b"hello", key=b"k").result()
    for role in ("subscriber", "admin"):
        with connect(guarded, role) as m:
            assert m.stream("orders", create=False).describe().next == first + 1
    with (
        connect(guarded, "member") as m,
        m.stream("orders", create=False).subscriber(group="g", initial_offset="earliest") as sub,
    ):
        assert sub.poll(5).values()[-1] == b"hello"
        sub.confirm().result(5)
    with (
        connect(guarded, "consumer") as m,
        m.stream("orders", create=False).shared_subscriber("w", initial_offset="earliest") as work,
    ):
        (record, *_) = work.poll(5)
        record.ack()


def test_peer_can_join_a_group(guarded: Cluster) -> None:
    with connect(guarded, "admin") as admin:
        admin.peer_group("workers").close()
    with connect(guarded, "peer") as m, m.peer_group("workers") as group:
        member = group.join("one")
        assert [each.id for each in group.members] == ["one"]
        member.leave()


def test_admin_can_delete_a_stream(guarded: Cluster) -> None:
    with connect(guarded, "admin") as admin:
        stream = admin.stream("temporary", create=True)
        with stream.publisher() as pub:
            pub.publish(b"x").result()
        stream.delete()
        assert "temporary" not in admin.streams()


def test_role_without_access_to_the_guard_key_is_refused(guarded: Cluster) -> None:
    for node in guarded.nodes:
        rules = [word.replace("publisher-", "old-") for word in roles()["publisher"]]
        node.ask("ACL", "SETUSER", "old", "reset", *rules, "+cluster|slots")
    with (
        connect(guarded, "old") as m,
        m.stream("orders", create=False).publisher(delivery_timeout=2) as pub,
        pytest.raises(meteor.AccessDenied),
    ):
        pub.publish(b"x").result(5)
