"""Distributed groups are begun only if that is asked for, and nothing is left of a deleted one."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor


def test_a_group_that_does_not_exist_is_not_begun_unless_that_is_meant(any_url: str) -> None:
    with meteor.connect(any_url) as m:
        with pytest.raises(
            meteor.PeerGroupNotFound, match="no distributed group 'workers'"
        ) as info:
            m.group("workers", create=False)
        assert (info.value.group, m.groups(), m.redis.keys("*")) == ("workers", [], [])
        with m.group("workers", ttl=3, election="random"), m.group("workers", create=False) as seen:
            assert (seen.config.ttl, seen.config.election) == (3, "random")
            with pytest.raises(meteor.PeerError, match="exists with ttl"):
                m.group("workers", ttl=4, create=False)
        with pytest.raises(meteor.PeerGroupNotFound, match="workers/g1"):
            m.group("workers", instance="g1", create=False)


def test_nothing_is_left_of_a_deleted_group(url: str) -> None:
    with meteor.connect(url) as m:
        other = m.group("workers2")
        group = m.group("workers")
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
        assert m.groups() == ["workers2"]


def test_a_group_that_is_begun_anew_while_it_is_deleted_is_listed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meteor.connect(url) as m, meteor.connect(url) as n:
        group, call = m.group("workers"), m.call

        def begin_anew(*args: Any, **settings: Any) -> Any:
            if args[0] == "SREM":
                n.group("workers").close()
            return call(*args, **settings)

        monkeypatch.setattr(m, "call", begin_anew)
        group.delete()
        assert n.groups() == ["workers"]
