"""Scripts are called by their hash, and sent again after SCRIPT FLUSH.

On a full server, they refuse new frames and streams; reading, configuring and deleting still work.
The tests run on Valkey and Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
from redis.crc import key_slot

import meteor_py as meteor
from meteor_py.publish.transaction import Stage, commit
from meteor_py.records.frame import Columns
from meteor_py.redis import keys, scripts
from tests.conftest import ServerFactory
from tests.support.readers import drain, everything, fill, value
from tests.support.servers import Server

Kind = Literal["valkey", "redis"]


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, private_server: ServerFactory) -> Server:
    return private_server(kind=request.param)


@pytest.fixture
def client(server: Server) -> Iterator[meteor.Client]:
    with meteor.connect(server.url) as m:
        yield m


def use_everything(client: meteor.Client, between: Any) -> None:
    """Create, use and delete a stream, and call ``between`` after each step."""
    stream = client.stream("s", create=True)
    between()
    with stream.publisher() as pub, stream.subscriber() as sub:
        for i in range(3):
            offset = pub.publish(value(i)).result()
            between()
            assert [record.offset for record in sub.poll()] == [offset]
            between()
    stream.describe()
    between()
    stream.offset_at(datetime.now(UTC))
    between()
    for version in range(2):
        staging = Stage(stream._handle, f"{version}")
        staging.write(Columns([b"x"]))
        staged = staging.finish()
        between()
        assert commit(stream._handle, "w", version, [staged])
        between()
    stream.configure(capacity=5)
    between()
    stream.delete()
    between()


def calls(plain: redis.Redis) -> dict[str, int]:
    stats: Any = plain.info("commandstats")
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}


def test_script_is_sent_again_after_script_flush(client: meteor.Client, server: Server) -> None:
    use_everything(client, server.client().script_flush)


def test_a_loaded_script_is_called_only_by_its_hash(client: meteor.Client, server: Server) -> None:
    plain = server.client()
    use_everything(client, lambda: None)
    plain.config_resetstat()
    use_everything(client, lambda: None)
    counted = calls(plain)
    assert counted["evalsha"] > 0
    assert counted["evalsha_ro"] > 0
    assert not {"eval", "eval_ro", "script|load"} & set(counted)


def test_scripts_loaded_beforehand_are_never_sent_again(
    client: meteor.Client, server: Server
) -> None:
    plain = server.client()
    client.load_scripts()
    known: Any = plain.script_exists(*(script.sha for script in scripts.ALL))
    assert all(known)
    plain.config_resetstat()
    use_everything(client, lambda: None)
    assert not {"eval", "eval_ro", "script|load"} & set(calls(plain))


def test_every_script_has_a_header_and_is_loaded_by_load_scripts() -> None:
    from importlib.resources import files

    lua = Path(str(files("meteor_py.redis"))) / "lua"
    found = {path.relative_to(lua).with_suffix("").as_posix() for path in lua.rglob("*.lua")}
    # The files in shared/step are joined into one script.
    parts = {name for name in found if name.startswith("shared/step/")}
    libraries = {name for name in found if Path(name).name.startswith("_")}
    assert found - parts - libraries | {"shared/step"} == {s.name for s in scripts.ALL}
    for script in scripts.ALL:
        text = script.source.decode()
        assert text.isascii()
        for part in ("-- KEYS", "-- ARGV", "-- Returns", "-- Atomic"):
            assert part in text, script
        first, _, rest = script.source.partition(b"\n")
        assert script.plain_source.endswith(rest if first.startswith(b"#!") else script.source)
        assert not script.plain_source.startswith(b"#!")
    without = {s.name for s in scripts.ALL if not s.source.startswith(b"#!")}
    # A script without a "#!lua" line runs even on a full server, until its first write fails.
    assert without == {
        "log/publish",
        "log/create_stream",
        "log/repair_log",
        "peers/open",
    }


def test_all_of_a_streams_keys_are_in_one_cluster_slot() -> None:
    for name in ("s", "a.b", "x" * 128):
        own = [keys.log(name), keys.meta(name), keys.producer(name, "p")]
        own += [keys.stage(name, "{a}"), keys.plan(name, "{b}"), keys.fences(name)]
        own += [keys.stages(name, "{c}"), keys.fence_times(name)]
        assert len({key_slot(key.encode()) for key in own}) == 1
        assert all(key.startswith(keys.everything(name)) for key in own)


# A server that is out of memory


def fill_up(plain: redis.Redis) -> None:
    plain.config_set("maxmemory", 1)


def test_on_a_full_server_a_retry_gets_its_reply_and_a_new_frame_leaves_no_trace(
    client: meteor.Client, server: Server
) -> None:
    plain = server.client()
    stream = client.stream("s", create=True)
    script_keys = [keys.log("s"), keys.meta("s"), keys.producer("s", "p")]

    def publish(sequence: int) -> Any:
        return client._connector.run(
            scripts.PUBLISH,
            script_keys,
            [stream.incarnation, "", 0, sequence, 1, 7, 60_000, "0v", b"x" * 100, ""],
        )

    first = publish(0)
    assert first == [b"OK", 0, 1]
    fill_up(plain)
    before = everything(plain)
    for sequence, producer in ((1, "p"), (0, "q")):
        script_keys[2] = keys.producer("s", producer)
        with pytest.raises(meteor.OutOfMemory, match="maxmemory"):
            publish(sequence)
    assert everything(plain) == before
    script_keys[2] = keys.producer("s", "p")
    assert publish(0) == first
    plain.config_set("maxmemory", 0)
    assert publish(1) == [b"OK", 1, 1]


def test_streams_on_a_full_server_can_be_read_configured_and_deleted(
    client: meteor.Client, server: Server
) -> None:
    plain = server.client()
    stream = client.stream("s", create=True)
    end = fill(stream, *[10] * 20)
    fill_up(plain)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == list(range(end))
    assert stream.describe().length == end
    assert stream.offset_at(datetime.fromtimestamp(0, UTC)) == 0
    history = plain.hget(keys.meta("s"), "history")
    reply = client._connector.run(
        scripts.NEW_EPOCH, [keys.meta("s")], [stream.incarnation, history, "another", 1]
    )
    assert reply == [b"OK"]
    stream.configure(capacity=10)
    assert stream.describe().first == end - 10
    with pytest.raises(meteor.OutOfMemory):
        client.stream("another", create=True)
    assert client.stream("s", create=False).name == "s"
    stream.delete()
    assert plain.keys("*") == []


def test_an_existing_stream_can_be_opened_on_a_full_server(
    client: meteor.Client, server: Server
) -> None:
    client.stream("s", create=True)
    fill_up(server.client())
    assert client.stream("s", create=True).name == "s"
