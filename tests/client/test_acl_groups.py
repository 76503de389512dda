"""The roles in docs/acl.md for shared and peer groups can do their work and nothing else."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

import meteor_py as meteor
from meteor_py.publish.transaction import Stage, commit
from meteor_py.records.frame import Columns
from meteor_py.shared.record import Standing
from tests.support.acl_server import connect, contents, dead_letter_rules, fill
from tests.support.acl_server import guarded as guarded
from tests.support.servers import Server
from tests.support.waiting import eventually

# The consumer, and other roles on a stream with an ordering key


@pytest.fixture
def grouped(guarded: Server, tmp_path: Path) -> Server:
    """A server whose stream has an ordering key and a store. No archiver is running."""
    with connect(guarded, "admin") as admin:
        admin.stream("orders", create=True).delete()
        admin.stream("orders", capacity=100, ordering_key="key", store=tmp_path, archive=False)
        admin.stream("dead", create=True)
    with connect(guarded, "publisher") as m, m.stream("orders", create=False).publisher() as pub:
        pub.publish_many([b"x"] * 400, keys=[b"%d" % (n % 5) for n in range(400)]).result()
    return guarded


def test_a_consumer_can_join_settle_take_over_and_describe(grouped: Server) -> None:
    with connect(grouped, "consumer") as m:
        stream = m.stream("orders", create=False)
        settings: dict[str, Any] = {"max_per_key": 8, "lease_ttl": 0.5, "on_poison": "park"}
        dying = stream.shared_subscriber("g", **settings, max_poll_interval=0.1)
        with stream.shared_subscriber("g") as sub:
            assert dying.poll(max_records=1)
            assert sub.purge(b"4") > 0
            found: dict[bytes, Callable[[meteor.SharedRecord], None]] = {
                b"0": lambda record: record.release(),
                b"1": lambda record: record.release(delay=0.1),
                b"2": lambda record: record.release(only_this=True),
                b"3": lambda record: record.reject("why"),
            }
            deadline = time.monotonic() + 20
            while sub.confirmed < 10 and time.monotonic() < deadline:
                for record in sub.poll(timeout=0.2):
                    if record.standing is Standing.HELD:
                        found.pop(record.ordering_key, meteor.SharedRecord.ack)(record)
                for state in sub.keys(look_ahead=True):
                    if state.state == "parked":
                        assert sub.resume(state.key)
            assert sub.confirmed >= 10
            sub.flush()
            (shared,) = stream.groups()
            assert (shared.kind, shared.consumers) == ("shared", 1)
            assert stream.describe().groups == (shared,)
            with pytest.raises(meteor.AccessDenied):
                sub.fsck()
        with pytest.raises(meteor.AccessDenied):
            stream.delete_group("g")
        dying.close()
    with connect(grouped, "admin") as admin:
        stream = admin.stream("orders", create=False)
        assert stream.shared_group("g").fsck() == []
        stream.delete_group("g")


def test_a_consumer_can_neither_publish_configure_delete_nor_join_an_exclusive_group(
    grouped: Server,
) -> None:
    before = contents(grouped)
    with connect(grouped, "consumer") as m, warnings.catch_warnings():
        warnings.simplefilter("ignore", meteor.DataSafetyWarning)  # this role cannot call INFO
        stream = m.stream("orders", create=False)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied):
            pub.publish(b"x").result()
        forbidden: list[Callable[[], object]] = [
            stream.delete,
            lambda: stream.subscriber(group="h"),
            lambda: stream.seek_group("h", 0),
            lambda: stream.configure(capacity=1),
            lambda: m.stream("other", create=False),
            lambda: m.stream("new", create=True),
        ]
        for call in forbidden:
            with pytest.raises(meteor.AccessDenied):
                call()
    assert contents(grouped) == before


def test_a_consumer_with_the_documented_rules_can_publish_dead_letters(grouped: Server) -> None:
    with grouped.client() as plain, connect(grouped, "consumer") as m:
        plain.execute_command("ACL", "SETUSER", "consumer", *dead_letter_rules())
        stream = m.stream("orders", create=False)
        with stream.shared_subscriber("g", dead_letter="dead") as sub:
            sub.poll()[0].reject("why")
            sub.poll()
        assert plain.xlen("meteor:{dead}:log") == 1


def test_other_roles_can_work_on_a_stream_with_an_ordering_key(
    grouped: Server, tmp_path: Path
) -> None:
    with connect(grouped, "writer") as m:
        stream = m.stream("orders", create=False)
        staging = Stage(stream._handle, "a")
        staging.write(Columns([b"x"] * 10, keys=[b"a"] * 10))
        assert commit(stream._handle, "w", 1, [staging.finish()])
    with connect(grouped, "archiver") as m:
        stream = m.stream("orders", store=tmp_path, create=False)
        assert stream.store.flush() == 410
        assert stream.describe().length < 410
    with grouped.client() as plain:
        # An index entry covers at most 64 records, so a frame may need several.
        assert plain.xlen("meteor:{orders}:index") >= plain.xlen("meteor:{orders}:log") > 0
    with connect(grouped, "member") as m:
        assert m.stream("orders", create=False).seek_group("g", 4) == 4


@pytest.mark.parametrize("role", ["subscriber", "member", "archiver"])
def test_other_roles_can_list_shared_groups(grouped: Server, role: str) -> None:
    with (
        connect(grouped, "consumer") as m,
        m.stream("orders", create=False).shared_subscriber("g") as sub,
        connect(grouped, role) as other,
    ):
        assert sub.poll()
        (group,) = other.stream("orders", create=False).describe().groups
        assert (group.name, group.consumers) == ("g", 1)


# The peer


def test_a_peer_can_join_lead_send_vote_act_and_rejoin(guarded: Server) -> None:
    with connect(guarded, "peer") as m, m.peer_group("workers", ttl=1) as group:
        assert group.config.ttl == 1
        me, other = group.join("me", metadata={"n": 1}), group.join()
        with me.leadership(20) as term:
            term.guard.set("config", "7")
            term.guard.delete("old")
        assert group.guarded("config") == b"7"
        for member in (me, other):
            member.on("q")(lambda message: message.body)
            member.on_action("open")(lambda action: None)
        assert group.all.ask("q", 7).result(20).values == {"me": 7, other.id: 7}
        group.any.send("q").result(20)
        action = me.propose_action("open", at=group.now() + 1).result(20)
        assert action.passed, action
        me.update({"n": 2})
        assert group.remove(other.id)
        eventually(other.lost.is_set)
        with guarded.client() as plain:  # the server lost the group, and its members recreate it
            plain.delete(*plain.keys("meteor:group:*"), "meteor:groups")
        eventually(lambda: peer_groups(guarded) == ["workers"], 20)
        with connect(guarded, "peer") as n, n.peer_group("workers", create=False) as again:
            eventually(lambda: [member.id for member in again.members] == ["me"], 20)
        eventually(lambda: me.term is not None, 20)
        me.leave()


def peer_groups(server: Server) -> list[str]:
    with connect(server, "admin") as admin:
        return admin.peer_groups()


def test_a_peer_reaches_neither_another_group_nor_a_stream(guarded: Server) -> None:
    fill(guarded, 10)
    with connect(guarded, "admin") as admin, admin.peer_group("others"):
        pass
    before = contents(guarded)
    with connect(guarded, "peer") as m:
        forbidden: list[Callable[[], object]] = [
            lambda: m.peer_group("others", create=False),
            lambda: m.peer_group("workers", instance="g1", create=False),
            lambda: m.stream("orders", create=False),
            lambda: m.stream("new", create=True),
            m.peer_groups,
            m.streams,
        ]
        for call in forbidden:
            with pytest.raises(meteor.AccessDenied):
                call()
        for command in ("SREM meteor:groups others", "EVAL return 0", "FLUSHALL", "KEYS *"):
            with pytest.raises(NoPermissionError):
                m.redis.execute_command(*command.split())
    assert contents(guarded) == before
