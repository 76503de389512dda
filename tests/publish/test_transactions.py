"""What is staged and committed is in the log exactly once, whoever dies, repeats or comes late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import (
    Stage,
    VersionDiffers,
    VersionPassed,
    abandon,
    commit,
    discard,
    forget,
    is_done,
)
from meteor_py.records.config import OFFSET_MAX
from meteor_py.records.frame import Columns
from meteor_py.redis import keys
from tests.support.readers import entries, frame_name
from tests.support.transactions import begin, contents, fence, in_threads, lasting, numbers, stage


@pytest.fixture
def stream(any_url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(any_url) as m:
        yield m.stream("s")


@pytest.fixture
def frame_by_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call moves one frame."""
    monkeypatch.setattr(transaction, "MOVE_BYTES", 1)


# What a commit does


def test_frames_of_several_workers_are_in_the_log_once_in_the_order_of_the_stages(
    stream: meteor.Stream,
) -> None:
    b = stage(stream, "b", "3 4", "5")
    a = stage(stream, "a", "0", "1 2")
    assert contents(stream) == ""
    assert not is_done(stream._handle, "w", 1)
    assert commit(stream._handle, "w", 1, [a, b])
    assert contents(stream) == numbers(6)
    assert is_done(stream._handle, "w", 1)
    assert (b.frames, b.records) == (2, 3)


def test_more_than_one_call_can_send_or_move_is_there_whole(stream: meteor.Stream) -> None:
    values = [b"%07d" % i * 20_000 for i in range(80)]  # 11 MB
    writing = Stage(stream._handle, "a")
    for value in values:
        writing.write(Columns([value]))
    commit(stream._handle, "w", 1, [writing.finish()])
    assert [value for batch in stream.read() for value in batch.values()] == values


