"""``meteor streams``, ``groups`` and ``seek``, as processes, against a real server."""

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
    stream = connect(url).stream("orders")
    with stream.publisher() as pub:
        pub.publish_many([b"%d" % n for n in range(10)]).result()
    stream.seek_group("billing", 6)
    return stream


def test_streams_are_listed_and_described(url: str, stream: Stream) -> None:
    heading, line = succeed(url, "streams", "ls").lines
    assert heading.split()[:3] == ["stream", "first", "next"]
    assert line.split()[:3] == ["orders", "0", "10"]
    shown = succeed(url, "streams", "info", "orders").text
    assert "10 (offsets 0 to before 10)" in shown
    assert "billing" in shown


def test_a_server_without_streams_says_how_to_make_one(url: str) -> None:
    done = succeed(url, "streams", "ls")
    assert done.out == b""
    assert "there is no stream yet; `meteor publish" in done.err
    assert "there is no group yet" in succeed(url, "groups", "ls").err


def test_a_stream_is_created_once_and_again_without_harm(url: str, tmp_path: Path) -> None:
    settings = ["--capacity", "77", "--codec", "json", "--checksum", "--compression", "lz4"]
    settings += ["--store", str(tmp_path), "--max-unarchived", "500"]
    assert "created" in succeed(url, "streams", "create", "orders", *settings).err
    assert "exists already" in succeed(url, "streams", "create", "orders", *settings).err
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


def test_a_ring_is_made_smaller_than_what_it_holds_only_if_that_is_confirmed(
    url: str, stream: Stream
) -> None:
    arguments = ["streams", "configure", "orders", "--capacity", "3"]
    for more, code in ((["--dry-run"], 0), ([], 2), (["--yes"], 0)):
        assert stream.describe().config.capacity == 10_000
        done = meteor(url, *arguments, *more)
        assert done.code == code
        assert "the oldest 7 records will be dropped" in done.err
    assert stream.describe().config.capacity == 3


def test_a_stream_is_deleted_only_if_that_is_confirmed(url: str, stream: Stream) -> None:
    done = meteor(url, "streams", "rm", "orders")
    assert done.code == 2
    assert "--yes" in done.err
    assert (
        "would be deleted: 10 records, 1 group"
        in succeed(url, "streams", "rm", "orders", "--dry-run").err
    )
    with Terminal([METEOR, "--url", url, "streams", "rm", "orders"]) as terminal:
        terminal.wait_for("Go on?")
        terminal.press("n\n")
        assert terminal.wait() == 1
    assert "nothing was done" in terminal.text
    assert connect(url).streams() == ["orders"]
    with Terminal([METEOR, "--url", url, "streams", "rm", "orders"]) as terminal:
        terminal.wait_for("Go on?")
        terminal.press("y\n")
        assert terminal.wait() == 0
    assert connect(url).streams() == []


def test_of_several_streams_all_or_none_are_deleted(url: str, stream: Stream) -> None:
    assert meteor(url, "streams", "rm", "orders", "nope", "--yes").code == 1
    assert connect(url).streams() == ["orders"]


def test_deleting_a_stream_keeps_its_files_unless_told_otherwise(url: str, tmp_path: Path) -> None:
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
    assert "nobody" in shown


def test_a_group_that_the_ring_has_overtaken_is_told_of(url: str, stream: Stream) -> None:
    stream.configure(capacity=1)
    with stream.publisher() as pub:
        for n in range(3):
            pub.publish(b"%d" % n).result()
    shown = succeed(url, "groups", "info", "orders", "billing").text
    assert "records 6 to 11 are gone" in shown


def test_a_group_is_deleted_only_if_that_is_confirmed(url: str, stream: Stream) -> None:
    assert meteor(url, "groups", "rm", "orders", "billing").code == 2
    succeed(url, "groups", "rm", "orders", "billing", "--dry-run")
    assert len(stream.groups()) == 1
    assert "confirmed all below 6" in succeed(url, "groups", "rm", "orders", "billing", "--yes").err
    assert stream.groups() == []


def test_an_active_group_is_deleted_only_by_force(url: str, stream: Stream) -> None:
    with stream.subscriber(group="billing") as sub:
        sub.poll()
        done = meteor(url, "groups", "rm", "orders", "billing", "--yes")
        assert done.code == 1
        assert f"{sub.member} has its lease" in done.err
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
def test_seek_shows_where_a_group_goes_and_moves_it(
    url: str, stream: Stream, to: str, offset: int, skipped: int, repeated: int
) -> None:
    expected = {
        "stream": "orders", "group": "billing", "from": 6, "to": offset,
        "records_skipped": skipped, "records_repeated": repeated, "owner": None,
    }  # fmt: skip
    arguments = ["seek", "orders", "billing", "--to", to, "--json"]
    assert succeed(url, *arguments, "--dry-run").objects == [expected | {"done": False}]
    assert stream.groups()[0].confirmed == 6, "nothing was done"
    assert succeed(url, *arguments).objects == [expected | {"done": True}]
    assert stream.groups()[0].confirmed == offset


def test_seek_is_shown_for_people_too(url: str, stream: Stream) -> None:
    lines = succeed(url, "seek", "orders", "billing", "--to", "2", "--dry-run").lines
    assert [line.split()[-1] for line in lines] == [
        "orders", "billing", "6", "2", "0", "4", "-", "no"
    ]  # fmt: skip


def test_an_active_group_is_moved_only_by_force(url: str, stream: Stream) -> None:
    with stream.subscriber(group="billing") as sub:
        sub.poll()
        for more in ([], ["--dry-run"]):
            done = meteor(url, "seek", "orders", "billing", "--to", "0", *more)
            assert done.code == 1
            assert f"{sub.member} has its lease" in done.err
            assert "--force" in done.err
            assert ("records repeated" in done.text) == bool(more)
        assert stream.groups()[0].confirmed == 6
        succeed(url, "seek", "orders", "billing", "--to", "0", "--force")
        assert stream.groups()[0].confirmed == 0


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["seek", "orders", "nobody", "--to", "0"], 1, "has no group 'nobody'; `meteor groups ls"),
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
def test_a_wrong_argument_is_a_sentence_and_the_right_code(
    url: str, arguments: list[str], code: int, sentence: str
) -> None:
    done = meteor(url, *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_a_group_can_be_begun_by_seek(url: str, stream: Stream) -> None:
    succeed(url, "seek", "orders", "fresh", "--to", "3", "--create")
    assert {group.name: group.confirmed for group in stream.groups()} == {"billing": 6, "fresh": 3}


def test_one_stream_that_cannot_be_read_does_not_hide_the_others(url: str, stream: Stream) -> None:
    stream.seek_group("billing", 0)
    stream.client.stream("trades").seek_group("alien", 0)
    stream.client.redis.hdel(keys.group("trades", "alien"), "start", "confirmed")
    stream.client.redis.sadd(keys.groups("orders"), b"\xff")
    stream.client.redis.sadd(keys.STREAMS, b"\xff")
    for command in ("streams", "groups"):
        done = meteor(url, command, "ls", "--json")
        assert done.code == 1
        assert [found.get("name") for found in done.objects][:1] in (["orders"], ["billing"])
        assert len(done.objects) == 1
        assert done.err.startswith("meteor: stream 'trades' is left out: Where group 'alien' of ")
        assert "Traceback" not in done.err
