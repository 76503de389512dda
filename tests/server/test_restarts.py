"""If an embedded server is killed, its clients restart it and continue."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.errors import ServerStartFailed
from meteor_py.server import EmbeddedServer, datadir, find_server, open_embedded, supervisor
from meteor_py.server import restarts as limit
from tests.server.test_embedded_server import (
    ROOT,
    WAIT_S,
    User,
    ask,
    kill,
    processes_of,
    run,
    supervisor_of,
    users,
    wait_for_end,
    wait_until_gone,
)
from tests.support.waiting import eventually

__all__ = ["users"]  # a fixture, which pytest finds by its name in this module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="The tests read /proc and kill supervisors."
)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """A directory for a persistent server. The test must leave no process running in it."""
    yield tmp_path / "kept"
    wait_until_gone(tmp_path / "kept")


def server_of(m: meteor.Client) -> int:
    return int(m.redis.info("server")["process_id"])


def starts(directory: Path) -> int:
    return (directory / supervisor.LOG).read_text().count(datadir.LOG_START)


# -- Clients of a persistent server


@pytest.mark.parametrize("victim", ["server", "supervisor", "both"])
def test_publishers_and_subscribers_continue_after_the_server_was_killed(
    kept: Path, victim: str
) -> None:
    with meteor.connect(f"embedded://{kept}") as m:
        stream = m.stream("s", create=True)
        with (
            stream.publisher() as pub,
            stream.subscriber(initial_offset="earliest") as sub,
            stream.subscriber(group="g", initial_offset="earliest") as member,
        ):
            pub.publish_many([b"%d" % n for n in range(1000)]).result(WAIT_S)
            assert len(sub.poll(max_records=1000)) == len(member.poll(max_records=1000)) == 1000
            member.confirm()
            server = server_of(m)
            victims = {"server": [server], "supervisor": [supervisor_of(server)]}
            for pid in victims.get(victim, [supervisor_of(server), server]):
                os.kill(pid, signal.SIGKILL)
            wait_for_end(server)  # without its supervisor, the server still replies for a moment
            began = time.monotonic()
            assert pub.publish(b"after").result(WAIT_S) == 1000
            for reader in (sub, member):
                assert reader.poll(timeout=WAIT_S).values() == [b"after"]
            paused_s = time.monotonic() - began
            member.confirm()
        assert paused_s < 5.0  # about 0.1 s on an idle machine
        assert server_of(m) != server
        assert [v for batch in stream.read() for v in batch.values()] == [
            *(b"%d" % n for n in range(1000)),
            b"after",
        ]


def test_commands_wait_for_the_restart(kept: Path) -> None:
    with meteor.connect(f"embedded://{kept}") as m:
        stream = m.stream("s", create=True)
        m.redis.set("key", "value")
        for _ in range(3):
            os.kill(server_of(m), signal.SIGKILL)
            assert m.streams() == ["s"]
            assert stream.describe().next == 0
            assert m.redis.get("key") == b"value"


def test_every_client_process_continues_and_one_restarts_the_server(
    kept: Path, users: Callable[[], User]
) -> None:
    processes = [users() for _ in range(6)]
    server = {user.open(kept) for user in processes}.pop()
    for _ in range(2):
        os.kill(server, signal.SIGKILL)
        for user in processes:
            user.say("reach")
        found = {int(user.reply()) for user in processes}
        assert len(found) == 1
        assert server not in found
        server = found.pop()
    assert starts(kept) == 3


def test_clients_in_many_threads_share_one_restart(kept: Path) -> None:
    with meteor.connect(f"embedded://{kept}") as m:
        stream = m.stream("s", create=True)
        publishers = [stream.publisher() for _ in range(8)]
        for pub in publishers:
            pub.publish(b"before").result(WAIT_S)
        os.kill(server_of(m), signal.SIGKILL)
        acks = [pub.publish(b"after") for pub in publishers]
        assert sorted(ack.result(WAIT_S) for ack in acks) == list(range(8, 16))
        assert starts(kept) == 2


# -- Clients of a private server


@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_clients_of_a_private_server_learn_that_their_records_are_gone(victim: str) -> None:
    with meteor.connect("embedded://") as m:
        stream = m.stream("s", create=True)
        pub = stream.publisher()
        sub = stream.subscriber(initial_offset="earliest")
        member = stream.subscriber(group="g", initial_offset="earliest")
        pub.publish_many([b"%d" % n for n in range(100)]).result(WAIT_S)
        assert len(sub.poll()) == len(member.poll()) == 100
        server = server_of(m)
        os.kill(server if victim == "server" else supervisor_of(server), signal.SIGKILL)
        wait_for_end(server)
        with pytest.raises(meteor.LogTruncated, match="restarted without its data") as caught:
            pub.publish(b"after").result(WAIT_S)
        assert (caught.value.first, caught.value.last) == (0, 99)
        for reader in (sub, member):
            with pytest.raises(meteor.LogTruncated, match="restarted without its data"):
                eventually(lambda reader=reader: reader.poll(0.1), WAIT_S)  # type: ignore[misc]
        with m.stream("s", create=True).publisher() as again:
            assert again.publish(b"new").result(WAIT_S) == 0
        for opened in (pub, sub, member):
            with suppress(meteor.MeteorError):  # the stream is gone
                opened.close()


def test_idle_publisher_of_a_private_server_learns_of_the_loss_on_close() -> None:
    with meteor.connect("embedded://") as m:
        pub = m.stream("s", create=True).publisher()
        pub.publish(b"before").result(WAIT_S)
        kill(server_of(m))
        pub._sender._acknowledged_at -= 10  # as if the publisher had been idle
        with pytest.raises(meteor.LogTruncated, match="restarted without its data"):
            pub.close()


# -- Limits


def fail_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METEOR_SERVER", "/bin/false")


def test_server_that_cannot_start_is_rarely_retried_and_the_reason_is_reported(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meteor.connect(f"embedded://{kept}", timeout=0.5) as m:
        stream = m.stream("s", create=True)
        publishers = [stream.publisher() for _ in range(4)]
        for pub in publishers:
            pub.publish(b"before").result(WAIT_S)
        before = starts(kept)
        with monkeypatch.context() as patch:
            fail_starts(patch)
            kill(server_of(m))
            acks = [pub.publish(b"after") for pub in publishers]
            reasons = []
            end = time.monotonic() + 2
            while time.monotonic() < end:
                with pytest.raises(meteor.ConnectionFailed) as caught:
                    m.streams()
                reasons.append(str(caught.value))
            assert any("/bin/false ended with status 1" in reason for reason in reasons)
            assert 2 <= starts(kept) - before <= 6
        # Once the cause is gone, the publishers continue.
        assert sorted(ack.result(WAIT_S) for ack in acks) == [4, 5, 6, 7]


def test_publisher_waits_for_a_server_program_that_is_missing(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meteor.connect(f"embedded://{kept}") as m, m.stream("s", create=True).publisher() as pub:
        pub.publish(b"before").result(WAIT_S)
        with monkeypatch.context() as patch:
            patch.setenv("METEOR_SERVER", "/nowhere/valkey-server")
            kill(server_of(m))
            ack = pub.publish(b"after")
            with pytest.raises(meteor.ConnectionFailed, match="METEOR_SERVER is '/nowhere/"):
                m.streams()
        assert ack.result(WAIT_S) == 1


def test_pause_before_a_restart_grows_to_a_limit_and_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    assert limit.wait_s(tmp_path) <= 0
    waits = []
    for _ in range(8):
        limit.record(tmp_path)
        waits.append(round(limit.wait_s(tmp_path), 3))
        now += waits[-1]
        assert limit.wait_s(tmp_path) <= 0.001
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    now -= 3600  # the clock was set back
    assert limit.wait_s(tmp_path) <= 0
    now += 3600 + limit.WINDOW_S
    assert limit.wait_s(tmp_path) <= 0
    limit.record(tmp_path)
    assert len((tmp_path / limit.RESTARTS).read_text().splitlines()) == 1
    (tmp_path / limit.RESTARTS).write_text("12\n3")  # a full disk truncated the file
    assert limit.wait_s(tmp_path) <= 0


def test_server_that_cannot_write_its_files_is_restarted_later(kept: Path) -> None:
    with meteor.connect(f"embedded://{kept}", timeout=0.5) as m:
        stream = m.stream("s", create=True)
        with stream.publisher() as pub:
            pub.publish(b"before").result(WAIT_S)
            obstacle = kept / f"{limit.RESTARTS}.new"  # as if the disk were full
            obstacle.mkdir()
            kill(server_of(m))
            ack = pub.publish(b"after")
            with pytest.raises(meteor.ConnectionFailed, match=r"Cannot restart .*directory"):
                m.streams()
            obstacle.rmdir()
            assert ack.result(WAIT_S) == 1


def test_supervisor_cleans_up_on_a_full_disk(tmp_path: Path) -> None:
    with open_embedded(tmp_path / "kept") as server:
        config = server.directory / supervisor.CONFIG
        text = config.read_text()
        os.kill(supervisor_of(server.pid), signal.SIGTERM)
        wait_until_gone(server.directory)
        config.write_text(text)
        with (
            open(server.directory / "watcher", "w") as one,
            open(server.directory / "server", "w") as two,
            open("/dev/full", "w") as full,
        ):
            subprocess.run(
                [
                    *(sys.executable, "-I", "-S", supervisor.__file__, "/bin/false"),
                    *(supervisor.SOCKET, "keep", str(one.fileno()), str(two.fileno())),
                ],
                cwd=server.directory,
                stdout=full,
                stderr=full,
                pass_fds=(one.fileno(), two.fileno()),
                check=True,
            )
        eventually(lambda: not config.exists(), WAIT_S, "the supervisor did not clean up")


def test_publisher_closes_at_once_while_the_server_cannot_be_restarted(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = kept.parent / "server"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    with meteor.connect(f"embedded://{kept}") as m:
        pub = m.stream("s", create=True).publisher()
        pub.publish(b"before").result(WAIT_S)
        monkeypatch.setenv("METEOR_SERVER", str(program))
        kill(server_of(m))
        pub.publish(b"after")
        eventually(lambda: pub._sender._connection._opening is not None, WAIT_S)
        began = time.monotonic()
        with pytest.raises(meteor.OutcomeUnknown):
            pub.close(timeout=0)
        assert time.monotonic() - began < 3


# -- Addresses


def listener(port: int) -> socket.socket:
    """Listen on a killed server's port, as soon as the server's threads are gone."""

    def listen() -> socket.socket | None:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            return None

    found = eventually(listen, WAIT_S, f"port {port} is in use")
    assert found
    return found


def test_tcp_url_survives_a_restart(kept: Path) -> None:
    with open_embedded(kept, tcp=True) as server, open_embedded(kept) as other:
        url, socket_url = server.url, other.url
        kill(server.pid)
        other.reach(WAIT_S)  # this user did not request TCP, but a restart keeps the port
        server.reach(WAIT_S)
        assert (server.url, other.url) == (url, socket_url)
        assert ask(server, "PING")
        assert ask(other, "PING")


def test_restart_chooses_another_port_if_its_own_is_taken(kept: Path) -> None:
    with open_embedded(kept, tcp=True) as server:
        url = server.url
        port = int(re.findall(r":(\d+)/", url)[0])
        kill(server.pid)
        with listener(port):
            server.reach(WAIT_S)
        assert server.url != url
        assert ask(server, "PING")


def test_socket_of_a_server_with_a_long_path_survives_a_restart(tmp_path: Path) -> None:
    with open_embedded(tmp_path / ("d" * 120)) as server:
        before = server.socket_path
        kill(server.pid)
        server.reach(WAIT_S)
        assert server.socket_path == before
    assert not Path(before).parent.exists()


# -- Which clients may restart a server


def test_closed_server_is_not_restarted(kept: Path) -> None:
    with open_embedded(kept) as server:
        server.close()
        with pytest.raises(ServerStartFailed, match="was closed"):
            server.reach(WAIT_S)
    assert not processes_of(kept)


def test_server_whose_directory_was_replaced_is_not_restarted(kept: Path) -> None:
    with open_embedded(kept) as server:
        kept.rename(kept.with_name("moved"))
        kept.mkdir(mode=0o700)
        kill(server.pid)
        wait_until_gone(kept.with_name("moved"))
        with pytest.raises(ServerStartFailed, match="its directory was deleted"):
            server.reach(WAIT_S)


@pytest.mark.parametrize("private", [False, True])
def test_forked_child_restarts_the_server_only_while_its_parent_uses_it(
    private: bool, kept: Path
) -> None:
    script = f"""
