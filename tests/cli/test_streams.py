"""``meteor streams``, ``groups`` and ``seek`` run as processes on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from meteor_py import Stream, connect
from meteor_py.redis import keys
from tests.support.commands import METEOR, meteor, succeed
from tests.support.terminal import Terminal


@pytest.fixture
def stream(url: str) -> Stream:
    """Ten records, and a group that has confirmed the first six."""
    stream = connect(url).stream("orders", create=True)
    with stream.publisher() as pub:
        pub.publish_many([b"%d" % n for n in range(10)]).result()
    stream.seek_group("billing", 6)
    return stream


def test_streams_are_listed_and_described(url: str, stream: Stream) -> None:
    heading, line = succeed(url, "streams", "ls").lines
    assert heading.split()[:3] == ["stream", "first", "next"]
    assert line.split()[:3] == ["orders", "0", "10"]
    shown = succeed(url, "streams", "info", "orders").text
    assert "10 (first offset 0, next 10)" in shown
    assert "billing" in shown


def test_info_shows_the_store_and_how_much_is_archived(url: str, tmp_path: Path) -> None:
    with connect(url) as client:
        stream = client.stream("kept", capacity=2_000, store=tmp_path, archive=False)
        for count in (1_200, 34):
            with stream.publisher() as pub:
                pub.publish_many([b"x"] * count).result()
            if count > 1_000:
                with stream.archiver().start():
                    stream.store.flush(20)
    facts = dict(line.split(maxsplit=1) for line in succeed(url, "streams", "info", "kept").lines)
    assert facts["store"].endswith(tmp_path.name)
    assert facts["archived"] == "all records below 1,200; 34 waiting"
    assert facts["max"].split() == ["unarchived", "20,000"]


def test_ls_without_streams_says_how_to_create_one(url: str) -> None:
    done = succeed(url, "streams", "ls")
    assert done.out == b""
    assert "there are no streams yet. `meteor publish" in done.err
    assert "there are no groups yet" in succeed(url, "groups", "ls").err


def test_creating_an_existing_stream_with_the_same_settings_succeeds(
    url: str, tmp_path: Path
) -> None:
    settings = ["--capacity", "77", "--codec", "json", "--checksum", "--compression", "lz4"]
    settings += ["--store", str(tmp_path), "--max-unarchived", "500"]
    assert "created" in succeed(url, "streams", "create", "orders", *settings).err
    assert "already exists" in succeed(url, "streams", "create", "orders", *settings).err
    (found,) = succeed(url, "streams", "info", "orders", "--json").objects
    assert (found["capacity"], found["codec"], found["max_unarchived"]) == (77, "json", 500)
    assert found["store"].endswith(tmp_path.name)
    done = meteor(url, "streams", "create", "orders", "--capacity", "78")
    assert done.code == 1
    assert "`meteor streams configure orders`" in done.err


def test_settings_can_be_changed(url: str, stream: Stream) -> None:
    done = succeed(
        url, "streams", "configure", "orders", "--capacity", "30", "--compression", "lz4"
    )
    assert "capacity from 10000 to 30, compression from none to lz4" in done.err
    assert stream.describe().config.capacity == 30
    assert meteor(url, "streams", "configure", "orders").code == 2


def test_age_and_size_limits_can_be_set_shown_changed_and_removed(url: str) -> None:
    limits = ["--max-age", "1d12h", "--max-bytes", "10MB"]
    succeed(url, "streams", "create", "logs", *limits)
    assert "already exists" in succeed(url, "streams", "create", "logs", *limits).err
    (found,) = succeed(url, "streams", "info", "logs", "--json").objects
    assert (found["max_age"], found["max_bytes"]) == (36 * 3600, 10_000_000)
    shown = succeed(url, "streams", "info", "logs").text
    assert "36 h" in shown
    assert "10.0 MB" in shown
    done = succeed(url, "streams", "configure", "logs", "--max-age", "0", "--max-bytes", "5MB")
    assert "max_age from 129600.0 to 0.0, max_bytes from 10000000 to 5000000" in done.err
    assert "no limit" in succeed(url, "streams", "info", "logs").text
    assert meteor(url, "streams", "configure", "logs", "--max-age", "long").code == 2


def test_new_limit_that_drops_records_needs_confirmation(url: str, stream: Stream) -> None:
    arguments = ["streams", "configure", "orders", "--max-bytes", "50"]
    for more, code in ((["--dry-run"], 0), ([], 2), (["--yes"], 0)):
        assert stream.describe().config.max_bytes is None
        done = meteor(url, *arguments, *more)
        assert done.code == code
        assert "records beyond the limit will be dropped" in done.err
    assert stream.describe().config.max_bytes == 50
    looser = succeed(url, "streams", "configure", "orders", "--max-bytes", "1MB")
    assert "dropped" not in looser.err


def test_shrinking_a_ring_needs_confirmation_if_it_would_drop_records(
    url: str, stream: Stream
) -> None:
    arguments = ["streams", "configure", "orders", "--capacity", "3"]
    for more, code in ((["--dry-run"], 0), ([], 2), (["--yes"], 0)):
        assert stream.describe().config.capacity == 10_000
        done = meteor(url, *arguments, *more)
        assert done.code == code
        assert "the oldest 7 records will be dropped" in done.err
    assert stream.describe().config.capacity == 3


def test_repair_only_reports_foreign_entries_unless_apply_is_given(
    url: str, stream: Stream
) -> None:
    assert "nothing to repair in 1 frame" in succeed(url, "streams", "repair", "orders").err
    foreign = stream.client.redis.xadd(keys.log("orders"), {"user": "1"})
    assert isinstance(foreign, bytes)
    for arguments, code in (([], 1), (["--apply"], 2)):
        done = meteor(url, "streams", "repair", "orders", *arguments)
        assert done.code == code
        assert done.out.split() == [foreign]
        assert "1 foreign entry" in done.err
    assert meteor(url, "publish", "orders", "x").code == 1
    done = succeed(url, "streams", "repair", "orders", "--apply", "--yes")
    assert "1 foreign entry removed, 1 frame kept" in done.err
    succeed(url, "publish", "orders", "x")
    assert stream.end().offset == 11


def test_deleting_a_stream_needs_confirmation(url: str, stream: Stream) -> None:
    done = meteor(url, "streams", "rm", "orders")
    assert done.code == 2
    assert "--yes" in done.err
    assert (
        "would be deleted: 10 records, 1 group"
        in succeed(url, "streams", "rm", "orders", "--dry-run").err
    )
    with Terminal([METEOR, "--url", url, "streams", "rm", "orders"]) as terminal:
        terminal.wait_for("Continue?")
        terminal.press("n\n")
        assert terminal.wait() == 1
    assert "nothing was changed" in terminal.text
    assert connect(url).streams() == ["orders"]
    with Terminal([METEOR, "--url", url, "streams", "rm", "orders"]) as terminal:
        terminal.wait_for("Continue?")
        terminal.press("y\n")
        assert terminal.wait() == 0
    assert connect(url).streams() == []


def test_rm_deletes_nothing_if_a_named_stream_is_missing(url: str, stream: Stream) -> None:
    assert meteor(url, "streams", "rm", "orders", "nope", "--yes").code == 1
    assert connect(url).streams() == ["orders"]


def test_rm_keeps_archived_files_without_the_history_option(url: str, tmp_path: Path) -> None:
    for history in ([], ["--history"]):
        with connect(url) as m:
            stream = m.stream("old", store=str(tmp_path), resume=True)
            with stream.publisher() as pub:
                pub.publish(b"x").result()
            stream.store.flush()
        succeed(url, "streams", "rm", "old", "--yes", *history)
        assert bool(list(tmp_path.rglob("*.parquet"))) == (not history)


# -- groups ------------------------------------------------------------------------------------


def test_groups_are_listed_and_described(url: str, stream: Stream) -> None:
    for arguments in ([], ["orders"]):
        _, line = succeed(url, "groups", "ls", *arguments).lines
        assert line.split()[:4] == ["orders", "billing", "6", "4"]
    shown = succeed(url, "groups", "info", "orders", "billing").text
    assert "below 6" in shown
    assert "none" in shown


def test_group_info_reports_records_dropped_before_they_were_confirmed(
    url: str, stream: Stream
) -> None:
    stream.configure(capacity=1)
    with stream.publisher() as pub:
        for n in range(3):
            pub.publish(b"%d" % n).result()
    shown = succeed(url, "groups", "info", "orders", "billing").text
    assert "records 6 to 11, dropped" in shown


def test_group_is_deleted_only_after_confirmation(url: str, stream: Stream) -> None:
    assert meteor(url, "groups", "rm", "orders", "billing").code == 2
    succeed(url, "groups", "rm", "orders", "billing", "--dry-run")
    assert len(stream.groups()) == 1
    assert (
        "confirmed all records below 6"
        in succeed(url, "groups", "rm", "orders", "billing", "--yes").err
    )
    assert stream.groups() == []


def test_deleting_an_active_group_needs_force(url: str, stream: Stream) -> None:
    with stream.subscriber(group="billing") as sub:
        sub.poll()
        done = meteor(url, "groups", "rm", "orders", "billing", "--yes")
        assert done.code == 1
        assert f"{sub.member} holds its lease" in done.err
        succeed(url, "groups", "rm", "orders", "billing", "--yes", "--force")
    assert stream.groups() == []


# -- seek --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "offset", "skipped", "repeated"),
    [
        ("earliest", 0, 0, 6),
        ("latest", 10, 4, 0),
        ("6", 6, 0, 0),
        ("-1", 9, 3, 0),
        ("+2", 2, 0, 4),
        ("@-1h", 0, 0, 6),
    ],
)
def test_seek_shows_the_target_offset_and_moves_the_group(
    url: str, stream: Stream, to: str, offset: int, skipped: int, repeated: int
) -> None:
    expected = {
        "stream": "orders", "group": "billing", "from": 6, "to": offset,
        "records_skipped": skipped, "records_repeated": repeated, "owner": None,
    }  # fmt: skip
    arguments = ["seek", "orders", "billing", "--to", to, "--json"]
    assert succeed(url, *arguments, "--dry-run").objects == [expected | {"done": False}]
    assert stream.groups()[0].confirmed == 6, "the group was moved"
    assert succeed(url, *arguments).objects == [expected | {"done": True}]
    assert stream.groups()[0].confirmed == offset


def test_seek_prints_a_readable_table(url: str, stream: Stream) -> None:
    lines = succeed(url, "seek", "orders", "billing", "--to", "2", "--dry-run").lines
    assert [line.split()[-1] for line in lines] == [
        "orders", "billing", "6", "2", "0", "4", "-", "no"
    ]  # fmt: skip


def test_moving_an_active_group_needs_force(url: str, stream: Stream) -> None:
    with stream.subscriber(group="billing") as sub:
        sub.poll()
        for more in ([], ["--dry-run"]):
            done = meteor(url, "seek", "orders", "billing", "--to", "0", *more)
            assert done.code == 1
            assert f"{sub.member} holds its lease" in done.err
            assert "--force" in done.err
            assert ("records repeated" in done.text) == bool(more)
        assert stream.groups()[0].confirmed == 6
        succeed(url, "seek", "orders", "billing", "--to", "0", "--force")
        assert stream.groups()[0].confirmed == 0


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["seek", "orders", "nobody", "--to", "0"], 1, "has no group 'nobody'. `meteor groups ls"),
        (["seek", "nope", "billing", "--to", "0"], 1, "There is no stream 'nope'"),
        (["seek", "orders", "billing", "--to", "11"], 1, "beyond the end of stream 'orders'"),
        (["seek", "orders", "billing", "--to", "1..2"], 2, "is a range"),
        (["seek", "orders", "billing", "--to", "soon"], 2, "is not a position"),
        (["seek", "orders", "billing"], 2, "Missing option '--to'"),
        (["groups", "info", "orders", "nobody"], 1, "has no group 'nobody'"),
        (["groups", "ls", "nope"], 1, "There is no stream 'nope'"),
        (["streams", "info", "nope"], 1, "There is no stream 'nope'"),
        (["streams", "create", "no good"], 1, "name"),
    ],
)
def test_wrong_argument_prints_the_reason_and_sets_the_exit_code(
    url: str, arguments: list[str], code: int, sentence: str
) -> None:
    done = meteor(url, *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_error_for_a_misspelled_stream_suggests_the_right_name(url: str, stream: Stream) -> None:
    done = meteor(url, "tail", stream.name[:-1] + "z")
    assert f"Did you mean {stream.name!r}?" in done.err


def test_seek_can_create_a_group(url: str, stream: Stream) -> None:
    succeed(url, "seek", "orders", "fresh", "--to", "3", "--create")
    assert {group.name: group.confirmed for group in stream.groups()} == {"billing": 6, "fresh": 3}


def test_unreadable_stream_does_not_hide_other_streams(url: str, stream: Stream) -> None:
    stream.seek_group("billing", 0)
    stream.client.stream("trades", create=True).seek_group("alien", 0)
    stream.client.redis.hdel(keys.group("trades", "alien"), "start", "confirmed")
    stream.client.redis.sadd(keys.groups("orders"), b"\xff")
    stream.client.redis.sadd(keys.STREAMS, b"\xff")
    for command in ("streams", "groups"):
        done = meteor(url, command, "ls", "--json")
        assert done.code == 1
        assert [found.get("name") for found in done.objects][:1] in (["orders"], ["billing"])
        assert len(done.objects) == 1
        assert done.err.startswith(
            "meteor: skipping stream 'trades': The position of group 'alien' of "
        )
        assert "Traceback" not in done.err
