"""Waiting for a condition with a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

#: Seconds between two looks: at first short, since most conditions come true within milliseconds,
#: then longer, so that a long wait does not take the processor from what is waited for.
POLL_MIN_S = 0.001
POLL_MAX_S = 0.01

#: The part of the time waited so far that the next pause takes.
POLL_SHARE = 1 / 20


def eventually(
    condition: Callable[[], _T],
    timeout_s: float = 10,
    message: str = "the condition did not come true",
) -> _T:
    """Call ``condition`` until its result is truthy, and return that result.

    Args:
        condition: Called at least once. An exception that it raises is a failure of the test, not
            a reason to wait on.
        timeout_s: Seconds after which to give up. Be generous: only a failing test waits so long.
        message: What the error says; the last result is added.

    Raises:
        AssertionError: The time is over.

    >>> values = iter([None, "ready"])
    >>> eventually(lambda: next(values), 5, "it did not get ready")
    'ready'
    """
    __tracebackhide__ = True  # pytest then shows the line that waited in vain
    started = time.monotonic()
    while True:
        result = condition()
        if result:
            return result
        waited_s = time.monotonic() - started
        if waited_s >= timeout_s:
            raise AssertionError(f"{message} (waited {timeout_s:g} s, last result: {result!r})")
        time.sleep(min(max(waited_s * POLL_SHARE, POLL_MIN_S), POLL_MAX_S))
