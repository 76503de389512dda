"""Every client that knew lost records learns of the loss; other clients do not notice it.

A lagging replica is promoted and its primary killed. The clients, which connect through a proxy,
find the replica instead: the records that only the primary had are lost, and their offsets are
assigned again. Each subscriber and publisher that was ahead of the replica learns exactly which
records were lost, no matter when it returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, Bench, Pair, failure, poll_until
from tests.support.servers import HOST, binaries
from tests.support.waiting import eventually


@pytest.fixture(params=["valkey", "redis"])
def pair(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, private_server(kind=request.param))


@pytest.fixture
def any_pair(private_server: ServerFactory) -> Iterator[Pair]:
    """A pair of either kind: of Redis if possible, whose replicas need a second less to sync."""
    with ExitStack() as stack:
        yield Pair(stack, private_server(kind="redis" if "redis" in binaries() else "valkey"))


def numbered(branch: str, start: int, stop: int) -> list[bytes]:
    return [f"{branch}{n}".encode() for n in range(start, stop)]


def publish(bench: Bench, branch: str, start: int, stop: int) -> None:
    """Publish records that name their branch and offset, with a new publisher."""
    with bench.client.stream(NAME, create=False).publisher() as pub:
        assert pub.publish_many(numbered(branch, start, stop)).result(10) == start


def lost_range(error: BaseException | None) -> tuple[int, int]:
    assert isinstance(error, meteor.LogTruncated), repr(error)
    assert f"{error.first} to {error.last}" in str(error)
    return error.first, error.last


def poll_loss(sub: meteor.Subscriber) -> tuple[int, int]:
    with pytest.raises(meteor.LogTruncated) as caught:
        poll_until(sub, lambda _: False, 3)
    return lost_range(caught.value)


def read_to(sub: meteor.Subscriber, end: int) -> list[bytes]:
    return poll_until(sub, lambda _: sub.position >= end)


# Publishers


def test_a_publisher_that_was_ahead_learns_once_what_was_lost_and_continues(pair: Pair) -> None:
    bench = pair.bench
    pub = bench.publisher()
    assert pub.publish_many(numbered("a", 0, 100)).result(5) == 0
    pair.lag()
    assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
    bench.proxy.refuse()
    bench.proxy.cut()
    pending = [pub.publish(b"pending"), pub.publish(b"pending too")]
    pair.fail_over()
    assert {lost_range(failure(ack)) for ack in pending} == {(100, 199)}
    with pytest.raises(meteor.LogTruncated) as caught:
        pub.publish(b"not taken")
    assert lost_range(caught.value) == (100, 199)
    assert pub.publish(b"b100").result(5) == 100
    pub.close()
    assert bench.values() == [*numbered("a", 0, 100), b"b100"]


@pytest.mark.parametrize("call", ["flush", "close", "publish_many"])
def test_the_next_call_of_any_kind_raises_the_loss(any_pair: Pair, call: str) -> None:
    bench = any_pair.bench
    pub = bench.warm_publisher()
    any_pair.lag()
    assert pub.publish(b"lost").result(5) == 1
    any_pair.fail_over()
    assert lost_range(failure(pub.publish(b"pending"))) == (1, 1)
    calls: dict[str, Callable[[], object]] = {
        "flush": pub.flush,
        "close": pub.close,
        "publish_many": lambda: pub.publish_many([b"not taken"]),
    }
    with pytest.raises(meteor.LogTruncated) as caught:
        calls[call]()
    assert lost_range(caught.value) == (1, 1)
    pub.close()


@pytest.mark.parametrize("grown", [0, 5, 50])
def test_a_publisher_learns_of_the_loss_after_another_has_begun_the_new_branch(
    any_pair: Pair, grown: int
) -> None:
    bench = any_pair.bench
    pub = bench.warm_publisher()
    any_pair.lag()
    assert pub.publish_many(numbered("a", 1, 21)).result(5) == 1
    any_pair.fail_over()
    publish(bench, "b", 1, 2 + grown)
    assert lost_range(failure(pub.publish(b"pending"))) == (1, 20)
    with pytest.raises(meteor.LogTruncated):
        pub.flush()
    assert pub.publish(b"later").result(5) == 2 + grown


def test_a_publisher_unknown_to_the_new_server_learns_of_the_loss(any_pair: Pair) -> None:
    bench = any_pair.bench
    publish(bench, "a", 0, 10)
    any_pair.lag()
    pub = bench.publisher()
    assert pub.publish(b"a10").result(5) == 10
    assert pub.publish(b"a11").result(5) == 11
    any_pair.fail_over()
    publish(bench, "b", 10, 30)
    assert lost_range(failure(pub.publish(b"pending"))) == (10, 11)
    with pytest.raises(meteor.LogTruncated):
        pub.publish(b"not taken")
    assert pub.publish(b"b30").result(5) == 30


def test_a_publisher_in_a_new_producer_epoch_learns_of_the_loss(any_pair: Pair) -> None:
    bench = any_pair.bench
    pub = bench.warm_publisher(delivery_timeout=0.4)
    any_pair.lag()
    assert pub.publish(b"a1").result(5) == 1
    bench.proxy.stall()
    assert isinstance(failure(pub.publish(b"unknown")), meteor.OutcomeUnknown)
    any_pair.fail_over()
    publish(bench, "b", 1, 30)
    assert pub.publish(b"b30").result(5) == 30  # a publisher cannot recognise its lost record
    with pytest.raises(meteor.LogTruncated) as caught:
        pub.flush()
    assert lost_range(caught.value) == (1, 1)
    pub.close()


def test_a_publisher_that_was_not_ahead_does_not_notice(pair: Pair) -> None:
    bench = pair.bench
    pub = bench.warm_publisher()
    other = bench.publisher()
    pair.lag()
    assert other.publish(b"a1").result(5) == 1
    pair.fail_over()
    assert [pub.publish(b"b%d" % n).result(5) for n in (1, 2)] == [1, 2]
    pub.close()
    assert lost_range(failure(other.publish(b""))) == (1, 1)


def test_a_record_that_no_replica_had_is_sent_again_with_acks(pair: Pair) -> None:
    bench = pair.bench
    pub = bench.warm_publisher(acks=1)
    pair.lag()
    ack = pub.publish(b"again")
    eventually(lambda: bench.direct.info("clients")["blocked_clients"] == 1)
    assert bench.next == 2
    pair.fail_over()
    pair.add_replica()
    assert ack.result(20) == 1
    assert pub.publish(b"later").result(10) == 2
    pub.close()
    assert bench.values() == [b"first", b"again", b"later"]


# Subscribers


def test_only_subscribers_that_were_ahead_learn_of_the_loss(pair: Pair) -> None:
    bench = pair.bench
    subs = [bench.subscriber(initial_offset="earliest") for _ in range(5)]
    publish(bench, "a", 0, 100)
    before, begun, grown, level, behind = subs
    for sub in subs:
        assert read_to(sub, 100) == numbered("a", 0, 100)
    behind.seek(50)
    pair.lag()
    publish(bench, "a", 100, 150)
    read_to(begun, 150)
    publish(bench, "a", 150, 200)
    for sub in (before, grown):
        read_to(sub, 200)
    latest = bench.subscriber()
    assert latest.position == 200
    pair.fail_over()
    for _ in range(2):
        assert poll_loss(before) == (100, 199)
    assert level.poll(0.05).values() == []
    publish(bench, "b", 100, 120)
    assert poll_loss(before) == (100, 199)
    assert poll_loss(begun) == (100, 149)
    publish(bench, "b", 120, 300)
    for sub, last in ((before, 199), (begun, 149), (grown, 199), (latest, 199)):
        assert poll_loss(sub) == (100, last)
    for sub in (before, begun, grown, latest):
        sub.skip_gap()
        assert read_to(sub, 300) == numbered("b", 100, 300)
    assert (before.skipped, begun.skipped) == (100, 50)
    assert read_to(level, 300) == numbered("b", 100, 300)
    assert read_to(behind, 300) == numbered("a", 50, 100) + numbered("b", 100, 300)


def test_skip_gap_before_the_new_branch_begins_moves_to_its_start(
    any_pair: Pair,
) -> None:
    bench = any_pair.bench
    publish(bench, "a", 0, 10)
    any_pair.lag()
    publish(bench, "a", 10, 20)
    sub = bench.subscriber(initial_offset="earliest")
    read_to(sub, 20)
    any_pair.fail_over()
    assert poll_loss(sub) == (10, 19)
    sub.skip_gap()
    assert (sub.position, sub.poll(0.05).values()) == (10, [])
    publish(bench, "b", 10, 40)
    assert read_to(sub, 40) == numbered("b", 10, 40)


@pytest.mark.parametrize("grown", [False, True])
def test_records_lost_before_a_subscriber_read_them_are_not_a_gap(
    any_pair: Pair, grown: bool
) -> None:
    bench = any_pair.bench
    publish(bench, "a", 0, 1)
    any_pair.lag()
    publish(bench, "a", 1, 2)
    publish(bench, "a", 2, 4)
    sub = bench.subscriber(initial_offset="earliest")
    assert sub.poll(max_records=1).values() == [b"a0"]  # sub knows that the log ends at 4
    any_pair.fail_over()
    if grown:
        publish(bench, "b", 1, 3)
    assert poll_until(sub, lambda values: len(values) == 2 * grown) == numbered(
        "b", 1, 1 + 2 * grown
    )
    publish(bench, "b", sub.position, 5)
    assert read_to(sub, 5) == numbered("b", 1 + 2 * grown, 5)


def test_records_fetched_before_the_loss_are_not_mixed_with_the_new_branch(
    any_pair: Pair,
) -> None:
    bench = any_pair.bench
    publish(bench, "a", 0, 10)
    any_pair.lag()
    publish(bench, "a", 10, 20)
    sub = bench.subscriber(initial_offset="earliest")
    assert sub.poll(max_records=5).values() == numbered("a", 0, 5)  # sub has fetched all
    any_pair.fail_over()
    publish(bench, "b", 10, 40)
    fetched = sub.poll(0.05).values()
    assert fetched == numbered("a", 5, 20)
    assert poll_loss(sub) == (10, 19)
    sub.skip_gap()
    assert read_to(sub, 40) == numbered("b", 10, 40)


# Several failovers


def test_a_second_failover_is_distinguished_from_the_first(any_pair: Pair) -> None:
    bench = any_pair.bench
    subs = [bench.subscriber(initial_offset="earliest") for _ in range(2)]
    asleep, awake = subs
    publish(bench, "a", 0, 100)
    any_pair.lag()
    pub = bench.publisher()
    assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
    for sub in subs:
        read_to(sub, 200)
    any_pair.fail_over()
    publish(bench, "b", 100, 150)
    any_pair.link, any_pair.replica = any_pair.add_replica()
    assert poll_loss(awake) == (100, 199)
    awake.skip_gap()
    any_pair.lag()
    publish(bench, "b", 150, 250)
    assert read_to(awake, 250) == numbered("b", 100, 250)
    any_pair.fail_over()
    publish(bench, "c", 150, 400)
    assert poll_loss(awake) == (150, 249)
    assert poll_loss(asleep) == (100, 199)
    assert lost_range(failure(pub.publish(b""))) == (100, 199)
    for sub, start in ((awake, 150), (asleep, 100)):
        sub.skip_gap()
        assert read_to(sub, 400) == [*numbered("b", start, 150), *numbered("c", 150, 400)]


@pytest.mark.parametrize("grown", [False, True])
def test_a_branch_unknown_to_the_new_server_is_noticed(any_pair: Pair, grown: bool) -> None:
    bench = any_pair.bench
    sub = bench.subscriber(initial_offset="earliest")
    pub = bench.publisher()
    assert pub.publish_many(numbered("a", 0, 50)).result(5) == 0
    old_link, old_replica = any_pair.add_replica()
    old_link.stall()
    assert pub.publish_many(numbered("a", 50, 100)).result(5) == 50
    any_pair.lag()
    any_pair.fail_over()
    assert pub.publish_many(numbered("b", 100, 150)).result(5) == 100
    assert len(read_to(sub, 150)) == 150
    any_pair.replica = old_replica
    any_pair.fail_over()
    if grown:
        publish(bench, "c", 50, 300)
    assert poll_loss(sub) == (50, 149)
    assert lost_range(failure(pub.publish(b""))) == (50, 149)
    if not grown:
        publish(bench, "c", 50, 300)
    assert poll_loss(sub) == (50, 149)
    sub.skip_gap()
    assert read_to(sub, 300) == numbered("c", 50, 300)


# Restarts and other losses


def test_a_restart_without_loss_changes_nothing_for_clients(
    private_server: ServerFactory,
) -> None:
    with Bench(private_server("--appendonly", "yes", "--appendfsync", "always")) as bench:
        pub = bench.warm_publisher()
        sub = bench.subscriber(initial_offset="earliest")
        late = bench.subscriber(initial_offset="earliest")
        for number in range(1, 4):
            epoch = bench.meta("epoch")
            read_to(sub, number)
            bench.server.restart()
            assert pub.publish(b"%d" % number).result(10) == number
            assert bench.meta("epoch") != epoch
        assert read_to(sub, 4) == [b"3"]
        assert read_to(late, 4) == [b"first", b"1", b"2", b"3"]
        pub.close()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_restart_from_an_old_snapshot_is_noticed(
    private_server: ServerFactory, kind: str
) -> None:
    server = private_server("--save", "3600 1000000", kind="redis" if kind == "redis" else "valkey")
    with Bench(server) as bench:
        pub = bench.publisher()
        assert pub.publish_many(numbered("a", 0, 100)).result(5) == 0
        bench.direct.save()
        assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
        subs = [bench.subscriber(initial_offset="earliest") for _ in range(2)]
        for sub in subs:
            read_to(sub, 200)
        server.kill()
        server.start()
        assert poll_loss(subs[0]) == (100, 199)
        assert lost_range(failure(pub.publish(b"pending"))) == (100, 199)
        publish(bench, "b", 100, 300)
        assert [poll_loss(sub) for sub in subs] == [(100, 199)] * 2


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_flushing_the_server_is_noticed_by_all_clients(
    private_server: ServerFactory, kind: Any
) -> None:
    with Bench(private_server(kind=kind)) as bench:
        pub = bench.warm_publisher()
        sub = bench.subscriber(initial_offset="earliest")
        read_to(sub, 1)
        bench.direct.flushall()
        assert isinstance(failure(pub.publish(b"x")), meteor.StreamNotFound)
        with pytest.raises(meteor.StreamNotFound):
            sub.poll(0.05)
        with pytest.raises(meteor.StreamNotFound):
            bench.stream.describe()
        recreated = bench.client.stream(NAME, create=True)
        assert isinstance(failure(pub.publish(b"x")), meteor.LogTruncated)
        with pytest.raises(meteor.LogTruncated):
            sub.poll(0.05)
        with recreated.publisher() as fresh:
            fresh.publish(b"new").result(5)
        sub.skip_gap()
        assert sub.poll().values() == [b"new"]


def test_a_server_that_hides_its_replication_id_causes_a_warning_and_works(
    private_server: ServerFactory,
) -> None:
    server = private_server()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-info")
    with (
        warnings.catch_warnings(record=True) as warned,
        meteor.connect(f"redis://app:pw@{HOST}:{server.port}") as m,
    ):
        warnings.simplefilter("always")
        stream = m.stream(NAME, create=True)
        with stream.publisher() as pub, stream.subscriber() as sub:
            assert [pub.publish(b"%d" % n).result(5) for n in range(3)] == [0, 1, 2]
            assert poll_until(sub, lambda values: len(values) == 3) == [b"0", b"1", b"2"]
            with meteor.connect(server.url) as other, other.stream(NAME).publisher() as seeing:
                assert seeing.publish(b"3").result(5) == 3
            assert pub.publish(b"4").result(5) == 4
    dangers = [w.message for w in warned if isinstance(w.message, meteor.DataSafetyWarning)]
    assert any("hides its replication id" in str(danger) for danger in dangers)
