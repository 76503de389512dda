"""A stream whose history is in an object store: archived, read, interrupted, and resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest

import meteor_py as meteor
from meteor_py import ParquetStore
from tests.support.s3 import BUCKET, S3, SECRET
from tests.support.servers import plain_client
from tests.support.waiting import eventually

COUNT = 25_000


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with S3() as s3:
        yield s3


def value(offset: int) -> bytes:
    """Return an incompressible value, so that an upload takes some time."""
    return hashlib.sha256(b"%d" % offset).digest()


def publish(stream: meteor.Stream, start: int, stop: int) -> None:
    with stream.publisher() as pub:
        pub.publish_many([value(n) for n in range(start, stop)]).result(30)


def values(stream: meteor.Stream, start: int = 0) -> list[bytes]:
    return [found for batch in stream.read(start) for found in batch.values()]


def test_stream_with_history_in_s3_is_one_log(url: str, s3: S3) -> None:
    uri = s3.uri()
    with meteor.connect(url) as m:
        stream = m.stream("orders", capacity=1_000, max_unarchived=COUNT, store=uri)
        publish(stream, 0, COUNT)
        assert stream.store.flush() == COUNT
        stored = stream.config.store
        assert stored is not None
        assert SECRET not in stored
        assert SECRET not in repr(stream.store)
        assert stream.store.verify() == []
        check_files(stream, uri)
        assert stream.describe().length < COUNT
        assert values(stream) == [value(n) for n in range(COUNT)]
        (batch,) = stream.read(12_345, 12_346)
        assert batch.values() == [value(12_345)]
    with meteor.connect(url) as m, plain_client(url) as plain:
        plain.flushall()
        stream = m.stream("orders", capacity=1_000, store=uri, resume=True)
        assert (stream.describe().first, stream.describe().next) == (0, COUNT)
        publish(stream, COUNT, COUNT + 10)
        assert values(stream, COUNT - 5) == [value(n) for n in range(COUNT - 5, COUNT + 10)]
        stream.delete(history=True)
        assert ParquetStore(uri, "orders").incarnations() == []


def test_interrupted_upload_is_invisible_and_the_next_archiver_continues(url: str, s3: S3) -> None:
    with s3.proxy() as proxy, meteor.connect(url) as m:
        folder = f"{BUCKET}/cut"
        direct = ParquetStore(folder, "orders", filesystem=s3.filesystem())
        stream = m.stream("orders", capacity=100, max_unarchived=COUNT, store=direct, archive=False)
        publish(stream, 0, COUNT)
        broken = ParquetStore(folder, "orders", filesystem=s3.filesystem(proxy.port))
        with meteor.connect(url) as other:
            slow = other.stream("orders", store=broken, archive=False)
            proxy.chunk(4_096, 0.002)
            before = proxy.counters.request_bytes
            with slow.archiver().start() as archiver:
                # Cut in the middle of the segment. All earlier requests together are smaller.
                eventually(lambda: proxy.counters.request_bytes > before + 100_000)
                proxy.cut()
                proxy.refuse()
                eventually(lambda: archiver.error is not None)
                assert isinstance(archiver.error, meteor.StoreUnavailable)
                assert direct.bounds(stream.incarnation).end == 0
                assert stream.describe().archived == 0
        with stream.archiver(segment_age=0).start():
            assert stream.store.flush() == COUNT
        assert values(stream) == [value(n) for n in range(COUNT)]
        assert stream.store.verify() == []


def check_files(stream: meteor.Stream, uri: str) -> None:
    """Check that the files have the documented names and can be read as documented."""
    store = stream.store
    table = store.dataset().to_table(columns=["offset"]).sort_by("offset")
    assert table.column("offset").to_pylist() == list(range(COUNT))
    tables = [pq.read_table(path, filesystem=store.filesystem) for path in store.paths()]
    assert sum(map(len, tables)) == COUNT
    # URIs without options, for any program that is configured for the object store.
    assert [f"s3://{path}" for path in store.paths()] == store.files()
    assert all(name.startswith(f"s3://{BUCKET}/") for name in store.files())
    assert all(name.endswith(".parquet") for name in store.files())
    assert "?" in uri
