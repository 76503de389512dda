"""While a slot moves, every script runs completely or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis

import meteor_py as meteor
from meteor_py.redis import keys, scripts
from meteor_py.redis.address import parse
from meteor_py.redis.connection import Connection
from meteor_py.testing import Cluster, Node
from tests.support.script_recorder import NAME, ScriptCall, record_every_script

SLOT = Cluster.slot(NAME)


@pytest.fixture
def calls(
    client: meteor.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, ScriptCall]:
    """One call to each script, for a stream and a peer group whose state the calls would change."""
    recorded = record_every_script(client, monkeypatch, tmp_path)
    client.load_scripts()
    stream = client.stream(NAME, capacity=1_000, ordering_key="key")
    with stream.publisher() as pub:
        pub.publish_many([b"x"] * 10, keys=[b"k"] * 10).result()
    with client.peer_group(NAME) as group, group.join("me"):
        pass
    return recorded


def contents(*nodes: Node) -> dict[tuple[int, bytes, str], Any]:
    """Return the serialized values and expiry times of the slot's keys, by node."""
    found: dict[tuple[int, bytes, str], Any] = {}
    for node in nodes:
        with node.client(single_connection_client=True) as plain:
            names: list[bytes] = plain.execute_command("CLUSTER", "GETKEYSINSLOT", SLOT, 10_000)
            for name in names:
                for command in ("DUMP", "PEXPIRETIME"):
                    plain.execute_command("ASKING")  # the importing node requires it
                    found[node.port, name, command] = plain.execute_command(command, name)
    return found


def reply(node: Node, command: tuple[Any, ...], *, asking: bool = False) -> str:
    """Return the error code in a node's reply to a command; "ran" if there is no error."""
    with node.client(single_connection_client=True) as plain:
        try:
            if asking:
                plain.execute_command("ASKING")
            plain.execute_command(*command)
        except redis.exceptions.TryAgainError:
            return "TRYAGAIN"
        except redis.exceptions.MovedError:
            return "MOVED"
        except redis.exceptions.AskError:
            return "ASK"
        except redis.ResponseError as error:
            return f"stopped: {error}"
    return "ran"


def test_every_script_is_called(calls: dict[str, ScriptCall]) -> None:
    assert set(calls) == {script.name for script in scripts.ALL}


def test_no_script_runs_even_partly_while_its_slot_moves(
    cluster: Cluster, client: meteor.Client, calls: dict[str, ScriptCall]
) -> None:
    source = cluster.owner(SLOT)
    target = cluster.others(source)[0]
    connection = client._connector.open_connection(NAME)
    move = cluster.begin_move(SLOT, target)
    for keys_moved in (0, 1, 1, 1000):
        if keys_moved:
            move.migrate(keys_moved)
        before = contents(source, target)
        for call in calls.values():
            for whole in (False, True):
                command = connection.script_call(call.script, call.keys, call.args, whole=whole)
                assert reply(source, command) in ("TRYAGAIN", "ASK"), call.script
                assert reply(target, command) == "MOVED", call.script
                assert reply(target, command, asking=True) == "TRYAGAIN", call.script
        assert contents(source, target) == before
    move.finish()


def test_without_the_guard_key_a_script_stops_in_the_middle(
    cluster: Cluster, client: meteor.Client
) -> None:
    # This is why the guard key exists. If this test ever fails because a server refuses such a
    # script as a whole, the guard key is no longer needed for that server.
    stream = client.stream(NAME, create=True)
    with stream.publisher() as pub:
        pub.publish(b"x").result()
        producer = pub._sender._id
    source = cluster.owner(SLOT)
    move = cluster.begin_move(SLOT, cluster.others(source)[0])
    script_keys = [keys.log(NAME), keys.meta(NAME), keys.producer(NAME, producer)]
    epoch, sequence, count, fingerprint, ttl_ms = 1, 0, 1, 0, 60_000
    args = [stream.incarnation, "", epoch, sequence, count, fingerprint, ttl_ms, "0v", b"y", ""]
    with source.client() as plain:
        unguarded = Connection(parse(source.url), 5.0)
        command = unguarded.script_call(scripts.PUBLISH, script_keys, args, whole=True)
        assert reply(source, command).startswith("stopped")
        assert plain.hget(keys.meta(NAME), "next") == b"2", "the record is not in the log"
    move.finish()


def test_only_the_keys_module_names_the_guard_key() -> None:
    package = Path(meteor.__file__).parent
    for path in (*package.rglob("*.lua"), *package.rglob("*.py")):
        found = re.findall(r"[^\n]*:guard['\"\b]", path.read_text())
        assert not found or path.name == "keys.py", (path, found)


def test_guarded_scripts_see_only_their_own_keys(client: meteor.Client) -> None:
    # A script such as discard_stages loops over its keys, so the guard key must not be among them.
    for script in scripts.ALL:
        first, _, _ = script.source.partition(b"\n")
        flags = first + b"\n" if first.startswith(b"#!") else b""
        assert script.guarded.text.startswith(flags + b"KEYS[#KEYS] = nil ")
        assert script.guarded.text.count(b"\n") == script.source.count(b"\n")
    client.stream(NAME, create=True)
    with client._connector.redis as plain:
        counted = scripts.GuardedText.of(b"return #KEYS").text
        assert (
            plain.execute_command("EVAL", counted, 2, keys.log(NAME), keys.guard(keys.log(NAME)))
            == 1
        )
