"""The streams on a server: create, find and list them."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from meteor_py.errors import (
    AccessDenied,
    ConnectionFailed,
    MeteorError,
    OutOfMemory,
    StreamConfigMismatch,
    StreamNotFound,
)
from meteor_py.records.config import STORE_SETTINGS, UNARCHIVED_CAPACITIES, StreamConfig
from meteor_py.records.descriptions import Meta
from meteor_py.redis import keys
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import CONVERT_SETTINGS, CREATE_STREAM, RESUME_STREAM
from meteor_py.store.base import RingbufferStore
from meteor_py.store.identity import store_fields
from meteor_py.store.state import StreamState

#: Maximum number of names to check in one pipeline.
_NAMES = 1000


def find_stream(connector: Connector, name: str) -> Meta:
    """Return an existing stream's meta.

    Raises:
        StreamNotFound: The stream does not exist.
    """
    meta = read_meta(connector, name)
    if meta is None:
        similar = _similar_names(connector, name)
        guess = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        raise StreamNotFound(
            f"There is no stream {name!r} on {connector.address}.{guess}",
            stream=name,
            hint="Create it with client.stream(name, create=True) or by opening a publisher.",
            similar=similar,
        )
    return meta


def _similar_names(connector: Connector, name: str) -> list[str]:
    try:
        names = list_names(connector, keys.STREAMS, keys.meta)
    except MeteorError:  # the ACL may allow access to a stream but not to the list of streams
        return []
    return difflib.get_close_matches(name, names)


def create_stream(
    connector: Connector,
    name: str,
    config: StreamConfig,
    max_unarchived: int | None = None,
    store: RingbufferStore | None = None,
    *,
    resume: bool = False,
) -> tuple[bool, Meta]:
    """Create a stream if it does not exist. Return whether this call created it, and its meta."""
    extra: dict[str, str] = {}
    state: StreamState | None = None
    wanted = config if max_unarchived is None else replace(config, max_unarchived=max_unarchived)
    needing = [setting for setting in STORE_SETTINGS if getattr(wanted, setting) is not None]
    if store is not None or needing:
        meta = read_meta(connector, name)
        if meta is not None:
            return False, meta
        if store is None:
            raise ValueError(f"{needing[0]} needs a stream with a store. Pass store= as well.")
        limit = max_unarchived or UNARCHIVED_CAPACITIES * config.capacity
        config = replace(config, store=store.uri, max_unarchived=limit).check_room()
        extra, state = store_fields(connector, store, name, resume)
    try:
        connector.call("SADD", keys.STREAMS, name)
    except OutOfMemory:
        meta = read_meta(connector, name)
        if meta is None:
            raise
        return False, meta  # on a full server, clients can still open a stream to read or delete
    incarnation = extra.pop("incarnation", None) or secrets.token_hex(8)
    fields = [item for pair in (config.to_fields() | extra).items() for item in pair]

    def create(connection: Connection) -> Any:
        if state is not None:
            return _resume(connection, name, incarnation, fields, state)
        args = [incarnation, connection.history, *fields]
        return connection.run(CREATE_STREAM, [keys.meta(name), keys.settings(name)], args)

    created, flat, settings = connector.use(create, name)
    return bool(created), _converted(connector, name, Meta.parse(name, flat, settings), flat)


def _resume(
    connection: Connection, name: str, incarnation: str, fields: list[str], state: StreamState
) -> Any:
    """Create a stream with the state saved in its store."""
    fields = [*fields, "history", connection.history]
    args: list[Any] = [incarnation, len(fields), *fields]
    for group, at in state.groups.items():
        confirmed = "" if at.confirmed is None else at.confirmed
        args += [group, at.start, confirmed, at.floating, at.term]
    for writer, fence in state.fences.items():
        args += [writer.encode(errors="surrogateescape"), fence]
    script_keys = [keys.meta(name), keys.settings(name), keys.fences(name), keys.groups(name)]
    script_keys += [keys.group(name, group) for group in state.groups]
    return connection.run(RESUME_STREAM, script_keys, args)


def check_settings(name: str, meta: Meta, requested: Mapping[str, object]) -> None:
    """Raise ``StreamConfigMismatch`` unless the stream has the requested settings."""
    for setting, value in requested.items():
        found = getattr(meta.config, setting)
        if found != value:
            # An ordering key may be added, but not changed.
            fixed = setting == "codec" or (setting == "ordering_key" and found is not None)
            change = "create another stream" if fixed else "change it with stream.configure()"
            raise StreamConfigMismatch(
                f"Stream {name!r} already exists with {setting}={found!r}, not {value!r}.",
                stream=name,
                hint=f"Omit {setting}, or {change}.",
                setting=setting,
                changeable=not fixed,
            )


def list_names(connector: Connector, names: str, key: Callable[[str], str]) -> list[str]:
    """Return the members of the set ``names`` whose key exists, sorted."""
    # meteor_py writes only UTF-8 names. Any other name is escaped here and matches no key.
    members = connector.call("SMEMBERS", names)
    listed = sorted(name.decode(errors="backslashreplace") for name in members)
    found: list[str] = []
    for start in range(0, len(listed), _NAMES):
        part = listed[start : start + _NAMES]
        replies = connector.pipeline([("EXISTS", key(name)) for name in part])
        found += [name for name, exists in zip(part, replies, strict=True) if exists]
    return found


def read_meta(connector: Connector, name: str) -> Meta | None:
    """Return a stream's meta, or None if the stream does not exist.

    If an older release created the stream, convert its settings, unless the ACL forbids that.
    """
    commands = [("HGETALL", keys.meta(name)), ("HGETALL", keys.settings(name))]
    try:
        flat, settings = connector.pipeline(commands)
    except AccessDenied:  # ACL rules for an older release do not mention ``settings``
        flat, settings = connector.call(*commands[0]), []
    if not flat:
        return None
    return _converted(connector, name, Meta.parse(name, flat, settings), flat)


def _converted(connector: Connector, name: str, meta: Meta, flat: list[bytes]) -> Meta:
    """Convert the settings of an older release, unless the ACL forbids that; return the meta."""
    if meta.verified:
        return meta
    script_keys = [keys.meta(name), keys.settings(name)]
    try:
        reply = connector.run(CONVERT_SETTINGS, script_keys, [meta.incarnation])
    except (AccessDenied, ConnectionFailed) as error:
        if isinstance(error, ConnectionFailed) and not error.answered:
            raise
        return meta  # this client is not allowed to convert them, or the server is a replica
    # If the stream was deleted or recreated in the meantime, the caller's next call detects it.
    return Meta.parse(name, flat, reply[1]) if reply[0] == b"OK" else meta
