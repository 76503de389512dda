"""Addresses of servers: what a URL means, with its secrets kept out of sight."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis.connection import AbstractConnection, Connection, parse_url

#: The environment variable that names the server when ``connect()`` is given none.
URL_VARIABLE = "METEOR_URL"

_REMOTE = ("redis", "rediss", "unix")
#: What may follow the question mark. All else is ours to set, or unknown.
_OPTIONS = ("client_name", "db", "password", "username")
_TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile",
    "ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password",
)  # fmt: skip
#: Up to the last @: if the one in a password is not escaped, the rest must not appear in a log.
_LOGIN = re.compile(r"(://[^:/@]*:).*(?=@)", re.DOTALL)
_PASSWORD = re.compile(r"((?:password|secret|secret_?key|token)=)[^&\s'\"]*", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """Where a server is and how to reach it. ``str()`` and ``repr()`` show no secret."""

    scheme: str
    shown: str
    #: Arguments of the connection class; may hold a password.
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    connection_class: Callable[..., AbstractConnection] = field(default=Connection, repr=False)
    #: Directory of a kept embedded server, or name of a shared fake one.
    place: str | None = None

    def __str__(self) -> str:
        return self.shown


def mask(text: str) -> str:
    """Replace the password of a URL, well-formed or not, in ``text``.

    >>> mask("redis://:secret@host:6379/0")
    'redis://:***@host:6379/0'
    >>> mask("s3://bucket/prefix?secret_key=abc&region=eu")
    's3://bucket/prefix?secret_key=***&region=eu'
    """
    return _PASSWORD.sub(r"\1***", _LOGIN.sub(r"\1***", text))


def parse(url: str | None) -> Address:
    """Understand ``url``; None means ``$METEOR_URL``, else the user's own kept server.

    Raises:
        ValueError: The scheme is not one of ours, or the URL is malformed.
    """
    if url is None:
        url = os.environ.get(URL_VARIABLE) or _default_url()
    if not isinstance(url, str):
        raise TypeError(f"An address must be a str, not {type(url).__name__}.")
    scheme, separator, _ = url.partition("://")
    if separator and scheme in _REMOTE:
        return _remote(url, scheme)
    if separator and scheme in ("embedded", "fake"):
        place = url.removeprefix(f"{scheme}://")
        if scheme == "embedded" and place and not place.startswith("/"):
            raise ValueError(
                f"{mask(url)!r} has two slashes before a name; write embedded:///absolute/path "
                "for a kept server, or embedded:// for a private one."
            )
        return Address(scheme, url, place=unquote(place) or None)
    shown = mask(url) if separator else mask(f"://{url}")[3:]
    raise ValueError(
        f"{shown!r} is not an address of a server; use redis://, rediss://, unix://, "
        "embedded://, embedded:///directory or fake://."
    )


def _remote(url: str, scheme: str) -> Address:
    try:
        parts = urlsplit(url)
        options = parse_url(url)
        if scheme == "unix" and not parts.path:
            raise ValueError("it has no path to a socket")
        if scheme != "unix" and not re.fullmatch(r"/?|/[0-9]{1,5}", parts.path):
            raise ValueError("the part after the slash must be the number of a database")
    except ValueError as error:
        reason = str(error).rstrip(".")
        if "@" in url and "'" in reason:  # it may quote the password
            reason = "the port is no number, or a special character of the password not escaped"
        raise ValueError(
            f"{mask(url)!r} is not a valid address: {reason}; write "
            "redis://user:password@host:port/database or unix:///path/to/socket."
        ) from None
    allowed = _OPTIONS + (_TLS_OPTIONS if scheme == "rediss" else ())
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in allowed:
            raise ValueError(
                f"{name[:64]!r} cannot be set in the URL, because delivery guarantees rest on the "
                f"options of a connection; only {', '.join(allowed)} can, and connect(url, "
                "timeout=...)."
            )
    connection_class = options.pop("connection_class", Connection)
    return Address(scheme, _shown(url, parts.netloc), options, connection_class)


def _shown(url: str, netloc: str) -> str:
    login = netloc.rpartition("@")[0]
    user, colon, _ = login.partition(":")
    return _PASSWORD.sub("***", url.replace(f"{login}@", f"{user}:***@", 1) if colon else url)


def _default_url() -> str:
    from meteor_py.server import default_directory

    return f"embedded://{quote(str(default_directory()))}"
