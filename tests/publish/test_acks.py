"""Every record's outcome is reported: by its ack, a callback, flush, close or a log line.

The tests also cover forks, interpreter exit, and waiting for replicas.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.records.config import FRAME_RECORDS_MAX
from tests.conftest import ServerFactory
from tests.support.forking import exit_code, fork
from tests.support.proxied_stream import NAME, ProxiedStream, ReplicatedStream, failure
from tests.support.servers import Server
from tests.support.waiting import eventually


@pytest.fixture
def proxied(server: Server, url: str) -> Iterator[ProxiedStream]:
    with ProxiedStream(server) as running:
        yield running


@pytest.fixture
def pub(proxied: ProxiedStream) -> meteor.Publisher:
    return proxied.publisher()


# Acks


def test_an_ack_returns_the_offset_once_the_server_has_replied(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    assert (ack.done(), ack.offset) == (False, None)
    assert "pending" in repr(ack)
    with pytest.raises(TimeoutError, match="No reply arrived within"):
        ack.result(timeout=0.02)
    proxied.proxy.resume()
    assert (ack.result(5), ack.done(), ack.offset, ack.exception()) == (1, True, 1, None)
    assert "offset 1" in repr(ack)


def test_callbacks_added_before_and_after_the_outcome_are_called_once(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    called: list[tuple[str, int | None]] = []
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(lambda done: called.append(("early", done.offset)))
    proxied.proxy.resume()
    eventually(lambda: called)
    ack.add_done_callback(lambda done: called.append(("late", done.offset)))
    assert called == [("early", 1), ("late", 1)]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(1)])
def test_a_callback_that_raises_is_logged_and_has_no_other_effect(
    proxied: ProxiedStream, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(ack: meteor.Ack) -> None:
        raise error

    pub = proxied.warm_publisher()
    called: list[meteor.Ack] = []
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(fail)
    ack.add_done_callback(called.append)
    proxied.proxy.resume()
    assert ack.result(5) == 1
    assert pub.publish(b"y").result(5) == 2
    pub.close()
    assert called == [ack]
    assert [type(error)] == [r.exc_info[0] for r in caplog.records if r.exc_info]


# Failures of records whose acks are not checked


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    words = "The application has not checked their Acks"
    return [r.message for r in caplog.records if r.levelname == "WARNING" and words in r.message]


def check_all_fail(acks: list[meteor.Ack]) -> None:
    eventually(lambda: all(ack.done() for ack in acks))
    assert all(ack.offset is None for ack in acks)


def test_unchecked_failures_are_logged_once_until_records_succeed_again(
    proxied: ProxiedStream, caplog: pytest.LogCaptureFixture
) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.3)
    for outage in (1, 2):
        proxied.proxy.stall("requests")
        acks = [pub.publish(b"lost")]
        eventually(lambda: pub._sender.window.sent)
        acks.append(pub.publish(b"in the next batch"))
        check_all_fail(acks)
        assert len(warnings_in(caplog)) == outage
        assert f"1 records to stream {NAME!r} failed" in warnings_in(caplog)[-1]
        proxied.proxy.resume()
        assert pub.publish(b"again").result(10) >= 1
    assert len(warnings_in(caplog)) == 2
    with pytest.raises(meteor.MeteorError):
        pub.close()


def test_failures_that_a_thread_or_callback_waits_for_are_not_logged(
    proxied: ProxiedStream, caplog: pytest.LogCaptureFixture
) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.5)
    proxied.proxy.stall("requests")
    awaited = pub.publish(b"lost")
    with pytest.raises(TimeoutError):
        awaited.result(0.01)
    called: list[meteor.Ack] = []
    eventually(lambda: pub._sender.window.sent)
    pub.publish(b"lost").add_done_callback(called.append)
    assert isinstance(failure(awaited), meteor.MeteorError)
    eventually(lambda: called)
    assert warnings_in(caplog) == []
    proxied.proxy.resume()
    pub.close()


def test_on_error_is_called_before_flush_returns_and_its_errors_are_not_raised_again(
    proxied: ProxiedStream, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[meteor.MeteorError] = []
    pub = proxied.warm_publisher(delivery_timeout=0.3, on_error=seen.append)
    proxied.proxy.stall("requests")
    ack = pub.publish(b"lost")
    pub.flush()
    assert [type(error) for error in seen] == [type(failure(ack))]
    # A copy: raising the stored error would keep the caller's variables alive.
    assert seen[0] is not failure(ack)
    proxied.proxy.resume()
    pub.close()
    assert warnings_in(caplog) == []


def test_on_error_that_raises_is_logged_and_has_no_other_effect(
    proxied: ProxiedStream, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: meteor.MeteorError) -> None:
        raise ZeroDivisionError

    pub = proxied.warm_publisher(delivery_timeout=0.3, on_error=fail)
    proxied.proxy.stall("requests")
    pub.publish(b"lost")
    pub.flush()
    proxied.proxy.resume()
    assert pub.publish(b"again").result(10) >= 1
    assert [ZeroDivisionError] == [r.exc_info[0] for r in caplog.records if r.exc_info]


@pytest.mark.parametrize("n", [200, 4_000])
def test_on_error_is_called_for_records_that_publish_many_could_not_accept(
    proxied: ProxiedStream, n: int
) -> None:
    seen: list[tuple[meteor.MeteorError, bool]] = []

    def on_error(error: meteor.MeteorError) -> None:
        seen.append((error, publisher._accumulator._work.is_mine()))

    publisher = proxied.warm_publisher(
        delivery_timeout=1.0, max_pending_bytes=100_000, on_error=on_error
    )
    proxied.proxy.stall("requests")
    many = publisher.publish_many([bytes(1_000)] * n)
    assert isinstance(failure(many), meteor.MeteorError)
    assert meteor.PublisherFull in [type(error) for error, _ in seen]
    assert not any(locked for _, locked in seen)  # no lock is held, so the callback can publish
    proxied.proxy.resume()
    publisher.close()


def test_on_error_must_be_callable(proxied: ProxiedStream) -> None:
    with pytest.raises(TypeError, match="on_error must be a function"):
        proxied.publisher(on_error="log")


# Callbacks


def test_a_callback_can_publish_but_waiting_in_it_raises(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    raised: list[str] = []

    def callback(ack: meteor.Ack) -> None:
        later = pub.publish(b"from a callback")
        for wait in (later.result, pub.flush, pub.close):
            try:
                wait()
            except RuntimeError as error:
                raised.append(str(error))

    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(callback)
    proxied.proxy.resume()
    eventually(lambda: len(raised) == 3)
    assert all("must not wait" in text for text in raised)
    pub.flush(5)
    assert proxied.values() == [b"first", b"x", b"from a callback"]


def test_publishing_in_a_callback_fails_at_once_when_there_is_no_room(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher(max_pending_bytes=2_000, delivery_timeout=20)
    outcome: list[Exception | float] = []

    def callback(ack: meteor.Ack) -> None:
        begun = time.monotonic()
        try:
            while True:
                pub.publish(bytes(100))
        except meteor.PublisherFull as error:
            outcome.extend([error, time.monotonic() - begun])

    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(callback)
    proxied.proxy.resume()
    eventually(lambda: len(outcome) == 2)
    assert isinstance(outcome[1], float)
    assert outcome[1] < 5
    pub.flush(5)


def test_acks_can_be_awaited(proxied: ProxiedStream, pub: meteor.Publisher) -> None:
    async def main() -> list[int]:
        acks = [pub.publish(b"%d" % n) for n in range(100)]
        many = pub.publish_many([b"a", b"b"])
        return [*await asyncio.gather(*acks), await many, await many]

    assert asyncio.run(main()) == [*range(100), 100, 100]


def test_an_awaited_failure_is_raised_even_after_a_cancelled_wait(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.3)

    async def main() -> None:
        proxied.proxy.stall()
        ack = pub.publish(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait_for(ack), 0.01)
        with pytest.raises(meteor.OutcomeUnknown):
            await ack

    async def _wait_for(ack: meteor.Ack) -> int:
        return await ack

    asyncio.run(main())


def test_raising_one_error_for_many_acks_does_not_accumulate_tracebacks(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.2)
    proxied.proxy.stall()
    acks = [pub.publish(b"%d" % n) for n in range(500)]
    lengths = set()
    for ack in acks[1:]:
        with pytest.raises(meteor.MeteorError) as caught:
            ack.result(5)
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert max(lengths) < 5


# Flushing and closing


def test_closing_delivers_all_published_records(proxied: ProxiedStream) -> None:
    pub = proxied.publisher()
    acks = [pub.publish(b"%d" % n) for n in range(10_000)]
    pub.close()
    assert all(ack.done() for ack in acks)
    assert proxied.next == 10_000
    assert (pub.closed, "closed" in repr(pub)) == (True, True)
    pub.close()
    pub.flush()
    for call in (lambda: pub.publish(b"x"), lambda: pub.publish_many([b"x"])):
        with pytest.raises(meteor.PublisherClosed, match="Open another"):
            call()


def test_closing_again_after_an_interrupt_still_delivers(
    proxied: ProxiedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(timeout: float) -> bool:
        raise KeyboardInterrupt

    pub = proxied.warm_publisher()
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(pub._accumulator, "wait_empty", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pub.close()
    proxied.proxy.resume()
    pub.close()
    assert (ack.done(), ack.offset) == (True, 1)


def test_closing_without_a_server_fails_the_remaining_records(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.stall()
    sent = pub.publish(b"sent")
    eventually(lambda: pub._sender.window.sent)
    unsent = pub.publish(b"unsent")
    begun = time.monotonic()
    with pytest.raises(meteor.OutcomeUnknown, match="may duplicate it"):
        pub.close(timeout=0.1)
    assert time.monotonic() - begun < 3
    assert isinstance(failure(sent, 0), meteor.OutcomeUnknown)
    assert isinstance(failure(unsent, 0), meteor.PublisherClosed)
    pub.close()


def test_a_with_block_that_raises_still_delivers_and_keeps_its_exception(
    proxied: ProxiedStream,
) -> None:
    def publish(value: bytes, **options: Any) -> None:
        with proxied.publisher(**options) as pub:
            pub.publish(value)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        publish(b"x")
    assert not hasattr(caught.value, "__notes__")
    assert proxied.values() == [b"x"]
    proxied.proxy.refuse()
    with pytest.raises(ZeroDivisionError) as caught:
        publish(b"y", delivery_timeout=0.2)
    assert "Closing the publisher also failed" in caught.value.__notes__[0]


def test_flush_raises_only_unseen_errors_and_each_only_once(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher(delivery_timeout=0.2)
    proxied.proxy.stall()
    seen = pub.publish(b"seen")
    assert failure(seen)
    unseen = pub.publish(b"unseen")
    with pytest.raises(meteor.MeteorError):
        pub.flush()
    pub.flush()
    assert unseen.done()
    checked, forgotten = pub.publish(b"checked"), pub.publish_many([b""] * FRAME_RECORDS_MAX)
    eventually(forgotten.done)
    assert failure(checked)
    with pytest.raises(meteor.MeteorError):
        pub.close()
    pub.close()


def test_flush_waits_only_for_records_published_before_it(proxied: ProxiedStream) -> None:
    pub = proxied.publisher()
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            pub.publish_many([b"x"] * 1000)

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        proxied.wait_for_next(1000)
        for _ in range(3):
            ack = pub.publish(b"mine")
            pub.flush(timeout=20)
            assert ack.done()
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def test_flush_times_out_and_the_records_are_still_delivered(proxied: ProxiedStream) -> None:
    pub = proxied.warm_publisher()
    proxied.proxy.stall("replies")
    ack = pub.publish(b"x")
    with pytest.raises(TimeoutError, match="still unacknowledged"):
        pub.flush(timeout=0.05)
    proxied.proxy.resume()
    assert ack.result(5) == 1


# Forks and interpreter exit


def test_a_forked_child_cannot_use_the_publisher_and_the_parent_continues(
    proxied: ProxiedStream,
) -> None:
    pub = proxied.warm_publisher()
    ahead, many = proxied.queue_behind_one(pub, [[b"waits"] * 10])
    called: list[int] = []
    many.add_done_callback(lambda _: called.append(os.getpid()))
    with warnings.catch_warnings():
        # Since version 3.12, Python warns about a fork in a process with several threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = fork()
    if not child:
        code = 1
        try:
            errors = [ahead.exception(1), many.exception(1)]
            try:
                pub.publish(b"child")
            except meteor.PublisherClosed as error:
                errors.append(error)
            pub.close()
            with proxied.stream.publisher() as own:
                own.publish(b"from the child").result(5)
            right = all("parent process" in str(error) for error in errors)
            code = 0 if right and not called else 2
        finally:
            os._exit(code)
    assert exit_code(child) == 0
    proxied.proxy.resume()
    assert pub.publish(b"parent").result(5)
    assert (ahead.result(5), len(many.ranges)) == (1, 1)
    assert proxied.values() == [b"first", b"ahead", b"from the child", *[b"waits"] * 10, b"parent"]
    assert called == [os.getpid()]


FORGETFUL = """
import sys, meteor_py as meteor
stream = meteor.connect(sys.argv[1]).stream("orders", create=False)
if sys.argv[2] == "kept":
    pub = stream.publisher()
    for n in range(9_000):
        pub.publish(b"%d" % n)
