"""A group stays intact despite signal handlers, Ctrl-C, forks and interpreter exit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.runtime.clock import now
from meteor_py.runtime.completion import SESSION_PREFIX
from meteor_py.runtime.threads import JoinableThread
from meteor_py.subscribe import fetcher
from meteor_py.subscribe.group_session import GroupSession
from tests.conftest import ServerFactory
from tests.support.forking import exit_code, fork
from tests.support.group_members import GROUP, STREAM, GroupHarness, discard
from tests.support.proxied_stream import ProxiedStream
from tests.support.readers import background, fill
from tests.support.waiting import eventually


@pytest.fixture
def harness(url: str) -> Iterator[GroupHarness]:
    with GroupHarness(url, capacity=1_000_000) as harness:
        yield harness


@pytest.fixture
def proxied(private_server: ServerFactory) -> Iterator[ProxiedStream]:
    with ProxiedStream(private_server()) as proxied:
        proxied.client.load_scripts()
        fill(proxied.stream, 5)
        yield proxied


class CloseOnSignal:
    """A signal handler that closes a subscriber, as programs do on SIGTERM."""

    def __init__(self, sub: meteor.Subscriber) -> None:
        self._sub = sub
        self.took_s: float | None = None
        self.error: BaseException | None = None

    def __enter__(self) -> CloseOnSignal:
        self._before = signal.signal(signal.SIGALRM, self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def handle(self, *_: object) -> None:
        started = time.monotonic()
        try:
            self._sub.close()
        except BaseException as error:
            self.error = error
        self.took_s = time.monotonic() - started

    def after(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def when(self, condition: Callable[[], bool]) -> Callable[[threading.Event], None]:
        """Return a thread function that signals the main thread once the condition holds."""

        def wait(stop: threading.Event) -> None:
            until = time.monotonic() + 15
            while not condition() and time.monotonic() < until:
                pass  # no pause, because the condition holds only briefly
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGALRM)

        return wait


def session_of(sub: meteor.Subscriber) -> GroupSession:
    session = sub._fetcher.session
    assert session is not None
    return session


def session_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(SESSION_PREFIX)]


# Signal handlers that close


def test_signal_handler_can_close_at_any_moment_in_a_confirming_loop(
    harness: GroupHarness, rng: random.Random
) -> None:
    harness.fill(100_000)
    for number in range(12):
        group = f"g{number}"
        sub = harness.stream.subscriber(group=group)
        acks: list[meteor.Ack] = []
        with CloseOnSignal(sub) as closing:
            closing.after(rng.uniform(0.02, 0.08))
            try:
                acks.extend(sub.confirm(record) for record in sub)
            except meteor.MeteorError:
                pass  # the subscriber is closed
            eventually(lambda closing=closing: closing.took_s is not None)  # type: ignore[misc]
        assert closing.took_s is not None
        assert closing.took_s < 3
        assert closing.error is None or isinstance(closing.error, meteor.MeteorError)
        assert all(ack.done() for ack in acks)
        eventually(lambda: not session_threads(), message="the thread is still running")
        assert harness.redis.get(keys.lease(STREAM, group)) is None


def test_signal_handler_can_close_in_a_poll_while_the_server_does_not_reply(
    proxied: ProxiedStream,
) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=1.5)
    sub.poll(5)
    session = session_of(sub)
    proxied.proxy.stall()
    eventually(lambda: not sub.is_assigned)  # so that the poll must ask the server for it
    begun = time.monotonic()
    with CloseOnSignal(sub) as closing, background(closing.when(session_is_asked_here(session))):
        with contextlib.suppress(meteor.MeteorError):
            sub.poll(20)
        assert time.monotonic() - begun < 8
        assert closing.error is None
        proxied.proxy.resume()
    assert sub.closed
    eventually(lambda: not session_threads(), message="the thread is still running")
    eventually(lambda: not proxied.direct.exists(keys.lease(STREAM, GROUP)))


def session_is_asked_here(session: GroupSession) -> Callable[[], bool]:
    main = threading.main_thread().ident
    return lambda: session.connection._user == main


def test_signal_handler_can_close_in_the_middle_of_a_confirm(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.fill(5)
    for offset in (None, 1):  # without another confirm in flight, and with one
        with harness.stream.subscriber(group=f"{GROUP}{offset}") as sub:
            sub.poll(5)
            state, confirming = session_of(sub).condition, session_of(sub).confirms
            if offset is not None:
                confirming._send_at = now() + 1
                sub.confirm(offset)
                for confirmation in confirming._waiting:
                    confirmation.sent = True  # as if the first attempt had failed
            closing = CloseOnSignal(sub)
            real = state.notify_all
            want = confirming.want

            def closes(to: int, closing: Any = closing, want: Any = want) -> None:
                monkeypatch.undo()
                want(to)
                closing.handle()

            monkeypatch.setattr(confirming, "want", closes)
            assert state.notify_all == real
            ack = sub.confirm(4)
        assert closing.error is None
        assert closing.took_s is not None
        assert closing.took_s < 3
        assert ack.done()
        confirmed: Any = harness.redis.hget(keys.group(STREAM, f"{GROUP}{offset}"), "confirmed")
        assert (ack.exception(0) is None) == (confirmed == b"5")
        assert harness.redis.get(keys.lease(STREAM, f"{GROUP}{offset}")) is None


def test_signal_handler_can_close_in_a_confirm_during_a_renewal(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=0.6)
    sub.poll(5)
    session = session_of(sub)
    in_handler, renewing = threading.Event(), threading.Event()
    renew = session.lease.renew

    def slow(link: Any, term: Any) -> None:
        renew(link, term)
        renewing.set()
        in_handler.wait(10)

    closing = CloseOnSignal(sub)

    def closes(to: int) -> None:
        in_handler.set()
        closing.handle()

    monkeypatch.setattr(session.lease, "renew", slow)
    monkeypatch.setattr(session.confirms, "want", closes)
    assert renewing.wait(10)
    with contextlib.suppress(meteor.MeteorError):
        sub.confirm(4)
    assert closing.error is None
    assert closing.took_s is not None
    assert closing.took_s < 3
    eventually(lambda: not session_threads(), message="the thread is still running")
    assert harness.owner is None


# Ctrl-C


def interrupt_main() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_ctrl_c_while_closing_leaves_neither_a_thread_nor_a_lease(proxied: ProxiedStream) -> None:
    sub = proxied.subscriber(group=GROUP, lease_ttl=3)
    sub.poll(5)
    proxied.proxy.stall()
    sub.confirm()
    timer = threading.Timer(0.3, interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        sub.close()
    timer.join()
    proxied.proxy.resume()
    eventually(lambda: not session_threads(), message="the thread is still running")
    eventually(lambda: not proxied.direct.exists(keys.lease(STREAM, GROUP)), 2)
    with contextlib.suppress(meteor.MeteorError):  # raises if the confirm has failed
        sub.close()


def test_member_does_not_count_as_polling_after_ctrl_c_in_a_poll(harness: GroupHarness) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=30)
    sub.poll(5)
    session = session_of(sub)
    interrupts = 0
    while True:
        left = interrupts

        def trace(frame: FrameType, event: str, arg: object) -> None:
            nonlocal left
            if frame.f_code.co_filename == fetcher.__file__:
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            sub.poll(0)
            break
        except KeyboardInterrupt as error:
            kept = error  # keeps its frames alive, as an interactive prompt does
        finally:
            sys.settrace(before)
        assert not session.polling, f"interrupted at call {interrupts}: {kept!r}"
        interrupts += 1
    assert interrupts > 5
    assert not session.polling


# An interrupt may leave a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", ["confirm", "poll", "deactivate"])
def test_ctrl_c_at_any_moment_leaves_nothing_locked(harness: GroupHarness, work: str) -> None:
    harness.fill(10_000)
    sub = harness.subscriber(lease_ttl=30)
    sub.poll(5, 5_000)  # so that the polls below find fetched records
    state, connection = session_of(sub).condition, session_of(sub).connection
    interrupts = 0
    while True:
        left = interrupts

        def profile(frame: FrameType, event: str, arg: object) -> None:
            nonlocal left
            if event in ("call", "c_return"):  # Python checks for signals here
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            if work == "confirm":
                sub.confirm(interrupts)  # another offset each time, because a repeat does nothing
            elif work == "poll":
                sub.poll(0, 1)
            else:
                sub.deactivate()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
        locks: tuple[Any, ...] = (state._lock, connection._lock)
        assert not any(lock._is_owned() for lock in locks), f"interrupted at {interrupts}"
        assert connection._user is None
        if work == "deactivate":
            sub.reactivate()
            sub.poll(5, 1)
            assert sub.is_assigned
        interrupts += 1
    assert interrupts > 5


@pytest.mark.parametrize("starts", [False, True])
def test_receiver_interrupted_while_it_starts_can_be_closed(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    sub = harness.subscriber(lease_ttl=30)
    start = JoinableThread.start

    def interrupted(thread: JoinableThread) -> None:
        is_receiver = thread.name.startswith("meteor-receiver")
        if starts or not is_receiver:
            start(thread)
        if is_receiver:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JoinableThread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sub.attach_receiver(print)
    sub.close()
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("meteor-receiver")]
    )
    assert harness.owner is None


# Forks


def in_child(work: Callable[[], str]) -> str:
    """Return the result of ``work`` in a forked child, which must end soon."""
    reading, writing = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writing, result.encode())
        os._exit(0)
    os.close(writing)
    assert exit_code(pid) == 0
    with os.fdopen(reading) as pipe:
        return pipe.read()


FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@FORKS
@pytest.mark.parametrize("dropped", [False, True])
def test_parents_ack_raises_in_a_forked_child(proxied: ProxiedStream, dropped: bool) -> None:
    subs = [proxied.through.stream(STREAM, create=False).subscriber(group=GROUP, lease_ttl=30)]
    subs[0].poll(5)
    proxied.proxy.stall()
    ack = subs[0].confirm()
    if dropped:
        subs.clear()
    assert "belongs to the parent" in in_child(lambda: str(ack.result()))
    proxied.proxy.resume()
    assert ack.result(10) == 5
    for sub in subs:
        discard(sub)


@FORKS
def test_loop_is_refused_in_a_forked_child_even_if_a_parent_thread_held_the_lock(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    sub = harness.subscriber(lease_ttl=30, auto_confirm=True)
    session = sub._fetcher.session
    assert session is not None
    loop = iter(sub)
    next(loop)
    held = threading.Event()

    def hold(stop: threading.Event) -> None:
        with session.condition:
            held.set()
            stop.wait(20)

    with background(hold):
        assert held.wait(10)
        assert "belongs to the parent" in in_child(lambda: str(next(loop)))
    assert next(loop).offset == 1


# Interpreter exit

LEAVE = """
import sys
import meteor_py as meteor
client = meteor.connect(sys.argv[1])
kept = []
for n in range(3):
    sub = client.stream("orders", create=False).subscriber(group=f"g{n}", lease_ttl=9)
    kept.append(sub)
    if sys.argv[2] == "receiver":
        sub.attach_receiver(lambda record, sub=sub: sub.confirm())
    else:
        sub.poll(5)
