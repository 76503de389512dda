"""``meteor server``: runs a server until the user interrupts the command."""

from __future__ import annotations

import os
import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.command import command
from meteor_cli.render.text import product_name, say, show_bytes
from meteor_cli.session import Session
from meteor_cli.signals import cleaning_up

if TYPE_CHECKING:
    from meteor_py.server import EmbeddedServer

#: Minimum seconds to wait for the server to start, because it may have to load a lot of data.
_START_S = 10.0
_PAUSE_S = 0.5


@command(
    example="""\
meteor server                  # your personal server, the default
meteor server --private --tcp  # a temporary server, for any client"""
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to keep the data. Default: your personal server's directory.",
)
@options.flag("--private", help="Keep the data in memory only, and discard it at the end.")
@options.flag(
    "--tcp", help="Also listen on a TCP port on 127.0.0.1. The URL then contains the password."
)
def server(session: Session, directory: Path | None, private: bool, tcp: bool) -> None:
    """Run a server until Ctrl-C, and print its URL.

    The server program comes with this package or is found in PATH. All processes that use the same
    directory share one server, which stops when the last of them ends. If the server is killed,
    this command restarts it.
    """
    if session.url:
        raise click.UsageError("This command starts a server. Pass --dir instead of --url.")
    if private and directory:
        raise click.UsageError("A private server keeps no data. Omit --dir or --private.")
    from meteor_py.server import default_directory, open_embedded

    home = None if private else directory or default_directory()
    with cleaning_up():
        running = open_embedded(home, tcp=tcp, timeout_s=max(session.timeout, _START_S))
        try:
            is_default = not private and directory is None
            _introduce(session, running, private=private, tcp=tcp, default=is_default)
            while True:
                _wait_for_end(running)
                say("the server ended unexpectedly." + (" Its data was lost." if private else ""))
                running.reach(max(session.timeout, _START_S))
                say(f"restarted it as process {running.pid}.")
        finally:
            running.close()
            if is_alive(running.pid):
                say("other processes still use the server; it stops when the last of them ends.")


def _introduce(
    session: Session, running: EmbeddedServer, *, private: bool, tcp: bool, default: bool
) -> None:
    with session.connect(url=running.url) as m:
        found = m.describe()
    kept = "in memory" if private else f"in {running.directory}"
    limit = f", at most {show_bytes(found.memory_max)}" if found.memory_max else ""
    say(f"{product_name(found)}, process {running.pid}. Press Ctrl-C to stop it.")
    say(f"data is kept {kept}{limit}.")
    if tcp:
        say("the URL contains the password: keep it secret.")
    if default and not os.environ.get("METEOR_URL"):
        say("commands use this server by default. For other programs:")
    else:
        say("to make commands use this server:")
    click.echo(f"  export METEOR_URL={shlex.quote(running.url)}", err=True)
    click.echo(running.url)


def _wait_for_end(running: EmbeddedServer) -> None:
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(running.socket_path)
                connection.recv(1)  # returns when the connection ends
        except OSError:
            return
        if not is_alive(running.pid):
            return
        time.sleep(_PAUSE_S)  # a client killed our connection, and may do so again


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
