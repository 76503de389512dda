"""Every process in a query finds the server, and none reveals the password."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import meteor_py as meteor
from meteor_py.testing import Sentinels
from pyspark_meteor import writers
from pyspark_meteor.options import SourceOptions, parse_source
from pyspark_meteor.server import ServerOptions
from pyspark_meteor.sink_options import SinkOptions, parse_sink
from tests.conftest import ServerFactory
from tests.support.readers import fill
from tests.support.servers import Server
from tests.support.spark_engine import Checkpoint, Engine, Task, dumps, own_process

SECRET = "geheim-4711"
SCHEMA = StructType([StructField("value", BinaryType())])


@pytest.fixture(autouse=True)
def cleaned_up() -> Iterator[None]:
    with own_process():
        yield


def parse(given: dict[str, str]) -> SourceOptions:
    return parse_source({"stream": "orders"} | given, streaming=True)


def sink(given: dict[str, str]) -> SinkOptions:
    return parse_sink({"stream": "s"} | given, SCHEMA, streaming=True)


# Passwords


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h",
        f"redis://u:{SECRET}@h/0",
        f"redis://h?password={SECRET}",
        f"redis://:/{SECRET}@h",  # unescaped, so the URL parses differently
        f"redis://:#{SECRET}@h",
        f"redis://u:?{SECRET}@h",
        "redis://u:@h",
    ],
)
def test_password_in_the_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="passwordEnv") as caught:
        parse({"url": url})
    assert SECRET not in str(caught.value)


def test_password_in_a_malformed_url_is_not_shown() -> None:
    with pytest.raises(ValueError, match="The url is malformed") as caught:
        parse({"url": f"redis://u:[{SECRET}@h"})
    assert SECRET not in str(caught.value)


def test_password_for_an_embedded_server_is_refused() -> None:
    with pytest.raises(ValueError, match="An embedded server has no password"):
        parse({"url": "embedded:///tmp/x", "passwordEnv": "X"})


def test_sentinel_password_needs_a_sentinel_address() -> None:
    with pytest.raises(ValueError, match="names no sentinels") as caught:
        parse({"url": "redis://h", "sentinelPasswordFile": "/x"})
    assert "sentinelPasswordFile" in str(caught.value)


def test_password_variable_that_spark_would_show_causes_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("REDIS_PASSWORD", "meteor_token", "A_SECRET"):
        parse({"url": "redis://h", "passwordEnv": name})
    assert caplog.text == ""
    parse({"url": "redis://h", "passwordEnv": "REDIS_PW"})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "spark.executorEnv.REDIS_PW" in record.getMessage()
    assert "passwordFile" in record.getMessage()


@pytest.fixture
def locked(private_server: ServerFactory) -> Server:
    """A server that requires a password and has some records."""

    running = private_server()
    with meteor.connect(running.url) as m:
        fill(m.stream("orders", capacity=100), 3)
        m.stream("s", create=True)
    running.client().config_set("requirepass", SECRET)
    return running


def test_source_neither_pickles_nor_shows_the_password(
    locked: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_METEOR_PASSWORD", SECRET)
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    for where in ({"passwordEnv": "SPARK_METEOR_PASSWORD"}, {"passwordFile": str(file)}):
        with Engine(Checkpoint(), url=locked.url, group="g", **where) as engine:
            engine.begin()
            engine.plan()
            assert len(engine.read()) == 3
            shown = [engine.pickled, *engine.parts, dumps(engine.reader._options)]
            assert not [text for text in shown if SECRET.encode() in text]
            words = [repr(engine.reader), repr(engine.reader._options), str(engine.kept.planned)]
            assert not [text for text in words if SECRET in text]


def test_missing_password_is_reported_with_its_location(tmp_path: Path) -> None:
    for where, word in (("passwordEnv", "SPARK_NOT_SET"), ("passwordFile", str(tmp_path / "no"))):
        with pytest.raises(ValueError, match=word):
            Engine(Checkpoint(), url="redis://127.0.0.1:1", **{where: word}).begin()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=rf"The passwordFile {damaged} is not UTF-8"):
        Engine(Checkpoint(), url="redis://127.0.0.1:1", passwordFile=str(damaged)).begin()


def test_sink_neither_pickles_nor_shows_the_password(
    locked: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_METEOR_PASSWORD", SECRET)
    monkeypatch.setattr(writers, "TaskContext", Task(0))
    file = tmp_path / "password"
    file.write_text(SECRET)
    for batch, where in enumerate(("passwordEnv", "passwordFile")):
        place = {"passwordEnv": "SPARK_METEOR_PASSWORD", "passwordFile": str(file)}[where]
        options = sink({"url": locked.url, where: place})
        pickled = dumps(writers.StreamWriter(options))
        monkeypatch.setattr(writers, "TaskContext", Task(batch))
        message = pickle.loads(pickled).write(iter([pa.RecordBatch.from_pydict({"value": [b"x"]})]))
        pickle.loads(pickled).commit([message], batch)
        shown = [pickled, dumps(message), repr(message).encode(), repr(options).encode()]
        assert not [text for text in shown if SECRET.encode() in text]
    assert options.server.connect().stream("s", create=False).end().offset == 2


def test_source_logs_in_to_sentinels_with_their_own_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENTINEL_PASSWORD", SECRET)
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text(SECRET + "\n")
    wrong.write_text("wrong")
    with Sentinels(replicas=1, sentinels=1) as running, meteor.connect(running.url) as m:
        with running.sentinels[0].client() as plain:
            plain.execute_command("ACL", "SETUSER", "spark", "on", f">{SECRET}", "&*", "+@all")
        fill(m.stream("orders", capacity=100), 3)
        url = f"{running.url}?sentinel_username=spark"
        for where in (
            {"sentinelPasswordEnv": "SENTINEL_PASSWORD"},
            {"sentinelPasswordFile": str(right)},
        ):
            with Engine(Checkpoint(), url=url, group="g", **where) as engine:
                engine.begin()
                engine.plan()
                assert len(engine.read()) == 3
                assert SECRET.encode() not in engine.pickled
        with pytest.raises(meteor.AccessDenied):
            Engine(Checkpoint(), url=url, sentinelPasswordFile=str(wrong)).begin()


# The server that is used if no url is set


def test_executors_use_the_server_from_the_drivers_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with meteor.connect(url) as m:
        fill(m.stream("orders", capacity=100), 3)
    monkeypatch.setenv("METEOR_URL", url)
    assert sink({}).server == ServerOptions(url)
    with Engine(Checkpoint()) as engine:
        assert engine.plan()
        engine.read()
        monkeypatch.setenv("METEOR_URL", "redis://127.0.0.1:1")  # as on another machine
        assert [row for part in engine.parts for row in engine.task(part)] == [
            ("orders", offset) for offset in range(3)
        ]


def test_executors_use_the_drivers_default_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METEOR_URL", raising=False)
    for name in ("HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "a b"))
    mine = meteor.connect().address
    found = pickle.loads(dumps(sink({}).server))
    monkeypatch.setenv("METEOR_URL", "redis://127.0.0.1:1")
    assert found.connect().address == mine
    assert mine.place


def test_server_for_one_process_only_is_refused_even_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for url in ("fake://", "embedded://"):
        monkeypatch.setenv("METEOR_URL", url)
        with pytest.raises(ValueError, match=f"Only one process can use {url}"):
            parse({})


def test_password_in_the_drivers_environment_is_not_passed_on(
    locked: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METEOR_URL", locked.url.replace("://", f"://:{SECRET}@"))
    with Engine(Checkpoint()) as engine:
        assert len(engine.batch()) == 3
        assert SECRET.encode() not in engine.pickled
    options = sink({}).server
    assert SECRET.encode() not in dumps(options)
    with own_process():
        monkeypatch.delenv("METEOR_URL")
    with pytest.raises(ValueError, match=r"^The driver's \$METEOR_URL .*passwordEnv") as caught:
        options.connect()
    assert "spark.executorEnv.METEOR_URL" in str(caught.value)
    assert SECRET not in str(caught.value)


# Servers that may evict keys


@pytest.mark.filterwarnings("ignore::meteor_py.DataSafetyWarning")
@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-random"])
def test_exactly_once_is_refused_on_a_server_that_may_evict_keys(
    private_server: ServerFactory, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    running = private_server("--maxmemory", "50mb", "--maxmemory-policy", policy)
    monkeypatch.setattr(writers, "TaskContext", Task(0))
    given = {"url": running.url, "stream": "s"}
    row = pa.RecordBatch.from_pydict({"value": [b"x"]})

    def write(writer: Any) -> None:
        writer.write(iter([row]))

    for refused in (
        writers.StreamWriter(parse_sink(given, SCHEMA, streaming=True)),
        writers.BatchWriter(parse_sink(given, SCHEMA, streaming=False)),
    ):
        with pytest.raises(meteor.ServerRefused, match=f"maxmemory-policy {policy}"):
            write(refused)
    running.client().config_set("maxmemory-policy", "noeviction")
    strict = writers.StreamWriter(parse_sink(given, SCHEMA, streaming=True))
    written = strict.write(iter([row]))
    running.client().config_set("maxmemory-policy", policy)
    with pytest.raises(meteor.ServerRefused, match="noeviction"):
        strict.commit([written], 0)
    write(writers.StreamWriter(sink({"url": running.url, "delivery": "atLeastOnce"})))
    running.client().config_set("maxmemory", "0")  # nothing is evicted without a limit
    strict.commit([written], 0)
    with meteor.connect(running.url) as m:
        assert m.stream("s").end().offset == 2


def test_connectors_client_does_not_suppress_warnings_for_the_applications_client(
    private_server: ServerFactory,
) -> None:
    url = private_server("--appendonly", "no").url
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stream = sink({"url": url}).server.connect().stream("s", create=True)
        with stream.publisher() as pub:
            pub.publish(b"x").result(10)
        assert caught == []
        with meteor.connect(url) as m:
            m.stream("s").end()
    (warning,) = caught
    assert warning.category is meteor.DataSafetyWarning


@pytest.mark.filterwarnings("ignore::meteor_py.DataSafetyWarning")
def test_source_driver_logs_dangerous_settings_once(
    private_server: ServerFactory, caplog: pytest.LogCaptureFixture
) -> None:
    running = private_server("--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru")
    with meteor.connect(running.url) as m:
        fill(m.stream("orders", capacity=100), 3)
    with Engine(Checkpoint(), url=running.url) as engine:
        assert engine.batch() == [0, 1, 2]
        assert engine.batch() == []
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if "maxmemory-policy volatile-lru" in text]) == 1
    assert len([text for text in texts if "append-only persistence is off" in text]) == 1
