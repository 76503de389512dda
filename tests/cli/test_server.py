"""``meteor server``, which runs a server, and ``meteor server info``, which describes one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from meteor_py.server import open_embedded
from tests.conftest import ServerFactory
from tests.support.commands import CommandResult, RunningCommand, meteor, succeed
from tests.support.servers import plain_client
from tests.support.waiting import eventually


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The personal server's directory, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "meteor"


@pytest.fixture
def own(home: Path) -> Iterator[tuple[RunningCommand, str]]:
    """The command that runs the user's personal server, and its URL."""
    with RunningCommand(None, "server") as running:
        yield running, running.line()


def test_commands_without_a_url_share_the_server(own: tuple[RunningCommand, str]) -> None:
    with plain_client(own[1]) as client:
        before = client.info("server")["run_id"]
    succeed(None, "publish", "orders", "hello")
    assert succeed(None, "tail", "orders", "-e", "--raw").text == "hello\n"
    assert succeed(own[1], "streams", "ls", "--json").objects[0]["name"] == "orders"
    with plain_client(own[1]) as client:
        assert client.info("server")["run_id"] == before, (
            "the server was restarted between commands"
        )


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_command_and_its_server(
    how: signal.Signals, code: int, own: tuple[RunningCommand, str]
) -> None:
    running, url = own
    pid = pid_of(url)
    done = running.end(how)
    assert (done.code, done.out) == (code, b""), done
    assert "Traceback" not in done.err
    assert not is_alive(pid)


def test_data_survives_a_server_restart(home: Path) -> None:
    with RunningCommand(None, "server") as running:
        running.line()
        succeed(None, "publish", "orders", "hello")
        running.end(signal.SIGINT)
    assert succeed(None, "tail", "orders", "-e", "--raw").text == "hello\n"


def test_command_describes_its_server(own: tuple[RunningCommand, str], home: Path) -> None:
    running, url = own
    pid = pid_of(url)
    done = running.end(signal.SIGINT)
    first, second, third, fourth = done.err.splitlines()[:4]
    assert first.startswith("meteor: Valkey ")
    assert f", process {pid}. " in first
    assert f"data is kept in {home}, at most " in second
    assert "commands use this server by default" in third
    assert fourth.strip() == f"export METEOR_URL={url}"


def test_server_keeps_running_while_other_processes_use_it(
    own: tuple[RunningCommand, str], home: Path
) -> None:
    with open_embedded(home) as other:
        done = own[0].end(signal.SIGINT)
        assert done.code == 130
        assert "other processes still use the server" in done.err
        assert is_alive(other.pid)
    assert not is_alive(other.pid)


@pytest.mark.parametrize(("options", "kept"), [([], b"kept"), (["--private"], None)])
def test_command_restarts_a_killed_server(
    options: list[str], kept: bytes | None, home: Path
) -> None:
    with RunningCommand(None, "server", *options) as running:
        url = running.line()
        before = pid_of(url)
        with plain_client(url) as client:
            client.set("key", "kept")
        os.kill(before, signal.SIGKILL)
        after = eventually(lambda: replacement_of(url, before), 30, "the server was not restarted")
        with plain_client(url) as client:
            assert client.get("key") == kept
        lines: list[str] = []

        def restart_is_reported() -> bool:
            lines.append(running.line("stderr"))
            return f"restarted it as process {after}." in lines[-1]

        eventually(restart_is_reported, 30, "the restart was not reported")
        done = running.end(signal.SIGINT)
    assert done.code == 130
    text = "\n".join([*lines, done.err])
    assert "the server ended unexpectedly" in text
    assert ("Its data was lost." in text) is (kept is None)


def test_command_fails_when_the_server_cannot_be_restarted(home: Path) -> None:
    with RunningCommand(None, "server") as running:
        url = running.line()
        for log in (home / "appendonlydir").glob("*.incr.aof"):
            log.write_bytes(b"*nonsense\r\n")
        os.kill(pid_of(url), signal.SIGKILL)
        done = running.end()
    assert (done.code, done.out) == (1, b"")
    assert "did not start" in done.err


