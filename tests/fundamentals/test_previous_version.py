"""Upgrading keeps your data: this version can use all state that version 0.1 wrote.

Streams, subscriber groups, shared groups, peer groups, stores and unfinished transactions continue
where they left off, on Valkey and Redis, whether members had died or were alive when 0.1 stopped.
``tests/fixtures/version_0_1/write.py`` shows how 0.1 wrote the state.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.publish.transaction import Staged, commit, is_done
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import SHARED_CONVERT, Script
from tests.support.previous_version import PreviousVersion, dump
from tests.support.servers import plain_client
from tests.support.waiting import eventually

pytestmark = pytest.mark.parametrize("any_url", ["valkey", "redis"], indirect=True)

V0_1 = PreviousVersion("version_0_1")
NEW_YEAR = 1_767_225_600_000  # 2026-01-01 in ms, the timestamp of some records


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def m(any_url: str, store: Path) -> Iterator[meteor.Client]:
    """A client for a server that holds data written by version 0.1."""
    V0_1.load(any_url, store=store)
    with meteor.connect(any_url) as m:
        yield m


def values(stream: meteor.Stream, start: int = 0) -> list[bytes]:
    return [value for batch in stream.read(start) for value in batch.values()]


def test_fixture_restores_every_key_that_0_1_wrote(
    m: meteor.Client, any_url: str, store: Path
) -> None:
    with plain_client(any_url) as plain:
        found = dump(plain, store_uri=store.as_uri())
    for now, then in zip(found, V0_1.keys, strict=True):
        assert now | {"ttl_ms": None} == then | {"ttl_ms": None}
        assert (now["ttl_ms"] is None) == (then["ttl_ms"] is None)


# Streams


def test_streams_written_by_0_1_all_exist_and_have_their_settings(m: meteor.Client) -> None:
    assert m.streams() == [
        *("carts", "carts-dead", "copies", "orders", "packed-lz4", "packed-zstd"),
        *("readings", "ring", "trades"),
    ]
    settings = {name: m.stream(name, create=True).describe().config for name in m.streams()}
    assert settings["carts"].ordering_key == "key"
    assert settings["packed-lz4"].compression == "lz4"
    assert settings["packed-zstd"].checksum
    assert settings["readings"].codec == "json"
    assert settings["ring"].capacity == 10


@pytest.mark.parametrize(
    "name", ["orders", "packed-lz4", "packed-zstd", "ring", "trades", "carts", "carts-dead"]
)
def test_every_record_written_by_0_1_is_read_as_0_1_read_it(m: meteor.Client, name: str) -> None:
    found = [record for batch in m.stream(name, create=True).read() for record in batch]
    assert found == V0_1.records(name)


def test_keys_headers_and_times_written_by_0_1_are_read_exactly(m: meteor.Client) -> None:
    bare, keyed, full, *_, six, seven, _, _, _ = (
        record for batch in m.stream("orders", create=True).read() for record in batch
    )
    assert (bare.offset, bare.value, bare.key, bare.headers) == (0, b"bare", None, None)
    assert bare.timestamp == bare.appended
    assert (keyed.value, keyed.key) == (b"keyed", b"customer-7")
    assert (full.offset, full.key, full.timestamp) == (2, b"\x00\xfe", NEW_YEAR)
    assert full.headers == {"trace": b"42", "binary": b"\xff\x00"}
    assert (six.offset, six.key, six.headers, six.timestamp) == (6, b"k6", None, NEW_YEAR + 6)
    assert (seven.key, seven.headers, seven.timestamp) == (None, {"h": b""}, seven.appended)


def test_values_written_by_0_1_with_a_codec_are_decoded(m: meteor.Client) -> None:
    found = [
        value for batch in m.stream("readings", create=True).read() for value in batch.values()
    ]
    north, south = {"sensor": "north", "celsius": 21.5}, {"sensor": "south", "celsius": None}
    assert found == [north, south, [1, "two", {}], "text"]


def test_publishing_continues_at_the_next_offset(m: meteor.Client) -> None:
    orders = m.stream("orders", create=True)
    with orders.subscriber() as sub, orders.publisher() as pub:
        assert pub.publish(b"eleven").result(5) == 11
        assert pub.publish_many([b"twelve", b"thirteen"]).result(5) == 12
        assert sub.poll(5).values()[0] == b"eleven"
    assert values(orders, 9) == [b"nine", b"ten", b"eleven", b"twelve", b"thirteen"]


def test_records_dropped_under_0_1_are_reported_with_their_offsets(m: meteor.Client) -> None:
    with m.stream("ring", create=True).subscriber() as sub:
        sub.seek(0)
        with pytest.raises(meteor.RecordsLost) as lost:
            sub.poll(5)
        assert (lost.value.first, lost.value.last) == (0, 29)
        sub.skip_gap()
        assert list(sub.poll(5).offsets) == list(range(30, 40))


def test_limits_apply_to_records_published_by_0_1(m: meteor.Client) -> None:
    orders = m.stream("orders")
    assert (orders.config.max_age, orders.config.max_bytes, orders.config.retain) == (None,) * 3
    assert orders.repair().healthy
    orders.configure(max_bytes=150)
    kept_from = orders.bounds()[0]
    assert 0 < kept_from < 11
    assert [record.offset for batch in orders.read() for record in batch] == [*range(kept_from, 11)]
    with orders.publisher() as pub:
        pub.publish_many([b"x"] * 10).result(5)
        for _ in range(20):
            pub.publish(b"x").result(5)
    assert orders.bounds()[0] > 11


def test_stream_written_by_0_1_is_deleted_without_leftovers(m: meteor.Client) -> None:
    for name in m.streams():
        m.stream(name, create=True).delete()
    assert m.streams() == []
    assert m.redis.keys("meteor:{*") == []


# Subscriber groups


def read(sub: meteor.Subscriber, count: int) -> list[int]:
    """Read ``count`` records, in as many polls as it takes; return their offsets."""
    offsets: list[int] = []
    while len(offsets) < count:
        batch = sub.poll(10)
        assert batch, f"{count - len(offsets)} of {count} records did not arrive"
        offsets += batch.offsets
    return offsets


def test_group_written_by_0_1_continues_at_its_confirmed_offset(m: meteor.Client) -> None:
    orders = m.stream("orders", create=True)
    before = orders.group("billing")
    assert (before.confirmed, before.lag, before.owner) == (4, 7, None)
    with orders.subscriber(group="billing", initial_offset="none") as sub:
        assert read(sub, 7) == list(range(4, 11))
        assert sub.term is not None
        assert sub.term > before.term
        assert sub.confirm().result(5) == 11
    assert orders.group("billing").confirmed == 11


def test_unconfirmed_group_written_by_0_1_begins_at_its_start(m: meteor.Client) -> None:
    orders = m.stream("orders", create=True)
    with pytest.raises(meteor.NoConfirmedOffset):
        orders.subscriber(group="audit", initial_offset="none")
    with orders.subscriber(group="audit") as sub:
        assert list(sub.poll(5).offsets) == [10]
        assert sub.confirm().result(5) == 11


def test_group_whose_owner_died_under_0_1_is_taken_over_when_the_lease_expires(
    m: meteor.Client,
) -> None:
    orders = m.stream("orders", create=True)
    with orders.subscriber(group="shipping", lease_ttl=0.5) as sub:
        assert read(sub, 9) == list(range(2, 11))
        assert sub.confirm().result(5) == 11


# Shared groups


def process(sub: meteor.SharedSubscriber, count: int) -> list[meteor.SharedRecord]:
    """Acknowledge ``count`` records, and check that no others follow."""
    found: list[meteor.SharedRecord] = []
    while len(found) < count:
        records = sub.poll(10)
        assert records, f"{count - len(found)} of {count} records did not arrive"
        for record in records:
            record.ack()
        found += records
    assert sub.poll(0.2) == []
    return found


def offsets_by_key(records: list[meteor.SharedRecord]) -> dict[bytes | None, list[int]]:
    """Return each key's offsets in delivery order."""
    return {key: [r.offset for r in records if r.key == key] for key in {r.key for r in records}}


