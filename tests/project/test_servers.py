"""Tests can kill, pause, restart and replicate their servers, on Valkey and Redis."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import redis

from tests.conftest import ServerFactory
from tests.support.servers import Replica, Server, binaries, plain_client
from tests.support.waiting import eventually

both_kinds = pytest.mark.parametrize("kind", ["valkey", "redis"])
Kind = Literal["valkey", "redis"]


@both_kinds
def test_killed_server_restores_its_data_from_the_append_only_file(
    private_server: ServerFactory, kind: Kind
) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always", kind=kind)
    server.client().set("key", "value")
    port, pid = server.port, server.pid
    server.kill()
    with pytest.raises(redis.ConnectionError):
        server.client().ping()
    server.restart()
    assert server.client().get("key") == b"value"
    assert server.port == port
    assert server.pid != pid


@both_kinds
def test_restart_without_persistence_loses_everything(
    private_server: ServerFactory, kind: Kind
) -> None:
    server = private_server(kind=kind)
    server.client().set("key", "value")
    server.restart()
    assert server.client().get("key") is None


def test_paused_server_does_not_reply_until_resumed(private_server: ServerFactory) -> None:
    server = private_server()
    with server.client(socket_timeout=0.2) as client:
        client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
        assert client.ping()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_paused_server_can_be_stopped(private_server: ServerFactory, how: str) -> None:
    server = private_server()
    server.pause()
    getattr(server, how)()
    assert not server.running


@both_kinds
def test_server_can_listen_on_a_unix_socket(private_server: ServerFactory, kind: Kind) -> None:
    server = private_server(kind=kind, unix=True)
    assert server.url.startswith("unix://")
    assert server.client().ping()


def test_plain_client_sends_no_commands_of_its_own(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    client = server.client()
    client.config_resetstat()
    with server.client() as other:
        other.set("key", 1)
    stats = set(client.info("commandstats"))
    assert stats <= {"cmdstat_set", "cmdstat_config|resetstat"}


def test_server_that_cannot_start_says_why_and_leaves_nothing_behind() -> None:
    server = Server(binaries()["valkey"], "--no-such-option", "1")
    with pytest.raises(RuntimeError, match="no-such-option"), server:
        pass
    assert not server.directory.exists()


@both_kinds
def test_replica_follows_and_accepts_writes_once_promoted(
    private_server: ServerFactory, kind: Kind
) -> None:
    master = private_server("--appendonly", "yes", kind=kind)
    with Replica(master) as replica:
        master.client().set("key", "value")
        replica.wait_in_sync()
        assert replica.client().get("key") == b"value"
        with pytest.raises(redis.ReadOnlyError):
            replica.client().set("key", "other")
        master.kill()
        replica.promote()
        replica.client().set("key", "other")
        replica.restart()
        assert replica.client().get("key") == b"other"
        assert replica.info("replication")["role"] == "master"


def test_killed_test_process_leaves_neither_server_nor_directory() -> None:
    program = (
        "from tests.support.servers import Server, binaries\n"
        "server = Server(binaries()['valkey']).start()\n"
        "print(server.pid, server.directory, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid, directory = process.stdout.readline().split()
        os.kill(int(pid), 0)
        process.send_signal(signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(int(pid)))
    eventually(lambda: not Path(directory).exists())


def _is_zombie(pid: int) -> bool:
    # Without an init process, as in a container, dead orphans stay listed.
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_bundled_valkey_is_always_available() -> None:
    assert binaries()["valkey"].is_file()


def test_close_stops_the_server_and_removes_its_directory() -> None:
    with Server(binaries()["valkey"]) as server:
        assert server.directory.is_dir()
    assert not server.directory.exists()
    with plain_client(server.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()
