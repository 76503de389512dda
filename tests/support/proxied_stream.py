"""A stream that clients use through a fault proxy, while tests inspect it directly."""

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
    from tests.conftest import ServerFactory  # importing it at run time would be circular

NAME = "orders"


class ProxiedStream:
    """One stream, its server, and a proxy in front of the server. Closes everything that it opened.

    with ProxiedStream(server) as proxied:
        pub = proxied.publisher()
        proxied.proxy.stall("replies")
        ack = pub.publish(b"executed, no reply")
        proxied.wait_for_next(1)
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
            self._connect_to(self.server)
            self.stream = self.client.stream(NAME, create=True, **self._settings)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _connect_to(self, server: Server) -> None:
        self.server = server
        self.direct: redis.Redis = self._stack.enter_context(plain_client(server.url))
        self.client = self._stack.enter_context(meteor.connect(server.url))

    def move_to(self, server: Server) -> None:
        """Fail over: clients of the proxy reach another server from now on."""
        self.proxy.retarget(HOST, server.port)
        self.proxy.heal()
        self.proxy.cut()
        self._connect_to(server)
        self.stream = self.client.stream(NAME, create=False)

    def publisher(self, **options: Any) -> meteor.Publisher:
        """Open a publisher whose connection goes through the proxy."""
        publisher = self.through.stream(NAME, create=False).publisher(**options)
        self._stack.callback(discard, publisher)
        return publisher

    def warm_publisher(self, **options: Any) -> meteor.Publisher:
        """Open a publisher and publish one record, so that the server knows the publisher."""
        publisher = self.publisher(**options)
        publisher.publish(b"first").result(10)
        return publisher

    def subscriber(self, **options: Any) -> meteor.Subscriber:
        """Open a subscriber whose connection goes through the proxy."""
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
        """Return the server's state for the only publisher."""
        (key,) = self.producer_keys()
        return dict(self.direct.hgetall(key))  # type: ignore[arg-type]

    def entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        return list(self.direct.xrange(keys.log(NAME)))  # type: ignore[arg-type]

    def formats(self) -> list[bytes]:
        """Return the format of each frame."""
        return [list(fields)[1] for _, fields in self.entries()]

    def frames(self) -> list[int]:
        """Return the number of records in each frame."""
        return [int(entry_id.split(b"-")[1]) for entry_id, _ in self.entries()]

    def values(self) -> list[bytes]:
        return [value for batch in self.stream.read() for value in batch.values()]

    def queue_behind_one(self, publisher: meteor.Publisher, batches: Sequence[Any]) -> list[Any]:
        """Publish a record, then batches that wait behind it and are sent together.

        The proxy's replies stay stalled, so the record has no reply yet. Return the acks for the
        record and the batches.
        """
        self.proxy.stall("replies")
        begun = self.next
        acks: list[Any] = [publisher.publish(b"ahead")]
        self.wait_for_next(begun + 1)
        return acks + [publisher.publish_many(values) for values in batches]


class ReplicatedStream:
    """A proxied stream whose server has a replica, with a proxy in the replication link."""

    def __init__(self, stack: ExitStack, primary: Server, **settings: Any) -> None:
        self._stack = stack
        self.proxied = stack.enter_context(ProxiedStream(primary, **settings))
        self.link, self.replica = self.add_replica()

    def add_replica(self) -> tuple[Proxy, Replica]:
        primary = self.proxied.server
        link = self._stack.enter_context(Proxy(HOST, primary.port))
        replica = self._stack.enter_context(Replica(primary, port=link.port))
        replica.wait_in_sync()
        with plain_client(primary.url) as client:  # Redis counts a replica only after its first ACK
            eventually(
                lambda: client.set("x", 1) and client.wait(1, 1_000),
                timeout_s=40,
                message="The primary did not count its replica.",
            )
        return link, replica

    def lag(self) -> None:
        """Cut the replica off from all further writes."""
        self.replica.wait_in_sync()
        self.link.stall()

    def fail_over(self) -> None:
        self.replica.promote()
        self.proxied.server.kill()
        self.proxied.move_to(self.replica)


def discard(publisher: meteor.Publisher) -> None:
    """Close a publisher, ignoring errors."""
    try:
        publisher.close(timeout=0)
    except meteor.MeteorError:
        pass


def failure(ack: meteor.Ack | meteor.ManyAck, timeout: float = 10) -> Exception:
    """Return the error of an ack that must fail."""
    error = ack.exception(timeout)
    assert error is not None, f"The ack did not fail: {ack!r}"
    return error


def poll_until(
    subscriber: meteor.Subscriber, enough: Callable[[list[bytes]], bool], timeout_s: float = 20
) -> list[bytes]:
    """Poll until there are enough values, and return them."""
    values: list[bytes] = []

    def more() -> bool:
        values.extend(subscriber.poll(timeout=0.5).values())
        return enough(values)

    eventually(more, timeout_s, "the subscriber did not get enough records")
    return values


# Fixtures


@pytest.fixture
def proxied(server: Server, url: str) -> Iterator[ProxiedStream]:
    with ProxiedStream(server) as running:
        yield running


@pytest.fixture(params=["valkey", "redis"])
def private(
    request: pytest.FixtureRequest, private_server: ServerFactory
) -> Iterator[ProxiedStream]:
    """A proxied stream on a private server. The test runs once for each kind of server."""
    with ProxiedStream(private_server(kind=request.param)) as running:
        yield running
