"""``meteor publish`` runs as a process and publishes to a real server."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from meteor_cli.args.input import BLOCK, read_lines
from meteor_py import Record, Stream, connect
from tests.conftest import ServerFactory
from tests.support.commands import METEOR, PATIENCE_S, RunningCommand, environment, meteor, succeed
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server
from tests.support.terminal import Terminal
from tests.support.waiting import eventually


def records(url: str, stream: str = "orders") -> list[Record]:
    with connect(url) as m:
        return [r for batch in m.stream(stream, create=False).read(0) for r in batch]


def is_there(url: str, expected: Sequence[object]) -> bool:
    return values(url) == list(expected)


def values(url: str) -> list[object]:
    return [record.value for record in records(url)]


def test_values_are_published_and_their_offsets_printed(url: str) -> None:
    done = succeed(
        url, "publish", "orders", "hello", "wörld", "", "-k", "me", "-H", "a=1", "-H", "b="
    )
    assert done.lines == ["0", "1", "2"]
    found = records(url)
    assert [r.value for r in found] == [b"hello", "wörld".encode(), b""]
    assert {r.key for r in found} == {b"me"}
    assert [r.headers for r in found] == [{"a": b"1", "b": b""}] * 3
    assert succeed(url, "publish", "orders", "--", "-x").lines == ["3"]
    assert succeed(url, "publish", "orders", "quiet", "-q").out == b""


def test_value_can_be_any_bytes(url: str) -> None:
    command: list[bytes | Path] = [METEOR, b"publish", b"orders", b"\xff\x01"]
    subprocess.run(command, check=True, capture_output=True, env=environment(url))
    assert values(url) == [b"\xff\x01"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\n\xff\0", [b"a\r", b"\xff\0"]),
    ],
)
def test_each_line_of_the_input_is_a_record(url: str, given: bytes, expected: list[bytes]) -> None:
    done = succeed(url, "publish", "orders", given=given)
    assert done.out == b""
    assert f"offsets 0 to {len(expected) - 1}" in done.err
    assert values(url) == expected


def test_empty_input_publishes_nothing(url: str) -> None:
    assert "0 records published" in succeed(url, "publish", "orders").err


def test_lines_can_have_keys_and_nul_delimiters(url: str) -> None:
    succeed(url, "publish", "orders", "-K", ":", "-0", given=b"k:v:w\0no key\0:empty\0")
    assert [(r.key, r.value) for r in records(url)] == [
        (b"k", b"v:w"),
        (None, b"no key"),
        (b"", b"empty"),
    ]


def test_the_whole_input_can_be_one_record(url: str) -> None:
    data = random.Random(1).randbytes(500_000)
    succeed(url, "publish", "orders", "--whole", given=data)
    assert values(url) == [data]
    done = meteor(url, "publish", "orders", "--whole", "--max-bytes", "1000", given=data)
    assert done.code == 1
    assert "longer than 1,000 bytes" in done.err


def test_line_is_published_without_waiting_for_the_next(url: str) -> None:
    succeed(url, "streams", "create", "orders")
    with RunningCommand(url, "publish", "orders") as running:
        for n in range(3):
            running.write(b"%d\n" % n)
            expected = [b"%d" % m for m in range(n + 1)]
            eventually(partial(is_there, url, expected))
        assert running.process.stdin is not None
        done = running.end()
    assert done.code == 0


def test_lines_typed_in_a_terminal_are_published(url: str) -> None:
    with Terminal([METEOR, "--url", url, "publish", "orders"]) as terminal:
        terminal.wait_for("Ctrl-D to finish")
        terminal.press("hello\n")
        eventually(lambda: connect(url).streams() == ["orders"])
        eventually(lambda: values(url) == [b"hello"])
        terminal.press("\x04")
        assert terminal.wait() == 0
        assert "1 record published to stream 'orders'" in terminal.text


def test_publish_and_tail_without_an_address_share_the_personal_server(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    done = meteor(None, "publish", "orders", "first", environ=home)
    assert (done.code, done.out) == (0, b"0\n"), done
    assert "METEOR_URL" not in done.err, "a command uses this server by design"
    command: list[str | Path] = [METEOR, "tail", "-f", "orders", "--raw"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(None, home)) as tailing:
        assert tailing.stdout is not None
        try:
            assert tailing.stdout.readline() == b"first\n"
            assert meteor(None, "publish", "orders", "second", environ=home).code == 0
            assert tailing.stdout.readline() == b"second\n"
        finally:
            tailing.send_signal(signal.SIGINT)
        assert tailing.wait(PATIENCE_S) == 130


def test_binary_records_are_copied_unchanged_through_json(url: str) -> None:
    rng = random.Random(5)
    count = 30_000
    with connect(url) as m:
        source = m.stream("source", capacity=count)
        with source.publisher() as pub:
            for start in range(0, count, 10_000):
                pub.publish_many(
                    [rng.randbytes(rng.randrange(60)) for _ in range(10_000)],
                    [None if rng.random() < 0.2 else rng.randbytes(8) for _ in range(10_000)],
                    [
                        None if n % 3 else {"n": b"%d" % n, "\u202e": rng.randbytes(4)}
                        for n in range(10_000)
                    ],
                    [None if n % 2 else start + n for n in range(10_000)],
                )
        with subprocess.Popen(
            [METEOR, "tail", "source", "--no-follow", "--json"],
            stdout=subprocess.PIPE,
            env=environment(url),
        ) as tail:
            publishing = subprocess.run(
                [METEOR, "publish", "copy", "--jsonl", "--capacity", str(count)],
                stdin=tail.stdout,
                capture_output=True,
                check=False,
                timeout=PATIENCE_S,
                env=environment(url),
            )
        assert (tail.returncode, publishing.returncode) == (0, 0), publishing.stderr
        assert identity(m.stream("copy", create=True)) == identity(source)


def identity(stream: Stream) -> list[tuple[object, ...]]:
    return [
        (r.offset, r.key, r.value, r.headers, r.timestamp)
        for batch in stream.read(0)
        for r in batch
    ]


def test_overflowing_the_ring_prints_a_warning(url: str) -> None:
    done = succeed(url, "publish", "orders", "--capacity", "3", given=b"a\nb\nc\nd\n")
    assert "warning: stream 'orders' keeps only 3 records" in done.err
    assert "warning" not in succeed(url, "publish", "orders", given=b"a\nb\nc\n").err.replace(
        "meteor: warning: The server at", ""
    )


def test_input_larger_than_the_ring_is_archived(url: str, tmp_path: Path) -> None:
    store = ["--store", str(tmp_path), "--max-unarchived", "20000"]
    succeed(url, "streams", "create", "orders", "--capacity", "10000", *store)
    lines = b"".join(b"%d\n" % n for n in range(100_000))
    succeed(url, "publish", "orders", given=lines)
    assert succeed(url, "tail", "orders", "-e", "--raw").out == lines


@pytest.mark.parametrize(
    ("codec", "good", "bad"),
    [("json", b'{"a": 1}', b"{"), ("text", "ü".encode(), b"\xff"), ("msgpack", b'{"a": 1}', b"{")],
)
def test_values_that_the_codec_cannot_decode_are_refused(
    url: str, codec: str, good: bytes, bad: bytes
) -> None:
    succeed(url, "streams", "create", "orders", "--codec", codec)
    done = meteor(url, "publish", "orders", given=b"\n".join([good, good, bad, good]))
    assert (done.code, done.out) == (1, b"")
    assert "Record 3 in the input is invalid: " in done.err
    assert "2 records published" in done.err, "the error does not say where to continue"
    assert values(url) == [good.decode() if codec == "text" else {"a": 1}] * 2


def test_messagepack_is_copied_unchanged_between_streams(url: str) -> None:
    for name in ("one", "two"):
        succeed(url, "streams", "create", name, "--codec", "msgpack")
    succeed(url, "publish", "one", '{"n": [1, 2.5, null]}')
    succeed(url, "publish", "two", "--jsonl", given=succeed(url, "tail", "one", "-e", "--json").out)
    assert [r.value for r in records(url, "two")] == [{"n": [1, 2.5, None]}]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["x", "--jsonl"], 2, "either values or --jsonl"),
        (["--jsonl", "-k", "k"], 2, "keys and headers are in the input"),
        (["-k", "k", "-K", ":"], 2, "either -k or -K"),
        (["x", "-H", "novalue"], 2, "does not have the form NAME=VALUE"),
        (["x", "--no-create"], 1, "There is no stream 'orders'"),
        (["x", "--capacity", "0"], 2, "'--capacity': 0 is not in the range"),
        (["x", "--jsonl", "--max-bytes", "0"], 2, "is not in the range"),
    ],
)
def test_wrong_argument_prints_the_reason_and_sets_the_exit_code(
    url: str, arguments: list[str], code: int, sentence: str
) -> None:
    done = meteor(url, "publish", "orders", *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "Traceback" not in done.err
    assert connect(url).streams() == []


def test_error_for_an_invalid_line_reports_the_records_published_before_it(url: str) -> None:
    done = meteor(url, "publish", "orders", "--jsonl", given=b'{"value":"a"}\n{"val":"b"}\n')
    assert done.code == 1
    assert "Line 2 is not a record in the format of `meteor tail --json`" in done.err
    assert "1 record published" in done.err


def test_ctrl_c_reports_published_records(url: str) -> None:
    with RunningCommand(url, "publish", "orders") as running:
        running.write(b"one\ntwo\n")
        eventually(lambda: "orders" in connect(url).streams() and len(values(url)) == 2)
        done = running.end(signal.SIGINT)
    assert done.code == 130
    assert "2 records published" in done.err
    assert "Traceback" not in done.err


def test_publish_waits_for_a_lost_server_until_the_timeout(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    succeed(server.url, "streams", "create", "orders")
    with RunningCommand(server.url, "--timeout", "1", "publish", "orders") as running:
        running.write(b"before\n")
        eventually(partial(is_there, server.url, [b"before"]))
        server.kill()
        running.write(b"after\n")
        done = running.end()
    assert (done.code, done.out) == (1, b"")
    assert "is not replying; waiting for it" in done.err
    assert "1 record published to stream 'orders'" in done.err
    assert "Traceback" not in done.err


def test_unreachable_server_is_reported_without_a_traceback(private_server: ServerFactory) -> None:
    server = private_server()
    succeed(server.url, "streams", "create", "orders")
    server.kill()
    done = meteor(server.url, "publish", "orders", "x")
    assert (done.code, done.out) == (1, b"")
    assert "cannot be reached" in done.err
    assert "Traceback" not in done.err


def test_line_longer_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.write_bytes(b"x" * (3 * BLOCK))
    with path.open("rb") as file, pytest.raises(ValueError, match="A line in the input is longer"):
        list(read_lines(file.fileno(), b"\n", BLOCK))


def test_lines_that_cross_read_blocks_stay_whole(tmp_path: Path) -> None:
    lines = [b"%07d" % n * (n % 13) for n in range(60_000)]
    path = tmp_path / "lines"
    path.write_bytes(b"\n".join(lines))
    with path.open("rb") as file:
        found = [line for part in read_lines(file.fileno(), b"\n", BLOCK) for line in part]
    assert found == lines


def test_records_before_a_refused_one_are_published(
    url: str,
) -> None:
    lines = b"one\ntwo\n" + b"x" * 100 + b"\nthree\n"
    done = meteor(url, "publish", "orders", "--max-bytes", "50", given=lines)
    assert (done.code, values(url)) == (1, [b"one", b"two"])
    assert "2 records published" in done.err
    assert "--max-bytes" in done.err
    for bad in (
        b'{"value":"x","timestamp":253402300800000}',
        b'{"value":"x","timestamp":-1}',
        b'{"value":"x","other":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    ):
        given = b'\n{"value":"y"}\n' + bad + b'\n{"value":"z"}\n'
        done = meteor(url, "publish", "orders", "--jsonl", given=given)
        assert (done.code, values(url)[-1]) == (1, b"y")
        assert "1 record published" in done.err
        assert "Line 3 is not a record in " in done.err
    assert len(values(url)) == 5


def test_records_awaiting_replies_are_counted_after_ctrl_c(server: Server, url: str) -> None:
    stream = connect(url).stream("orders", create=True)
    with (
        Proxy(HOST, server.port) as proxy,
        RunningCommand(proxy.url, "publish", "orders") as running,
    ):
        running.write(b"one\n")
        eventually(lambda: stream.bounds()[1] == 1)
        proxy.stall("replies")
        running.write(b"two\nthree\n")
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.process.stdin = None
        eventually(lambda: stream.bounds()[1] == 3)
        running.process.send_signal(signal.SIGINT)
        proxy.resume()
        done = running.end()
    assert "3 records published to stream 'orders', offsets 0 to 2" in done.err
    assert done.code in (0, 130)  # the command may have finished just before the signal
