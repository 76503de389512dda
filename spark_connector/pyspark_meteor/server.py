"""The server of a source or sink, and one connection to it per process.

Options travel to other machines and appear in logs and plans, so they hold no password. Each
process looks the password up where it runs, in its environment or in a file. The driver determines
the address of the server: executors have another environment and might find another server.
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
from meteor_py.redis.server_warnings import eviction_policy, find_dangers

if TYPE_CHECKING:
    from pyspark_meteor.options import RawOptions

#: The options that ``ServerOptions`` is parsed from.
SERVER_OPTIONS = ("url", "passwordEnv", "passwordFile", "serverTimeout")

_log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
#: Default and largest value of serverTimeout, in seconds.
_AWAY_S, _AWAY_MAX_S = 60.0, 3600.0
#: Names of settings whose values Spark hides (its default spark.redaction.regex).
_REDACTED = re.compile(r"secret|password|token|access[.]?key|credential", re.IGNORECASE)
_lock = threading.Lock()
_clients: dict[tuple[int, ServerOptions], meteor_py.Client] = {}
#: Dangers that this process has logged: at most a few for each server.
_logged: set[str] = set()


@dataclass(frozen=True)
class ServerOptions:
    """The address of the server, and where to find its password."""

    #: Without a password. None: each process uses its own ``$METEOR_URL``, which has a password.
    url: str | None = None
    password_env: str | None = None
    password_file: str | None = None
    #: Seconds that each call to the server waits for it while it restarts or fails over.
    timeout_s: float = _AWAY_S

    @classmethod
    def parse(cls, options: RawOptions) -> ServerOptions:
        """Parse the options of a source or sink, on the driver.

        Raises:
            ValueError: The URL has a password, or passwordEnv and passwordFile do not fit.
        """
        url = options.text("url")
        env, file = options.text("passwordEnv"), options.text("passwordFile")
        if env and file:
            raise ValueError("Give either passwordEnv or passwordFile, not both.")
        if (env or file) and not url:
            raise ValueError("passwordEnv and passwordFile need a url.")
        if env and not _REDACTED.search(env):
            _log.warning(
                "Spark shows the value of spark.executorEnv.%s in its UI and event log. Use "
                "passwordFile, or a variable with PASSWORD in its name, whose value Spark hides.",
                env,
            )
        url = url or _default_url()
        if url:
            _check(url, with_password=bool(env or file))
        return cls(url, env, file, options.seconds("serverTimeout", _AWAY_S, most=_AWAY_MAX_S))

    def connect(self) -> meteor_py.Client:
        """Returns the client of this process, which stays open for the next task.

        Raises:
            ValueError: There is no password where the options say.
        """
        key = (os.getpid(), self)
        with _lock:
            if key not in _clients:
                warnings.simplefilter("ignore", meteor_py.DataSafetyWarning)
                _clients[key] = self._connect()
            return _clients[key]

    def log_dangers(self) -> None:
        """Log the settings of the server that endanger data, once per process, on the driver."""
        for text in self.connect()._connector.use(find_dangers):
            if text not in _logged:
                _logged.add(text)
                _log.warning("%s", text)

    def require_no_eviction(self) -> None:
        """Check that the server deletes no keys, before a batch is written exactly once.

        Raises:
            ServerRefused: It may delete keys. It would delete staged rows first, and a commit
                that has begun could then be neither finished nor undone.
        """
        policy = self.connect()._connector.use(eviction_policy)
        if policy is not None:
            raise meteor_py.ServerRefused(
                f"The server at {self.connect().address} deletes keys when it is full "
                f"(maxmemory-policy {policy}), so rows could be lost or written twice in a commit. "
                "Set maxmemory-policy noeviction. A streaming query may use delivery=atLeastOnce "
                "instead."
            )

    def _connect(self) -> meteor_py.Client:
        if self.url is None and not os.environ.get(address.URL_VARIABLE):
            raise ValueError(
                f"${address.URL_VARIABLE} of the driver has a password, so the driver did not send "
                "it, and this process has no such variable. Set the option url without the "
                "password, and passwordFile or passwordEnv; spark.executorEnv."
                f"{address.URL_VARIABLE} would show the password in Spark's UI."
            )
        password = self._password()
        if password is None:
            return meteor_py.connect(self.url, timeout=_TIMEOUT_S)
        # Not as a part of the URL, which errors and logs may show.
        found = address.parse(self.url)
        found = replace(found, options=found.options | {"password": password})
        return meteor_py.Client(found, _TIMEOUT_S)

    def _password(self) -> str | None:
        if self.password_env:
            found = os.environ.get(self.password_env)
            if found is None:
                raise ValueError(
                    f"The environment variable {self.password_env}, named by passwordEnv, is not "
                    "set in this process. Set it for executors with spark.executorEnv.*."
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
    """Returns the address that ``connect()`` would use; None if it has a password."""
    named = os.environ.get(address.URL_VARIABLE)
    if named and _has_password(named):
        return None
    return named or address.parse(None).shown


def _has_password(url: str) -> bool:
    """Returns whether a URL has a password, or something that may be one."""
    try:
        parts = urlsplit(url)
        if parts.password is not None:
            return True
    except ValueError:
        return True
    # Behind an unescaped special character, the rest of a password looks like a path or query.
    path = "" if parts.scheme in ("unix", "embedded") else parts.path
    return "password=" in url.lower() or "@" in path + parts.query + parts.fragment


def _check(url: str, *, with_password: bool) -> None:
    """Raise unless the URL may be shown and all processes can use it."""
    try:
        urlsplit(url)
    except ValueError:  # whose text may contain the password
        raise ValueError(
            "The url cannot be read; write redis://host:port/database or unix:///path/to/socket, "
            "with an IPv6 address in square brackets."
        ) from None
    if _has_password(url):
        raise ValueError(
            "The url has a password, or a misplaced @, and options are visible to others. Name the "
            "password's environment variable with passwordEnv, or its file with passwordFile."
        )
    found = address.parse(url)
    if found.scheme in ("fake", "embedded"):
        if found.scheme == "fake" or not found.place:
            raise ValueError(
                f"{url} is known to one process only, but Spark has several. Use redis:// or "
                "embedded:///directory."
            )
        if with_password:
            raise ValueError(
                "An embedded server has no password; leave out passwordEnv and passwordFile."
            )
