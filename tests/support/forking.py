"""Helpers that fork safely even if other threads are writing to the log."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable

from tests.support.waiting import eventually

#: Seconds after which a child that is still running counts as hung.
CHILD_S = 20.0


def fork() -> int:
    """Fork while no other thread is writing a log line.

    A child inherits its parent's locks. If another thread holds the stderr lock during the fork,
    the child hangs when it writes to the log, or when it flushes stderr on exit.
    """
    handlers = [*logging.getLogger().handlers, logging.lastResort]
    held = [handler for handler in handlers if handler is not None]
    for handler in held:
        handler.acquire()
    pid = os.fork()
    if pid:
        for handler in held:  # in the child, logging has replaced the locks
            handler.release()
    return pid


def exit_code(pid: int) -> int:
    """Wait for a child and return its exit code. If it hangs, kill it and raise AssertionError."""
    ended: list[int] = []

    def has_ended() -> bool:
        found, status = os.waitpid(pid, os.WNOHANG)
        ended.extend([status] if found else [])
        return bool(found)

    try:
        eventually(has_ended, CHILD_S, "the forked child hung")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(ended[0])


def in_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child; return the child's exit code (1 if ``work`` raised)."""
    child = fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return exit_code(child)
