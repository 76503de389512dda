"""The client: the entry point of the library."""

from __future__ import annotations

from collections.abc import Mapping
from signal import SIGTERM
from typing import TYPE_CHECKING

from meteor_py.archive.archiver import start_archiver
from meteor_py.log.catalog import list_names
from meteor_py.log.handle import open_stream
from meteor_py.peers.codec import Format, PeerCodec, find_codec
from meteor_py.peers.config import UNSET, Election, Unset
from meteor_py.peers.group import PeerGroup, open_group
from meteor_py.records.codec import CodecName
from meteor_py.records.config import Compression, check_seconds, without_none
from meteor_py.redis import keys
from meteor_py.redis.address import Address, parse
from meteor_py.redis.connection import Connection
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import ALL
from meteor_py.redis.server_info import ServerDescription, describe_all
from meteor_py.runtime.lifecycle import Closeable, close_owned
from meteor_py.runtime.signals import install
from meteor_py.store.identity import Store
from meteor_py.stream import Stream

if TYPE_CHECKING:
    import redis


def connect(
    url: str | None = None,
    *,
    timeout: float = 5.0,
    remap: Mapping[tuple[str, int], tuple[str, int]] | None = None,
) -> Client:
    """Return a client for the server at ``url``. It connects when it is first used.

    Args:
        url: One of:

            * ``redis://[user:password@]host:port/db``, ``rediss://`` (TLS) or ``unix:///socket``: a
              single server.
            * ``redis+cluster://host1:port,host2:port``: a cluster. List at least one of its nodes.
            * ``redis+sentinel://host1:port,host2:port/name/db``: the primary that the sentinels at
              these addresses know by ``name``. ``?sentinel_username=`` and ``sentinel_password=``
              log in to the sentinels.
            * ``rediss+cluster://`` and ``rediss+sentinel://``: the same, with TLS.
            * ``embedded://``: a private server that stops when the client is closed.
            * ``embedded:///dir``: a server that keeps its data in ``dir``, shared by all processes
              that open it.
            * ``fake://``: an emulation inside this process, for tests.

            If an embedded server is killed, its clients restart it. The default is
            ``$METEOR_URL`` or, if that is not set, the user's personal server: an embedded server
            that all of the user's programs share. Its first use in a process logs a WARNING.
        timeout: Seconds to wait for a connection and for each reply. On a cluster or with
            sentinels, also the time that a call waits for a failover or a slot move before it
            raises ``ConnectionFailed``.
        remap: Replacements for addresses that cluster nodes or sentinels announce but this client
            cannot reach (Docker, NAT), as ``{(host, port): (host, port)}``. The address can also
            contain them (docs/production/cluster.md).

    Raises:
        ValueError: ``url`` is not a valid address, or ``timeout`` is out of range.

    >>> with connect("embedded://") as m:
    ...     stream = m.stream("orders")
    ...     with stream.publisher() as pub:
    ...         pub.publish(b"hello").result()
    0
    """
    return Client(parse(url, remap), check_seconds("timeout", timeout))


def close_on_signal(*signals: int, timeout: float = 8.0) -> None:
    """Close all clients before a signal ends the process.

    By default, SIGTERM ends a Python program at once. Unsent records are lost, and a group waits
    until the dead member's lease expires. Call this function at the start of a service:

    >>> meteor.close_on_signal()                                     # doctest: +SKIP

    When the signal arrives, publishers send their pending records, subscribers send their last
    confirms, and all leases and memberships are released. Then the previously installed handler is
    called. If it returns, or if there was none, the signal ends the process (in a shell, with
    status 143 for SIGTERM). A second signal, unless it follows within 0.1 seconds, ends the process
    at once.

    The interrupted code does not continue, and neither ``finally`` blocks nor ``atexit`` functions
    run. To run them, first install a handler that calls ``sys.exit()``.

    Args:
        signals: The signals to handle. The default is SIGTERM.
        timeout: Maximum seconds for closing. After that, the process ends in any case, and unsent
            records are lost.

    Raises:
        RuntimeError: The caller is not the main thread.
        ValueError: A signal cannot be handled, or ``timeout`` is out of range.
    """
    install(signals or (SIGTERM,), check_seconds("timeout", timeout))


