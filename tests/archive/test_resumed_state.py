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
from tests.support.archivers import LONG_S, Depot
from tests.support.group_members import STREAM
from tests.support.parquet_store import make_old
from tests.support.transactions import begin, contents, numbers, stage
from tests.support.waiting import eventually


@pytest.fixture
def depot(url: str, tmp_path: Path) -> Iterator[Depot]:
    with Depot(url, tmp_path / "store", max_unarchived=100_000) as depot:
        yield depot


def write(stream: meteor.Stream, version: int, *frames: str) -> bool:
    """Commit a version of the writer w; returns whether this call wrote anything."""
    staged = stage(stream, f"{version}", *frames)
    return commit(stream._handle, "w", version, [staged], records=staged.records)


def lose_server(depot: Depot) -> None:
    depot.redis.flushall()
    depot.open(resume=True)


def states(depot: Depot) -> list[Path]:
    return sorted(depot.root.rglob(".state-*.json"))


# Transactions


def test_transaction_repeated_after_a_resume_is_not_written_twice(depot: Depot) -> None:
    assert write(depot.stream, 0, "a b", "c")
    assert write(depot.stream, 1, "d", "e")
    depot.archive()
    lose_server(depot)
    assert not write(depot.stream, 1, "d", "e")
    assert contents(depot.stream) == "a b c d e"
    assert write(depot.stream, 2, "f")
    with pytest.raises(meteor.PublishError, match="already has version 2"):
        write(depot.stream, 1, "d", "e")
    depot.archive()
    lose_server(depot)
    assert not write(depot.stream, 2, "f")
    assert contents(depot.stream) == "a b c d e f"


def test_transaction_that_was_not_archived_is_written_again_after_a_resume(depot: Depot) -> None:
    write(depot.stream, 0, "a b")
    depot.archive()
    write(depot.stream, 1, "c d")
    lose_server(depot)
    assert contents(depot.stream) == "a b"
    assert not write(depot.stream, 0, "a b")
    assert write(depot.stream, 1, "c d")
    assert contents(depot.stream) == "a b c d"


def test_version_without_records_is_known_after_a_resume(depot: Depot) -> None:
    write(depot.stream, 0, "a")
    depot.archive()
    write(depot.stream, 1)  # no records, so no segment follows
    depot.archive()
    lose_server(depot)
    with pytest.raises(meteor.PublishError, match="already has version 1"):
        write(depot.stream, 0, "a")


def test_half_a_transaction_is_reported_after_a_resume(
    depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "MOVE_BYTES", 1)  # each call moves one frame
    write(depot.stream, 0, "a")
    begin(depot.stream, 1, stage(depot.stream, "1", "b", "c"), moves=1)
    depot.archive()
    lose_server(depot)
    assert contents(depot.stream) == "a b"
    with pytest.raises(meteor.PublishError, match="1 of 2 frames are in the log"):
        write(depot.stream, 1, "b", "c")
    assert contents(depot.stream) == "a b"


def test_planned_transaction_of_which_nothing_is_archived_is_written_after_a_resume(
    depot: Depot,
) -> None:
    write(depot.stream, 0, "a")
    begin(depot.stream, 1, stage(depot.stream, "1", "b", "c"))
    depot.archive()
    lose_server(depot)
    assert not write(depot.stream, 0, "a")
    assert write(depot.stream, 1, "b", "c")
    assert contents(depot.stream) == "a b c"


def test_first_planned_transaction_is_written_after_a_resume(depot: Depot) -> None:
    depot.fill(1)
    begin(depot.stream, 0, stage(depot.stream, "0", "b"))
    depot.archive()
    lose_server(depot)
    assert write(depot.stream, 0, "b")
    assert contents(depot.stream).endswith(" b")


@pytest.mark.parametrize(
    "step",
    ["before state", "after state", "after write", "after append", "before advance"],
)
def test_archiver_killed_at_any_step_leaves_a_state_that_fits_its_records(
    depot: Depot, step: str
) -> None:
    write(depot.stream, 0, "a", "b")
    depot.archive()
    write(depot.stream, 1, "c", "d")
    depot.process(f"kill {step}", segment_age=0.0).wait_killed()
    lose_server(depot)
    write(depot.stream, 1, "c", "d")
    assert contents(depot.stream) == "a b c d"
    depot.archive()
    lose_server(depot)
    assert not write(depot.stream, 1, "c", "d")
    assert contents(depot.stream) == "a b c d"


