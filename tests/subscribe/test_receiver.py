"""Receivers pass on every record in order, keep their lease, and never end silently."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import meteor_py as meteor
from tests.conftest import ServerFactory
from tests.support.readers import background, fill
from tests.support.receivers import (
    Gate,
    Handler,
    confirmed,
    dies,
    fails_for,
    is_free,
    next_of,
    owner,
    right_values,
)
from tests.support.waiting import eventually

#: Settings for a member that soon loses its lease to another member unless it polls.
QUICK: dict[str, Any] = {"group": "g", "lease_ttl": 0.6, "max_poll_interval": 0.6}


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as client:
        yield client.stream("s", create=True)


# Records


@pytest.mark.parametrize("group", [None, "g"])
def test_receiver_gets_every_record_in_order(any_url: str, group: str | None) -> None:
    with meteor.connect(any_url) as client:
        stream = client.stream("s", create=True)
        fill(stream, 1, 50, 1)
        handler = Handler(right_values)
        with stream.subscriber(group=group, initial_offset="earliest") as sub:
            receiver = sub.attach_receiver(handler)
            handler.wait_for(*range(52))
            fill(stream, 1, 100)  # published while the receiver waits
            handler.wait_for(*range(153))
            assert sub.position == 153
        assert not receiver.alive
        assert receiver.error is None
        assert receiver.failed == 0


def test_receiver_decodes_values_with_the_codec(url: str) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", codec="json")
        with stream.publisher() as pub:
            pub.publish({"a": [1]}, key=b"k", headers={"h": b"1"})
        found: list[meteor.Record] = []
        with stream.subscriber(initial_offset="earliest") as sub:
            sub.attach_receiver(found.append)
            eventually(lambda: found)
        assert (found[0].value, found[0].key, found[0].headers) == ({"a": [1]}, b"k", {"h": b"1"})


# Confirms


def test_confirm_in_a_handler_confirms_the_current_record(stream: meteor.Stream) -> None:
    fill(stream, 10)
    gate = Gate(4)
    with stream.subscriber(group="g") as sub:

        def work(record: meteor.Record) -> None:
            gate(record)
            assert sub.confirm().result(20) == record.offset + 1

        sub.attach_receiver(Handler(work))
        with gate.hold():
            assert confirmed(stream) == sub.confirmed == 4
        eventually(lambda: confirmed(stream) == 10)


def test_auto_confirm_does_not_confirm_the_current_record(stream: meteor.Stream) -> None:
    fill(stream, 10)
    gate = Gate(4)
    with stream.subscriber(group="g", auto_confirm=True) as sub:
        sub.attach_receiver(Handler(gate))
        with gate.hold():
            eventually(lambda: confirmed(stream) == 4)
            fill(stream, 1)  # leaves time for a wrong confirm to be sent
            assert confirmed(stream) == 4
        eventually(lambda: confirmed(stream) == 11)


_DIES = """
import os, signal, sys
import meteor_py as meteor
from meteor_py.testing import eventually

stream = meteor.connect(sys.argv[1]).stream("s", create=True)
sub = stream.subscriber(group="g", lease_ttl=0.5, auto_confirm=sys.argv[2] == "auto")

def handle(record):
    if record.offset == 7:
        if sys.argv[2] == "auto":
            eventually(lambda: sub.confirmed == 7)
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "manual":
        sub.confirm().result()

