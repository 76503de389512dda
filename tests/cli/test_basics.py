"""Features that all commands share: help, addresses, errors, completion, and the reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import meteor_py
from meteor_cli.command import Command
from meteor_cli.main import COMMANDS
from meteor_cli.main import meteor as root
from meteor_cli.reference import reference
from meteor_py.redis import keys
from tests.support.commands import METEOR, environment, meteor, succeed
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]


def all_commands(
    command: click.Command = root, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from all_commands(below, (*path, name))


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(*found, id=" ".join(found[0])) for found in all_commands()]
)
def test_help_for_every_command_has_an_example(
    path: tuple[str, ...], command: click.Command
) -> None:
    assert command.help
    shown = command.get_help(click.Context(command, info_name=" ".join(("meteor", *path))))
    assert max(map(len, shown.splitlines())) <= 80, "the help is too wide for a small terminal"
    if isinstance(command, click.Group):
        return
    assert isinstance(command, Command)
    assert re.search(rf"\bmeteor( --\S+ \S+)* {' '.join(path)}", command.example)
    assert command.example.splitlines()[0].strip() in shown
    names = [name for option in command.params for name in option.opts]
    assert len(names) == len(set(names)), "two options have the same name"
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.name


def test_documented_commands_exist() -> None:
    found = {" ".join(path) for path, command in all_commands() if isinstance(command, Command)}
    assert {
        "demo", "server", "publish", "tail", "seek", "bench", "top", "watch", "completion",
        "streams ls", "streams info", "streams create", "streams rm", "groups ls", "groups info",
        "groups rm", "archive run", "archive ls", "archive verify", "archive compact",
        "archive expire", "shared ls", "shared info", "shared purge", "shared resume",
        "shared fsck", "peers ls", "peers members", "peers watch", "peers leader", "peers send",
        "peers ask", "peers propose", "peers remove", "peers delete",
    } <= found  # fmt: skip


def test_help_does_not_import_the_library() -> None:
    heavy = {"meteor_py", "pyarrow", "redis", "rich", "msgspec", "asyncio"}
    program = (
        "import sys\nfrom meteor_cli.main import meteor\n"
        "meteor.main(['--help'], 'meteor', standalone_mode=False)\n"
        f"print(*sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.startswith(b"Usage: meteor")
    assert done.stderr == b"\n"
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout.decode()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_each_command_with_the_first_sentence_of_its_own_help(name: str) -> None:
    command = root.get_command(click.Context(root), name)
    assert command is not None
    assert COMMANDS[name] == command.get_short_help_str(limit=1_000)


def test_version_option_prints_the_library_version() -> None:
    assert meteor(None, "--version").text == f"meteor, version {meteor_py.__version__}\n"


def test_reference_is_up_to_date() -> None:
    written = (ROOT / "docs" / "cli.md").read_text()
    assert written == reference(), "run python -m meteor_cli.reference > docs/cli.md"


def test_url_is_accepted_before_and_after_the_command(url: str) -> None:
    assert succeed(None, "--url", url, "publish", "orders", "a").lines == ["0"]
    assert succeed("redis://127.0.0.1:1", "publish", "orders", "b", "--url", url).lines == ["1"]
    assert succeed(url, "tail", "orders", "-e", "--raw", "--timeout", "3").lines == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--url", "redis://:secret@127.0.0.1:1", "streams", "ls"], 1, "cannot be reached"),
        (["tail", "orders", "--url", "redis://:secret@127.0.0.1:1"], 1, "cannot be reached"),
        (["--url", "localhost:6379", "streams", "ls"], 1, "is not the address of a server"),
        (["--url", "http://:secret@x", "publish", "orders", "x"], 1, "is not the address"),
        (["--timeout", "0", "streams", "ls"], 2, "is not in the range"),
        (["nonsense"], 2, "No such command"),
        (["tail"], 2, "Missing argument 'STREAM'"),
        (["streams", "nonsense"], 2, "No such command"),
    ],
)
def test_error_prints_the_reason_without_secrets_and_sets_the_exit_code(
    arguments: list[str], code: int, sentence: str
) -> None:
    done = meteor(None, *arguments)
    assert (done.code, done.out) == (code, b"")
    assert sentence in done.err
    assert "secret" not in done.err
    assert "Traceback" not in done.err
    if code == 1:
        assert done.err.startswith("meteor: ")
        assert done.err.count("\n") == 1


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_a_traceback(place: int) -> None:
    arguments = ["streams", "ls", "--url", "redis://127.0.0.1:1"]
    arguments.insert(place, "--debug")
    done = meteor(None, *arguments)
    assert done.code == 1
    assert "Traceback" in done.err


def test_only_commands_that_write_warn_about_data_loss(url: str) -> None:
    assert "meteor: warning: The server at " in succeed(url, "publish", "orders", "x").err
    assert succeed(url, "tail", "orders", "-e").err == ""
    assert succeed(url, "streams", "ls").err == ""


def test_closed_pipe_is_not_an_error_for_listings_and_tail(url: str) -> None:
    succeed(url, "publish", "orders", "x")
    inside, outside = os.pipe()
    os.close(inside)
    try:
        for arguments in (["streams", "ls"], ["groups", "ls", "--json"], ["tail", "orders", "-e"]):
            done = subprocess.run(
                [METEOR, *arguments],
                stdout=outside,
                stderr=subprocess.PIPE,
                check=False,
                env=environment(url),
            )
            assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    finally:
        os.close(outside)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("ta", ["tail"]),
        ("streams ", ["ls", "info", "create", "configure", "rm", "repair"]),
        ("tail ", ["orders", "others"]),
        ("tail or", ["orders"]),
        ("tail orders --js", ["--json"]),
        ("tail orders -g ", ["billing"]),
        ("seek orders b", ["billing"]),
        ("groups info nope ", []),
    ],
)
def test_completion_offers_commands_options_streams_and_groups(
    url: str, typed: str, found: list[str]
) -> None:
    with meteor_py.connect(url) as m:
        m.stream("others", create=True)
        m.stream("orders", create=True).seek_group("billing", 0)
    words = f"meteor {typed}"
    env = {
        "_METEOR_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = meteor(url, environ=env)
    assert [line.partition(",")[2] for line in done.lines if line] == found
    assert done.err == ""


def test_completion_is_silent_without_a_server() -> None:
    env = {"_METEOR_COMPLETE": "bash_complete", "COMP_WORDS": "meteor tail ", "COMP_CWORD": "2"}
    done = meteor("redis://127.0.0.1:1", environ=env)
    assert (done.text.strip(), done.err) == ("", "")


def test_completion_starts_no_server(tmp_path: Path) -> None:
    env = {"_METEOR_COMPLETE": "bash_complete", "COMP_WORDS": "meteor tail ", "COMP_CWORD": "2"}
    meteor(None, environ=env | {"XDG_STATE_HOME": str(tmp_path), "HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_command_prints_a_script(shell: str) -> None:
    assert "_METEOR_COMPLETE" in succeed(None, "completion", shell).text


def test_commands_use_redis_only_through_the_library() -> None:
    forbidden = re.compile(
        r"(?<!meteor_py)\.redis\b|import redis|from redis|execute_command|\.call\(\""
        r"|\.pipeline\(|EVALSHA|XADD"
    )
    for path in (ROOT / "cli").rglob("*.py"):
        assert not forbidden.search(path.read_text()), path.name


def test_completion_offers_no_name_that_a_shell_would_execute(url: str) -> None:
    with meteor_py.connect(url) as m:
        stream = m.stream("orders", create=True)
        stream.seek_group("billing", 0)
        for name in ("$(reboot)", "a\nplain,b", "\x1b[2J"):
            m.redis.sadd(keys.groups("orders"), name)
            m.redis.hset(keys.group("orders", name), "incarnation", stream.incarnation)
            m.redis.hset(keys.group("orders", name), "confirmed", "0")
    env = {
        "_METEOR_COMPLETE": "bash_complete",
        "COMP_WORDS": "meteor tail orders -g ",
        "COMP_CWORD": "4",
    }
    assert meteor(url, environ=env).lines == ["plain,billing"]


@pytest.mark.parametrize("arguments", ["--help", "--version", "tail --help"])
def test_closed_pipe_is_not_an_error_for_help(arguments: str) -> None:
    inside, outside = os.pipe()
    os.close(inside)
    try:
        done = subprocess.run(
            [METEOR, *arguments.split()], stdout=outside, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(outside)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "closed", "code"),
    [
        ("tail orders -e", ">&-", 1),
        ("streams ls", ">&-", 1),
        ("--help", ">&-", 1),
        ("streams ls", ">/dev/full", 1),
        ("tail orders -e", ">/dev/full", 1),
        ("tail orders -e", "<&- 2>&-", 0),
        ("publish orders", "<&-", 1),
        ("publish orders x", "<&- >&- 2>&-", 1),
        ("streams rm orders", "<&-", 2),
    ],
)
def test_closed_standard_files_or_a_full_disk_cause_no_traceback(
    url: str, arguments: str, closed: str, code: int
) -> None:
    succeed(url, "publish", "orders", "x")
    done = subprocess.run(
        ["sh", "-c", f'"$0" {arguments} {closed}', METEOR],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=environment(url, {"PYTHONWARNINGS": "ignore"}),
    )
    assert done.returncode == code
    err = done.stderr.decode()
    assert "Traceback" not in err
    assert "Exception" not in err
    assert "unexpected" not in err


_LOSES_SIGNALS = """
import select, signal, sys, threading, time, weakref
from meteor_cli import main, signals
start = threading.Thread.start
def start_slowly(thread):
    start(thread)
    time.sleep(0.1)  # the machine is slow
