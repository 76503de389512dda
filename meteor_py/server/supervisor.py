"""The process that runs one embedded server, and stops it when its last user is gone.

The supervisor runs as a detached script in the server's directory. The rest of the package imports
only constants and ``clean_up`` from this file. Every start waits for the supervisor, so this file
uses only parts of the standard library that load within a millisecond.

The directory holds three lock files, which are the only shared state. The kernel releases a
``flock`` when its holder dies, for whatever reason.

- ``users.lock``: every user holds it shared. If a process gets it exclusively, there is no user,
  and none can arrive before the release. That process may stop the server.
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

TYPE_CHECKING = False  # do not import typing, which takes longer than the rest of this file
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # only the C part: `signal` takes 6 ms to build its enums

USERS_LOCK = "users.lock"
SUPERVISOR_LOCK = "watcher.lock"  # version 0.1, which may share the directory, uses this name
SERVER_LOCK = "server.lock"
CONFIG = "server.conf"
LOG = "server.log"
PID = "server.pid"
SOCKET = "meteor.sock"

#: Seconds between checks of ``users.lock``. Do not block in ``flock`` instead: the last user could
#: then not take the exclusive lock, which is how it knows that it is the last.
POLL_S = 0.1

#: Seconds that a server has to stop on its own before the supervisor kills it.
STOP_S = 5.0

#: Limits for glibc's malloc, in bytes, unless the environment sets them. By default, glibc may
#: return the memory of each large reply to the kernel. The next reply then takes new pages, which
#: can halve the speed of reading. With these limits, up to 32 MiB at the end of the heap stay free.
#: When a value above 4 MiB is deleted, its memory is returned at once.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(32 << 20), "MALLOC_MMAP_THRESHOLD_": str(4 << 20)}

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def main(arguments: list[str]) -> None:
    """Run the server in the working directory until it or its last user is gone.

    Arguments: the server program; the socket's path as in the configuration; ``keep`` or ``remove``
    for the directory when the server has ended; and the descriptors of the supervisor's and the
    server's locks, which are already taken.
    """
    binary, socket_path, fate, supervisor_lock, server_lock = arguments
    if os.fork():
        # The user reaps this process at once, and init reaps its child. So a program that waits for
        # any of its children never sees a process that it did not start.
        os._exit(0)
    os.umask(0o077)
    os.set_inheritable(int(supervisor_lock), False)
    os.set_inheritable(int(server_lock), True)
    # The user may have blocked or ignored signals, and exec preserves that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)

    directory = os.getcwd()
    # No O_CREAT: if the file is missing, the directory was deleted and no user can find the server.
    users = os.open(USERS_LOCK, os.O_RDWR)
    # A clean shutdown saves the data, but a private server has no data to save.
    gentle = signal.SIGTERM if fate == "keep" else signal.SIGKILL
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        _become_server(binary, supervisor, gentle)
    status, stopped = _wait_for_end(server, users, gentle)
    if status and not stopped:
        code = os.waitstatus_to_exitcode(status)
        how = f"ended with status {code}" if code >= 0 else f"was killed by signal {-code}"
        _log(f"{binary} {how}.")
    try:
        os.killpg(server, signal.SIGKILL)  # also kill the children of a killed server
    except OSError:
        pass
    # Do not use the directory's path: if the directory was deleted, a new one may have that path.
    clean_up(".", socket_path)
    # Remove the directory only if no user is left. A remaining user may still read the log or start
    # another server, and removes the files itself.
    if fate == "remove" and _is_free(users):
        _remove(directory)


def _become_server(binary: str, supervisor: int, gentle: int) -> None:
    """Turn this forked child into the server. Never returns."""
    try:
        # Use a new process group, so that the supervisor can also kill the server's children, which
        # rewrite its append-only file.
        os.setpgid(0, 0)
        _end_with_parent(gentle)
        if os.getppid() != supervisor:  # the supervisor died before the line above took effect
            os._exit(1)
        with open(PID, "w") as file:
            file.write(f"{os.getpid()}\n")
        for name, limit in MALLOC.items():
            os.environ.setdefault(name, limit)
        os.execv(binary, [binary, CONFIG])
    except OSError as exc:
        _log(f"cannot run {binary}: {exc.strerror}.")
    finally:
        os._exit(127)


def _log(message: str) -> None:
    try:
        os.write(2, f"meteor supervisor: {message}\n".encode(errors="surrogateescape"))
    except OSError:  # the disk may be full, but the next steps matter more
        pass


def _end_with_parent(signal_number: int) -> None:
    """Ask the kernel to send this process a signal when its parent is gone (Linux only).

    On other systems, if the supervisor is killed, its server runs until the next user opens the
    directory and stops it; see ``_start`` in ``embedded.py``.
    """
    if sys.platform == "linux":
        try:
            import ctypes
        except ImportError:  # Python was built without libffi: behave as on other systems
            return
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _wait_for_end(server: int, users: int, gentle: int) -> tuple[int, bool]:
    """Wait until the server ends. Stop it when its last user is gone.

    Return the wait status, and whether this process stopped the server.
    """
    # Python writes a byte to this pipe for each signal. This avoids a race between the check and
    # the wait.
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
    """Try to take the lock exclusively; return whether it was free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def clean_up(directory: str, socket_path: str) -> None:
    """Remove a stopped server's files from its directory, except its data, log and locks."""
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
    """Remove a directory like ``shutil.rmtree``, whose import would take 10 ms."""
    for folder, folders, files in os.walk(directory, topdown=False):
        for name in files:
            os.unlink(os.path.join(folder, name))
        for name in folders:
            os.rmdir(os.path.join(folder, name))
    os.rmdir(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
