"""Store edge cases: servers that were believed lost, stores that hang, conflicting settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py import MemoryStore
from meteor_py.archive import archiver as archiver_module
from meteor_py.redis import keys
from meteor_py.redis.scripts import EXPIRE_HISTORY
from meteor_py.store import maintenance
from meteor_py.store.base import TERMS
from meteor_py.store.segment import Segment
from meteor_py.testing.store_contract import INCARNATION, NEWEST
from tests.conftest import ServerFactory
from tests.support.parquet_store import END, filled, make_old, names, paths
from tests.support.readers import fill
from tests.support.waiting import eventually

NAME = "orders"


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


def stored(m: meteor.Client, store: Any, **settings: Any) -> meteor.Stream:
    """Open a stream with a store and no automatic archiver."""
    defaults = {"capacity": 10, "max_unarchived": 10_000, "archive": False}
    return m.stream(NAME, store=store, **defaults | settings)


def archive(stream: meteor.Stream) -> None:
    with stream.archiver().start():
        stream.store.flush(20)


def offsets(stream: meteor.Stream, start: int = 0) -> list[int]:
    return [offset for batch in stream.read(start) for offset in batch.offsets]


# Epochs


def new_epoch(m: meteor.Client, epoch: int, first: int, **fields: int) -> None:
    """Change meta as a failover does."""
    meta = keys.meta(NAME)
    table: Any = m.redis.hget(meta, "epochs")
    epochs = f"{table.decode()},{epoch}:{first}"
    mapping: Any = {"epoch": epoch, "epochs": epochs, **fields}
    m.redis.hset(meta, mapping=mapping)


def test_archiver_starts_a_higher_term_in_each_epoch(m: meteor.Client, tmp_path: Path) -> None:
    stream = stored(m, tmp_path)
    fill(stream, 40)
    with stream.archiver(segment_age=0).start():
        stream.store.flush(20)
        before = stream.describe().epoch
        new_epoch(m, before + 1_000, 40)
        fill(stream, 40)
        stream.store.flush(20)
    segments = [Segment.parse(Path(path).name) for path in stream.store.files()]
    numbers = [(x.first, x.term // TERMS) for x in segments if x is not None]
    assert {epoch for first, epoch in numbers if first < 40} == {before}
    assert {epoch for first, epoch in numbers if first >= 40} == {before + 1_000}
    assert offsets(stream) == list(range(80))


def test_archiver_continues_if_the_server_has_lost_its_terms(
    m: meteor.Client, tmp_path: Path
) -> None:
    """The server counts terms from 1 again, so the archiver skips the terms in the store."""
    stream = stored(m, tmp_path)
    for skipped in (0, 1_000):
        m.redis.hincrby(keys.group(NAME, keys.ARCHIVERS), "term", skipped)
        fill(stream, 40)
        archive(stream)
    m.redis.delete(keys.group(NAME, keys.ARCHIVERS))
    fill(stream, 40)
    archive(stream)
    segments = [Segment.parse(Path(path).name) for path in stream.store.files()]
    terms = [segment.term % TERMS for segment in segments if segment is not None]
    assert terms == sorted(set(terms))
    assert offsets(stream) == list(range(120))


def test_server_believed_lost_cannot_continue_a_resumed_history(
    private_server: ServerFactory, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        lost = stack.enter_context(meteor.connect(private_server().url))
        found = stack.enter_context(meteor.connect(private_server().url))
        old = stored(lost, tmp_path)
        fill(old, 60)
        archive(old)
        new = stored(found, tmp_path, resume=True)
        fill(old, 20)
        with old.archiver().start() as zombie:
            eventually(lambda: isinstance(zombie.error, meteor.StoreMismatch))
        with pytest.raises(meteor.StoreMismatch):
            stored(lost, tmp_path)
        fill(new, 30)
        archive(new)
        assert offsets(new) == list(range(90))
        with pytest.raises(meteor.StoreMismatch, match="continued archiving"):
            offsets(old)
        assert stored(found, tmp_path, resume=True).store.verify() == []


def test_stream_opened_before_the_loss_works_once_it_is_resumed(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = stored(m, tmp_path)
    fill(stream, 60)
    archive(stream)
    m.redis.flushall()
    stored(m, tmp_path, resume=True)
    assert stream.store.bounds() == (0, 60)
    assert offsets(stream) == list(range(60))


def test_reader_of_a_lost_branch_gets_log_truncated_after_a_resume(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = stored(m, tmp_path)
    fill(stream, 50)
    archive(stream)
    with stream.subscriber(initial_offset="earliest") as sub:
        while sub.position < 50:
            sub.poll()
        seen = sub.checkpoint
    epoch = stream.describe().epoch
    new_epoch(m, epoch + 1_000, 30, next=30, archived=30)  # a failover that lost 30 to 49
    m.redis.delete(keys.log(NAME))
    fill(stream, 40)
    archive(stream)
    m.redis.flushall()
    resumed = stored(m, tmp_path, resume=True)
    assert resumed.describe().next == 70
    with (
        resumed.subscriber(group="g", on_assigned=lambda _: seen) as sub,
        pytest.raises(meteor.LogTruncated) as caught,
    ):
        sub.poll(20)
    assert caught.value.first == 30


# Settings


def test_settings_changed_by_two_clients_at_once_do_not_block_publishers(
    m: meteor.Client, tmp_path: Path
) -> None:
    first = stored(m, tmp_path, capacity=100, max_unarchived=200)
    second = m.stream(NAME, create=True)
    second.configure(capacity=10, max_unarchived=20)
    with pytest.raises(ValueError, match="at least the capacity"):
        first.configure(capacity=50)
    m.redis.hset(keys.meta(NAME), "capacity", 50)  # a race can have this result

    with m.stream(NAME, store=tmp_path).publisher() as pub:
        for start in range(0, 300, 30):
            assert pub.publish_many([b"x"] * 30).result(20) == start


def test_frame_above_max_unarchived_is_accepted_when_everything_is_archived(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = stored(m, tmp_path, capacity=5_000, max_unarchived=5_000)
    with stream.publisher() as pub:
        stream.configure(capacity=10, max_unarchived=10)  # the publisher still makes large frames
        assert pub.publish_many([b"x"] * 1_000).result(20) == 0
        with stream.archiver().start():
            assert pub.publish_many([b"x"] * 1_000).result(20) == 1_000


def test_expiry_stops_at_a_groups_position_and_never_moves_backwards(
    m: meteor.Client, tmp_path: Path
) -> None:
    stream = stored(m, tmp_path)
    fill(stream, *[10] * 9)
    archive(stream)
    stream.seek_group("slow", 40)
    args = [keys.meta(NAME), keys.group(NAME, "slow")]
    assert m._connector.run(EXPIRE_HISTORY, args, [stream.incarnation, 80]) == [b"OK", 40]
    stream.seek_group("slow", 0)
    assert m._connector.run(EXPIRE_HISTORY, args, [stream.incarnation, 90]) == [b"OK", 40], (
        "the expired offset decreased"
    )


# Files


def test_tidying_stops_as_soon_as_its_term_is_over(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.compact(INCARNATION, 0, END, records=1_000, size=1 << 30)
    folder = tmp_path / "s" / INCARNATION
    for name in names(tmp_path):
        make_old(folder / name)
    replies = iter([True, True, False, False, False])
    before = len(names(tmp_path))
    store.tidy(INCARNATION, NEWEST, END, lambda: next(replies))
    assert len(names(tmp_path)) == before - 1


def test_merging_stays_within_its_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path)
    monkeypatch.setattr(maintenance, "MEMORY_BYTES", 1)  # one batch at a time
    store.compact(INCARNATION, 0, END, records=1_000, size=1 << 30)
    merged = [Segment.parse(path.name) for path in paths(store)]
    assert sum(len(segment) for segment in merged if segment is not None) == END
    assert sum(map(len, store.read(INCARNATION, 0, END))) == END


# Stores that hang


class HangingStore(MemoryStore):
    """A store that, once ``hangs`` is set, hangs until ``released`` is set."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.hangs = threading.Event()
        self.reached = threading.Event()
        self.released = threading.Event()

    def read(self, incarnation: str, start: int, stop: int) -> Iterator[Any]:
        for number, batch in enumerate(super().read(incarnation, start, stop)):
            if self.hangs.is_set() and number > 2:
                self.released.wait(60)
            yield batch

    def append(self, incarnation: str, term: int, records: Any) -> None:
        if self.hangs.is_set():
            self.reached.set()
            self.released.wait(60)
        super().append(incarnation, term, records)


