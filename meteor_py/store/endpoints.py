"""An endpoint check for store addresses that were read from Redis.

Anyone with write access to a stream's ``settings`` key can set the address. If readers trusted any
endpoint, they would send it requests that are signed with their own cloud credentials. Addresses
that users pass are not checked.
"""

from __future__ import annotations

import os
from urllib.parse import parse_qsl, urlsplit

from meteor_py.errors import StoreMismatch
from meteor_py.redis.address import mask

#: Environment variable that lists the allowed endpoints as ``host:port``, separated by commas.
ENDPOINTS_VARIABLE = "METEOR_STORE_ENDPOINTS"

#: URI parameters that set the endpoint, and those that set how to connect to it.
_ENDPOINTS = ("endpoint_override", "blob_storage_authority", "dfs_storage_authority")
_TRANSPORT = ("scheme", "enable_tls")
#: URI schemes whose host is the endpoint.
_HOSTS = ("hdfs", "viewfs")


def check_endpoint(uri: str, stream: str) -> None:
    """Check the endpoint in an address that was read from Redis.

    Raises:
        StoreMismatch: ``$METEOR_STORE_ENDPOINTS`` does not allow that endpoint.
    """
    parts = urlsplit(uri)
    parameters = dict(parse_qsl(parts.query))
    named = [parameters[name] for name in _ENDPOINTS if name in parameters]
    if parts.scheme in _HOSTS:
        named.append(parts.netloc.rpartition("@")[2])
    overrides = bool(named) or any(name in parameters for name in _TRANSPORT)
    allowed = [each.strip() for each in os.environ.get(ENDPOINTS_VARIABLE, "").split(",")]
    if overrides and not (named and all(endpoint in allowed for endpoint in named)):
        endpoint = ", ".join(named) or "a transport that is not the default"
        allow = f"set {ENDPOINTS_VARIABLE}={','.join(named)}, or " if named else ""
        raise StoreMismatch(
            f"The store address for stream {stream!r}, {mask(uri)}, was read from Redis and uses "
            f"{endpoint}. This may be an attempt to steal your credentials.",
            stream=stream,
            hint=f"If you trust this address, {allow}open the stream with "
            "client.stream(name, store=...).",
        )
