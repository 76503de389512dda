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

    @contextmanager
    def peer_group(self, name: str) -> Iterator[meteor_py.PeerGroup]:
        """An existing peer group, NAME or NAME/INSTANCE; nothing is begun, and nobody joins.

        Raises:
            ValueError: No group can be named so.
        """
        with self.connect() as m:
            if not _is_peer_group_name(name):
                raise ValueError(
                    f"{name[:200]!r} cannot be the name of a group: GROUP is NAME or NAME/INSTANCE,"
                    " each 1 to 128 of the characters A-Z a-z 0-9 . _ - and not starting with a "
                    "dot."
                )
            with m.peer_group(name, create=False) as group:
                yield group


def _is_peer_group_name(name: str) -> bool:
    from meteor_py.redis.keys import check_name

    parts = name.split("/")
    try:
        for part in parts:
            check_name(part)
    except ValueError:
        return False
    return len(parts) <= 2
