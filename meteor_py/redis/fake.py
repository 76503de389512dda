"""``fake://``: fakeredis in this process, for tests. It has no persistence and no replicas."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from meteor_py.redis.address import Address

_lock = threading.Lock()
_shared: dict[str, Any] = {}


def fake_address(address: Address) -> Address:
    """Resolve ``fake://name`` to the fake server of that name, and ``fake://`` to a private one."""
    try:
        from fakeredis import FakeRedisConnection, FakeServer
    except ImportError as error:
        raise ImportError(
            "fake:// needs fakeredis. Install it with: pip install 'meteor-py[fake]'"
        ) from error
    with _lock:
        server = FakeServer() if address.place is None else _shared.get(address.place)
        if server is None:
            server = _shared[str(address.place)] = FakeServer()
    return replace(address, options={"server": server}, connection_class=FakeRedisConnection)
