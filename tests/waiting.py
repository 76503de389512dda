"""Waiting for a condition with a deadline: what tests do instead of sleeping."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01


def eventually(
    condition: Callable[[], T],
    timeout_s: float = 10,
    message: str = "the condition did not come true",
) -> T:
    """Call `condition` until its result is truthy, and return that result.

    An exception raised by `condition` is a failure of the test, not a reason to wait on.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() >= deadline:
            raise AssertionError(f"{message} (waited {timeout_s:g} s, last result: {result!r})")
        time.sleep(POLL_S)
