"""``meteor server``: a server of one's own, while the command runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meteor_py.server import open_embedded
from tests.support.commands import Done, Running, meteor, succeed
from tests.support.servers import plain_client
from tests.support.waiting import eventually


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server of a user is kept who has none yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "meteor"


@pytest.fixture
def own(home: Path) -> Iterator[tuple[Running, str]]:
    """The user's own server, and its URL."""
    with Running(None, "server") as running:
        yield running, running.line()


def test_commands_without_a_url_meet_on_it(own: tuple[Running, str]) -> None:
    with plain_client(own[1]) as client:
        before = client.info("server")["run_id"]
    succeed(None, "publish", "orders", "hello")
    assert succeed(None, "tail", "orders", "-e", "--raw").text == "hello\n"
    assert succeed(own[1], "streams", "ls", "--json").objects[0]["name"] == "orders"
    with plain_client(own[1]) as client:
        assert client.info("server")["run_id"] == before, "it stays up between commands"


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_its_server(
    how: signal.Signals, code: int, own: tuple[Running, str]
) -> None:
    running, url = own
    pid = pid_of(url)
    done = running.end(how)
    assert (done.code, done.out) == (code, b""), done
    assert "Traceback" not in done.err
    assert not is_alive(pid)


def test_what_was_published_is_there_the_next_time(home: Path) -> None:
    with Running(None, "server") as running:
        running.line()
        succeed(None, "publish", "orders", "hello")
        running.end(signal.SIGINT)
    assert succeed(None, "tail", "orders", "-e", "--raw").text == "hello\n"


def test_what_it_is_is_said_beside_the_url(own: tuple[Running, str], home: Path) -> None:
    running, url = own
    pid = pid_of(url)
    done = running.end(signal.SIGINT)
    first, second, third = done.err.splitlines()[:3]
    assert first.startswith("meteor: Valkey ")
    assert f", process {pid}, kept in {home}, at most " in first
    assert "commands without a URL use it" in second
    assert third.strip() == f"export METEOR_URL={url}"


def test_it_goes_on_for_others_who_use_it(own: tuple[Running, str], home: Path) -> None:
    with open_embedded(home) as other:
        done = own[0].end(signal.SIGINT)
        assert done.code == 130
        assert "others use the server still" in done.err
        assert is_alive(other.pid)
    assert not is_alive(other.pid)


@pytest.mark.parametrize("options", [[], ["--private"]])
def test_when_the_server_dies_it_says_so_and_fails(options: list[str], home: Path) -> None:
    with Running(None, "server", *options) as running:
        url = running.line()
        os.kill(pid_of(url), signal.SIGKILL)
        done = running.end()
    assert (done.code, done.out) == (1, b"")
    assert "the server has ended, and not at our wish" in done.err.splitlines()[-1]


def test_it_outlives_a_cut_connection(own: tuple[Running, str]) -> None:
    running, url = own
    with plain_client(url) as client:

        def waits() -> bool:  # its connection, and this one
            return len(client.client_list()) == 2

        eventually(waits, 30, "it is not connected")
        client.client_kill_filter(_type="normal", skipme=True)
        eventually(waits, 30, "it is not connected again")
    assert running.end(signal.SIGINT).code == 130


def test_a_private_one_is_empty_and_leaves_nothing(home: Path) -> None:
    with Running(None, "server", "--private") as running:
        url = running.line()
        assert url.startswith("unix://")
        succeed(url, "publish", "orders", "hello")
        folder = Path(url.removeprefix("unix://")).parent
        assert folder.is_dir()
        assert running.end(signal.SIGINT).code == 130
    assert not folder.exists()
    assert not home.exists()


def test_with_tcp_the_url_has_the_password_and_that_is_said(tmp_path: Path) -> None:
    with Running(None, "server", "--tcp", "--dir", str(tmp_path / "data")) as running:
        url = running.line()
        assert url.startswith("redis://:")
        succeed(url, "publish", "orders", "hello")
        nobody = "redis://127.0.0.1:" + url.rpartition(":")[2]
        refused = meteor(nobody, "streams", "ls")
        assert refused.code == 1
        done = running.end(signal.SIGINT)
    assert "the URL has the password in it" in done.err


def test_tcp_cannot_be_had_from_a_server_that_runs_without(own: tuple[Running, str]) -> None:
    done = meteor(None, "server", "--tcp")
    assert (done.code, done.out) == (1, b"")
    assert "runs already, without TCP" in done.err
    assert own[0].process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--private", "--dir", "somewhere"], "leave out --dir or --private"),
        (["--url", "redis://localhost"], "say where with --dir"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], sentence: str) -> None:
    done: Done = meteor(None, "server", *arguments)
    assert (done.code, done.out) == (2, b"")
    assert sentence in done.err


def pid_of(url: str) -> int:
    with plain_client(url) as client:
        return int(client.info("server")["process_id"])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
