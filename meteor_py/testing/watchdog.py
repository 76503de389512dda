"""A small process that outlives the test process and kills any server left running."""

from __future__ import annotations

import subprocess
from pathlib import Path

# Standard input is a pipe from the test process. The pipe ends when that process dies, even by
# SIGKILL. The last line read holds the id of the process to kill, or is empty if there is none. The
# script kills the whole process group, because a server forks to rewrite its append-only file.
_PROGRAM = """
pid=
while read -r line; do pid=$line; done
[ -z "$pid" ] || kill -s KILL -- "-$pid"
rm -rf "$1"
"""


class Watchdog:
    """A process that kills a server and removes its directory if the test run is aborted.

    The watchdog waits until the pipe from the test process is closed. A forked child keeps the pipe
    open too, so the watchdog waits until both the test process and the child have ended.
    """

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _PROGRAM, "meteor-watchdog", str(directory)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # readers of the tests' output must not wait for this shell
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only the tests
        )

    def guard(self, pid: int | None) -> None:
        """Set the process to kill, which must lead its process group; None kills nothing."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % pid if pid else b"\n")
        except BrokenPipeError:
            pass  # the watchdog was killed, which does not affect the tests

    def close(self) -> None:
        """End the watchdog without killing the server. A second call does nothing."""
        self._process.kill()
        self._process.communicate()
