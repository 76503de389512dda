"""Entry point of the ``meteor`` command."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from meteor_cli.command import CONTEXT_SETTINGS, Group, common_options
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import is_cut_off
from meteor_cli.render.text import say
from meteor_cli.session import Session
from meteor_cli.signals import end_on_sigterm, repeat_lost_signal

#: Commands in help order, with their summaries. Each is in the module ``commands.<name>``, which is
#: imported on demand: a command imports only the modules that it needs, and `meteor --help` imports
#: none of them.
COMMANDS = {
    "demo": "Take a tour of the features, with live measurements.",
    "server": "Run a server until Ctrl-C, or describe one.",
    "tail": "Print the records of a stream, and follow it.",
    "publish": "Publish records from arguments or a pipe.",
    "seek": "Move a group to another position.",
    "streams": "List, describe, create, change, repair and delete streams.",
    "groups": "List, describe and delete subscriber groups.",
    "shared": "Inspect shared groups; purge and resume ordering keys.",
    "peers": "Inspect peer groups, and send messages to their members.",
    "archive": "Archive streams and maintain their stores.",
    "top": "Show a live table of streams, groups and stores.",
    "watch": "Print a line for each change to a stream, group or lease.",
    "bench": "Measure the speed of publishing and reading.",
    "completion": "Print a script that enables completion in your shell.",
}


class Root(Group):
    """The ``meteor`` command."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"meteor_cli.commands.{name}"), name)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _accept_closed_pipe():  # --help and --version are printed here
            return super().make_context(*args, **settings)

    def invoke(self, context: click.Context) -> Any:
        with _accept_closed_pipe():
            return super().invoke(context)


@contextmanager
def _accept_closed_pipe() -> Iterator[None]:
    """Exit with 0 if the reader of stdout has closed the pipe, as ``head`` does."""
    try:
        yield
    except BrokenPipeError:
        if not is_cut_off(sys.stdout.fileno()):
            raise
        # At exit, the interpreter flushes the buffer, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None


@click.group(cls=Root, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="meteor-py", prog_name="meteor")
def meteor() -> None:
    """Real-time streaming on Redis or Valkey: Kafka without the brokers.

    These options are also accepted after a command's name.
    """


meteor.params[:0] = common_options(hidden=False)


def main() -> None:
    """Run the command, print errors and warnings on stderr, and exit with the command's status."""
    _open_standard_files()
    session = Session()
    # Python's default would also print a line of source code.
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLine(session))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    # Commands print their own messages. Of the library's log, show only errors; -v shows more.
    logging.getLogger("meteor_py").setLevel(logging.ERROR)
    sys.unraisablehook = repeat_lost_signal
    end_on_sigterm()
    try:
        code = meteor.main(prog_name="meteor", obj=session, standalone_mode=False)
    except click.Abort:
        code = 128 + signal.SIGINT  # the status that shells report after a signal
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except Exception as error:
        if session.debug:
            raise
        from meteor_cli.errors import explain

        say(explain(error))
        code = 1
    gc.freeze()  # otherwise, Python searches all objects for garbage, which takes 20 ms
    sys.exit(code)


def _open_standard_files() -> None:
    """Replace standard files that are closed, for example by ``>&-``.

    Otherwise the next socket would get their descriptors. Stdin and stdout are opened in the wrong
    direction, so that using them is an error. Output to a closed stderr is discarded.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY))
    if sys.stdout is None:
        # Do not buffer: a failed write must not fail again when the interpreter exits.
        nowhere = io.FileIO(os.open(os.devnull, os.O_RDONLY), "w")
        sys.stdout = io.TextIOWrapper(nowhere, write_through=True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


class _LogLine(logging.Formatter):
    """Formats a log message as one sanitized line, with a traceback only under ``--debug``."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def format(self, record: logging.LogRecord) -> str:
        line = f"meteor: {sanitize(record.getMessage())}"
        if not record.exc_info:
            return line
        if self._session.debug:
            return f"{line}\n{self.formatException(record.exc_info)}"
        kind, error, _ = record.exc_info
        return f"{line} {kind.__name__ if kind else ''}: {sanitize(str(error))}"


if __name__ == "__main__":
    main()