def test_an_older_version_is_refused_and_its_stages_are_dropped(stream: meteor.Stream) -> None:
    commit(stream._handle, "w", 5, [stage(stream, "a", "0 1")])
    assert is_done(stream._handle, "w", 5)
    assert not commit(stream._handle, "w", 5, [stage(stream, "b5", "x")])
    for version in (4, 0):
        with pytest.raises(VersionPassed, match=rf"^Version {version} .* has version 5\.$") as one:
            is_done(stream._handle, "w", version)
        assert (one.value.version, one.value.known) == (version, 5)
        with pytest.raises(VersionPassed):
            commit(stream._handle, "w", version, [stage(stream, f"b{version}", "x")])
    assert not is_done(stream._handle, "w", 6)
    assert contents(stream) == numbers(2)
    assert stream.client.redis.keys("*stage*") == []


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_version_that_was_begun_with_another_number_of_records_is_finished_and_refused(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    begin(stream, 1, stage(stream, "a", "0 1", "2"), moves=moves)
    with pytest.raises(VersionDiffers, match="has it with 3 records, not 2") as caught:
        commit(stream._handle, "w", 1, [stage(stream, "b", "x y")], records=2)
    assert (caught.value.known, caught.value.records) == (3, 2)
    assert contents(stream) == numbers(3)
    assert stream.client.redis.keys("*stage*") == []
    with pytest.raises(VersionDiffers):
        is_done(stream._handle, "w", 1, 2)
    assert is_done(stream._handle, "w", 1, 3)
    assert not commit(stream._handle, "w", 1, [stage(stream, "c", "x y z")], records=3)
    assert commit(stream._handle, "w", 2, [stage(stream, "d", "3 4")], records=2)
    assert contents(stream) == numbers(5)


def test_a_fence_of_a_release_that_did_not_count_records_is_finished_and_not_compared(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    begin(stream, 1, stage(stream, "a", "0 1", "2"), moves=1)
    stream.client.redis.hset(keys.fences("s"), "w", "1:1:2")
    assert commit(stream._handle, "w", 1, [stage(stream, "b", "x")], records=1)
    assert fence(stream) == b"1:2:2"
    assert is_done(stream._handle, "w", 1, 99)
    assert contents(stream) == numbers(3)


def test_what_was_begun_is_finished_or_done_and_else_the_loss_is_named(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    with pytest.raises(meteor.PublishError, match=r"^Version 1 of the writer w was in stream 's'"):
        commit(stream._handle, "w", 1, [], begun=True)
    assert fence(stream) is None, "it is not taken for done"
    begin(stream, 1, stage(stream, "a", "0", "1"), moves=1)
    assert commit(stream._handle, "w", 1, [], begun=True)
    assert not commit(stream._handle, "w", 1, [], begun=True)
    assert contents(stream) == numbers(2)


def test_writers_do_not_know_each_other(stream: meteor.Stream) -> None:
    for number, writer in enumerate(["v", "w", "a:b {c}"]):
        assert commit(stream._handle, writer, 1, [stage(stream, writer, str(number))])
    assert contents(stream) == numbers(3)


def test_a_version_without_frames_is_done_at_once(stream: meteor.Stream) -> None:
    commit(stream._handle, "w", 1, [stage(stream, "a")])
    assert is_done(stream._handle, "w", 1)
    assert contents(stream) == ""


def test_only_the_fences_are_left_and_what_waits_expires(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    plain = stream.client.redis
    before = lasting(stream)
    a, b = stage(stream, "a", "0", "1"), stage(stream, "b", "2")
    assert 0 < plain.pttl(keys.stage("s", "a")) <= transaction.STAGE_S * 1000
    begin(stream, 1, a, b, moves=1)
    for key in (keys.stage("s", "a"), keys.stage("s", "b"), keys.plan("s", "w")):
        assert plain.pttl(key) > transaction.STAGE_S * 1000
    fences = keys.fences("s").encode()
    assert lasting(stream) - before == {keys.log("s").encode(), fences}
    commit(stream._handle, "w", 1, [a, b])
    assert set(plain.keys("*")) == lasting(stream)
    assert lasting(stream) - before == {keys.log("s").encode(), fences}
    forget(stream._handle, "w")
    assert not plain.exists(fences)


# Committers that die, repeat, and meet


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_what_a_dead_committer_has_begun_is_finished_by_the_next_one(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    a, b = stage(stream, "a", "0", "1 2"), stage(stream, "b", "3")
    begin(stream, 1, a, b, moves=moves)
    assert is_done(stream._handle, "w", 1) == (moves == 3)
    assert commit(stream._handle, "w", 1, [a, b]) == (moves < 3)
    assert not commit(stream._handle, "w", 1, [a, b])
    assert contents(stream) == numbers(4)


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_replay_with_other_stages_finishes_the_old_plan_and_drops_its_own(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    begin(stream, 1, stage(stream, "a", "0", "1 2"), stage(stream, "b", "3"), moves=moves)
    commit(stream._handle, "w", 1, [stage(stream, "c", "x y"), stage(stream, "d", "z", "z", "z")])
    assert contents(stream) == numbers(4)
    assert stream.client.redis.keys("*stage*") == []


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_an_unfinished_earlier_version_is_finished_first(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    begin(stream, 1, stage(stream, "a", "0", "1"), moves=moves)
    assert commit(stream._handle, "w", 2, [stage(stream, "b", "2", "3")])
    assert contents(stream) == numbers(4)
    assert fence(stream) == b"2:2:2:2"


def test_committers_of_the_same_versions_at_once_write_each_once(
    any_url: str, stream: meteor.Stream, frame_by_frame: None
) -> None:
    versions, together = 6, threading.Barrier(3)

    def work(name: str) -> None:
        with meteor.connect(any_url) as m:
            own = m.stream("s")
            for version in range(versions):
                first = version * 4
                staged = [
                    stage(own, f"{name}.{version}.0", f"{first}", f"{first + 1}"),
                    stage(own, f"{name}.{version}.1", f"{first + 2} {first + 3}"),
                ]
                together.wait(20)
                commit(own._handle, "w", version, staged)
                assert is_done(own._handle, "w", version)

    in_threads(*[lambda name=name: work(name) for name in "abc"])
    assert contents(stream) == numbers(versions * 4)
    assert stream.client.redis.keys("*stage*") == []
    assert stream.client.redis.keys("*plan*") == []


def test_a_late_committer_of_an_old_version_moves_nothing(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    a = stage(stream, "a", "0", "1")
    begin(stream, 1, a, moves=1)
    commit(stream._handle, "w", 2, [stage(stream, "b", "2", "3")])
    assert transaction._move(stream._handle, "w", 1, 1, "a", (1, 2)) == [b"FENCED", 2]
    transaction._carry_out(stream._handle, "w", 1, 1, 2)  # it had slept
    assert contents(stream) == numbers(4)


def test_a_plan_that_a_fail_over_has_lost_is_made_again(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(stream._handle, "w", 1, [stage(stream, "a", "0 1")])
    move, plain = transaction._move, stream.client.redis

    def lose(*args: Any) -> list[Any]:
        monkeypatch.setattr(transaction, "_move", move)
        plain.hset(keys.fences("s"), "w", "1:1:1")
        plain.delete(keys.plan("s", "w"))
        return move(*args)

    monkeypatch.setattr(transaction, "_move", lose)
    commit(stream._handle, "w", 2, [stage(stream, "b", "2 3", "4")])
    assert contents(stream) == numbers(5)
    assert is_done(stream._handle, "w", 2)


def test_discarding_spares_what_is_part_of_a_plan(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    """The engine aborts a batch whose commit has failed half-way, and tries it again later."""
    a, b, c = (stage(stream, name, str(i)) for i, name in enumerate("abc"))
    begin(stream, 1, a, b, moves=1)
    discard(stream._handle, "w", ["a", "b", "c"])
    assert stream.client.redis.keys("*stage*") == [keys.stage("s", "b").encode()]
    assert commit(stream._handle, "w", 1, [c])
    assert contents(stream) == numbers(2)
    discard(stream._handle, "w", [])


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_writer_that_is_given_up_leaves_only_what_is_in_the_log(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    before = lasting(stream)
    a, b, other = (stage(stream, name, name) for name in ("a", "b", "other"))
    begin(stream, 1, a, b, moves=moves)
    stage(stream, "c", "c")
    abandon(stream._handle, "w", ["c"])
    log = {keys.log("s").encode()} if moves else set()
    left = {*before, *log, keys.stage("s", other.name).encode()}
    assert set(stream.client.redis.keys("*")) == left
    assert contents(stream) == " ".join("ab"[:moves])
    abandon(stream._handle, "w", [])


# What is gone


def test_a_stage_that_is_gone_before_the_plan_is_named_and_can_be_written_again(
    stream: meteor.Stream,
) -> None:
    a, b = stage(stream, "a", "0 1"), stage(stream, "b", "2", "3")
    plain = stream.client.redis
    for fields in (["1n", "1f", "1p", "1c"], ["0n", "0f", "0p", "0c"]):  # a part, and all of it
        plain.hdel(keys.stage("s", "b"), *fields)
        with pytest.raises(meteor.PublishError, match=r"are gone \(b\).*Write them again"):
            commit(stream._handle, "w", 1, [a, b])
    assert fence(stream) is None
    assert contents(stream) == ""
    assert commit(stream._handle, "w", 1, [a, stage(stream, "b2", "2", "3")])
    assert contents(stream) == numbers(4)


@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("key", [keys.stage("s", "a"), keys.plan("s", "w")])
def test_a_plan_whose_frames_are_gone_is_told_of_and_nothing_is_half_counted(
    stream: meteor.Stream, frame_by_frame: None, key: str, moves: int
) -> None:
    a = stage(stream, "a", "0 1", "2 3", "4")
    begin(stream, 1, a, moves=moves)
    stream.client.redis.delete(key)
    for version in (1, 2):  # a later one may not pass it by
        with pytest.raises(meteor.PublishError, match=f"{moves} of 3 frames are in the log"):
            commit(stream._handle, "w", version, [stage(stream, "b", "x")])
    assert fence(stream) == b"1:%d:3:5" % moves
    assert contents(stream) == numbers(2 * moves)
    forget(stream._handle, "w")  # as the message says
    commit(stream._handle, "w", 1, [stage(stream, "c", "new")])
    assert contents(stream).endswith("new")


def test_a_stream_that_was_deleted_or_made_anew_is_not_written_to(stream: meteor.Stream) -> None:
    a = stage(stream, "a", "0")
    stream.delete()
    with pytest.raises(meteor.StreamNotFound):
        commit(stream._handle, "w", 1, [a])
    anew = stream.client.stream("s")
    with pytest.raises(meteor.LogTruncated, match="created anew"):
        commit(stream._handle, "w", 1, [a])
    with pytest.raises(meteor.PublishError, match="are gone"):
        commit(anew._handle, "w", 1, [a])
    assert contents(anew) == ""


def test_a_stream_made_anew_between_plan_and_move_is_not_written_to(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    a = stage(stream, "a", "0", "1")
    begin(stream, 1, a, moves=1)
    stream.delete()
    anew = stream.client.stream("s")
    with pytest.raises(meteor.LogTruncated):
        transaction._carry_out(stream._handle, "w", 1, 1, 2)
    assert contents(anew) == ""


def test_a_stream_at_its_last_offset_says_so(stream: meteor.Stream) -> None:
    stream.client.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 1)
    with pytest.raises(meteor.ServerRefused, match="offsets"):
        commit(stream._handle, "w", 1, [stage(stream, "a", "0 1 2")])
    assert fence(stream) == b"1:0:1:3"


# The ring, the store, the settings


def test_the_ring_is_trimmed_as_by_a_publisher(stream: meteor.Stream) -> None:
    small = stream.client.stream("small", capacity=10)
    commit(small._handle, "w", 1, [stage(small, "a", *[f"{i} {i}" for i in range(50)])])
    description = small.describe()
    assert (description.first, description.next) == (90, 100)


def test_with_a_store_a_full_stream_is_waited_for_and_can_be_finished_later(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meteor.connect(any_url) as m:
        stream = m.stream("s", capacity=10, max_unarchived=20, store=tmp_path, archive=False)
        a = stage(stream, "a", *[f"{i} {i + 1}" for i in range(0, 100, 2)])
        with monkeypatch.context() as patch:
            patch.setattr(transaction, "_FULL_S", 0.05)
            for _ in range(2):
                with pytest.raises(meteor.StreamFull, match="archiver"):
                    commit(stream._handle, "w", 1, [a])
                discard(stream._handle, "w", ["a"])  # as the engine does
        assert contents(stream) == numbers(20)
        assert stream.describe().first == 0
        with stream.archiver(segment_age=0.0).start():
            assert commit(stream._handle, "w", 1, [a])
            assert stream.store.flush() == 100
        assert contents(stream) == numbers(100)
        assert stream.describe().length == 10


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
def test_frames_are_those_that_a_publisher_would_write(
    stream: meteor.Stream, compression: Any, checksum: bool
) -> None:
    m = stream.client
    own = m.stream("own", compression=compression, checksum=checksum)
    columns = Columns([b"v" * 100] * 50, [b"k", None] * 25, [{"h": b"x"}] * 50, [7] * 50)
    writing = Stage(own._handle, "a")
    writing.write(columns)
    commit(own._handle, "w", 1, [writing.finish()])
    given = {"keys": columns.keys, "headers": columns.headers, "timestamps": columns.timestamps}
    with own.publisher() as pub:
        pub.publish_many(columns.values, **given).result()
    (_, ours), (_, theirs) = entries(m.redis, "own")
    assert (b"crc" in ours) == checksum
    assert frame_name(ours) == frame_name(theirs)
    (ours[b"t"], theirs[b"t"]) = (b"", b"")
    assert ours == theirs


def test_readers_and_publishers_beside_it_see_dense_offsets(
    any_url: str, stream: meteor.Stream, frame_by_frame: None
) -> None:
    count = 30

    def publish() -> None:
        with meteor.connect(any_url) as m, m.stream("s").publisher() as pub:
            for i in range(count):
                pub.publish(b"p%d" % i).result(20)

    def transact() -> None:
        with meteor.connect(any_url) as m:
            own = m.stream("s")
            for i in range(count):
                commit(own._handle, "w", i, [stage(own, f"{i}", f"a{i}", f"b{i}")])

    seen: list[tuple[int, bytes]] = []

    def read() -> None:
        with (
            meteor.connect(any_url) as m,
            m.stream("s").subscriber(initial_offset="earliest") as sub,
        ):
            while len(seen) < 3 * count:
                seen.extend((record.offset, record.value) for record in sub.poll(timeout=20))

    in_threads(publish, transact, read)
    assert [offset for offset, _ in seen] == list(range(3 * count))
    values = [value for _, value in seen]
    assert [v for v in values if v[:1] == b"p"] == [b"p%d" % i for i in range(count)]
    pairs = [v for i in range(count) for v in (b"a%d" % i, b"b%d" % i)]
    assert [v for v in values if v[:1] != b"p"] == pairs
