"""Committed frames are in the log exactly once, even if committers die, retry or are late."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import (
    Stage,
    StageOwner,
    VersionDiffers,
    VersionPassed,
    abandon,
    commit,
    discard,
    discard_stale,
    forget,
    is_done,
    let_expire,
)
from meteor_py.records.config import OFFSET_MAX
from meteor_py.records.frame import Columns
from meteor_py.redis import keys
from tests.support.readers import entries, frame_name
from tests.support.transactions import begin, contents, fence, in_threads, lasting, numbers, stage
from tests.support.waiting import eventually


@pytest.fixture
def stream(any_url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(any_url) as m:
        yield m.stream("s", create=True)


@pytest.fixture
def frame_by_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each script call of a commit move only one frame."""
    monkeypatch.setattr(transaction, "MOVE_BYTES", 1)


# Commits


def test_frames_from_several_workers_are_in_the_log_once_in_stage_order(
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


def test_a_stage_larger_than_one_call_is_committed_completely(stream: meteor.Stream) -> None:
    values = [b"%07d" % i * 20_000 for i in range(80)]  # 11 MB; a call moves about 4 MiB
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
def test_a_version_begun_with_a_different_record_count_is_finished_and_refused(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    begin(stream, 1, stage(stream, "a", "0 1", "2"), moves=moves)
    with pytest.raises(VersionDiffers, match="with 3 records instead of 2") as caught:
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


def test_a_version_is_finished_without_a_comparison_if_its_fence_has_no_record_count(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    begin(stream, 1, stage(stream, "a", "0 1", "2"), moves=1)
    stream.client.redis.hset(keys.fences("s"), "w", "1:1:2")
    assert commit(stream._handle, "w", 1, [stage(stream, "b", "x")], records=1)
    assert fence(stream) == b"1:2:2"
    assert is_done(stream._handle, "w", 1, 99)
    assert contents(stream) == numbers(3)


def test_a_version_that_was_begun_is_finished_or_its_loss_is_reported(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    with pytest.raises(meteor.PublishError, match=r"^Version 1 from writer w was in stream 's'"):
        commit(stream._handle, "w", 1, [], begun=True)
    assert fence(stream) is None, "the version counts as committed"
    begin(stream, 1, stage(stream, "a", "0", "1"), moves=1)
    assert commit(stream._handle, "w", 1, [], begun=True)
    assert not commit(stream._handle, "w", 1, [], begun=True)
    assert contents(stream) == numbers(2)


def test_writers_are_independent(stream: meteor.Stream) -> None:
    for number, writer in enumerate(["v", "w", "a:b {c}"]):
        assert commit(stream._handle, writer, 1, [stage(stream, writer, str(number))])
    assert contents(stream) == numbers(3)


def test_a_version_without_frames_is_done_at_once(stream: meteor.Stream) -> None:
    commit(stream._handle, "w", 1, [stage(stream, "a")])
    assert is_done(stream._handle, "w", 1)
    assert contents(stream) == ""


def test_only_the_fences_remain_and_pending_stages_expire(
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


# Committers that die, repeat a commit, or run concurrently


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_the_next_committer_finishes_a_dead_committers_plan(
    stream: meteor.Stream, frame_by_frame: None, moves: int
) -> None:
    a, b = stage(stream, "a", "0", "1 2"), stage(stream, "b", "3")
    begin(stream, 1, a, b, moves=moves)
    assert is_done(stream._handle, "w", 1) == (moves == 3)
    assert commit(stream._handle, "w", 1, [a, b]) == (moves < 3)
    assert not commit(stream._handle, "w", 1, [a, b])
    assert contents(stream) == numbers(4)


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_a_replay_with_other_stages_finishes_the_old_plan_and_drops_the_new_stages(
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


def test_concurrent_committers_write_each_version_once(
    any_url: str, stream: meteor.Stream, frame_by_frame: None
) -> None:
    versions, together = 6, threading.Barrier(3)

    def work(name: str) -> None:
        with meteor.connect(any_url) as m:
            own = m.stream("s", create=True)
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


def test_a_late_commit_of_an_old_version_moves_nothing(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    a = stage(stream, "a", "0", "1")
    begin(stream, 1, a, moves=1)
    commit(stream._handle, "w", 2, [stage(stream, "b", "2", "3")])
    assert transaction._move(stream._handle, "w", 1, 1, "a", (1, 2)) == [b"FENCED", 2]
    transaction._carry_out(stream._handle, "w", 1, 1, 2)  # a paused committer resumes
    assert contents(stream) == numbers(4)


def test_a_plan_lost_in_a_failover_is_made_again(
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


def test_discard_keeps_planned_stages(stream: meteor.Stream, frame_by_frame: None) -> None:
    """Spark aborts a batch whose commit failed halfway, and tries it again later."""
    a, b, c = (stage(stream, name, str(i)) for i, name in enumerate("abc"))
    begin(stream, 1, a, b, moves=1)
    discard(stream._handle, "w", ["a", "b", "c"])
    assert stream.client.redis.keys("*stage*") == [keys.stage("s", "b").encode()]
    assert commit(stream._handle, "w", 1, [c])
    assert contents(stream) == numbers(2)
    discard(stream._handle, "w", [])


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_an_abandoned_writer_leaves_only_frames_in_the_log(
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


# Lost stages and plans


def test_a_stage_lost_before_the_plan_is_reported_and_can_be_written_again(
    stream: meteor.Stream,
) -> None:
    a, b = stage(stream, "a", "0 1"), stage(stream, "b", "2", "3")
    plain = stream.client.redis
    # Lose some frames, then all.
    for fields in (["1n", "1f", "1p", "1c"], ["0n", "0f", "0p", "0c"]):
        plain.hdel(keys.stage("s", "b"), *fields)
        with pytest.raises(meteor.PublishError, match=r"are gone \(stage 'b'\).*Write them again"):
            commit(stream._handle, "w", 1, [a, b])
    assert fence(stream) is None
    assert contents(stream) == ""
    assert commit(stream._handle, "w", 1, [a, stage(stream, "b2", "2", "3")])
    assert contents(stream) == numbers(4)


@pytest.mark.parametrize("moves", [0, 1])
@pytest.mark.parametrize("key", [keys.stage("s", "a"), keys.plan("s", "w")])
def test_a_plan_whose_frames_are_gone_is_reported_and_can_be_resolved(
    stream: meteor.Stream, frame_by_frame: None, key: str, moves: int
) -> None:
    a = stage(stream, "a", "0 1", "2 3", "4")
    begin(stream, 1, a, moves=moves)
    stream.client.redis.delete(key)
    for version in (1, 2):  # a later version must not be written first
        words = f"{moves} of the 3 frames in version 1 are in the log"
        with pytest.raises(meteor.PublishError, match=words) as caught:
            commit(stream._handle, "w", version, [stage(stream, "b", "x")])
    assert fence(stream) == b"1:%d:3:5" % moves
    assert contents(stream) == numbers(2 * moves)
    plain = stream.client.redis
    found = re.search(r"run (HSET .*?)\. .*run (HDEL .*?)\.$", str(caught.value))
    assert found
    plain.execute_command(*found[1].split())  # "to continue without them"
    assert not commit(stream._handle, "w", 1, [stage(stream, "b", "x")], records=1)
    plain.execute_command(*found[2].split())  # "to write the whole version again"
    commit(stream._handle, "w", 1, [stage(stream, "c", "new")])
    assert contents(stream).endswith("new")


def test_a_deleted_or_recreated_stream_is_not_written_to(stream: meteor.Stream) -> None:
    a = stage(stream, "a", "0")
    stream.delete()
    with pytest.raises(meteor.StreamNotFound):
        commit(stream._handle, "w", 1, [a])
    recreated = stream.client.stream("s", create=True)
    with pytest.raises(meteor.LogTruncated, match="recreated"):
        commit(stream._handle, "w", 1, [a])
    with pytest.raises(meteor.PublishError, match="are gone"):
        commit(recreated._handle, "w", 1, [a])
    assert contents(recreated) == ""


def test_a_stream_recreated_between_plan_and_move_is_not_written_to(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    a = stage(stream, "a", "0", "1")
    begin(stream, 1, a, moves=1)
    stream.delete()
    recreated = stream.client.stream("s", create=True)
    with pytest.raises(meteor.LogTruncated):
        transaction._carry_out(stream._handle, "w", 1, 1, 2)
    assert contents(recreated) == ""


def test_a_commit_past_the_last_offset_is_refused(stream: meteor.Stream) -> None:
    stream.client.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 1)
    with pytest.raises(meteor.ServerRefused, match="offsets"):
        commit(stream._handle, "w", 1, [stage(stream, "a", "0 1 2")])
    assert fence(stream) == b"1:0:1:3"


def test_a_commit_can_end_exactly_at_the_last_offset(stream: meteor.Stream) -> None:
    stream.client.redis.hset(keys.meta("s"), "next", OFFSET_MAX - 3)
    commit(stream._handle, "w", 1, [stage(stream, "a", "0 1 2")])
    assert stream.end().offset == OFFSET_MAX
    with pytest.raises(meteor.ServerRefused, match="offsets"):
        commit(stream._handle, "w", 2, [stage(stream, "b", "3")])


# The ring, the store, the settings


def test_a_commit_trims_the_ring_like_a_publisher(stream: meteor.Stream) -> None:
    small = stream.client.stream("small", capacity=10)
    commit(small._handle, "w", 1, [stage(small, "a", *[f"{i} {i}" for i in range(50)])])
    description = small.describe()
    assert (description.first, description.next) == (90, 100)


def test_a_commit_to_a_full_stream_waits_for_the_archiver_and_can_be_finished_later(
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
                discard(stream._handle, "w", ["a"])  # as Spark does after a failed commit
        assert contents(stream) == numbers(20)
        assert stream.describe().first == 0
        with stream.archiver(segment_age=0.0).start():
            assert commit(stream._handle, "w", 1, [a])
            assert stream.store.flush() == 100
        assert contents(stream) == numbers(100)
        assert stream.describe().length == 10


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("checksum", [True, False])
def test_committed_frames_are_identical_to_published_frames(
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


def test_concurrent_readers_and_publishers_see_dense_offsets(
    any_url: str, stream: meteor.Stream, frame_by_frame: None
) -> None:
    count = 30

    def publish() -> None:
        with meteor.connect(any_url) as m, m.stream("s").publisher() as pub:
            for i in range(count):
                pub.publish(b"p%d" % i).result(20)

    def transact() -> None:
        with meteor.connect(any_url) as m:
            own = m.stream("s", create=True)
            for i in range(count):
                commit(own._handle, "w", i, [stage(own, f"{i}", f"a{i}", f"b{i}")])

    seen: list[tuple[int, bytes]] = []

    def read() -> None:
        with (
            meteor.connect(any_url) as m,
            m.stream("s", create=True).subscriber(initial_offset="earliest") as sub,
        ):
            while len(seen) < 3 * count:
                seen.extend((record.offset, record.value) for record in sub.poll(timeout=20))

    in_threads(publish, transact, read)
    assert [offset for offset, _ in seen] == list(range(3 * count))
    values = [value for _, value in seen]
    assert [v for v in values if v[:1] == b"p"] == [b"p%d" % i for i in range(count)]
    pairs = [v for i in range(count) for v in (b"a%d" % i, b"b%d" % i)]
    assert [v for v in values if v[:1] != b"p"] == pairs


# Stages left by dead processes


def test_next_run_deletes_stages_that_dead_runs_left_behind(stream: meteor.Stream) -> None:
    plain = stream.client.redis
    for run in ("1", "2", "3"):
        owner = StageOwner("w", 17, run)
        discard_stale(stream._handle, owner)
        staged = [stage(stream, f"w.17.{part}.{run}", "0 1", owner=owner) for part in "ab"]
        assert len(plain.keys(keys.stage("s", "w.*"))) == 2, "stages of a dead run remain"
    discard_stale(stream._handle, StageOwner("w", 16, "late"))  # keeps stages for version 17
    assert commit(stream._handle, "w", 17, staged)
    assert contents(stream) == "0 1 0 1"
    assert plain.keys("*stage*") == []


def test_commit_deletes_stages_from_other_attempts_up_to_its_version(stream: meteor.Stream) -> None:
    plain = stream.client.redis
    staged = {
        (version, part): stage(
            stream, f"{version}.{part}", "x", owner=StageOwner("w", version, part)
        )
        for version in (1, 2, 3)
        for part in "ab"
    }
    assert commit(stream._handle, "w", 2, [staged[2, "a"]])
    assert sorted(plain.keys(keys.stage("s", "?.?"))) == [
        keys.stage("s", f"3.{part}").encode() for part in "ab"
    ]
    with pytest.raises(VersionPassed):
        commit(stream._handle, "w", 1, [staged[1, "b"]])
    assert commit(stream._handle, "w", 3, [staged[3, "a"], staged[3, "b"]])
    assert contents(stream) == "x x x"
    assert plain.keys("*stage*") == []


def test_plan_that_has_begun_keeps_its_stages_when_the_next_run_cleans_up(
    stream: meteor.Stream, frame_by_frame: None
) -> None:
    a = stage(stream, "a", "0", "1", owner=StageOwner("w", 1, "first"))
    begin(stream, 1, a, moves=1)
    again = StageOwner("w", 1, "second")
    discard_stale(stream._handle, again)
    b = stage(stream, "b", "0", "1", owner=again)
    assert commit(stream._handle, "w", 1, [b])
    assert contents(stream) == numbers(2)
    assert stream.client.redis.keys("*stage*") == []


def test_worker_and_writer_that_give_up_leave_no_stage(stream: meteor.Stream) -> None:
    given_up = Stage(stream._handle, "a", owner=StageOwner("w", 1, "run"))
    given_up.write(Columns([b"x"]))
    given_up.finish()
    given_up.abandon()
    stage(stream, "b", "x", owner=StageOwner("w", 1, "run"))
    abandon(stream._handle, "w", [])
    assert stream.client.redis.keys("*stage*") == []


# Fences that expire


def test_fences_expire_and_are_deleted_by_later_calls(stream: meteor.Stream) -> None:
    handle = stream._handle
    plain = stream.client.redis

    def write(writer: str, lifetime_s: float) -> bool:
        let_expire(handle, writer, lifetime_s)
        return commit(handle, writer, 1, [stage(stream, f"{writer}.x", writer)])

    for number in range(60):
        assert write(f"t{number}", 0.001)
    assert write("kept", 100.0)
    assert not write("kept", 100.0)

    def left() -> object:
        let_expire(handle, "kept", 100.0)
        return plain.hkeys(keys.fences("s"))

    eventually(lambda: left() == [b"kept"], 5, "fences that have expired are not deleted")
    assert plain.zrange(keys.fence_times("s"), 0, -1) == [b"kept"]
    assert write("t0", 100.0), "the fence has not expired"


def test_let_expire_refuses_a_deleted_stream_and_creates_no_key(stream: meteor.Stream) -> None:
    handle = stream._handle
    let_expire(handle, "w", 1.0)
    stream.delete()
    with pytest.raises(meteor.StreamNotFound):
        let_expire(handle, "w", 1.0)
    assert stream.client.redis.keys("*") == []
