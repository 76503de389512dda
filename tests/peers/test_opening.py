"""Opening, listing and deleting peer groups."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.errors import PeerError
from meteor_py.redis import keys
from tests.support.peering import GROUP, Open, ids, peer_groups
from tests.support.peering import open_group as open_group
from tests.support.servers import plain_client
from tests.support.waiting import eventually


def test_missing_group_is_not_created_with_create_false(any_url: str) -> None:
    with meteor.connect(any_url) as m:
        with pytest.raises(meteor.PeerGroupNotFound, match="no peer group 'workers'") as info:
            m.peer_group("workers", create=False)
        assert (info.value.group, m.peer_groups(), m.redis.keys("*")) == ("workers", [], [])
        with (
            m.peer_group("workers", ttl=3, election="random"),
            m.peer_group("workers", create=False) as seen,
        ):
            assert (seen.config.ttl, seen.config.election) == (3, "random")
            with pytest.raises(meteor.PeerError, match="exists with ttl"):
                m.peer_group("workers", ttl=4, create=False)
        with pytest.raises(meteor.PeerGroupNotFound, match="workers/g1"):
            m.peer_group("workers", instance="g1", create=False)


def test_deleted_group_leaves_no_keys(url: str) -> None:
    with meteor.connect(url) as m:
        other = m.peer_group("workers2")
        group = m.peer_group("workers")
        me = group.join("me")
        me.on("q")(lambda message: None)
        me.on_vote(lambda proposal: True)
        with me.leadership(20) as term:
            term.guard.set("a", "1")
        assert other.join().group is other
        group.all.send("q").result(20)
        assert group.propose("topic").result(20).passed
        group.delete()
        assert m.redis.keys("meteor:group:{workers}:*") == []
        assert m.peer_groups() == ["workers2"]


def test_group_recreated_during_deletion_is_listed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meteor.connect(url) as m, meteor.connect(url) as n:
        group, call = m.peer_group("workers"), m._connector.call

        def recreate(*args: Any, **settings: Any) -> Any:
            if args[0] == "SREM":
                n.peer_group("workers").close()
            return call(*args, **settings)

        monkeypatch.setattr(m._connector, "call", recreate)
        group.delete()
        assert n.peer_groups() == ["workers"]


def test_group_with_live_members_is_deleted_only_with_force(url: str, open_group: Open) -> None:
    one, two, observer = open_group(ttl=0.6), open_group(), open_group()
    with plain_client(url) as redis:
        redis.sadd(keys.PEERS, "left-over")
    assert peer_groups(one) == [GROUP]
    me = two.join("a")
    one.join("b")
    with pytest.raises(PeerError, match="has live members that joined elsewhere: 1"):
        one.delete()
    me.leave()
    assert ids(two) == ["b"]
    one.delete()
    assert one.closed
    assert peer_groups(one) == []
    eventually(lambda: observer._handle.view.incarnation == "" and not observer.members)
    with plain_client(url) as redis:  # an observer does not recreate the group
        assert redis.keys("meteor:group:*") == []
    two.join("c")  # a member that joins does
    eventually(lambda: ids(observer) == ["c"])


def test_live_members_recreate_a_deleted_group(open_group: Open) -> None:
    one, two = open_group(ttl=0.6), open_group()
    me = two.join()
    one.delete(force=True)
    before = me.id
    eventually(lambda: me.id != before and ids(two) == [me.id])


def test_group_can_be_opened_by_its_listed_name(url: str) -> None:
    with meteor.connect(url) as m, m.peer_group("cell", instance="c1") as group:
        me = group.join()
        (name,) = m.peer_groups()
        with m.peer_group(name, create=False) as same:
            assert (same.name, same.find(me.id) is not None) == ("cell/c1", True)
        for wrong in ("cell/", "/c1", "cell/c1/x"):
            with pytest.raises(ValueError, match="group"):
                m.peer_group(wrong)
        with pytest.raises(ValueError, match="group"):
            m.peer_group("cell/c1", instance="c2")


def test_explicit_member_expiration_none_must_match_the_setting(url: str) -> None:
    with meteor.connect(url) as m:
        m.peer_group("short", member_expiration=5).close()
        m.peer_group("short").close()
        with pytest.raises(PeerError, match=r"exists with member_expiration=5\.0, not None"):
            m.peer_group("short", member_expiration=None)
        m.peer_group("long", member_expiration=None).close()
        m.peer_group("long", member_expiration=None).close()
