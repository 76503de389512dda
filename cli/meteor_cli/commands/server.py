"""``meteor server``: a server of one's own, for as long as the command runs."""

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
from meteor_cli.render.text import say, show_bytes
from meteor_cli.session import Session
from meteor_cli.signals import cleaning_up

if TYPE_CHECKING:
    from meteor_py import ServerDescription
    from meteor_py.server import EmbeddedServer

#: Seconds that a server gets at least to come up: it may have much to load.
_START_S = 10.0
_PAUSE_S = 0.5


@command(
    example="""\
meteor server                  # your own, kept: commands without a URL use it
meteor server --private --tcp  # a fresh one, for programs in other languages"""
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where the data is kept; default: where commands without a URL keep it.",
)
@options.flag("--private", help="In memory only, and gone in the end.")
@options.flag(
    "--tcp", help="Listen on a port of 127.0.0.1, too; the URL then has the password in it."
)
def server(session: Session, directory: Path | None, private: bool, tcp: bool) -> None:
    """Run a server until Ctrl-C, and print its URL.

    The program comes with this package, or is one on PATH. A kept server is shared by all commands
    and processes that use it, and ends with the last of them.
    """
    if session.url:
        raise click.UsageError("This runs a server of your own; say where with --dir, not --url.")
    if private and directory:
        raise click.UsageError("A private server keeps nothing; leave out --dir or --private.")
    from meteor_py.server import default_directory, open_embedded

    home = None if private else directory or default_directory()
    with cleaning_up():
        running = open_embedded(home, tcp=tcp, timeout_s=max(session.timeout, _START_S))
        try:
            is_default = not private and directory is None
            _introduce(session, running, private=private, tcp=tcp, default=is_default)
            _wait_for_end(running)
            where = "" if private else f"; server.log in {running.directory} may say why"
            say(f"the server has ended, and not at our wish{where}.")
            raise click.exceptions.Exit(1)
        finally:
            running.close()
            if is_alive(running.pid):
                say("others use the server still; it ends with the last of them.")


def _introduce(
    session: Session, running: EmbeddedServer, *, private: bool, tcp: bool, default: bool
) -> None:
    with session.connect(url=running.url) as m:
        found = m.describe()
    kept = "in memory only" if private else f"kept in {running.directory}"
    limit = f", at most {show_bytes(found.memory_max)} of memory" if found.memory_max else ""
    say(f"{product_name(found)}, process {running.pid}, {kept}{limit}; Ctrl-C ends it.")
    if tcp:
        say("the URL has the password in it: who reads it can use the server.")
    if default and not os.environ.get("METEOR_URL"):
        say("commands without a URL use it; for other programs:")
    else:
        say("to have commands use it:")
    click.echo(f"  export METEOR_URL={shlex.quote(running.url)}", err=True)
    click.echo(running.url)


def _wait_for_end(running: EmbeddedServer) -> None:
    """Return when the server has ended."""
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(running.socket_path)
                line.recv(1)  # nothing comes but the end of the connection
        except OSError:
            return
        if not is_alive(running.pid):
            return
        time.sleep(_PAUSE_S)  # somebody has cut our connection, and may do so again


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def product_name(found: ServerDescription) -> str:
    """What a server is: "Valkey 9.1.0"."""
    name = (found.product or "server").capitalize()
    return f"{name} {found.version}" if found.version else name
