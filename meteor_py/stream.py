"""A stream's public handle, which opens its publishers and subscribers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from meteor_py.archive.admin import Archive
from meteor_py.archive.archiver import Archiver, stop_archiver
from meteor_py.archive.config import ArchiverConfig
from meteor_py.errors import MeteorError, ServerRefused
from meteor_py.log.handle import StreamHandle, first_readable, open_stream
from meteor_py.log.repair import repair
from meteor_py.log.retention import configure
from meteor_py.publish.publisher import Publisher
from meteor_py.records.codec import Codec, CodecName, find_codec
from meteor_py.records.config import (
    OFFSET_MAX,
    Compression,
    InitialOffset,
    OnGap,
    PublisherConfig,
    Start,
    StreamConfig,
    SubscriberConfig,
    check_choice,
    check_int,
    parse_start,
    without_none,
)
from meteor_py.records.descriptions import Description, GroupDescription, RepairReport
from meteor_py.records.position import Position
from meteor_py.records.record import RecordBatch
from meteor_py.records.times import to_ms
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import DELETE_STREAM
from meteor_py.shared.admin import SharedGroup, list_shared, open_shared, summarize_shared
from meteor_py.shared.config import ConsumerConfig, Keyless, OnPoison
from meteor_py.shared.subscriber import SharedSubscriber
from meteor_py.subscribe.dead_letters import open_letters
from meteor_py.subscribe.group_admin import delete_group, find_archiver, list_groups, seek_group
from meteor_py.subscribe.subscriber import Subscriber

if TYPE_CHECKING:
    from meteor_py.client import Client


class Stream:
    """A stream of records with offsets 0, 1, 2... Open it with ``client.stream(name)``.

    If the stream does not exist yet, ``publisher()`` creates it, and all other methods raise
    ``StreamNotFound``.
    """

    def __init__(self, client: Client, name: str, handle: StreamHandle | None) -> None:
        #: The client that opened the stream.
        self.client = client
        self._name = name
        self._opened = handle

    def _at(self, handle: StreamHandle) -> Stream:
        """Return a ``Stream`` with another handle, for example after the stream was recreated."""
        return Stream(self.client, self._name, handle)

    @property
    def _handle(self) -> StreamHandle:
        """The stream's handle. Raises ``StreamNotFound`` if the stream does not exist."""
        return self._open(create=False)

    def _open_for_writing(self) -> StreamHandle:
        """Return the stream's handle, creating the stream if it does not exist."""
        return self._open(create=True)

    def _open_for_dead_letters(self) -> StreamHandle:
        """Like ``_open_for_writing``, but a created stream has room for many dead letters."""
        if self._opened is None:
            self._opened = open_letters(self.client._connector, self._name)
        return self._opened

    def _open(self, *, create: bool) -> StreamHandle:
        if self._opened is None:
            self._opened = open_stream(self.client._connector, self._name, {}, create=create)
        assert self._opened is not None, "opened above"
        return self._opened

    @property
    def name(self) -> str:
        return self._name

    @property
    def incarnation(self) -> str:
        """An id that changes only if the stream is deleted and recreated."""
        return self._handle.incarnation

    @property
    def config(self) -> StreamConfig:
        """The settings, as this object last read or changed them."""
        return self._handle.config

    def end(self) -> Position:
        """Return the position after the last record. It can be stored and used like a checkpoint.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        return self._handle.end()

    def bounds(self) -> tuple[int, int]:
        """Return the first offset in the ring or the store, and the end of the stream.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        return self._handle.bounds()

    def publisher(
        self,
        *,
        linger: float = PublisherConfig.linger,
        compression: Compression | None = PublisherConfig.compression,
        acks: int = PublisherConfig.acks,
        delivery_timeout: float = PublisherConfig.delivery_timeout,
        max_pending_bytes: int = PublisherConfig.max_pending_bytes,
        max_record_bytes: int = PublisherConfig.max_record_bytes,
        on_error: Callable[[MeteorError], object] | None = None,
        codec: CodecName | Codec | None = None,
    ) -> Publisher:
        """Open a publisher, creating the stream if it does not exist.

        Close the publisher when done, or use a ``with`` block. ``PublisherConfig`` describes the
        settings. ``codec`` encodes values; None means the stream's codec.

        >>> with stream.publisher(linger=0.01) as pub:           # doctest: +SKIP
        ...     pub.publish(b"hello")

        Raises:
            ValueError, TypeError: A setting is out of range or of the wrong type.
        """
        config = PublisherConfig(
            linger=linger,
            compression=compression,
            acks=acks,
            delivery_timeout=delivery_timeout,
            max_pending_bytes=max_pending_bytes,
            max_record_bytes=max_record_bytes,
            on_error=on_error,
        )
        if acks and self.client.address.scheme == "fake":
            raise ValueError("fake:// has no replicas. Publish there with acks=0.")
        handle = self._open_for_writing()
        handle.connector.warn_of_hidden_history(self.name)
        return Publisher(self, handle, config, self._codec(codec))

    def subscriber(
        self,
        *,
        group: str | None = None,
        initial_offset: Start = InitialOffset.AUTO,
        lease_ttl: float = SubscriberConfig.lease_ttl,
        max_poll_interval: float = SubscriberConfig.max_poll_interval,
        on_gap: OnGap = SubscriberConfig.on_gap,
        on_gap_skipped: Callable[[int, int], object] | None = None,
        on_assigned: Callable[[Subscriber], Position | int | None] | None = None,
        auto_confirm: bool = SubscriberConfig.auto_confirm,
        codec: CodecName | Codec | None = None,
    ) -> Subscriber:
        """Open a subscriber. Close it when done, or use a ``with`` block.

        A subscriber without a group reads independently, from any offset, and stores nothing on
        the server. In a group, one member reads at a time, and confirmed records are not read
        again. ``SubscriberConfig`` describes the settings. ``codec`` decodes values; None means
        the stream's codec.

        >>> with stream.subscriber(group="billing") as sub:      # doctest: +SKIP
        ...     for record in sub.poll(timeout=1.0):
        ...         sub.confirm(record)

        Raises:
            StreamNotFound: The stream does not exist.
            InvalidInitialOffset: ``initial_offset`` is NONE, but there is no group.
            NoConfirmedOffset: ``initial_offset`` is NONE, but the group has no confirmed offset.
            ValueError, TypeError: A setting is out of range or of the wrong type.
        """
        config = SubscriberConfig(
            group=group,
            initial_offset=initial_offset,
            lease_ttl=lease_ttl,
            max_poll_interval=max_poll_interval,
            on_gap=on_gap,
            on_gap_skipped=on_gap_skipped,
            on_assigned=on_assigned,
            auto_confirm=auto_confirm,
        )
        return Subscriber(self, self._handle, config, self._codec(codec))

    def shared_subscriber(
        self,
        group: str,
        *,
        prefetch: int = ConsumerConfig.prefetch,
        prefetch_bytes: int = ConsumerConfig.prefetch_bytes,
        max_per_key: int | None = None,
        lease_ttl: float | None = None,
        max_deliveries: int | None = None,
        dead_letter: str | None = None,
        on_poison: OnPoison | None = None,
        default_key: str | None = None,
        keyless: Keyless | None = None,
        initial_offset: Start = InitialOffset.AUTO,
        max_poll_interval: float = ConsumerConfig.max_poll_interval,
        ack_timeout: float | None = ConsumerConfig.ack_timeout,
        on_gap: OnGap = ConsumerConfig.on_gap,
        on_gap_skipped: Callable[[int, int], object] | None = None,
        codec: CodecName | Codec | None = None,
    ) -> SharedSubscriber:
        """Open a consumer in a shared group. Close it when done, or use a ``with`` block.

        The consumers work in parallel. Records with the same ordering key are processed in order,
        by one consumer at a time. The first consumer chooses the group's settings, from
        ``max_per_key`` to ``keyless`` (see ``SharedConfig``). ``ConsumerConfig`` has the others.

        Args:
            group: The name of the shared group. Its first consumer creates it.
            initial_offset: Where a new group starts. With NONE, the group must exist.
            codec: Decodes values; None means the stream's codec.

        Raises:
            StreamNotFound: The stream does not exist.
            MeteorError: The stream has no ``ordering_key``.
            GroupConfigMismatch: The group exists with other settings, or is not a shared group.
            GroupNotFound: ``initial_offset`` is NONE, but the group does not exist.
            ValueError, TypeError: A setting is invalid.
        """
        requested = without_none(
            max_per_key=max_per_key,
            lease_ttl=lease_ttl,
            max_deliveries=max_deliveries,
            dead_letter=dead_letter,
            on_poison=on_poison,
            default_key=default_key,
            keyless="default" if keyless is None and default_key is not None else keyless,
        )
        config = ConsumerConfig(
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
            max_poll_interval=max_poll_interval,
            ack_timeout=ack_timeout,
            on_gap=on_gap,
            on_gap_skipped=on_gap_skipped,
        )
        if self.config.ordering_key is None:
            self._handle.snapshot()  # adopts an ordering key that was added in the meantime
        start = parse_start("initial_offset", initial_offset)
        shared, settings = open_shared(self, self._handle, group, requested, start)
        return SharedSubscriber(shared, settings, config, self._codec(codec))

    def _codec(self, codec: CodecName | Codec | None) -> Codec | None:
        return find_codec(self.config.codec if codec is None else codec)

    def shared_group(self, name: str) -> SharedGroup:
        """Return an object to describe, purge, resume, check or delete a shared group.

        Raises:
            GroupNotFound: The group does not exist.
        """
        shared = SharedGroup(self, self._handle, name)
        shared._protocol.require()
        return shared

    def read(
        self, start: int | str | datetime = "earliest", stop: int | None = None
    ) -> Iterator[RecordBatch]:
        """Iterate over the records from ``start`` to ``stop`` - 1, in batches.

        >>> for batch in stream.read(stop=1000):                 # doctest: +SKIP
        ...     print(batch.to_arrow())

        Args:
            start: An offset, "earliest", "latest" (yields nothing), or an aware datetime.
            stop: An offset, exclusive. None, or an offset beyond the end, means the current end.

        Raises:
            ValueError: An offset is negative, ``start`` is beyond the end, or the datetime has no
                time zone.
            RecordsLost: Some records are neither in the ring nor in the store.
            CorruptSegment: Some records are damaged in the store.
            StoreUnavailable: The store cannot be read at the moment.
        """
        if isinstance(start, datetime):
            to_ms(start)
        elif isinstance(start, str):
            check_choice("start", start, ("earliest", "latest"))
        else:
            check_int("start", start, 0, OFFSET_MAX)
        if stop is not None:
            check_int("stop", stop, 0, OFFSET_MAX)
        end = self.end().offset
        return self._read(start, end if stop is None else min(stop, end))

    def _read(self, start: int | str | datetime, end: int) -> Iterator[RecordBatch]:
        with self.subscriber() as sub:  # starts at the end, as "latest" requires
            if start != "latest":
                sub.seek(start)
            while sub.position < end:
                batch = sub.poll(max_records=min(end - sub.position, 10_000))
                if batch.last_offset >= end:  # "earliest" moved, because the ring dropped records
                    batch = batch[: max(end - batch.first_offset, 0)]
                if batch:
                    yield batch

    def offset_at(self, time: datetime) -> int:
        """Return the offset of the first record appended at ``time`` or later, or the end offset.

        Raises:
            ValueError: The datetime has no time zone.
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
            CorruptStream: The log holds an entry that is not a frame.
            StoreMismatch, StoreUnavailable: See ``store``.
        """
        return self._handle.offset_at(time)

    def groups(self) -> list[GroupDescription]:
        """Return descriptions of all subscriber groups, including shared ones, sorted by name.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        return self._groups(self.bounds()[1])

    def _groups(self, end: int) -> list[GroupDescription]:
        found = list_groups(self._handle, end)
        if self.config.ordering_key is not None:
            found += summarize_shared(self, self._handle)
        return sorted(found, key=lambda group: group.name)

    def group(self, name: str) -> GroupDescription:
        """Return the description of one subscriber group.

        Raises:
            GroupNotFound: The stream has no group with that name.
        """
        for found in self.groups():
            if found.name == name:
                return found
        raise reply_errors.group_not_found(self.name, name)

    def seek_group(self, group: str, to: int | str | datetime, *, force: bool = False) -> int:
        """Move a group to another offset, creating the group if needed. Return the offset.

        Args:
            group: The name of the group.
            to: An offset, "earliest", "latest", or an aware datetime, as in ``Subscriber.seek``.
            force: Move the group even if a member holds its lease. The server then refuses that
                member's confirms.

        Raises:
            GroupActive: A member holds the lease, and ``force`` is false.
            GroupConfigMismatch: The group is a shared group.
            ValueError: The offset is negative or beyond the end, or the datetime has no time zone.
        """
        keys.check_name(group, "group")
        offset, floating = self._handle.resolve(to)
        seek_group(self._handle, group, offset, floating=floating, force=force)
        return offset

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """Delete a group and its confirmed offset. The group may be shared.

        Args:
            group: The name of the group.
            force: Delete the group even if it has an owner or live consumers. Their next calls
                raise ``GroupNotFound``.

        Raises:
            GroupActive: A member holds the lease or consumers are alive, and ``force`` is false.
            GroupNotFound: The stream has no group with that name.
        """
        keys.check_name(group, "group")
        if self.config.ordering_key is not None and group in list_shared(self._handle):
            SharedGroup(self, self._handle, group).delete(force=force)
        else:
            delete_group(self._handle, group, force=force)

    def describe(self) -> Description:
        """Describe the stream: its bounds, size, settings and groups.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated. Open it again.
        """
        handle = self._handle
        meta, frames, first = handle.snapshot()
        try:
            size = handle.connector.call("MEMORY", "USAGE", handle.keys[0], "SAMPLES", 5)
        except ServerRefused:
            size = None
        return Description(
            name=self.name,
            first=first_readable(meta, first),
            next=meta.next,
            length=meta.next - first,
            frames=frames,
            bytes=size,
            appended=meta.appended,
            archived=meta.archived,
            archiver=None if meta.store is None else find_archiver(handle),
            config=meta.config,
            incarnation=meta.incarnation,
            epoch=meta.epoch,
            epoch_first=meta.epoch_first,
            groups=tuple(self._groups(meta.next)),
        )

    def configure(
        self,
        *,
        capacity: int | None = None,
        compression: Compression | None = None,
        checksum: bool | None = None,
        ordering_key: str | None = None,
        max_unarchived: int | None = None,
        max_age: float | None = None,
        max_bytes: int | None = None,
        retain: float | None = None,
        retain_bytes: int | None = None,
    ) -> None:
        """Change settings. ``StreamConfig`` describes them; None leaves a setting unchanged.

        For ``max_age``, ``max_bytes``, ``retain`` and ``retain_bytes``, 0 removes the limit. Open
        publishers keep their compression and checksum. If the new limits are lower, the ring is
        trimmed at once, in small steps, so that other clients do not wait long.

        An ordering key can be added to a stream that has none, but not changed later. It also
        applies to the records already published, and open publishers adopt it.

        Raises:
            StreamConfigMismatch: The stream has another ``ordering_key``.
            ValueError, TypeError: A setting is out of range or of the wrong type.
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
        """
        requested = without_none(
            capacity=capacity,
            compression=compression,
            checksum=checksum,
            ordering_key=ordering_key,
            max_unarchived=max_unarchived,
            max_age=max_age,
            max_bytes=max_bytes,
            retain=retain,
            retain_bytes=retain_bytes,
        )
        configure(self._handle, requested)

    def repair(self, *, dry_run: bool = True) -> RepairReport:
        """Remove log entries that no publisher wrote, such as one from a stray ``XADD``.

        If such an entry is beyond the end of the log, it blocks publishing permanently. Otherwise
        readers stop at it with ``CorruptStream``. The repair copies the ring on the server and
        replaces it with the copy, so the server needs memory for both. Publishers and subscribers
        can stay open.

        >>> stream.repair().foreign                              # doctest: +SKIP
        1
        >>> stream.repair(dry_run=False).repaired                # doctest: +SKIP
        True

        Args:
            dry_run: Change nothing, and only report what would be removed.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: The stream was deleted and recreated.
            ConnectionFailed: The server did not reply. Run the repair again to see how far it got.
            OutOfMemory: The server has no room for the copy. The log was not changed.
        """
        return repair(self._handle, dry_run=dry_run)

    @property
    def store(self) -> Archive:
        """The archived part of the stream, with methods to list, verify, compact and expire it.

        Raises:
            StoreMismatch: The stream has no store, its address is unknown, or another store is at
                that address.
            StoreUnavailable: The store cannot be reached.
        """
        return Archive(self._handle, self.groups)

    def archiver(
        self,
        *,
        segment_records: int = ArchiverConfig.segment_records,
        segment_bytes: int = ArchiverConfig.segment_bytes,
        segment_age: float = ArchiverConfig.segment_age,
        lease_ttl: float = ArchiverConfig.lease_ttl,
    ) -> Archiver:
        """Return an archiver with your own settings. ``ArchiverConfig`` describes them.

        Call ``run()``, or ``start()`` and later ``close()``. When the archiver starts, it replaces
        the one that this client runs in the background.

        Raises:
            StoreMismatch, StoreUnavailable: See ``store``.
            ValueError, TypeError: A setting is out of range or of the wrong type.
        """
        config = ArchiverConfig(
            segment_records=segment_records,
            segment_bytes=segment_bytes,
            segment_age=segment_age,
            lease_ttl=lease_ttl,
        )
        return Archiver(self, self._handle, self._handle.find_store(), config)

    def delete(self, *, history: bool = False) -> None:
        """Delete the stream and its records. Open publishers and subscribers then raise errors.

        Args:
            history: Also delete the archived records in the store. By default the files stay.

        Raises:
            StreamNotFound: The stream was already deleted.
            LogTruncated: The stream was deleted and recreated. The new stream is not deleted.
            StoreMismatch, StoreUnavailable: With ``history``; see ``store``.
        """
        handle, connector = self._handle, self._handle.connector
        store = handle.find_store() if history and handle.store_id is not None else None
        stop_archiver(handle)
        # Use bytes, not str: the keys of shared groups may contain any bytes.
        found = connector.find_keys(keys.everything(self.name))
        log, meta = handle.keys[0].encode(), handle.keys[1].encode()
        settings = keys.settings(self.name).encode()
        names: list[Any] = [meta, *sorted((found | {log, settings}) - {meta})]
        reply = connector.run(DELETE_STREAM, names, [self.incarnation])
        # If the stream existed a moment ago and is now gone, assume that an earlier attempt deleted
        # it, and that only the reply was lost.
        if reply[0] != b"OK" and not (reply[0] == b"NOSTREAM" and meta in found):
            raise reply_errors.stream_gone(self.name, reply[0])
        connector.call("SREM", keys.STREAMS, self.name)
        if connector.call("EXISTS", handle.keys[1]):  # recreated: list it again
            connector.call("SADD", keys.STREAMS, self.name)
        if store is not None:
            store.delete(self.incarnation)

    def __repr__(self) -> str:
        return f"<Stream {self.name!r} on {self.client.address}>"
