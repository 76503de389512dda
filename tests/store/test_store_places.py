"""A Parquet store validates its address and identity, stays in its folder, and masks secrets."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.fs as fs
import pyarrow.parquet as pq
import pytest

from meteor_py.errors import MeteorError, StoreMismatch, StoreUnavailable
from meteor_py.store.base import Bounds
from meteor_py.store.parquet import IDENTITY_FILE, ParquetStore
from meteor_py.testing.store_contract import INCARNATION, check, records
from tests.support.parquet_store import claimed, everything_said

#: Calls that read or change a stream's folder.
CALLS: dict[str, Callable[[ParquetStore], object]] = {
    "identity": lambda store: store.identity(),
    "claim": lambda store: store.claim("mine"),
    "incarnations": lambda store: store.incarnations(),
    "bounds": lambda store: store.bounds(INCARNATION),
    "epochs": lambda store: store.epochs(INCARNATION),
    "append": lambda store: store.append(INCARNATION, 1, records(0, 10)),
    "read": lambda store: list(store.read(INCARNATION, 0, 10)),
    "read_columns": lambda store: list(store.read_columns(INCARNATION, 0, 10, ["value"])),
    "deferred_batches": lambda store: list(store.deferred_batches(INCARNATION, 0, 10)),
    "files": lambda store: store.files(INCARNATION, 0, 10),
    "dataset": lambda store: store.dataset(INCARNATION, 0, 10),
    "segments": lambda store: store.segments(INCARNATION, 0, 10),
    "row_group_ends": lambda store: store.row_group_ends(INCARNATION, [0], 10),
    "save_state": lambda store: store.save_state(INCARNATION, 1, b"{}"),
    "load_states": lambda store: store.load_states(INCARNATION),
    "compact": lambda store: store.compact(INCARNATION, 0, 10, records=100, size=1 << 30),
    "merge_small": lambda store: store.merge_small(INCARNATION, 1, 10, lambda: True),
    "locate": lambda store: store.locate(INCARNATION, 0, 0, 10),
    "verify": lambda store: list(store.verify(INCARNATION, 0, 10)),
    "tidy": lambda store: store.tidy(INCARNATION, 1, 10, lambda: True),
    "delete some": lambda store: store.delete(INCARNATION, 10),
    "delete": lambda store: store.delete(INCARNATION),
}


# Addresses


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("", "empty"),
        ("/data/../etc", "'..'"),
        ("..", "'..'"),
        ("data\\..\\x", "'..'"),
        ("file:///data/../etc", "'..'"),
        ("s3://bucket/../other", "'..'"),
        ("s3://bucket/a/%2e%2e/other?region=us-east-1", "'..'"),
        ("file://host/data", "three slashes"),
        ("file://data", "three slashes"),
        ("file://", "three slashes"),
        ("ftp://host/data", "not a valid store address"),
        ("s3://bucket/data?colour=red", "colour"),
        ("s3://?region=us-east-1", "has no bucket"),
    ],
)
def test_invalid_address_is_refused_with_a_reason(uri: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        ParquetStore(uri, "s")
    assert not isinstance(caught.value, MeteorError)


def test_relative_path_is_made_absolute_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = ParquetStore("data", "s")
    monkeypatch.chdir("/")
    store.claim("id")
    assert store.uri == f"file://{tmp_path}/data"
    assert (tmp_path / "data" / "s" / IDENTITY_FILE).exists()
    assert ParquetStore(store.uri, "s").identity() == "id"


def test_tilde_in_a_path_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ParquetStore("~/data", "s").uri == f"file://{tmp_path}/data"


@pytest.mark.parametrize("name", ["a b", "what?", "100%41", "#1", "größe", "a@b", "{x}", "'\""])
def test_path_can_contain_any_characters(tmp_path: Path, name: str) -> None:
    store = claimed(tmp_path / name)
    store.append(INCARNATION, 1, records(0, 10))
    assert store.uri is not None
    again = ParquetStore(store.uri, "s")
    check(again, 0, 10)
    (file,) = again.files(INCARNATION, 0, 10)
    assert Path(file).is_relative_to(tmp_path / name)
    assert pq.ParquetFile(file).read().equals(records(0, 10))


def test_store_on_a_pyarrow_filesystem_has_no_address(tmp_path: Path) -> None:
    inner = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    store = ParquetStore("deep/down", "s", filesystem=inner)
    assert store.uri is None
    store.claim("id")
    store.append(INCARNATION, 1, records(0, 10))
    check(store, 0, 10)
    (file,) = store.files(INCARNATION, 0, 10)
    assert (tmp_path / file).exists()
    check(ParquetStore(tmp_path / "deep" / "down", "s"), 0, 10)


class PartialUploads:
    """A filesystem like HDFS, where a file is visible from its first byte. Uploads fail."""

    type_name = "hdfs"

    def __init__(self) -> None:
        self._whole = fs.LocalFileSystem()

    def open_output_stream(self, path: str) -> PartialUploads:
        self._path = path
        return self

    def write(self, data: bytes) -> None:
        Path(self._path).write_bytes(data[: len(data) // 2])
        raise OSError("the connection was lost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def test_partial_upload_does_not_replace_the_merged_segments(tmp_path: Path) -> None:
    store = claimed(tmp_path)
    store.append(INCARNATION, 1, records(0, 10))
    store.append(INCARNATION, 1, records(10, 20))
    torn = ParquetStore(str(tmp_path), "s", filesystem=PartialUploads())
    with pytest.raises(StoreUnavailable, match="connection was lost"):
        torn.compact(INCARNATION, 0, 20, records=100, size=1 << 30)
    with pytest.raises(StoreUnavailable, match="connection was lost"):
        torn.append(INCARNATION, 2, records(20, 30))
    check(store, 0, 20)
    assert store.bounds(INCARNATION) == Bounds(0, 20, 1)
    assert list(store.verify(INCARNATION, 0, 20)) == []


# Secrets


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("s3://key:hush@bucket/data?region=us-east-1", "s3://bucket/data?region=us-east-1"),
        ("s3://key:%2Fhush%2F@bucket/data?region=x", "s3://bucket/data?region=x"),
        ("abfs://box:hush@acc.dfs.core.windows.net/d", "abfs://box@acc.dfs.core.windows.net/d"),
        ("abfs://box@acc.dfs.core.windows.net/d", "abfs://box@acc.dfs.core.windows.net/d"),
        ("gs://anonymous@bucket/data", "gs://anonymous@bucket/data"),
    ],
)
def test_address_is_shown_without_its_password(uri: str, address: str) -> None:
    store = ParquetStore(uri, "s")
    assert store.uri == address
    assert "hush" not in repr(store)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:12/hush@bucket/data?region=us-east-1",  # a slash that was not escaped
        "s3://key:no/hush@bucket/data",
        "s3://key:12#hush@bucket/data",
        "s3://key:hush@bucket/data?colour=red",
        "s3://key:hush@/data",
        "ftp://key:hush@host/data",
        "file://key:hush@host/data",
        "s3://key:hush@bucket/../data",
        "abfs://box@acc.dfs.core.windows.net/d?tenant_id=a&client_id=b&client_secret=hush",
        "abfs://box@acc.dfs.core.windows.net/d?sv=2024&sig=hush",
    ],
)
def test_error_about_an_address_hides_its_secrets(uri: str) -> None:
    with pytest.raises(ValueError, match=r"address|path|bucket") as caught:
        ParquetStore(uri, "s")
    assert "hush" not in everything_said(caught.value)


# Identity


@pytest.mark.parametrize(
    "contents",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"id"', b'{"version": 1}', b'{"store": "id"}'],
)
def test_unreadable_identity_file_is_not_mistaken_for_a_missing_file(
    tmp_path: Path, contents: bytes
) -> None:
    store = claimed(tmp_path)
    (tmp_path / "s" / IDENTITY_FILE).write_bytes(contents)
    with pytest.raises(StoreMismatch, match="is damaged"):
        store.identity()


def test_folder_that_belongs_to_another_stream_is_refused(tmp_path: Path) -> None:
    claimed(tmp_path)
    (tmp_path / "s").rename(tmp_path / "t")
    with pytest.raises(StoreMismatch, match="belongs to stream 's'"):
        ParquetStore(tmp_path, "t").identity()


def test_identity_file_that_is_a_folder_raises_store_unavailable(tmp_path: Path) -> None:
    (tmp_path / "s" / IDENTITY_FILE).mkdir(parents=True)
    with pytest.raises(StoreUnavailable):
        ParquetStore(tmp_path, "s").identity()


def test_concurrent_claims_agree_on_one_id(tmp_path: Path) -> None:
    def claim(identity: str) -> str | None:
        store = ParquetStore(tmp_path, "s")
        store.claim(identity)
        return store.identity()

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(claim, "abcdefghijklmnop"))
    assert len(found) == 1
    assert os.listdir(tmp_path / "s") == [IDENTITY_FILE]


# Isolation


@pytest.mark.parametrize("name", ["", ".", "..", "../s", "a/b", "/etc", ".hidden", "a\0b", "a\\b"])
def test_stream_name_cannot_escape_from_the_store(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name of a stream"):
        ParquetStore(tmp_path, name)


@pytest.mark.parametrize(
    "incarnation", ["", ".", "..", "../t", "0a/../..", "/etc", "0A", "xyz", "0" * 65]
)
def test_incarnation_cannot_escape_from_the_store(tmp_path: Path, incarnation: str) -> None:
    store = claimed(tmp_path)
    for call in (
        lambda: store.bounds(incarnation),
        lambda: store.append(incarnation, 1, records(0, 10)),
        lambda: store.read(incarnation, 0, 10),
        lambda: store.locate(incarnation, 0, 0, 10),
        lambda: store.verify(incarnation, 0, 10),
        lambda: store.tidy(incarnation, 1, 10, lambda: True),
        lambda: store.files(incarnation, 0, 10),
        lambda: store.delete(incarnation, 10),
        lambda: store.delete(incarnation),
    ):
        with pytest.raises(ValueError, match="not a valid stream incarnation"):
            call()
    assert store.identity() == "id"


@pytest.mark.parametrize("call", CALLS)
def test_linked_stream_folder_is_not_followed_out_of_the_store(tmp_path: Path, call: str) -> None:
    outside = claimed(tmp_path / "outside")
    outside.append(INCARNATION, 1, records(0, 10))
    store = ParquetStore(tmp_path / "store", "s")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "s").symlink_to(tmp_path / "outside" / "s")
    with pytest.raises(StoreUnavailable, match="outside the store"):
        CALLS[call](store)
    check(outside, 0, 10)
    assert outside.identity() == "id"


@pytest.mark.parametrize(
    "call", ["bounds", "append", "read", "locate", "verify", "tidy", "delete some", "delete"]
)
def test_linked_incarnation_folder_is_not_followed_out_of_the_store(
    tmp_path: Path, call: str
) -> None:
    outside = claimed(tmp_path / "outside")
    outside.append(INCARNATION, 1, records(0, 10))
    store = claimed(tmp_path / "store")
    (tmp_path / "store" / "s" / INCARNATION).symlink_to(tmp_path / "outside" / "s" / INCARNATION)
    with pytest.raises(StoreUnavailable, match="outside the store"):
        CALLS[call](store)
    check(outside, 0, 10)
    assert store.incarnations() == []


def test_store_root_can_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    store = claimed(tmp_path / "link")
    store.append(INCARNATION, 1, records(0, 10))
    check(ParquetStore(tmp_path / "disk", "s"), 0, 10)
    store.delete(INCARNATION)
    assert not (tmp_path / "disk" / "s" / INCARNATION).exists()


def test_streams_at_one_address_are_independent(tmp_path: Path) -> None:
    one, two = ParquetStore(tmp_path, "one"), ParquetStore(tmp_path, "two")
    one.claim("1")
    two.claim("2")
    one.append(INCARNATION, 1, records(0, 10))
    two.append(INCARNATION, 1, records(0, 5, branch=2))
    one.delete(INCARNATION)
    check(two, 0, 5, branch=2)
    assert (one.incarnations(), two.incarnations()) == ([], [INCARNATION])
    assert (one.identity(), two.identity()) == ("1", "2"), "an id was lost"