def test_shared_group_written_by_0_1_delivers_unsettled_records_once_and_in_key_order(
    m: meteor.Client,
) -> None:
    carts = m.stream("carts", create=True)
    with carts.shared_subscriber("billing") as sub:
        records = process(sub, 9)
        assert offsets_by_key(records) == {
            b"cart-1": [2, 8],  # held by a consumer that died
            b"cart-3": [3, 5],  # 3 was held by the same consumer
            b"cart-2": [4],
            b"cart-5": [9, 10],  # 9 had failed once and was delayed
            b"cart-6": [12],
            None: [11],
        }
    failures = {record.offset: record.failures for record in records}
    assert (failures[4], failures[9], failures[12]) == (0, 1, 0)
    assert carts.shared_group("billing").fsck() == []
    assert carts.shared_group("billing").describe().acked == 2 + 9
    with carts.shared_subscriber("billing") as sub:
        assert sub.poll(0.2) == []


def test_key_that_0_1_parked_stays_parked_until_it_is_resumed(m: meteor.Client) -> None:
    carts = m.stream("carts", create=True)
    group = carts.shared_group("billing")
    assert {state.key for state in group.keys() if state.state == "parked"} == {b"cart-4"}
    (letter,) = values(m.stream("carts-dead", create=True))
    assert letter == b"poison"
    with carts.shared_subscriber("billing") as sub:
        assert b"cart-4" not in offsets_by_key(process(sub, 9))
        assert sub.resume("cart-4")
        assert offsets_by_key(process(sub, 1)) == {b"cart-4": [7]}
    assert group.confirmed == 13


