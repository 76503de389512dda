"""The server that an option names, and one connection to it for each process.

Options travel to other machines, and into logs and plans: a password does not belong there. It is
looked up by each process where it runs, in its environment or in a file.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import meteor_py

if TYPE_CHECKING:
    from pyspark_meteor.options import Given

_TIMEOUT_S = 10.0
_lock = threading.Lock()
_clients: dict[tuple[int, ServerOptions], meteor_py.Client] = {}


@dataclass(frozen=True)
class ServerOptions:
    """Where the server is, and where its password."""

    #: Without a password; None: as ``meteor_py.connect()``.
    url: str | None = None
    password_env: str | None = None
    password_file: str | None = None

    @classmethod
    def parse(cls, options: Given) -> ServerOptions:
        """From the options of a source or sink.

        Raises:
            ValueError: There is a password in the URL, or two places to find it.
        """
        url = options.text("url")
        env, file = options.text("passwordEnv"), options.text("passwordFile")
        if url and (urlsplit(url).password or "password=" in url.lower()):
            raise ValueError(
                "The url has a password in it, and options can be seen by others; give it with "
                "passwordEnv (the name of an environment variable) or passwordFile."
            )
        if env and file:
            raise ValueError("The password is either in passwordEnv or in passwordFile, not both.")
        if (env or file) and not url:
            raise ValueError("A password belongs to a url; give that, too.")
        if url and url.startswith(("fake:", "embedded://")) and urlsplit(url).path in ("", "/"):
            raise ValueError(
                f"{url} is known to one process only, and Spark has several; use redis:// or "
                "embedded:///directory."
            )
        return cls(url, env, file)

    def connect(self) -> meteor_py.Client:
        """The client of this process; it stays open for the next task.

        Raises:
            ValueError: The password is not where it should be.
        """
        key = (os.getpid(), self)
        with _lock:
            if key not in _clients:
                warnings.simplefilter("ignore", meteor_py.DataSafetyWarning)
                _clients[key] = meteor_py.connect(self._whole_url(), timeout=_TIMEOUT_S)
            return _clients[key]

    def _whole_url(self) -> str | None:
        password = self._password()
        if password is None or self.url is None:
            return self.url
        scheme, _, rest = self.url.partition("://")
        user, at, host = rest.rpartition("@")
        return f"{scheme}://{user if at else ''}:{quote(password, safe='')}@{host}"

    def _password(self) -> str | None:
        if self.password_env:
            found = os.environ.get(self.password_env)
            if found is None:
                raise ValueError(
                    f"The environment variable {self.password_env}, named by passwordEnv, is not "
                    "set in this process; executors get it by spark.executorEnv.*."
                )
            return found
        if self.password_file:
            try:
                return Path(self.password_file).read_text().strip()
            except OSError as error:
                raise ValueError(f"The passwordFile cannot be read: {error}.") from None
        return None