threading.Thread.start = start_slowly
number = signal.Signals[sys.argv[1]]
class Trap:
    def __del__(self):
        if sys.argv[2] == "finalizer":
            signal.raise_signal(number)
def generate():
    try:
        yield
    finally:
        signal.raise_signal(number)
def lose():
    trap = Trap()
    if sys.argv[2] == "weak reference":
        weakref.finalize(trap, signal.raise_signal, number)
    if sys.argv[2] == "generator":
        trap = generate()
        next(trap)
def command(**settings):
    with signals.cleaning_up():
        lose()
        select.select([], [], [])
main.meteor.main = command
main.main()
"""


@pytest.mark.parametrize("place", ["finalizer", "weak reference", "generator"])
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -2)])
def test_signal_whose_exception_python_drops_ends_the_command(
    name: str, code: int, place: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LOSES_SIGNALS, name, place],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code
    assert b"ignored" not in done.stderr


def test_second_sigterm_does_not_interrupt_the_cleanup_of_the_first() -> None:
    program = """
import signal
from meteor_cli import main
def command(**settings):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("cleaned up")
main.meteor.main = command
main.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, b"cleaned up\n", b"")


def test_untrusted_names_reach_the_terminal_escaped(url: str) -> None:
    with meteor_py.connect(url) as m:
        m.stream("orders", create=True).seek_group("billing", 0)
        m.redis.set(keys.lease("orders", "billing"), "evil\x1b[2J\x07 1 1")
    with Terminal([METEOR, "--url", url, "tail", "orders", "-g", "billing"]) as terminal:
        terminal.wait_for("waiting for it")
        assert "evil\\x1b[2J\\x07 holds the lease of group" in terminal.text
        assert b"\x1b[2J" not in terminal.output
        assert b"\x07" not in terminal.output
