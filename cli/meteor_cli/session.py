"""State shared by all commands: which server to use, and how to connect to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import meteor_py

#: Default ``--timeout`` in seconds.
TIMEOUT_S = 5.0


class Session:
    """Global options for one run of the command."""

    def __init__(self) -> None:
        #: The server. None means $METEOR_URL or, if that is not set, the user's personal server.
        self.url: str | None = None
        #: Seconds to wait for each reply from the server.
        self.timeout = TIMEOUT_S
        self.debug = False
        #: Number of times -v was given.
        self.verbose = 0

    def connect(self, *, writing: bool = False, url: str | None = None) -> meteor_py.Client:
        """Return a client.

        Args:
            writing: Whether the command stores records. If so, warn if the server may lose data.
            url: Overrides the session's server.
        """
        import meteor_py  # slow to import, and not needed by --help

        if not writing:
            warnings.simplefilter("ignore", meteor_py.DataSafetyWarning)
        return meteor_py.connect(url or self.url, timeout=self.timeout)

    @contextmanager
    def stream(
        self, name: str, *, writing: bool = False, **settings: Any
    ) -> Iterator[meteor_py.Stream]:
        """Open an existing stream."""
        with self.connect(writing=writing) as m:
            yield m.stream(name, create=False, **settings)

    @contextmanager
    def peer_group(self, name: str) -> Iterator[meteor_py.PeerGroup]:
        """Open an existing peer group (NAME or NAME/INSTANCE) without joining it."""
        with self.connect() as m, m.peer_group(name, create=False) as group:
            yield group
