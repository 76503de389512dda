"""Which server a source or sink talks to, in each process, and that nobody sees its password."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

import meteor_py as meteor
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
        f"redis://:/{SECRET}@h",  # what is not escaped makes something else of it
        f"redis://:#{SECRET}@h",
        f"redis://u:?{SECRET}@h",
        "redis://u:@h",
    ],
)
def test_a_password_in_the_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ValueError, match="passwordEnv") as caught:
        parse({"url": url})
    assert SECRET not in str(caught.value)


def test_a_url_that_cannot_be_read_is_not_shown() -> None:
    with pytest.raises(ValueError, match="The url cannot be read; write redis://") as caught:
        parse({"url": f"redis://u:[{SECRET}@h"})
    assert SECRET not in str(caught.value)


def test_an_embedded_server_needs_no_password() -> None:
    with pytest.raises(ValueError, match="An embedded server has no password"):
        parse({"url": "embedded:///tmp/x", "passwordEnv": "X"})


def test_a_password_in_a_variable_whose_value_spark_would_show_is_warned_of(
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
    """A server with some records that wants a password."""
    running = private_server()
    with meteor.connect(running.url) as m:
        fill(m.stream("orders", capacity=100), 3)
        m.stream("s")
    running.client().config_set("requirepass", SECRET)
    return running


def test_no_secret_is_in_what_is_pickled_or_shown(
    locked: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_METEOR_PASSWORD", SECRET)
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    for where in ({"passwordEnv": "SPARK_METEOR_PASSWORD"}, {"passwordFile": str(file)}):
        with Engine(Checkpoint(), url=locked.url, group="g", **where) as engine:
            assert engine.initial()
            engine.plan()
            assert len(engine.read()) == 3
            shown = [engine.pickled, *engine.parts, dumps(engine.reader._options)]
            assert not [text for text in shown if SECRET.encode() in text]
            words = [repr(engine.reader), repr(engine.reader._options), str(engine.kept.planned)]
            assert not [text for text in words if SECRET in text]


def test_a_password_that_is_not_there_is_told_by_its_place(tmp_path: Path) -> None:
    for where, word in (("passwordEnv", "SPARK_NOT_SET"), ("passwordFile", str(tmp_path / "no"))):
        with pytest.raises(ValueError, match=word):
            Engine(Checkpoint(), url="redis://127.0.0.1:1", **{where: word}).initial()
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=rf"The passwordFile {damaged} is not UTF-8"):
        Engine(Checkpoint(), url="redis://127.0.0.1:1", passwordFile=str(damaged)).initial()


def test_no_secret_of_a_sink_is_in_what_is_pickled_or_shown(
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


# The server of a driver that names none


def test_executors_use_the_server_that_the_driver_finds_in_its_own_environment(
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


def test_executors_use_the_kept_server_of_the_user_who_runs_the_driver(
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


def test_a_server_of_one_process_is_refused_also_if_the_environment_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for url in ("fake://", "embedded://"):
        monkeypatch.setenv("METEOR_URL", url)
        with pytest.raises(ValueError, match=f"^{url} is known to one process only"):
            parse({})


def test_a_password_in_the_environment_of_the_driver_stays_there(
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
    with pytest.raises(ValueError, match=r"^\$METEOR_URL of the driver .*passwordEnv") as caught:
        options.connect()
    assert "spark.executorEnv.METEOR_URL" in str(caught.value)
    assert SECRET not in str(caught.value)