server = open_embedded({None if private else str(kept)!r})
ready, closed = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.kill(server.pid, signal.SIGKILL)
    server.reach(10)
    assert ask(server.socket_path, "PING") == b"+PONG\\r\\n"
    os.write(ready[1], b"!")
    os.read(closed[0], 1)
    try:
        server.reach(10)
    except Exception as error:
        os._exit(7 if "has ended" in str(error) or "No such file" in str(error) else 8)
    os._exit(9)
os.read(ready[0], 1)
server.reach(10)
assert ask(server.socket_path, "PING") == b"+PONG\\r\\n"
server.close()
os.write(closed[1], b"!")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    run(script)


def test_exiting_program_does_not_restart_the_server(kept: Path) -> None:
    script = f"""
import atexit, meteor_py as meteor, os, signal
m = meteor.connect("embedded://{kept}")
pub = m.stream("s", create=True).publisher()
pub.publish(b"x").result()
sub = m.stream("s", create=True).subscriber(group="g")
sub.poll(0)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=WAIT_S, check=True)
    assert not processes_of(kept)
    assert starts(kept) == 1


def test_restart_looks_up_the_server_program_again(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path changes if the package is upgraded while a program runs."""
    with open_embedded(kept) as server:
        link = kept.parent / "another-server"
        link.symlink_to(find_server())
        monkeypatch.setenv("METEOR_SERVER", str(link))
        kill(server.pid)
        server.reach(WAIT_S)
        assert Path(f"/proc/{server.pid}/cmdline").read_bytes().startswith(os.fsencode(link))


def test_restart_is_logged(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    def again(server: EmbeddedServer) -> None:
        kill(server.pid)
        server.reach(WAIT_S)

    with open_embedded(kept) as server:
        again(server)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has exited. Restarting it" in caplog.text
