"""What all commands share: which server is meant, and how to reach it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import meteor_py

#: Seconds to wait for a server.
TIMEOUT_S = 5.0


class Session:
    """The common options of one run of the command."""

    def __init__(self) -> None:
        #: None: $METEOR_URL, else the user's own kept server.
        self.url: str | None = None
        #: Seconds to wait for the server, for each answer.
        self.timeout = TIMEOUT_S
        self.debug = False
        #: How much of what the library logs is shown: -v, -vv.
        self.verbose = 0

    def connect(self, *, writing: bool = False, url: str | None = None) -> meteor_py.Client:
        """A client of the server.

        Args:
            writing: Whether records will be entrusted to it: then its dangers are worth a warning.
            url: Another server than the one that was asked for.
        """
        import meteor_py  # takes longer than all the rest of a --help

        if not writing:
            warnings.simplefilter("ignore", meteor_py.DataSafetyWarning)
        return meteor_py.connect(url or self.url, timeout=self.timeout)

    @contextmanager
    def stream(self, name: str, *, writing: bool = False) -> Iterator[meteor_py.Stream]:
        """An existing stream; nothing is created."""
        with self.connect(writing=writing) as m:
            yield m.stream(name, create=False)
