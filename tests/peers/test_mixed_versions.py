"""Members that run version 0.2 and members that run this version work together in one group.

The old members are simulated with the scripts from version 0.2, which are in
``tests/fixtures/version_0_2/peers``.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Any

from meteor_py.peers.group import PeerGroup
from meteor_py.redis.scripts import Script
from tests.support.mailing import Post, Record, result
from tests.support.mailing import post as post
from tests.support.peering import on_key
from tests.support.waiting import eventually

_SCRIPTS = Path(__file__).parents[1] / "fixtures" / "version_0_2" / "peers"


def old_script(name: str) -> Script:
    first, body = (_SCRIPTS / f"{name}.lua").read_bytes().split(b"\n", 1)
    library = (_SCRIPTS / "_group_state.lua").read_bytes()
    script = object.__new__(Script)
    script.name, script.read_only = f"0.2 {name}", False
    script.source = script.plain_source = b"\n".join((first, library, body))
    script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest()
    return script


class OldMember:
    """A named member that runs version 0.2."""

    def __init__(self, group: PeerGroup, name: str) -> None:
        self._group, self.name = group, name
        assert self.run("join", name, "old", "1", 0, b"null", "takeover", 1000)[0] == b"OK"

    def run(self, script: str, *args: Any) -> list[Any]:
        return self._group._handle.protocol.run(old_script(script), args)

    def heartbeat(self) -> int:
        return int(self.run("heartbeat", "old", self.name)[8][0])

    def messages(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        found = on_key(self._group, "XRANGE", f"inbox:{self.name}", "-", "+")
        return [(place, dict(zip(flat[::2], flat[1::2], strict=True))) for place, flat in found]

    def settle(self, value: bytes) -> None:
        (place, fields), *_ = self.messages()
        args = (self.name, "old", place, fields[b"id"], "ok", "json", value)
        assert self.run("settle", *args) == [b"OK", 1]

    def send(self, session: str, verb: str, to: str, member: str, body: bytes) -> str:
        message = secrets.token_hex(12)
        args = [message, session, self.name, "q", verb, to, member, 0, "0", 128, 10_000, 60_000]
        assert self.run("send", *args, "json", body, "old", "")[0] == b"OK"
        return message


def test_old_member_replies_to_a_new_one(post: Post) -> None:
    group = post.group(ttl=60)
    old = OldMember(group, "old")
    futures = [group.member("old").ask("q", n, timeout=60) for n in range(3)]
    eventually(lambda: len(old.messages()) == 3)
    for n in range(3):
        old.settle(b"%d" % (n * 10))
    assert [result(future) for future in futures] == [0, 10, 20]


def test_new_member_replies_to_an_old_one(post: Post) -> None:
    group = post.group(ttl=60)
    old, got = OldMember(group, "old"), Record(lambda message: message.body + 1)
    group.join("new").on("q")(got)
    message = old.send("old-replies", "ask", "member", "new", b"7")
    eventually(lambda: on_key(group, "XLEN", "replies:old-replies") == 1)
    ((_, flat),) = on_key(group, "XRANGE", "replies:old-replies", "-", "+")
    assert flat[:2] == [b"id", message.encode()]
    assert on_key(group, "HGET", f"message:{message}", "r:new") == b"ok:json:8"
    assert [m.sender for m in got.messages] == ["old"]


def test_long_broadcast_reaches_old_members_with_its_body(post: Post) -> None:
    group = post.group(ttl=60)
    old, got = OldMember(group, "old"), Record(lambda message: len(message.body))
    for name in ("a", "b"):
        group.join(name).on("q")(got)
    future = group.all.ask("q", "x" * 10_000, timeout=60)
    eventually(lambda: len(old.messages()) == 1)
    ((_, fields),) = old.messages()
    assert len(fields[b"body"]) == 10_002
    assert b"shared" not in fields
    old.settle(b"10000")
    assert result(future).values == dict.fromkeys(("a", "b", "old"), 10_000)
    eventually(lambda: not group._handle.protocol.connector.redis.keys("*:body:*"))


def test_requests_to_an_old_member_wait_for_a_handler(post: Post) -> None:
    group = post.group(ttl=60)
    old = OldMember(group, "old")
    future = group.member("old").ask("unknown", timeout=60)
    eventually(lambda: len(old.messages()) == 1)
    assert not future.done()


def test_each_version_detects_deaths_in_the_other(post: Post) -> None:
    group = post.group(ttl=0.5)
    me = group.join("new")
    OldMember(group, "silent")
    eventually(lambda: (found := group.find("silent")) is not None and not found.alive, 20)
    old = OldMember(group, "old")
    group._handle.heartbeat.stop()
    group._handle.heartbeat.join()

    def new_is_dead() -> bool:
        assert old.heartbeat() == 1
        return me.id.encode() not in on_key(group, "ZRANGE", "deadlines", 0, -1)

    eventually(new_is_dead, 20)
    assert b":-" in on_key(group, "HGET", "members", "new")


def test_message_to_any_member_moves_between_versions(post: Post) -> None:
    group = post.group(ttl=60)
    old = OldMember(group, "old")
    future = group.any.ask("q", 7, timeout=60)
    eventually(lambda: len(old.messages()) == 1)
    got = Record(lambda message: message.deliveries)
    group.join("new").on("q")(got)
    old.run("leave", "old", "old", "stay")
    assert result(future) == 2  # the old member may have begun to handle it
