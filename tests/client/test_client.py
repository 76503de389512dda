"""A client connects to every kind of server, warns about unsafe ones, and reveals no secret.

Also covers clients that are closed, forked, without a server, with a server that hangs, or shared
by threads.
"""

from __future__ import annotations

import doctest
import gc
import importlib
import os
import pkgutil
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.redis.address import mask
from meteor_py.redis.connection import Connection
from meteor_py.redis.server_warnings import dangers
from meteor_py.server import default_directory
from tests.conftest import ServerFactory
from tests.support.forking import in_child
from tests.support.readers import drain, fill
from tests.support.servers import HOST, Replica, each_primary, free_port, plain_client

ROOT = Path(__file__).parents[2]
SECRET = "open-sesame"


def use(client: meteor.Client, name: str = "s") -> None:
    """Publish and read, so that every kind of connection is used."""
    stream = client.stream(name, create=True)
    with stream.subscriber() as sub:
        end = fill(stream, 1, 300)
        assert drain(sub)[-1] == end - 1
    assert name in client.streams()


def run_python(program: str, **environment: str) -> subprocess.Popen[str]:
    """Start a Python process, with pipes for its standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "METEOR_URL"} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# Addresses


def test_the_address_comes_from_the_environment_if_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("METEOR_URL", "fake://from-environment")
    with meteor.connect() as m:
        assert str(m.address) == "fake://from-environment"
        use(m)


@pytest.mark.parametrize("directory", ["state", "st\u00e4te #1 %41?x=y"])
def test_without_an_address_an_embedded_server_runs_in_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: str
) -> None:
    monkeypatch.delenv("METEOR_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / directory))
    with meteor.connect() as m:
        assert m.address.scheme == "embedded"
        assert m.address.place == str(tmp_path / directory / "meteor") == str(default_directory())
        use(m)
        assert (tmp_path / directory / "meteor").is_dir()


def test_use_of_the_personal_server_is_logged_once_per_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("METEOR_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for _ in range(2):
        meteor.connect().close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "METEOR_URL is not set" in record.getMessage()
    assert str(tmp_path / "meteor") in record.getMessage()


def test_use_of_a_chosen_server_is_not_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("METEOR_URL", raising=False)
    meteor.connect(f"embedded://{tmp_path}").close()
    monkeypatch.setenv("METEOR_URL", "fake://from-environment")
    meteor.connect().close()
    assert caplog.records == []


def test_two_processes_without_an_address_share_a_server(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": ""}
    publish = """
import meteor_py as meteor
with meteor.connect() as m, m.stream("s").publisher() as pub:
    print(pub.publish(b"hello").result(), flush=True)
    input()
"""
    read = """
import meteor_py as meteor
with meteor.connect() as m, m.stream("s", create=True).subscriber(initial_offset="earliest") as sub:
    print(sub.poll(10).values())
