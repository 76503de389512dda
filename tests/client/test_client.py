"""A client reaches every kind of server, warns of dangerous ones, and shows no secret.

Also what it does at its limits: closed, forked, without a server, with one that hangs, in several
threads at once.
"""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.redis.server_warnings import dangers
from meteor_py.server import default_directory
from tests.conftest import ServerFactory
from tests.support.readers import drain, fill
from tests.support.servers import HOST, Replica, free_port

ROOT = Path(__file__).parents[2]
SECRET = "open-sesame"


def use(client: meteor.Client, name: str = "s") -> None:
    """Publish and read, so that all kinds of connection were at work."""
    stream = client.stream(name)
    with stream.subscriber() as sub:
        end = fill(stream, 1, 300)
        assert drain(sub)[-1] == end - 1
    assert name in client.streams()


def run_python(program: str, **environment: str) -> subprocess.Popen[str]:
    """A Python of its own; its standard input is its leash."""
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
def test_without_an_address_it_is_the_users_own_server_in_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: str
) -> None:
    monkeypatch.delenv("METEOR_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / directory))
    with meteor.connect() as m:
        assert m.address.scheme == "embedded"
        assert m.address.place == str(tmp_path / directory / "meteor") == str(default_directory())
        use(m)
        assert (tmp_path / directory / "meteor").is_dir()


def test_two_processes_without_an_address_meet(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": ""}
    publish = """
import meteor_py as meteor
with meteor.connect() as m, m.stream("s").publisher() as pub:
    print(pub.publish(b"hello").result(), flush=True)
    input()
"""
    read = """
import meteor_py as meteor
with meteor.connect() as m, m.stream("s").subscriber(initial_offset="earliest") as sub:
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


def test_a_unix_socket_will_do(private_server: ServerFactory) -> None:
    with meteor.connect(private_server(unix=True).url) as m:
        use(m)


def test_a_database_may_be_chosen(url: str) -> None:
    with meteor.connect(url) as zero, meteor.connect(url[:-1] + "3") as three:
        use(three)
        assert zero.streams() == []
        assert three.streams() == ["s"]


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 and the authority that vouches for it."""

    def openssl(*args: str) -> None:
        try:
            subprocess.run(["openssl", *args], cwd=tmp_path, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("openssl is not on PATH.")

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    openssl(*new, "-keyout", "server.key", "-out", "server.csr", "-subj", f"/CN={HOST}")
    (tmp_path / "names").write_text(f"subjectAltName=IP:{HOST}")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-extfile", "names", "-out", "server.pem"),
    )
    return tmp_path


def test_tls_works_and_an_unknown_authority_is_not_trusted(
    private_server: ServerFactory, certificates: Path
) -> None:
    port = free_port()
    private_server(
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", f"{certificates}/server.pem"),
        *("--tls-key-file", f"{certificates}/server.key"),
        *("--tls-ca-cert-file", f"{certificates}/ca.pem"),
        kind="redis",
    )
    url = f"rediss://{HOST}:{port}/0"
    with meteor.connect(f"{url}?ssl_ca_certs={certificates}/ca.pem") as m:
        use(m)
    with (
        meteor.connect(url) as m,
        pytest.raises(meteor.ConnectionFailed, match=f"rediss://{HOST}:{port}.*certificate"),
    ):
        m.streams()


def test_private_fakes_are_apart_and_named_ones_are_shared() -> None:
    with ExitStack() as clients:
        one, two, shared, same, other = (
            clients.enter_context(meteor.connect(f"fake://{name}"))
            for name in ("", "", "test-shared", "test-shared", "test-other")
        )
        use(one)
        use(shared)
        assert same.streams() == ["s"]
        assert two.streams() == other.streams() == []


def test_a_plain_redis_client_of_the_same_server_is_at_hand(any_url: str) -> None:
    with meteor.connect(any_url) as m:
        use(m)
        with m.redis as plain:
            members: Any = plain.smembers("meteor:streams")
            assert members == {b"s"}
            assert plain.exists("meteor:{s}:log") == 1


def test_an_embedded_server_has_a_plain_client_too() -> None:
    with meteor.connect("embedded://") as m, m.redis as plain:
        assert plain.ping() is True


# What a server tells of itself


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


def test_a_fake_server_and_one_without_a_limit_say_so(url: str) -> None:
    with meteor.connect("fake://") as m:
        assert m.describe() == meteor.ServerDescription("fake")
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


def test_a_server_that_evicts_and_keeps_nothing_is_warned_of_with_the_remedies(
    private_server: ServerFactory,
) -> None:
    server = private_server("--maxmemory-policy", "allkeys-lru", "--appendonly", "no")
    evicts, forgets = warnings_of(server.url)
    assert f"The server at {server.url} evicts keys" in evicts
    assert "set maxmemory-policy noeviction." in evicts
    assert f"The server at {server.url} loses its last records" in forgets
    assert "set appendonly yes." in forgets


def test_a_warning_shows_the_line_of_the_user(url: str) -> None:
    with meteor.connect(url) as m, pytest.warns(meteor.DataSafetyWarning) as caught:
        m.streams()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_safe_server_is_not_warned_of(private_server: ServerFactory, kind: Any) -> None:
    assert warnings_of(private_server("--appendonly", "yes", kind=kind).url) == []


@pytest.mark.parametrize("url", ["embedded://", "fake://"])
def test_our_own_servers_are_not_warned_of(url: str) -> None:
    assert warnings_of(url) == []


@pytest.mark.parametrize(
    ("version", "old"),
    [("6.2.14", True), ("5.0", True), ("7.0.0", False), ("7.2.4", False), ("10.1", False)],
)
def test_an_old_server_is_warned_of(version: str, old: bool) -> None:
    found = dangers({"redis_version": version, "aof_enabled": "1"})
    assert found == ([f"is version {version}; use Redis 7.0, Valkey 7.2 or newer."] if old else [])


def test_a_server_that_does_not_tell_is_not_warned_of() -> None:
    assert dangers({}) == []
    assert dangers({"redis_version": "unknown"}) == []


# Secrets


def whole_text(error: BaseException) -> str:
    """All that a log might hold of an error."""
    return "".join(traceback.format_exception(error)) + repr(error)


def test_no_text_of_ours_shows_a_password(private_server: ServerFactory) -> None:
    server = private_server()
    server.client().config_set("requirepass", SECRET)
    port = server.port
    url = f"redis://:{SECRET}@{HOST}:{port}/0"
    texts = warnings_of(url)
    with meteor.connect(url, timeout=1) as m:
        stream = m.stream("s")
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


@pytest.mark.parametrize("login", ["", ":wrong-guess@", "nobody:wrong-guess@"])
def test_a_wrong_password_is_told_without_showing_it(
    private_server: ServerFactory, login: str
) -> None:
    server = private_server()
    server.client().config_set("requirepass", SECRET)
    with (
        meteor.connect(f"redis://{login}{HOST}:{server.port}") as m,
        pytest.raises(meteor.AccessDenied, match="Check user, password and ACL") as caught,
    ):
        m.streams()
    assert "wrong-guess" not in whole_text(caught.value)


# No server, or not for long


def test_connecting_sends_nothing_until_the_client_is_used() -> None:
    url = f"redis://{HOST}:{free_port()}/0"
    with meteor.connect(url) as m:
        assert repr(m) == f"<Client of {url}>"
        with pytest.raises(meteor.ConnectionFailed) as caught:
            m.streams()
    message = str(caught.value)
    assert f"The server at {url} cannot be reached" in message
    assert "refused" in message
    assert message.endswith("Is it running, and is the address right?")
    assert caught.value.retriable


@pytest.mark.parametrize("url", ["unix:///nowhere/at.all", "redis://no.such.host.invalid"])
def test_a_server_that_cannot_be_found_is_told_with_its_address(url: str) -> None:
    with meteor.connect(url) as m, pytest.raises(meteor.ConnectionFailed, match=url):
        m.streams()


def test_a_connection_that_died_while_idle_is_replaced_unnoticed(
    private_server: ServerFactory,
) -> None:
    server = private_server("--appendonly", "yes")
    with meteor.connect(server.url) as m:
        stream = m.stream("s")
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


def test_a_late_answer_is_never_taken_for_the_next_one(private_server: ServerFactory) -> None:
    server = private_server()
    with meteor.connect(server.url, timeout=0.5) as m:
        for name in ("a", "b"):
            m.stream(name)
        server.pause()
        start = time.monotonic()
        with pytest.raises(meteor.ConnectionFailed):
            m.stream("a", create=False).describe()
        assert time.monotonic() - start < 5
        server.resume()
        assert m.streams() == ["a", "b"]
        assert m.stream("a", create=False).describe().name == "a"


def test_a_replica_can_be_read_and_refuses_to_be_written(private_server: ServerFactory) -> None:
    master = private_server()
    with meteor.connect(master.url) as m:
        end = fill(m.stream("s"), 1, 50)
    with Replica(master) as replica, meteor.connect(replica.url) as m:
        replica.wait_in_sync()
        stream = m.stream("s", create=False)
        with stream.subscriber(initial_offset="earliest") as sub:
            assert drain(sub) == list(range(end))
        assert stream.describe().next == end
        assert stream.offset_at(datetime.fromtimestamp(0, UTC)) == 0
        for attempt in (lambda: m.stream("new"), lambda: stream.configure(capacity=5)):
            with pytest.raises(meteor.ConnectionFailed, match=r"(?i)replica"):
                attempt()
        with stream.publisher(delivery_timeout=0.5) as pub:
            ack = pub.publish(b"x")
            with pytest.raises(meteor.ConnectionFailed, match="is a replica and takes no writes"):
                ack.result()


# Life and death of a client


def test_a_closed_client_says_so_whatever_is_asked(any_url: str) -> None:
    m = meteor.connect(any_url)
    use(m)
    stream = m.stream("s")
    m.close()
    m.close()
    attempts: list[Callable[[], Any]] = [
        m.streams, lambda: m.stream("s"), stream.describe, stream.subscriber, stream.publisher,
        lambda: list(stream.read()), stream.delete, m.load_scripts, lambda: m.redis,
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(meteor.MeteorError, match="is closed; connect again"):
            attempt()
    assert "(closed)" in repr(m)


def test_a_client_that_was_never_used_can_be_closed() -> None:
    m = meteor.connect("embedded://")
    m.close()
    with pytest.raises(meteor.MeteorError, match="closed"):
        m.streams()


def in_child(work: Callable[[], object]) -> int:
    """Do something in a forked child; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("where", ["server", "embedded"])
def test_after_a_fork_parent_and_child_use_the_same_client_apart(url: str, where: str) -> None:
    with meteor.connect(url if where == "server" else "embedded://") as m:
        use(m, "before")
        assert in_child(lambda: use(m, "child")) == 0
        use(m, "parent")
        assert m.streams() == ["before", "child", "parent"]
        assert in_child(m.close) == 0  # which ends nothing of the parent's
        use(m, "after")


def test_threads_share_a_client_and_each_gets_its_own_answers(url: str) -> None:
    with meteor.connect(url) as m:
        names = [f"s{i}" for i in range(8)]

        def work(name: str) -> None:
            for _ in range(20):
                assert m.stream(name).describe().name == name
                assert m.stream(name, create=False).incarnation == m.stream(name).incarnation

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, names))
        assert m.streams() == names


# The package


def test_importing_the_library_imports_nothing_that_most_never_need() -> None:
    program = """
import sys, meteor_py
heavy = ["pyspark", "pyarrow.parquet", "pyarrow.compute", "pandas", "rich", "click", "fakeredis",
         "hypothesis", "meteor_cli", "pyspark_meteor"]
print([name for name in heavy if name in sys.modules])
"""
    with run_python(program) as process:
        assert process.communicate(timeout=60)[0] == "[]\n"


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(meteor.__path__, "meteor_py."):
        yield module.name


@pytest.mark.parametrize("name", ["meteor_py", *modules()])
def test_the_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_name_exists_and_is_documented() -> None:
    for name in meteor.__all__:
        thing = getattr(meteor, name)
        if isinstance(thing, type):
            assert thing.__doc__, name
    assert issubclass(meteor.RecordTooLarge, ValueError)
    assert not issubclass(meteor.MeteorError, redis.RedisError)


def test_an_error_is_short_to_read_where_nobody_catches_it() -> None:
    code = "import meteor_py; meteor_py.connect('redis://:secret@127.0.0.1:1').stream('s')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("meteor_py.errors.ConnectionFailed: The server")
    assert done.stderr.count("Traceback") <= 2
    assert len(done.stderr.splitlines()) < 40
    assert "secret" not in done.stderr
