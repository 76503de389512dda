"""The process that runs one embedded server, and stops it when its last user is gone.

It is started by its path, detached, in the directory of the server; the rest of the package imports
no more of it than the names of the files. Every start waits for it, so it uses the standard library
only, and of that only what loads in a millisecond.

The directory holds three lock files. The kernel drops a ``flock`` when its holder dies, for
whatever reason, and these locks are the only state:

- ``users.lock``: every user holds it shared. A process that gets it exclusively knows that there is
  no user, and that none can arrive before it lets go: it may stop the server.
- ``watcher.lock``: the supervisor holds it exclusively. A process that gets it may start a
  supervisor.
- ``server.lock``: the supervisor and, by inheritance, the server and its children hold it. While
  one of them lives, no second server can touch the data, even if the supervisor was killed.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time

TYPE_CHECKING = False  # importing it from typing takes longer than all that this file does
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # the C part: the enums of `signal` itself take 6 ms to build

USERS_LOCK = "users.lock"
SUPERVISOR_LOCK = "watcher.lock"  # the name in version 0.1, which may share the directory
SERVER_LOCK = "server.lock"
CONFIG = "server.conf"
LOG = "server.log"
PID = "server.pid"
SOCKET = "meteor.sock"

#: Seconds between two looks at ``users.lock``. Looking, and not waiting in ``flock``, leaves the
#: last user able to see that it is the last: no other process wants the exclusive lock.
POLL_S = 0.1

#: Seconds that a server gets to end by itself before it is killed.
STOP_S = 5.0

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def main(arguments: list[str]) -> None:
    """Run the server in the working directory until it or its last user is gone.

    Arguments: the server program, the socket as the configuration names it, ``keep`` or
    ``remove`` (the directory, at the end), and the descriptors of the supervisor's and the server's
    lock, both held.
    """
    binary, socket_path, fate, supervisor_lock, server_lock = arguments
    if os.fork():
        # The user reaps this one at once, and init the other: a program that waits for its
        # children never meets one that it did not start.
        os._exit(0)
    os.umask(0o077)
    os.set_inheritable(int(supervisor_lock), False)
    os.set_inheritable(int(server_lock), True)
    # The user may have blocked or ignored signals, and both outlive an exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)

    directory = os.getcwd()
    # Not O_CREAT: without the file the directory was deleted, and nobody could find the server.
    users = os.open(USERS_LOCK, os.O_RDWR)
    # Data is worth a clean end; a temporary server has nothing to save.
    gentle = signal.SIGTERM if fate == "keep" else signal.SIGKILL
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        _become_server(binary, supervisor, gentle)
    status, stopped = _wait_for_end(server, users, gentle)
    if status and not stopped:
        code = os.waitstatus_to_exitcode(status)
        how = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
        print(f"meteor supervisor: {binary} {how}.", file=sys.stderr, flush=True)
    try:
        os.killpg(server, signal.SIGKILL)  # what a killed server had forked
    except OSError:
        pass
    # Not by its path: there may be another directory now in place of a deleted one.
    clean_up(".", socket_path)
    # A user that is still there may want to read the log, or start another; it removes the files.
    if fate == "remove" and _is_free(users):
        _remove(directory)


def _become_server(binary: str, supervisor: int, gentle: int) -> None:
    """Turn this forked child into the server; never returns."""
    try:
        # A group of its own, so that what it forks (rewriting its log) can be ended with it.
        os.setpgid(0, 0)
        _end_with_parent(gentle)
        if os.getppid() != supervisor:  # killed before the line above could take effect
            os._exit(1)
        with open(PID, "w") as file:
            file.write(f"{os.getpid()}\n")
        os.execv(binary, [binary, CONFIG])
    except OSError as exc:
        problem = f"meteor supervisor: cannot run {binary}: {exc.strerror}."
        print(problem, file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _end_with_parent(signal_number: int) -> None:
    """Ask the kernel to send this process a signal when its parent is gone (Linux only).

    Elsewhere a server whose supervisor was killed lives on until the next one opens its directory
    and ends it: see ``_start`` in ``embedded.py``.
    """
    if sys.platform == "linux":
        try:
            import ctypes
        except ImportError:  # a Python built without libffi: as on the other systems
            return
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _wait_for_end(server: int, users: int, gentle: int) -> tuple[int, bool]:
    """Wait for the server's end, or for that of its users and then end it.

    Returns the wait status, and whether it was this process that stopped the server.
    """
    # Python writes a byte to the pipe for each signal: no race between a look and the wait.
    wakeup, writer = os.pipe()
    os.set_blocking(wakeup, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    asked_to_end = False

    def ask_to_end(_number: int, _frame: object) -> None:
        nonlocal asked_to_end
        asked_to_end = True

    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.signal(signal.SIGTERM, ask_to_end)
    kill_at: float | None = None
    while True:
        ended, status = os.waitpid(server, os.WNOHANG)
        if ended:
            return status, kill_at is not None
        if kill_at is None and (asked_to_end or _is_free(users)):
            os.kill(server, gentle)
            kill_at = time.monotonic() + STOP_S
        elif kill_at is not None and time.monotonic() > kill_at:
            os.kill(server, signal.SIGKILL)
        if select.select([wakeup], [], [], POLL_S)[0]:
            os.read(wakeup, 64)


def _is_free(lock: int) -> bool:
    """Take the lock exclusively, if nobody holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def clean_up(directory: str, socket_path: str) -> None:
    """Remove what a server that has ended leaves in its directory, besides data, log and locks."""
    for name in (socket_path, CONFIG, PID):
        try:
            os.unlink(os.path.join(directory, name))
        except OSError:
            pass
    if os.path.isabs(socket_path):
        try:
            os.rmdir(os.path.dirname(socket_path))
        except OSError:
            pass


def _remove(directory: str) -> None:
    """``shutil.rmtree``, without the 10 ms that importing it takes."""
    for folder, folders, files in os.walk(directory, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
        for name in folders:
            os.rmdir(os.path.join(folder, name))
    os.rmdir(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
