"""A small process that outlives the test process and kills servers that it left running."""

from __future__ import annotations

import subprocess
from pathlib import Path

# Its standard input is a pipe from the test process and ends when that process dies, even by
# SIGKILL. Each line is the process id to kill then; an empty line means none. It kills the whole
# process group, because a server forks when it rewrites its append-only file.
_PROGRAM = """
pid=
while read -r line; do pid=$line; done
[ -z "$pid" ] || kill -s KILL -- "-$pid"
rm -rf "$1"
"""


class Watchdog:
    """Guards a server and its directory, so that an aborted test run leaves neither behind.

    A forked child of the test process also holds the pipe: the watchdog waits for both.
    """

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _PROGRAM, "meteor-watchdog", str(directory)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # readers of the tests' output must not wait for this
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the tests only
        )

    def guard(self, pid: int | None) -> None:
        """Set the process to kill, which leads its process group; None = none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % pid if pid else b"\n")
        except BrokenPipeError:
            pass  # the watchdog was killed, which does not affect the tests

    def close(self) -> None:
        """End the watchdog without killing the server. A second call does nothing."""
        self._process.kill()
        self._process.communicate()
