"""A recorder that uses the library so that every Lua script runs, and keeps one call of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.peers.membership import Membership
from meteor_py.publish.transaction import Stage, commit, discard, let_expire
from meteor_py.records.frame import Columns
from meteor_py.redis import keys, scripts
from meteor_py.redis.connection import Connection
from meteor_py.redis.scripts import Script
from tests.support.waiting import eventually

#: The name of both the stream and the peer group, so that all keys are in one slot.
NAME = "s"


@dataclass(frozen=True)
class ScriptCall:
    script: Script
    keys: Sequence[Any]
    args: Sequence[Any]


def record_every_script(
    client: meteor.Client, monkeypatch: pytest.MonkeyPatch, directory: Path
) -> dict[str, ScriptCall]:
    """Use the library so that it runs every script; return one call of each, by script name."""
    found: dict[str, ScriptCall] = {}
    script_call = Connection.script_call

    def record(
        self: Connection, script: Script, keys: Any, args: Any, *, whole: bool = False
    ) -> Any:
        plain = [arg if isinstance(arg, str | int | bytes) else bytes(arg) for arg in args]
        call = ScriptCall(script, list(keys), plain)
        known = found.get(script.name, call)
        if len(call.args) >= len(known.args):  # the direct line prepares only a part of a call
            found[script.name] = call
        return script_call(self, script, keys, args, whole=whole)

    with monkeypatch.context() as patched:
        patched.setattr(Connection, "script_call", record)
        _use_store(client, directory)
        stream = client.stream(NAME, capacity=1_000, ordering_key="key")
        _use_log(client, stream)
        _use_transactions(stream)
        _use_group(stream)
        _use_shared_group(stream)
        _use_peers(client)
    return found


def _use_store(client: meteor.Client, directory: Path) -> None:
    stream = client.stream(NAME, capacity=100, store=directory)
    with stream.publisher() as pub:
        pub.publish_many([b"x"] * 500).result()
    assert stream.store.flush() == 500
    stream.delete()
    resumed = client.stream(NAME, capacity=100, store=directory, resume=True)
    assert resumed.store.expire(offset=500) == 500
    resumed.delete(history=True)


def _use_log(client: meteor.Client, stream: meteor.Stream) -> None:
    connector = client._connector
    with stream.publisher() as pub:
        pub.publish_many([b"x"] * 50, keys=[b"k"] * 50).result()
    connector.call("DEL", keys.settings(NAME))  # as if written by a release before 0.3
    client.stream(NAME, create=False)
    connector.call("HSET", keys.meta(NAME), "history", "of a former server")
    with stream.publisher() as pub:
        pub.publish_many([b"x"] * 50, keys=[b"k"] * 50).result()
    stream.configure(max_bytes=1_000_000)
    stream.offset_at(datetime.now(UTC))
    stream.repair()
    connector.run(scripts.SPLIT_POINTS, [keys.log(NAME)], [10])
    stream.describe()


def _use_transactions(stream: meteor.Stream) -> None:
    for name in ("a", "b"):
        staging = Stage(stream._handle, name)
        staging.write(Columns([b"x"], keys=[b"k"]))
        staged = staging.finish()
        if name == "a":
            assert commit(stream._handle, "w", 1, [staged])
    discard(stream._handle, "w", ["b"])
    let_expire(stream._handle, "w", 3600)


def _use_group(stream: meteor.Stream) -> None:
    with stream.subscriber(group="g", lease_ttl=0.5) as sub:
        batch = sub.poll(10, max_records=10)
        sub.confirm(batch[-1]).result(10)
        session = sub._fetcher.session
        assert session is not None
        renewed = session.valid_until
        eventually(lambda: session.valid_until > renewed)
    stream.seek_group("g", 0)
    stream.delete_group("g")


def _use_shared_group(stream: meteor.Stream) -> None:
    with stream.shared_subscriber("w", on_poison="park") as sub:
        records = sub.poll(10, max_records=5)
        records[0].reject("why")
        sub.flush()
        eventually(lambda: any(state.state == "parked" for state in sub.keys()))
        assert sub.resume(b"k")
        assert sub.purge(b"k") > 0
    stream.shared_group("w").describe()
    stream.shared_group("w")._protocol.convert()


def _use_peers(client: meteor.Client) -> None:
    with client.peer_group(NAME, ttl=1) as group:
        me: Membership = group.join("me", metadata={"n": 1})
        other = group.join()
        with me.leadership(20) as term:
            term.guard.set("config", "7")
        for member in (me, other):
            member.on("q")(lambda message: message.body)
            member.on_vote(lambda proposal: True)
            member.on_action("open")(lambda action: None)
        assert len(group.all.ask("q", 7).result(20).values) == 2
        assert me.propose_action("open", at=group.now() + 1).result(20).passed
        group.set_property("color", "red")
        me.update({"n": 2})
        list(group._handle.polls.read("member", "me", 10))
        other.leave()
        me.leave()
        group.delete(force=True)
