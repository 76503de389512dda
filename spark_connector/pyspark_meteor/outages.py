"""Retries of calls to a server that restarts, fails over, or is unreachable for a while.

Without retries, each server restart would end every query. Spark does not retry calls that a source
or sink makes on the driver. In local mode, it does not retry tasks either. Every call that
``outlast`` makes is safe to repeat: it only reads, or the server recognizes the repetition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from meteor_py import ConnectionFailed
from meteor_py.runtime.backoff import pause_s

if TYPE_CHECKING:
    from pyspark_meteor.server import ServerOptions

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

#: First and longest pause between attempts, in seconds. The pause doubles each time; jitter then
#: shortens it by up to half.
_BACKOFF_S = (0.05, 2.0)


def outlast(server: ServerOptions, work: Callable[[], _T]) -> _T:
    """Call ``work`` and return its result. While the server is unavailable, retry.

    Args:
        work: A call that may be repeated, even if the server has executed it.

    Raises:
        ConnectionFailed: ``serverTimeout`` has passed since the first failure.
    """
    failures = 0
    deadline = 0.0
    while True:
        try:
            result = work()
        except ConnectionFailed as error:
            at = time.monotonic()
            failures += 1
            if failures == 1:
                deadline = at + server.timeout_s
            if at >= deadline:
                raise
            if failures == 1:
                _log.warning(
                    "%s Waiting up to %g seconds for the server (serverTimeout).",
                    *(error, server.timeout_s),
                )
            time.sleep(min(pause_s(failures, *_BACKOFF_S), deadline - at))
        else:
            if failures:
                _log.warning("The server is available again after %d failed attempts.", failures)
            return result
