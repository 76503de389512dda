"""The client: where everything begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meteor_py.archive.archiver import start_archiver
from meteor_py.log.catalog import list_names
from meteor_py.log.handle import open_stream
from meteor_py.peers.codec import Format, PeerCodec, find_codec
from meteor_py.peers.config import UNSET, Election, Unset
from meteor_py.peers.group import PeerGroup, open_group
from meteor_py.records.config import Compression, check_seconds
from meteor_py.redis import keys
from meteor_py.redis.address import Address, parse
from meteor_py.redis.connector import Connector
from meteor_py.redis.scripts import ALL
from meteor_py.redis.server_info import ServerDescription, describe_server
from meteor_py.runtime.lifecycle import Closeable, close_owned
from meteor_py.store.identity import Store
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
        """Open a stream, and create it if it does not exist.

        ``StreamConfig`` describes ``capacity``, ``compression``, ``checksum``, ``codec``,
        ``ordering_key`` and ``max_unarchived``. An omitted setting is not compared with that of an
        existing stream.

        Args:
            name: 1 to 128 characters of A-Z a-z 0-9 . _ -
            store: Keeps the records that the ring drops: a directory, ``file:///path``,
                ``s3://bucket/prefix`` or another address, or a ``RingbufferStore``. The ring of a
                stream with a store drops no record before it is in the store.
            archive: With a store, run an archiver in the background until the client is closed.
                If false, archivers elsewhere do the work.
            resume: With a store, if the stream does not exist, continue the stream archived there
                instead of starting at offset 0.
            create: If false, raise ``StreamNotFound`` instead of creating the stream.

        Raises:
            StreamConfigMismatch: The stream exists with other settings.
            StoreMismatch: The stream exists with another store.
            StoreUnavailable: The store cannot be reached.
            StreamNotFound: The stream does not exist, and ``create`` is false.
        """
        if resume and store is None:
            raise ValueError("resume=True continues what is in a store; give one with store=.")
        asked = _given(
            capacity=capacity,
            compression=compression,
            checksum=checksum,
            codec=codec,
            ordering_key=ordering_key,
        )
        handle = open_stream(
            self._connector, name, asked, max_unarchived, store, create=create, resume=resume
        )
        stream = Stream(self, handle)
        if store is not None and archive:
            start_archiver(stream, handle, handle.find_store())
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
        """Open a peer group to watch it, send messages or join. Close it, or use ``with``.

        The first client to open a group chooses its settings, which ``PeersConfig`` describes. An
        omitted setting is not compared with that of an existing group.

        Args:
            name: 1 to 128 characters of A-Z a-z 0-9 . _ -, or name/instance, as ``peer_groups()``
                lists it.
            instance: Names one of several independent groups with the same name.
            codec: How this client writes messages: "json", "msgpack", "bytes", or a ``PeerCodec``
                with types of your own.
            create: If false, raise ``PeerGroupNotFound`` instead of creating the group.

        Raises:
            PeerError: The group exists with other settings.
            PeerGroupNotFound: The group does not exist, and ``create`` is false.
            ValueError, TypeError: A setting out of its range, or of the wrong type.
        """
        asked = _given(ttl=ttl, min_size=min_size, max_inbox=max_inbox)
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


def _given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}
