"""The server that an option names, and one connection to it for each process.

Options travel to other machines, and into logs and plans: a password does not belong there. It is
looked up by each process where it runs, in its environment or in a file. Where the server is, is
settled on the driver: executors have another environment, and would find another server there.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import meteor_py
from meteor_py.redis import address

if TYPE_CHECKING:
    from pyspark_meteor.options import Given

#: What ``ServerOptions`` are parsed from.
SERVER_OPTIONS = ("url", "passwordEnv", "passwordFile")

_log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
#: What Spark hides, by the names of its settings (spark.redaction.regex).
_REDACTED = re.compile(r"secret|password|token|access[.]?key|credential", re.IGNORECASE)
_lock = threading.Lock()
_clients: dict[tuple[int, ServerOptions], meteor_py.Client] = {}


@dataclass(frozen=True)
class ServerOptions:
    """Where the server is, and where its password."""

    #: Without a password; None: in ``$METEOR_URL`` of each process, as it has one.
    url: str | None = None
    password_env: str | None = None
    password_file: str | None = None

    @classmethod
    def parse(cls, options: Given) -> ServerOptions:
        """From the options of a source or sink, on the driver.

        Raises:
            ValueError: There is a password in the URL, or two places to find it, or none is needed.
        """
        url = options.text("url")
        env, file = options.text("passwordEnv"), options.text("passwordFile")
        if env and file:
            raise ValueError("The password is either in passwordEnv or in passwordFile, not both.")
        if (env or file) and not url:
            raise ValueError("A password belongs to a url; give that, too.")
        if env and not _REDACTED.search(env):
            _log.warning(
                "Spark shows the value of spark.executorEnv.%s in its UI and event log; use "
                "passwordFile, or a variable with PASSWORD in its name, whose value Spark hides.",
                env,
            )
        url = url or _default_url()
        if url:
            _check(url, with_password=bool(env or file))
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
                _clients[key] = self._connect()
            return _clients[key]

    def _connect(self) -> meteor_py.Client:
        if self.url is None and not os.environ.get(address.URL_VARIABLE):
            raise ValueError(
                f"${address.URL_VARIABLE} of the driver has a password, so it was not sent here, "
                "and this process has no such variable. Give the option url without the password, "
                "and passwordFile or passwordEnv; spark.executorEnv."
                f"{address.URL_VARIABLE} would show the password in Spark's UI."
            )
        password = self._password()
        if password is None:
            return meteor_py.connect(self.url, timeout=_TIMEOUT_S)
        # Not as a part of the URL, which may be shown.
        found = address.parse(self.url)
        found = replace(found, options=found.options | {"password": password})
        return meteor_py.Client(found, _TIMEOUT_S)

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
            except UnicodeDecodeError:
                raise ValueError(f"The passwordFile {self.password_file} is not UTF-8.") from None
        return None


def _default_url() -> str | None:
    """What ``connect()`` would use in this process; None if that has a password."""
    named = os.environ.get(address.URL_VARIABLE)
    if named and _has_password(named):
        return None
    return named or address.parse(None).shown


def _has_password(url: str) -> bool:
    """Whether it has one, or something that may be one."""
    try:
        parts = urlsplit(url)
        if parts.password is not None:
            return True
    except ValueError:
        return True
    # One with a special character that is not escaped goes on behind it, as something else.
    path = "" if parts.scheme in ("unix", "embedded") else parts.path
    return "password=" in url.lower() or "@" in path + parts.query + parts.fragment


def _check(url: str, *, with_password: bool) -> None:
    """Raise unless the URL is one that may be shown, and that all processes can use."""
    try:
        urlsplit(url)
    except ValueError:  # which says what it found, a password too
        raise ValueError(
            "The url cannot be read; write redis://host:port/database or unix:///path/to/socket, "
            "with an IPv6 address in square brackets."
        ) from None
    if _has_password(url):
        raise ValueError(
            "The url has a password in it, or an @ where none belongs, and options can be seen by "
            "others; give the password with passwordEnv (the name of an environment variable) or "
            "passwordFile."
        )
    found = address.parse(url)
    if found.scheme in ("fake", "embedded"):
        if found.scheme == "fake" or not found.place:
            raise ValueError(
                f"{url} is known to one process only, and Spark has several; use redis:// or "
                "embedded:///directory."
            )
        if with_password:
            raise ValueError(
                "An embedded server has no password; leave out passwordEnv and passwordFile."
            )
