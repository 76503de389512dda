"""The store's address in Redis cannot choose the endpoint to which a reader sends credentials."""

from __future__ import annotations

from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.store.endpoints import ENDPOINTS_VARIABLE, check_endpoint


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/d?endpoint_override=evil:9000&scheme=http",
        "s3://bucket/d?endpoint_override=good:9000&endpoint_override=evil:9000",
        "s3://bucket/d?scheme=http",
        "abfs://box@acc/d?blob_storage_authority=evil:1",
        "abfs://box@acc/d?blob_storage_authority=good:9000&dfs_storage_authority=evil:1",
        "hdfs://evil:8020/d",
    ],
)
def test_endpoint_that_the_reader_does_not_allow_is_refused(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "good:9000")
    with pytest.raises(meteor.StoreMismatch, match="steal your credentials") as caught:
        check_endpoint(uri, "orders")
    # The variable lists endpoints, so it cannot allow a changed transport.
    assert (f"{ENDPOINTS_VARIABLE}=" in str(caught.value)) is ("evil" in uri)


@pytest.mark.parametrize(
    "uri",
    [
        "/data",
        "file:///data",
        "s3://bucket/d?region=eu-central-1",
        "gs://bucket/d",
        "s3://bucket/d?endpoint_override=good:9000&scheme=http",
        "hdfs://good:9000/d",
    ],
)
def test_default_and_allowed_endpoints_are_accepted(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "other:1, good:9000")
    check_endpoint(uri, "orders")


def test_reader_sends_nothing_to_an_endpoint_found_in_redis(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as m:
        with m.stream("orders", capacity=10, store=tmp_path).publisher() as pub:
            pub.publish_many([b"x"] * 10).result()
        forged = "s3://bucket/d?endpoint_override=127.0.0.1:1&scheme=http"
        m.redis.hset(keys.settings("orders"), "store_uri", forged)
    with meteor.connect(url) as reader:
        stream = reader.stream("orders", create=False)
        with pytest.raises(meteor.StoreMismatch, match=r"127\.0\.0\.1:1"):
            stream._handle.find_store()
