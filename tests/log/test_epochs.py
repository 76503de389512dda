"""A server that lost records is noticed by everybody who knew them, and by nobody else.

A replica that lags is promoted, its primary killed, and the clients, who go through a proxy, find
the replica in its place: the records that only the primary had are gone, and their offsets are
given out again. Each subscriber and publisher that was ahead is told exactly what was lost,
whenever it comes; the others notice nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, Bench, Pair, failure, poll_until
from tests.support.servers import HOST
from tests.support.waiting import eventually


@pytest.fixture(params=["valkey", "redis"])
def pair(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, private_server(kind=request.param))


@pytest.fixture
def valkeys(private_server: ServerFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, private_server())


def numbered(branch: str, start: int, stop: int) -> list[bytes]:
    return [f"{branch}{n}".encode() for n in range(start, stop)]


def publish(bench: Bench, branch: str, start: int, stop: int) -> None:
    """Publish records that name their branch and offset, by a publisher of their own."""
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


def test_a_publisher_that_was_ahead_is_told_once_what_was_lost_and_goes_on(pair: Pair) -> None:
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
def test_the_next_call_raises_the_loss_whatever_it_is(valkeys: Pair, call: str) -> None:
    bench = valkeys.bench
    pub = bench.warm_publisher()
    valkeys.lag()
    assert pub.publish(b"lost").result(5) == 1
    valkeys.fail_over()
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
def test_a_publisher_is_told_also_when_another_has_begun_the_new_branch(
    valkeys: Pair, grown: int
) -> None:
    bench = valkeys.bench
    pub = bench.warm_publisher()
    valkeys.lag()
    assert pub.publish_many(numbered("a", 1, 21)).result(5) == 1
    valkeys.fail_over()
    publish(bench, "b", 1, 2 + grown)
    assert lost_range(failure(pub.publish(b"pending"))) == (1, 20)
    with pytest.raises(meteor.LogTruncated):
        pub.flush()
    assert pub.publish(b"later").result(5) == 2 + grown


def test_a_publisher_unknown_to_the_new_server_is_told_too(valkeys: Pair) -> None:
    bench = valkeys.bench
    publish(bench, "a", 0, 10)
    valkeys.lag()
    pub = bench.publisher()
    assert pub.publish(b"a10").result(5) == 10
    assert pub.publish(b"a11").result(5) == 11
    valkeys.fail_over()
    publish(bench, "b", 10, 30)
    assert lost_range(failure(pub.publish(b"pending"))) == (10, 11)
    with pytest.raises(meteor.LogTruncated):
        pub.publish(b"not taken")
    assert pub.publish(b"b30").result(5) == 30


def test_a_publisher_in_a_new_producer_epoch_is_told_too(valkeys: Pair) -> None:
    bench = valkeys.bench
    pub = bench.warm_publisher(delivery_timeout=0.4)
    valkeys.lag()
    assert pub.publish(b"a1").result(5) == 1
    bench.proxy.stall()
    assert isinstance(failure(pub.publish(b"unknown")), meteor.OutcomeUnknown)
    valkeys.fail_over()
    publish(bench, "b", 1, 30)
    assert pub.publish(b"b30").result(5) == 30  # nothing of its own tells it from others' records
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


def test_a_record_that_no_replica_had_is_sent_again_if_it_has_to_be_on_one(pair: Pair) -> None:
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


def test_each_subscriber_that_was_ahead_is_told_whenever_it_comes_and_no_other(pair: Pair) -> None:
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


def test_a_subscriber_told_before_the_new_branch_began_skips_to_where_it_begins(
    valkeys: Pair,
) -> None:
    bench = valkeys.bench
    publish(bench, "a", 0, 10)
    valkeys.lag()
    publish(bench, "a", 10, 20)
    sub = bench.subscriber(initial_offset="earliest")
    read_to(sub, 20)
    valkeys.fail_over()
    assert poll_loss(sub) == (10, 19)
    sub.skip_gap()
    assert (sub.position, sub.poll(0.05).values()) == (10, [])
    publish(bench, "b", 10, 40)
    assert read_to(sub, 40) == numbered("b", 10, 40)


def test_what_a_subscriber_had_fetched_but_not_handed_out_is_not_mixed_with_the_new_branch(
    valkeys: Pair,
) -> None:
    bench = valkeys.bench
    publish(bench, "a", 0, 10)
    valkeys.lag()
    publish(bench, "a", 10, 20)
    sub = bench.subscriber(initial_offset="earliest")
    assert sub.poll(max_records=5).values() == numbered("a", 0, 5)  # it has fetched all
    valkeys.fail_over()
    publish(bench, "b", 10, 40)
    fetched = sub.poll(0.05).values()
    assert fetched == numbered("a", 5, 20)
    assert poll_loss(sub) == (10, 19)
    sub.skip_gap()
    assert read_to(sub, 40) == numbered("b", 10, 40)


# Several fail-overs


def test_a_second_fail_over_is_told_apart_from_the_first(valkeys: Pair) -> None:
    bench = valkeys.bench
    subs = [bench.subscriber(initial_offset="earliest") for _ in range(2)]
    asleep, awake = subs
    publish(bench, "a", 0, 100)
    valkeys.lag()
    pub = bench.publisher()
    assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
    for sub in subs:
        read_to(sub, 200)
    valkeys.fail_over()
    publish(bench, "b", 100, 150)
    valkeys.link, valkeys.replica = valkeys.add_replica()
    assert poll_loss(awake) == (100, 199)
    awake.skip_gap()
    valkeys.lag()
    publish(bench, "b", 150, 250)
    assert read_to(awake, 250) == numbered("b", 100, 250)
    valkeys.fail_over()
    publish(bench, "c", 150, 400)
    assert poll_loss(awake) == (150, 249)
    assert poll_loss(asleep) == (100, 199)
    assert lost_range(failure(pub.publish(b""))) == (100, 199)
    for sub, start in ((awake, 150), (asleep, 100)):
        sub.skip_gap()
        assert read_to(sub, 400) == [*numbered("b", start, 150), *numbered("c", 150, 400)]


@pytest.mark.parametrize("grown", [False, True])
def test_a_branch_of_which_the_new_server_never_heard_is_noticed(
    valkeys: Pair, grown: bool
) -> None:
    bench = valkeys.bench
    sub = bench.subscriber(initial_offset="earliest")
    pub = bench.publisher()
    assert pub.publish_many(numbered("a", 0, 50)).result(5) == 0
    old_link, old_replica = valkeys.add_replica()
    old_link.stall()
    assert pub.publish_many(numbered("a", 50, 100)).result(5) == 50
    valkeys.lag()
    valkeys.fail_over()
    assert pub.publish_many(numbered("b", 100, 150)).result(5) == 100
    assert len(read_to(sub, 150)) == 150
    valkeys.replica = old_replica
    valkeys.fail_over()
    if grown:
        publish(bench, "c", 50, 300)
    assert poll_loss(sub) == (50, 149)
    assert lost_range(failure(pub.publish(b""))) == (50, 149)
    if not grown:
        publish(bench, "c", 50, 300)
    assert poll_loss(sub) == (50, 149)
    sub.skip_gap()
    assert read_to(sub, 300) == numbered("c", 50, 300)


# Restarts and worse


def test_a_restart_without_loss_changes_nothing_for_anybody(
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


def test_flushing_the_server_is_noticed_by_everybody(pair: Pair) -> None:
    bench = pair.bench
    pub = bench.warm_publisher()
    sub = bench.subscriber(initial_offset="earliest")
    read_to(sub, 1)
    bench.direct.flushall()
    assert isinstance(failure(pub.publish(b"x")), meteor.StreamNotFound)
    with pytest.raises(meteor.StreamNotFound):
        sub.poll()
    with pytest.raises(meteor.StreamNotFound):
        bench.stream.describe()
    anew = bench.client.stream(NAME)
    assert isinstance(failure(pub.publish(b"x")), meteor.LogTruncated)
    with pytest.raises(meteor.LogTruncated):
        sub.poll()
    with anew.publisher() as fresh:
        fresh.publish(b"new").result(5)
    sub.skip_gap()
    assert sub.poll().values() == [b"new"]


# Servers that hide their history, or have none of their own


def test_a_server_that_hides_its_replication_id_is_warned_of_and_works(
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
        stream = m.stream(NAME)
        with stream.publisher() as pub, stream.subscriber() as sub:
            assert [pub.publish(b"%d" % n).result(5) for n in range(3)] == [0, 1, 2]
            assert poll_until(sub, lambda values: len(values) == 3) == [b"0", b"1", b"2"]
            with meteor.connect(server.url) as other, other.stream(NAME).publisher() as seeing:
                assert seeing.publish(b"3").result(5) == 3
            assert pub.publish(b"4").result(5) == 4
    dangers = [w.message for w in warned if isinstance(w.message, meteor.DataSafetyWarning)]
    assert any("hides its replication id" in str(danger) for danger in dangers)


def test_publishing_to_a_replica_is_a_clear_error(pair: Pair) -> None:
    pair.bench.warm_publisher()
    pair.replica.wait_in_sync()
    with meteor.connect(pair.replica.url) as m:
        with pytest.raises(meteor.ConnectionFailed, match="replica"):
            m.stream("another")
        stream = m.stream(NAME, create=False)
        pub = stream.publisher(delivery_timeout=0.3)
        error = failure(pub.publish(b"x"))
        pub.close()
        assert isinstance(error, meteor.ConnectionFailed)
        assert "is a replica and takes no writes" in str(error)
        assert str(pair.replica.port) in str(error)
        with stream.subscriber(initial_offset="earliest") as sub:
            assert sub.poll().values() == [b"first"]
