"""The roles in docs/acl.md can do their work and nothing else.

test_acl_groups.py covers the roles for shared groups and peer groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

import meteor_py as meteor
from meteor_py.publish.transaction import Stage, abandon, commit, discard, forget, is_done
from meteor_py.records.frame import Columns
from tests.support.acl_server import connect, contents, dead_letter_rules, fill, roles
from tests.support.acl_server import guarded as guarded
from tests.support.group_scripts import GroupScripts
from tests.support.receivers import Handler, fails_for
from tests.support.servers import Replica, Server
from tests.support.waiting import eventually


def test_publisher_and_subscriber_can_do_their_work(guarded: Server) -> None:
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        with stream.publisher() as pub:
            assert pub.publish_many([b"%d" % n for n in range(1000)]).result() == 0
            assert pub.publish(b"last", key=b"k").result() == 1000
    with connect(guarded, "subscriber") as m:
        stream = m.stream("orders", create=False)
        description = stream.describe()
        assert description.next == 1001
        assert description.bytes
        with stream.subscriber(initial_offset="earliest") as sub:
            assert sub.poll().last_offset >= 999


def test_a_subscriber_can_list_groups_but_not_join_one(guarded: Server) -> None:
    fill(guarded, 10)
    with connect(guarded, "member") as m:
        m.stream("orders", create=False).seek_group("g", 4)
    before = contents(guarded)
    with connect(guarded, "subscriber") as m:
        stream = m.stream("orders", create=False)
        (group,) = stream.groups()
        assert (group.name, group.confirmed, group.lag) == ("g", 4, 6)
        assert stream.describe().groups == (group,)
        with pytest.raises(meteor.AccessDenied) as denied:
            stream.subscriber(group="g")
        assert denied.value.code == "NOPERM"
        with pytest.raises(meteor.AccessDenied):
            stream.seek_group("g", 0)
        with pytest.raises(meteor.AccessDenied):
            stream.delete_group("g")
    assert contents(guarded) == before


def test_server_description_has_only_the_address_for_a_role_without_info(
    guarded: Server,
) -> None:
    with connect(guarded, "subscriber") as m:
        found = m.describe()
        assert found.address
        assert found == meteor.ServerDescription(address=found.address)
    with connect(guarded, "member") as m:
        assert (m.describe().role, bool(m.describe().memory)) == ("primary", True)


# The member


def test_a_member_can_read_confirm_release_and_seek(guarded: Server) -> None:
    fill(guarded, 10)
    with connect(guarded, "member") as m:
        stream = m.stream("orders", create=False)
        assert stream.groups() == []
        with stream.subscriber(group="g", lease_ttl=60) as sub:
            assert len(sub.poll()) == 10
            assert sub.confirm(3).result(20) == 4
            assert stream.groups()[0].owner == sub.member
            sub.deactivate()
            with stream.subscriber(group="g", lease_ttl=60) as other:
                assert other.poll().first_offset == 4
                assert other.confirm(5).result(20) == 6
            sub.reactivate()
            assert sub.poll().first_offset == 6
        assert stream.seek_group("g", 2) == 2
        stream.seek_group("h", "earliest")
        description = stream.describe()
        assert description.bytes
        groups = [(group.name, group.confirmed) for group in description.groups]
        assert groups == [("g", 2), ("h", 0)]
        with stream.subscriber(initial_offset="earliest") as alone:
            assert len(alone.poll()) == 10


def test_a_member_can_take_over_from_a_dead_member_and_seek_by_force(guarded: Server) -> None:
    fill(guarded, 10)
    with connect(guarded, "member") as m:
        stream = m.stream("orders", create=False)
        lua = GroupScripts(m, "orders")
        incarnation = stream.incarnation
        lua.open(3, incarnation=incarnation)
        _, term, *_ = lua.acquire("dead", ttl_ms=100, incarnation=incarnation)
        assert lua.renew("dead", term, ttl_ms=100, incarnation=incarnation) == ("OK",)
        with stream.subscriber(group="g", lease_ttl=0.6) as sub:
            assert sub.poll(timeout=20).first_offset == 3
            assert (sub.term or 0) > term
            stream.seek_group("g", 7, force=True)
            eventually(lambda: sub.poll(timeout=0.1).first_offset == 7)


def test_a_member_can_confirm_after_a_failover(guarded: Server) -> None:
    fill(guarded, 10)
    with connect(guarded, "member") as m, guarded.client() as plain:
        stream = m.stream("orders", create=False)
        with stream.subscriber(group="g") as sub:
            sub.poll()
            plain.hset("meteor:{orders}:meta", "history", "of the former server")
            epoch = stream.describe().epoch
            assert sub.confirm().result(20) == 10
            assert stream.describe().epoch > epoch


def test_a_member_cannot_publish_configure_or_delete(guarded: Server) -> None:
    fill(guarded, 10)
    with connect(guarded, "member") as m:
        stream = m.stream("orders", create=False)
        stream.seek_group("g", 5)
        before = contents(guarded)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied):
            pub.publish(b"x").result()
        forbidden: list[Callable[[], object]] = [
            stream.delete,
            lambda: stream.delete_group("g"),
            lambda: stream.configure(capacity=1),
            lambda: m.stream("other", create=False),
            lambda: m.stream("new", create=True),
            m.streams,
        ]
        for call in forbidden:
            with pytest.raises(meteor.AccessDenied):
                call()
    assert contents(guarded) == before


def test_a_member_cannot_bypass_the_scripts(guarded: Server) -> None:
    fill(guarded, 10)
    before = contents(guarded)
    forbidden = [
        "DEL meteor:{orders}:meta",
        "DEL meteor:{orders}:log",
        "DEL meteor:{orders}:events",
        "DEL meteor:{orders}:groups",
        "SET meteor:{orders}:meta x",
        "XADD meteor:{orders}:log * a b",
        "XTRIM meteor:{orders}:log MAXLEN 0",
        "HSET meteor:{orders}:producer:p epoch 1",
        "HGET meteor:{other}:meta next",
        "HSET meteor:{other}:meta next 1",
        "EVAL return 0",
        "FLUSHALL",
        "KEYS *",
    ]
    with connect(guarded, "member") as m:
        for command in forbidden:
            with pytest.raises(NoPermissionError):
                m.redis.execute_command(*command.split())
    assert contents(guarded) == before


def test_a_member_with_dead_letters_needs_the_documented_rules(guarded: Server) -> None:
    fill(guarded, 3)
    with connect(guarded, "admin") as admin:
        admin.stream("dead", create=True)
    with guarded.client() as plain, connect(guarded, "member") as m:
        stream = m.stream("orders", create=False)
        with pytest.raises(meteor.AccessDenied):
            m.stream("dead", create=False)
        plain.execute_command("ACL", "SETUSER", "member", *dead_letter_rules())
        handler = Handler(fails_for(1))
        with stream.subscriber(group="g", auto_confirm=True) as sub:
            dead = m.stream("dead", create=False)
            receiver = sub.attach_receiver(handler, on_error=dead, tries=1)
            handler.wait_for(0, 2)
            assert receiver.failed == 1
        assert plain.xlen("meteor:{dead}:log") == 1


# The writer


def test_a_writer_can_stage_commit_finish_and_discard(guarded: Server) -> None:
    with connect(guarded, "writer") as m:
        stream = m.stream("orders", create=False)
        staged = []
        for name in ("a", "b", "c"):
            staging = Stage(stream._handle, name)
            staging.write(Columns([b"x"] * 10))
            staged.append(staging.finish())
        discard(stream._handle, "w", ["c"])
        with guarded.client() as plain:
            plain.hset("meteor:{orders}:meta", "history", "of the former server")
        assert commit(stream._handle, "w", 1, staged[:2])
        assert is_done(stream._handle, "w", 1)
        assert not commit(stream._handle, "w", 1, staged[:2])
        forget(stream._handle, "w")
        abandon(stream._handle, "other", ["d"])
    with connect(guarded, "subscriber") as m:
        assert sum(map(len, m.stream("orders", create=False).read())) == 20


def test_a_writer_can_wait_for_replicas(guarded: Server) -> None:
    with Replica(guarded) as replica, connect(guarded, "writer") as m:
        replica.wait_in_sync()
        stream = m.stream("orders", create=False)
        staging = Stage(stream._handle, "a")
        staging.write(Columns([b"x"] * 10))
        assert commit(stream._handle, "w", 1, [staging.finish()], replicas=1)
        with replica.client() as plain:
            assert plain.hget("meteor:{orders}:fences", "w") == b"1:1:1:10"


def test_a_writer_can_neither_read_its_stream_nor_use_another(guarded: Server) -> None:
    fill(guarded, 10)
    before = contents(guarded)
    with connect(guarded, "writer") as m:
        stream = m.stream("orders", create=False)
        forbidden: list[Callable[[], object]] = [
            stream.delete,
            lambda: list(stream.read()),
            lambda: stream.seek_group("g", 0),
            lambda: m.stream("other", create=False),
            lambda: m.stream("new", create=True),
        ]
        for call in forbidden:
            with pytest.raises(meteor.AccessDenied):
                call()
    assert contents(guarded) == before


# The archiver


@pytest.fixture
def stored(guarded: Server, tmp_path: Path) -> Path:
    """Return the directory of the stream's store. No archiver is running."""
    with connect(guarded, "admin") as admin:
        admin.stream("orders", create=True).delete()
        admin.stream("orders", capacity=100, store=tmp_path, archive=False)
    fill(guarded, 900)
    return tmp_path


