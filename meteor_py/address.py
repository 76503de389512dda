"""Addresses of servers: what a URL means, with its secrets kept out of sight."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.connection import AbstractConnection, Connection, parse_url

#: The environment variable that names the server when ``connect()`` is given none.
URL_VARIABLE = "METEOR_URL"

_REMOTE = ("redis", "rediss", "unix")
_SECRET = re.compile(r"(?<=:)[^/@]*(?=@)|(?<=password=)[^&]*", re.IGNORECASE)


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
    """Replace the password of every URL in ``text``.

    >>> mask("redis://:secret@host:6379/0")
    'redis://:***@host:6379/0'
    """
    return _SECRET.sub("***", text)


def parse(url: str | None) -> Address:
    """Understand ``url``; None means ``$METEOR_URL``, else the user's own kept server.

    Raises:
        ValueError: The scheme is not one of ours, or the URL is malformed.
    """
    if url is None:
        url = os.environ.get(URL_VARIABLE) or _default_url()
    scheme, separator, _ = url.partition("://")
    if separator and scheme in _REMOTE:
        return _remote(url, scheme)
    if separator and scheme in ("embedded", "fake"):
        parts = urlsplit(url)
        if scheme == "embedded" and parts.netloc:
            raise ValueError(
                f"{mask(url)!r} has two slashes before a name; write embedded:///absolute/path "
                "for a kept server, or embedded:// for a private one."
            )
        return Address(scheme, url, place=unquote(parts.netloc + parts.path) or None)
    raise ValueError(
        f"{mask(url)!r} is not an address of a server; use redis://, rediss://, unix://, "
        "embedded://, embedded:///directory or fake://."
    )


def _remote(url: str, scheme: str) -> Address:
    try:
        options = parse_url(url)
    except ValueError as error:
        raise ValueError(f"{mask(url)!r} is not a valid address: {mask(str(error))}") from None
    connection_class = options.pop("connection_class", Connection)
    for name in ("socket_timeout", "socket_connect_timeout", "retry_on_timeout", "protocol"):
        if name in options:
            raise ValueError(
                f"{name!r} cannot be set in the URL, because delivery guarantees rest on it; "
                "use connect(url, timeout=...)."
            )
    return Address(scheme, mask(url), options, connection_class)


def _default_url() -> str:
    from meteor_py.server import default_directory

    return f"embedded://{default_directory()}"
