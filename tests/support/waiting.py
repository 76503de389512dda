"""Helpers that wait with a deadline, instead of sleeping."""

import threading
from collections.abc import Callable

from meteor_py.testing import eventually

__all__ = ["ends", "eventually", "running_threads"]


def ends(work: Callable[[], object], timeout_s: float = 5) -> bool:
    """Call ``work`` in another thread, and return whether it ends in time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def running_threads() -> int:
    """Return the number of running threads.

    ``threading.active_count`` also counts threads whose start was interrupted.
    """
    return sum(thread.ident is not None for thread in threading.enumerate())
