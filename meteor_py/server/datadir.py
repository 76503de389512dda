"""Creating, checking and configuring an embedded server's data directory."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

from meteor_py.errors import ServerStartFailed
from meteor_py.server import supervisor
from meteor_py.server.lock import Lock

#: Maximum length in bytes of a unix socket's path that works on every system: macOS allows 104 with
#: the final NUL, Linux 108.
SOCKET_PATH_MAX_BYTES = 103

#: The lowest memory limit for a server, no matter how small the machine is.
MEMORY_MIN_BYTES = 256 << 20

#: If the log is larger than this, the next start rotates it.
LOG_MAX_BYTES = 1 << 20

PRIVATE_PREFIX = "meteor-private-"
STALE_S = 60.0  # after this time, a private directory without a locked file is a leftover

LOG_LINES = 10
LOG_START = "meteor: starting "  # the first log line of each run

CONFIG = """\
daemonize no
supervised no
protected-mode yes
bind 127.0.0.1
port {port}
unixsocket {socket_path}
unixsocketperm 700
loglevel notice
save ""
appendonly {appendonly}
appendfsync everysec
auto-aof-rewrite-min-size 256mb
maxmemory {memory}
maxmemory-policy noeviction
"""


class Address(NamedTuple):
    """Where a server listens, according to the files in its directory."""

    socket_path: str
    port: int  # 0 if the server does not listen on TCP
    password: str | None
    pid: int


def default_directory() -> Path:
    """Return the directory of the user's personal server.

    It is ``$XDG_STATE_HOME/meteor``, by default ``~/.local/state/meteor``.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says to ignore a relative path.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "meteor"


def kept_directory(directory: Path) -> Path:
    """Return the directory's real path, creating the directory if necessary.

    Refuse a directory that other users could change.

    Raises:
        ServerStartFailed: The directory belongs to another user. Or other users have access to it,
            and its files may not be those of an embedded server.
    """
    path = directory.expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    datadir = path.resolve()
    # Check both owners: the path may be a link, and the link's owner decides where it points.
    if {path.lstat().st_uid, datadir.lstat().st_uid} - {os.geteuid()}:
        raise ServerStartFailed(
            f"The embedded server's directory {path} belongs to another user, who could read and "
            "change its data. Choose a directory that belongs to you."
        )
    if not is_private(datadir):
        others_may_write = datadir.stat().st_mode & 0o022
        # Do not change the permissions of a directory that is not ours. If other users can write to
        # it, a lock file does not prove that it is ours: they may have created the file.
        ours = (datadir / supervisor.USERS_LOCK).exists() and not others_may_write
        if any(datadir.iterdir()) and not ours:
            raise _not_empty(path)
        datadir.chmod(0o700)
        if others_may_write and any(datadir.iterdir()):  # another user has just added files
            raise _not_empty(path)
    return datadir


def _not_empty(path: Path) -> ServerStartFailed:
    return ServerStartFailed(
        f"The directory {path} is not empty, and other users can read or change it. Choose an "
        f"empty directory for the embedded server, or check the files and run `chmod 700 {path}`."
    )


def private_directory() -> Path:
    """Create a temporary directory. Remove old ones whose user and supervisor were both killed."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > SOCKET_PATH_MAX_BYTES // 2:
        root = "/tmp"
    for entry in os.scandir(root):
        try:
            if entry.name.startswith(PRIVATE_PREFIX) and _is_leftover(Path(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:  # removed in the meantime
            pass
    return Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=root))


def _is_leftover(datadir: Path) -> bool:
    """Return whether the directory is not new, and no process holds any of its locks."""
    if not is_private(datadir) or time.time() - datadir.lstat().st_mtime < STALE_S:
        return False
    with (
        Lock(datadir / supervisor.USERS_LOCK) as users,
        Lock(datadir / supervisor.SUPERVISOR_LOCK) as supervising,
        Lock(datadir / supervisor.SERVER_LOCK) as server,
    ):
        return all(lock.take(fcntl.LOCK_EX) for lock in (users, supervising, server))


def is_private(path: str | Path) -> bool:
    """Return whether the path is this user's directory, and no other user can enter it."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def write_config(datadir: Path, keep: bool, tcp: bool, former: Address | None = None) -> str:
    """Write the server's configuration file; return the socket's path as in that file.

    Other processes use this file to find the server. The password is only in this file, not on the
    command line, which every user on the machine can read.

    Args:
        datadir: The server's directory.
        keep: Whether the server writes its data to disk.
        tcp: Whether the server also listens on a TCP port on 127.0.0.1.
        former: The address of the server to restart. Its socket, port and password are kept,
            because clients use them.
    """
    socket_path = _choose_socket_path(datadir, former)
    text = CONFIG.format(
        port=(former.port if former else free_port()) if tcp else 0,
        socket_path=socket_path,
        appendonly="yes" if keep else "no",
        memory=max(MEMORY_MIN_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2),
    )
    if tcp:
        password = (former and former.password) or os.urandom(24).hex()
        text += f"requirepass {password}\n"
    new = datadir / (supervisor.CONFIG + ".new")
    new.unlink(missing_ok=True)
    # Create a new file: an existing one may be a link, or open in another process.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o600), "w") as file:
        file.write(text)
    new.replace(datadir / supervisor.CONFIG)
    return socket_path


def _choose_socket_path(datadir: Path, restarted: Address | None) -> str:
    """Return a path in the directory or, if that is too long, in a separate directory."""
    if len(os.fsencode(datadir / supervisor.SOCKET)) <= SOCKET_PATH_MAX_BYTES:
        return supervisor.SOCKET  # relative: the directory's name may have special characters
    former = read_config(datadir).get("unixsocket", "")
    if os.path.isabs(former) and is_private(os.path.dirname(former)):
        return former  # a killed supervisor left it behind
    if restarted is not None:
        try:
            os.mkdir(os.path.dirname(restarted.socket_path), 0o700)  # the supervisor removed it
            return restarted.socket_path
        except OSError:
            pass  # another program has taken that name
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (re.fullmatch(r"/[\w/.-]{1,60}", root, re.ASCII) and is_private(root)):
        root = "/tmp"
    return os.path.join(tempfile.mkdtemp(prefix="meteor-", dir=root), supervisor.SOCKET)


def free_port() -> int:
    """Find a free port on 127.0.0.1 below the range that the kernel uses for outgoing connections.

    From that range, the kernel could assign a dead server's port to a client that keeps trying to
    reconnect. The client would connect to itself, and the server could not restart.
    """
    chooser = random.SystemRandom()  # programs that seed `random` would all choose the same port
    while True:
        port = chooser.randrange(10_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def read_config(datadir: Path) -> dict[str, str]:
    """Read the configuration of the running (or last killed) server; empty if there is no file."""
    try:
        lines = (datadir / supervisor.CONFIG).read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def open_log(datadir: Path) -> IO[bytes]:
    """Open the log for a new server, rotating it first if it is large."""
    path = datadir / supervisor.LOG
    if path.exists() and path.stat().st_size > LOG_MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    if path.is_symlink():
        path.unlink()
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "ab+", buffering=0)


def last_log_lines(datadir: Path) -> str:
    """Return the last lines of the most recent server's log."""
    try:
        log = (datadir / supervisor.LOG).read_text(errors="replace")
    except FileNotFoundError:
        return ""
    # Skip the rest of the LOG_START line, which names the program.
    lines = log.rpartition(LOG_START)[2].splitlines()[1:]
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])