def test_transaction_in_doubt_is_reported_instead_of_written_twice(depot: Depot) -> None:
    write(depot.stream, 0, "a")
    depot.archive()
    for version in range(1, 20):
        write(depot.stream, version, numbers(100))
    with depot.stream.publisher() as pub:
        pub.publish_many([b"z"] * 2_000).result()
    # Far behind: its segments end between two snapshots.
    depot.process("kill after append", segment_records=150, segment_age=LONG_S).wait_killed()
    lose_server(depot)
    before = contents(depot.stream)
    assert 1 < len(before.split()) < 3_901
    for version in (19, 20):
        with pytest.raises(meteor.PublishError, match="may or may not be in the log"):
            write(depot.stream, version, numbers(100))
    assert contents(depot.stream) == before
    depot.redis.hdel(keys.fences(STREAM), "w")  # as the error says
    assert write(depot.stream, 19, numbers(100))


def test_archiver_that_catches_up_has_an_exact_state_again(depot: Depot) -> None:
    for version in range(20):
        write(depot.stream, version, numbers(100))
    with depot.archiver(segment_records=150, segment_age=LONG_S):
        depot.stream.store.flush()
    lose_server(depot)
    assert not write(depot.stream, 19, numbers(100))
    assert write(depot.stream, 20, "a")
    assert contents(depot.stream) == " ".join([numbers(100)] * 20 + ["a"])


def test_transactions_during_archiving_are_exactly_once_after_a_resume(depot: Depot) -> None:
    with depot.archiver(segment_records=50):
        for version in range(60):
            write(depot.stream, version, numbers(10), numbers(7))
        depot.stream.store.flush()
    lose_server(depot)
    assert not write(depot.stream, 59, numbers(10), numbers(7))
    assert contents(depot.stream) == " ".join([numbers(10), numbers(7)] * 60)


# Groups


def test_group_continues_at_its_confirmed_offset_after_a_resume(depot: Depot) -> None:
    depot.fill(100)
    with depot.stream.subscriber(group="g", initial_offset="earliest") as sub:
        sub.confirm(sub.poll(max_records=40)[-1])
    depot.archive()
    term = depot.stream.group("g").term
    lose_server(depot)
    assert depot.stream.group("g").confirmed == 40
    with depot.stream.subscriber(group="g") as sub:
        assert sub.poll()[0].offset == 40
        assert sub.term is not None
        assert sub.term > term
        sub.confirm(59)
    assert depot.stream.group("g").confirmed == 60


def test_group_beyond_the_archived_records_continues_at_their_end(depot: Depot) -> None:
    depot.fill(100)
    depot.archive()
    depot.fill(50)
    depot.stream.seek_group("ahead", 130)
    depot.stream.seek_group("behind", 20)
    depot.archive()
    depot.fill(50)
    depot.stream.seek_group("ahead", 190, force=True)
    lose_server(depot)
    found = {group.name: group.confirmed for group in depot.stream.groups()}
    assert found == {"ahead": 130, "behind": 20}


def test_confirm_on_an_idle_stream_is_saved_without_new_records(depot: Depot) -> None:
    depot.fill(100)
    depot.archiver(segment_age=0.0)
    depot.stream.store.flush()
    depot.stream.seek_group("g", 70)
    (path,) = states(depot)
    eventually(lambda: b'"confirmed":70' in path.read_bytes(), 20, "the confirm was not saved")
    lose_server(depot)
    assert depot.stream.group("g").confirmed == 70


def test_closing_an_archiver_saves_the_last_confirms(depot: Depot) -> None:
    depot.fill(100)
    with depot.archiver(segment_age=LONG_S):
        depot.stream.store.flush()
        depot.stream.seek_group("g", 70)
    lose_server(depot)
    assert depot.stream.group("g").confirmed == 70


# Epochs


def test_resumed_stream_keeps_its_table_of_epochs(depot: Depot) -> None:
    depot.fill(100)
    depot.archive()
    (before,) = depot.fields("epochs")
    lose_server(depot)
    epoch, epochs = depot.fields("epoch", "epochs")
    assert before is not None
    assert epoch is not None
    assert epochs == before + b",+" + epoch + b":100"


def test_two_resumes_of_one_archive_begin_different_epochs(depot: Depot, tmp_path: Path) -> None:
    """A position of the first resumed stream is refused by the second, even if their clocks agree.

    The archive's last epoch is ahead of both clocks, so that both resumes count on from its number.
    """
    ahead = 4_000_000_000_000
    depot.redis.hset(keys.meta(STREAM), mapping={"epoch": ahead, "epochs": f"{ahead}:0"})
    depot.fill(100)
    depot.archive()
    saved = tmp_path / "saved"
    shutil.copytree(depot.root, saved)
    lose_server(depot)
    depot.fill(5)
    with depot.stream.subscriber(initial_offset=100) as sub:
        assert sub.poll(5, 5).last_offset == 104
        checkpoint = sub.checkpoint
    shutil.rmtree(depot.root)
    shutil.copytree(saved, depot.root)
    lose_server(depot)
    depot.fill(50)
    assert checkpoint.epoch > ahead
    with depot.stream.subscriber() as sub, pytest.raises(meteor.LogTruncated) as loss:
        sub.seek(checkpoint)
    assert (loss.value.first, loss.value.last) == (100, 104)


