"""Asking the archiver of a stream, wherever it runs, to archive everything at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from meteor_py.log.handle import StreamHandle
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import REQUEST_FLUSH, Script

_POLL_S = 0.02


def flush(stream: StreamHandle, timeout_s: float, error: Callable[[], Exception | None]) -> int:
    """Have everything that is in the stream now archived, and wait for it.

    Args:
        stream: The stream.
        timeout_s: Seconds to wait.
        error: Returns what keeps an archiver of this process from archiving, if something does.

    Returns:
        The end of what is archived.

    Raises:
        StoreUnavailable: The archiver did not finish in time.
    """
    deadline = time.monotonic() + timeout_s
    end = int(run_archive_script(stream, REQUEST_FLUSH)[1])
    while (archived := stream.archived_bounds()[1]) < end:
        if time.monotonic() >= deadline:
            raise reply_errors.not_archived(stream.name, archived, end, timeout_s, error())
        time.sleep(_POLL_S)
    return archived


def run_archive_script(
    stream: StreamHandle, script: Script, *args: int, group_keys: list[str] | None = None
) -> list[bytes]:
    """Run a script that works on the archive of a stream and return its reply.

    Raises:
        StoreMismatch: The stream has no store.
        StreamNotFound, LogTruncated: The stream was deleted, or recreated.
    """
    script_keys = [keys.meta(stream.name), *(group_keys or [])]
    reply: list[bytes] = stream.run(script, [stream.incarnation, *args], script_keys)
    if reply[0] == b"NOSTORE":
        raise reply_errors.no_store(stream.name)
    return reply
