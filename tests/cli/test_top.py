"""``meteor top`` shows a live screen in a terminal, and prints a table with ``--once``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_cli.live.screen import Sort, View, draw
from meteor_cli.live.snapshot import Rates, Snapshot
from meteor_cli.render.text import show_count
from meteor_cli.signals import ended_once
from tests.conftest import ServerFactory
from tests.support.archivers import LONG_S, StoredStream
from tests.support.commands import METEOR, succeed
from tests.support.commands import meteor as run
from tests.support.group_members import STREAM, GroupHarness
from tests.support.readers import fill
from tests.support.snapshots import group, look, seen
from tests.support.terminal import Terminal

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"


def top(url: str, *arguments: str, columns: int = 80, rows: int = 24) -> Terminal:
    command: list[str | Path] = [METEOR, "--url", url, "top", "--interval", "0.2", *arguments]
    # A shell sets these variables; they do not change when the window is resized.
    environment = {"COLUMNS": str(columns), "LINES": str(rows)}
    return Terminal(command, columns=columns, rows=rows, environment=environment)


def line_of(terminal: Terminal, name: str) -> str:
    """Return the line for a stream or group."""
    return next((line for line in terminal.lines if line.split()[:1] == [name]), "")


@pytest.fixture
def client(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m:
        yield m


# On a screen


def test_top_shows_streams_groups_and_stores_as_they_change(
    url: str, tmp_path: Path, client: meteor.Client
) -> None:
    with StoredStream(url, tmp_path / "store") as stored, top(url) as terminal:
        terminal.wait_for(STREAM)
        product, _, at, address = terminal.lines[0].split()[:4]
        assert (product in ("Valkey", "Redis"), at) == (True, "at")
        assert address.startswith("redis")
        assert url.startswith(address.rstrip("\u2026"))
        assert "1 stream \u00b7 0 groups" in terminal.lines[1]
        fill(stored.stream, 90)
        terminal.wait_for(lambda t: "90/100" in line_of(t, STREAM))
        terminal.wait_for(lambda t: line_of(t, "(store)").endswith("90  none"))
        with stored.stream.subscriber(group="billing", lease_ttl=LONG_S) as sub:
            sub.poll()
            terminal.wait_for(lambda t: line_of(t, "billing").endswith(f"90  {sub.member}"))
            sub.confirm(29).result(20)
            terminal.wait_for(lambda t: line_of(t, "billing").endswith(f"60  {sub.member}"))
        terminal.wait_for(lambda t: line_of(t, "billing").endswith("60  none"))
        stored.archive()
        terminal.wait_for("90 stored")
        client.stream("trades", create=True)
        terminal.wait_for("trades")
        stored.stream.delete()
        terminal.wait_for(lambda t: STREAM not in t.text)


def test_rates_are_shown_while_records_flow_and_are_zero_afterwards(
    url: str, client: meteor.Client
) -> None:
    stream = client.stream("orders", create=True)
    stream.seek_group("g", 0)
    with top(url) as terminal:
        terminal.wait_for(lambda t: line_of(t, "orders").split()[1:2] == ["0"])
        with stream.publisher() as pub:

            def flows(terminal: Terminal) -> bool:
                pub.publish(b"x").result(20)
                return line_of(terminal, "orders").split()[1:2] not in ([], ["-"], ["0"])

            terminal.wait_for(flows)
        terminal.wait_for(lambda t: line_of(t, "orders").split()[1:2] == ["0"])


def test_resize_redraws_immediately(url: str, client: meteor.Client) -> None:
    for number in range(30):
        fill(client.stream(f"stream-{number:02}-{'x' * 60}", create=True), 3)
    with top(url, "--interval", "3600") as terminal:  # only the signal makes top redraw
        terminal.wait_for("\u2026 and 11 more streams")
        assert terminal.lines[-1] == "\u2026 and 11 more streams"
        assert all(len(line) <= 80 for line in terminal.lines)
        terminal.resize(60, 12)
        terminal.wait_for("\u2026 and 23 more streams")
        assert "memory" not in terminal.lines[3]
        terminal.resize(120, 40)
        terminal.wait_for("stream-29")
        assert "more" not in terminal.text
        assert f"stream-00-{'x' * 60}" in terminal.text
        terminal.resize(20, 3)
        terminal.wait_for(lambda t: len(t.lines) == 3 and "\u2026" in t.lines[0])


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("\x03", 130)])
def test_q_and_ctrl_c_restore_the_screen(
    url: str, client: meteor.Client, key: str, code: int
) -> None:
    client.stream("orders", create=True)
    # Ctrl-C does not end the shell, which shows the terminal's modes before and after.
    script = 'trap : INT; stty -g; "$0" --url "$1" top --interval 3600; echo "code $?"; stty -g'
    with Terminal(["sh", "-c", script, METEOR, url]) as terminal:
        terminal.wait_for("orders")
        terminal.press(f"x\x1b[A{key}")
        assert terminal.wait() == 0
        before, shown = terminal.output.split(ENTER)
        screen, after = shown.split(LEAVE)
        assert screen.endswith(b"\x1b[?25h"), "the cursor is still hidden"
        code_line, modes = after.decode().split("code ")[1].splitlines()
        assert int(code_line) == code
        assert modes == before.decode().strip()


def test_sigterm_restores_the_screen(url: str, client: meteor.Client) -> None:
    client.stream("orders", create=True)
    with top(url) as terminal:
        terminal.wait_for("orders")
        terminal.process.terminate()
        assert terminal.wait() == 143
        assert terminal.output.endswith(LEAVE)


def test_hostile_names_are_shown_as_escapes(harness: GroupHarness) -> None:
    harness.subscriber().close()
    harness.take_away("evil\x1b[2J\u202e\x9b31m")
    with top(harness.url, columns=120) as terminal:
        terminal.wait_for(r"evil\x1b[2J\u202e\x9b31m")
        assert b"\x1b[2J" not in terminal.output


def test_top_waits_for_a_server_that_restarts(private_server: ServerFactory) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with meteor.connect(server.url) as m:
        m.stream("orders", create=True)
        with top(server.url) as terminal:
            terminal.wait_for("orders")
            server.kill()
            terminal.wait_for("No reply for ")
            assert line_of(terminal, "orders"), "the last snapshot is not shown"
            server.restart()
            terminal.wait_for(lambda t: "No reply" not in t.text)
            m.stream("trades", create=True)
            terminal.wait_for("trades")


def test_resize_and_ctrl_c_work_while_the_server_hangs(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        for number in range(30):
            m.stream(f"stream-{number:02}", create=True)
    with top(server.url, "--timeout", "600") as terminal:  # longer than any test waits
        terminal.wait_for("\u2026 and 11 more streams")
        server.pause()
        terminal.resize(60, 12)
        terminal.wait_for("\u2026 and 23 more streams")
        terminal.press("\x03")
        assert terminal.wait() == 130


def test_server_that_stays_down_ends_top_with_a_message(private_server: ServerFactory) -> None:
    server = private_server()
    with meteor.connect(server.url) as m:
        m.stream("orders", create=True)
    with top(server.url, "--timeout", "1") as terminal:  # top waits six times as long in total
        terminal.wait_for("orders")
        server.kill()
        assert terminal.wait() == 1
        after = terminal.output.partition(LEAVE)[2].decode()
        assert after.startswith(f"meteor: The server at {server.url} cannot be reached")
        assert after.count("\n") == 1


# Drawing


def drawn(
    shown: Snapshot, width: int | None, height: int | None, sort: Sort = "name", **rates: Rates
) -> list[str]:
    server = meteor.ServerDescription("valkey", "9.1.0", "primary", 1_000_000, 2_000_000, 3, 7200)
    view = View(server, "redis://localhost:6379/0", datetime.now(), shown, rates)
    return [line.plain for line in draw(view, sort, width=width, height=height)]


def test_header_counts_all_cluster_nodes_and_the_unreachable_ones() -> None:
    nodes = (meteor.ServerDescription(role="primary", address="redis://a:1"),) * 2
    silent = meteor.ServerDescription(address="redis://b:1")
    server = meteor.ServerDescription("valkey", nodes=(*nodes, silent))
    view = View(server, "redis+cluster://a:1", datetime.now(), Snapshot())
    totals = draw(view, "name", width=None, height=None)[1].plain
    assert totals.startswith("3 nodes \u00b7 1 unreachable \u00b7 ")


MANY = look(
    *(
        seen(
            f"s{n:02}" + "\u6f22" * n,
            archived=n,
            groups=tuple(group(f"g{i}" + "y" * 10 * i, owner="o" * 10 * i) for i in range(5)),
        )
        for n in range(40)
    )
)


@pytest.mark.parametrize("width", [1, 2, 10, 20, 36, 40, 52, 60, 70, 80, 120, 300])
@pytest.mark.parametrize("height", [1, 2, 4, 5, 6, 12, 24, 400])
def test_table_fits_the_screen(width: int, height: int) -> None:
    from rich.cells import cell_len

    lines = drawn(MANY, width, height)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width


def test_table_is_complete_without_a_screen() -> None:
    lines = drawn(MANY, None, None)
    assert len(lines) == 4 + 40 * 7
    assert "\u2026" not in "".join(lines)
    assert any(line.endswith("o" * 40) for line in lines)


def test_stream_with_many_groups_leaves_room_for_other_streams() -> None:
    crowd = seen("a", groups=tuple(group(f"g{n}") for n in range(100)))
    lines = drawn(look(crowd, seen("b")), 80, 24)
    assert [line.split()[0] for line in lines if line[:2] in ("a ", "b ")] == ["a", "b"]
    assert lines[-1] == "\u2026 and 91 more groups"


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("name", "abcd"), ("rate", "cdab"), ("lag", "dabc"), ("memory", "badc")],
)
def test_sort_option_decides_which_streams_are_shown(sort: Sort, expected: str) -> None:
    streams = look(
        seen("a", bytes=5), seen("b", bytes=9), seen("c", bytes=None),
        seen("d", bytes=1, archived=3),
    )  # fmt: skip
    rates = {"c": Rates(9.5), "d": Rates(2.0), "a": Rates(0.0)}
    lines = drawn(streams, 80, None, sort, **rates)
    assert [line.strip()[0] for line in lines[4:] if "(store)" not in line] == list(expected)
    assert drawn(streams, 80, 7, sort, **rates)[4].startswith(expected[0])


def test_sorting_by_lag_sorts_groups_within_their_streams() -> None:
    streams = look(seen(groups=(group("a", lag=1), group("b", lag=9))))
    assert [line.split()[0] for line in drawn(streams, 80, None, "lag")[5:]] == ["b", "a"]


def test_unknown_server_properties_are_left_out() -> None:
    view = View(meteor.ServerDescription(), "unix:///x", datetime.now(), Snapshot(left_off=7))
    lines = [line.plain for line in draw(view, "name", width=80, height=24)]
    assert lines[0].startswith("Server at unix:///x ")
    assert lines[1] == "0 streams \u00b7 0 groups \u00b7 7 not shown"
    assert "There are no streams" in lines[3]


def colours(shown: Snapshot) -> dict[str, str]:
    """Return the style of each red or yellow text."""
    server = meteor.ServerDescription(memory=95, memory_max=100)
    view = View(server, "", datetime.now(), shown)
    return {
        line.plain[span.start : span.end].strip(): str(span.style)
        for line in draw(view, "name", width=80, height=24)
        for span in line.spans
        if "red" in str(span.style) or "yellow" in str(span.style)
    }


def test_colors_mark_lag_and_problems() -> None:
    calm = seen("a", groups=(group(confirmed=10, owner="x"),))
    assert colours(look(calm)) == {"memory 95 B of 100 B": "bold red"}
    waits = seen("b", archived=8, groups=(group("slow", lag=7),))
    lost = seen("c", first=4, groups=(group("late", lag=10, owner="x"),))
    assert colours(look(waits, lost)) == {
        "memory 95 B of 100 B": "bold red", "2": "yellow", "7": "yellow", "none": "yellow",
        "4 lost": "bold red", "10": "bold red",
    }  # fmt: skip


def test_large_numbers_are_abbreviated() -> None:
    sizes = [10**power - 1 for power in range(1, 19)] + [2**63]
    assert max(len(show_count(size)) for size in sizes[:15]) <= 5
    assert [show_count(n) for n in (0, 9_999, 10_000, 999_999, 1_000_000)] == [
        "0", "9,999", "10.0k", "999k", "1.00M",
    ]  # fmt: skip


# With --once


def test_once_prints_plain_and_complete_output_to_a_pipe(url: str, client: meteor.Client) -> None:
    name = "n" * 128
    stream = client.stream(name, create=True)
    stream.seek_group("g" * 128, 0)
    fill(stream, 5)
    done = succeed(url, "top", "--once")
    assert f"\n{name}  " in done.text
    assert f"\n  {'g' * 128}  " in done.text
    assert "\x1b" not in done.text
    assert done.err == ""


def test_once_as_json_has_rates_and_description_fields(
    url: str, tmp_path: Path, client: meteor.Client
) -> None:
    fill(client.stream("a", create=True), 5)
    with StoredStream(url, tmp_path / "store") as stored:
        stored.fill(50)
        stored.stream.seek_group("g", 20)
        first, second = succeed(url, "top", "--once", "--json").objects
    assert (first["name"], first["next"], first["capacity"], first["rate"]) == ("a", 5, 10_000, 0.0)
    assert (first["unarchived"], first["archive_rate"]) == (None, None)
    assert (second["name"], second["unarchived"], second["archiver"]) == (STREAM, 50, None)
    (found,) = second["groups"]
    assert (found["name"], found["lag"], found["rate"], found["owner"]) == ("g", 30, 0.0, None)


def test_number_option_and_names_limit_the_streams_shown(url: str, client: meteor.Client) -> None:
    for name in "abc":
        client.stream(name, create=True)
    assert [each["name"] for each in succeed(url, "top", "--once", "--json", "-n2").objects] == [
        "a", "b",
    ]  # fmt: skip
    named = succeed(url, "top", "--once", "--json", "c", "a", "c").objects
    assert [each["name"] for each in named] == ["a", "c"]
    assert succeed(url, "top", "--once", "-n", "1").lines[-1] == "\u2026 and 2 more streams"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([], 2, "There is no terminal to draw on. Use --once"),
        (["--json"], 2, "--json needs --once"),
        (["--once", "missing"], 1, "There is no stream 'missing'"),
        (["--interval", "0"], 2, "is not in the range"),
        (["--url", "redis://127.0.0.1:1", "--once"], 1, "cannot be reached"),
    ],
)
def test_invalid_use_of_top_prints_a_message(
    url: str, arguments: list[str], code: int, sentence: str
) -> None:
    done = run(url, "top", *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_top_on_a_dumb_terminal_suggests_the_once_option(url: str) -> None:
    command: list[str | Path] = [METEOR, "--url", url, "top"]
    with Terminal(command, environment={"TERM": "dumb"}) as terminal:
        assert terminal.wait() == 2
        assert "Use --once" in terminal.text


def test_once_output_fits_the_terminal_width(url: str, client: meteor.Client) -> None:
    for number in range(40):
        client.stream(f"{number:02}{'x' * 100}", create=True)
    command: list[str | Path] = [METEOR, "--url", url, "top", "--once"]
    with Terminal(command, rows=60) as terminal:
        assert terminal.wait() == 0
        assert ENTER not in terminal.output
        assert sum(line[:2].isdigit() for line in terminal.lines) == 40, (
            "a stream takes several lines"
        )


def test_closed_pipe_ends_top_quietly(url: str, client: meteor.Client) -> None:
    client.stream("orders", create=True)
    script = 'set -o pipefail; "$0" --url "$1" top --once | true'
    done = subprocess.run(
        ["bash", "-c", script, METEOR, url], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_importing_top_and_watch_loads_nothing_heavy() -> None:
    """Slow imports are deferred until they are needed."""
    program = (
        "import sys, json, meteor_cli.commands.top, meteor_cli.commands.watch; "
        "print(json.dumps([m for m in ('meteor_py', 'rich', 'msgspec') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == []


def test_signals_are_deferred_while_the_terminal_is_set_up_or_restored() -> None:
    done: list[str] = []

    def use_the_terminal() -> None:
        with ended_once() as enable_signals:
            try:
                signal.raise_signal(signal.SIGINT)
                done.append("prepared")
                enable_signals(True)
                done.append("drawn")
            finally:
                signal.raise_signal(signal.SIGINT)
                done.append("put back")

    with pytest.raises(KeyboardInterrupt):
        use_the_terminal()
    assert done == ["prepared", "put back"]


def test_many_signals_restore_the_screen_once(url: str, client: meteor.Client) -> None:
    client.stream("orders", create=True)
    with top(url) as terminal:
        terminal.wait_for(lambda t: ENTER in t.output)  # top may still be starting
        for columns in range(20, 40):
            terminal.resize(columns, 10)
            terminal.process.send_signal(signal.SIGINT)
        terminal.wait()
        assert terminal.output.count(LEAVE) == 1
        assert b"Traceback" not in terminal.output