else:
    stream.publisher().publish_many([b"%d" % n for n in range(9_000)])
"""


@pytest.mark.parametrize("publisher", ["kept", "dropped"])
def test_a_program_that_ends_without_closing_delivers_its_records(
    proxied: ProxiedStream, publisher: str
) -> None:
    proxied.proxy.delay(0.1)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORGETFUL, proxied.proxy.url, publisher],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert proxied.values() == [b"%d" % n for n in range(9_000)]


def test_a_program_that_ends_without_closing_delivers_to_its_embedded_server(
    tmp_path: Path,
) -> None:
    address = f"embedded://{tmp_path}"
    with meteor.connect(address) as m:
        m.stream(NAME, capacity=100_000)
    subprocess.run([sys.executable, "-c", FORGETFUL, address, "dropped"], check=True, timeout=60)
    with meteor.connect(address) as m:
        assert m.stream(NAME, create=False).describe().next == 9_000


INTERRUPTED = """
import os, signal, sys, threading, contextlib, meteor_py as meteor
m = meteor.connect("embedded://")
with m if sys.argv[1] == "client" else contextlib.nullcontext(), m.stream("s").publisher() as pub:
    pub.publish(b"x").result()
    os.kill(m._connector._server.pid, signal.SIGSTOP)
    pub.publish(b"y")
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
"""


@pytest.mark.parametrize("end", ["client", "program"])
def test_an_interrupted_close_does_not_wait_the_full_timeout_again_at_exit(end: str) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, end],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - begun < 15, "the exit waited for the delivery timeout of 30 seconds"
    assert "KeyboardInterrupt" in done.stderr
    assert "may duplicate it" in done.stderr, "the undelivered record was not reported"


FAILING = """
import sys, meteor_py as meteor
from meteor_py.redis import keys
m = meteor.connect(sys.argv[1])
publishers = [m.stream(f"s{n}").publisher(delivery_timeout=5) for n in range(6)]
for publisher in publishers:
    publisher.publish(b"x")
    publisher.flush()
