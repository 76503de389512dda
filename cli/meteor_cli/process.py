"""What a process may meet: standard files that are closed, signals that get lost, and its log."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from meteor_cli.harmless import harmless

if TYPE_CHECKING:
    from meteor_cli.session import Session

#: Seconds after which a signal that was lost comes again.
_AGAIN_S = 0.01


def open_standard_files() -> None:
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


def repeat_lost_signal(lost: sys.UnraisableHookArgs) -> None:
    """For ``sys.unraisablehook``: what Python cannot raise where it happened.

    A signal may come while a finalizer or the callback of a weak reference runs, from which no
    exception gets out. Python would print the traceback, and the command would go on for ever.
    """
    if issubclass(lost.exc_type, KeyboardInterrupt):
        number = signal.SIGINT
    elif issubclass(lost.exc_type, SystemExit):
        number = signal.SIGTERM
    else:
        sys.__unraisablehook__(lost)
        return
    # Not at once: that would be here, where it would be lost, too.
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


class LogLine(logging.Formatter):
    """A line for each message: others may have named what is in it. Tracebacks with --debug."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def format(self, record: logging.LogRecord) -> str:
        line = f"meteor: {harmless(record.getMessage())}"
        if not record.exc_info:
            return line
        if self._session.debug:
            return f"{line}\n{self.formatException(record.exc_info)}"
        kind, error, _ = record.exc_info
        return f"{line} {kind.__name__ if kind else ''}: {harmless(str(error))}"
