"""Shared subscribers that are closed, garbage-collected or forked, or lose the server or group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

import meteor_py as meteor
from meteor_py.shared import subscriber
from tests.conftest import ServerFactory
from tests.support.group_members import Process
from tests.support.sharing import (
    GROUP,
    STREAM,
    Queue,
    Runner,
    collect,
    discard,
    expire,
    offsets,
)
from tests.support.waiting import eventually


def test_closing_the_client_closes_its_consumers(any_url: str) -> None:
    with Queue(any_url, "AB") as queue:
        queue.consumer().close()
        with meteor.connect(any_url) as client:
            other = client.stream(STREAM, create=True).shared_subscriber(GROUP)
            first, _ = other.poll(5)
            first.ack()
        assert other.closed
        c1 = queue.consumer()
        assert offsets(c1.poll(5)) == [1]
        assert [each.name for each in queue.shared.describe().consumers] == [c1.member]


#: Ways to close all open consumers at once.
together = pytest.mark.parametrize(
    "close_all",
    [
        meteor.Client.close,
        lambda client: subscriber._at_exit(subscriber._open_subscribers.objects()),
    ],
    ids=["client", "exit"],
)


@together
def test_consumers_that_close_together_wait_for_their_handlers_at_the_same_time(
    url: str, close_all: Callable[[meteor.Client], None]
) -> None:
    with Queue(url, "ABC") as queue, meteor.connect(url) as client, ExitStack() as stack:
        stream = client.stream(STREAM)
        consumers = [stream.shared_subscriber(GROUP, prefetch=1) for _ in range(3)]
        begun: list[int] = []

        def handle(record: meteor.SharedRecord) -> None:
            begun.append(record.offset)
            eventually(lambda: all(c._prefetcher.halted for c in consumers), 60)

        for consumer in consumers:
            stack.enter_context(Runner(consumer, handle))
        eventually(lambda: len(begun) == 3, 20)
        close_all(client)
        assert queue.shared.confirmed == 3


@together
def test_waits_for_hung_handlers_of_consumers_that_close_together_do_not_add_up(
    url: str, monkeypatch: pytest.MonkeyPatch, close_all: Callable[[meteor.Client], None]
) -> None:
    with Queue(url, "ABCD") as queue, meteor.connect(url) as client, ExitStack() as stack:
        stream = client.stream(STREAM)
        consumers = [stream.shared_subscriber(GROUP, prefetch=1) for _ in range(4)]
        begun: list[int] = []
        released = threading.Event()

        def handle(record: meteor.SharedRecord) -> None:
            begun.append(record.offset)
            assert released.wait(60)

        for consumer in consumers:
            stack.enter_context(Runner(consumer, handle))
        stack.callback(released.set)
        eventually(lambda: len(begun) == 4, 20)
        monkeypatch.setattr(subscriber, "_CLOSE_S", 2.0)
        began = time.monotonic()
        close_all(client)
        assert time.monotonic() - began < 6
        assert queue.shared.describe().consumers == ()


def test_garbage_collected_consumer_leaves_no_thread(url: str) -> None:
    with Queue(url, "A") as queue:
        sub = queue.stream.shared_subscriber("dropped")
        name = sub._lease_renewer._thread.name
        thread = sub._lease_renewer._thread
        del sub
        collect()
        eventually(lambda: not thread.is_alive())
        assert name.startswith("meteor-shared")


def test_garbage_collected_consumer_leaves_at_once_and_returns_its_records(
    url: str,
) -> None:
    with Queue(url, "AB") as queue:
        c1 = queue.consumer()
        # Nothing refers to this subscriber after the call.
        records = queue.stream.shared_subscriber(GROUP).poll(5)
        assert len(records) == 2
        collect()
        again = c1.poll(20)
        assert [(record.offset, record.failures) for record in again] == [(0, 0), (1, 0)]
        with pytest.raises(meteor.Fenced):
            records[0].ack()


_ENDS = """
import sys
import meteor_py as meteor

