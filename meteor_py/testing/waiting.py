"""Wait for a condition with a deadline, instead of sleeping in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

#: Shortest and longest pause between checks, in seconds. Pauses start short, because most
#: conditions become true within milliseconds. They grow so that a long wait leaves the processor
#: to the code under test.
POLL_MIN_S = 0.001
POLL_MAX_S = 0.01

#: The next pause, as a fraction of the time waited so far.
POLL_SHARE = 1 / 20


def eventually(
    condition: Callable[[], _T],
    timeout_s: float = 10,
    message: str = "the condition did not become true",
) -> _T:
    """Call ``condition`` until its result is truthy, and return that result.

    Args:
        condition: Called at least once. An exception that it raises ends the wait.
        timeout_s: Maximum wait in seconds. Be generous: only a failing test waits that long.
        message: The error message. The timeout and the last result are appended to it.

    Raises:
        AssertionError: The timeout expired.

    >>> values = iter([None, "ready"])
    >>> eventually(lambda: next(values), 5, "the server did not become ready")
    'ready'
    """
    __tracebackhide__ = True  # pytest then shows the caller's line instead of this function
    started = time.monotonic()
    while True:
        result = condition()
        if result:
            return result
        waited_s = time.monotonic() - started
        if waited_s >= timeout_s:
            raise AssertionError(f"{message} (waited {timeout_s:g} s, last result: {result!r})")
        time.sleep(min(max(waited_s * POLL_SHARE, POLL_MIN_S), POLL_MAX_S))
