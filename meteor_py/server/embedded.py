"""An embedded server, opened and released by its users."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote

from meteor_py.errors import ServerStartFailed
from meteor_py.server import supervisor
from meteor_py.server.binary import find_server
from meteor_py.server.datadir import (
    LOG_START,
    kept_directory,
    last_lines,
    last_lines_in,
    open_log,
    private_directory,
    read_config,
    write_config,
)
from meteor_py.server.lock import Lock
from meteor_py.server.ping import Address, find_address, replies, shut_down

logger = logging.getLogger(__name__)

POLL_S = 0.002
TCP_TRIES = 3


class EmbeddedServer:
    """One user's hold on an embedded server, returned by ``open_embedded``.

    The server runs at least until ``close()`` or the end of this process, whichever is first. A
    forked child may use the server as long as its parent holds it, and does not hold it itself.
    """

    def __init__(
        self, users: Lock, directory: Path, address: Address, *, keep: bool, tcp: bool
    ) -> None:
        self.directory = directory
        self.socket_path = address.socket_path
        self.password = address.password
        #: The server's process id when it was opened.
        self.pid = address.pid
        self._tcp_port = address.port if tcp else 0
        # Runs when the object is collected or the interpreter exits, if close() never came.
        self._release = weakref.finalize(self, _release, users, directory, keep)

    @property
    def url(self) -> str:
        """The address for clients: the unix socket, or TCP if that was asked for."""
        return self._url(self.password)

    def close(self) -> None:
        """Let go of the server; the last user ends it and waits for that. Twice is fine."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        url = self._url(self.password and "***")
        return f"<EmbeddedServer {url} directory={str(self.directory)!r} pid={self.pid}>"

    def _url(self, password: str | None) -> str:
        login = f":{password}@" if password else ""
        if self._tcp_port:
            return f"redis://{login}127.0.0.1:{self._tcp_port}/0"
        return f"unix://{login}{quote(os.fsencode(self.socket_path))}"


def open_embedded(
    directory: str | Path | None = None, *, tcp: bool = False, timeout_s: float = 10.0
) -> EmbeddedServer:
    """Start an embedded server, or join the one that runs in the directory.

    Args:
        directory: Where the data is kept; all processes that open it share one server. None: a
            private server in a temporary directory, without persistence, deleted at the end.
        tcp: Listen on a free port of 127.0.0.1 too, with a random password. The process that
            starts the server decides.
        timeout_s: Seconds in which the server has to reply. Loading much data takes time.

    Raises:
        ServerNotFound: There is no server program.
        ServerStartFailed: It did not come up; the message ends with its log.
    """
    deadline = time.monotonic() + timeout_s
    keep = directory is not None
    try:
        datadir = private_directory() if directory is None else kept_directory(Path(directory))
        users = _hold(datadir, deadline)
        try:
            address = _reach(datadir, keep, tcp, deadline)
            return EmbeddedServer(users, datadir, address, keep=keep, tcp=tcp)
        except BaseException:
            _release(users, datadir, keep)
            raise
    except OSError as exc:
        raise ServerStartFailed(f"The embedded server cannot be started: {exc}.") from exc


def _hold(datadir: Path, deadline: float) -> Lock:
    """Become a user: from here on no other process stops the server."""
    while True:
        users = Lock(datadir / supervisor.USERS_LOCK)
        try:
            # Refused only while another process stops the former server.
            taken = _poll(partial(users.take, fcntl.LOCK_SH), deadline)
            if taken and users.is_in_place():
                return users
        except BaseException:
            users.close()
            raise
        users.close()
        if not taken:
            raise ServerStartFailed(
                f"The former embedded server in {datadir} has not ended in time. Try again later."
            )


def _release(users: Lock, datadir: Path, keep: bool) -> None:
    """Stop being a user; the last one ends the server and returns when all of it is gone."""
    if users.fd < 0:  # a forked child: the hold is its parent's
        return
    deadline = time.monotonic() + 2 * supervisor.STOP_S
    try:
        if users.take(fcntl.LOCK_EX):  # the last one, and nobody comes in before we let go
            # If the directory was deleted, another may be in its place: leave it to the supervisor.
            if users.is_in_place():
                _end(users, datadir, deadline)
        elif not users.take(fcntl.LOCK_SH):  # another one was the last, and is ending it
            _poll(partial(users.take, fcntl.LOCK_SH), deadline)
    except OSError as exc:
        logger.debug("The embedded server in %s is left to its supervisor: %s", datadir, exc)
    finally:
        users.close()
    if not keep:
        # The supervisor has done it only if it found nobody there.
        shutil.rmtree(datadir, ignore_errors=True)


