"""``meteor server``: runs a server, or describes one."""

from __future__ import annotations

import os
import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from meteor_cli.args import options
from meteor_cli.command import CommandGroup, command
from meteor_cli.commands.listing import read_streams
from meteor_cli.render.json import print_json, to_fields
from meteor_cli.render.text import print_facts, product_name, say, show_bytes, show_span
from meteor_cli.session import Session
from meteor_cli.signals import cleaning_up

if TYPE_CHECKING:
    from meteor_py import Client, Description, ServerDescription
    from meteor_py.server import EmbeddedServer

#: Minimum timeout in seconds for starting the server, which may have to load a lot of data.
_START_S = 10.0
_PAUSE_S = 0.5


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    example="""\
meteor server                  # your personal server, the default
meteor server --private --tcp  # a temporary server, for any client""",
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
@click.pass_context
def server(context: click.Context, directory: Path | None, private: bool, tcp: bool) -> None:
    """Run a server until Ctrl-C, or describe one.

    Prints the URL. The server program comes with this package or is found in PATH, unless
    $METEOR_SERVER names another. All processes that use the same directory share one server, which
    stops when the last of them ends. If the server is killed, this command restarts it.
    """
    if context.invoked_subcommand is not None:
        if directory or private or tcp:
            raise click.UsageError("--dir, --private and --tcp are only for running a server.")
        return
    session = context.ensure_object(Session)
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
        time.sleep(_PAUSE_S)  # a client killed our connection; do not spin if it does so again


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


@command("info", example="meteor server info --url redis+cluster://localhost:7001")
@options.json_lines
def describe_server(session: Session, as_json: bool) -> None:
    """Show the version, memory, persistence, clients and streams of a server.

    For a cluster, shows these facts and the slots of each primary. If a primary cannot be reached,
    the output lacks its facts and all stream counts, and the exit status is 1.
    """
    with session.connect() as m:
        found = m.describe()
        streams, is_complete = _read_all_streams(m)
    for number, primary in enumerate(found.nodes or (found,)):
        own = streams
        if found.nodes and streams is not None:
            own = [stream for stream in streams if _has(primary, stream.name)]
        is_silent = bool(found.nodes) and not primary.slots
        is_complete = is_complete and not is_silent
        if as_json:
            print_json(_fields(primary, own))
            continue
        if number:
            click.echo()
        no_facts: dict[str, object] = {"server": primary.address, "problem": "no reply"}
        print_facts(no_facts if is_silent else _facts(primary, own))
    if not is_complete:
        raise click.exceptions.Exit(1)


def _read_all_streams(m: Client) -> tuple[list[Description] | None, bool]:
    """Return the streams (None if a primary is unreachable), and whether all were readable."""
    from meteor_py import ConnectionFailed

    try:
        return read_streams(m, lambda stream: [stream.describe()])
    except ConnectionFailed as error:
        say(f"cannot list the streams: {error}")
        return None, False


def _has(node: ServerDescription, stream: str) -> bool:
    from meteor_py.redis.topology import slot_of

    return any(first <= slot_of(stream) <= last for first, last in node.slots)


def _fields(primary: ServerDescription, streams: list[Description] | None) -> dict[str, object]:
    fields: dict[str, object] = to_fields(primary)
    del fields["nodes"]
    return fields | {
        "streams": None if streams is None else len(streams),
        "stream_bytes": None if streams is None else _memory_of(streams),
    }


def _facts(primary: ServerDescription, streams: list[Description] | None) -> dict[str, object]:
    limit = ", no limit" if primary.memory_max is None else f" of {show_bytes(primary.memory_max)}"
    facts: dict[str, object] = {
        "server": primary.address,
        "version": product_name(primary),
        "role": primary.role,
        "memory": None if primary.memory is None else show_bytes(primary.memory) + limit,
        "maxmemory-policy": primary.memory_policy,
        "append-only file": primary.append_only,
        "clients": primary.clients,
        "uptime": None if primary.uptime is None else show_span(primary.uptime),
    }
    if primary.slots:
        ranges = ", ".join(f"{first}-{last}" for first, last in primary.slots)
        count = sum(last - first + 1 for first, last in primary.slots)
        facts["slots"] = f"{count:,} ({ranges})"
    facts["streams"] = None
    if streams is not None:
        facts["streams"] = f"{len(streams):,}, {show_bytes(_memory_of(streams))}"
    return facts


def _memory_of(streams: list[Description]) -> int:
    return sum(stream.bytes or 0 for stream in streams)


server.add_command(describe_server)