def test_interrupted_conversion_of_a_0_1_shared_group_is_continued_by_another_consumer(
    m: meteor.Client, any_url: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion stops after 1, 2, 3... portions, as if its process had died there."""
    source = SHARED_CONVERT.source.replace(b"PORTION, PER_KEY = 500,", b"PORTION, PER_KEY = 17,")
    assert source != SHARED_CONVERT.source
    monkeypatch.setattr(SHARED_CONVERT, "source", source)
    monkeypatch.setattr(SHARED_CONVERT, "sha", hashlib.sha1(source).hexdigest())
    group = m.stream("carts", create=False).shared_group("billing")
    expected = group.describe(), group.keys()
    for portions in count(1):
        with plain_client(any_url) as plain:
            plain.flushall()
        shutil.rmtree(store)
        V0_1.load(any_url, store=store)
        with meteor.connect(any_url) as first, monkeypatch.context() as patch:
            died = die_after(patch, portions)
            with suppress(Died):
                first.stream("carts", create=False).shared_group("billing")
        with meteor.connect(any_url) as second:
            carts = second.stream("carts", create=False)
            with carts.shared_subscriber("billing", prefetch=1):
                group = carts.shared_group("billing")
                assert group.fsck() == []
                assert replace(group.describe(), consumers=()) == expected[0]
                assert group.keys() == expected[1]
        if not died:
            break
    print(f"stopped after each of {portions} portions")
    assert portions > 6


class Died(Exception):
    """Raised at the point where the converting process dies."""


def die_after(patch: pytest.MonkeyPatch, portions: int) -> list[int]:
    """Make the conversion stop after this many portions. Return a list that is empty until then."""
    real, died, left = Connector.run, list[int](), portions

    def run(self: Connector, script: Script, *args: Any, **options: Any) -> Any:
        nonlocal left
        if script is SHARED_CONVERT and not left:
            died.append(portions)
            raise Died
        left -= script is SHARED_CONVERT
        return real(self, script, *args, **options)

    patch.setattr(Connector, "run", run)
    return died


def test_shared_group_written_by_0_1_is_consistent(m: meteor.Client) -> None:
    group = m.stream("carts", create=True).shared_group("billing")
    assert group.fsck() == []
    found = group.describe()
    assert (found.confirmed, found.acked, found.dead, found.scanned) == (2, 2, 1, 12)
    assert (found.config.max_deliveries, found.config.on_poison) == (3, "park")
    assert (found.waiting, found.consumers) == (9, ()), "the dead consumer still holds records"


# Peer groups


def test_peer_group_written_by_0_1_has_its_settings_members_and_values(m: meteor.Client) -> None:
    with m.peer_group("workers", create=False) as group:
        assert (group.config.ttl, group.config.max_inbox) == (1.0, 50)
        assert group.guarded("config") == b"limit=7"
        alpha, beta = group.members
        assert (alpha.id, alpha.metadata, alpha.priority) == ("alpha", {"room": 3}, 5)
        assert (alpha.persistent, alpha.alive) == (True, False)
        assert (beta.id, beta.metadata) == ("beta", {"room": 4})
        assert group.term > 0


def test_member_that_was_alive_under_0_1_expires_and_the_next_term_has_a_higher_number(
    m: meteor.Client,
) -> None:
    with m.peer_group("workers") as group:
        before = group.term
        with group.join("gamma") as gamma, gamma.leadership(timeout=20) as term:
            assert term.number > before
            term.guard.set("config", b"limit=8")
            eventually(lambda: "beta" not in [each.id for each in group.members if each.alive])
        assert group.guarded("config") == b"limit=8"


def test_messages_for_a_member_that_died_under_0_1_are_delivered_when_it_rejoins(
    m: meteor.Client,
) -> None:
    jobs: list[tuple[object, str | None]] = []
    news: list[object] = []
    with m.peer_group("workers") as group, group.join("alpha") as alpha:
        alpha.on("jobs")(lambda message: jobs.append((message.body, message.sender)))
        alpha.on("news")(lambda message: news.append(message.body))
        eventually(lambda: len(jobs) >= 3 and news)
        group.member("alpha").send("jobs", "new").result(10)
    assert jobs == [*(({"number": n}, "beta") for n in range(3)), ("new", None)]
    assert news == ["of nobody"]


# Stores


def test_records_archived_by_0_1_are_read_across_store_and_ring_as_one_log(
    m: meteor.Client,
) -> None:
    trades = m.stream("trades", create=True)
    assert trades.store.bounds() == (0, 24)
    assert values(trades) == [b"trade %d" % n for n in range(30)]
    assert trades.store.verify() == []
    with trades.subscriber(group="reports") as sub:
        assert sub.poll(5).values()[0] == b"trade 5"


def test_archiver_continues_where_0_1_stopped(m: meteor.Client, store: Path) -> None:
    trades = m.stream("trades", store=store, archive=False)
    with trades.archiver(segment_age=0.0).start(), trades.publisher() as pub:
        assert pub.publish_many([b"trade %d" % n for n in range(30, 60)]).result(5) == 30
        assert trades.store.flush() == 60
    assert trades.store.verify() == []
    assert trades.store.bounds() == (0, 60)
    assert trades.store.segments()[3].first == 24
    assert values(trades) == [b"trade %d" % n for n in range(60)]


def test_stream_written_by_0_1_is_resumed_from_its_store_after_its_server_was_lost(
    m: meteor.Client, any_url: str, store: Path
) -> None:
    m.redis.flushall()
    trades = m.stream("trades", capacity=10, store=store, resume=True, archive=False)
    assert values(trades) == [b"trade %d" % n for n in range(24)]
    with trades.publisher() as pub:
        assert pub.publish(b"next").result(5) == 24


# Transactions


def test_commit_that_0_1_left_half_done_is_finished_once(m: meteor.Client) -> None:
    copies = m.stream("copies", create=True)
    assert values(copies) == [b"0", b"1", b"2", b"3"]
    assert not is_done(copies._handle, "query", 2)
    assert commit(copies._handle, "query", 3, [Staged("query.3.0", 1, 2)])
    assert not commit(copies._handle, "query", 3, [])
    assert values(copies) == [b"%d" % n for n in range(7)]