client = meteor.connect(sys.argv[1])
sub = client.stream("orders", create=True).shared_subscriber("billing")
first, second = sub.poll(20)
first.ack()
print("ready", flush=True)
"""


def test_program_that_exits_without_close_leaves_the_group_at_once(url: str) -> None:
    with Queue(url, "AB") as queue:
        c1 = queue.consumer()
        program = Process("-c", _ENDS, url)
        try:
            assert program.read() == "ready"
            assert program.wait() == 0
        finally:
            program.close()
        assert offsets(c1.poll(5)) == [1]
        assert queue.shared.describe().reaped == 0


_FORKS = """
import os, sys
import meteor_py as meteor

client = meteor.connect(sys.argv[1])
sub = client.stream("orders", create=True).shared_subscriber("billing")
(record,) = sub.poll(20)
pid = os.fork()
if pid == 0:
    told = []
    calls = [sub.poll, sub.commit, sub.rollback, sub.flush, lambda: sub.run(print)]
    for call in (*calls, record.ack, record.release, record.reject):
        try:
            call()
        except meteor.MeteorError as error:
            told.append("parent" in str(error))
    sub.close()
    print(told, flush=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
record.ack()
sub.close()
print("done", flush=True)
"""


def test_forked_child_cannot_use_the_consumer_and_its_exit_changes_nothing(url: str) -> None:
    with Queue(url, "A", lease_ttl=60.0) as queue:
        queue.consumer().close()
        program = Process("-W", "ignore", "-c", _FORKS, url)
        try:
            assert program.read() == str([True] * 8)
            assert program.read() == "done"
            assert program.wait() == 0
        finally:
            program.close()
        assert queue.shared.confirmed == 1


def test_close_raises_fenced_for_late_settlements(url: str) -> None:
    with Queue(url, "A") as queue:
        c1, c2 = queue.consumers(2)
        (record,) = c1.poll(5)
        expire(c1)
        c2.flush()
        record.ack()
        with pytest.raises(meteor.Fenced):
            c1.close()
        assert c1.closed
        assert offsets(c2.poll(5)) == [0]


@pytest.mark.parametrize("what", ["group", "stream"])
@pytest.mark.parametrize("settled", [False, True])
def test_close_after_a_deletion_raises_only_if_settlements_were_not_sent(
    url: str, what: str, settled: bool
) -> None:
    with Queue(url, "AB") as queue:
        c1 = queue.stream.shared_subscriber(GROUP)
        first = c1.poll(5)[0]
        if what == "group":
            queue.stream.shared_group(GROUP).delete(force=True)
        else:
            queue.stream.delete()
        if settled:
            first.ack()
            with pytest.raises((meteor.GroupNotFound, meteor.StreamNotFound)):
                c1.close()
        else:
            c1.close()
        assert c1.closed


def test_consumer_can_be_closed_after_its_server_has_stopped(private_server: ServerFactory) -> None:
    server = private_server()
    with meteor.connect(server.url) as client:
        stream = client.stream(STREAM, ordering_key="key")
        consumer = stream.shared_subscriber(GROUP)
        server.stop()
        with pytest.raises(meteor.ConnectionFailed):
            consumer.poll(0)
        discard(consumer)
        assert consumer.closed


def test_closed_consumers_leave_no_thread(url: str) -> None:
    with Queue(url, "ABCDEFGH") as queue:
        for consumer in queue.consumers(8, prefetch=1):
            assert len(consumer.poll(5)) == 1
        assert len(_lease_renewers()) == 8
    assert _lease_renewers() == []


def _lease_renewers() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("meteor-shared")]


def test_full_consumer_logs_why_it_gets_no_records(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meteor_py.shared import prefetcher

    monkeypatch.setattr(prefetcher, "_STUCK_S", 0.0)
    with Queue(url, "AB") as queue, caplog.at_level(logging.WARNING):
        c1 = queue.consumer(prefetch=1)
        c1.poll(5)
        eventually(lambda: not c1.poll(0.01) and "holds 1 unsettled records" in caplog.text)