class Client(Closeable):
    """A client for a server or cluster. Thread-safe, and usable after a fork."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._connector = Connector(address, timeout_s)

    @property
    def address(self) -> Address:
        """The server's address. Printing it masks the password."""
        return self._connector.address

    def stream(
        self,
        name: str,
        *,
        capacity: int | None = None,
        compression: Compression | None = None,
        checksum: bool | None = None,
        codec: CodecName | None = None,
        ordering_key: str | None = None,
        store: Store | None = None,
        max_unarchived: int | None = None,
        max_age: float | None = None,
        max_bytes: int | None = None,
        retain: float | None = None,
        retain_bytes: int | None = None,
        archive: bool = True,
        resume: bool = False,
        create: bool | None = None,
    ) -> Stream:
        """Open a stream.

        If you pass a setting, this call creates a missing stream; otherwise its first publisher
        does. Readers create no streams: with a misspelled name, they would wait forever.

        By default a stream keeps only its newest 10,000 records. Pass a larger ``capacity``, or a
        ``store`` for older records. ``StreamConfig`` describes the settings from ``capacity`` to
        ``retain_bytes``. If the stream exists, only the settings that you pass must match.

        >>> orders = m.stream("orders", capacity=1_000_000)      # doctest: +SKIP

        Args:
            name: 1 to 128 characters of A-Z a-z 0-9 . _ -
            store: Where to keep records that the ring drops: a directory, ``file:///path``,
                ``s3://bucket/prefix`` or another address, or a ``RingbufferStore``. The ring then
                drops a record only after it is in the store.
            archive: With a store, whether to run an archiver in the background until the client is
                closed. If false, run ``Stream.archiver()`` here or in another process.
            resume: With a store, if the stream does not exist, continue the stream archived there,
                with its groups (not shared groups) and transactions, instead of starting at 0.
            create: If true, create the stream now if it does not exist. Use this in consumers that
                may start before the first publisher. If false, raise ``StreamNotFound`` instead.

        Raises:
            StreamConfigMismatch: The stream exists with other settings.
            StoreMismatch: The stream has another store, or the store belongs to another stream.
            StoreUnavailable: The store cannot be reached.
            StreamNotFound: The stream does not exist, and ``create`` is false.
            ValueError, TypeError: A setting is out of range or of the wrong type.
        """
        requested = without_none(capacity=capacity, max_age=max_age, max_bytes=max_bytes)
        requested |= without_none(compression=compression, checksum=checksum, codec=codec)
        requested |= without_none(ordering_key=ordering_key)
        requested |= without_none(retain=retain, retain_bytes=retain_bytes)
        handle = open_stream(
            self._connector, name, requested, max_unarchived, store, create=create, resume=resume
        )
        stream = Stream(self, name, handle)
        if handle is not None and store is not None and archive:
            start_archiver(stream, handle, handle.find_store())
        return stream

    def streams(self) -> list[str]:
        """Return the names of all streams, sorted."""
        return list_names(self._connector, keys.STREAMS, keys.meta)

    def peer_group(
        self,
        name: str,
        *,
        instance: str | None = None,
        ttl: float | None = None,
        member_expiration: float | Unset | None = UNSET,
        election: Election | Unset | None = UNSET,
        min_size: int | None = None,
        max_inbox: int | None = None,
        max_deliveries: int | None = None,
        codec: Format | PeerCodec = "json",
        create: bool = True,
    ) -> PeerGroup:
        """Open a peer group to watch, join or message it. Close it when done, or use ``with``.

        The first client to open a group chooses its settings, which ``PeersConfig`` describes. If
        the group exists, only the settings that you pass must match.

        Args:
            name: 1 to 128 characters of A-Z a-z 0-9 . _ -, or ``name/instance``, as in the list
                that ``peer_groups()`` returns.
            instance: Selects one of several independent groups with the same name.
            codec: How this client encodes messages: "json", "msgpack", "bytes", or a ``PeerCodec``
                with your types registered.
            create: If false, raise ``PeerGroupNotFound`` instead of creating the group.

        Raises:
            PeerError: The group exists with other settings.
            PeerGroupNotFound: The group does not exist, and ``create`` is false.
            ValueError, TypeError: A setting is out of range or of the wrong type.
        """
        requested = without_none(
            ttl=ttl, min_size=min_size, max_inbox=max_inbox, max_deliveries=max_deliveries
        )
        if not isinstance(member_expiration, Unset):
            requested["member_expiration"] = member_expiration
        if not isinstance(election, Unset):
            requested["election"] = election or "none"
        return open_group(self._connector, name, instance, requested, find_codec(codec), create)

    def peer_groups(self) -> list[str]:
        """Return the names of all peer groups, sorted."""
        return list_names(self._connector, keys.PEERS, lambda name: keys.peers(name, "config"))

    @property
    def redis(self) -> redis.Redis:
        """A redis-py client for the same server, for your own commands. It retries no command.

        On a cluster it is a ``redis.RedisCluster``, which still follows redirects. Do not close it:
        ``Client.close`` does that, and a closed ``RedisCluster`` cannot be used again.
        """
        return self._connector.redis

    def describe(self) -> ServerDescription:
        """Describe the server: its version, memory, persistence and clients.

        Fields that the server hides from this user are None. On a cluster, memory and clients are
        totals over all primaries, and ``nodes`` describes each primary.
        """
        return describe_all(self._connector)

    def load_scripts(self) -> None:
        """Load all Lua scripts on behalf of users whose ACL forbids loading them (docs/acl.md).

        On a cluster, every primary loads them. Load them again after a failover.
        """
        self._connector.use_each(_load_scripts)

    def close(self) -> None:
        """Close every publisher, subscriber, peer group and archiver that this client opened.

        Closing an ``embedded://`` client also stops its server.

        Raises:
            MeteorError: A publish or confirm failed and its ``Ack`` was never checked.
            Exception: The error that ended a receiver or an archiver.
        """
        try:
            close_owned(self._connector)
        finally:
            self._connector.close()

    @property
    def closed(self) -> bool:
        """Whether the client is closed."""
        return self._connector.closed

    def __repr__(self) -> str:
        return f"<Client of {self.address}{' (closed)' if self.closed else ''}>"


def _load_scripts(connection: Connection) -> None:
    for script in ALL:
        connection.load(script)
