"""What became of a record, and that somebody is always told.

Acks, callbacks, flushing and closing, forks, the interpreter's end, waiting for replicas.
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
from tests.support.proxied_stream import NAME, Bench, Pair, failure
from tests.support.servers import Server
from tests.support.waiting import eventually


@pytest.fixture
def bench(server: Server, url: str) -> Iterator[Bench]:
    with Bench(server) as running:
        yield running


@pytest.fixture
def pub(bench: Bench) -> meteor.Publisher:
    return bench.publisher()


# Acks


def test_an_ack_tells_the_offset_once_it_is_known(bench: Bench) -> None:
    pub = bench.warm_publisher()
    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    assert (ack.done(), ack.offset) == (False, None)
    assert "pending" in repr(ack)
    with pytest.raises(TimeoutError, match="no answer within"):
        ack.result(timeout=0.02)
    bench.proxy.resume()
    assert (ack.result(5), ack.done(), ack.offset, ack.exception()) == (1, True, 1, None)
    assert "offset 1" in repr(ack)


def test_callbacks_are_called_once_before_and_after_the_outcome(bench: Bench) -> None:
    pub = bench.warm_publisher()
    told: list[tuple[str, int | None]] = []
    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(lambda done: told.append(("early", done.offset)))
    bench.proxy.resume()
    eventually(lambda: told)
    ack.add_done_callback(lambda done: told.append(("late", done.offset)))
    assert told == [("early", 1), ("late", 1)]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(1)])
def test_a_callback_that_raises_is_logged_and_harms_nobody(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail(ack: meteor.Ack) -> None:
        raise error

    pub = bench.warm_publisher()
    told: list[meteor.Ack] = []
    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(fail)
    ack.add_done_callback(told.append)
    bench.proxy.resume()
    assert ack.result(5) == 1
    assert pub.publish(b"y").result(5) == 2
    pub.close()
    assert told == [ack]
    assert [type(error)] == [r.exc_info[0] for r in caplog.records if r.exc_info]


def test_waiting_inside_a_callback_raises_and_publishing_there_works(bench: Bench) -> None:
    pub = bench.warm_publisher()
    raised: list[str] = []

    def callback(ack: meteor.Ack) -> None:
        later = pub.publish(b"from a callback")
        for wait in (later.result, pub.flush, pub.close):
            try:
                wait()
            except RuntimeError as error:
                raised.append(str(error))

    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(callback)
    bench.proxy.resume()
    eventually(lambda: len(raised) == 3)
    assert all("must not wait" in text for text in raised)
    pub.flush(5)
    assert bench.values() == [b"first", b"x", b"from a callback"]


def test_publishing_in_a_callback_fails_at_once_when_there_is_no_room(bench: Bench) -> None:
    pub = bench.warm_publisher(max_pending_bytes=2_000, delivery_timeout=20)
    outcome: list[Exception | float] = []

    def callback(ack: meteor.Ack) -> None:
        begun = time.monotonic()
        try:
            while True:
                pub.publish(bytes(100))
        except meteor.PublisherFull as error:
            outcome.extend([error, time.monotonic() - begun])

    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    ack.add_done_callback(callback)
    bench.proxy.resume()
    eventually(lambda: len(outcome) == 2)
    assert isinstance(outcome[1], float)
    assert outcome[1] < 5
    pub.flush(5)


def test_acks_can_be_awaited(bench: Bench, pub: meteor.Publisher) -> None:
    async def main() -> list[int]:
        acks = [pub.publish(b"%d" % n) for n in range(100)]
        many = pub.publish_many([b"a", b"b"])
        return [*await asyncio.gather(*acks), await many, await many]

    assert asyncio.run(main()) == [*range(100), 100, 100]


def test_an_awaited_failure_is_raised_and_a_cancelled_wait_harms_nobody(bench: Bench) -> None:
    pub = bench.warm_publisher(delivery_timeout=0.3)

    async def main() -> None:
        bench.proxy.stall()
        ack = pub.publish(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_wait_for(ack), 0.01)
        with pytest.raises(meteor.OutcomeUnknown):
            await ack

    async def _wait_for(ack: meteor.Ack) -> int:
        return await ack

    asyncio.run(main())


def test_raising_one_error_for_many_acks_does_not_pile_up_tracebacks(bench: Bench) -> None:
    pub = bench.warm_publisher(delivery_timeout=0.2)
    bench.proxy.stall()
    acks = [pub.publish(b"%d" % n) for n in range(500)]
    lengths = set()
    for ack in acks[1:]:
        with pytest.raises(meteor.MeteorError) as caught:
            ack.result(5)
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert max(lengths) < 5


# Flushing and closing


def test_closing_delivers_what_was_published(bench: Bench) -> None:
    pub = bench.publisher()
    acks = [pub.publish(b"%d" % n) for n in range(10_000)]
    pub.close()
    assert all(ack.done() for ack in acks)
    assert bench.next == 10_000
    assert (pub.closed, "closed" in repr(pub)) == (True, True)
    pub.close()
    pub.flush()
    for call in (lambda: pub.publish(b"x"), lambda: pub.publish_many([b"x"])):
        with pytest.raises(meteor.PublisherClosed, match="open another"):
            call()


def test_closing_again_after_an_interrupt_still_delivers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(timeout: float) -> bool:
        raise KeyboardInterrupt

    pub = bench.warm_publisher()
    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(pub._accumulator, "wait_empty", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pub.close()
    bench.proxy.resume()
    pub.close()
    assert (ack.done(), ack.offset) == (True, 1)


def test_closing_in_vain_fails_what_is_left_and_says_so(bench: Bench) -> None:
    pub = bench.warm_publisher()
    bench.proxy.stall()
    sent = pub.publish(b"sent")
    eventually(lambda: pub._sender.window.sent)
    unsent = pub.publish(b"unsent")
    begun = time.monotonic()
    with pytest.raises(meteor.OutcomeUnknown, match="may double it"):
        pub.close(timeout=0.1)
    assert time.monotonic() - begun < 3
    assert isinstance(failure(sent, 0), meteor.OutcomeUnknown)
    assert isinstance(failure(unsent, 0), meteor.PublisherClosed)
    pub.close()


def test_a_with_block_that_raises_still_delivers_and_keeps_its_exception(bench: Bench) -> None:
    def publish(value: bytes, **options: Any) -> None:
        with bench.publisher(**options) as pub:
            pub.publish(value)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        publish(b"x")
    assert not hasattr(caught.value, "__notes__")
    assert bench.values() == [b"x"]
    bench.proxy.refuse()
    with pytest.raises(ZeroDivisionError) as caught:
        publish(b"y", delivery_timeout=0.2)
    assert "While closing the publisher" in caught.value.__notes__[0]


def test_flush_raises_what_nobody_looked_at_once_and_nothing_that_was_seen(bench: Bench) -> None:
    pub = bench.warm_publisher(delivery_timeout=0.2)
    bench.proxy.stall()
    seen = pub.publish(b"seen")
    assert failure(seen)
    unseen = pub.publish(b"unseen")
    with pytest.raises(meteor.MeteorError):
        pub.flush()
    pub.flush()
    assert unseen.done()
    looked_at, forgotten = pub.publish(b"looked at"), pub.publish_many([b""] * FRAME_RECORDS_MAX)
    eventually(forgotten.done)
    assert failure(looked_at)
    with pytest.raises(meteor.MeteorError):
        pub.close()
    pub.close()


def test_flush_waits_only_for_what_was_published_before(bench: Bench) -> None:
    pub = bench.publisher()
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            pub.publish_many([b"x"] * 1000)

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        bench.wait_for_next(1000)
        for _ in range(5):
            ack = pub.publish(b"mine")
            pub.flush(timeout=20)
            assert ack.done()
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def test_flush_times_out_and_the_records_are_still_delivered(bench: Bench) -> None:
    pub = bench.warm_publisher()
    bench.proxy.stall("replies")
    ack = pub.publish(b"x")
    with pytest.raises(TimeoutError, match="still on their way"):
        pub.flush(timeout=0.05)
    bench.proxy.resume()
    assert ack.result(5) == 1


# Forks and the interpreter's end


def test_a_forked_child_cannot_use_the_publisher_and_the_parent_goes_on(bench: Bench) -> None:
    pub = bench.warm_publisher()
    ahead, many = bench.queue_behind_one(pub, [[b"waits"] * 10])
    called: list[int] = []
    many.add_done_callback(lambda _: called.append(os.getpid()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads, Python 3.12
        child = os.fork()
    if not child:
        code = 1
        try:
            errors = [ahead.exception(1), many.exception(1)]
            try:
                pub.publish(b"child")
            except meteor.PublisherClosed as error:
                errors.append(error)
            pub.close()
            with bench.stream.publisher() as own:
                own.publish(b"of the child").result(5)
            right = all("parent process" in str(error) for error in errors)
            code = 0 if right and not called else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    bench.proxy.resume()
    assert pub.publish(b"parent").result(5)
    assert (ahead.result(5), len(many.ranges)) == (1, 1)
    assert bench.values() == [b"first", b"ahead", b"of the child", *[b"waits"] * 10, b"parent"]
    assert called == [os.getpid()]


FORGETFUL = """
import sys, meteor_py as meteor
stream = meteor.connect(sys.argv[1]).stream("orders", create=False)
if sys.argv[2] == "kept":
    pub = stream.publisher()
    for n in range(20_000):
        pub.publish(b"%d" % n)
