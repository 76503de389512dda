"""The client: where everything begins."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from redis.connection import UnixDomainSocketConnection

from meteor_py.archive.archiver import close_archivers, start_archiver
from meteor_py.errors import (
    ConnectionFailed,
    MeteorError,
    OutOfMemory,
    StreamConfigMismatch,
    StreamNotFound,
)
from meteor_py.peers.codec import Format, PeerCodec, find_codec
from meteor_py.peers.config import UNSET, Election, Unset
from meteor_py.peers.group import PeerGroup
from meteor_py.peers.opening import open_group
from meteor_py.peers.registry import close_groups
from meteor_py.publish.publisher import close_publishers
from meteor_py.records.config import (
    OFFSET_MAX,
    UNARCHIVED_CAPACITIES,
    Compression,
    StreamConfig,
    check_int,
    check_seconds,
)
from meteor_py.records.descriptions import Meta
from meteor_py.redis import keys
from meteor_py.redis.address import Address, parse
from meteor_py.redis.connection import Argument, Connection, connection_options
from meteor_py.redis.scripts import ALL, CREATE_STREAM, Script
from meteor_py.redis.server_info import ServerDescription, describe_server
from meteor_py.redis.server_warnings import warn_of_dangers, warn_of_hidden_history
from meteor_py.runtime.lifecycle import Closeable
from meteor_py.shared.subscriber import close_shared_subscribers
from meteor_py.store.base import RingbufferStore
from meteor_py.store.identity import Store, founding_fields, open_store, settle
from meteor_py.stream import Stream
from meteor_py.subscribe.subscriber import close_subscribers

if TYPE_CHECKING:
    import redis

    from meteor_py.server import EmbeddedServer

_T = TypeVar("_T")


def connect(url: str | None = None, *, timeout: float = 5.0) -> Client:
    """Return a client of the server at ``url``. Nothing is sent before it is used.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` (TLS), ``unix:///socket``;
            ``embedded://``: a private server that lives as long as the client;
            ``embedded:///dir``: a server kept in ``dir``, shared by all processes that open it;
            ``fake://``: no server at all, inside this process (for tests).
            Without one: ``$METEOR_URL``, else a kept server of the user's own, so that two
            terminals meet.
        timeout: Seconds to wait for a connection and for each answer.

    Raises:
        ValueError: The address cannot be understood.

    >>> with connect("embedded://") as m:
    ...     stream = m.stream("orders")
    ...     with stream.publisher() as pub:
    ...         pub.publish(b"hello").result()
    0
    """
    return Client(parse(url), check_seconds("timeout", timeout))


class Client(Closeable):
    """A server, and the streams on it. Safe for several threads, and usable after a fork."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._server: EmbeddedServer | None = None
        self._resolved: Address | None = None
        self._commands: Connection | None = None
        self._redis: redis.Redis | None = None
        self._checked = False
        self._in_use = False
        self._closed = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    # -- streams -------------------------------------------------------------------------------

    def stream(
        self,
        name: str,
        *,
        capacity: int | None = None,
        compression: Compression | None = None,
        checksum: bool | None = None,
        codec: str | None = None,
        ordering_key: str | None = None,
        store: Store | None = None,
        max_unarchived: int | None = None,
        archive: bool = True,
        resume: bool = False,
        create: bool = True,
    ) -> Stream:
        """Open a stream; create it if it does not exist.

        Settings that are not given are not compared with those of an existing stream.

        Args:
            name: 1 to 128 of A-Z a-z 0-9 . _ -
            capacity: Records that the ring keeps at least (10,000).
            compression: "none" (default), "lz4" or "zstd", for frames of several records.
            checksum: Whether each frame carries a crc32.
            codec: "bytes" (default), "text", "json" or "msgpack".
            ordering_key: "key" or "header:NAME": what makes groups of the records, for
                ``stream.shared_subscriber()``.
            store: Where records are kept when the ring drops them: a directory, ``file:///path``,
                ``s3://bucket/prefix``..., or a ``RingbufferStore``. The stream then never drops
                what is not in the store.
            max_unarchived: Records that may wait for the archiver (10 x capacity); beyond, so do
                publishers, and fail in the end with ``StreamFull``.
            archive: With a store: archive in the background until the client is closed, taking
                turns with others who do; False leaves it to them.
            resume: With a store, if there is no such stream: go on with the one whose history it
                holds, in place of beginning at 0.
            create: False raises ``StreamNotFound`` in place of creating.

        Raises:
            StreamConfigMismatch: It exists with other settings.
            StoreMismatch: It exists with another store.
            StoreUnavailable: The store cannot be reached.
            StreamNotFound: It does not exist, and ``create`` is False.
        """
        keys.check_name(name)
        given = {
            "capacity": capacity,
            "compression": compression,
            "checksum": checksum,
            "codec": codec,
            "ordering_key": ordering_key,
        }
        asked = {setting: value for setting, value in given.items() if value is not None}
        config = replace(StreamConfig(), **asked)  # type: ignore[arg-type]  # checked inside
        if max_unarchived is not None:  # compared with the capacity of the stream, once it is known
            asked["max_unarchived"] = check_int("max_unarchived", max_unarchived, 1, OFFSET_MAX)
        backend = None if store is None else open_store(store, name)
        if backend is None and resume:
            raise ValueError("resume=True goes on with what is in a store; give one with store=.")
        founder = False
        if create:
            founder, meta = self._create(name, config, max_unarchived, backend, resume)
        else:
            meta = self._find(name)
        if meta.store is None and (backend is not None or max_unarchived is not None):
            raise StreamConfigMismatch(
                f"Stream {name!r} exists without a store; open it without one, or create another "
                "stream.",
                stream=name,
            )
        for setting, value in asked.items():
            if getattr(meta.config, setting) != value:
                fixed = setting in ("codec", "ordering_key")
                change = "create another stream" if fixed else "change it with stream.configure()"
                raise StreamConfigMismatch(
                    f"Stream {name!r} exists with {setting}={getattr(meta.config, setting)!r}, "
                    f"not {value!r}; leave the setting out, or {change}.",
                    stream=name,
                )
        if backend is None:
            return Stream(self, name, meta)
        settle(backend, name, meta, founder=founder, resume=resume)
        stream = Stream(self, name, meta, backend)
        if archive:
            start_archiver(stream, backend)
        return stream

    def streams(self) -> list[str]:
        """The names of all streams, sorted."""
        return self._existing(keys.STREAMS, keys.meta)

    def _existing(self, names: str, key: Callable[[str], str]) -> list[str]:
        """Of the names in a set those that have a key, sorted."""
        # A name that cannot be decoded is not of ours: as it is written here, it has no key.
        members = self.call("SMEMBERS", names)
        found = sorted(name.decode(errors="backslashreplace") for name in members)
        there: list[str] = []
        for start in range(0, len(found), 1000):
            part = found[start : start + 1000]
            answers = self.pipeline([("EXISTS", key(name)) for name in part])
            there += [name for name, exists in zip(part, answers, strict=True) if exists]
        return there

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
        codec: Format | PeerCodec = "json",
        create: bool = True,
    ) -> PeerGroup:
        """Open a peer group: look on, send messages, or join; close it, or use ``with``.

        Who opens it first chooses its settings; those that are not given are not compared.

        Args:
            name: 1 to 128 of A-Z a-z 0-9 . _ -; or name/instance, as ``groups()`` has it.
            instance: One of several groups of that name, apart from each other.
            ttl: Seconds of silence after which a member is taken for dead (10).
            member_expiration: Seconds after which a named member that is dead is removed; None,
                the default, is never.
            election: Who leads: the "oldest" member (default), a "random" one, or None: nobody.
            min_size: Members that must be alive before a leader is elected (1).
            max_inbox: Messages of a member that may wait (10,000).
            codec: How messages of this handle are written: "json", "msgpack", "bytes", or a
                ``PeerCodec`` with types of your own. Not a setting of the group.
            create: Whether to begin it if it does not exist.

        Raises:
            PeerError: It exists with other settings.
            PeerGroupNotFound: It does not exist, and ``create`` is false.
            ValueError, TypeError: A setting out of its range, or of the wrong type.
        """
        given = {"ttl": ttl, "min_size": min_size, "max_inbox": max_inbox}
        asked: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if not isinstance(member_expiration, Unset):
            asked["member_expiration"] = member_expiration
        if not isinstance(election, Unset):
            asked["election"] = election or "none"
        return open_group(self, name, instance, asked, find_codec(codec), create)

    def peer_groups(self) -> list[str]:
        """The names of all peer groups, sorted."""
        return self._existing(keys.PEERS, lambda name: keys.peers(name, "config"))

    def _create(
        self,
        name: str,
        config: StreamConfig,
        max_unarchived: int | None,
        store: RingbufferStore | None,
        resume: bool,
    ) -> tuple[bool, Meta]:
        """Create a stream unless it exists; tell whether that was done."""
        extra: dict[str, str] = {}
        if store is not None or max_unarchived is not None:
            fields = self.call("HGETALL", keys.meta(name))
            if fields:
                return False, Meta.parse(name, fields)
            if store is None:
                raise ValueError(
                    "max_unarchived is for a stream with a store; give store= as well."
                )
            most = max_unarchived or UNARCHIVED_CAPACITIES * config.capacity
            config = replace(config, store=store.uri, max_unarchived=most).check_room()
            extra = founding_fields(self, store, name, resume)
        try:
            self.call("SADD", keys.STREAMS, name)
        except OutOfMemory:
            fields = self.call("HGETALL", keys.meta(name))
            if not fields:
                raise
            return False, Meta.parse(name, fields)  # a full server can be read, and emptied
        fields = [item for pair in (config.to_fields() | extra).items() for item in pair]
        incarnation = extra.get("incarnation") or secrets.token_hex(8)

        def create(connection: Connection) -> Any:
            return connection.run(
                CREATE_STREAM, [keys.meta(name)], [incarnation, connection.history, *fields]
            )

        created, fields = self.use(create)
        return bool(created), Meta.parse(name, fields)

    def _find(self, name: str) -> Meta:
        fields = self.call("HGETALL", keys.meta(name))
        if not fields:
            raise StreamNotFound(
                f"There is no stream {name!r} on {self.address}; publish to it, or create it "
                "with client.stream(name).",
                stream=name,
            )
        return Meta.parse(name, fields)

    # -- the server ----------------------------------------------------------------------------

    @property
    def redis(self) -> redis.Redis:
        """A plain redis-py client of the same server, for whatever we do not offer.

        Closed with this client. It does not retry.
        """
        with self._exclusive():
            if self._redis is None:
                from redis import ConnectionPool, Redis

                address = self.resolve()
                pool = ConnectionPool(
                    connection_class=address.connection_class,
                    **address.options,
                    **connection_options(address, self.timeout_s),
                )
                self._redis = Redis.from_pool(pool)
            self.resolve()  # refuses if closed
            return self._redis

    def describe(self) -> ServerDescription:
        """Look at the server: what it is, its memory, its clients.

        Whatever it will not tell this user is None.
        """
        return self.use(describe_server)

    def load_scripts(self) -> None:
        """Load all scripts, for users that may run but not load them (docs/acl.md)."""
        for script in ALL:
            self.call("SCRIPT", "LOAD", script.source)

    def close(self) -> None:
        """Close its publishers, its subscribers of groups, its archivers, and the connection.

        A server that was ours alone ends.

        Raises:
            MeteorError: A record could not be published or confirmed, and nobody was told of it.
            Exception: What ended a receiver.
        """
        try:
            try:
                try:
                    close_groups(self)
                    close_shared_subscribers(self)
                finally:
                    close_subscribers(self)
            finally:
                try:
                    close_publishers(self)  # which may wait for the archiver to make room
                finally:
                    close_archivers(self)
        finally:
            with self._exclusive():
                self._closed = True
                if self._commands is not None:
                    self._commands.close()
                if self._redis is not None:
                    self._redis.close()
                if self._server is not None:
                    self._server.close()

    def __repr__(self) -> str:
        return f"<Client of {self.address}{' (closed)' if self._closed else ''}>"

    # -- for the other modules -----------------------------------------------------------------

    @property
    def is_private(self) -> bool:
        """Whether the server and its memory end with this client, or this process."""
        return self.address.scheme == "fake" or (
            self.address.scheme == "embedded" and not self.address.place
        )

    def open_connection(self) -> Connection:
        """A connection of its own for a publisher or subscriber, who closes it."""
        return Connection(self.resolve(), self.timeout_s)

    def warn_of_hidden_history(self) -> None:
        """Warn, in the thread of the caller, if losses of the server cannot be noticed."""
        try:
            self.use(warn_of_hidden_history)
        except ConnectionFailed:
            pass  # a publisher may be opened before its server is up

    def call(self, *command: Argument) -> Any:
        """Send a command that may be repeated, and return its answer."""
        return self.use(lambda connection: connection.call(*command))

    def pipeline(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Send commands that may be repeated, and return their answers."""
        return self.use(lambda connection: connection.pipeline(commands, self.timeout_s))

    def run(self, script: Script, script_keys: Sequence[str], args: Sequence[Argument] = ()) -> Any:
        """Run a script that may be repeated, and return its answer."""
        return self.use(lambda connection: connection.run(script, script_keys, args))

    def use(self, work: Callable[[Connection], _T]) -> _T:
        """Do something that may be repeated on the common connection.

        A connection that was idle may have died unnoticed, so a failure on it is tried once more
        on a new one.
        """
        with self._exclusive():
            self._check_open()
            if self._commands is None:
                self._commands = self.open_connection()
            if self._in_use:  # a signal handler, in the middle of another call
                connection = self.open_connection()
                try:
                    return work(connection)
                finally:
                    connection.close()
            connection = self._commands
            was_connected = connection.connected
            self._in_use = True
            try:
                if not self._checked:
                    warn_of_dangers(connection)
                    self._checked = True
                return work(connection)
            except ConnectionFailed:
                if not was_connected:
                    raise
                return work(connection)
            finally:
                self._in_use = False

    def resolve(self) -> Address:
        """The address to connect to; starts the embedded server if that is what it is."""
        with self._exclusive():
            self._check_open()
            if self._resolved is None:
                self._resolved = self._resolve()
            return self._resolved

    def _resolve(self) -> Address:
        if self.address.scheme == "fake":
            from meteor_py.redis.fake import fake_address

            return fake_address(self.address)
        if self.address.scheme == "embedded":
            from meteor_py.server import open_embedded

            self._server = open_embedded(self.address.place)
            options = {"path": self._server.socket_path, "password": self._server.password}
            return replace(
                self.address, options=options, connection_class=UnixDomainSocketConnection
            )
        return self.address

    def _check_open(self) -> None:
        if self._closed:
            raise MeteorError(f"The client of {self.address} is closed; connect again.")

    def _exclusive(self) -> threading.RLock:
        """The lock; a new one in a forked child, where its holder may not be."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
        return self._lock
