"""Lock files. The kernel releases a lock when the process that holds it ends."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Self

# Held while a lock file is opened or closed, and during a fork, so that no child inherits an
# unregistered file. Reentrant, because a finalizer may run at any time.
_fork_guard = threading.RLock()
_open_locks: set[Lock] = set()


class Lock:
    """An open lock file.

    The lock belongs to the open file, which a forked child inherits. The child would keep the file
    locked after its parent dies, so it closes its copy. This does not release the parent's lock.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = path
        with _fork_guard:
            self.fd = os.open(path, flags, 0o600)
            _open_locks.add(self)

    def take(self, how: int) -> bool:
        """Try to take the lock as ``LOCK_SH`` or ``LOCK_EX``, or to convert a lock already held.

        Return whether this succeeded. If a conversion fails, the previous lock is lost.
        """
        try:
            fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_in_place(self) -> bool:
        """Return whether the path still refers to this file. It may have been replaced."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        with _fork_guard:
            if self in _open_locks:
                _open_locks.remove(self)
                os.close(self.fd)
                self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _after_fork_in_child() -> None:
    for lock in tuple(_open_locks):
        lock.close()
    _fork_guard.release()


os.register_at_fork(
    before=_fork_guard.acquire,
    after_in_parent=_fork_guard.release,
    after_in_child=_after_fork_in_child,
)
