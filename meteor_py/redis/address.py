"""Server addresses: parsing URLs, and masking the secrets in them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from redis.connection import AbstractConnection, Connection, parse_url

_log = logging.getLogger(__name__)

#: The environment variable that holds the default address for ``connect()``.
URL_VARIABLE = "METEOR_URL"

_REMOTE = ("redis", "rediss", "unix")
#: Schemes of addresses that list several servers, with the default port of those servers.
_SEVERAL = {
    "redis+cluster": 6379,
    "rediss+cluster": 6379,
    "redis+sentinel": 26379,
    "rediss+sentinel": 26379,
}
#: The parts of an address that lists several servers. A host name cannot contain an @, so an
#: unescaped @ belongs to the password.
_PARTS = re.compile(
    r"(?P<scheme>[^:]+)://((?P<login>[^/?#]*)@)?(?P<hosts>[^/?#@]*)"
    r"(?P<path>/[^?#]*)?(\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(\[(?P<ip6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:\s]+))(:(?P<port>[0-9]{1,5}))?")
#: Options that any server URL can set. For these options, redis-py sends login commands and reads
#: their replies before the connection is used. meteor_py itself sets all options that no URL can
#: set.
LOGIN_OPTIONS = ("client_name", "db", "password", "username")
#: Options for addresses that list several servers. Sentinels have their own users.
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_SEVERAL_OPTIONS = {"": (), "+cluster": ("remap",), "+sentinel": ("remap", *_SENTINEL_OPTIONS)}
_TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile",
    "ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_min_version", "ssl_password",
)  # fmt: skip
_REMAP_NEEDS_SEVERAL = "remap is for redis+cluster:// and redis+sentinel:// addresses only."
_CERT_REQS = ("required", "optional", "none")
_TLS_VERSIONS = (771, 772)  # values of ssl.TLSVersion; older versions are insecure
#: Parameters in server and store URLs whose values are not secret. The values of all others are
#: masked.
_HARMLESS = (
    "allow_bucket_creation", "allow_bucket_deletion", "blob_storage_authority", "buffer_size",
    "client_id", "client_name", "credential_kind", "db", "default_bucket_location",
    "dfs_storage_authority", "enable_tls", "endpoint_override", "project_id", "region",
    "remap", "replication", "retry_limit_seconds", "scheme", "sentinel_username", "ssl_ca_certs",
    "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_ciphers",
    "ssl_keyfile", "ssl_min_version", "tenant_id", "user", "username",
)  # fmt: skip
_PARAMETER = re.compile(r"(?<=[?&])([^=&#\s]{1,200})=([^&#\s'\"]*)")
#: Matches secrets in texts other than URLs, such as error messages from libraries.
_QUOTED = re.compile(r"((?:password|secret|key|token|sig)=)[^&\s'\"]*", re.IGNORECASE)
#: Truncate texts to this many characters before masking. A server can send a text of any length.
_TEXT_MAX = 4_000


#: Host and port of a server.
Node = tuple[str, int]


@dataclass(frozen=True)
class Address:
    """The address of a single server, a cluster, or a primary that sentinels monitor.

    It includes the connection options. ``str()`` and ``repr()`` hide secrets.
    """

    scheme: str
    #: The address without secrets.
    shown: str
    #: Arguments for the connection class. They may include a password.
    options: dict[str, Any] = field(default_factory=dict, repr=False)
    connection_class: Callable[..., AbstractConnection] = field(default=Connection, repr=False)
    #: The directory of an embedded server, or the name of a shared fake server; otherwise None.
    place: str | None = None
    #: The cluster nodes or sentinels that the URL lists.
    seeds: tuple[Node, ...] = ()
    #: The name by which the sentinels know the primary.
    service: str = ""
    #: Like ``options``, but for connections to the sentinels.
    sentinel_options: dict[str, Any] = field(default_factory=dict, repr=False)
    #: Maps the addresses that nodes announce to addresses that this client can reach.
    remap: Mapping[Node, Node] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.shown

    @property
    def kind(self) -> str:
        """``"cluster"``, ``"sentinel"``, or ``""`` for a single server."""
        return self.scheme.partition("+")[2]

    @property
    def uses_tls(self) -> bool:
        return self.scheme.startswith("rediss")

    def at(self, node: Node) -> Address:
        """Return the address of a cluster node or of the primary."""
        return self._single(node, self.options)

    def sentinel_at(self, node: Node) -> Address:
        """Return the address of a sentinel."""
        return self._single(node, self.sentinel_options)

    def _single(self, node: Node, options: dict[str, Any]) -> Address:
        host, port = self.remap.get(node, node)
        scheme = "rediss" if self.uses_tls else "redis"
        options = {**options, "host": host, "port": port}
        shown = f"{scheme}://{show_node((host, port))}"
        return Address(scheme, shown, options, self.connection_class)


def show_node(node: Node) -> str:
    """Return host and port as they appear in an address.

    >>> show_node(("::1", 6379))
    '[::1]:6379'
    """
    host, port = node
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def mask(text: str) -> str:
    """Mask the secrets of a URL in ``text``, even if the URL is malformed. Truncate a long text.

    User names stay visible, with one exception. If a server's URL has a user name but no password,
    the user name may be a misplaced password, so it is masked too. Only URL parameters that are
    known to be harmless keep their values.

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
    # Split at the last @, because a password may contain an unescaped @.
    login, at, tail = rest.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        is_user = (colon or not before.endswith((*_REMOTE, *_SEVERAL))) and not re.search(
            r"[/?\s]", user
        )
        shown = user if is_user else ""
        hidden = ":***" if colon else "" if is_user else "***"
        text = f"{before}{separator}{shown}{hidden}@{tail}"
    return _QUOTED.sub(r"\1***", _PARAMETER.sub(_mask_parameter, text))


