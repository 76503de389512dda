"""The data directory of an embedded server: created, checked, configured."""

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
from typing import IO

from meteor_py.errors import ServerStartFailed
from meteor_py.server import supervisor
from meteor_py.server.lock import Lock

#: Bytes of the longest path that ``connect`` takes for a unix socket everywhere: macOS has 104
#: with the final NUL, Linux 108.
SOCKET_PATH_MAX_BYTES = 103

#: Memory that a server may take at least, however small the machine.
MEMORY_MIN_BYTES = 256 << 20

#: Size from which the log of former runs is put aside at the next start.
LOG_MAX_BYTES = 1 << 20

PRIVATE_PREFIX = "meteor-private-"
STALE_S = 60.0  # age from which a private directory without any lock is a leftover
LOG_LINES = 10
LOG_START = "meteor: starting "  # the first line of each run

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
maxmemory {memory}
maxmemory-policy noeviction
"""


def default_directory() -> Path:
    """Where the user's own kept server lives: ``$XDG_STATE_HOME/meteor``."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG rules say to ignore a relative path.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "meteor"


def kept_directory(directory: Path) -> Path:
    """Create the directory if necessary, and refuse one that other users could change.

    Raises:
        ServerStartFailed: It belongs to another user, or other users may enter it.
    """
    path = directory.expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    datadir = path.resolve()
    # Check both: the path may be a link, and another user's link would lead where that user likes.
    if {path.lstat().st_uid, datadir.lstat().st_uid} - {os.geteuid()}:
        raise ServerStartFailed(
            f"The directory {path} of the embedded server belongs to another user, who could "
            "read and change what is in it. Name a directory of your own."
        )
    if not is_private(datadir):
        # It would be rude to shut a directory that is in use for something else.
        if any(datadir.iterdir()) and not (datadir / supervisor.USERS_LOCK).exists():
            raise ServerStartFailed(
                f"The directory {path} has other files in it, and other users may enter it. "
                f"Name an empty directory for the embedded server, or run `chmod 700 {path}`."
            )
        datadir.chmod(0o700)
    return datadir


def private_directory() -> Path:
    """A new temporary directory; removes old ones whose user and supervisor were both killed."""
    root = tempfile.gettempdir()
    if len(os.fsencode(root)) > SOCKET_PATH_MAX_BYTES // 2:
        root = "/tmp"
    for entry in os.scandir(root):
        try:
            if entry.name.startswith(PRIVATE_PREFIX) and _is_leftover(Path(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:  # gone in the meantime
            pass
    return Path(tempfile.mkdtemp(prefix=PRIVATE_PREFIX, dir=root))


def _is_leftover(datadir: Path) -> bool:
    """Whether no process holds a lock there; a new directory may be about to be locked."""
    if not is_private(datadir) or time.time() - datadir.lstat().st_mtime < STALE_S:
        return False
    with (
        Lock(datadir / supervisor.USERS_LOCK) as users,
        Lock(datadir / supervisor.SUPERVISOR_LOCK) as supervising,
        Lock(datadir / supervisor.SERVER_LOCK) as server,
    ):
        return all(lock.take(fcntl.LOCK_EX) for lock in (users, supervising, server))


def is_private(path: str | Path) -> bool:
    """Whether this is a directory of this user that no other user may enter."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def write_config(datadir: Path, keep: bool, tcp: bool) -> str:
    """Write the server's configuration; return the socket's path as it stands there.

    Other processes find the server by this file. The password is only there: every user of the
    machine can read a command line.
    """
    socket_path = _choose_socket_path(datadir)
    text = CONFIG.format(
        port=free_port() if tcp else 0,
        socket_path=socket_path,
        appendonly="yes" if keep else "no",
        memory=max(MEMORY_MIN_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2),
    )
    if tcp:
        text += f"requirepass {os.urandom(24).hex()}\n"
    new = datadir / (supervisor.CONFIG + ".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(datadir / supervisor.CONFIG)
    return socket_path


def _choose_socket_path(datadir: Path) -> str:
    """A name in the directory or, if its path would be too long, a path in a short one."""
    if len(os.fsencode(datadir / supervisor.SOCKET)) <= SOCKET_PATH_MAX_BYTES:
        return supervisor.SOCKET  # relative: nothing in the directory's name can confuse the server
    former = read_config(datadir).get("unixsocket", "")
    if os.path.isabs(former) and is_private(os.path.dirname(former)):
        return former  # left by a supervisor that was killed
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (re.fullmatch(r"/[\w/.-]{1,60}", root, re.ASCII) and is_private(root)):
        root = "/tmp"
    return os.path.join(tempfile.mkdtemp(prefix="meteor-", dir=root), supervisor.SOCKET)


def free_port() -> int:
    """A free port of 127.0.0.1 below the range that the kernel uses for outgoing connections.

    Inside that range, a client that keeps trying the port of a dead server can be given this very
    port, connect to itself, and so keep the server from returning.
    """
    chooser = random.SystemRandom()  # a seeded one would choose the same in every process
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
    """What the configuration of the running (or last killed) server says."""
    try:
        lines = (datadir / supervisor.CONFIG).read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def open_log(datadir: Path) -> IO[bytes]:
    """Open the log for a new server; a large one of former servers is put aside."""
    path = datadir / supervisor.LOG
    if path.exists() and path.stat().st_size > LOG_MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    path.touch(mode=0o600)
    return open(path, "ab+", buffering=0)


def last_lines(log: IO[bytes]) -> str:
    """The last lines that the newest server has logged."""
    # Not read(): the server writes through the same open file, which has one position.
    written = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)
    lines = written.decode(errors="replace").rpartition(LOG_START)[2].splitlines()
    # The first is the rest of the line that we wrote ourselves.
    return "\n".join(f"  {line}" for line in lines[1:][-LOG_LINES:])


def last_lines_in(datadir: Path) -> str:
    """The same, of a server that another process has started."""
    with open(datadir / supervisor.LOG, "rb") as log:
        return last_lines(log)