@pytest.fixture
def hanging() -> Iterator[HangingStore]:
    store = HangingStore()
    yield store
    store.released.set()


def test_reader_of_a_hanging_store_can_be_closed(m: meteor.Client, hanging: HangingStore) -> None:
    stream = stored(m, hanging)
    fill(stream, *[20] * 10)
    archive(stream)
    hanging.hangs.set()
    with stream.subscriber(initial_offset="earliest") as sub:
        while sub.position < 60:
            sub.poll(max_records=20)
    assert not sub.position >= 200


def test_hanging_archiver_does_not_keep_others_from_stopping(
    url: str, hanging: HangingStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close: Callable[..., None] = archiver_module.Archiver.close

    def close_soon(archiver: meteor.Archiver) -> None:
        close(archiver, 0.2 if archiver.stream.name == NAME else 30.0)

    monkeypatch.setattr(archiver_module.Archiver, "close", close_soon)
    m = meteor.connect(url)
    stuck, free = stored(m, hanging), m.stream("free", store=tmp_path, archive=False)
    hanging.hangs.set()
    fill(stuck, 20)
    stuck_archiver = stuck.archiver(segment_age=0).start()
    free_archiver = free.archiver().start()
    assert hanging.reached.wait(20)
    with pytest.raises(TimeoutError, match=NAME):
        m.close()
    assert [works(stuck_archiver), works(free_archiver)] == [True, False]
    hanging.released.set()
    eventually(lambda: not works(stuck_archiver))


def works(archiver: meteor.Archiver) -> bool:
    return archiver._thread is not None and archiver._thread.is_alive()


def test_reader_keeps_the_store_it_was_given_after_skipping_a_lost_branch(
    m: meteor.Client,
) -> None:
    stream = stored(m, MemoryStore(NAME))
    fill(stream, 50)
    archive(stream)
    with stream.subscriber(initial_offset="earliest") as sub:
        while sub.position < 50:
            sub.poll()
        new_epoch(m, stream.describe().epoch + 1_000, 40, next=40, archived=40)
        m.redis.xtrim(keys.log(NAME), maxlen=0)
        with pytest.raises(meteor.LogTruncated):
            sub.poll()
        sub.skip_gap()
        sub.seek(5)
        assert sub.poll().first_offset == 5