def test_command_survives_a_killed_connection(own: tuple[RunningCommand, str]) -> None:
    running, url = own
    with plain_client(url) as client:

        def waits() -> bool:  # there are two connections: the command's and this one
            return len(client.client_list()) == 2

        eventually(waits, 30, "the command did not connect")
        client.client_kill_filter(_type="normal", skipme=True)
        eventually(waits, 30, "the command has not reconnected")
    assert running.end(signal.SIGINT).code == 130


def test_private_server_leaves_nothing_behind(home: Path) -> None:
    with RunningCommand(None, "server", "--private") as running:
        url = running.line()
        assert url.startswith("unix://")
        succeed(url, "publish", "orders", "hello")
        folder = Path(url.removeprefix("unix://")).parent
        assert folder.is_dir()
        assert running.end(signal.SIGINT).code == 130
    assert not folder.exists()
    assert not home.exists()


def test_tcp_url_contains_the_password_and_the_command_warns_about_it(tmp_path: Path) -> None:
    with RunningCommand(None, "server", "--tcp", "--dir", str(tmp_path / "data")) as running:
        url = running.line()
        assert url.startswith("redis://:")
        succeed(url, "publish", "orders", "hello")
        nobody = "redis://127.0.0.1:" + url.rpartition(":")[2]
        refused = meteor(nobody, "streams", "ls")
        assert refused.code == 1
        done = running.end(signal.SIGINT)
    assert "the URL contains the password" in done.err


def test_tcp_option_is_refused_for_a_server_that_runs_without_tcp(
    own: tuple[RunningCommand, str],
) -> None:
    done = meteor(None, "server", "--tcp")
    assert (done.code, done.out) == (1, b"")
    assert "is already running without TCP" in done.err
    assert own[0].process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--private", "--dir", "somewhere"], "Omit --dir or --private"),
        (["--url", "redis://localhost"], "Pass --dir"),
        (["--private", "info"], "only for running a server"),
    ],
)
def test_contradictory_options_are_refused(arguments: list[str], sentence: str) -> None:
    done: CommandResult = meteor(None, "server", *arguments)
    assert (done.code, done.out) == (2, b"")
    assert sentence in done.err


def test_info_describes_a_server(private_server: ServerFactory) -> None:
    limits = ("--maxmemory", "512mb", "--maxmemory-policy", "allkeys-lru")
    server = private_server("--appendonly", "yes", *limits)
    for name in ("orders", "trades"):
        succeed(server.url, "publish", name, "hello")
    facts = dict(
        re.split(r" {2,}", line, maxsplit=1) for line in succeed(server.url, "server", "info").lines
    )
    info = server.info("all")
    assert facts["server"] == server.url
    assert facts["version"] == f"Valkey {info['valkey_version']}"
    assert facts["memory"].endswith(" of 536.9 MB")
    assert (facts["role"], facts["maxmemory-policy"]) == ("primary", "allkeys-lru")
    assert (facts["append-only file"], facts["streams"][:3]) == ("yes", "2, ")
    assert "slots" not in facts
    (found,) = succeed(server.url, "server", "info", "--json").objects
    assert (found["memory_max"], found["append_only"], found["streams"]) == (2**29, True, 2)
    assert (found["slots"], found["clients"]) == ([], 1)


def test_info_fails_if_the_server_is_unreachable() -> None:
    done = meteor("redis://127.0.0.1:1", "server", "info")
    assert (done.code, done.out) == (1, b"")
    assert "cannot be reached" in done.err


def pid_of(url: str) -> int:
    with plain_client(url) as client:
        return int(client.info("server")["process_id"])


def replacement_of(url: str, before: int) -> int | None:
    try:
        found = pid_of(url)
    except redis.ConnectionError:
        return None
    return found if found != before else None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
