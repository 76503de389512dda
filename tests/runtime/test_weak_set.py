"""A WeakSet does not keep its objects alive, and threads may change it at any time."""

from __future__ import annotations

import gc
from itertools import count

from meteor_py.runtime.weak_set import WeakSet
from tests.support.interrupts import interrupt_at


class Item:
    """An object that supports weak references. All items are equal."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item)

    __hash__ = None  # type: ignore[assignment]


def test_objects_are_compared_by_identity() -> None:
    kept, other = Item(), Item()
    items = WeakSet[Item]()
    for item in (kept, other, kept):
        items.add(item)
    items.discard(other)
    items.discard(other)
    assert [id(item) for item in items] == [id(kept)]
    items.clear()
    assert list(items) == []


def test_objects_are_not_kept_alive() -> None:
    items = WeakSet[Item]()
    items.add(Item())
    gc.collect()
    assert list(items) == []


def test_objects_can_be_added_at_any_moment_of_an_iteration() -> None:
    kept, added = [Item() for _ in range(3)], Item()
    items = WeakSet[Item]()
    for item in kept:
        items.add(item)
    for moment in count(1):
        if not interrupt_at(moment, lambda: items.add(added), lambda: list(items)):
            break
        assert len(list(items)) == 4
        items.discard(added)
    assert moment > 2
