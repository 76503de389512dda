"""The server that a source or sink uses, and one connection to it per process.

Spark sends options to other machines and shows them in logs and plans, so they must not contain a
password. Each process reads the password from its own environment or from a file. The driver
determines the server's address, because executors have a different environment and might find
another server.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import meteor_py
from meteor_py.redis import address
from meteor_py.redis.server_warnings import eviction_policy, find_dangers

if TYPE_CHECKING:
    from pyspark_meteor.options import RawOptions

#: The options that ``ServerOptions`` parses.
SERVER_OPTIONS = (
    *("url", "passwordEnv", "passwordFile", "sentinelPasswordEnv", "sentinelPasswordFile"),
    "serverTimeout",
)

_log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
#: Default and largest value of serverTimeout, in seconds.
_AWAY_S, _AWAY_MAX_S = 60.0, 3600.0
#: Matches names of settings whose values Spark hides (the default for spark.redaction.regex).
_REDACTED = re.compile(r"secret|password|token|access[.]?key|credential", re.IGNORECASE)
_lock = threading.Lock()
_clients: dict[tuple[int, ServerOptions], meteor_py.Client] = {}
#: Warnings that this process has logged: at most a few for each server.
_logged: set[str] = set()


@dataclass(frozen=True)
class Password:
    """Where each process finds a password: in an environment variable, or in a file."""

    #: The options that name the variable and the file, for error messages.
    env_option: str
    file_option: str
    env: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, options: RawOptions, env_option: str, file_option: str) -> Password | None:
        """Parse two options; return None if neither is set.

        Raises:
            ValueError: Both options are set.
        """
        env, file = options.text(env_option), options.text(file_option)
        if env and file:
            raise ValueError(f"Pass either {env_option} or {file_option}, not both.")
        if env and not _REDACTED.search(env):
            _log.warning(
                "Spark shows the value of spark.executorEnv.%s in its UI and event log. Use "
                "%s, or a variable with PASSWORD in its name, whose value Spark hides.",
                *(env, file_option),
            )
        return cls(env_option, file_option, env, file) if env or file else None

    def read(self) -> str:
        """Return the password.

        Raises:
            ValueError: The variable is not set, or the file cannot be read.
        """
        if self.env:
            found = os.environ.get(self.env)
            if found is None:
                raise ValueError(
                    f"The environment variable {self.env}, named by {self.env_option}, is not "
                    "set in this process. Set it for executors with spark.executorEnv.*."
                )
            return found
        assert self.file is not None, "parse() returns None if both are missing"
        try:
            return Path(self.file).read_text().strip()
        except OSError as error:
            raise ValueError(f"Cannot read the {self.file_option}: {error}.") from None
        except UnicodeDecodeError:
            raise ValueError(f"The {self.file_option} {self.file} is not UTF-8.") from None


@dataclass(frozen=True)
class ServerOptions:
    """The server's address, and where to find its passwords."""

    #: The URL without a password. None means that each process uses its own ``$METEOR_URL``, which
    #: contains a password.
    url: str | None = None
    password: Password | None = None
    sentinel_password: Password | None = None
    #: Maximum seconds that each call waits while the server restarts or fails over.
    timeout_s: float = _AWAY_S

    @classmethod
    def parse(cls, options: RawOptions) -> ServerOptions:
        """Parse the options for a source or sink, on the driver.

        Raises:
            ValueError: The URL is malformed, contains a password, or works in only one process; or
                a password option is misused.
        """
        url = options.text("url")
        password = Password.parse(options, "passwordEnv", "passwordFile")
        for_sentinels = Password.parse(options, "sentinelPasswordEnv", "sentinelPasswordFile")
        if (password or for_sentinels) and not url:
            raise ValueError("The password options need a url. Pass it as the option url.")
        url = url or _default_url()
        if url:
            _check(url, password, for_sentinels)
        timeout_s = options.seconds("serverTimeout", _AWAY_S, most=_AWAY_MAX_S)
        return cls(url, password, for_sentinels, timeout_s)

    def connect(self) -> meteor_py.Client:
        """Return this process's client, which stays open for the next task.

        Raises:
            ValueError: The password, or the URL that contains it, is not available to this process.
        """
        key = (os.getpid(), self)
        with _lock:
            if key not in _clients:
                client = self._connect()
                # The driver logs dangerous settings. A filter for warnings would also hide those
                # that concern the application's own clients.
                client._connector.warns = False
                _clients[key] = client
            return _clients[key]

    def log_dangers(self) -> None:
        """On the driver, log once per process which server settings endanger data."""
        for texts in self.connect()._connector.use_each(find_dangers):
            for text in texts:
                if text not in _logged:
                    _logged.add(text)
                    _log.warning("%s", text)

    def require_no_eviction(self) -> None:
        """Check that the server never evicts keys, which exactly-once writing requires.

        If the user may not call INFO, this cannot be checked, and the call succeeds.

        Raises:
            ServerRefused: The server may evict keys, including staged rows. A commit that has begun
                could then neither be finished nor undone.
        """
        policies = self.connect()._connector.use_each(eviction_policy)
        policy = next((policy for policy in policies if policy is not None), None)
        if policy is not None:
            raise meteor_py.ServerRefused(
                f"The server at {self.connect().address} evicts keys when it is full "
                f"(maxmemory-policy {policy}), so a commit could lose rows or write them twice. "
                "Set maxmemory-policy noeviction. A streaming query can use delivery=atLeastOnce "
                "instead."
            )

    def _connect(self) -> meteor_py.Client:
        if self.url is None and not os.environ.get(address.URL_VARIABLE):
            raise ValueError(
                f"The driver's ${address.URL_VARIABLE} contains a password, so the driver did not "
                "send it, and this process has no such variable. Set the option url without the "
                "password, and passwordFile or passwordEnv. Do not use spark.executorEnv."
                f"{address.URL_VARIABLE}, which would show the password in Spark's UI."
            )
        if self.password is None and self.sentinel_password is None:
            return meteor_py.connect(self.url, timeout=_TIMEOUT_S)
        # Do not make passwords part of the URL, which errors and logs may show.
        found = address.parse(self.url)
        if self.password is not None:
            options = found.options | {"password": self.password.read()}
            found = replace(found, options=options)
        if self.sentinel_password is not None:
            options = found.sentinel_options | {"password": self.sentinel_password.read()}
            found = replace(found, sentinel_options=options)
        return meteor_py.Client(found, _TIMEOUT_S)


