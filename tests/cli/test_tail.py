"""``meteor tail`` runs as a process and reads from a real server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from meteor_cli.args.positions import Position, parse_span
from meteor_cli.commands.tail import Tailer
from meteor_cli.render.records import as_raw
from meteor_cli.session import Session
from meteor_py import (
    Client,
    LeaseLost,
    MeteorError,
    OutcomeUnknown,
    RecordBatch,
    Stream,
    Subscriber,
    connect,
)
from meteor_py.records.codec import CodecName
from tests.conftest import ServerFactory
from tests.support.commands import METEOR, RunningCommand, meteor, succeed
from tests.support.proxy import Proxy
from tests.support.readers import fill, replace_frame
from tests.support.servers import HOST, Server, plain_client
from tests.support.terminal import Terminal
from tests.support.waiting import eventually

VALUES = [b"%d" % n for n in range(20)]


@pytest.fixture
def stream(url: str) -> Stream:
    """Twenty records; those with even offsets have the key "even"."""
    stream = connect(url).stream("orders", create=True)
    with stream.publisher() as pub:
        for n, value in enumerate(VALUES):
            pub.publish(value, b"odd" if n % 2 else b"even", {"n": b"%d" % (n % 5)})
    return stream


def values(url: str, *arguments: str) -> list[int]:
    return [int(line) for line in succeed(url, "tail", "orders", "--raw", *arguments).lines]


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-e", range(20)),
        ("--no-follow", range(20)),
        ("--exit-at-end", range(20)),
        ("-e -n 3", range(17, 20)),
        ("-e -n 99", range(20)),
        ("-e -n 0", []),
        ("-e -o latest", []),
        ("-e -o -3", range(17, 20)),
        ("-e -o +18", [18, 19]),
        ("-o 5..8", [5, 6, 7]),
        ("-o ..3", [0, 1, 2]),
        ("-e -o 18..", [18, 19]),
        ("-o 5 -n 2", [5, 6]),
        ("-o earliest -n 3", [0, 1, 2]),
        ("-e -o @-1h", range(20)),
        ("-o @-1h..now", range(20)),
        ("-e --key odd -n 2", [17, 19]),
        ("-e --key odd --key even -n 2", [18, 19]),
        ("-o earliest --key odd -n 2", [1, 3]),
        ("-e -H n=3", [3, 8, 13, 18]),
        ("-e -H n=3 --key even -H n", [8, 18]),
        ("-e --key nobody -n 3", []),
    ],
)
def test_tail_prints_the_requested_records(url: str, arguments: str, expected: range) -> None:
    assert values(url, *arguments.split()) == list(expected)


def test_tail_prints_the_last_ten_records_and_then_follows(url: str, stream: Stream) -> None:
    with RunningCommand(url, "tail", "orders", "--raw") as running:
        assert [int(running.line()) for _ in range(10)] == list(range(10, 20))
        with stream.publisher() as pub:
            pub.publish(b"news").result()
        assert running.line() == "news"
        done = running.end(signal.SIGINT)
    assert (done.code, done.out) == (130, b"")
    assert "Traceback" not in done.err


def test_default_output_is_a_readable_line(url: str, stream: Stream) -> None:
    (line,) = succeed(url, "tail", "orders", "-o", "3..4").lines
    offset, date, time, rest = line.split(" ", 3)
    assert (offset, rest) == ("3", "odd: 3 {n=3}")
    assert len(f"{date} {time}") == len("2026-11-16 13:55:10.528")


def test_range_ends_after_its_last_record(url: str, stream: Stream) -> None:
    with RunningCommand(url, "tail", "orders", "--raw", "-o", "19..22") as running:
        assert running.line() == "19"
        with stream.publisher() as pub:
            pub.publish_many([b"20", b"21", b"22"]).result()
        done = running.end()
    assert (done.code, done.out) == (0, b"20\n21\n")


def test_range_with_an_end_in_the_future_stops_at_that_time(url: str, stream: Stream) -> None:
    done = succeed(url, "tail", "orders", "--raw", "-o", "@-1h..@-0s")
    assert done.lines == [str(n) for n in range(20)]
    with RunningCommand(url, "tail", "orders", "--raw", "-o", "@now..3s") as running:
        done = running.end()
    assert (done.code, done.out) == (0, b"")


def test_format_prints_the_named_fields(url: str, stream: Stream) -> None:
    arguments = ["tail", "orders", "-o", "3..5", "--format", r"%o|%k|%v|%h\n"]
    assert succeed(url, *arguments).lines == ["3|odd|3|n=3", "4|even|4|n=4"]
    assert meteor(url, "tail", "orders", "-e", "--format", "%q").code == 2


def test_lost_records_are_reported_with_exit_code_1(url: str) -> None:
    small = connect(url).stream("small", capacity=2)
    with small.publisher() as pub:
        for n in range(5):
            pub.publish(b"%d" % n).result()
    done = meteor(url, "tail", "small", "-e", "--raw", "-o", "1")
    assert (done.code, done.lines) == (1, ["3", "4"])
    assert "records 1 to 2 of stream 'small' are gone" in done.err
    done = meteor(url, "tail", "small", "-e", "--raw", "-o", "0..2")
    assert (done.code, done.out) == (1, b"")
    assert meteor(url, "tail", "small", "-e", "--raw").code == 0, "records were reported as missing"


def test_tail_reads_store_and_ring_as_one_log(url: str, tmp_path: Path) -> None:
    with connect(url) as m:
        stream = m.stream("old", capacity=5, store=str(tmp_path))
        with stream.publisher() as pub:
            pub.publish_many([b"%d" % n for n in range(40)]).result()
        stream.store.flush()
        pub = stream.publisher()
        pub.publish(b"40").result()
        assert succeed(url, "tail", "old", "-e", "--raw").lines == [str(n) for n in range(41)]


@pytest.mark.parametrize("codec", ["text", "json", "msgpack"])
def test_records_that_the_codec_cannot_decode_are_printed(url: str, codec: CodecName) -> None:
    stream = connect(url).stream("odd", codec=codec)
    with stream.publisher(codec="bytes") as pub:
        pub.publish(b"\xc1\xff", key=b"k").result()
    assert succeed(url, "tail", "odd", "-e", "--format", "%v").text == r"\xc1\xff"
    assert succeed(url, "tail", "odd", "-e", "-n", "1", "--key", "k", "--raw").out == b"\xc1\xff\n"


# -- groups ------------------------------------------------------------------------------------


def confirmed(stream: Stream) -> int:
    return next(group.confirmed for group in stream.groups() if group.name == "g")


def test_group_continues_at_its_confirmed_offset(url: str, stream: Stream) -> None:
    assert values(url, "-g", "g", "-n", "3") == [0, 1, 2]
    assert confirmed(stream) == 3
    assert values(url, "-g", "g", "-e") == list(range(3, 20))
    assert confirmed(stream) == 20
    assert values(url, "-g", "g", "-e") == []


def test_new_group_can_start_at_latest(url: str, stream: Stream) -> None:
    assert values(url, "-g", "g", "-e", "-o", "latest") == []
    assert confirmed(stream) == 20
    done = meteor(url, "tail", "orders", "-g", "g", "-o", "5")
    assert (done.code, done.out) == (2, b"")
    assert "meteor seek" in done.err


def test_group_also_confirms_records_that_do_not_match_the_filter(url: str, stream: Stream) -> None:
    assert values(url, "-g", "g", "--key", "even", "-n", "2") == [0, 2]
    assert confirmed(stream) == 3
    assert values(url, "-g", "g", "--key", "nobody", "-e") == []
    assert confirmed(stream) == 20


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_tail_releases_its_lease_immediately_when_it_ends(
    url: str, stream: Stream, how: signal.Signals
) -> None:
    with RunningCommand(url, "tail", "orders", "-g", "g", "--raw") as first:
        assert first.line() == "0"
        with RunningCommand(url, "tail", "orders", "-g", "g", "--raw", "-n", "1") as second:
            assert "holds the lease of group 'g'; waiting" in second.line("stderr")
            done = first.end(how)
            assert done.code == 128 + how
            assert "Traceback" not in done.err
            with stream.publisher() as pub:
                pub.publish(b"news").result()
            assert second.line() == "news"
            assert second.end().code == 0
    assert stream.groups()[0].owner is None


def test_records_are_not_confirmed_after_the_pipe_is_closed(url: str, stream: Stream) -> None:
    with RunningCommand(url, "tail", "orders", "-g", "g", "--raw") as running:
        assert running.line() == "0"
        eventually(lambda: confirmed(stream) == 20)
        assert running.process.stdout is not None
        running.process.stdout.close()
        with stream.publisher() as pub:
            pub.publish(b"lost?").result()
        assert running.process.wait(30) == 0
    assert confirmed(stream) == 20


# -- pipes and terminals -----------------------------------------------------------------------


def test_closed_pipe_ends_tail_quietly(url: str, stream: Stream) -> None:
    with stream.publisher() as pub:
        pub.publish_many([b"x" * 1_000] * 5_000).result()
    with RunningCommand(url, "tail", "orders", "-e", "--raw") as running:
        assert running.line() == "0"
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.wait(30) == 0
        assert running.process.stderr is not None
        assert running.process.stderr.read() == b""


def test_waiting_tail_notices_a_closed_pipe(url: str, stream: Stream) -> None:
    with RunningCommand(url, "tail", "orders", "-n", "1", "--raw") as running:
        assert running.line() == "19"
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.wait(30) == 0, "the command did not end"


def test_records_reach_the_terminal_escaped(url: str) -> None:
    hostile = connect(url).stream("hostile", create=True)
    evil = b"\x1b[2J\x1b]0;pwned\x07\x9b31m\xe2\x80\xae\0"
    with hostile.publisher() as pub:
        pub.publish(evil, key=evil, headers={"\x1b[31m": evil}).result()
    for style in ([], ["--json"], ["--format", r"%k %v %h\n"]):
        with Terminal([METEOR, "--url", url, "tail", "hostile", "-e", *style]) as terminal:
            assert terminal.wait() == 0
        shown = terminal.output.replace(b"\x1b[2m", b"").replace(b"\x1b[0m", b"")
        shown = shown.replace(b"\x1b[36m", b"")  # the command's own colors are allowed
        assert b"pwned" in shown or b"b64" in shown
        assert not {*b"\x1b\x07\0\x9b"} & {*shown}
        assert "\u202e" not in shown.decode(errors="replace")


def test_raw_output_to_a_terminal_is_refused_without_force(url: str, stream: Stream) -> None:
    for style in (["--raw"], ["--format", "%v{raw}"]):
        command: list[str | Path] = [METEOR, "--url", url, "tail", "orders", "-e", *style]
        with Terminal(command) as terminal:
            assert terminal.wait() == 2
        assert "--force" in terminal.text
        with Terminal([*command, "--force"]) as terminal:
            assert terminal.wait() == 0
        assert "19" in terminal.text


def test_ctrl_c_in_a_terminal_ends_tail_with_exit_code_130(url: str, stream: Stream) -> None:
    with Terminal([METEOR, "--url", url, "tail", "orders"]) as terminal:
        terminal.wait_for("odd: 19")
        with stream.publisher() as pub:
            pub.publish(b"news").result()
        terminal.wait_for("news")
        terminal.resize(100, 40)
        with stream.publisher() as pub:
            pub.publish(b"in a larger window").result()
        terminal.wait_for("in a larger window")
        terminal.press("\x03")
        assert terminal.wait() == 130
    assert "Traceback" not in terminal.text


# -- errors ------------------------------------------------------------------------------------


def test_missing_stream_is_reported_on_one_line_and_is_not_created(url: str) -> None:
    done = meteor(url, "tail", "nope")
    assert (done.code, done.out) == (1, b"")
    assert done.err.startswith("meteor: There is no stream 'nope'. `meteor streams ls`")
    assert done.err.count("\n") == 1
    assert connect(url).streams() == []


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["-o", "sideways"], 2, "'sideways' is not a position; write earliest"),
        (["-o", "@never"], 2, "'never' is not a time"),
        (["-o", "7..5"], 2, "ends before it begins"),
        (["-o", "99"], 1, "beyond the end"),
        (["--json", "--format", "%v"], 2, "only one of --json, --raw and --format"),
        (["--raw", "--json"], 2, "only one of --json, --raw and --format"),
        (["-0"], 2, "-0 needs --raw"),
        (["-n", "+5"], 2, "use `-o +5`"),
        (["-g", "no good"], 1, "name"),
    ],
)
def test_wrong_argument_prints_the_reason_and_sets_the_exit_code(
    url: str, arguments: list[str], code: int, sentence: str
) -> None:
    done = meteor(url, "tail", "orders", *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_tail_waits_for_a_lost_server_until_the_timeout(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with connect(server.url) as m:
        publish(m, b"before")
    with RunningCommand(server.url, "--timeout", "2", "tail", "orders", "--raw") as running:
        assert running.line() == "before"
        server.kill()
        assert "is not replying; waiting" in running.line("stderr")
        done = running.end()
    assert (done.code, done.out) == (1, b"")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


def test_tail_reconnects_after_a_broken_connection(server: Server, url: str) -> None:
    with connect(url) as m, Proxy(HOST, server.port) as proxy:
        publish(m, b"before")
        with RunningCommand(proxy.url, "--timeout", "30", "tail", "orders", "--raw") as running:
            assert running.line() == "before"
            proxy.cut()
            publish(m, b"after")
            assert running.line() == "after"


def test_corrupt_frame_ends_tail_with_the_option_that_continues_after_it(url: str) -> None:
    with connect(url) as m, plain_client(url) as client:
        fill(m.stream("small", create=True), 2, 2, 2)
        replace_frame(client, "small", b"3-2", b"not a frame")
    done = meteor(url, "tail", "small", "-e", "--raw", "-o", "earliest")
    assert (done.code, done.lines) == (1, ["value 0", "value 1"])
    assert "Records 2 to 3 of stream 'small' are corrupt" in done.err
    assert "Continue after them with `-o 4`." in done.err
    assert succeed(url, "tail", "small", "-e", "--raw", "-o", "4").lines == ["value 4", "value 5"]


def test_deleted_stream_ends_tail_with_a_message(url: str, stream: Stream) -> None:
    with RunningCommand(url, "tail", "orders", "-n", "1", "--raw") as running:
        assert running.line() == "19"
        stream.delete()
        done = running.end()
    assert done.code == 1
    assert "There is no stream 'orders'" in done.err


def publish(m: Client, value: bytes) -> None:
    with m.stream("orders").publisher() as pub:
        pub.publish(value).result()


def test_tail_follows_a_group_that_is_moved_during_a_write(url: str, stream: Stream) -> None:
    with stream.publisher() as pub:
        pub.publish_many([b"x" * 1000] * 2000)
    with RunningCommand(
        url, "tail", "orders", "-g", "billing", "-o", "earliest", "--raw"
    ) as tailing:
        assert tailing.line() == "0"
        eventually(lambda: stream.groups()[0].owner is not None, 20, "no member took the lease")
        stream.seek_group("billing", 2010, force=True)
        for _ in range(2019):
            tailing.line()
        assert "another member has taken over group 'billing', or" in tailing.line("stderr")
        for _ in range(10):
            tailing.line()
        eventually(lambda: stream.groups()[0].confirmed == 2020, 20, "the group did not continue")
        assert tailing.end(signal.SIGINT).code == 130


@pytest.mark.parametrize(
    "error",
    [
        LeaseLost("Lost.", stream="orders", group="billing"),
        OutcomeUnknown("Unknown.", stream="orders"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_tail_continues_after_a_poll_reports_a_lost_lease_or_an_unknown_confirm(
    stream: Stream,
    error: MeteorError,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    poll, errors = Subscriber.poll, [error]

    def poll_after_error(sub: Subscriber, *arguments: Any) -> RecordBatch:
        if errors:
            raise errors.pop()
        return poll(sub, *arguments)

    monkeypatch.setattr(Subscriber, "poll", poll_after_error)
    tailer = Tailer(Session(), stream, as_raw(b"\n"), None)
    tailer.read_for("billing", None, None, follow=False)
    shown = capfd.readouterr()
    assert shown.out.splitlines() == [value.decode() for value in VALUES]
    assert "another member has taken over group 'billing'" in shown.err


@pytest.mark.parametrize("start", ["-100", "+0"])
@pytest.mark.usefixtures("capfd")
def test_records_dropped_before_a_relative_start_do_not_count_as_lost(
    url: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = connect(url).stream("small", capacity=10)
    with stream.publisher() as pub:
        pub.publish_many([b"old"] * 10).result()
        resolve = Position.resolve

        def look_and_drop(position: Position, opened: Stream) -> int:
            found = resolve(position, opened)
            pub.publish_many([b"new"] * 10).result()
            return found

        monkeypatch.setattr(Position, "resolve", look_and_drop)
        tailer = Tailer(Session(), stream, as_raw(b"\n"), None)
        tailer.read(parse_span(start), None, follow=False)
        assert tailer.lost == 0
        tailer.read(parse_span("3"), None, follow=False)
        assert tailer.lost > 0, "requested records did not count as lost"