def test_an_archiver_can_archive_flush_and_expire(guarded: Server, stored: Path) -> None:
    with connect(guarded, "archiver") as m:
        stream = m.stream("orders", store=stored, create=False)
        assert stream.store.flush() == 900
        assert stream.describe().length < 900
        assert stream.store.expire(offset=900) == 900
        assert stream.store.bounds() == (900, 900)
    with connect(guarded, "archiver") as m:
        m.stream("orders", store=stored, create=False)
        fill(guarded, 100)
        assert m.stream("orders", create=False).store.flush() == 1000
        with connect(guarded, "subscriber") as other:
            assert other.stream("orders", create=False).describe().archiver is not None
    with connect(guarded, "subscriber") as m:
        stream = m.stream("orders", create=False)
        assert sum(map(len, stream.read())) == 100
        assert stream.store.verify() == []


def test_an_archiver_can_neither_publish_nor_join_a_group(guarded: Server, stored: Path) -> None:
    with connect(guarded, "archiver") as m:
        stream = m.stream("orders", store=stored, archive=False, create=False)
        before = contents(guarded)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied):
            pub.publish(b"x").result(20)
        with pytest.raises(meteor.AccessDenied):
            stream.subscriber(group="g")
        with pytest.raises(meteor.AccessDenied):
            stream.delete()
    assert contents(guarded) == before


