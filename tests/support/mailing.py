"""Peer group handles for message tests. Each has its own client, as if in its own process.

    with Post(url) as post:
        group, other = post.group(), post.group()
        me = other.join("me")
        ...

`Record` is a handler that records its messages; `Gate` is one that blocks until it is opened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Self

import pytest

import meteor_py as meteor
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.messaging.message import Message
from tests.support.peering import on_key
from tests.support.waiting import eventually

NAME = "workers"
#: Seconds to wait for an event: only a failing test waits that long.
SOON_S = 20.0
VERBS = ("tell", "send", "ask")


class Post:
    """Opens clients and peer group handles, and closes them on exit."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def group(self, url: str | None = None, **settings: Any) -> PeerGroup:
        return self._stack.enter_context(self.client(url).peer_group(NAME, **settings))

    def client(self, url: str | None = None) -> meteor.Client:
        return self._stack.enter_context(meteor.connect(url or self.url))


@pytest.fixture
def post(url: str) -> Iterator[Post]:
    with Post(url) as post:
        yield post


def say(group: PeerGroup, to: str, verb: str, *args: Any, **options: Any) -> Future[Any]:
    target = group.member("a") if to == "member" else getattr(group, to)
    future: Future[Any] = getattr(target, verb)(*args, **options)
    return future


class Record:
    """A handler that records messages, and replies with ``answer(message)``."""

    def __init__(self, answer: Callable[[Message], Any] = lambda message: None) -> None:
        self.messages: list[Message] = []
        self._answer = answer

    def __call__(self, message: Message) -> Any:
        self.messages.append(message)
        return self._answer(message)

    @property
    def bodies(self) -> list[Any]:
        return [message.body for message in self.messages]

    def wait_for(self, count: int) -> list[Message]:
        eventually(
            lambda: len(self.messages) >= count, SOON_S, f"fewer than {count} messages arrived"
        )
        return self.messages


class Gate(Record):
    """A handler that blocks until ``open`` is set."""

    def __init__(self, answer: Callable[[Message], Any] = lambda message: None) -> None:
        super().__init__(answer)
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, message: Message) -> Any:
        self.entered.set()
        self.open.wait(SOON_S)
        return super().__call__(message)

    def wait_until_entered(self) -> None:
        assert self.entered.wait(SOON_S), "no message arrived"


def abandon(group: PeerGroup) -> None:
    """Stop heartbeats and inboxes, as if the process had died."""
    for membership in group._handle.local_members():
        membership.stop_inbox()
    group._handle.heartbeat.stop()


def failure(future: Future[Any]) -> BaseException:
    """Return the error of a future that must fail."""
    error = future.exception(SOON_S)
    assert error is not None, "the request did not fail"
    return error


def result(future: Future[Any]) -> Any:
    return future.result(SOON_S)


def inbox_length(group: PeerGroup, member: str) -> int:
    return int(on_key(group, "XLEN", f"inbox:{member}"))


def wait_until_expired(group: PeerGroup, member: str) -> None:
    """Wait until the first message in an inbox has expired, allowing for the clock's error."""
    (first,) = on_key(group, "XRANGE", f"inbox:{member}", "-", "+", "COUNT", 1)
    fields = dict(zip(first[1][::2], first[1][1::2], strict=True))
    until = int(fields[b"until"]) / 1000
    eventually(lambda: group.now() - group._handle.clock.error_bound > until, SOON_S)
