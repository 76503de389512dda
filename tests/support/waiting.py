"""Waiting for a condition with a deadline, instead of sleeping."""

import threading
from collections.abc import Callable

from meteor_py.testing import eventually

__all__ = ["ends", "eventually"]


def ends(work: Callable[[], object], timeout_s: float = 5) -> bool:
    """Call ``work`` in another thread, and return whether it ends in time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()
