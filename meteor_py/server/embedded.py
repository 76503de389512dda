"""Opening, sharing and releasing an embedded server."""

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self
from urllib.parse import quote

from meteor_py.errors import ServerStartFailed
from meteor_py.server import restarts, supervisor
from meteor_py.server.binary import find_server
from meteor_py.server.datadir import (
    LOG_START,
    Address,
    kept_directory,
    last_log_lines,
    open_log,
    private_directory,
    read_config,
    write_config,
)
from meteor_py.server.lock import Lock
from meteor_py.server.ping import find_address, replies, shut_down

logger = logging.getLogger(__name__)

POLL_S = 0.002
#: Seconds between checks of a server that is slow to reply because it is loading data.
SLOW_POLL_S = 0.02
TCP_TRIES = 3


class EmbeddedServer:
    """An open embedded server, returned by ``open_embedded``.

    The server runs until ``close()`` or the end of this process, or longer if it has other users.
    If it exits or is killed, the next ``reach()`` by any user restarts it. A forked child may use
    the server while its parent keeps it open.
    """

    def __init__(
        self, users: Lock, directory: Path, address: Address, *, keep: bool, tcp: bool
    ) -> None:
        self.directory = directory
        #: Whether the server keeps its data when it stops.
        self.keep = keep
        self._users = users
        self._address = address  # as of the server's last reply
        self._tcp = tcp
        # Runs when the object is collected or the interpreter exits, unless close() was called.
        self._release = weakref.finalize(self, _release, users, directory, keep)

    @property
    def socket_path(self) -> str:
        """The path of the server's unix socket."""
        return self._address.socket_path

    @property
    def password(self) -> str | None:
        """The password, if the server also listens on TCP."""
        return self._address.password

    @property
    def pid(self) -> int:
        """The server's process id when it was last reached. A restart changes it."""
        return self._address.pid

    @property
    def url(self) -> str:
        """The address for clients: the unix socket, or TCP if it was requested."""
        return self._url(self.password)

    def reach(self, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until the server replies. Restart it if it has ended.

        After a restart, a private server is empty; any other server still has its data. Socket,
        TCP port and password stay the same, unless another program has taken the socket's
        directory or the port.

        Args:
            timeout_s: Seconds within which the server must reply.
            is_cancelled: Called repeatedly. If it returns true, the wait ends.

        Raises:
            ServerNotFound: No server program was found for the restart.
            ServerStartFailed: The server did not start or reply in time, it keeps exiting, it was
                closed, or the wait was cancelled.
        """
        address = find_address(self.directory)
        if not (address and replies(address, min(timeout_s, 1.0))):
            try:
                address = _reach(
                    self.directory,
                    self.keep,
                    bool(self._address.port),
                    time.monotonic() + timeout_s,
                    _Restart(self._address, self._check_open, is_cancelled),
                )
            except OSError as exc:
                raise ServerStartFailed(
                    f"Cannot restart the embedded server in {self.directory}: {exc}."
                ) from exc
        # Another user may have restarted the server without TCP.
        _check_tcp(self.directory, address, self._tcp)
        self._address = address

    def _check_open(self) -> None:
        """Raise if this object was closed, or the server has no user left.

        The supervisor would stop a server without users at once.
        """
        if not self._release.alive:
            raise ServerStartFailed(
                f"The embedded server in {self.directory} was closed. Connect again."
            )
        if self._users.fd >= 0:
            in_use = self._users.is_in_place()
        else:  # in a forked child, which does not count as a user
            with Lock(self.directory / supervisor.USERS_LOCK) as users:
                in_use = not users.take(fcntl.LOCK_EX)
        if not in_use:
            raise ServerStartFailed(
                f"The embedded server in {self.directory} was not restarted, because the process "
                "that opened it has ended or its directory was deleted. Connect again."
            )

    def close(self) -> None:
        """Release the server. The last user stops it and waits until it has exited. Idempotent."""
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
        if self._tcp:
            return f"redis://{login}127.0.0.1:{self._address.port}/0"
        return f"unix://{login}{quote(os.fsencode(self.socket_path))}"


def open_embedded(
    directory: str | Path | None = None, *, tcp: bool = False, timeout_s: float = 10.0
) -> EmbeddedServer:
    """Start an embedded server, or use the one that is running in the directory.

    Args:
        directory: Directory for the data. All processes that open it share one server. None starts
            a private server without persistence, in a temporary directory that is deleted when the
            server stops.
        tcp: Whether the server also listens on a free port on 127.0.0.1, with a random password.
            The process that starts the server decides.
        timeout_s: Seconds within which the server must reply. A server with a lot of data needs
            time to load it.

    Raises:
        ServerNotFound: No server program was found.
        ServerStartFailed: The server did not start or reply in time, the directory is not safe to
            use, or ``tcp`` is true but the server is already running without TCP. If the server
            failed, the message ends with the last lines of its log.
    """
    deadline = time.monotonic() + timeout_s
    keep = directory is not None
    try:
        datadir = private_directory() if directory is None else kept_directory(Path(directory))
        users = _hold(datadir, deadline)
        try:
            address = _reach(datadir, keep, tcp, deadline)
            _check_tcp(datadir, address, tcp)
            return EmbeddedServer(users, datadir, address, keep=keep, tcp=tcp)
        except BaseException:
            _release(users, datadir, keep)
            raise
    except OSError as exc:
        raise ServerStartFailed(f"Cannot start the embedded server: {exc}.") from exc


def _hold(datadir: Path, deadline: float) -> Lock:
    """Become a user of the server. From now on, no other process stops it."""
    while True:
        users = Lock(datadir / supervisor.USERS_LOCK)
        try:
            # This fails only while another process is stopping the previous server.
            taken = _poll(partial(users.take, fcntl.LOCK_SH), deadline)
            if taken and users.is_in_place():
                return users
        except BaseException:
            users.close()
            raise
        users.close()
        if not taken:
            raise ServerStartFailed(
                f"The previous embedded server in {datadir} did not stop in time. Try again."
            )


def _release(users: Lock, datadir: Path, keep: bool) -> None:
    """Stop being a user. The last user stops the server and waits until its processes are gone."""
    if users.fd < 0:  # in a forked child, whose parent is the user
        return
    deadline = time.monotonic() + 2 * supervisor.STOP_S
    try:
        if users.take(fcntl.LOCK_EX):  # we are the last user, and the lock keeps others out
            # If the directory was deleted, the path may belong to a new one. Leave the server to
            # its supervisor.
            if users.is_in_place():
                _stop(users, datadir, deadline)
        elif not users.take(fcntl.LOCK_SH):  # another process is stopping the server
            _poll(partial(users.take, fcntl.LOCK_SH), deadline)
    except OSError as exc:
        logger.debug("Leaving the embedded server in %s to its supervisor: %s", datadir, exc)
    finally:
        users.close()
    if not keep:
        # The supervisor removes the directory only if no user is left when the server ends.
        shutil.rmtree(datadir, ignore_errors=True)


def _stop(users: Lock, datadir: Path, deadline: float) -> None:
    """Shut the server down and wait until its processes are gone."""
    # Open the lock files now: the supervisor deletes a private directory with the files in it.
    with (
        Lock(datadir / supervisor.SUPERVISOR_LOCK) as lock,
        Lock(datadir / supervisor.SERVER_LOCK) as server,
    ):

        def are_gone() -> bool:
            return lock.take(fcntl.LOCK_EX) and server.take(fcntl.LOCK_EX)

        stopped = shut_down(datadir) or _poll(are_gone, time.monotonic() + 2 * supervisor.POLL_S)
        if not stopped:
            users.close()  # the server is still starting, or stuck: the supervisor will stop it
        if not _poll(are_gone, deadline):
            logger.warning("The embedded server in %s has not stopped yet.", datadir)
            return
        leftover = read_config(datadir).get("unixsocket")
        if leftover:  # its supervisor was killed; our locks prevent a new start
            supervisor.clean_up(str(datadir), leftover)


@dataclass(frozen=True)
class _Restart:
    """The conditions for restarting a server that has ended."""

    #: The address at which clients expect the server; None chooses another port.
    former: Address | None
    #: Raises if the server must not be restarted.
    check: Callable[[], None]
    is_cancelled: Callable[[], bool]


def _reach(
    datadir: Path, keep: bool, tcp: bool, deadline: float, restart: _Restart | None = None
) -> Address:
    """Wait until a server replies; start one if there is none."""
    started = False
    tries = TCP_TRIES if tcp else 1
    eager_until = time.monotonic() + 100 * POLL_S
    while True:
        if restart is not None and restart.is_cancelled():
            raise ServerStartFailed(
                f"The wait for the embedded server in {datadir} was interrupted."
            )
        # Reopen the file each time: after a start, the supervisor owns the open file and its lock.
        with Lock(datadir / supervisor.SUPERVISOR_LOCK) as lock:
            if lock.take(fcntl.LOCK_EX):  # no supervisor is running, and only we can start one
                if started:
                    tries -= 1
                    # Retry only if another process took the port.
                    if not (tries and "in use" in last_log_lines(datadir)):
                        raise _start_failed(datadir, "did not start")
                    restart = restart and replace(restart, former=None)
                if started or restart is None or _may_restart(datadir, restart, deadline):
                    started = _start(datadir, lock, keep, tcp, restart)
            else:
                address = find_address(datadir)
                left_s = min(max(deadline - time.monotonic(), POLL_S), 1.0)
                # Find the address twice: the first result may be the previous server's.
                if address and replies(address, left_s) and find_address(datadir) == address:
                    return address
        if time.monotonic() > deadline:
            raise _start_failed(datadir, "did not reply in time")
        time.sleep(POLL_S if time.monotonic() < eager_until else SLOW_POLL_S)


def _check_tcp(datadir: Path, address: Address, tcp: bool) -> None:
    if tcp and not address.port:
        raise ServerStartFailed(
            f"The embedded server in {datadir} is already running without TCP. "
            "End all processes that use it, or open it without tcp=True."
        )


def _may_restart(datadir: Path, restart: _Restart, deadline: float) -> bool:
    """Return whether the server may be restarted now. Raise if the wait would take too long."""
    restart.check()
    wait_s = restarts.wait_s(datadir)
    if time.monotonic() + wait_s > deadline:
        problem = f"keeps exiting; the next restart is allowed in {wait_s:.1f} seconds"
        raise _start_failed(datadir, problem)
    return wait_s <= 0


def _start(datadir: Path, lock: Lock, keep: bool, tcp: bool, restart: _Restart | None) -> bool:
    """Start a supervisor, which inherits ``watcher.lock`` and ``server.lock``.

    If a server is still running but its supervisor was killed, shut that server down and return
    False.
    """
    with Lock(datadir / supervisor.SERVER_LOCK) as server:
        if not server.take(fcntl.LOCK_EX):
            # On Linux, the kernel has already told the server to stop. On other systems, this does.
            shut_down(datadir)
            return False
        if not sys.executable:
            raise ServerStartFailed(
                "The embedded server needs a Python interpreter as its supervisor, but "
                "sys.executable is empty. Start a server yourself, and connect to its address."
            )
        program = find_server()
        if restart is not None:
            # Before starting, so that the restart counts even if this process dies.
            restarts.record(datadir)
            logger.warning("The embedded server in %s has exited. Restarting it.", datadir)
        former = None if restart is None else restart.former
        socket_path = write_config(datadir, keep, tcp, former)
        # Run isolated (-I) and without site-packages (-S): this is fast, and runs no user code.
        command = [sys.executable, "-I", "-S", supervisor.__file__, str(program), socket_path]
        command += ["keep" if keep else "remove", str(lock.fd), str(server.fd)]
        with open_log(datadir) as log:
            log.write(LOG_START.encode() + os.fsencode(program) + b"\n")
            # Use a new session, so that Ctrl-C in the terminal does not reach the supervisor. This
            # call returns as soon as the supervisor has detached itself.
            subprocess.run(
                command,
                cwd=datadir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock.fd, server.fd),
                start_new_session=True,
                check=False,  # after a failure, the log says why
            )
    return True


def _start_failed(datadir: Path, problem: str) -> ServerStartFailed:
    log = last_log_lines(datadir)
    ending = f"Its log ends with:\n{log}" if log else "Its log is empty."
    return ServerStartFailed(f"The embedded server in {datadir} {problem}. {ending}")


def _poll(condition: Callable[[], bool], deadline: float) -> bool:
    """Wait until the condition holds or the deadline has passed; return whether it holds."""
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
