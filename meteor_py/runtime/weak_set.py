"""A set that does not keep its objects alive, and that threads may change at any time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class WeakSet(Generic[_T]):
    """A set of weak references to objects, which it compares by identity.

    Other threads may change the set during an iteration. With a ``weakref.WeakSet``, the iteration
    could then fail with ``RuntimeError``.
    """

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, _T] = weakref.WeakValueDictionary()

    def add(self, item: _T) -> None:
        self._objects[id(item)] = item

    def discard(self, item: _T) -> None:
        self._objects.pop(id(item), None)

    def clear(self) -> None:
        self._objects.clear()

    def __iter__(self) -> Iterator[_T]:
        # Copies the references in one call into C, which no other thread can interrupt.
        references = self._objects.valuerefs()
        return iter([item for reference in references if (item := reference()) is not None])
