"""Which streams exist on a server: creating one, finding one, listing them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meteor_py.errors import OutOfMemory, StreamConfigMismatch, StreamNotFound
from meteor_py.records.config import UNARCHIVED_CAPACITIES, StreamConfig
from meteor_py.records.descriptions import Meta
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import CREATE_STREAM
from meteor_py.store.base import RingbufferStore
from meteor_py.store.identity import store_fields

#: Names that one pipeline asks about.
_NAMES = 1000
#: Settings that are fixed when a stream is created.
_FIXED = ("codec", "ordering_key")


def find_stream(connector: Connector, name: str) -> Meta:
    """Return the meta of an existing stream.

    Raises:
        StreamNotFound: There is none.
    """
    meta = _read_meta(connector, name)
    if meta is None:
        raise StreamNotFound(
            f"There is no stream {name!r} on {connector.address}; publish to it, or create it "
            "with client.stream(name).",
            stream=name,
        )
    return meta


def create_stream(
    connector: Connector,
    name: str,
    config: StreamConfig,
    max_unarchived: int | None = None,
    store: RingbufferStore | None = None,
    *,
    resume: bool = False,
) -> tuple[bool, Meta]:
    """Create a stream unless it exists. Returns whether this call created it, and its meta."""
    extra: dict[str, str] = {}
    if store is not None or max_unarchived is not None:
        meta = _read_meta(connector, name)
        if meta is not None:
            return False, meta
        if store is None:
            raise ValueError("max_unarchived is for a stream with a store; give store= as well.")
        most = max_unarchived or UNARCHIVED_CAPACITIES * config.capacity
        config = replace(config, store=store.uri, max_unarchived=most).check_room()
        extra = store_fields(connector, store, name, resume)
    try:
        connector.call("SADD", keys.STREAMS, name)
    except OutOfMemory:
        meta = _read_meta(connector, name)
        if meta is None:
            raise
        return False, meta  # a full server can still be read, and emptied
    fields = [item for pair in (config.to_fields() | extra).items() for item in pair]
    incarnation = extra.get("incarnation") or secrets.token_hex(8)

    def create(connection: Connection) -> Any:
        args = [incarnation, connection.history, *fields]
        return connection.run(CREATE_STREAM, [keys.meta(name)], args)

    created, flat = connector.use(create)
    return bool(created), Meta.parse(name, flat)


def check_settings(name: str, meta: Meta, asked: Mapping[str, object]) -> None:
    """Raise ``StreamConfigMismatch`` unless the stream has the settings that were asked for."""
    for setting, value in asked.items():
        found = getattr(meta.config, setting)
        if found != value:
            fixed = setting in _FIXED
            change = "create another stream" if fixed else "change it with stream.configure()"
            raise StreamConfigMismatch(
                f"Stream {name!r} exists with {setting}={found!r}, not {value!r}.",
                stream=name,
                hint=f"Omit {setting}, or {change}.",
                setting=setting,
                changeable=not fixed,
            )


def list_names(connector: Connector, names: str, key: Callable[[str], str]) -> list[str]:
    """Return the members of the set ``names`` that have a key, sorted."""
    # A name that cannot be decoded is not ours: written like this, it has no key.
    members = connector.call("SMEMBERS", names)
    listed = sorted(name.decode(errors="backslashreplace") for name in members)
    found: list[str] = []
    for start in range(0, len(listed), _NAMES):
        part = listed[start : start + _NAMES]
        replies = connector.pipeline([("EXISTS", key(name)) for name in part])
        found += [name for name, exists in zip(part, replies, strict=True) if exists]
    return found


def _read_meta(connector: Connector, name: str) -> Meta | None:
    flat = connector.call("HGETALL", keys.meta(name))
    return Meta.parse(name, flat) if flat else None
