"""The entry point of the ``meteor`` command: parses, calls the library, renders."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

from meteor_cli.command import CONTEXT_SETTINGS, Group, common_options
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.terminal import is_cut_off
from meteor_cli.render.text import say
from meteor_cli.session import Session
from meteor_cli.signals import repeat_lost_signal

#: In the order of the help. Each is in the module of its name in ``commands``, which is imported
#: when it is needed: a command starts in the time of its own imports.
COMMANDS = (
    "demo", "server", "tail", "publish", "seek", "streams", "groups", "shared", "peers", "archive",
    "top", "watch", "bench", "completion",
)  # fmt: skip
#: The shell's way to say that a signal ended it.
INTERRUPTED = 128 + signal.SIGINT


class Root(Group):
    """The command itself."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"meteor_cli.commands.{name}"), name)
        return found

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _until_cut_off():  # --help and --version are printed here
            return super().make_context(*args, **settings)

    def invoke(self, context: click.Context) -> Any:
        with _until_cut_off():
            return super().invoke(context)


@contextmanager
def _until_cut_off() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        if not is_cut_off(sys.stdout.fileno()):
            raise
        # Whoever reads has seen enough: nothing is wrong. What is still in the buffer must
        # not fail again at the end of the interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None


@click.group(cls=Root, context_settings=CONTEXT_SETTINGS)
@click.version_option(package_name="meteor-py", prog_name="meteor")
def meteor() -> None:
    """Real-time streaming on Redis or Valkey: Kafka without the brokers.

    The options may stand behind the name of a command, too.
    """


meteor.params[:0] = common_options(hidden=False)


def main() -> None:
    """Run the command; errors and warnings are one sentence on stderr."""
    _open_standard_files()
    session = Session()
    # In place of Python's own, which shows a line of the source.
    warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLine(session))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    # What the library would log, commands tell in their own words; -v shows it all the same.
    logging.getLogger("meteor_py").setLevel(logging.ERROR)
    sys.unraisablehook = repeat_lost_signal
    signal.signal(signal.SIGTERM, _end)
    try:
        code = meteor.main(prog_name="meteor", obj=session, standalone_mode=False)
    except click.Abort:
        code = INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except Exception as error:
        if session.debug:
            raise
        from meteor_cli.errors import explain

        say(explain(error))
        code = 1
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """At SIGTERM: leave by way of every ``with``, so that leases are given up."""
    raise SystemExit(128 + number)


def _open_standard_files() -> None:
    """Put something in the place of standard files that are closed, as by ``>&-``.

    Else the next socket would get their numbers. Results that nobody gets and input that cannot
    be read are errors: there it is opened for the wrong direction. What goes to stderr is dropped.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY))
    if sys.stdout is None:
        # Without a buffer: what could not be written must not fail again at the end.
        nowhere = io.FileIO(os.open(os.devnull, os.O_RDONLY), "w")
        sys.stdout = io.TextIOWrapper(nowhere, write_through=True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


class _LogLine(logging.Formatter):
    """A line for each message: others may have named what is in it. Tracebacks with --debug."""

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