m.redis.delete(*[keys.meta(f"s{n}") for n in range(6) if n % 2])
for publisher in publishers:
    publisher.publish(b"y")
"""


def test_a_publisher_that_fails_at_exit_does_not_keep_others_from_delivering(
    proxied: ProxiedStream,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILING, proxied.server.url],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "no longer exists" in done.stderr
    for n in (0, 2, 4):
        (*_, last) = proxied.client.stream(f"s{n}", create=False).read()
        assert last.values()[-1] == b"y"


# Replicas


@pytest.fixture(params=["valkey", "redis"])
def replicated(
    request: pytest.FixtureRequest, private_server: ServerFactory
) -> Iterator[ReplicatedStream]:
    with ExitStack() as stack:
        yield ReplicatedStream(stack, private_server(kind=request.param))


def test_acks_wait_until_the_replica_has_the_record(replicated: ReplicatedStream) -> None:
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1)
    replicated.link.stall()
    ack = pub.publish(b"x")
    eventually(lambda: proxied.direct.info("clients")["blocked_clients"] == 1)
    assert (proxied.next, ack.done()) == (2, False)
    replicated.link.resume()
    assert ack.result(10) == 1


def test_each_ack_fails_with_its_own_offset_if_the_replica_is_gone(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1, delivery_timeout=0.6)
    replicated.link.stall()
    for ack, offset in ((pub.publish_many([b"0", b"1"]), 1), (pub.publish(b"2"), 3)):
        error = failure(ack)
        assert isinstance(error, meteor.NotReplicated)
        assert error.offset == offset
        assert f"Record {offset} of" in str(error)
    assert proxied.values() == [b"first", b"0", b"1", b"2"]
    replicated.link.resume()
    assert pub.publish(b"later").result(10) == 4


def test_a_retry_after_a_lost_reply_still_waits_for_the_replica(
    replicated: ReplicatedStream,
) -> None:
    proxied = replicated.proxied
    pub = proxied.warm_publisher(acks=1)
    replicated.link.stall()
    proxied.proxy.cut_after_request(match=b"EVALSHA")
    ack = pub.publish(b"x")
    eventually(lambda: proxied.direct.info("clients")["blocked_clients"] == 1)
    assert (proxied.proxy.counters.cuts, proxied.next, ack.done()) == (1, 2, False)
    replicated.link.resume()
    assert ack.result(10) == 1


def test_a_server_that_refuses_to_wait_for_replicas_causes_no_duplicates(
    private_server: ServerFactory,
) -> None:
    with ProxiedStream(private_server()) as proxied:
        pub = proxied.warm_publisher()
        proxied.direct.execute_command("ACL", "SETUSER", "default", "-wait")
        impatient = proxied.publisher(acks=1)
        acks = [impatient.publish(b"begin")]
        assert failure(acks[0])
        acks += proxied.queue_behind_one(impatient, [[b"x"] * FRAME_RECORDS_MAX] * 4)
        proxied.proxy.resume()
        for ack in acks:
            assert isinstance(failure(ack), meteor.NotReplicated)
        assert pub.publish(b"last").result(5) == 3 + 4 * FRAME_RECORDS_MAX


def test_closing_the_client_delivers_its_publishers_pending_records() -> None:
    with meteor.connect("embedded://") as m:
        pub = m.stream("s").publisher(linger=5)
        acks = [pub.publish(b"%d" % number) for number in range(100)]
    assert [ack.offset for ack in acks] == list(range(100))
    assert pub.closed
