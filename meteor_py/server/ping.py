"""PING and SHUTDOWN for an embedded server, without a Redis client.

Importing a client takes longer than starting the server.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from meteor_py.server import supervisor
from meteor_py.server.datadir import is_private, read_config


class Address(NamedTuple):
    """Where a server listens, as the files in its directory say."""

    socket_path: str
    port: int  # 0: no TCP
    password: str | None
    pid: int


def find_address(datadir: Path) -> Address | None:
    """Where the server listens; None if there is none, or not yet."""
    settings = read_config(datadir)
    try:
        pid = int((datadir / supervisor.PID).read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not settings:
        return None
    return Address(
        socket_path=os.path.join(datadir, settings["unixsocket"]),
        port=int(settings["port"]),
        password=settings.get("requirepass"),
        pid=pid,
    )


def replies(address: Address) -> bool:
    """Whether the server runs and has loaded its data."""
    try:
        reply = _call(address, b"PING")
    except OSError:
        return False
    # A server that runs a long script, or whose disk is full, runs as well.
    return reply.startswith((b"+PONG", b"-BUSY", b"-MISCONF"))


def shut_down(datadir: Path) -> bool:
    """Shut the server down; return whether it did."""
    address = find_address(datadir)
    try:
        # NOSAVE is about snapshots, and there are none: the append-only file is written out.
        return address is not None and _call(address, b"SHUTDOWN NOSAVE") == b""
    except OSError:
        return False


def _call(address: Address, command: bytes, timeout_s: float = 1.0) -> bytes:
    """Send a command and return the first line of the reply; empty if the server hung up."""
    # In a shared /tmp another user may have created the short directory again.
    if not is_private(os.path.dirname(address.socket_path)):
        raise ConnectionRefusedError(f"{address.socket_path} is not in a directory of our own")
    login = b"AUTH %b\r\n" % address.password.encode() if address.password else b""
    wanted = 2 if login else 1
    received = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address.socket_path)
        try:
            connection.sendall(login + command + b"\r\n")
            while received.count(b"\r\n") < wanted:
                piece = connection.recv(4096)
                if not piece:
                    return b""
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            return b""
    return received.split(b"\r\n")[wanted - 1]