"""
    with run_python(publish, **home) as publisher:
        assert publisher.stdout is not None
        assert publisher.stdout.readline() == "0\n"
        with run_python(read, **home) as reader:
            assert reader.communicate(timeout=30)[0] == "[b'hello']\n"
        publisher.communicate("\n", timeout=30)
        assert (publisher.returncode, reader.returncode) == (0, 0)
    assert (tmp_path / ".local/state/meteor").is_dir()


def test_a_unix_socket_works(private_server: ServerFactory) -> None:
    with meteor.connect(private_server(unix=True).url) as m:
        use(m)


@pytest.mark.single_server("a cluster has only database 0")
def test_a_database_can_be_chosen(url: str) -> None:
    with meteor.connect(url) as zero, meteor.connect(url[:-1] + "3") as three:
        use(three)
        assert zero.streams() == []
        assert three.streams() == ["s"]


def test_unnamed_fakes_are_separate_and_named_ones_are_shared() -> None:
    with ExitStack() as clients:
        one, two, shared, same, other = (
            clients.enter_context(meteor.connect(f"fake://{name}"))
            for name in ("", "", "test-shared", "test-shared", "test-other")
        )
        use(one)
        use(shared)
        assert same.streams() == ["s"]
        assert two.streams() == other.streams() == []


def test_client_offers_a_redis_client_for_the_same_server(any_url: str) -> None:
    with meteor.connect(any_url) as m:
        use(m)
        with m.redis as plain:
            members: Any = plain.smembers("meteor:streams")
            assert members == {b"s"}
            assert plain.exists("meteor:{s}:log") == 1


def test_a_closed_client_offers_no_redis_client(any_url: str) -> None:
    used, unused = meteor.connect(any_url), meteor.connect(any_url)
    assert used.redis.ping()
    for client in (used, unused):
        client.close()
        with pytest.raises(meteor.MeteorError, match="is closed"):
            _ = client.redis


def test_an_embedded_server_offers_a_redis_client() -> None:
    with meteor.connect("embedded://") as m, m.redis as plain:
        assert plain.ping() is True


# Server descriptions


def test_a_server_is_described_by_product_memory_clients_and_role(
    private_server: ServerFactory,
) -> None:
    for kind in ("valkey", "redis"):
        server = private_server("--maxmemory", "64mb", kind=kind)
        with meteor.connect(server.url) as m:
            found = m.describe()
            assert found.version == server.info("server")[f"{kind}_version"]
            assert (found.product, found.role, found.memory_max) == (kind, "primary", 64 << 20)
            assert 0 < (found.memory or 0) < 64 << 20
            assert found.clients is not None
            assert found.uptime is not None
            with Replica(server) as replica, meteor.connect(replica.url) as other:
                replica.wait_in_sync()
                assert other.describe().role == "replica"


def test_fake_server_and_server_without_memory_limit_can_be_described(url: str) -> None:
    with meteor.connect("fake://") as m:
        assert m.describe() == meteor.ServerDescription("fake", address="fake://")
    with meteor.connect(url) as m:
        assert m.describe().memory_max is None


# Dangerous servers


def warnings_of(url: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, meteor.connect(url) as m:
        warnings.simplefilter("always")
        use(m)
        m.streams()
    assert all(issubclass(each.category, meteor.DataSafetyWarning) for each in caught)
    return [str(each.message) for each in caught]


def test_a_server_that_evicts_and_persists_nothing_causes_warnings_with_remedies(
    private_server: ServerFactory,
) -> None:
    server = private_server("--maxmemory-policy", "allkeys-lru", "--appendonly", "no")
    evicts, forgets = warnings_of(server.url)
    assert f"The server at {server.url} evicts keys" in evicts
    assert "Set maxmemory-policy noeviction." in evicts
    assert f"The server at {server.url} loses its last records" in forgets
    assert "Set appendonly yes." in forgets


def test_a_warning_points_to_the_users_line_of_code(url: str) -> None:
    with meteor.connect(url) as m, pytest.warns(meteor.DataSafetyWarning) as caught:
        m.streams()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_safe_server_causes_no_warning(private_server: ServerFactory, kind: Any) -> None:
    assert warnings_of(private_server("--appendonly", "yes", kind=kind).url) == []


@pytest.mark.parametrize("url", ["embedded://", "fake://"])
def test_embedded_and_fake_servers_cause_no_warning(url: str) -> None:
    assert warnings_of(url) == []


@pytest.mark.parametrize(
    ("version", "old"),
    [("6.2.14", True), ("5.0", True), ("7.0.0", False), ("7.2.4", False), ("10.1", False)],
)
def test_an_old_server_causes_a_warning(version: str, old: bool) -> None:
    found = dangers({"redis_version": version, "aof_enabled": "1"})
    assert found == ([f"is version {version}; use Redis 7.0, Valkey 7.2 or newer."] if old else [])


def test_a_server_that_hides_its_settings_causes_no_warning() -> None:
    assert dangers({}) == []
    assert dangers({"redis_version": "unknown"}) == []


# Secrets


def whole_text(error: BaseException) -> str:
    """Return everything that a log might show about an error."""
    return "".join(traceback.format_exception(error)) + repr(error)


def test_no_repr_warning_or_error_shows_a_password(private_server: ServerFactory) -> None:
    server = private_server()
    server.client().config_set("requirepass", SECRET)
    port = server.port
    url = f"redis://:{SECRET}@{HOST}:{port}/0"
    texts = warnings_of(url)
    with meteor.connect(url, timeout=1) as m:
        stream = m.stream("s", create=True)
        with stream.publisher(delivery_timeout=0.3) as pub, stream.subscriber() as sub:
            with m.redis as plain:
                objects = [
                    m,
                    m.address,
                    m._connector.resolve(),
                    stream,
                    pub,
                    sub,
                    stream.describe(),
                    plain,
                ]
                texts += [f"{each} {each!r}" for each in objects]
            server.kill()
            attempts: list[Callable[[], Any]] = [
                m.streams, lambda: sub.poll(0.1), lambda: pub.publish(b"x").result(),
            ]  # fmt: skip
            for attempt in attempts:
                with pytest.raises(meteor.MeteorError) as caught:
                    attempt()
                assert f"redis://:***@{HOST}:{port}/0" in str(caught.value)
                texts.append(whole_text(caught.value))
    assert len(texts) > 10
    for text in texts:
        assert SECRET not in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://hush@host:1", "redis://***@host:1"),  # the colon before the password is missing
        ("redis://app:hu@sh@host:1/2", "redis://app:***@host:1/2"),
        ("redis://host:1?pass%77ord=hush&db=2", "redis://host:1?pass%77ord=***&db=2"),
        ("unix:///run/x.sock?password=hush", "unix:///run/x.sock?password=***"),
        ("abfs://box@acc/d?account_key=hush", "abfs://box@acc/d?account_key=***"),
        ("s3://id:hu/sh@bucket/d?region=eu", "s3://id:***@bucket/d?region=eu"),
        ("Cannot reach gs://b/d?sig=hush: token=hush", "Cannot reach gs://b/d?sig=*** token=***"),
    ],
)
def test_mask_shows_only_parts_known_to_be_harmless(url: str, shown: str) -> None:
    assert mask(url) == shown


def test_mask_truncates_very_long_text() -> None:
    assert len(mask("://a:" * 1_000_000)) < 5_000


@pytest.mark.parametrize("login", ["", ":wrong-guess@", "nobody:wrong-guess@"])
def test_a_wrong_password_is_reported_without_showing_it(
    private_server: ServerFactory, login: str
) -> None:
    server = private_server()
    server.client().config_set("requirepass", SECRET)
    with (
        meteor.connect(f"redis://{login}{HOST}:{server.port}") as m,
        pytest.raises(meteor.AccessDenied, match="Check the user, password and ACL") as caught,
    ):
        m.streams()
    assert "wrong-guess" not in whole_text(caught.value)


# Missing or failing servers


def test_connecting_sends_nothing_until_the_client_is_used() -> None:
    url = f"redis://{HOST}:{free_port()}/0"
    with meteor.connect(url) as m:
        assert repr(m) == f"<Client of {url}>"
        with pytest.raises(meteor.ConnectionFailed) as caught:
            m.streams()
    message = str(caught.value)
    assert f"The server at {url} cannot be reached" in message
    assert "refused" in message
    assert message.endswith("Is it running, and is the address correct?")
    assert caught.value.retriable


@pytest.mark.parametrize("url", ["unix:///nowhere/at.all", "redis://no.such.host.invalid"])
def test_a_server_that_cannot_be_found_is_reported_with_its_address(url: str) -> None:
    with meteor.connect(url) as m, pytest.raises(meteor.ConnectionFailed, match=url):
        m.streams()


def test_a_connection_that_died_while_idle_is_replaced_silently(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes")
    with meteor.connect(server.url) as m:
        stream = m.stream("s", create=True)
        fill(stream, 3)
        with stream.subscriber() as sub:
            for how in ("restart", "kill connections"):
                if how == "restart":
                    server.restart()
                else:
                    server.client().client_kill_filter(_type="normal", skipme=True)
                assert m.streams() == ["s"]
                assert not sub.poll(timeout=0)
                sub.seek(0)
                assert drain(sub) == [0, 1, 2]


def test_a_late_reply_is_never_mistaken_for_the_reply_to_the_next_command(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with meteor.connect(server.url, timeout=0.5) as m:
        for name in ("a", "b"):
            m.stream(name, create=True)
        server.pause()
        start = time.monotonic()
        with pytest.raises(meteor.ConnectionFailed):
            m.stream("a", create=False).describe()
        assert time.monotonic() - start < 5
        server.resume()
        assert m.streams() == ["a", "b"]
        assert m.stream("a", create=False).describe().name == "a"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_replica_can_be_read_from_but_not_written_to(
    private_server: ServerFactory, kind: Any
) -> None:
    master = private_server(kind=kind)
    with meteor.connect(master.url) as m:
        end = fill(m.stream("s", create=True), 1, 50)
    with Replica(master) as replica, meteor.connect(replica.url) as m:
        replica.wait_in_sync()
        stream = m.stream("s", create=False)
        with stream.subscriber(initial_offset="earliest") as sub:
            assert drain(sub) == list(range(end))
        assert stream.describe().next == end
        assert stream.offset_at(datetime.fromtimestamp(0, UTC)) == 0
        for attempt in (lambda: m.stream("new", create=True), lambda: stream.configure(capacity=5)):
            with pytest.raises(meteor.ConnectionFailed, match=r"(?i)replica"):
                attempt()
        with stream.publisher(delivery_timeout=0.3) as pub:
            ack = pub.publish(b"x")
            words = f"{replica.port}.*is a replica and accepts no writes"
            with pytest.raises(meteor.ConnectionFailed, match=words):
                ack.result()


# Closing and forking


def test_every_call_on_a_closed_client_raises(any_url: str) -> None:
    m = meteor.connect(any_url)
    use(m)
    stream = m.stream("s", create=True)
    was_closed = m.closed
    m.close()
    m.close()
    assert (was_closed, m.closed) == (False, True)
    attempts: list[Callable[[], Any]] = [
        m.streams, lambda: m.stream("s"), stream.describe, stream.subscriber, stream.publisher,
        lambda: list(stream.read()), stream.delete, m.load_scripts, lambda: m.redis,
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(meteor.MeteorError, match="is closed"):
            attempt()
    assert "(closed)" in repr(m)


def test_a_client_that_was_never_used_can_be_closed() -> None:
    m = meteor.connect("embedded://")
    m.close()
    with pytest.raises(meteor.MeteorError, match="closed"):
        m.streams()


@pytest.mark.parametrize("where", ["server", "embedded"])
def test_after_a_fork_parent_and_child_use_the_client_independently(url: str, where: str) -> None:
    with meteor.connect(url if where == "server" else "embedded://") as m:
        use(m, "before")
        assert in_child(lambda: use(m, "child")) == 0
        use(m, "parent")
        assert m.streams() == ["before", "child", "parent"]
        assert in_child(m.close) == 0  # closes none of the parent's connections
        use(m, "after")


def connections_received(plain: redis.Redis) -> int:
    stats: list[Any] = [server.info("stats") for server in each_primary(plain)]
    return sum(each["total_connections_received"] for each in stats)


def test_child_forked_in_the_middle_of_a_call_reuses_one_connection(url: str) -> None:
    with meteor.connect(url) as m:
        connector = m._connector
        inside, go_on = threading.Event(), threading.Event()

        def call(connection: Connection) -> object:
            inside.set()
            assert go_on.wait(60)
            return connection.call("PING")

        def count_connections() -> None:
            with plain_client(url) as plain:
                before = connections_received(plain)
                for _ in range(10):
                    assert m.streams() == []
                assert connections_received(plain) == before + 1

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(connector.use, call, None)
            assert inside.wait(60)
            try:
                assert in_child(count_connections) == 0
            finally:
                go_on.set()
            assert done.result(60) == b"PONG"


def test_threads_that_share_a_client_get_their_own_replies(url: str) -> None:
    with meteor.connect(url) as m:
        names = [f"s{i}" for i in range(8)]

        def work(name: str) -> None:
            for _ in range(20):
                assert m.stream(name, create=True).describe().name == name
                assert (
                    m.stream(name, create=False).incarnation
                    == m.stream(name, create=True).incarnation
                )

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, names))
        assert m.streams() == names


# The package


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(meteor.__path__, "meteor_py."):
        yield module.name


@pytest.mark.parametrize("name", ["meteor_py", *modules()])
def test_the_examples_in_docstrings_work(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in meteor.__all__:
        thing = getattr(meteor, name)
        if isinstance(thing, type):
            assert thing.__doc__, name
    assert issubclass(meteor.RecordTooLarge, ValueError)
    assert not issubclass(meteor.MeteorError, redis.RedisError)


def test_an_uncaught_errors_traceback_is_short() -> None:
    code = "import meteor_py; meteor_py.connect('redis://:secret@127.0.0.1:1').stream('s')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("meteor_py.errors.ConnectionFailed: The server")
    assert done.stderr.count("Traceback") <= 2
    assert len(done.stderr.splitlines()) < 40
    assert "secret" not in done.stderr


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_dropped_client_is_freed_without_a_garbage_collection(url: str, kind: str) -> None:
    address = url if kind == "server" else "redis+cluster://127.0.0.1:1"
    gc.collect()
    gc.disable()
    try:
        client = meteor.connect(address, timeout=0.1)
        if kind == "server":
            client.streams()
        connector = weakref.ref(client._connector)
        del client
        assert connector() is None
    finally:
        gc.enable()