def test_archiver_without_the_required_rights_raises(guarded: Server, stored: Path) -> None:
    with connect(guarded, "subscriber") as m:
        stream = m.stream("orders", store=stored, archive=False, create=False)
        with pytest.raises(meteor.AccessDenied):
            stream.archiver().run()


# Publisher, subscriber, loader


def test_a_publisher_can_neither_read_its_stream_nor_use_another(guarded: Server) -> None:
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        with stream.subscriber() as sub, pytest.raises(meteor.AccessDenied):
            sub.poll(timeout=0)
        with pytest.raises(meteor.AccessDenied):
            m.stream("other", create=False)
        with pytest.raises(meteor.AccessDenied):
            stream.delete()


@pytest.mark.parametrize("part", ["log", "index", "meta"])
def test_only_admin_may_delete_a_streams_keys_and_only_archiver_may_also_trim_them(
    guarded: Server, part: str
) -> None:
    key = f"meteor:{{orders}}:{part}"
    commands = [
        ("DEL", key), ("UNLINK", key), ("RENAME", key, key), ("PEXPIRE", key, 1), ("XDEL", key, 1),
        ("XTRIM", key, "MAXLEN", 0), ("HDEL", key, "next"), ("SET", key, "x"),
    ]  # fmt: skip
    with guarded.client() as plain:
        for role in roles():
            if role in ("default", "admin"):
                continue
            allowed = [
                command[0]
                for command in commands
                if plain.execute_command("ACL", "DRYRUN", role, *command) == b"OK"
            ]
            assert allowed == (["XTRIM"] if role == "archiver" and part != "meta" else []), role


@pytest.mark.parametrize("role", [role for role in roles() if role not in ("default", "admin")])
def test_only_admin_may_use_another_stream_or_server_commands(guarded: Server, role: str) -> None:
    """Each of the 27 commands is denied to each of the 8 roles: 216 attempts per server."""
    other = "meteor:{other}:meta"
    commands = [
        "ACL LIST", "ACL SETUSER x on", "BGSAVE", "CLIENT KILL ID 1", "CONFIG GET *",
        "CONFIG SET dir /", "DEBUG SLEEP 1", "EVAL return 0", f"EVAL_RO return 1 {other}",
        "FLUSHALL", "FLUSHDB", "FUNCTION LOAD x", "KEYS *", "MODULE LOAD /x.so", "MONITOR",
        "REPLICAOF h 1", "SAVE", "SCAN 0", "SCRIPT FLUSH", "SHUTDOWN NOSAVE", "SLOWLOG GET",
        "SWAPDB 0 1",
        f"HGETALL {other}", f"HSET {other} next 1", f"DEL {other}", "XRANGE meteor:{other}:log - +",
        "XADD meteor:{other}:log 9-1 a b",
    ]  # fmt: skip
    with guarded.client() as plain:
        for command in commands:
            reply = plain.execute_command("ACL", "DRYRUN", role, *command.split())
            assert reply != b"OK", command


def test_a_subscriber_cannot_write(guarded: Server) -> None:
    with connect(guarded, "subscriber") as m, warnings.catch_warnings():
        warnings.simplefilter("ignore", meteor.DataSafetyWarning)  # this role cannot call INFO
        stream = m.stream("orders", create=False)
        with pytest.raises(meteor.AccessDenied):
            stream.configure(capacity=1)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied):
            pub.publish(b"x").result()
    with guarded.client() as client:
        assert client.xlen("meteor:{orders}:log") == 0


def test_the_loader_can_only_load_scripts(guarded: Server) -> None:
    with connect(guarded, "loader") as m, pytest.raises(meteor.AccessDenied):
        m.stream("orders", create=False)


def test_missing_script_that_the_role_may_not_load_raises_a_clear_error(guarded: Server) -> None:
    with guarded.client() as client:
        client.script_flush()
    with connect(guarded, "publisher") as m:
        stream = m.stream("orders", create=False)
        with stream.publisher() as pub, pytest.raises(meteor.AccessDenied, match=r"acl\.md"):
            pub.publish(b"x").result()
