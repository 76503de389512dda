"""The server and store contents that an earlier version left, saved as test fixtures.

``dump()`` returns the keys of a server as readable JSON, and ``PreviousVersion`` loads them into
any server.

The JSON lists every key with its type, content and remaining time to live. Unlike RDB files and
DUMP payloads, it does not depend on the server's version. Bytes that are not UTF-8 are written as
``{"base64": "..."}``.

    previous = PreviousVersion("version_0_1")
    previous.load(url, store=tmp_path / "store")
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import redis

import meteor_py as meteor
from tests.support.servers import plain_client

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

#: Placeholder for the store's URI, an absolute path that differs on each machine.
STORE_MARK = "file:///STORE"
STORE_FIELD = b"store_uri"

Json = Any


class PreviousVersion:
    """The server and store contents that one earlier version left."""

    def __init__(self, version: str) -> None:
        folder = FIXTURES / version
        #: All keys on that version's server.
        self.keys: list[Json] = json.loads((folder / "server.json").read_text())
        #: The records of all streams as that version itself read them.
        self._records: list[Json] = json.loads((folder / "records.json").read_text())
        self._store = folder / "store"

    def records(self, stream: str) -> list[meteor.Record]:
        """Return the records of a stream as that version read them. Values are not decoded."""

        def data(text: str | None) -> bytes | None:
            return None if text is None else base64.b64decode(text)

        return [
            meteor.Record(
                offset=row["offset"],
                value=data(row["value"]),
                key=data(row["key"]),
                headers=row["headers"] and {k: data(v) or b"" for k, v in row["headers"].items()},
                timestamp=row["timestamp"],
                appended=row["appended"],
            )
            for row in self._records
            if row["stream"] == stream
        ]

    def load(self, url: str, *, store: Path) -> None:
        """Load that version's keys into an empty server, and copy its store to ``store``.

        The folder ``store`` must not exist. The keys' TTLs start now. Timestamps in the data do not
        change, so they are in the past.
        """
        shutil.copytree(self._store, store)
        with plain_client(url) as client:
            for key in self.keys:
                restore(client, key, store_uri=store.resolve().as_uri())


# Dumping


def dump(client: redis.Redis, *, store_uri: str) -> list[Json]:
    """Return all keys on a server, sorted by name, with a placeholder for the store's URI."""
    found: list[Json] = []
    names: Any = client.keys("*")
    for name in sorted(names):
        kind: Any = client.type(name)
        ttl: Any = client.pttl(name)
        content = _DUMPS[kind.decode()](client, name)
        if kind == b"hash":
            content = [
                [field, STORE_MARK if value == store_uri else value] for field, value in content
            ]
        found.append(
            {
                "name": to_json(name),
                "type": kind.decode(),
                "ttl_ms": None if ttl < 0 else ttl,
                "content": content,
            }
        )
    return found


def _dump_stream(client: redis.Redis, name: bytes) -> Json:
    entries: Any = client.xrange(name)
    info: Any = client.xinfo_stream(name)
    return {
        "entries": [
            [entry.decode(), [[to_json(field), to_json(value)] for field, value in fields.items()]]
            for entry, fields in entries
        ],
        "last_id": info["last-generated-id"].decode(),
        "entries_added": info["entries-added"],
        "max_deleted_id": info["max-deleted-entry-id"].decode(),
    }


def _dump_hash(client: redis.Redis, name: bytes) -> Json:
    fields: Any = client.hgetall(name)
    return [[to_json(field), to_json(value)] for field, value in sorted(fields.items())]


def _dump_zset(client: redis.Redis, name: bytes) -> Json:
    members: Any = client.zrange(name, 0, -1, withscores=True)
    return [[to_json(member), repr(score)] for member, score in members]


_DUMPS: dict[str, Any] = {
    "string": lambda client, name: to_json(client.get(name)),
    "list": lambda client, name: [to_json(item) for item in client.lrange(name, 0, -1)],
    "set": lambda client, name: [to_json(member) for member in sorted(client.smembers(name))],
    "hash": _dump_hash,
    "zset": _dump_zset,
    "stream": _dump_stream,
}


def to_json(data: bytes) -> Json:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


# Loading


def restore(client: redis.Redis, key: Json, *, store_uri: str) -> None:
    """Create one key, replacing the placeholder with ``store_uri``."""
    name, content = to_bytes(key["name"]), key["content"]
    match key["type"]:
        case "string":
            client.execute_command("SET", name, to_bytes(content))
        case "list":
            client.execute_command("RPUSH", name, *map(to_bytes, content))
        case "set":
            client.execute_command("SADD", name, *map(to_bytes, content))
        case "hash":
            fields = {to_bytes(field): to_bytes(value) for field, value in content}
            if fields.get(STORE_FIELD) == STORE_MARK.encode():
                fields[STORE_FIELD] = store_uri.encode()
            client.execute_command("HSET", name, *_flat(fields.items()))
        case "zset":
            pairs = [(score, to_bytes(member)) for member, score in content]
            client.execute_command("ZADD", name, *_flat(pairs))
        case "stream":
            _restore_stream(client, name, content)
        case other:
            raise ValueError(f"The dump contains a key of unknown type {other!r}.")
    if key["ttl_ms"] is not None:
        client.pexpire(name, key["ttl_ms"])


def _restore_stream(client: redis.Redis, name: bytes, content: Json) -> None:
    if not content["entries"]:  # only XGROUP can create an empty stream
        client.execute_command("XGROUP", "CREATE", name, "x", "0", "MKSTREAM")
        client.execute_command("XGROUP", "DESTROY", name, "x")
    for entry, fields in content["entries"]:
        pairs = [(to_bytes(field), to_bytes(value)) for field, value in fields]
        client.execute_command("XADD", name, entry, *_flat(pairs))
    added, deleted = content["entries_added"], content["max_deleted_id"]
    client.execute_command(
        *("XSETID", name, content["last_id"], "ENTRIESADDED", added, "MAXDELETEDID", deleted)
    )


def to_bytes(data: Json) -> bytes:
    return data.encode() if isinstance(data, str) else base64.b64decode(data["base64"])


def _flat(pairs: Any) -> list[Any]:
    return [item for pair in pairs for item in pair]
