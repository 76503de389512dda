"""A resumed stream has the fences, groups and epochs that belong to its archived records."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import commit
from meteor_py.redis import keys
from meteor_py.store import maintenance
from meteor_py.store.base import TERMS
from meteor_py.store.memory import MemoryStore
from meteor_py.store.state import IN_DOUBT, GroupState, StreamState, encode, restored
from tests.support.archivers import LONG_S, StoredStream
from tests.support.group_members import STREAM
from tests.support.parquet_store import make_old
from tests.support.transactions import begin, contents, numbers, stage
from tests.support.waiting import eventually


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[StoredStream]:
    with StoredStream(url, tmp_path / "store", max_unarchived=100_000) as stored:
        yield stored


def write(stream: meteor.Stream, version: int, *frames: str) -> bool:
    """Commit a version from writer w; return whether this call wrote anything."""
    staged = stage(stream, f"{version}", *frames)
    return commit(stream._handle, "w", version, [staged], records=staged.records)


def lose_server(stored: StoredStream) -> None:
    stored.redis.flushall()
    stored.open(resume=True)


def states(stored: StoredStream) -> list[Path]:
    return sorted(stored.root.rglob(".state-*.json"))


# Transactions


def test_transaction_repeated_after_a_resume_is_not_written_twice(stored: StoredStream) -> None:
    assert write(stored.stream, 0, "a b", "c")
    assert write(stored.stream, 1, "d", "e")
    stored.archive()
    lose_server(stored)
    assert not write(stored.stream, 1, "d", "e")
    assert contents(stored.stream) == "a b c d e"
    assert write(stored.stream, 2, "f")
    with pytest.raises(meteor.PublishError, match="already has version 2"):
        write(stored.stream, 1, "d", "e")
    stored.archive()
    lose_server(stored)
    assert not write(stored.stream, 2, "f")
    assert contents(stored.stream) == "a b c d e f"


def test_transaction_that_was_not_archived_is_written_again_after_a_resume(
    stored: StoredStream,
) -> None:
    write(stored.stream, 0, "a b")
    stored.archive()
    write(stored.stream, 1, "c d")
    lose_server(stored)
    assert contents(stored.stream) == "a b"
    assert not write(stored.stream, 0, "a b")
    assert write(stored.stream, 1, "c d")
    assert contents(stored.stream) == "a b c d"


def test_empty_version_is_remembered_after_a_resume(stored: StoredStream) -> None:
    write(stored.stream, 0, "a")
    stored.archive()
    write(stored.stream, 1)  # no records, so no segment follows
    stored.archive()
    lose_server(stored)
    with pytest.raises(meteor.PublishError, match="already has version 1"):
        write(stored.stream, 0, "a")


def test_half_archived_transaction_is_reported_after_a_resume(
    stored: StoredStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "MOVE_BYTES", 1)  # each call moves one frame
    write(stored.stream, 0, "a")
    begin(stored.stream, 1, stage(stored.stream, "1", "b", "c"), moves=1)
    stored.archive()
    lose_server(stored)
    assert contents(stored.stream) == "a b"
    with pytest.raises(meteor.PublishError, match="1 of the 2 frames in version 1 are in the log"):
        write(stored.stream, 1, "b", "c")
    assert contents(stored.stream) == "a b"


def test_planned_but_unarchived_transaction_is_written_after_a_resume(
    stored: StoredStream,
) -> None:
    write(stored.stream, 0, "a")
    begin(stored.stream, 1, stage(stored.stream, "1", "b", "c"))
    stored.archive()
    lose_server(stored)
    assert not write(stored.stream, 0, "a")
    assert write(stored.stream, 1, "b", "c")
    assert contents(stored.stream) == "a b c"


def test_first_planned_transaction_is_written_after_a_resume(stored: StoredStream) -> None:
    stored.fill(1)
    begin(stored.stream, 0, stage(stored.stream, "0", "b"))
    stored.archive()
    lose_server(stored)
    assert write(stored.stream, 0, "b")
    assert contents(stored.stream).endswith(" b")


@pytest.mark.parametrize(
    "step",
    ["before state", "after state", "after write", "after append", "before advance"],
)
def test_archiver_killed_at_any_step_leaves_a_state_that_matches_its_records(
    stored: StoredStream, step: str
) -> None:
    write(stored.stream, 0, "a", "b")
    stored.archive()
    write(stored.stream, 1, "c", "d")
    stored.process(f"kill {step}", segment_age=0.0).wait_killed()
    lose_server(stored)
    write(stored.stream, 1, "c", "d")
    assert contents(stored.stream) == "a b c d"
    stored.archive()
    lose_server(stored)
    assert not write(stored.stream, 1, "c", "d")
    assert contents(stored.stream) == "a b c d"


def test_transaction_in_doubt_is_reported_instead_of_written_twice(stored: StoredStream) -> None:
    write(stored.stream, 0, "a")
    stored.archive()
    for version in range(1, 20):
        write(stored.stream, version, numbers(100))
    with stored.stream.publisher() as pub:
        pub.publish_many([b"z"] * 2_000).result()
    # The archiver is far behind, so its segments end between two snapshots.
    stored.process("kill after append", segment_records=150, segment_age=LONG_S).wait_killed()
    lose_server(stored)
    before = contents(stored.stream)
    assert 1 < len(before.split()) < 3_901
    for version in (19, 20):
        with pytest.raises(meteor.PublishError, match="may or may not be in the log"):
            write(stored.stream, version, numbers(100))
    assert contents(stored.stream) == before
    stored.redis.hdel(keys.fences(STREAM), "w")  # as the error suggests
    assert write(stored.stream, 19, numbers(100))


def test_archiver_that_has_caught_up_saves_exact_states_again(stored: StoredStream) -> None:
    for version in range(20):
        write(stored.stream, version, numbers(100))
    with stored.archiver(segment_records=150, segment_age=LONG_S):
        stored.stream.store.flush()
    lose_server(stored)
    assert not write(stored.stream, 19, numbers(100))
    assert write(stored.stream, 20, "a")
    assert contents(stored.stream) == " ".join([numbers(100)] * 20 + ["a"])


def test_transactions_committed_during_archiving_are_exactly_once_after_a_resume(
    stored: StoredStream,
) -> None:
    with stored.archiver(segment_records=50):
        for version in range(60):
            write(stored.stream, version, numbers(10), numbers(7))
        stored.stream.store.flush()
    lose_server(stored)
    assert not write(stored.stream, 59, numbers(10), numbers(7))
    assert contents(stored.stream) == " ".join([numbers(10), numbers(7)] * 60)


# Groups


def test_group_continues_at_its_confirmed_offset_after_a_resume(stored: StoredStream) -> None:
    stored.fill(100)
    with stored.stream.subscriber(group="g", initial_offset="earliest") as sub:
        sub.confirm(sub.poll(max_records=40)[-1])
    stored.archive()
    term = stored.stream.group("g").term
    lose_server(stored)
    assert stored.stream.group("g").confirmed == 40
    with stored.stream.subscriber(group="g") as sub:
        assert sub.poll()[0].offset == 40
        assert sub.term is not None
        assert sub.term > term
        sub.confirm(59)
    assert stored.stream.group("g").confirmed == 60


def test_group_beyond_the_archived_records_continues_at_its_last_saved_position(
    stored: StoredStream,
) -> None:
    stored.fill(100)
    stored.archive()
    stored.fill(50)
    stored.stream.seek_group("ahead", 130)
    stored.stream.seek_group("behind", 20)
    stored.archive()
    stored.fill(50)
    stored.stream.seek_group("ahead", 190, force=True)
    lose_server(stored)
    found = {group.name: group.confirmed for group in stored.stream.groups()}
    assert found == {"ahead": 130, "behind": 20}


def test_confirm_on_an_idle_stream_is_saved_without_new_records(stored: StoredStream) -> None:
    stored.fill(100)
    stored.archiver(segment_age=0.0)
    stored.stream.store.flush()
    stored.stream.seek_group("g", 70)
    (path,) = states(stored)
    eventually(lambda: b'"confirmed":70' in path.read_bytes(), 20, "the confirm was not saved")
    lose_server(stored)
    assert stored.stream.group("g").confirmed == 70


def test_closing_an_archiver_saves_the_last_confirms(stored: StoredStream) -> None:
    stored.fill(100)
    with stored.archiver(segment_age=LONG_S):
        stored.stream.store.flush()
        stored.stream.seek_group("g", 70)
    lose_server(stored)
    assert stored.stream.group("g").confirmed == 70


# Epochs


def test_resumed_stream_keeps_its_epoch_table(stored: StoredStream) -> None:
    stored.fill(100)
    stored.archive()
    (before,) = stored.fields("epochs")
    lose_server(stored)
    epoch, epochs = stored.fields("epoch", "epochs")
    assert before is not None
    assert epoch is not None
    assert epochs == before + b",+" + epoch + b":100"


def test_two_streams_resumed_from_one_archive_begin_different_epochs(
    stored: StoredStream, tmp_path: Path
) -> None:
    """The second stream refuses a position from the first, although both resumes begin at 100.

    The archive's last epoch is ahead of the server's clock, so both resumes derive their epoch
    numbers from that epoch instead of the clock.
    """
    ahead = 4_000_000_000_000
    stored.redis.hset(keys.meta(STREAM), mapping={"epoch": ahead, "epochs": f"{ahead}:0"})
    stored.fill(100)
    stored.archive()
    saved = tmp_path / "saved"
    shutil.copytree(stored.root, saved)
    lose_server(stored)
    stored.fill(5)
    with stored.stream.subscriber(initial_offset=100) as sub:
        assert sub.poll(5, 5).last_offset == 104
        checkpoint = sub.checkpoint
    shutil.rmtree(stored.root)
    shutil.copytree(saved, stored.root)
    lose_server(stored)
    stored.fill(50)
    assert checkpoint.epoch > ahead
    with stored.stream.subscriber() as sub, pytest.raises(meteor.LogTruncated) as loss:
        sub.seek(checkpoint)
    assert (loss.value.first, loss.value.last) == (100, 104)


# Stores without a usable state


def test_store_without_a_state_is_resumed_with_a_warning(
    stored: StoredStream, caplog: pytest.LogCaptureFixture
) -> None:
    write(stored.stream, 0, "a b")
    stored.stream.seek_group("g", 1)
    stored.archive()
    for path in states(stored):  # like a store from an earlier version
        path.unlink()
    with caplog.at_level(logging.WARNING):
        lose_server(stored)
    assert "but not its state" in caplog.text
    assert contents(stored.stream) == "a b"
    assert stored.stream.groups() == []
    stored.archive()  # the archiver saves a state again
    assert len(states(stored)) == 1


def test_damaged_state_is_reported_and_not_used(
    stored: StoredStream, caplog: pytest.LogCaptureFixture
) -> None:
    write(stored.stream, 0, "a b")
    stored.archive()
    (path,) = states(stored)
    path.write_bytes(path.read_bytes().replace(b'"end":2', b'"end":1'))
    with caplog.at_level(logging.WARNING):
        lose_server(stored)
    assert "its checksum is wrong" in caplog.text
    assert contents(stored.stream) == "a b"


class PlainStore:
    """A custom store with only the methods that version 0.1 required."""

    def __init__(self, stream: str) -> None:
        self._inner = MemoryStore(stream)

    def __getattr__(self, name: str) -> Any:
        if name in ("save_state", "load_states", "read_columns"):
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", [MemoryStore, PlainStore])
def test_stream_can_be_resumed_from_stores_with_and_without_states(
    url: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = kind("s")
    with meteor.connect(url) as m:
        stream = m.stream("s", capacity=100, store=store, archive=False)
        write(stream, 0, "a b")
        with stream.archiver(segment_age=0.0).start():
            stream.store.flush()
        m.redis.flushall()
        stream = m.stream("s", capacity=100, store=store, archive=False, resume=True)
        assert contents(stream) == "a b"
        assert write(stream, 0, "a b") is (kind is PlainStore)
    assert ("but not its state" in caplog.text) is (kind is PlainStore)


def test_archiver_without_the_right_to_read_fences_archives_records(
    stored: StoredStream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> None:
        raise meteor.AccessDenied("no permission for the key fences")

    monkeypatch.setattr("meteor_py.archive.archive_term.take_snapshot", denied)
    stored.fill(100)
    with caplog.at_level(logging.WARNING):
        stored.archive()
    assert caplog.text.count("is not archived") == 1
    assert stored.archived == 100
    assert states(stored) == []


# Choosing a state


def at(end: int, epochs: str = "5:0", **fences: str) -> StreamState:
    return StreamState(end, epochs, fences)


def choose(end: int, epochs: dict[int, int], saved: dict[int, list[StreamState]]) -> Any:
    found = restored("s", {term: encode(each) for term, each in saved.items()}, epochs, end)
    return None if found is None else (found.end, found.fences)


def test_state_at_the_end_of_the_records_is_chosen() -> None:
    saved = {5 * TERMS + 1: [at(10, w="1:2:2:3"), at(20, w="2:2:2:3")]}
    assert choose(10, {5: 0}, saved) == (10, {"w": "1:2:2:3"})
    assert choose(20, {5: 0}, saved) == (20, {"w": "2:2:2:3"})
    assert choose(9, {5: 0}, saved) is None


def test_writer_that_wrote_between_two_snapshots_is_in_doubt() -> None:
    saved = {5 * TERMS + 1: [at(10, v="7:1:1:1", w="1:2:2:3"), at(20, v="7:1:1:1", w="3:1:2:3")]}
    assert choose(15, {5: 0}, saved) == (10, {"v": "7:1:1:1", "w": f"3:0:{IN_DOUBT}:0"})


def test_state_from_a_lost_branch_is_not_chosen() -> None:
    saved = {
        5 * TERMS + 1: [at(10, w="1:2:2:3"), at(30, w="9:2:2:3")],
        6 * TERMS + 1: [at(40, "5:0,+6:20", w="4:2:2:3")],
    }
    assert choose(40, {5: 0, 6: 20}, saved) == (40, {"w": "4:2:2:3"})
    assert choose(25, {5: 0, 6: 20}, saved) == (10, {"w": f"4:0:{IN_DOUBT}:0"})
    assert choose(30, {5: 0}, saved) == (30, {"w": "9:2:2:3"})


def test_records_without_a_state_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(30, {5: 0}, {5 * TERMS + 1: [at(10, w="1:2:2:3")]}) == (10, {"w": "1:2:2:3"})
    assert "records 10 to 29" in caplog.text


def test_groups_are_moved_back_to_the_end_of_the_records() -> None:
    groups = {"a": GroupState(50, None, "floating", 0), "b": GroupState(0, 60, "17", 17)}
    data = encode([StreamState(40, "5:0", {}, groups)])
    found = restored("s", {5 * TERMS: data}, {5: 0}, 40)
    assert found is not None
    assert found.groups == {
        "a": GroupState(40, None, "floating", 0),
        "b": GroupState(0, 40, "", 17),
    }


# Removing states


def test_states_from_earlier_terms_are_removed_once_a_later_term_has_records(
    stored: StoredStream,
) -> None:
    for _ in range(3):
        stored.fill(100)
        stored.archive()
    assert len(states(stored)) == 3
    for path in states(stored):
        make_old(path, maintenance.GRACE_S + 60)
    last = states(stored)[-1]
    stored.archive()  # an archiver removes old states when it starts
    assert states(stored)[0] == last
    lose_server(stored)
    assert stored.read() == list(range(300))
