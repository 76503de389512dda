"""Under any fault, every acknowledged record is in the log once and in order.

Any other record fails, and its error says whether it is not in the log or its outcome is unknown.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Literal

import pytest

import meteor_py as meteor
from meteor_py.records.config import OFFSET_MAX
from meteor_py.redis import keys
from tests.conftest import ServerFactory
from tests.support.proxied_stream import NAME, ProxiedStream, failure, poll_until
from tests.support.proxied_stream import private as private
from tests.support.proxied_stream import proxied as proxied
from tests.support.servers import Server
from tests.support.waiting import eventually

FULL = [b"x"] * 4096


Kind = Literal["valkey", "redis"]


def publish_bursts(pub: meteor.Publisher, rng: Random, records: int) -> dict[bytes, int]:
    """Publish numbered records in random bursts; return the acknowledged offset of each value."""
    places: list[tuple[int, Any]] = []
    number = 0
    while number < records:
        size = min(rng.choice([1, 1, 2, 10, 100]), records - number)
        if size == 1:
            places.append((number, pub.publish(b"%d" % number)))
        else:
            values = [b"%d" % n for n in range(number, number + size)]
            places.append((number, pub.publish_many(values)))
        number += size
        if rng.random() < 0.3:
            places[-1][1].result(30)
    pub.flush(30)
    offsets: dict[bytes, int] = {}
    for first, ack in places:
        span = [ack.result()] if isinstance(ack, meteor.Ack) else [o for r in ack.ranges for o in r]
        offsets |= {b"%d" % (first + n): offset for n, offset in enumerate(span)}
    return offsets


@contextlib.contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` repeatedly in another thread during the block."""
    stop = threading.Event()
    errors: list[Exception] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors


# Connections that are cut


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_every_record_is_in_the_log_once_and_in_order_if_replies_are_lost_repeatedly(
    private_server: ServerFactory, rng: Random, kind: Kind
) -> None:
    # With this capacity, a frame holds at most 20 records, so that several are in flight.
    with ProxiedStream(private_server(kind=kind), capacity=20) as small:
        pub = small.publisher()
        small.stream.configure(capacity=1_000_000)
        faults = ("lost_reply", "torn_reply", "late_reply", "lost_request")
        small.proxy.chaos(rng, 0.3, faults)  # type: ignore[arg-type]
        offsets = publish_bursts(pub, rng, 4000)
        assert small.proxy.counters.cuts > 10
        assert small.values() == [b"%d" % n for n in range(4000)]
        assert offsets == {b"%d" % n: n for n in range(4000)}


def test_a_cut_at_any_batch_in_the_window_neither_loses_nor_duplicates_records(
    server: Server, url: str, rng: Random
) -> None:
    with ProxiedStream(server, capacity=5) as proxied:
        pub = proxied.warm_publisher()
        proxied.stream.configure(capacity=1_000_000)
        count = 1
        for which in range(1, 6):
            for cut in (proxied.proxy.cut_after_request, proxied.proxy.cut_before_request):
                values = [b"%d" % n for n in range(count + 1, count + 31)]
                ahead, many = proxied.queue_behind_one(pub, [values])
                cut(which, match=b"EVAL")
                proxied.proxy.resume()
                assert (ahead.result(10), many.result(10)) == (count, count + 1)
                assert many.ranges == [range(count + 1, count + 31)]
                count += 31
        assert proxied.proxy.counters.cuts == 10
        numbers = [n for n in range(1, count) if n % 31 != 1]
        assert [v for v in proxied.values() if v.isdigit()] == [b"%d" % n for n in numbers]


def test_an_interrupted_connection_fails_the_next_call_instead_of_reconnecting(
    proxied: ProxiedStream,
) -> None:
    # If the next call reconnected silently, replies could be assigned to the wrong batch.
    link = proxied.through._connector.open_connection(None)
    assert link.call("PING") == b"PONG"
    link.interrupt()
    with pytest.raises(meteor.ConnectionFailed):
        link.call("PING")
    assert link.call("PING") == b"PONG"
    link.close()