def _mask_parameter(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}={value if unquote(name).lower() in _HARMLESS else '***'}"


def parse(url: str | None, remap: Mapping[Node, Node] | None = None) -> Address:
    """Parse ``url``. None means ``$METEOR_URL`` if set, or the user's personal server.

    The first use of the personal server is logged: in a deployment, the variable may be misspelled.

    Args:
        remap: For a cluster or sentinels, a mapping ``{(host, port): (host, port)}``. It maps an
            address that a node announces to an address that this client can reach. Its entries
            override those of the ``remap`` in the URL.

    Raises:
        ValueError: The scheme is unknown, the URL is malformed or sets an option that no URL can
            set, or ``remap`` was passed for a single server.
        TypeError: ``url`` is not a str, or ``remap`` is not such a mapping.
    """
    if url is None:
        url = os.environ.get(URL_VARIABLE) or _default_url()
    if not isinstance(url, str):
        raise TypeError(f"An address must be a str, not {type(url).__name__}.")
    scheme, separator, _ = url.partition("://")
    if separator and scheme in _SEVERAL:
        found = _several(url)
        return replace(found, remap={**found.remap, **_check_remap(remap or {})})
    if remap:
        raise ValueError(_REMAP_NEEDS_SEVERAL)
    if separator and scheme in _REMOTE:
        return _remote(url, scheme)
    if separator and scheme in ("embedded", "fake"):
        place = url.removeprefix(f"{scheme}://")
        if scheme == "embedded" and place and not place.startswith("/"):
            raise ValueError(
                f"{mask(url)!r} has two slashes before the path instead of three. Write "
                "embedded:///absolute/path to keep the data there, or embedded:// for a private "
                "server."
            )
        return Address(scheme, url, place=unquote(place) or None)
    shown = mask(url) if separator else mask(f"://{url}")[3:]
    raise ValueError(
        f"{shown!r} is not the address of a server. Use redis://, rediss://, redis+cluster://, "
        "redis+sentinel://, unix://, embedded://, embedded:///directory or fake://."
    )


def _several(url: str) -> Address:
    """Parse the address of a cluster, or of a primary that sentinels monitor."""
    match = _PARTS.fullmatch(url)
    scheme = url.partition("://")[0]
    base, _, kind = scheme.partition("+")
    form = f"{scheme}://user:password@host1:port,host2:port"
    form += "/name/database" if kind == "sentinel" else ""
    try:
        if match is None:
            raise ValueError("it contains an unescaped character")
        seeds = _hosts(match["hosts"], _SEVERAL[scheme])
        service, database = _split_path(match["path"] or "", kind)
        own, query = _take_own_options(match["query"] or "", kind)
        remap = _parse_remap(own.pop("remap", ""))
    except ValueError as error:
        reason = _without_secrets(str(error), url)
        raise ValueError(f"{mask(url)!r} is not a valid address: {reason}. Write {form}.") from None
    login = f"{match['login']}@" if match["login"] else ""
    single = _remote(f"{base}://{login}{show_node(seeds[0])}/{database}?{query}", base, f"+{kind}")
    options = {key: value for key, value in single.options.items() if key not in ("host", "port")}
    tls = {key: value for key, value in options.items() if key in _TLS_OPTIONS}
    return Address(
        *(scheme, mask(url), options, single.connection_class, None, seeds, service),
        sentinel_options={} if kind == "cluster" else tls | own,
        remap=remap,
    )


def _hosts(text: str, port: int) -> tuple[Node, ...]:
    found: list[Node] = []
    for part in text.split(","):
        node = _parse_node(part, port)
        if node is None:
            raise ValueError(
                f"{part!r} is not a host or host:port (write an IPv6 address in brackets)"
            )
        found.append(node)
    return tuple(dict.fromkeys(found))


