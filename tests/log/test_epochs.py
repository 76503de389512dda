"""Every client that had seen lost records learns of the loss; other clients are not affected.

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
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream, failure, poll_until
from tests.support.servers import HOST, binaries
from tests.support.waiting import eventually


@pytest.fixture(params=["valkey", "redis"])
def replicated(
    request: pytest.FixtureRequest, private_server: ServerFactory
) -> Iterator[ReplicatedStream]:
    with ExitStack() as stack:
        yield ReplicatedStream(stack, private_server(kind=request.param))


@pytest.fixture
def any_replicated(private_server: ServerFactory) -> Iterator[ReplicatedStream]:
    """A primary with a replica, on Redis if installed: its replicas sync a second faster."""
    with ExitStack() as stack:
        yield ReplicatedStream(
            stack, private_server(kind="redis" if "redis" in binaries() else "valkey")
        )


def numbered(branch: str, start: int, stop: int) -> list[bytes]:
    return [f"{branch}{n}".encode() for n in range(start, stop)]


def publish(proxied: ProxiedStream, branch: str, start: int, stop: int) -> None:
    """Publish records that name their branch and offset, with a new publisher."""
    with proxied.client.stream(NAME, create=False).publisher() as pub:
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


def test_a_publisher_that_was_ahead_learns_once_which_records_were_lost_and_continues(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    pub = proxied.publisher()
    assert pub.publish_many(numbered("a", 0, 100)).result(5) == 0
    replicated.lag()
    assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
    proxied.proxy.refuse()
    proxied.proxy.cut()
    pending = [pub.publish(b"pending"), pub.publish(b"pending too")]
    replicated.fail_over()
    assert {lost_range(failure(ack)) for ack in pending} == {(100, 199)}
    with pytest.raises(meteor.LogTruncated) as caught:
        pub.publish(b"not taken")
    assert lost_range(caught.value) == (100, 199)
    assert pub.publish(b"b100").result(5) == 100
    pub.close()
    assert proxied.values() == [*numbered("a", 0, 100), b"b100"]


@pytest.mark.parametrize("call", ["flush", "close", "publish_many"])
def test_the_next_call_of_any_kind_reports_the_loss(
    any_replicated: ReplicatedStream, call: str
) -> None:
    proxied = any_replicated.proxied
    pub = proxied.warm_publisher()
    any_replicated.lag()
    assert pub.publish(b"lost").result(5) == 1
    any_replicated.fail_over()
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
    any_replicated: ReplicatedStream, grown: int
) -> None:
    proxied = any_replicated.proxied
    pub = proxied.warm_publisher()
    any_replicated.lag()
    assert pub.publish_many(numbered("a", 1, 21)).result(5) == 1
    any_replicated.fail_over()
    publish(proxied, "b", 1, 2 + grown)
    assert lost_range(failure(pub.publish(b"pending"))) == (1, 20)
    with pytest.raises(meteor.LogTruncated):
        pub.flush()
    assert pub.publish(b"later").result(5) == 2 + grown


def test_a_publisher_unknown_to_the_new_server_learns_of_the_loss(
    any_replicated: ReplicatedStream,
) -> None:
    proxied = any_replicated.proxied
    publish(proxied, "a", 0, 10)
    any_replicated.lag()
    pub = proxied.publisher()
    assert pub.publish(b"a10").result(5) == 10
    assert pub.publish(b"a11").result(5) == 11
    any_replicated.fail_over()
    publish(proxied, "b", 10, 30)
    assert lost_range(failure(pub.publish(b"pending"))) == (10, 11)
    with pytest.raises(meteor.LogTruncated):
        pub.publish(b"not taken")
    assert pub.publish(b"b30").result(5) == 30


def test_a_publisher_in_a_new_producer_epoch_learns_of_the_loss(
    any_replicated: ReplicatedStream,
) -> None:
    proxied = any_replicated.proxied
    pub = proxied.warm_publisher(delivery_timeout=0.4)
    any_replicated.lag()
    assert pub.publish(b"a1").result(5) == 1
    proxied.proxy.stall()
    assert isinstance(failure(pub.publish(b"unknown")), meteor.OutcomeUnknown)
    any_replicated.fail_over()
    publish(proxied, "b", 1, 30)
    # In a new producer epoch, the server cannot see that the publisher's last record is gone.
    assert pub.publish(b"b30").result(5) == 30
    with pytest.raises(meteor.LogTruncated) as caught:
        pub.flush()
    assert lost_range(caught.value) == (1, 1)
    pub.close()


def test_a_failover_does_not_affect_a_publisher_that_was_not_ahead(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    pub = proxied.warm_publisher()
    other = proxied.publisher()
    replicated.lag()
    assert other.publish(b"a1").result(5) == 1
    replicated.fail_over()
    assert [pub.publish(b"b%d" % n).result(5) for n in (1, 2)] == [1, 2]
    pub.close()
    assert lost_range(failure(other.publish(b""))) == (1, 1)


def test_a_publisher_with_acks_resends_a_record_that_no_replica_had(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1)
    replicated.lag()
    ack = pub.publish(b"again")
    eventually(lambda: proxied.direct.info("clients")["blocked_clients"] == 1)
    assert proxied.next == 2
    replicated.fail_over()
    replicated.add_replica()
    assert ack.result(20) == 1
    assert pub.publish(b"later").result(10) == 2
    pub.close()
    assert proxied.values() == [b"first", b"again", b"later"]


# Subscribers


def test_only_subscribers_that_were_ahead_learn_of_the_loss(replicated: ReplicatedStream) -> None:
    proxied = replicated.proxied
    subs = [proxied.subscriber(initial_offset="earliest") for _ in range(5)]
    publish(proxied, "a", 0, 100)
    before, begun, grown, level, behind = subs
    for sub in subs:
        assert read_to(sub, 100) == numbered("a", 0, 100)
    behind.seek(50)
    replicated.lag()
    publish(proxied, "a", 100, 150)
    read_to(begun, 150)
    publish(proxied, "a", 150, 200)
    for sub in (before, grown):
        read_to(sub, 200)
    latest = proxied.subscriber()
    assert latest.position == 200
    replicated.fail_over()
    for _ in range(2):
        assert poll_loss(before) == (100, 199)
    assert level.poll(0.05).values() == []
    publish(proxied, "b", 100, 120)
    assert poll_loss(before) == (100, 199)
    assert poll_loss(begun) == (100, 149)
    publish(proxied, "b", 120, 300)
    for sub, last in ((before, 199), (begun, 149), (grown, 199), (latest, 199)):
        assert poll_loss(sub) == (100, last)
    for sub in (before, begun, grown, latest):
        sub.skip_gap()
        assert read_to(sub, 300) == numbered("b", 100, 300)
    assert (before.skipped, begun.skipped) == (100, 50)
    assert read_to(level, 300) == numbered("b", 100, 300)
    assert read_to(behind, 300) == numbered("a", 50, 100) + numbered("b", 100, 300)


@pytest.mark.parametrize("grown", [0, 5, 50])
def test_group_member_whose_term_is_unknown_to_the_new_server_learns_of_the_loss(
    any_replicated: ReplicatedStream, grown: int
) -> None:
    proxied = any_replicated.proxied
    publish(proxied, "a", 0, 10)
    sub = proxied.subscriber(group="g", initial_offset="earliest", lease_ttl=1.0)
    any_replicated.lag()  # the replica knows the group, but not the term that begins now
    publish(proxied, "a", 10, 30)
    assert read_to(sub, 30) == numbered("a", 0, 30)
    sub.confirm(20).result(5)
    any_replicated.fail_over()
    if grown:
        publish(proxied, "b", 10, 10 + grown)
    for _ in range(2):
        assert poll_loss(sub) == (10, 29)
    sub.skip_gap()
    publish(proxied, "b", 10 + grown, 70)
    assert read_to(sub, 70) == numbered("a", 0, 10) + numbered("b", 10, 70)


def test_skip_gap_before_the_new_branch_begins_moves_to_its_start(
    any_replicated: ReplicatedStream,
) -> None:
    proxied = any_replicated.proxied
    publish(proxied, "a", 0, 10)
    any_replicated.lag()
    publish(proxied, "a", 10, 20)
    sub = proxied.subscriber(initial_offset="earliest")
    read_to(sub, 20)
    any_replicated.fail_over()
    assert poll_loss(sub) == (10, 19)
    sub.skip_gap()
    assert (sub.position, sub.poll(0.05).values()) == (10, [])
    publish(proxied, "b", 10, 40)
    assert read_to(sub, 40) == numbered("b", 10, 40)


@pytest.mark.parametrize("grown", [False, True])
def test_records_lost_before_a_subscriber_read_them_are_not_a_gap(
    any_replicated: ReplicatedStream, grown: bool
) -> None:
    proxied = any_replicated.proxied
    publish(proxied, "a", 0, 1)
    any_replicated.lag()
    publish(proxied, "a", 1, 2)
    publish(proxied, "a", 2, 4)
    sub = proxied.subscriber(initial_offset="earliest")
    assert sub.poll(max_records=1).values() == [b"a0"]  # sub knows that the log ends at 4
    any_replicated.fail_over()
    if grown:
        publish(proxied, "b", 1, 3)
    assert poll_until(sub, lambda values: len(values) == 2 * grown) == numbered(
        "b", 1, 1 + 2 * grown
    )
    publish(proxied, "b", sub.position, 5)
    assert read_to(sub, 5) == numbered("b", 1 + 2 * grown, 5)


def test_records_fetched_before_the_loss_are_not_mixed_with_the_new_branch(
    any_replicated: ReplicatedStream,
) -> None:
    proxied = any_replicated.proxied
    publish(proxied, "a", 0, 10)
    any_replicated.lag()
    publish(proxied, "a", 10, 20)
    sub = proxied.subscriber(initial_offset="earliest")
    assert sub.poll(max_records=5).values() == numbered("a", 0, 5)  # sub has fetched all records
    any_replicated.fail_over()
    publish(proxied, "b", 10, 40)
    fetched = sub.poll(0.05).values()
    assert fetched == numbered("a", 5, 20)
    assert poll_loss(sub) == (10, 19)
    sub.skip_gap()
    assert read_to(sub, 40) == numbered("b", 10, 40)


# Several failovers


def test_a_second_failover_is_distinguished_from_the_first(
    any_replicated: ReplicatedStream,
) -> None:
    proxied = any_replicated.proxied
    subs = [proxied.subscriber(initial_offset="earliest") for _ in range(2)]
    asleep, awake = subs
    publish(proxied, "a", 0, 100)
    any_replicated.lag()
    pub = proxied.publisher()
    assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
    for sub in subs:
        read_to(sub, 200)
    any_replicated.fail_over()
    publish(proxied, "b", 100, 150)
    any_replicated.link, any_replicated.replica = any_replicated.add_replica()
    assert poll_loss(awake) == (100, 199)
    awake.skip_gap()
    any_replicated.lag()
    publish(proxied, "b", 150, 250)
    assert read_to(awake, 250) == numbered("b", 100, 250)
    any_replicated.fail_over()
    publish(proxied, "c", 150, 400)
    assert poll_loss(awake) == (150, 249)
    assert poll_loss(asleep) == (100, 199)
    assert lost_range(failure(pub.publish(b""))) == (100, 199)
    for sub, start in ((awake, 150), (asleep, 100)):
        sub.skip_gap()
        assert read_to(sub, 400) == [*numbered("b", start, 150), *numbered("c", 150, 400)]


@pytest.mark.parametrize("grown", [False, True])
def test_a_branch_unknown_to_the_new_server_is_detected(
    any_replicated: ReplicatedStream, grown: bool
) -> None:
    proxied = any_replicated.proxied
    sub = proxied.subscriber(initial_offset="earliest")
    pub = proxied.publisher()
    assert pub.publish_many(numbered("a", 0, 50)).result(5) == 0
    old_link, old_replica = any_replicated.add_replica()
    old_link.stall()
    assert pub.publish_many(numbered("a", 50, 100)).result(5) == 50
    any_replicated.lag()
    any_replicated.fail_over()
    assert pub.publish_many(numbered("b", 100, 150)).result(5) == 100
    assert len(read_to(sub, 150)) == 150
    any_replicated.replica = old_replica
    any_replicated.fail_over()
    if grown:
        publish(proxied, "c", 50, 300)
    assert poll_loss(sub) == (50, 149)
    assert lost_range(failure(pub.publish(b""))) == (50, 149)
    if not grown:
        publish(proxied, "c", 50, 300)
    assert poll_loss(sub) == (50, 149)
    sub.skip_gap()
    assert read_to(sub, 300) == numbered("c", 50, 300)


# Restarts, and other causes of loss


def test_a_restart_without_loss_changes_nothing_for_clients(
    private_server: ServerFactory,
) -> None:
    with ProxiedStream(private_server("--appendonly", "yes", "--appendfsync", "always")) as proxied:
        pub = proxied.warm_publisher()
        sub = proxied.subscriber(initial_offset="earliest")
        late = proxied.subscriber(initial_offset="earliest")
        for number in range(1, 4):
            epoch = proxied.meta("epoch")
            read_to(sub, number)
            proxied.server.restart()
            assert pub.publish(b"%d" % number).result(10) == number
            assert proxied.meta("epoch") != epoch
        assert read_to(sub, 4) == [b"3"]
        assert read_to(late, 4) == [b"first", b"1", b"2", b"3"]
        pub.close()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_a_restart_from_an_old_snapshot_is_detected(
    private_server: ServerFactory, kind: str
) -> None:
    server = private_server("--save", "3600 1000000", kind="redis" if kind == "redis" else "valkey")
    with ProxiedStream(server) as proxied:
        pub = proxied.publisher()
        assert pub.publish_many(numbered("a", 0, 100)).result(5) == 0
        proxied.direct.save()
        assert pub.publish_many(numbered("a", 100, 200)).result(5) == 100
        subs = [proxied.subscriber(initial_offset="earliest") for _ in range(2)]
        for sub in subs:
            read_to(sub, 200)
        server.kill()
        server.start()
        assert poll_loss(subs[0]) == (100, 199)
        assert lost_range(failure(pub.publish(b"pending"))) == (100, 199)
        publish(proxied, "b", 100, 300)
        assert [poll_loss(sub) for sub in subs] == [(100, 199)] * 2


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_all_clients_detect_that_the_server_was_flushed(
    private_server: ServerFactory, kind: Any
) -> None:
    with ProxiedStream(private_server(kind=kind)) as proxied:
        pub = proxied.warm_publisher()
        sub = proxied.subscriber(initial_offset="earliest")
        read_to(sub, 1)
        proxied.direct.flushall()
        assert isinstance(failure(pub.publish(b"x")), meteor.StreamNotFound)
        with pytest.raises(meteor.StreamNotFound):
            sub.poll(0.05)
        with pytest.raises(meteor.StreamNotFound):
            proxied.stream.describe()
        recreated = proxied.client.stream(NAME, create=True)
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
