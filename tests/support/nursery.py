"""The process that `Warm` processes are forked from: it has imported the library, and no more."""

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

#: Connection, stdin, stdout, stderr: what comes with an order.
_FILES = 4


class _Order:
    """What a child is to become."""

    def __init__(self, connection: socket.socket, files: list[int]) -> None:
        with connection.makefile("rb") as whole:
            order = json.load(whole)
        self.arguments: list[str] = order["arguments"]
        self._order: dict[str, Any] = order
        self._files = files

    def close(self) -> None:
        for file in self._files:
            os.close(file)

    def settle(self) -> None:
        """Take over files, folder and environment, as a process has them that was just started."""
        if self._order["session"]:
            os.setsid()
        for number, file in enumerate(self._files):
            os.dup2(file, number)
            os.close(file)
        if self._order["terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(self._order["folder"])
        os.environ.clear()
        os.environ.update(self._order["environment"])
        time.tzset()
        _set_file("stdin", open(0, encoding="utf-8", closefd=False))  # noqa: SIM115
        buffering = 1 if os.isatty(1) else -1
        _set_file("stdout", open(1, "w", buffering, "utf-8", closefd=False))  # noqa: SIM115
        escaped = "backslashreplace"
        _set_file("stderr", open(2, "w", 1, "utf-8", escaped, closefd=False))  # noqa: SIM115

    def run(self) -> None:
        """As ``python ARGUMENTS`` does."""
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


class _Nursery:
    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._children: dict[int, socket.socket] = {}
        self._ended, self._wake = socket.socketpair()

    def serve(self) -> _Order | None:
        """Fork, and tell exit codes: returns in each child, and at the end of the tests."""
        for end in (self._ended, self._wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._orders, self._ended], [], [])
            if self._ended in ready:
                self._ended.recv(4096)
                self._tell_codes()
            if self._orders not in ready:
                continue
            byte, files, _, _ = socket.recv_fds(self._orders, 1, _FILES)
            if not byte:
                return None
            connection = socket.socket(fileno=files[0])
            try:
                order = _Order(connection, files[1:])
            except (OSError, ValueError):  # who has ordered it has given up
                for file in (connection.detach(), *files[1:]):
                    os.close(file)
                continue
            if self._fork(order, connection):
                return order

    def _fork(self, order: _Order, connection: socket.socket) -> bool:
        """Whether this is the child; the other one goes on when that has settled, or ended."""
        settled, settling = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a thread of pyarrow's
            pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            others = self._children.values()
            for end in (self._orders, self._ended, self._wake, connection, *others):
                end.close()
            order.settle()
            for file in (settled, settling):
                os.close(file)
            return True
        order.close()
        os.close(settling)
        os.read(settled, 1)  # the end of it
        os.close(settled)
        self._children[pid] = connection
        _tell(connection, pid)
        return False

    def _tell_codes(self) -> None:
        for pid, connection in list(self._children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._children[pid]
                with connection:
                    _tell(connection, os.waitstatus_to_exitcode(status))


def _tell(connection: socket.socket, number: int) -> None:
    try:
        connection.sendall(b"%d\n" % number)
    except OSError:
        pass  # nobody wants to know any more


if __name__ == "__main__":
    for module in ("meteor_py", *(f"meteor_cli.commands.{command}" for command in COMMANDS)):
        import_module(module)
    gc.freeze()
    order = _Nursery(socket.socket(fileno=int(sys.argv[1]))).serve()
    if order is not None:
        order.run()