def _parse_node(text: str, default_port: int = 0) -> Node | None:
    """Return host and port; None if the text is malformed, or has no port and needs one."""
    match = _HOST.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    return (match["ip6"] or match["name"], port) if match and 0 < port < 65_536 else None


def _parse_remap(text: str) -> dict[Node, Node]:
    """Parse ``announced=reachable,announced=reachable``; each is a host and its port.

    >>> _parse_remap("172.18.0.2:6379=localhost:7001")
    {('172.18.0.2', 6379): ('localhost', 7001)}
    """
    found: dict[Node, Node] = {}
    for pair in filter(None, text.split(",")):
        announced, reachable = (_parse_node(part) for part in pair.partition("=")[::2])
        if announced is None or reachable is None:
            raise ValueError(f"{pair!r} in remap is not announced_host:port=reachable_host:port")
        found[announced] = reachable
    return found


def _split_path(path: str, kind: str) -> tuple[str, str]:
    """Return the name of the primary and the database number."""
    parts = [unquote(part) for part in path.removeprefix("/").split("/")]
    service = parts.pop(0) if kind == "sentinel" else ""
    database = parts.pop(0) if parts else ""
    if kind == "sentinel" and not service:
        raise ValueError("the name of the primary is missing after the hosts")
    if any(parts) or not re.fullmatch(r"[0-9]{0,5}", database):
        raise ValueError("the last part of the path must be a database number")
    if kind == "cluster" and database not in ("", "0"):
        raise ValueError("a cluster has only database 0")
    return service, database


def _take_own_options(query: str, kind: str) -> tuple[dict[str, str], str]:
    """Split a query: return the options that the address of a single server cannot have, and the
    rest of the query."""
    pairs = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in pairs if name in _SEVERAL_OPTIONS["+sentinel"]]
    taken = {name: value for name, value in pairs if name in names}
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} occurs more than once")
        if name not in _SEVERAL_OPTIONS[f"+{kind}"]:
            raise ValueError(f"{name} is for redis+sentinel:// addresses only")
    if kind == "cluster" and dict(pairs).get("db", "0") != "0":
        raise ValueError("a cluster has only database 0")
    rest = urlencode([pair for pair in pairs if pair[0] not in taken])
    return {name.removeprefix("sentinel_"): value for name, value in taken.items()}, rest


def _check_remap(remap: Mapping[Node, Node]) -> dict[Node, Node]:
    for node in (*remap.keys(), *remap.values()):
        well_formed = isinstance(node, tuple) and len(node) == 2
        if not (well_formed and isinstance(node[0], str) and isinstance(node[1], int)):
            raise TypeError(
                f"remap must map (host, port) to (host, port); {node!r} is not such a pair."
            )
    return dict(remap)


def _without_secrets(reason: str, url: str) -> str:
    """Return ``reason``, or a general reason if this one may quote the password in ``url``."""
    if "@" in url and "'" in reason:
        return "a port is not a number, or the password contains an unescaped character"
    return reason


def _remote(url: str, scheme: str, kind: str = "") -> Address:
    try:
        parts = urlsplit(url)
        options = parse_url(url)
        if scheme == "unix" and not parts.path:
            raise ValueError("the socket path is missing")
        if scheme != "unix" and not re.fullmatch(r"/?|/[0-9]{1,5}", parts.path):
            raise ValueError("the part after the slash must be a database number")
    except ValueError as error:
        reason = _without_secrets(str(error).rstrip("."), url)
        raise ValueError(
            f"{mask(url)!r} is not a valid address: {reason}. Write "
            "redis://user:password@host:port/database or unix:///path/to/socket."
        ) from None
    allowed = LOGIN_OPTIONS + (_TLS_OPTIONS if scheme == "rediss" else ())
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        if name not in allowed:
            if name in _TLS_OPTIONS:
                raise ValueError(f"{name!r} is a TLS option. Use rediss{kind}:// for TLS.")
            if name == "remap":
                raise ValueError(_REMAP_NEEDS_SEVERAL)
            allowed += _SEVERAL_OPTIONS[kind]
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
        # Without a password, OpenSSL would prompt for an encrypted key's password on the terminal.
        options.setdefault("ssl_password", "")


def _default_url() -> str:
    from meteor_py.server import default_directory

    directory = default_directory()
    _log_default(directory)
    return f"embedded://{quote(str(directory))}"


@cache  # log once per process
def _log_default(directory: Path) -> None:
    _log.warning(
        "%s is not set, so this process uses your personal server, which keeps its data in %s. To "
        "use another server, set the variable, or pass an address to connect().",
        *(URL_VARIABLE, directory),
    )
