"""PING and SHUTDOWN for an embedded server, without redis-py, whose import takes too long."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from meteor_py.server import supervisor
from meteor_py.server.datadir import Address, is_private, read_config


def find_address(datadir: Path) -> Address | None:
    """Return the server's address, or None if it has none yet."""
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


def replies(address: Address, timeout_s: float = 1.0) -> bool:
    """Return whether the server is running and has loaded its data."""
    try:
        reply = _call(address, b"PING", timeout_s)
    except OSError:
        return False
    # A server that is busy with a long script, or whose disk is full, counts as running.
    return reply.startswith((b"+PONG", b"-BUSY", b"-MISCONF"))


def shut_down(datadir: Path) -> bool:
    """Shut the server down. Return whether it confirmed this by closing the connection."""
    address = find_address(datadir)
    try:
        # NOSAVE skips only a snapshot; the server still writes its append-only file.
        return address is not None and _call(address, b"SHUTDOWN NOSAVE") == b""
    except OSError:
        return False


def _call(address: Address, command: bytes, timeout_s: float = 1.0) -> bytes:
    """Send a command; return the reply's first line, which is empty if the server disconnected."""
    # In a shared /tmp, another user may have recreated the socket's directory.
    if not is_private(os.path.dirname(address.socket_path)):
        raise ConnectionRefusedError(f"{address.socket_path} is not in a private directory.")
    login = b"AUTH %b\r\n" % address.password.encode() if address.password else b""
    expected = 2 if login else 1
    received = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address.socket_path)
        try:
            connection.sendall(login + command + b"\r\n")
            while received.count(b"\r\n") < expected:
                piece = connection.recv(4096)
                if not piece:
                    return b""
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            return b""
    return received.split(b"\r\n")[expected - 1]