sub.attach_receiver(handle).join(60)
"""


@pytest.mark.parametrize("how", ["manual", "auto", "never"])
def test_crash_in_a_batch_leaves_the_rest_to_the_next_member(
    url: str, stream: meteor.Stream, how: str
) -> None:
    fill(stream, 10)
    dies(_DIES, url, how)
    start = 0 if how == "never" else 7
    assert confirmed(stream) == start
    assert next_of(stream) == list(range(start, 10))


# Closing


@pytest.mark.parametrize("auto", [False, True])
def test_close_waits_only_for_the_current_record(stream: meteor.Stream, auto: bool) -> None:
    fill(stream, 10)
    gate = Gate(2)
    handler = Handler(gate)
    sub = stream.subscriber(group="g", lease_ttl=30, auto_confirm=auto)
    receiver = sub.attach_receiver(handler)
    with gate.hold():
        closing = threading.Thread(target=sub.close, args=(20,))
        closing.start()
        closing.join(0.2)
        assert closing.is_alive(), "close() did not wait for the handler"
    closing.join(20)
    assert not closing.is_alive()
    assert not receiver.alive
    assert handler.done == [0, 1, 2]
    assert is_free(stream)
    assert confirmed(stream) == (3 if auto else 0)


def test_closing_twice_is_harmless(stream: meteor.Stream) -> None:
    with stream.subscriber(group="g") as sub:
        receiver = sub.attach_receiver(Handler())
        receiver.close()
        receiver.close()
        assert not receiver.alive
        sub.close()
        sub.close()
        receiver.close()


@pytest.mark.parametrize("group", [None, "g"])
def test_handler_can_close_the_subscriber(stream: meteor.Stream, group: str | None) -> None:
    fill(stream, 10)
    sub = stream.subscriber(group=group, initial_offset="earliest", lease_ttl=30)

    def work(record: meteor.Record) -> None:
        if record.offset == 3:
            if group is not None:
                sub.confirm()
            sub.close()
            assert sub.closed

    handler = Handler(work)
    receiver = sub.attach_receiver(handler)
    assert receiver.join(20)
    assert receiver.error is None
    assert handler.done == [0, 1, 2, 3]
    sub.close()
    if group is not None:
        assert is_free(stream)
        assert next_of(stream) == list(range(4, 10))


def test_handler_can_close_the_receiver_and_its_record_counts_as_done(
    stream: meteor.Stream,
) -> None:
    fill(stream, 10)
    attached = threading.Event()
    with stream.subscriber(group="g", auto_confirm=True) as sub:

        def work(record: meteor.Record) -> None:
            if record.offset == 3 and attached.wait(20):
                receiver.close()

        handler = Handler(work)
        receiver = sub.attach_receiver(handler)
        attached.set()
        assert receiver.join(20)
    assert handler.done == [0, 1, 2, 3]
    assert confirmed(stream) == 4


def test_hanging_handler_does_not_keep_the_lease_or_connections(stream: meteor.Stream) -> None:
    fill(stream, 10)
    plain = stream.client.redis
    connections = len(plain.client_list())
    gate = Gate(2)
    handler = Handler(gate)
    sub = stream.subscriber(group="g", lease_ttl=60, auto_confirm=True)
    receiver = sub.attach_receiver(handler)
    with gate.hold():
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="did not return"):
            sub.close(0.5)
        assert 0.5 <= time.monotonic() - started < 10
        assert is_free(stream)
        assert confirmed(stream) == 2
        eventually(lambda: len(plain.client_list()) == connections)
        assert next_of(stream) == list(range(2, 10))
    assert receiver.join(20)
    assert handler.done == [0, 1, 2]
    assert len(plain.client_list()) == connections
    sub.close()


@pytest.mark.parametrize("state", ["deactivated", "waiting", "reading", "ungrouped"])
def test_close_returns_at_once_without_a_current_record(stream: meteor.Stream, state: str) -> None:
    group = None if state == "ungrouped" else "g"
    with stream.subscriber(group="g", lease_ttl=60) as rival:
        if state == "waiting":
            rival.poll(timeout=0)
        sub = stream.subscriber(group=group, lease_ttl=60)
        if state == "deactivated":
            sub.deactivate()
        receiver = sub.attach_receiver(Handler())
        if state == "reading":
            eventually(lambda: owner(stream) == sub.member)
        started = time.monotonic()
        sub.close()
        assert time.monotonic() - started < 4
        assert not receiver.alive


def test_closing_a_client_closes_all_receivers_and_raises_one_error(url: str) -> None:
    client = meteor.connect(url)
    stream = client.stream("s", create=True)
    fill(stream, 5)
    receivers = []
    for number in range(6):
        sub = stream.subscriber(group=f"g{number}", lease_ttl=60)
        receivers.append(sub.attach_receiver(Handler(fails_for(number))))
    eventually(lambda: [receiver.alive for receiver in receivers].count(True) == 1)
    with pytest.raises(ValueError, match=r"no \d"):
        client.close()
    assert not any(receiver.alive for receiver in receivers)
    with meteor.connect(url) as other:
        assert all(is_free(other.stream("s", create=True), f"g{number}") for number in range(6))


def test_error_in_the_block_is_not_hidden_by_the_receivers_error(url: str) -> None:
    with pytest.raises(KeyError) as caught, meteor.connect(url) as client:  # noqa: PT012
        stream = client.stream("s", create=True)
        fill(stream, 1)
        receiver = stream.subscriber(group="g").attach_receiver(fails_for(0))
        assert receiver.join(20)
        raise KeyError("mine")
    assert caught.value.__notes__ == ["Closing the client also failed: no 0"]


# Invalid calls


def test_subscriber_allows_only_one_reader_at_a_time(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        sub.attach_receiver(Handler())
        for refused in (
            lambda: sub.attach_receiver(Handler()),
            lambda: sub.poll(timeout=0),
            lambda: next(iter(sub)),
            lambda: sub.seek(0),
            sub.skip_gap,
        ):
            with pytest.raises(meteor.MeteorError, match="receiver"):
                refused()
        assert sub.lag == sub.position == 0
    with pytest.raises(meteor.MeteorError, match="closed"):
        sub.attach_receiver(Handler())


def test_invalid_arguments_are_refused_and_attach_nothing(stream: meteor.Stream) -> None:
    fill(stream, 3)
    handler: Any = Handler()
    with stream.subscriber(initial_offset="earliest") as sub:
        wrong: Any
        for wrong in ("give up", 7, None):
            with pytest.raises((ValueError, TypeError), match="on_error"):
                sub.attach_receiver(handler, on_error=wrong)
        for wrong in (0, -1, 1.5, True):
            with pytest.raises((ValueError, TypeError), match="tries"):
                sub.attach_receiver(handler, tries=wrong)
        with pytest.raises(TypeError, match="handler"):
            sub.attach_receiver(None)  # type: ignore[arg-type]
        assert len(sub.poll(timeout=0, max_records=1)) == 1  # sub still has no receiver
        sub.attach_receiver(handler)
        handler.wait_for(1, 2)


# The lease


def test_receiver_keeps_the_lease_while_it_handles_many_quick_records(
    stream: meteor.Stream,
) -> None:
    fill(stream, 12)
    pause = threading.Event()
    handler = Handler(lambda record: pause.wait(0.1))  # twice max_poll_interval in total
    with stream.subscriber(**QUICK) as sub, stream.subscriber(**QUICK) as rival:
        sub.attach_receiver(handler)
        term = eventually(lambda: sub.term)
        waiting = Handler()
        rival.attach_receiver(waiting)
        handler.wait_for(*range(12))
        assert sub.term == term
        assert waiting.given == []


def test_receiver_with_a_hung_handler_loses_the_lease_and_waits_to_regain_it(
    stream: meteor.Stream,
) -> None:
    fill(stream, 6)
    gate = Gate(2)
    hung, healthy = Handler(gate), Handler()
    with stream.subscriber(**QUICK, auto_confirm=True) as sub:
        receiver = sub.attach_receiver(hung)
        with stream.subscriber(group="g", auto_confirm=True) as rival:
            with gate.hold():
                rival.attach_receiver(healthy)
                healthy.wait_for(2, 3, 4, 5)
            eventually(lambda: hung.done == [0, 1, 2])
            fill(stream, 2)
            healthy.wait_for(2, 3, 4, 5, 6, 7)
        fill(stream, 1)
        hung.wait_for(0, 1, 2, 8)
        assert receiver.alive
        assert receiver.error is None


@pytest.mark.parametrize("looks", [True, False])
def test_lease_lost_in_a_handler_does_not_end_the_receiver(
    stream: meteor.Stream, looks: bool
) -> None:
    fill(stream, 6)
    gate = Gate(2)
    with stream.subscriber(group="g") as sub:

        def work(record: meteor.Record) -> None:
            gate(record)
            ack = sub.confirm()
            if looks:
                ack.result(20)

        handler = Handler(work)
        receiver = sub.attach_receiver(handler)
        with gate.hold():
            term = sub.term
            stream.seek_group("g", 4, force=True)
        eventually(lambda: handler.done[-1:] == [5])
        eventually(lambda: confirmed(stream) == 6)
        assert receiver.alive
        assert handler.done[-2:] == [4, 5]
        if looks:  # if not, the receiver continues until it notices a refused confirm
            assert handler.done == [0, 1, 4, 5]
        assert term is not None
        assert (sub.term or 0) > term


# Failures


@pytest.mark.parametrize("group", [None, "g"])
def test_receiver_outlasts_an_outage(private_server: ServerFactory, group: str | None) -> None:
    server = private_server("--appendonly", "yes", "--appendfsync", "always")
    with meteor.connect(server.url) as client:
        stream = client.stream("s", create=True)
        fill(stream, 5)
        auto = group is not None
        handler = Handler(right_values)
        options: dict[str, Any] = {"group": group, "lease_ttl": 1, "auto_confirm": auto}
        with stream.subscriber(initial_offset="earliest", **options) as sub:
            receiver = sub.attach_receiver(handler)
            handler.wait_for(0, 1, 2, 3, 4)
            if auto:
                eventually(lambda: confirmed(stream) == 5)
            server.kill()
            assert not receiver.join(0.4), "the receiver ended when the server was killed"
            server.restart()
            fill(stream, 5)
            handler.wait_for(*range(10))
            assert receiver.alive


@pytest.mark.parametrize("group", [None, "g"])
def test_lost_records_end_the_receiver_with_an_error(url: str, group: str | None) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", capacity=5)
        handler = Handler()
        sub = stream.subscriber(group=group, initial_offset="latest")
        fill(stream, *[1] * 20)
        receiver = sub.attach_receiver(handler)
        assert receiver.join(20)
        assert isinstance(receiver.error, meteor.RecordsLost)
        assert (receiver.error.first, receiver.error.last) == (0, 14)
        assert handler.given == []
        with pytest.raises(meteor.RecordsLost):
            sub.close()
        sub.close()


@pytest.mark.parametrize("what", ["stream", "group"])
def test_deleted_stream_or_group_ends_the_receiver_with_an_error(
    stream: meteor.Stream, what: str
) -> None:
    sub = stream.subscriber(group="g", lease_ttl=0.5)
    receiver = sub.attach_receiver(Handler())
    eventually(lambda: sub.is_assigned)
    expected = meteor.StreamNotFound if what == "stream" else meteor.GroupNotFound
    if what == "stream":
        stream.delete()
    else:
        stream.delete_group("g", force=True)
    assert receiver.join(20)
    assert isinstance(receiver.error, expected)
    with pytest.raises(expected):
        sub.close()


def test_on_assigned_that_raises_ends_the_receiver_with_an_error(stream: meteor.Stream) -> None:
    fill(stream, 3)

    def on_assigned(sub: meteor.Subscriber) -> int:
        raise ZeroDivisionError("no offset")

    handler = Handler()
    sub = stream.subscriber(group="g", on_assigned=on_assigned, lease_ttl=60)
    receiver = sub.attach_receiver(handler)
    assert receiver.join(20)
    assert isinstance(receiver.error, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        sub.close()
    assert handler.given == []
    assert is_free(stream)


class _Unusual(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(3), _Unusual("!")])
@pytest.mark.parametrize("on_error", ["stop", "skip", "retry"])
def test_base_exception_ends_the_receiver_under_any_policy(
    stream: meteor.Stream, error: BaseException, on_error: Any
) -> None:
    fill(stream, 3)

    def work(record: meteor.Record) -> None:
        if record.offset == 1:
            raise error

    handler = Handler(work)
    sub = stream.subscriber(group="g", auto_confirm=True)
    receiver = sub.attach_receiver(handler, on_error=on_error)
    assert receiver.join(20)
    assert receiver.error is error
    assert handler.given == [0, 1]
    with pytest.raises(type(error)):
        sub.close()
    sub.close()
    assert confirmed(stream) == 1
    assert is_free(stream)


def test_receivers_on_a_busy_stream_are_opened_and_closed_cleanly(stream: meteor.Stream) -> None:
    def publish(stop: threading.Event) -> None:
        with stream.publisher() as pub:
            while not stop.wait(0.001):
                pub.publish_many([b"x"] * 10).result()

    done: list[int] = []
    with background(publish):
        for _ in range(10):
            handler = Handler()
            with stream.subscriber(group="g", auto_confirm=True) as sub:
                sub.attach_receiver(handler)
                eventually(lambda handler=handler: len(handler.done) > 20)  # type: ignore[misc]
            done += handler.done
    assert done == list(range(len(done)))
