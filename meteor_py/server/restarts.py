"""A limit on restarts of an embedded server: if the server keeps exiting, the pause grows.

All users of a server share the limit through a file that lists the times of the last restarts.
They read and write the file only while holding ``watcher.lock``.
"""

from __future__ import annotations

import time
from pathlib import Path

RESTARTS = "restarts"

#: Only restarts in the last ``WINDOW_S`` seconds count.
WINDOW_S = 60.0

#: Seconds between the first two restarts in a window, and the longest pause. The pause doubles with
#: each restart. It stays short, so that a server whose disk was full soon runs again.
_PAUSE_S = (0.1, 5.0)


def wait_s(datadir: Path) -> float:
    """Return the seconds until the server may be restarted; 0 or less means now.

    The first restart in a minute does not wait.
    """
    now = time.time()
    times = _read(datadir, now)
    if not times:
        return 0.0
    first_s, longest_s = _PAUSE_S
    return times[-1] + min(first_s * 2.0 ** (len(times) - 1), longest_s) - now


def record(datadir: Path) -> None:
    """Record a restart that is about to be attempted."""
    now = time.time()
    times = [*_read(datadir, now), now]
    new = datadir / f"{RESTARTS}.new"
    new.touch(mode=0o600)
    new.write_text("".join(f"{at}\n" for at in times))
    new.replace(datadir / RESTARTS)


def _read(datadir: Path, now: float) -> list[float]:
    """Return the restarts in the window, oldest first. Ignore future times (from a wrong clock)."""
    try:
        lines = (datadir / RESTARTS).read_text().splitlines()
        times = [float(line) for line in lines]
    except (FileNotFoundError, ValueError):  # no restarts yet, or the file is damaged
        return []
    return sorted(at for at in times if now - WINDOW_S < at <= now)