else:
    stream.publisher().publish_many([b"%d" % n for n in range(20_000)])
"""


@pytest.mark.parametrize("publisher", ["kept", "dropped"])
def test_what_a_program_published_is_delivered_when_it_ends_without_closing(
    bench: Bench, publisher: str
) -> None:
    bench.proxy.delay(0.1)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORGETFUL, bench.proxy.url, publisher],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert bench.values() == [b"%d" % n for n in range(20_000)]


def test_a_program_that_ends_without_closing_delivers_to_its_own_server_too(tmp_path: Path) -> None:
    address = f"embedded://{tmp_path}"
    with meteor.connect(address) as m:
        m.stream(NAME, capacity=100_000)
    subprocess.run([sys.executable, "-c", FORGETFUL, address, "dropped"], check=True, timeout=60)
    with meteor.connect(address) as m:
        assert m.stream(NAME, create=False).describe().next == 20_000


INTERRUPTED = """
import os, signal, sys, threading, contextlib, meteor_py as meteor
m = meteor.connect("embedded://")
with m if sys.argv[1] == "client" else contextlib.nullcontext(), m.stream("s").publisher() as pub:
    pub.publish(b"x").result()
    os.kill(m._connector._server.pid, signal.SIGSTOP)
    pub.publish(b"y")
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
"""


@pytest.mark.parametrize("end", ["client", "program"])
def test_an_interrupted_close_is_not_waited_for_all_over_again_at_the_end(end: str) -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, end],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert time.monotonic() - begun < 15, "the delivery timeout is 30 seconds"
    assert "KeyboardInterrupt" in done.stderr
    assert "may double it" in done.stderr, "what was not delivered is told"


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


def test_one_publisher_that_fails_at_the_end_does_not_keep_others_from_delivering(
    bench: Bench,
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILING, bench.server.url],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "does not exist any more" in done.stderr
    for n in (0, 2, 4):
        (*_, last) = bench.client.stream(f"s{n}", create=False).read()
        assert last.values()[-1] == b"y"


# Replicas


@pytest.fixture(params=["valkey", "redis"])
def replicated(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, private_server(kind=request.param))


def test_acks_wait_until_the_replica_has_the_record(replicated: Pair) -> None:
    bench = replicated.bench
    pub = bench.warm_publisher(acks=1)
    replicated.link.stall()
    ack = pub.publish(b"x")
    eventually(lambda: bench.direct.info("clients")["blocked_clients"] == 1)
    assert (bench.next, ack.done()) == (2, False)
    replicated.link.resume()
    assert ack.result(10) == 1


def test_without_the_replica_the_record_is_in_the_log_and_its_ack_names_it(
    replicated: Pair,
) -> None:
    bench = replicated.bench
    pub = bench.warm_publisher(acks=1, delivery_timeout=0.6)
    replicated.link.stall()
    ahead, many = bench.queue_behind_one(pub, [[b"%d" % n for n in range(3)]])
    single = pub.publish(b"3")
    bench.proxy.resume()
    errors = [failure(ack) for ack in (ahead, many, single)]
    for error, offset in zip(errors, (1, 2, 5), strict=True):
        assert isinstance(error, meteor.NotReplicated)
        assert error.offset == offset
        assert f"Record {offset} of" in str(error)
    assert bench.values() == [b"first", b"ahead", b"0", b"1", b"2", b"3"]
    replicated.link.resume()
    assert pub.publish(b"later").result(10) == 6


def test_a_repeat_after_a_lost_reply_still_waits_for_the_replica(replicated: Pair) -> None:
    bench = replicated.bench
    pub = bench.warm_publisher(acks=1)
    replicated.link.stall()
    bench.proxy.cut_after_request(match=b"EVALSHA")
    ack = pub.publish(b"x")
    eventually(lambda: bench.direct.info("clients")["blocked_clients"] == 1)
    assert (bench.proxy.counters.cuts, bench.next, ack.done()) == (1, 2, False)
    replicated.link.resume()
    assert ack.result(10) == 1


def test_a_server_that_refuses_to_wait_for_replicas_doubles_nothing(
    private_server: ServerFactory,
) -> None:
    with Bench(private_server()) as bench:
        pub = bench.warm_publisher()
        bench.direct.execute_command("ACL", "SETUSER", "default", "-wait")
        impatient = bench.publisher(acks=1)
        acks = [impatient.publish(b"begin")]
        assert failure(acks[0])
        acks += bench.queue_behind_one(impatient, [[b"x"] * FRAME_RECORDS_MAX] * 4)
        bench.proxy.resume()
        for ack in acks:
            assert isinstance(failure(ack), meteor.NotReplicated)
        assert pub.publish(b"last").result(5) == 3 + 4 * FRAME_RECORDS_MAX


def test_closing_the_client_delivers_what_its_publishers_still_have() -> None:
    with meteor.connect("embedded://") as m:
        pub = m.stream("s").publisher(linger=5)
        acks = [pub.publish(b"%d" % number) for number in range(100)]
    assert [ack.offset for ack in acks] == list(range(100))
    assert pub.closed
