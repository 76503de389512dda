"""Group properties: any client can set them, and every process sees changes in the same order."""

from __future__ import annotations

from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.peers.config import PROPERTIES_MAX
from tests.support.peering import LONG_S, Open, on_key
from tests.support.peering import open_group as open_group
from tests.support.waiting import eventually


def test_property_is_seen_by_every_process_and_reported_in_order(open_group: Open) -> None:
    one, two = open_group(ttl=LONG_S), open_group()
    seen: list[tuple[str, Any]] = []
    two.on_property(lambda name, value: seen.append((name, value)))
    one.set_property("limit", 7)
    assert one.properties == {"limit": 7}
    two.set_property("limit", {"a": [1]})
    two.set_property("mode", "slow")
    one.set_property("limit", None)
    eventually(lambda: len(seen) == 4)
    assert seen == [("limit", 7), ("limit", {"a": [1]}), ("mode", "slow"), ("limit", None)]
    assert one.properties == two.properties == {"mode": "slow"}
    late = open_group()
    assert late.properties == {"mode": "slow"}
    assert [event.property for event in late.watch(timeout=1, since=0)] == [n for n, _ in seen]


def test_setting_the_same_value_emits_no_event(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    group.set_property("limit", 7)
    view = group.view
    group.set_property("limit", 7)
    group.set_property("unknown", None)
    assert group.view == view


def test_properties_that_the_server_lost_are_reported_as_deleted(open_group: Open) -> None:
    group = open_group(ttl=0.5)
    group.set_property("limit", 7)
    seen: list[tuple[str, Any]] = []
    group.on_property(lambda name, value: seen.append((name, value)))
    on_key(group, "DEL", "state")
    group.join("a")  # creates the group again
    eventually(lambda: seen == [("limit", None)])
    assert group.properties == {}


def test_number_and_size_of_properties_are_limited(open_group: Open) -> None:
    group = open_group(ttl=LONG_S)
    with pytest.raises(ValueError, match="property value is limited to 4,096 bytes"):
        group.set_property("long", "x" * 5_000)
    with pytest.raises(TypeError):
        group.set_property("object", object())
    with pytest.raises(ValueError, match="property"):
        group.set_property("a b", 1)
    for number in range(PROPERTIES_MAX):
        group.set_property(f"p{number}", number)
    with pytest.raises(meteor.PeerError, match="100 properties"):
        group.set_property("more", 1)
    group.set_property("p7", "changed")
    group.set_property("p8", None)
    group.set_property("more", 1)
    group.delete()
    assert not group._handle.protocol.connector.redis.keys("meteor:group:*")
