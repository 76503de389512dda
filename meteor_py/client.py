"""The client: where everything begins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meteor_py.archive.archiver import start_archiver
from meteor_py.errors import StreamConfigMismatch
from meteor_py.log.catalog import check_settings, create_stream, find_stream, list_names
from meteor_py.log.handle import StreamHandle
from meteor_py.peers.codec import Format, PeerCodec, find_codec
from meteor_py.peers.config import UNSET, Election, Unset
from meteor_py.peers.group import PeerGroup, open_group
from meteor_py.records.config import (
    OFFSET_MAX,
    Compression,
    StreamConfig,
    check_int,
    check_seconds,
)
from meteor_py.redis import keys
from meteor_py.redis.address import Address, parse
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import ALL
from meteor_py.redis.server_info import ServerDescription, describe_server
from meteor_py.runtime.lifecycle import Closeable, close_owned
from meteor_py.store.identity import Store, open_store, settle
from meteor_py.stream import Stream

if TYPE_CHECKING:
    import redis


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
        self._connector = Connector(address, timeout_s)

    @property
    def address(self) -> Address:
        """The address that the client was opened with. It shows no password."""
        return self._connector.address

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
        if create:
            founder, meta = create_stream(
                self._connector, name, config, max_unarchived, backend, resume=resume
            )
        else:
            founder, meta = False, find_stream(self._connector, name)
        if meta.store is None and (backend is not None or max_unarchived is not None):
            raise StreamConfigMismatch(
                f"Stream {name!r} exists without a store; open it without one, or create another "
                "stream.",
                stream=name,
            )
        check_settings(name, meta, asked)
        if backend is not None:
            settle(backend, name, meta, founder=founder, resume=resume)
        handle = StreamHandle(self._connector, name, meta, backend)
        stream = Stream(self, handle)
        if backend is not None and archive:
            start_archiver(stream, handle, backend)
        return stream

    def streams(self) -> list[str]:
        """The names of all streams, sorted."""
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
        return open_group(self._connector, name, instance, asked, find_codec(codec), create)

    def peer_groups(self) -> list[str]:
        """The names of all peer groups, sorted."""
        return list_names(self._connector, keys.PEERS, lambda name: keys.peers(name, "config"))

    # -- the server ----------------------------------------------------------------------------

    @property
    def redis(self) -> redis.Redis:
        """A plain redis-py client of the same server, for whatever we do not offer.

        Closed with this client. It does not retry.
        """
        return self._connector.redis

    def describe(self) -> ServerDescription:
        """Look at the server: what it is, its memory, its clients.

        Whatever it will not tell this user is None.
        """
        return self._connector.use(describe_server)

    def load_scripts(self) -> None:
        """Load all scripts, for users that may run but not load them (docs/acl.md)."""
        for script in ALL:
            self._connector.call("SCRIPT", "LOAD", script.source)

    def close(self) -> None:
        """Close its publishers, its subscribers of groups, its archivers, and the connection.

        A server that was ours alone ends.

        Raises:
            MeteorError: A record could not be published or confirmed, and nobody was told of it.
            Exception: What ended a receiver.
        """
        try:
            close_owned(self._connector)
        finally:
            self._connector.close()

    def __repr__(self) -> str:
        return f"<Client of {self.address}{' (closed)' if self._connector.closed else ''}>"
