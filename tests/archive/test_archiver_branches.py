"""After a failover, an old primary that is still running cannot corrupt the archive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ReplicatedStream
from tests.support.waiting import eventually


class Split:
    """An old and a new primary. Both accept records for a stream with the same store."""

    def __init__(self, stack: ExitStack, primary: ServerFactory, store: Path) -> None:
        settings = {"capacity": 100, "store": store, "archive": False, "max_unarchived": 10_000}
        self.replicated = ReplicatedStream(stack, primary(), **settings)
        self.old = self.replicated.proxied.stream
        self.publish(self.old, b"common", 300)
        self.archive(self.old)
        self.replicated.lag()
        self.publish(self.old, b"old", 300)  # 300 to 599, which the replica never gets
        self.archive(self.old)
        self.replicated.replica.promote()
        self.client = stack.enter_context(meteor.connect(self.replicated.replica.url))
        self.new = self.client.stream(NAME, store=store, archive=False)

    def publish(self, stream: meteor.Stream, value: bytes, count: int) -> None:
        with stream.publisher() as pub:
            pub.publish_many([value] * count).result(20)

    def archive(self, stream: meteor.Stream) -> None:
        """Archive everything in a new term."""
        with stream.archiver(lease_ttl=5).start():
            stream.store.flush(20)


@pytest.fixture
def split(private_server: ServerFactory, tmp_path: Path) -> Iterator[Split]:
    with ExitStack() as stack:
        yield Split(stack, private_server, tmp_path)


def values(stream: meteor.Stream) -> list[bytes]:
    return [value for batch in stream.read(0) for value in batch.values()]


def test_archiver_started_on_an_old_primary_after_a_failover_appends_nothing(split: Split) -> None:
    split.publish(split.new, b"new", 200)  # 300 to 499
    split.archive(split.new)
    split.publish(split.old, b"late", 300)  # 600 to 899
    archiver = split.old.archiver(lease_ttl=5).start()
    with archiver, pytest.raises(meteor.StoreUnavailable):
        split.old.store.flush(0.5)
    assert isinstance(archiver.error, meteor.StoreMismatch)
    assert "failover" in str(archiver.error)
    split.publish(split.new, b"newer", 700)
    split.archive(split.new)
    assert values(split.new) == [b"common"] * 300 + [b"new"] * 200 + [b"newer"] * 700
    assert [flaw for flaw in split.new.store.verify() if not flaw.harmless] == []


def test_archiver_on_an_old_primary_stops_when_the_new_primary_has_archived(
    split: Split,
) -> None:
    with split.old.archiver(lease_ttl=5, segment_records=100).start() as archiver:
        split.publish(split.old, b"late", 100)  # 600 to 699: before the new primary archives
        split.old.store.flush(20)
        split.publish(split.new, b"new", 500)  # 300 to 799
        split.archive(split.new)
        split.publish(split.old, b"later", 100)
        eventually(lambda: isinstance(archiver.error, meteor.StoreMismatch))
    assert values(split.new) == [b"common"] * 300 + [b"new"] * 500
    files = split.new.store.files()
    assert len(files) == len(set(files))
    assert split.new.store.bounds() == (0, 800)