print("ready", flush=True)
sys.stdin.readline()
if sys.argv[2] == "poll":
    for sub in kept:
        sub.confirm()
"""


@pytest.mark.parametrize("how", ["poll", "receiver"])
def test_interpreter_exits_in_time_if_the_server_does_not_reply(
    proxied: ProxiedStream, how: str
) -> None:
    with GroupHarness(proxied.proxy.url) as harness:
        program = harness.program(LEAVE, how)
        assert program.read() == "ready"
        eventually(lambda: all(proxied.direct.get(keys.lease(STREAM, f"g{n}")) for n in range(3)))
        proxied.proxy.stall()
        begun = time.monotonic()
        program.write("go")
        program.wait()
        assert time.monotonic() - begun < 6
        proxied.proxy.resume()


def test_exit_sends_confirms_and_releases_all_leases(url: str) -> None:
    with GroupHarness(url) as harness:
        harness.fill(5)
        program = harness.program(LEAVE, "poll")
        assert program.read() == "ready"
        program.write("go")
        assert program.wait() == 0
        for n in range(3):
            assert harness.redis.get(keys.lease(STREAM, f"g{n}")) is None
            assert harness.redis.hget(keys.group(STREAM, f"g{n}"), "confirmed") == b"5"


def test_poll_in_a_signal_handler_during_acquire_does_not_release_the_lease(
    harness: GroupHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    with harness.stream.subscriber(group="nested") as sub:
        session = session_of(sub)
        acquire, nested = session.lease.acquire, list[object]()

        def acquire_and_poll(*args: Any) -> Any:
            reply = acquire(*args)
            if not nested:
                nested.append(True)
                nested.append(session.hold(0.0))
            return reply

        monkeypatch.setattr(session.lease, "acquire", acquire_and_poll)
        term = session.hold(5.0)
        assert term is not None
        assert nested == [True, term]
        assert harness.redis.get(keys.lease(STREAM, "nested")) is not None