def test_records_arrive_once_and_in_order_after_several_refused_reconnects(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.refuse()
    proxied.proxy.cut_after_request(match=b"EVAL")
    acks = [pub.publish(b"%d" % n) for n in range(100)]
    eventually(lambda: proxied.proxy.counters.refused >= 3)
    proxied.proxy.accept()
    assert [ack.result(10) for ack in acks] == list(range(1, 101))
    assert proxied.values()[1:] == [b"%d" % n for n in range(100)]


# Lost producer state and flushed scripts


def test_a_publisher_without_batches_in_doubt_continues_if_the_server_forgets_it(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    for offset in range(1, 6):
        proxied.forget_producers()
        assert pub.publish(b"%d" % offset).result(5) == offset
    proxied.forget_producers()
    assert pub.publish_many(FULL * 6).result(5) == 6
    pub.close()
    assert proxied.next == 6 + 6 * 4096


def test_a_publisher_forgotten_by_the_server_fails_only_the_batches_in_doubt(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    ahead, sent = proxied.queue_behind_one(pub, [FULL * 5])
    unsent = pub.publish_many(FULL)
    proxied.direct.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
    requests = proxied.proxy.counters.requests
    proxied.proxy.resume()
    assert ahead.result(5) == 1
    eventually(lambda: proxied.proxy.counters.requests == requests + 5)
    proxied.proxy.stall("replies")
    proxied.direct.execute_command("CLIENT", "UNPAUSE")
    proxied.wait_for_next(2 + 5 * 4096)
    proxied.proxy.refuse()
    proxied.proxy.cut()
    proxied.forget_producers()
    proxied.proxy.heal()
    assert isinstance(failure(sent), meteor.OutcomeUnknown)
    assert not sent.ranges
    assert unsent.result(5) == 2 + 5 * 4096
    assert pub.publish(b"last").result(5) == proxied.next - 1


def test_a_script_that_is_flushed_repeatedly_is_sent_again(
    proxied: ProxiedStream, rng: Random
) -> None:
    pub = proxied.publisher()
    with meanwhile(proxied.direct.script_flush):
        offsets = publish_bursts(pub, rng, 3000)
    assert proxied.values() == [b"%d" % n for n in range(3000)]
    assert offsets == {b"%d" % n: n for n in range(3000)}


def test_a_batch_sent_after_a_refused_retry_is_not_appended_again(
    private: ProxiedStream,
) -> None:
    pub = private.warm_publisher()
    ahead, behind = private.queue_behind_one(pub, [FULL])
    private.direct.execute_command("ACL", "SETUSER", "default", "-evalsha")
    private.proxy.chunk(1000, 0.02)  # the large batch takes half a second to arrive
    private.proxy.cut()
    private.proxy.resume()
    eventually(lambda: "errorstat_NOPERM" in private.direct.info("errorstats"))
    private.direct.execute_command("ACL", "SETUSER", "default", "+evalsha")
    for ack in (ahead, behind):  # both are in the log, but the publisher cannot know that
        assert isinstance(failure(ack), meteor.OutcomeUnknown)
    private.proxy.heal()
    assert pub.publish(b"last").result(5) == 2 + 4096


# Permanent refusals


def test_only_a_permanently_refused_batch_fails_and_later_batches_follow_in_a_new_epoch(
    server: Server, url: str
) -> None:
    with ProxiedStream(server, capacity=4) as proxied:
        pub = proxied.warm_publisher()
        proxied.set_meta(next=OFFSET_MAX - 6)  # the last valid offset is OFFSET_MAX - 1
        proxied.direct.delete(keys.log(NAME))
        ahead, fits, refused = proxied.queue_behind_one(pub, [[b"a"] * 4, [b"b"] * 4])
        behind = pub.publish(b"c")
        proxied.proxy.resume()
        assert (ahead.result(5), fits.result(5)) == (OFFSET_MAX - 6, OFFSET_MAX - 5)
        error = failure(refused)
        assert isinstance(error, meteor.ServerRefused)
        assert "used up its offsets" in str(error)
        assert behind.result(5) == OFFSET_MAX - 1
        producer = proxied.producer()
        assert (producer[b"epoch"], producer[b"last"]) == (b"1", b"0")
        assert isinstance(failure(pub.publish(b"d")), meteor.ServerRefused)
        assert proxied.values() == [b"a"] * 4 + [b"c"]


def test_a_publisher_without_permission_fails_until_the_permission_is_granted(
    private: ProxiedStream,
) -> None:
    pub = private.warm_publisher()
    private.direct.execute_command("ACL", "SETUSER", "default", "-xadd")
    acks: list[meteor.Ack | meteor.ManyAck] = [pub.publish(b"x"), pub.publish_many(FULL * 2)]
    for ack in acks:
        error = failure(ack)
        assert isinstance(error, meteor.ServerRefused)
        assert not error.retriable
    private.direct.execute_command("ACL", "SETUSER", "default", "+xadd")
    assert pub.publish(b"again").result(5) == 1
    assert private.values() == [b"first", b"again"]


# Deadlines


def test_at_the_deadline_sent_records_have_unknown_outcomes_and_unsent_records_fail(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.4)
    proxied.proxy.stall("requests")
    sent = pub.publish(b"sent")
    eventually(lambda: pub._sender.window.sent)
    unsent = pub.publish(b"unsent")
    begun = time.monotonic()
    assert isinstance(failure(sent), meteor.OutcomeUnknown)
    error = failure(unsent)
    assert isinstance(error, meteor.ConnectionFailed)
    assert str(proxied.proxy.port) in str(error)
    assert time.monotonic() - begun < 1.5
    proxied.proxy.resume()
    assert pub.publish(b"later").result(5) == proxied.next - 1
    assert proxied.values() in ([b"first", b"later"], [b"first", b"sent", b"later"])


def test_a_batch_that_arrives_after_its_deadline_is_fenced_off(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.3)
    proxied.proxy.delay(1.0, "requests")
    late = pub.publish(b"late")
    assert isinstance(failure(late), meteor.OutcomeUnknown)
    proxied.proxy.delay(0)
    assert pub.publish(b"next").result(5) == 1
    calls = proxied.direct.info("commandstats")["cmdstat_evalsha"]["calls"]
    eventually(lambda: proxied.direct.info("commandstats")["cmdstat_evalsha"]["calls"] > calls)
    assert pub.publish(b"last").result(5) == 2
    assert proxied.values() == [b"first", b"next", b"last"]


def test_a_brief_server_pause_loses_no_record(private: ProxiedStream) -> None:
    pub = private.warm_publisher()
    sub = private.subscriber(initial_offset="earliest")
    private.server.pause()
    acks = [pub.publish(b"%d" % n) for n in range(1000)]
    with pytest.raises(TimeoutError):
        acks[-1].result(0.3)
    private.server.resume()
    assert [ack.result(10) for ack in acks] == list(range(1, 1001))
    expected = [b"first", *(b"%d" % n for n in range(1000))]
    assert poll_until(sub, lambda values: len(values) > 1000) == expected


def test_a_pause_longer_than_the_clients_timeout_duplicates_nothing(
    private: ProxiedStream,
) -> None:
    with meteor.connect(private.proxy.url, timeout=0.2) as impatient:
        pub = impatient.stream(NAME, create=False).publisher()
        pub.publish(b"first").result(10)
        private.server.pause()
        connections = private.proxy.counters.connections
        acks = [pub.publish(b"%d" % n) for n in range(1000)]
        eventually(lambda: private.proxy.counters.connections >= connections + 3)
        private.server.resume()
        assert [ack.result(10) for ack in acks] == list(range(1, 1001))
        assert private.next == 1001


@pytest.mark.slow
def test_publisher_waits_for_a_slow_reply_as_long_as_its_client_does(
    proxied: ProxiedStream,
) -> None:
    with meteor.connect(proxied.proxy.url, timeout=20) as patient:
        pub = patient.stream(NAME, create=False).publisher()
        pub.publish(b"first").result(10)
        connections = proxied.proxy.counters.connections
        proxied.proxy.delay(5.5, "replies")  # longer than the default timeout
        assert pub.publish(bytes(100_000)).result(15) == 1
        assert proxied.proxy.counters.connections == connections, "the publisher reconnected"
        proxied.proxy.delay(0)


def test_record_fails_at_its_delivery_timeout_even_if_the_clients_timeout_is_longer(
    proxied: ProxiedStream,
) -> None:
    with meteor.connect(proxied.proxy.url, timeout=20) as patient:
        pub = patient.stream(NAME, create=False).publisher(delivery_timeout=0.4)
        pub.publish(b"first").result(10)
        proxied.proxy.stall("replies")
        assert isinstance(failure(pub.publish(b"x"), timeout=5), meteor.OutcomeUnknown)
        proxied.proxy.resume()
