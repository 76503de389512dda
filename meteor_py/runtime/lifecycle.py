"""Registries for this process's open objects, and the events that close them.

An object with a thread, a lease or unsent records must not outlive its owner, so each kind of
object has one ``Registry``. Objects are closed in the order of ``ClosingOrder``. Closing a client
closes the objects that it owns (``close_owned``). A signal (``close_all``) and interpreter exit
close all objects. A forked child abandons its parent's objects.
"""

from __future__ import annotations

import atexit
import enum
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from meteor_py.runtime.weak_set import WeakSet

_T = TypeVar("_T")


class Closeable:
    """Base class for objects that a with block closes.

    If both the block and ``close`` raise, the block's error is raised, with a note about the error
    from ``close``.
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
                error.add_note(f"Closing the {type(self).__name__.lower()} also failed: {failure}")


class ClosingOrder(enum.IntEnum):
    """The order in which kinds of objects are closed."""

    PEER_GROUPS = 1
    SHARED_SUBSCRIBERS = 2
    SUBSCRIBERS = 3
    #: Before archivers: a publisher may be waiting for an archiver to make room.
    PUBLISHERS = 4
    ARCHIVERS = 5


@dataclass(eq=False)
class Registry(Generic[_T]):
    """The open objects of one kind."""

    order: ClosingOrder
    #: Returns an object's owner; ``close_owned`` closes one owner's objects.
    owner: Callable[[_T], object]
    #: Closes objects, and raises the first failure. Called when their owner is closed and, unless
    #: ``close_within`` is set, on a signal.
    close: Callable[[Sequence[_T]], None]
    #: Closes objects at interpreter exit, and logs failures. Called even if no object is open, to
    #: join the threads of objects that were garbage-collected.
    at_exit: Callable[[Sequence[_T]], None]
    #: Marks objects in a forked child as belonging to the parent.
    after_fork: Callable[[Sequence[_T]], None]
    #: Whether to keep objects alive until they are discarded, because they may have unfinished work
    #: after the user drops them.
    keep: bool = False
    #: Called on a signal to close objects within a number of seconds. Set if ``close`` may take
    #: longer.
    close_within: Callable[[Sequence[_T], float], None] | None = None

    def __post_init__(self) -> None:
        self._open: set[_T] | WeakSet[_T] = set() if self.keep else WeakSet()
        _registries.append(self)
        _registries.sort(key=lambda registry: registry.order)

    def add(self, opened: _T) -> None:
        self._open.add(opened)
        _register_at_exit()

    def discard(self, closed: _T) -> None:
        self._open.discard(closed)

    def objects(self) -> list[_T]:
        return list(self._open)

    def abandon(self) -> None:
        self.after_fork(self.objects())
        self._open.clear()


#: Fraction of ``close_all``'s time limit that objects with ``close_within`` may use. The rest is
#: left for joining their threads and closing the remaining objects.
_WITHIN_SHARE = 0.8

#: All registries, in closing order.
_registries: list[Registry[Any]] = []
#: The id of the process that has registered ``_close_all``; 0 if none has.
_registered_in = 0


def close_owned(owner: object) -> None:
    """Close an owner's open objects, then raise the first failure, if any."""
    _for_each_kind(lambda kind: kind.close([x for x in kind.objects() if kind.owner(x) is owner]))


def close_all(timeout_s: float) -> None:
    """Close every open object in this process, then raise the first failure, if any.

    A signal handler in the main thread may call this at any time. Publishers have most of
    ``timeout_s`` seconds to send their records, and then drop those that remain. Other objects have
    their own limits.
    """
    deadline = time.monotonic() + _WITHIN_SHARE * timeout_s

    def close(kind: Registry[Any]) -> None:
        if kind.close_within is None:
            kind.close(kind.objects())
        else:
            kind.close_within(kind.objects(), max(deadline - time.monotonic(), 0.0))

    _for_each_kind(close)


def close_each(
    objects: Sequence[_T],
    close: Callable[[_T], object],
    failures: type[BaseException] | tuple[type[BaseException], ...] = Exception,
) -> None:
    """Close objects one after another, then raise the first failure, if any."""
    first: BaseException | None = None
    for opened in objects:
        try:
            close(opened)
        except failures as error:
            first = first or error
    if first is not None:
        raise first


def _for_each_kind(work: Callable[[Registry[Any]], None]) -> None:
    """Call ``work`` for every registry, even if some calls fail. Then raise the first failure.

    ``KeyboardInterrupt`` and ``SystemExit`` take precedence over errors, so that the program ends
    even if it catches errors.
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


def _register_at_exit() -> None:
    """Make interpreter exit close all objects.

    Registers the handler once per process, because Python never frees the slot of a handler. A
    child of ``multiprocessing`` needs its own, because it starts without its parent's handlers.
    """
    global _registered_in
    if _registered_in != os.getpid():
        # Python calls the last registered handler first. This one must run before the handler of
        # ``weakref.finalize``, which releases the embedded server: objects may still need it. The
        # first finalizer registers that handler.
        weakref.finalize(_register_at_exit, int).detach()
        atexit.unregister(_close_all)  # a forked child may have its parent's
        atexit.register(_close_all)
        _registered_in = os.getpid()


def _close_all() -> None:
    _for_each_kind(lambda kind: kind.at_exit(kind.objects()))


def _abandon_all() -> None:
    _for_each_kind(Registry.abandon)


os.register_at_fork(after_in_child=_abandon_all)
