"""The settings that readers and archivers act on are in a key that only administrators may write.

Releases before 0.3 kept them in ``meta``, which publishers and members may write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.records.config import ADMIN_FIELDS, GUARDED_FIELDS, StreamConfig
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.redis import keys, scripts
from meteor_py.store.base import TERMS
from meteor_py.store.parquet import ParquetStore
from tests.support.acl_server import connect, roles
from tests.support.acl_server import guarded as guarded
from tests.support.servers import Server

META, SETTINGS = keys.meta("orders"), keys.settings("orders")
#: Roles that may set the fields of ``meta``.
WRITERS = ("publisher", "writer", "member", "archiver")
RECORDS, CAPACITY = 900, 100


def archive(client: meteor.Client, store: Path, **settings: object) -> None:
    """Create the stream, and publish and archive records. The ring keeps only the last ones."""
    stream = client.stream("orders", capacity=CAPACITY, store=store, **settings)  # type: ignore[arg-type]
    with stream.publisher() as pub:
        pub.publish_many([b"honest"] * RECORDS).result()
    assert stream.store.flush() == RECORDS


def forge(folder: Path, incarnation: str, epoch: int) -> dict[str, str | int]:
    """Write a store with forged records; return the ``meta`` fields that make a stream use it."""
    forged = ParquetStore(folder, "orders")
    forged.claim("ab" * 8)
    row = {"timestamp": 0, "appended": 0, "key": None, "value": b"forged", "headers": None}
    rows = [{"offset": offset, **row} for offset in range(RECORDS)]
    forged.append(incarnation, epoch * TERMS + 1, pa.Table.from_pylist(rows, ARROW_SCHEMA))
    address = {"store": "ab" * 8, "store_uri": folder.as_uri()}
    return {**address, "archived": RECORDS, "expired": 0, "max_unarchived": 1000, "retain": 1}


def values(client: meteor.Client) -> set[bytes]:
    stream = client.stream("orders", create=False)
    return {value for batch in stream.read(0) for value in batch.values()}


@contextmanager
def as_written_by_0_2(server: Server) -> Iterator[None]:
    """Delete the settings, as if an older release had created the stream."""
    with server.client() as plain:
        assert plain.delete(SETTINGS) == 1
        yield


@pytest.fixture
def stored(guarded: Server, tmp_path: Path) -> Path:
    """The directory of the store in which the admin has archived the stream."""
    with connect(guarded, "admin") as admin:
        admin.stream("orders", create=True).delete()
        archive(admin, tmp_path / "store")
    return tmp_path / "store"


# Hostile writes


@pytest.mark.parametrize("role", WRITERS)
@pytest.mark.parametrize("reader", ["subscriber", "admin"])
def test_a_role_that_writes_meta_cannot_redirect_readers_to_forged_history(
    guarded: Server, stored: Path, tmp_path: Path, role: str, reader: str
) -> None:
    with connect(guarded, role) as hostile:
        stream = hostile.stream("orders", create=False)
        epoch = int(hostile.redis.hget(META, "epoch") or 0)
        fields = forge(tmp_path / "forged", stream.incarnation, epoch)
        hostile.redis.hset(META, mapping=fields)  # type: ignore[arg-type]
    with connect(guarded, reader) as client:
        assert values(client) == {b"honest"}
        config = client.stream("orders", create=False).describe().config
        assert (config.store, config.retain) == (stored.as_uri(), None)


@pytest.mark.parametrize("reader", ["subscriber", "admin"])
def test_a_role_that_writes_meta_cannot_give_a_store_to_a_stream_that_has_none(
    guarded: Server, tmp_path: Path, reader: str
) -> None:
    with connect(guarded, "publisher") as hostile:
        stream = hostile.stream("orders", create=False)
        fields = forge(tmp_path, stream.incarnation, 1)
        hostile.redis.hset(META, mapping=fields | {"next": RECORDS})  # type: ignore[arg-type]
    with connect(guarded, reader) as client:
        stream = client.stream("orders", create=False)
        assert stream.config.store is None
        with stream.subscriber() as sub:
            sub.seek(0)
            with pytest.raises(meteor.RecordsLost):
                sub.poll(5)


@pytest.mark.parametrize("field", ["codec", "compression", "group_by"])
def test_a_role_that_writes_meta_cannot_change_how_others_interpret_records(
    guarded: Server, field: str
) -> None:
    with connect(guarded, "member") as hostile:
        hostile.redis.hset(META, field, {"group_by": "key"}.get(field, "zstd"))
    with connect(guarded, "subscriber") as client:
        assert client.stream("orders", create=False).config == StreamConfig(capacity=CAPACITY)


def test_a_role_that_writes_meta_cannot_prevent_an_ordering_key(guarded: Server) -> None:
    with connect(guarded, "member") as hostile:
        hostile.redis.hset(META, "group_by", "header:other")
    with connect(guarded, "admin") as admin:
        stream = admin.stream("orders", create=False)
        stream.configure(ordering_key="key")
        assert stream.describe().config.ordering_key == "key"


def test_only_an_admin_may_write_settings(guarded: Server) -> None:
    commands = [
        ("HSET", SETTINGS, "store_uri", "x"), ("HSETNX", SETTINGS, "x", "x"),
        ("HDEL", SETTINGS, "store_uri"), ("HINCRBY", SETTINGS, "retain", 1), ("DEL", SETTINGS),
        ("UNLINK", SETTINGS), ("SET", SETTINGS, "x"), ("RENAME", META, SETTINGS),
        ("COPY", META, SETTINGS), ("RESTORE", SETTINGS, 0, "x"), ("PEXPIRE", SETTINGS, 1),
        ("XADD", SETTINGS, "*", "a", "b"), ("SADD", SETTINGS, "x"), ("RPUSH", SETTINGS, "x"),
        ("EVALSHA", scripts.CONVERT_SETTINGS.sha, 2, META, SETTINGS, "x"),
        ("EVALSHA", scripts.CREATE_STREAM.sha, 2, META, SETTINGS, "x", "x"),
    ]  # fmt: skip
    with guarded.client() as plain:
        for role in roles():
            if role in ("default", "admin"):
                continue
            for command in commands:
                reply = plain.execute_command("ACL", "DRYRUN", role, *command)
                assert reply != b"OK", (role, command)
        assert plain.execute_command("ACL", "DRYRUN", "admin", *commands[0]) == b"OK"


# Streams from older releases


def test_a_stream_from_an_older_release_is_converted_by_the_first_client_with_permission(
    any_url: str, tmp_path: Path
) -> None:
    with meteor.connect(any_url) as m:
        archive(m, tmp_path / "store", codec="json", retain=86_400, compression="zstd")
        before = m.redis.hgetall(SETTINGS)
        config = m.stream("orders").config
        m.redis.delete(SETTINGS)
    with meteor.connect(any_url) as m:
        stream = m.stream("orders", create=False)
        assert m.redis.hgetall(SETTINGS) == before
        assert stream.config == stream.describe().config == config
        assert config.retain == 86_400
        assert sum(map(len, stream.read(0))) == RECORDS


def test_a_converted_stream_is_never_converted_again(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as m:
        archive(m, tmp_path / "store")
        incarnation = m.stream("orders").incarnation
        m.redis.hset(META, mapping={"store_uri": "file:///elsewhere", "incarnation": "other"})
        for script_args in (["other"], [incarnation]):
            both = [META, SETTINGS]
            m._connector.run(scripts.CONVERT_SETTINGS, both, script_args)
        assert m.redis.hget(SETTINGS, "store_uri") == (tmp_path / "store").as_uri().encode()
        # One incarnation's settings are not trusted for another.
        other = m.stream("orders", create=False)
        assert (other.incarnation, other.config.store) == ("other", None)


def test_without_the_right_to_convert_a_reader_does_not_follow_the_address(
    guarded: Server, stored: Path
) -> None:
    with as_written_by_0_2(guarded):
        with connect(guarded, "subscriber") as m:
            stream = m.stream("orders", create=False)
            assert stream.describe().next == RECORDS
            with stream.subscriber() as sub:
                sub.seek(RECORDS - CAPACITY // 2)  # in the ring
                assert sub.poll(5)
                sub.seek(0)
                with pytest.raises(meteor.StoreMismatch, match="publishers can write") as refused:
                    sub.poll(5)
            assert refused.value.missing == "address"
            assert "administrator" in refused.value.hint
        with connect(guarded, "subscriber") as m:  # the reader passes the store explicitly
            stream = m.stream("orders", store=stored, archive=False, create=False)
            assert sum(map(len, stream.read(0))) == RECORDS
        with connect(guarded, "admin") as admin:
            admin.stream("orders", create=False)
        with connect(guarded, "subscriber") as m:
            assert values(m) == {b"honest"}


def test_without_the_right_to_convert_an_archiver_does_not_apply_retain(
    guarded: Server, stored: Path
) -> None:
    with as_written_by_0_2(guarded), connect(guarded, "archiver") as m:
        m.redis.hset(META, mapping={"retain": 1, "retain_bytes": 1})
        stream = m.stream("orders", store=stored, create=False, archive=False)
        with stream.archiver(segment_age=0.0).start():
            with connect(guarded, "publisher") as other:
                pub = other.stream("orders", create=False).publisher()
                with pub:
                    pub.publish_many([b"honest"] * 10).result()
            assert stream.store.flush() == RECORDS + 10
        assert stream.store.bounds() == (0, RECORDS + 10)
        assert (stream.config.retain, stream.config.retain_bytes) == (None, None)


def test_acl_from_an_older_release_still_permits_publishing(guarded: Server, stored: Path) -> None:
    with guarded.client() as plain:
        rules = [rule for rule in roles()["publisher"] if not rule.endswith(":settings")]
        plain.execute_command("ACL", "SETUSER", "publisher", "reset", *rules)
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        assert stream.config.store is None
        with stream.publisher() as pub:
            assert pub.publish(b"next").result() == RECORDS


def test_meta_has_copies_of_the_settings_for_older_releases(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as m:
        archive(m, tmp_path / "store", ordering_key="key", retain=86_400)
        stream = m.stream("orders")
        changes: list[dict[str, Any]] = [{"retain": 3600, "checksum": True}]
        changes.append({"retain": 0, "retain_bytes": 10**12})
        for change in changes:
            stream.configure(**change)
            meta: dict[Any, Any] = m.redis.hgetall(META)
            settings: dict[Any, Any] = m.redis.hgetall(SETTINGS)
            assert settings.pop(b"incarnation") == stream.incarnation.encode()
            copies = {name.encode(): meta.get(name.encode()) for name in ADMIN_FIELDS}
            assert settings == {name: copy for name, copy in copies.items() if copy is not None}
            assert m.stream("orders").config == stream.config


def test_deleting_a_stream_deletes_its_settings(any_url: str) -> None:
    with meteor.connect(any_url) as m:
        m.stream("orders", create=True).delete()
        assert m.redis.keys("meteor:*") == []


def test_scripts_and_library_agree_on_the_fields() -> None:
    source = scripts.CONVERT_SETTINGS.source.decode()
    table = source.partition("is_setting = {")[2].partition("}")[0]
    assert sorted(entry.split(" = ")[0].strip() for entry in table.split(",") if "=" in entry) == (
        sorted(ADMIN_FIELDS)
    )
    assert set(GUARDED_FIELDS) < set(ADMIN_FIELDS)