# Stores without a usable state


def test_store_without_a_state_is_resumed_with_a_warning(
    depot: Depot, caplog: pytest.LogCaptureFixture
) -> None:
    write(depot.stream, 0, "a b")
    depot.stream.seek_group("g", 1)
    depot.archive()
    for path in states(depot):  # like a store of an earlier version
        path.unlink()
    with caplog.at_level(logging.WARNING):
        lose_server(depot)
    assert "no state to resume with" in caplog.text
    assert contents(depot.stream) == "a b"
    assert depot.stream.groups() == []
    depot.archive()  # saves a state again
    assert len(states(depot)) == 1


def test_damaged_state_is_reported_and_not_used(
    depot: Depot, caplog: pytest.LogCaptureFixture
) -> None:
    write(depot.stream, 0, "a b")
    depot.archive()
    (path,) = states(depot)
    path.write_bytes(path.read_bytes().replace(b'"end":2', b'"end":1'))
    with caplog.at_level(logging.WARNING):
        lose_server(depot)
    assert "its checksum is wrong" in caplog.text
    assert contents(depot.stream) == "a b"


class PlainStore:
    """A user's store that has only the methods that version 0.1 required."""

    def __init__(self, stream: str) -> None:
        self._inner = MemoryStore(stream)

    def __getattr__(self, name: str) -> Any:
        if name in ("save_state", "load_states", "read_columns"):
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.mark.parametrize("kind", [MemoryStore, PlainStore])
def test_stores_with_and_without_states_can_be_resumed(
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
    assert ("no state to resume with" in caplog.text) is (kind is PlainStore)


def test_archiver_without_the_right_to_read_fences_archives_records(
    depot: Depot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: object) -> None:
        raise meteor.AccessDenied("no permission for the key fences")

    monkeypatch.setattr("meteor_py.archive.archive_term.take_snapshot", denied)
    depot.fill(100)
    with caplog.at_level(logging.WARNING):
        depot.archive()
    assert caplog.text.count("is not archived") == 1
    assert depot.archived == 100
    assert states(depot) == []


# Choosing a state


def at(end: int, epochs: str = "5:0", **fences: str) -> StreamState:
    return StreamState(end, epochs, fences)


def choose(end: int, epochs: dict[int, int], saved: dict[int, list[StreamState]]) -> Any:
    found = restored("s", {term: encode(each) for term, each in saved.items()}, epochs, end)
    return None if found is None else (found.end, found.fences)


def test_state_of_the_records_end_is_chosen() -> None:
    saved = {5 * TERMS + 1: [at(10, w="1:2:2:3"), at(20, w="2:2:2:3")]}
    assert choose(10, {5: 0}, saved) == (10, {"w": "1:2:2:3"})
    assert choose(20, {5: 0}, saved) == (20, {"w": "2:2:2:3"})
    assert choose(9, {5: 0}, saved) is None


def test_writer_that_wrote_between_two_states_is_in_doubt() -> None:
    saved = {5 * TERMS + 1: [at(10, v="7:1:1:1", w="1:2:2:3"), at(20, v="7:1:1:1", w="3:1:2:3")]}
    assert choose(15, {5: 0}, saved) == (10, {"v": "7:1:1:1", "w": f"3:0:{IN_DOUBT}:0"})


def test_state_of_a_branch_that_was_lost_is_not_chosen() -> None:
    saved = {
        5 * TERMS + 1: [at(10, w="1:2:2:3"), at(30, w="9:2:2:3")],
        6 * TERMS + 1: [at(40, "5:0,+6:20", w="4:2:2:3")],
    }
    assert choose(40, {5: 0, 6: 20}, saved) == (40, {"w": "4:2:2:3"})
    assert choose(25, {5: 0, 6: 20}, saved) == (10, {"w": f"4:0:{IN_DOUBT}:0"})
    assert choose(30, {5: 0}, saved) == (30, {"w": "9:2:2:3"})


def test_records_without_a_state_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(30, {5: 0}, {5 * TERMS + 1: [at(10, w="1:2:2:3")]}) == (10, {"w": "1:2:2:3"})
    assert "from 10 to 29" in caplog.text


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


def test_states_of_earlier_terms_are_removed_once_a_later_one_has_records(depot: Depot) -> None:
    for _ in range(3):
        depot.fill(100)
        depot.archive()
    assert len(states(depot)) == 3
    for path in states(depot):
        make_old(path, maintenance.GRACE_S + 60)
    last = states(depot)[-1]
    depot.archive()  # the archiver tidies up when it starts
    assert states(depot)[0] == last
    lose_server(depot)
    assert depot.read() == list(range(300))
