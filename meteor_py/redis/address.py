"""Server addresses: parses URLs and masks their secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from redis.connection import AbstractConnection, Connection, parse_url

#: The environment variable with the default address for ``connect()``.
URL_VARIABLE = "METEOR_URL"

_REMOTE = ("redis", "rediss", "unix")
#: Options that a URL may set. meteor_py sets all others itself. For each option that is set,
#: redis-py sends a command and reads the reply before a connection is used.
LOGIN_OPTIONS = ("client_name", "db", "password", "username")
_TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile",
    "ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password",
)  # fmt: skip
_CERT_REQS = ("required", "optional", "none")
_TLS_VERSIONS = (771, 772)  # values of ssl.TLSVersion; older versions are broken
#: Parameters in URLs of servers and stores whose values are not secret. All others are masked.
_HARMLESS = (
    "allow_bucket_creation", "allow_bucket_deletion", "blob_storage_authority", "buffer_size",
    "client_id", "client_name", "credential_kind", "db", "default_bucket_location",
    "dfs_storage_authority", "enable_tls", "endpoint_override", "project_id", "region",
    "replication", "retry_limit_seconds", "scheme", "ssl_ca_certs", "ssl_ca_path",
    "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers", "ssl_keyfile",
    "ssl_min_version", "tenant_id", "user", "username",
)  # fmt: skip
_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s]{1,200})=([^&#\s'\"]*)")
#: Matches secrets that libraries quote outside a URL.
_QUOTED = re.compile(r"((?:password|secret|key|token|sig)=)[^&\s'\"]*", re.IGNORECASE)
#: Maximum number of characters of a text to mask. A server may send a text of any length.
_TEXT_MAX = 4_000


@dataclass(frozen=True)
class Address:
    """The address of a server, and how to connect to it. ``str()`` and ``repr()`` hide secrets."""

    scheme: str
    #: The address without secrets.
    shown: str
    #: Arguments for the connection class. They may include a password.
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    connection_class: Callable[..., AbstractConnection] = field(default=Connection, repr=False)
    #: Directory of a kept embedded server, or name of a shared fake one.
    place: str | None = None

    def __str__(self) -> str:
        return self.shown


def mask(text: str) -> str:
    """Mask the secrets of a URL in ``text``, even if the URL is malformed. Truncate a long text.

    The user name stays visible. But in a server's URL, a user name without a password is masked as
    well, because it may be a password in the wrong place. Of the URL's parameters, only those that
    are known to be harmless keep their values.

    >>> mask("redis://app:secret@host:6379/0")
    'redis://app:***@host:6379/0'
    >>> mask("redis://secret@host:6379/0")
    'redis://***@host:6379/0'
    >>> mask("s3://bucket/prefix?account_key=abc&region=eu")
    's3://bucket/prefix?account_key=***&region=eu'
    """
    if len(text) > _TEXT_MAX:
        text = f"{text[:_TEXT_MAX]}..."
    before, separator, rest = text.partition("://")
    # Split at the last @: a password may contain an unescaped one.
    login, at, tail = rest.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        is_user = (colon or not before.endswith(_REMOTE)) and not re.search(r"[/?\s]", user)
        shown = user if is_user else ""
        hidden = ":***" if colon else "" if is_user else "***"
        text = f"{before}{separator}{shown}{hidden}@{tail}"
    return _QUOTED.sub(r"\1***", _PARAMETER.sub(_mask_parameter, text))


def _mask_parameter(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}={value if unquote(name).lower() in _HARMLESS else '***'}"


def parse(url: str | None) -> Address:
    """Parse ``url``. None means ``$METEOR_URL`` if set, or the user's default embedded server.

    Raises:
        ValueError: The scheme is unknown, or the URL is malformed.
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
                f"{mask(url)!r} has two slashes before the path instead of three. Write "
                "embedded:///absolute/path for a kept server, or embedded:// for a private one."
            )
        return Address(scheme, url, place=unquote(place) or None)
    shown = mask(url) if separator else mask(f"://{url}")[3:]
    raise ValueError(
        f"{shown!r} is not the address of a server. Use redis://, rediss://, unix://, "
        "embedded://, embedded:///directory or fake://."
    )


def _remote(url: str, scheme: str) -> Address:
    try:
        parts = urlsplit(url)
        options = parse_url(url)
        if scheme == "unix" and not parts.path:
            raise ValueError("the path of the socket is missing")
        if scheme != "unix" and not re.fullmatch(r"/?|/[0-9]{1,5}", parts.path):
            raise ValueError("the part after the slash must be the number of a database")
    except ValueError as error:
        reason = str(error).rstrip(".")
        if "@" in url and "'" in reason:  # the reason may quote the password
            reason = "the port is not a number, or the password has an unescaped character"
        raise ValueError(
            f"{mask(url)!r} is not a valid address: {reason}. Write "
            "redis://user:password@host:port/database or unix:///path/to/socket."
        ) from None
    allowed = LOGIN_OPTIONS + (_TLS_OPTIONS if scheme == "rediss" else ())
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in allowed:
            if name in _TLS_OPTIONS:
                raise ValueError(f"{name!r} is a TLS option. Write rediss:// to use TLS.")
            raise ValueError(
                f"{name[:64]!r} cannot be set in the URL, because delivery guarantees depend on "
                f"connection options. The URL can set {', '.join(allowed)}; set the timeout with "
                "connect(url, timeout=...)."
            )
    if scheme == "rediss":
        _check_tls(options)
    connection_class = options.pop("connection_class", Connection)
    return Address(scheme, mask(url), options, connection_class)


def _check_tls(options: dict[str, Any]) -> None:
    """Refuse options that would otherwise fail in the middle of a connection attempt."""
    wanted = options.get("ssl_cert_reqs", _CERT_REQS[0])
    if wanted not in _CERT_REQS:
        raise ValueError(f"ssl_cert_reqs must be one of {', '.join(_CERT_REQS)}, not {wanted!r}.")
    version = options.get("ssl_min_version", _TLS_VERSIONS[0])
    if version not in _TLS_VERSIONS:
        raise ValueError(f"ssl_min_version must be 771 (TLS 1.2) or 772 (TLS 1.3), not {version}.")
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        raise ValueError("ssl_keyfile needs a certificate. Set ssl_certfile as well.")
    if "ssl_certfile" in options:
        # Otherwise OpenSSL asks for the password of an encrypted key on the terminal.
        options.setdefault("ssl_password", "")


def _default_url() -> str:
    from meteor_py.server import default_directory

    return f"embedded://{quote(str(default_directory()))}"