def _default_url() -> str | None:
    """Return the address that ``connect()`` would use; None if it contains a password."""
    named = os.environ.get(address.URL_VARIABLE)
    if named and _has_password(named):
        return None
    return named or address.parse(None).shown


def _has_password(url: str) -> bool:
    """Return whether a URL contains a password, or something that could be one."""
    try:
        parts = urlsplit(url)
        if parts.password is not None:
            return True
    except ValueError:
        return True
    # After an unescaped special character, the rest of a password looks like a path or a query.
    path = "" if parts.scheme in ("unix", "embedded") else parts.path
    return "password=" in url.lower() or "@" in path + parts.query + parts.fragment


def _check(url: str, password: Password | None, for_sentinels: Password | None) -> None:
    """Check that the URL has no password in it, works in all processes, and fits the options.

    Raises:
        ValueError: The URL fails one of these checks.
    """
    try:
        urlsplit(url)
    except ValueError:  # do not quote the URL, which may contain the password
        raise ValueError(
            "The url is malformed. Write redis://host:port/database or unix:///path/to/socket. Put "
            "an IPv6 address in square brackets."
        ) from None
    if _has_password(url):
        raise ValueError(
            "The url contains a password or a misplaced @, and options are visible to others. Pass "
            "the name of an environment variable as passwordEnv, or of a file as passwordFile."
        )
    found = address.parse(url)
    if found.scheme in ("fake", "embedded"):
        if found.scheme == "fake" or not found.place:
            raise ValueError(
                f"Only one process can use {url}, but Spark has several. Use redis:// or "
                "embedded:///directory."
            )
        if password:
            raise ValueError(
                "An embedded server has no password. Leave out passwordEnv and passwordFile."
            )
    if for_sentinels and found.kind != "sentinel":
        raise ValueError(
            f"{url} names no sentinels. Use redis+sentinel://, or leave out "
            f"{for_sentinels.env_option} and {for_sentinels.file_option}."
        )
