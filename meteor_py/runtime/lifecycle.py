"""The open objects of this process, and the three moments that end them.

An object with a thread, a lease or unsent records must not outlive its owner, so each kind of
object has one ``Registry``. ``close_owned`` closes what a client still has open. A handler at the
end of the interpreter closes everything. A forked child abandons what belongs to its parent. Each
of them takes the kinds in the order of ``ClosingOrder``.
"""

from __future__ import annotations

import atexit
import enum
import os
import weakref
from collections.abc import Callable, MutableSet, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

_T = TypeVar("_T")


class Closeable:
    """Base class for objects that a with block closes.

    If both the block and closing fail, the block's error is raised, with a note on the other.
    """

    def close(self) -> None:
        raise NotImplementedError  # pragma: no cover

    def _end_block(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end_block()
        except Exception as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"While closing the {type(self).__name__.lower()}: {failure}")


class ClosingOrder(enum.IntEnum):
    """The order in which kinds of objects are closed."""

    PEER_GROUPS = 1
    SHARED_SUBSCRIBERS = 2
    SUBSCRIBERS = 3
    #: Before archivers: a publisher may wait until an archiver has made room.
    PUBLISHERS = 4
    ARCHIVERS = 5


class Registry(Generic[_T]):
    """The open objects of one kind.

    Args:
        order: When this kind is closed.
        owner: Returns what an object belongs to; ``close_owned`` closes the objects of one owner.
        close: Closes objects whose owner is closed, and raises the first failure.
        at_exit: Closes objects at the end of the interpreter, and logs failures. It is also called
            without objects, for threads of those that were dropped.
        after_fork: Tells objects, in a forked child, that they belong to the parent.
        keep: Keep objects alive until they are discarded: one that the user dropped has work left.
    """

    def __init__(
        self,
        order: ClosingOrder,
        *,
        owner: Callable[[_T], object],
        close: Callable[[Sequence[_T]], None],
        at_exit: Callable[[Sequence[_T]], None],
        after_fork: Callable[[Sequence[_T]], None],
        keep: bool = False,
    ) -> None:
        self.order = order
        self._owner = owner
        self._close = close
        self._at_exit = at_exit
        self._after_fork = after_fork
        self._open: MutableSet[_T] = set() if keep else weakref.WeakSet()
        _registries.append(self)
        _registries.sort(key=lambda registry: registry.order)

    def add(self, opened: _T) -> None:
        self._open.add(opened)
        # Again each time: Python calls the last registered handler first, and ours must run before
        # the embedded server that these objects may be using is released.
        atexit.unregister(_close_all)
        atexit.register(_close_all)

    def discard(self, closed: _T) -> None:
        self._open.discard(closed)

    def objects(self) -> list[_T]:
        return list(self._open)

    def close_owned(self, owner: object) -> None:
        self._close([opened for opened in self.objects() if self._owner(opened) is owner])

    def close_at_exit(self) -> None:
        self._at_exit(self.objects())

    def abandon(self) -> None:
        self._after_fork(self.objects())
        self._open.clear()


#: Of all kinds, in their order.
_registries: list[Registry[Any]] = []


def close_owned(owner: object) -> None:
    """Close every open object of an owner, then raise the first failure."""
    _for_each_kind(lambda registry: registry.close_owned(owner))


def close_each(
    objects: Sequence[_T],
    close: Callable[[_T], object],
    failures: type[BaseException] | tuple[type[BaseException], ...] = Exception,
) -> None:
    """Close objects one after another, then raise the first failure."""
    first: BaseException | None = None
    for opened in objects:
        try:
            close(opened)
        except failures as error:
            first = first or error
    if first is not None:
        raise first


def _for_each_kind(work: Callable[[Registry[Any]], None]) -> None:
    """Call ``work`` for every kind, whatever happens to one; then raise what happened first.

    A Ctrl-C or ``SystemExit`` comes before errors: a program that handles those must still end.
    """
    failures: list[BaseException] = []
    for registry in _registries:
        try:
            work(registry)
        except BaseException as error:
            failures.append(error)
    if failures:
        interrupts = [error for error in failures if not isinstance(error, Exception)]
        raise (interrupts or failures)[0]


def _close_all() -> None:
    _for_each_kind(Registry.close_at_exit)


def _abandon_all() -> None:
    _for_each_kind(Registry.abandon)


os.register_at_fork(after_in_child=_abandon_all)
