"""Signal handlers can send messages or leave the group, whatever the main thread is doing.

If a handler raises an exception, no lock is left held.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import meteor_py as meteor
from tests.support.mailing import SOON_S, Post, Record, result
from tests.support.mailing import post as post
from tests.support.peering import LONG_S
from tests.support.waiting import eventually

EVERY_S = 0.003
DEPTH = 5


class Interrupted(BaseException):
    """Raised by signal handlers. The library must not catch it."""


@contextmanager
def signals(handler: Callable[[], None]) -> Iterator[None]:
    """Call a handler repeatedly, at any point in the main thread, even inside the handler."""
    depth = 0

    def ring(*_: object) -> None:
        nonlocal depth
        if depth == DEPTH:
            return  # otherwise, calls would nest without bound on a slow machine
        depth += 1
        try:
            handler()
        finally:
            depth -= 1

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("verb", ["tell", "ask"])
def test_signal_handler_can_send_while_its_thread_sends(post: Post, verb: str) -> None:
    group, other, got = post.group(ttl=LONG_S), post.group(), Record()
    other.join("a").on("q")(got)
    sent: list[Any] = []

    def send() -> None:
        sent.append(getattr(group.member("a"), verb)("q", len(sent), timeout=60))

    deadline = time.monotonic() + SOON_S
    with signals(send):
        while len(sent) < 300 and time.monotonic() < deadline:
            send()
    for future in sent:
        result(future)
    got.wait_for(len(sent))
    assert len({message.id for message in got.messages}) == len(got.messages) == len(sent)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence warnings about sockets from interrupted connection attempts.

    The garbage collector triggers them, and a signal at that moment would break pytest's handling
    of warnings.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def test_send_interrupted_by_a_signal_does_not_block_other_senders(post: Post, quiet: None) -> None:
    group, other, got = post.group(ttl=LONG_S), post.group(), Record()
    other.join("a").on("q")(got)
    stop, errors, told = threading.Event(), list[BaseException](), list[str]()

    def send_on() -> None:
        try:
            while not stop.is_set():
                told.append(group.member("a").tell("q").result(SOON_S))
        except BaseException as error:
            errors.append(error)

    def interrupt() -> None:
        raise Interrupted

    thread = threading.Thread(target=send_on)
    thread.start()
    broken = 0
    deadline = time.monotonic() + SOON_S
    while broken < 100 and time.monotonic() < deadline:
        try:
            with signals(interrupt):
                while True:
                    group.member("a").tell("q").result(SOON_S)
        except Interrupted:
            broken += 1
    before = len(told)
    eventually(lambda: len(told) > before + 10, SOON_S, "the other thread could not send")
    stop.set()
    thread.join(SOON_S)
    assert (thread.is_alive(), errors, broken) == (False, [], 100)
    last = result(group.member("a").tell("q", "last"))
    eventually(lambda: got.messages[-1].id == last, SOON_S)
    assert Counter(message.id for message in got.messages).most_common(1)[0][1] == 1


@pytest.mark.parametrize("how", ["leave", "group.close"])
def test_leave_or_close_interrupted_by_a_signal_can_be_repeated(
    post: Post, quiet: None, how: str
) -> None:
    group = post.group(ttl=LONG_S)

    def interrupt() -> None:
        raise Interrupted

    for number in range(20):
        other = post.group()
        me = other.join("a")
        me.on("q")(lambda message, number=number: time.sleep(0.002 * (number % 5)))
        result(group.member("a").tell("q"))
        end = me.leave if how == "leave" else other.close
        try:
            with signals(interrupt):
                end()
        except Interrupted:
            pass
        end()
        assert me.lost.is_set()
        eventually(lambda: not any(member.alive for member in group.members), SOON_S)
        other.close()


def test_signal_handler_can_leave_while_its_thread_waits_to_lead(post: Post) -> None:
    group, other = post.group(ttl=LONG_S), post.group()
    group.join("leader")
    for _ in range(20):
        me = other.join()
        waiting = me.leadership(timeout=SOON_S)
        with signals(me.leave), pytest.raises(meteor.MembershipLost), waiting:
            pass
    eventually(lambda: [member.id for member in group.members] == ["leader"], SOON_S)
