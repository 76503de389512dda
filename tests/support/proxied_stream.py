"""A stream that is published to through a fault proxy and looked at without it.

What the tests of publishers, faults and histories share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import pytest
import redis

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Replica, Server, plain_client
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.conftest import ServerFactory  # which imports this module

NAME = "orders"


class Bench:
    """One stream, its server, and a proxy before it; closes whatever it opened.

    with Bench(server) as bench:
        pub = bench.publisher()
        bench.proxy.stall("replies")
        ack = pub.publish(b"done, not answered")
        bench.wait_for_next(1)
    """

    def __init__(self, server: Server, user: str = "", **settings: Any) -> None:
        self.server = server
        self._user = f"{user}:x@" if user else ""
        self._settings = {"capacity": 10_000_000} | settings
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.proxy = stack.enter_context(Proxy(HOST, self.server.port))
            url = self.proxy.url.replace("://", f"://{self._user}")
            self.through = stack.enter_context(meteor.connect(url))
            self._stack = stack.pop_all()
        try:
            self._look_at(self.server)
            self.stream = self.client.stream(NAME, **self._settings)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _look_at(self, server: Server) -> None:
        self.server = server
        self.direct: redis.Redis = self._stack.enter_context(plain_client(server.url))
        self.client = self._stack.enter_context(meteor.connect(server.url))

    def move_to(self, server: Server) -> None:
        """Fail over: whoever goes through the proxy finds another server there."""
        self.proxy.retarget(HOST, server.port)
        self.proxy.heal()
        self.proxy.cut()
        self._look_at(server)
        self.stream = self.client.stream(NAME, create=False)

    def publisher(self, **options: Any) -> meteor.Publisher:
        """A publisher whose connection goes through the proxy."""
        publisher = self.through.stream(NAME, create=False).publisher(**options)
        self._stack.callback(discard, publisher)
        return publisher

    def warm_publisher(self, **options: Any) -> meteor.Publisher:
        """The same, connected and known to the server: record 0 is its first."""
        publisher = self.publisher(**options)
        publisher.publish(b"first").result(10)
        return publisher

    def subscriber(self, **options: Any) -> meteor.Subscriber:
        """A subscriber whose connection goes through the proxy."""
        subscriber = self.through.stream(NAME, create=False).subscriber(**options)
        self._stack.callback(subscriber.close)
        return subscriber

    @property
    def next(self) -> int:
        return int(self.meta("next") or -1)

    def meta(self, field: str) -> str | None:
        value = self.direct.hget(keys.meta(NAME), field)
        return value.decode() if isinstance(value, bytes) else None

    def set_meta(self, **fields: int) -> None:
        self.direct.hset(keys.meta(NAME), mapping=fields)  # type: ignore[arg-type]

    def wait_for_next(self, offset: int) -> None:
        eventually(lambda: self.next >= offset, message=f"the log did not reach {offset}")

    def producer_keys(self) -> list[bytes]:
        return list(self.direct.scan_iter(match=keys.producer(NAME, "*")))

    def forget_producers(self) -> None:
        self.direct.delete(*self.producer_keys())

    def producer(self) -> dict[bytes, bytes]:
        """What the server remembers of the only publisher."""
        (key,) = self.producer_keys()
        return dict(self.direct.hgetall(key))  # type: ignore[arg-type]

    def entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return list(self.direct.xrange(keys.log(NAME)))  # type: ignore[arg-type]

    def formats(self) -> list[bytes]:
        """The format of each frame."""
        return [list(fields)[1] for _, fields in self.entries()]

    def frames(self) -> list[int]:
        """How many records each frame has."""
        return [int(entry_id.split(b"-")[1]) for entry_id, _ in self.entries()]

    def values(self) -> list[bytes]:
        return [value for batch in self.stream.read() for value in batch.values()]

    def queue_behind_one(self, publisher: meteor.Publisher, batches: Sequence[Any]) -> list[Any]:
        """Publish a record, and lists behind it, such that the lists are sent together.

        Leaves the replies of the proxy stalled and the record unanswered: what is called next
        decides. Returns the acks of the record and of the lists.
        """
        self.proxy.stall("replies")
        begun = self.next
        acks: list[Any] = [publisher.publish(b"ahead")]
        self.wait_for_next(begun + 1)
        return acks + [publisher.publish_many(values) for values in batches]


class Pair:
    """A bench whose server has a replica, and the link between the two."""

    def __init__(self, stack: ExitStack, primary: Server, **settings: Any) -> None:
        self._stack = stack
        self.bench = stack.enter_context(Bench(primary, **settings))
        self.link, self.replica = self.add_replica()

    def add_replica(self) -> tuple[Proxy, Replica]:
        primary = self.bench.server
        link = self._stack.enter_context(Proxy(HOST, primary.port))
        replica = self._stack.enter_context(Replica(primary, port=link.port))
        replica.wait_in_sync()
        with plain_client(primary.url) as client:  # Redis counts it only after its first word
            eventually(
                lambda: client.set("x", 1) and client.wait(1, 1_000),
                timeout_s=40,
                message="The primary does not count its replica.",
            )
        return link, replica

    def lag(self) -> None:
        """From now on the replica gets nothing."""
        self.replica.wait_in_sync()
        self.link.stall()

    def fail_over(self) -> None:
        self.replica.promote()
        self.bench.server.kill()
        self.bench.move_to(self.replica)


def discard(publisher: meteor.Publisher) -> None:
    """Close a publisher whose records are of no interest any more."""
    try:
        publisher.close(timeout=0)
    except meteor.MeteorError:
        pass


def failure(ack: meteor.Ack | meteor.ManyAck, timeout: float = 10) -> Exception:
    """The error of an ack, which must have one."""
    error = ack.exception(timeout)
    assert error is not None, f"It did not fail: {ack!r}"
    return error


def poll_until(
    subscriber: meteor.Subscriber, enough: Callable[[list[bytes]], bool], timeout_s: float = 20
) -> list[bytes]:
    """The values that a subscriber hands out until there are enough of them."""
    values: list[bytes] = []

    def more() -> bool:
        values.extend(subscriber.poll(timeout=0.5).values())
        return enough(values)

    eventually(more, timeout_s, "the subscriber did not get enough records")
    return values


# Fixtures


@pytest.fixture
def bench(server: Server, url: str) -> Iterator[Bench]:
    with Bench(server) as running:
        yield running


@pytest.fixture(params=["valkey", "redis"])
def private(request: pytest.FixtureRequest, private_server: ServerFactory) -> Iterator[Bench]:
    """A bench whose server is its own, of each kind."""
    with Bench(private_server(kind=request.param)) as running:
        yield running
