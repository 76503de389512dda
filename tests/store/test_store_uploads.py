"""A Parquet store in S3 works on a failing network: a partial upload is never visible."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from meteor_py.errors import CorruptSegment, StoreUnavailable
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.base import Bounds
from meteor_py.store.parquet import ParquetStore
from meteor_py.testing.store_contract import (
    INCARNATION,
    NEWEST,
    OTHER,
    appended_at,
    check,
    check_lost,
    read,
    records,
)
from tests.support.parquet_store import everything_said
from tests.support.proxy import Proxy
from tests.support.s3 import ACCESS_KEY, BUCKET, S3, SECRET
from tests.support.waiting import eventually

#: Bytes per piece, and seconds between pieces. The upload of a megabyte takes five seconds, so that
#: a test can cut it in the middle.
PIECE, PAUSE_S = 2048, 0.01


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with S3() as s3:
        yield s3


@dataclass
class ProxiedStore:
    """A store behind a proxy that can cut connections, and the same bucket without the proxy."""

    proxy: Proxy
    store: ParquetStore
    direct: ParquetStore
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def append(self, term: int, table: pa.Table) -> Future[None]:
        return self.pool.submit(self.store.append, INCARNATION, term, table)

    def wait_for(self, n_bytes: int) -> None:
        """Wait until ``n_bytes`` more have been sent."""
        goal = self.proxy.counters.request_bytes + n_bytes
        eventually(lambda: self.proxy.counters.request_bytes >= goal, 20, "nothing was sent")

    @contextmanager
    def down(self) -> Iterator[None]:
        self.proxy.refuse()
        self.proxy.cut()
        yield
        self.proxy.heal()


@pytest.fixture
def proxied(s3: S3) -> Iterator[ProxiedStore]:
    place = f"{BUCKET}/{secrets.token_hex(8)}"
    with s3.proxy() as proxy:
        store = ParquetStore(place, "s", filesystem=s3.filesystem(proxy.port))
        proxied = ProxiedStore(proxy, store, ParquetStore(place, "s", filesystem=s3.filesystem()))
        with proxied.pool:
            store.claim("id")
            store.append(INCARNATION, 1, records(0, 10))
            yield proxied


def large(rng: random.Random, first: int, n_bytes: int) -> pa.Table:
    """Return three records, one of which has a value of ``n_bytes`` incompressible bytes."""
    values = [b"", rng.randbytes(n_bytes), b"last"]
    table = records(first, first + len(values))
    return table.set_column(4, ARROW_SCHEMA.field("value"), pa.array(values))


def test_history_in_s3_is_claimed_read_searched_tidied_and_deleted(s3: S3) -> None:
    uri = s3.uri()
    store = ParquetStore(uri, "s")
    assert (store.identity(), store.incarnations()) == (None, [])
    store.claim("id")
    store.claim("another")
    assert store.identity() == "id"
    store.claim("new", replacing="id")
    store.append(INCARNATION, 1, records(0, 40, branch=1))
    store.append(INCARNATION, 2, records(30, 60, branch=2))
    store.append(OTHER, 3, records(0, 10))
    again = ParquetStore(uri, "s")
    assert again.identity() == "new"
    assert again.incarnations() == [INCARNATION, OTHER]
    assert again.bounds(INCARNATION) == Bounds(0, 60, 2)
    assert again.locate(INCARNATION, appended_at(45, 2), 0, 60) == 45
    again.tidy(INCARNATION, NEWEST, 60, lambda: True)
    assert len(again.files(INCARNATION, 0, 60)) == 2
    check(again, 0, 30, branch=1)
    check(again, 30, 60, branch=2)
    again.delete(INCARNATION, 30)
    check_lost(again, 0, 60, first=0, last=29)
    again.delete(INCARNATION)
    assert again.incarnations() == [OTHER]
    check(again, 0, 10, incarnation=OTHER)


def test_upload_interrupted_in_the_middle_is_not_visible(
    proxied: ProxiedStore, rng: random.Random
) -> None:
    proxied.proxy.chunk(PIECE, PAUSE_S)
    upload = proxied.append(1, large(rng, 10, 1 << 20))
    proxied.wait_for(50_000)
    with proxied.down():
        with pytest.raises(StoreUnavailable, match="cannot be written to at the moment") as caught:
            upload.result(60)
        assert caught.value.retriable
        assert proxied.direct.bounds(INCARNATION) == Bounds(0, 10, 1)
        assert list(proxied.direct.verify(INCARNATION, 0, 10)) == []
    proxied.store.append(INCARNATION, 2, records(10, 30))
    check(proxied.store, 0, 30)
    assert proxied.store.bounds(INCARNATION) == Bounds(0, 30, 2)


def test_multipart_upload_with_an_interrupted_part_is_not_visible(
    proxied: ProxiedStore, rng: random.Random
) -> None:
    proxied.proxy.chunk(1 << 16, PAUSE_S)
    upload = proxied.append(1, large(rng, 10, 12 << 20))
    proxied.wait_for(6 << 20)  # the second part is small and has arrived by now
    with proxied.down():
        with pytest.raises(StoreUnavailable):
            upload.result(60)
        assert proxied.direct.bounds(INCARNATION) == Bounds(0, 10, 1)
    proxied.store.append(INCARNATION, 2, records(10, 30))
    check(proxied.store, 0, 30)


def test_interrupted_upload_is_retried_automatically(
    s3: S3, proxied: ProxiedStore, rng: random.Random
) -> None:
    uri = s3.uri(proxied.proxy.port)
    proxied.store = ParquetStore(uri, "s")
    proxied.store.claim("id")
    proxied.proxy.chunk(PIECE, PAUSE_S)
    table = large(rng, 0, 1 << 20)
    upload = proxied.append(1, table)
    proxied.wait_for(50_000)
    proxied.proxy.cut()
    proxied.proxy.heal()
    upload.result(60)
    assert proxied.proxy.counters.cuts > 0
    assert read(proxied.store, 0, 3).equals(table)


def test_next_term_continues_whichever_reply_was_lost(
    proxied: ProxiedStore, rng: random.Random
) -> None:
    """The archiver cannot know which uploads have arrived, and appends the records again."""
    end, term, failures = 10, 2, 0
    proxied.proxy.chaos(rng, 0.05, ["lost_reply", "torn_reply"])
    while (failures < 3 or end < 20) and term < 100:
        try:
            proxied.store.append(INCARNATION, term, records(end, end + 5))
            end += 5
        except StoreUnavailable:
            failures += 1
        term += 1
        check(proxied.direct, 0, end)
    proxied.proxy.heal()
    proxied.store.append(INCARNATION, term, records(end, end + 5))
    check(proxied.store, 0, end + 5)


def test_network_failure_is_not_reported_as_loss_or_damage(proxied: ProxiedStore) -> None:
    store = proxied.store
    with proxied.down():
        for call in (
            lambda: read(store, 0, 10),
            lambda: store.locate(INCARNATION, 0, 0, 10),
            lambda: list(store.verify(INCARNATION, 0, 10)),
            lambda: store.bounds(INCARNATION),
            store.incarnations,
            store.identity,
            lambda: store.claim("another"),
            lambda: store.append(INCARNATION, 1, records(10, 20)),
            lambda: store.tidy(INCARNATION, NEWEST, 10, lambda: True),
            lambda: store.delete(INCARNATION, 10),
            lambda: store.delete(INCARNATION),
        ):
            with pytest.raises(StoreUnavailable) as caught:
                call()
            assert SECRET not in everything_said(caught.value)
    check(store, 0, 10)
    assert store.identity() == "id"


def test_reader_continues_after_a_cut_connection(proxied: ProxiedStore) -> None:
    proxied.store.append(INCARNATION, 1, records(10, 20))
    batches = proxied.store.read(INCARNATION, 0, 20)
    found = [next(batches)]
    with proxied.down(), pytest.raises(StoreUnavailable):
        next(batches)
    found.extend(proxied.store.read(INCARNATION, 10, 20))
    assert pa.Table.from_batches(found, ARROW_SCHEMA).equals(records(0, 20))


def test_damage_in_the_bucket_is_distinguished_from_a_bad_connection(
    s3: S3, proxied: ProxiedStore
) -> None:
    (path,) = proxied.direct.files(INCARNATION, 0, 10)
    bucket = s3.filesystem()
    with bucket.open_input_file(path) as file:
        data = bytearray(file.read())
    data[len(data) // 3] ^= 1
    with bucket.open_output_stream(path) as out:
        out.write(bytes(data))
    with pytest.raises(CorruptSegment) as caught:
        read(proxied.store, 0, 10)
    assert (caught.value.first, caught.value.last) == (0, 9)
    assert [flaw.kind for flaw in proxied.store.verify(INCARNATION, 0, 10)] == ["corrupt"]


def test_reader_in_progress_survives_a_compaction(s3: S3, proxied: ProxiedStore) -> None:
    store, bucket = proxied.store, s3.filesystem()
    store.append(INCARNATION, 1, records(10, 20))
    small = store.files(INCARNATION, 0, 20)
    batches = store.read(INCARNATION, 0, 20)
    found = [next(batches)]
    assert store.compact(INCARNATION, 0, 20, records=100, size=1 << 30) == 1
    for path in small:
        bucket.delete_file(path)
    found.extend(batches)
    assert pa.Table.from_batches(found, ARROW_SCHEMA).equals(records(0, 20))


def test_secrets_for_a_store_in_s3_are_not_shown(s3: S3) -> None:
    store = ParquetStore(s3.uri(), "s")
    store.claim("id")
    store.append(INCARNATION, 1, records(0, 10))
    (file,) = store.files(INCARNATION, 0, 10)
    mark = f"{store.identity()}"
    for text in (repr(store), store.uri, file, mark):
        assert text
        assert SECRET not in text
    assert store.uri
    assert ACCESS_KEY not in store.uri + file
    assert file.startswith(store.uri.partition("?")[0])
    wrong = ParquetStore(s3.uri().replace(BUCKET, "no-such-bucket"), "s")
    with pytest.raises(StoreUnavailable) as caught:
        wrong.append(INCARNATION, 1, records(0, 10))
    assert SECRET not in everything_said(caught.value)
