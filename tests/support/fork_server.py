"""The process that forks each `PreloadedProcess`. It imports the modules once, for all of them."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
import time
import types
import warnings
from importlib import import_module
from typing import Any, TextIO

from meteor_cli.main import COMMANDS

#: Number of file descriptors sent with a request: connection, stdin, stdout, stderr.
_FILES = 4


class _Request:
    """A process to start: its arguments, standard files, working directory and environment."""

    def __init__(self, connection: socket.socket, files: list[int]) -> None:
        with connection.makefile("rb") as whole:
            self._options: dict[str, Any] = json.load(whole)
        self.arguments: list[str] = self._options["arguments"]
        self._files = files

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def apply(self) -> None:
        """Set up the standard streams, working directory and environment, as in a new process."""
        if self._options["session"]:
            os.setsid()
        for number, file in enumerate(self._files):
            os.dup2(file, number)
            os.close(file)
        if self._options["terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(self._options["folder"])
        os.environ.clear()
        os.environ.update(self._options["environment"])
        time.tzset()
        _set_file("stdin", open(0, encoding="utf-8", closefd=False))  # noqa: SIM115
        buffering = 1 if os.isatty(1) else -1
        _set_file("stdout", open(1, "w", buffering, "utf-8", closefd=False))  # noqa: SIM115
        escaped = "backslashreplace"
        _set_file("stderr", open(2, "w", 1, "utf-8", escaped, closefd=False))  # noqa: SIM115

    def run(self) -> None:
        """Run the requested arguments, like ``python ARGUMENTS``."""
        arguments = self.arguments
        while arguments[0] == "-W":
            warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
            arguments = arguments[2:]
        match arguments:
            case ["-c", code, *others]:
                sys.argv, sys.path[0] = ["-c", *others], ""
                main = types.ModuleType("__main__")
                sys.modules["__main__"] = main
                exec(compile(code, "<string>", "exec"), main.__dict__)
            case ["-m", module, *others]:
                sys.argv, sys.path[0] = [module, *others], os.getcwd()
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case [path, *others]:
                sys.argv, sys.path[0] = [path, *others], os.path.dirname(path)
                runpy.run_path(path, run_name="__main__")


def _set_file(name: str, file: TextIO) -> None:
    setattr(sys, name, file)
    setattr(sys, f"__{name}__", file)


class _ForkServer:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: dict[int, socket.socket] = {}
        self._ended, self._wake = socket.socketpair()

    def serve(self) -> _Request | None:
        """Fork a child for each request, and report the children's exit codes.

        In a child, return the child's request. In the server, return None when the tests end.
        """
        for end in (self._ended, self._wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._requests, self._ended], [], [])
            if self._ended in ready:
                self._ended.recv(4096)
                self._report_exits()
            if self._requests not in ready:
                continue
            byte, files, _, _ = socket.recv_fds(self._requests, 1, _FILES)
            if not byte:
                return None
            connection = socket.socket(fileno=files[0])
            try:
                request = _Request(connection, files[1:])
            except (OSError, ValueError):  # the requester has exited
                for file in (connection.detach(), *files[1:]):
                    os.close(file)
                continue
            if self._fork(request, connection):
                return request

    def _fork(self, request: _Request, connection: socket.socket) -> bool:
        """Return True in the forked child. The parent waits until the child is set up or ends."""
        settled, settling = os.pipe()
        with warnings.catch_warnings():
            # Python warns about a fork while another thread, here pyarrow's, exists.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            others = self._children.values()
            for end in (self._requests, self._ended, self._wake, connection, *others):
                end.close()
            request.apply()
            for file in (settled, settling):
                os.close(file)
            return True
        request.close()
        os.close(settling)
        os.read(settled, 1)  # returns when the child has closed it
        os.close(settled)
        self._children[pid] = connection
        _report(connection, pid)
        return False

    def _report_exits(self) -> None:
        for pid, connection in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[pid]
                with connection:
                    _report(connection, os.waitstatus_to_exitcode(status))


def _report(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(b"%d\n" % number)
    except OSError:
        pass  # the requester has closed the connection


if __name__ == "__main__":
    for module in ("meteor_py", *(f"meteor_cli.commands.{command}" for command in COMMANDS)):
        import_module(module)
    gc.freeze()
    request = _ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        request.run()