def _end(users: Lock, datadir: Path, deadline: float) -> None:
    """Shut the server down and wait until its processes are gone."""
    # Opened before the files may vanish with a private directory.
    with (
        Lock(datadir / supervisor.SUPERVISOR_LOCK) as lock,
        Lock(datadir / supervisor.SERVER_LOCK) as server,
    ):

        def are_gone() -> bool:
            return lock.take(fcntl.LOCK_EX) and server.take(fcntl.LOCK_EX)

        ended = shut_down(datadir) or _poll(are_gone, time.monotonic() + 2 * supervisor.POLL_S)
        if not ended:
            users.close()  # still starting, or stuck: the supervisor has the means for both
        if not _poll(are_gone, deadline):
            logger.warning("The embedded server in %s has not ended yet.", datadir)
            return
        left = read_config(datadir).get("unixsocket")
        if left:  # by a supervisor that was killed; the locks keep others from starting one now
            supervisor.clean_up(str(datadir), left)


def _reach(datadir: Path, keep: bool, tcp: bool, deadline: float) -> Address:
    """Wait until a server answers; start one when there is none."""
    log: IO[bytes] | None = None  # of the server that we started
    tries = TCP_TRIES if tcp else 1
    try:
        while True:
            # Opened again each time: after a start the supervisor has the open file and its lock.
            with Lock(datadir / supervisor.SUPERVISOR_LOCK) as lock:
                if lock.take(fcntl.LOCK_EX):  # no supervisor, and nobody else can start one now
                    if log:
                        tries -= 1
                        _check_why_it_ended(datadir, log, tries)
                    log = _start(datadir, lock, keep, tcp)
                else:
                    address = find_address(datadir)
                    # Looked up twice, lest it was the address of the one before.
                    if address and replies(address) and find_address(datadir) == address:
                        break
            if time.monotonic() > deadline:
                said = last_lines(log) if log else last_lines_in(datadir)
                raise _start_failed(datadir, "did not answer in time", said)
            time.sleep(POLL_S)
    finally:
        if log:
            log.close()
    if tcp and not address.port:
        raise ServerStartFailed(
            f"The embedded server in {datadir} runs already, without TCP. "
            "Close all its users, or open it without tcp=True."
        )
    return address


def _start(datadir: Path, lock: Lock, keep: bool, tcp: bool) -> IO[bytes] | None:
    """Start a supervisor, which gets ``watcher.lock``, and return the log that it writes.

    None, and nothing is started, if there still is a server whose supervisor was killed.
    """
    with Lock(datadir / supervisor.SERVER_LOCK) as server:
        if not server.take(fcntl.LOCK_EX):
            # On Linux the kernel has told it to end, elsewhere we do.
            shut_down(datadir)
            return None
        if not sys.executable:
            raise ServerStartFailed(
                "An embedded server needs a Python program to supervise it, and sys.executable is "
                "empty. Start a server by other means, and connect to its address."
            )
        program = find_server()
        socket_path = write_config(datadir, keep, tcp)
        # Isolated (-I) and without site-packages (-S): quick, and nothing of the user's is run.
        command = [sys.executable, "-I", "-S", supervisor.__file__, str(program), socket_path]
        command += ["keep" if keep else "remove", str(lock.fd), str(server.fd)]
        log = open_log(datadir)
        try:
            log.write(LOG_START.encode() + os.fsencode(program) + b"\n")
            # In a session of its own, so that Ctrl-C in the terminal does not reach it. What we
            # wait for is only the moment until it has detached itself.
            subprocess.run(
                command,
                cwd=datadir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fd, server.fd),
                start_new_session=True,
                check=False,  # if it fails, the log says why
            )
        except BaseException:
            log.close()
            raise
        return log


def _check_why_it_ended(datadir: Path, log: IO[bytes], tries: int) -> None:
    """Raise, unless the port was taken by another just before and is worth another try."""
    said = last_lines(log)
    log.close()
    if not (tries and "in use" in said):
        raise _start_failed(datadir, "did not start", said)


def _start_failed(datadir: Path, what: str, said: str) -> ServerStartFailed:
    log = f"Its log ends with:\n{said}" if said else "Its log is empty."
    return ServerStartFailed(f"The embedded server in {datadir} {what}. {log}")


def _poll(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait until the condition holds, or the deadline (``time.monotonic``) has passed."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
