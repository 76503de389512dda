"""`meteor.close_on_signal()`: a service that gets SIGTERM finishes its work before it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.conftest import ServerFactory
from tests.support.preloaded_process import PreloadedProcess
from tests.support.readers import fill
from tests.support.servers import Server, plain_client
from tests.support.waiting import eventually

WAIT_S = 30.0

PRELUDE = """
import os, signal, sys, threading, time
import meteor_py as meteor
url = sys.argv[1]

def ready():
    os.write(1, b"ready\\n")
"""

#: A group member that waits in poll(), as members usually do. Its lease lasts for a minute unless
#: the member releases it.
MEMBER = """
with meteor.connect(url) as m:
    with m.stream("s").subscriber(group="g", lease_ttl=60) as sub:
        sub.confirm(sub.poll(10)[-1])
        ready()
        while True:
            sub.poll(10)
"""

#: A publisher whose records have not been sent yet, because it lingers for a minute.
PUBLISHER = """
m = meteor.connect(url)
pub = m.stream("s").publisher(linger=60)
for n in range(10):
    pub.publish(b"%d" % n)
ready()
time.sleep(60)
"""


class Start(Protocol):
    def __call__(self, script: str, url: str) -> PreloadedProcess: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a program, and wait until it prints "ready"."""
    with ExitStack() as stack:

        def begin(script: str, url: str) -> PreloadedProcess:
            path = tmp_path / "program.py"
            path.write_text(PRELUDE + script)
            process = stack.enter_context(
                PreloadedProcess(
                    ["-W", "ignore", path, url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", process.communicate(timeout=WAIT_S)
            return process

        yield begin


def end(process: PreloadedProcess, *signals: signal.Signals) -> tuple[int | None, bytes, bytes]:
    for number in signals:
        process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def values(url: str) -> list[bytes]:
    with meteor.connect(url) as m:
        return [value for batch in m.stream("s").read() for value in batch.values()]


@contextmanager
def group(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as m:
        stream = m.stream("s")
        fill(stream, 5)
        yield stream


@contextmanager
def paused(server: Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


def lease(url: str) -> Any:
    with plain_client(url) as client:
        return client.get(keys.lease("s", "g"))


def test_signal_releases_the_lease_and_sends_the_last_confirm(url: str, start: Start) -> None:
    with group(url) as stream:
        process = start("meteor.close_on_signal()" + MEMBER, url)
        assert lease(url)
        code, out, err = end(process, signal.SIGTERM)
        assert (code, out, err) == (-signal.SIGTERM, b"", b"")
        assert lease(url) is None
        assert stream.group("g").confirmed == 5


def test_lease_is_not_released_without_close_on_signal(url: str, start: Start) -> None:
    with group(url):
        assert end(start(MEMBER, url), signal.SIGTERM)[0] == -signal.SIGTERM
        assert lease(url)


def test_lease_is_released_whenever_the_signal_arrives(
    url: str, start: Start, rng: random.Random
) -> None:
    script = """
meteor.close_on_signal()
with meteor.connect(url) as m, m.stream("s").subscriber(group="g", lease_ttl=60) as sub:
    sub.poll(10)
    ready()
    for record in sub:
        sub.confirm(record)
"""
    with meteor.connect(url) as m:
        fill(m.stream("s", capacity=1_000_000), 200_000)
    for _ in range(12):
        process = start(script, url)
        threading.Event().wait(rng.uniform(0, 0.05))
        code, _, err = end(process, signal.SIGTERM)
        assert (code, err) == (-signal.SIGTERM, b"")
        assert lease(url) is None


def test_on_a_signal_publishers_send_their_records_and_printed_lines_appear(
    url: str, start: Start
) -> None:
    script = "meteor.close_on_signal()\nprint('a line in the buffer')" + PUBLISHER
    code, out, err = end(start(script, url), signal.SIGTERM)
    assert (code, out, err) == (-signal.SIGTERM, b"a line in the buffer\n", b"")
    assert values(url) == [b"%d" % n for n in range(10)]


def test_unresponsive_server_delays_the_exit_by_at_most_the_timeout(
    private_server: ServerFactory, start: Start
) -> None:
    server = private_server()
    with group(server.url):
        for script in (MEMBER, PUBLISHER):
            process = start("meteor.close_on_signal(timeout=1)" + script, server.url)
            with paused(server):
                began = time.monotonic()
                code, _, _ = end(process, signal.SIGTERM)
                took_s = time.monotonic() - began
            assert code in (-signal.SIGTERM, 128 + signal.SIGTERM)
            assert took_s < 5


def test_second_signal_ends_the_process_at_once(
    private_server: ServerFactory, start: Start
) -> None:
    server = private_server()
    process = start("meteor.close_on_signal(timeout=300)" + PUBLISHER, server.url)
    with paused(server):
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        began = time.monotonic()
        assert end(process, signal.SIGTERM)[0] == -signal.SIGTERM
        assert time.monotonic() - began < 3


def test_signals_in_quick_succession_count_as_one(url: str, start: Start) -> None:
    # A service manager and a parent process may both send the signal.
    process = start("meteor.close_on_signal()" + PUBLISHER, url)
    for _ in range(5):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    assert end(process)[0] == -signal.SIGTERM
    assert len(values(url)) == 10


def test_earlier_handler_that_exits_runs_finally_blocks_and_exit_functions(
    url: str, start: Start
) -> None:
    script = """
import atexit
atexit.register(os.write, 1, b"atexit\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
meteor.close_on_signal()
m = meteor.connect(url)
pub = m.stream("s").publisher(linger=60)
pub.publish(b"x")
try:
    ready()
    time.sleep(60)
finally:
    os.write(1, b"finally %d\\n" % pub.closed)
"""
    assert end(start(script, url), signal.SIGTERM) == (3, b"finally 1\natexit\n", b"")
    assert values(url) == [b"x"]


def test_earlier_handler_that_returns_is_called_once(url: str, start: Start) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda number, _: os.write(1, b"called %d\\n" % number))
meteor.close_on_signal()
meteor.close_on_signal(timeout=5)  # must not chain to the handler of the first call
"""
    code, out, _ = end(start(script + PUBLISHER, url), signal.SIGTERM)
    assert (code, out) == (-signal.SIGTERM, b"called 15\n")
    assert len(values(url)) == 10


def test_ctrl_c_still_raises_after_everything_is_closed(url: str, start: Start) -> None:
    script = "meteor.close_on_signal(signal.SIGINT, signal.SIGTERM)" + PUBLISHER
    code, _, err = end(start(script, url), signal.SIGINT)
    assert code in (-signal.SIGINT, 128 + signal.SIGINT, 1)
    assert b"KeyboardInterrupt" in err
    assert len(values(url)) == 10


def test_program_threads_do_not_keep_the_process_running(url: str, start: Start) -> None:
    script = """
meteor.close_on_signal()
m = meteor.connect(url)
sub = m.stream("s").subscriber(group="g", lease_ttl=60)

def work():
    sub.poll(10)
    ready()
    while True:
        try:
            sub.poll(10)
        except meteor.MeteorError:
            time.sleep(60)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    with group(url):
        assert end(start(script, url), signal.SIGTERM)[0] == -signal.SIGTERM
        assert lease(url) is None


def test_receiver_finishes_its_record_before_the_process_ends(url: str, start: Start) -> None:
    script = """
meteor.close_on_signal()

def handle(record):
    ready()
    time.sleep(0.5)
    sub.confirm(record)
    os.write(1, b"finished %d\\n" % record.offset)

m = meteor.connect(url)
sub = m.stream("s").subscriber(group="g", lease_ttl=60)
sub.attach_receiver(handle)
time.sleep(60)
"""
    with group(url) as stream:
        code, out, _ = end(start(script, url), signal.SIGTERM)
        assert (code, out) == (-signal.SIGTERM, b"finished 0\n")
        assert lease(url) is None
        assert stream.group("g").confirmed == 1


def test_forked_child_closes_only_its_own_objects(url: str, start: Start) -> None:
    script = """
meteor.close_on_signal()
m = meteor.connect(url)
pub = m.stream("s").publisher(linger=60)
pub.publish(b"parent")
child = os.fork()
if child == 0:
    own = m.stream("s").publisher(linger=60)
    own.publish(b"child")
    os.kill(os.getpid(), signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert not pub.closed
ready()
time.sleep(60)
"""
    process = start(script, url)
    assert values(url) == [b"child"]
    assert end(process, signal.SIGTERM)[0] == -signal.SIGTERM
    assert values(url) == [b"child", b"parent"]


def test_process_1_in_a_container_exits_with_status_143(url: str, tmp_path: Path) -> None:
    namespace = ["unshare", "--pid", "--fork"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("PID namespaces are not permitted here.")
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + "assert os.getpid() == 1\nmeteor.close_on_signal()" + PUBLISHER)
    command = [*namespace, sys.executable, str(path), url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(children), signal.SIGTERM)
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert len(values(url)) == 10


def test_close_on_signal_is_refused_in_other_threads() -> None:
    caught: list[BaseException] = []

    def call() -> None:
        try:
            meteor.close_on_signal()
        except BaseException as error:
            caught.append(error)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    (error,) = caught
    assert isinstance(error, RuntimeError)
    assert "must be called in the main thread" in str(error)
    assert signal.getsignal(signal.SIGTERM) is before


def test_wrong_arguments_are_refused() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="Signal 9 cannot be handled"):
        meteor.close_on_signal(signal.SIGKILL)
    with pytest.raises(ValueError, match="timeout must be more than 0 and less than 1e9 seconds"):
        meteor.close_on_signal(timeout=0)
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        meteor.close_on_signal(timeout="8")  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGTERM) is before


def test_handler_is_installed_for_every_named_signal() -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        meteor.close_on_signal(*numbers)
        after = [signal.getsignal(number) for number in numbers]
        eventually(lambda: all(callable(handler) for handler in after))
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
