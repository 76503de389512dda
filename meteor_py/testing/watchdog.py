"""A small process that outlives the test process, and then ends what that one has left running."""

from __future__ import annotations

import subprocess
from pathlib import Path

# Its standard input is a pipe from the test process, and ends with it, however that comes about: a
# SIGKILL too. Each line is the process id to end then; an empty one, that there is none. It is the
# whole group that is killed, for a server forks when it rewrites its append-only file.
_PROGRAM = """
pid=
while read -r line; do pid=$line; done
[ -z "$pid" ] || kill -s KILL -- "-$pid"
rm -rf "$1"
"""


class Watchdog:
    """Guards a server and its directory: an aborted test run leaves neither behind.

    A forked child of the test process holds the pipe too, and counts as part of it.
    """

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _PROGRAM, "meteor-watchdog", str(directory)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # who reads the output of the tests need not wait for us
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the tests
        )

    def guard(self, pid: int | None) -> None:
        """From now on end this process, the leader of its group; None: there is none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"%d\n" % pid if pid else b"\n")
        except BrokenPipeError:
            pass  # somebody has killed it; the tests are none the worse for that

    def close(self) -> None:
        """End it without a deed. Twice is fine."""
        self._process.kill()
        self._process.communicate()
