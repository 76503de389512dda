"""A stream: the handle from which publishers and readers are opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from meteor_py.archive.admin import Archive
from meteor_py.archive.archiver import Archiver, stop_archiver
from meteor_py.archive.config import ArchiverConfig
from meteor_py.errors import ServerRefused
from meteor_py.log.handle import StreamHandle, first_readable
from meteor_py.publish.publisher import Publisher
from meteor_py.records.codec import Codec, find_codec
from meteor_py.records.config import (
    OFFSET_MAX,
    Compression,
    InitialOffset,
    OnGap,
    PublisherConfig,
    StreamConfig,
    SubscriberConfig,
    check_choice,
    check_int,
)
from meteor_py.records.descriptions import Description, GroupDescription
from meteor_py.records.position import Position
from meteor_py.records.record import RecordBatch
from meteor_py.records.times import to_ms
from meteor_py.redis import keys, reply_errors
from meteor_py.redis.scripts import CONFIGURE_STREAM, DELETE_STREAM
from meteor_py.shared.admin import SharedGroup, list_shared, open_shared, summarize_shared
from meteor_py.shared.config import ConsumerConfig, Keyless, OnPoison
from meteor_py.shared.subscriber import SharedSubscriber
from meteor_py.subscribe.group_admin import delete_group, find_archiver, list_groups, seek_group
from meteor_py.subscribe.subscriber import Subscriber

if TYPE_CHECKING:
    from meteor_py.client import Client


class Stream:
    """One stream of records with dense offsets 0, 1, 2... Get it with ``client.stream(name)``."""

    def __init__(self, client: Client, handle: StreamHandle) -> None:
        #: The client that opened it.
        self.client = client
        self._handle = handle

    def _at(self, handle: StreamHandle) -> Stream:
        """Return the same stream with another handle, as after it was recreated."""
        return Stream(self.client, handle)

    @property
    def name(self) -> str:
        return self._handle.name

    @property
    def incarnation(self) -> str:
        """An id that the stream has from its creation until it is deleted."""
        return self._handle.incarnation

    @property
    def config(self) -> StreamConfig:
        """The settings, as of when the stream was opened or configured here."""
        return self._handle.config

    def end(self) -> Position:
        """Return where the next record will be; as ``Subscriber.checkpoint``, to be kept outside.

        Raises:
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
        """
        return self._handle.end()

    def bounds(self) -> tuple[int, int]:
        """Return the first offset in the ring or the store, and the end of the stream.

        Raises:
            StreamNotFound, LogTruncated: The stream was deleted, or recreated.
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
        codec: str | Codec | None = None,
    ) -> Publisher:
        """Open a publisher. Close it, or use ``with``.

        ``PublisherConfig`` describes the settings. ``codec`` encodes values; None means the
        stream's codec.

        Raises:
            ValueError, TypeError: A setting out of its range, or of the wrong type.
        """
        config = PublisherConfig(
            linger=linger,
            compression=compression,
            acks=acks,
            delivery_timeout=delivery_timeout,
            max_pending_bytes=max_pending_bytes,
            max_record_bytes=max_record_bytes,
        )
        if acks and self._handle.connector.address.scheme == "fake":
            raise ValueError("fake:// has no replicas; publish there with acks=0.")
        self._handle.connector.warn_of_hidden_history()
        return Publisher(
            self, self._handle, config, find_codec(self.config.codec if codec is None else codec)
        )

    def subscriber(
        self,
        *,
        group: str | None = None,
        initial_offset: InitialOffset | str = InitialOffset.AUTO,
        lease_ttl: float = SubscriberConfig.lease_ttl,
        max_poll_interval: float = SubscriberConfig.max_poll_interval,
        on_gap: OnGap = SubscriberConfig.on_gap,
        on_gap_skipped: Callable[[int, int], object] | None = None,
        on_assigned: Callable[[Subscriber], Position | int | None] | None = None,
        auto_confirm: bool = SubscriberConfig.auto_confirm,
        codec: str | Codec | None = None,
    ) -> Subscriber:
        """Open a subscriber. Close it, or use ``with``.

        Without a group, it reads on its own, from anywhere, and leaves no trace on the server. In a
        group, one member reads at a time, and confirmed records are not read again.
        ``SubscriberConfig`` describes the settings. ``codec`` decodes values; None means the
        stream's codec.

        Raises:
            InvalidInitialOffset: ``initial_offset`` is NONE, without a group.
            NoConfirmedOffset: ``initial_offset`` is NONE, and the group has confirmed nothing.
            ValueError, TypeError: A setting out of its range, or of the wrong type.
        """
        check_choice("initial_offset", initial_offset, tuple(InitialOffset))
        config = SubscriberConfig(
            group=group,
            initial_offset=InitialOffset(initial_offset),
            lease_ttl=lease_ttl,
            max_poll_interval=max_poll_interval,
            on_gap=on_gap,
            on_gap_skipped=on_gap_skipped,
            on_assigned=on_assigned,
            auto_confirm=auto_confirm,
        )
        return Subscriber(
            self, self._handle, config, find_codec(self.config.codec if codec is None else codec)
        )

    def shared_subscriber(
        self,
        group: str,
        *,
        prefetch: int = ConsumerConfig.prefetch,
        max_per_key: int | None = None,
        lease_ttl: float | None = None,
        max_deliveries: int | None = None,
        dead_letter: str | None = None,
        on_poison: OnPoison | None = None,
        default_key: str | None = None,
        keyless: Keyless | None = None,
        initial_offset: InitialOffset | str = InitialOffset.AUTO,
        max_poll_interval: float = ConsumerConfig.max_poll_interval,
        on_gap: OnGap = ConsumerConfig.on_gap,
        on_gap_skipped: Callable[[int, int], object] | None = None,
        codec: str | Codec | None = None,
    ) -> SharedSubscriber:
        """Open a consumer of a shared group; close it, or use ``with``.

        The consumers of a shared group work in parallel; records of one ordering key are processed
        in order, by one consumer at a time. ``SharedConfig`` documents the settings of the group,
        ``max_per_key`` to ``keyless``: they count when it is created, and must be the same, or left
        out, later. ``ConsumerConfig`` documents those of this consumer.

        Args:
            group: The name of the shared group. Its first consumer creates it.
            initial_offset: Where a new group begins: EARLIEST (AUTO means the same here) or LATEST;
                NONE: it must exist.
            codec: How to decode values; None = as the stream says.

        Raises:
            MeteorError: The stream has no ``ordering_key``.
            GroupConfigMismatch: It exists with other settings, or for one reader at a time.
            GroupNotFound: NONE, and it does not exist.
            ValueError, TypeError: A setting out of its range, or of the wrong type.
        """
        given = {
            "max_per_key": max_per_key,
            "lease_ttl": lease_ttl,
            "max_deliveries": max_deliveries,
            "dead_letter": dead_letter,
            "on_poison": on_poison,
            "default_key": default_key,
            "keyless": keyless,
        }
        check_choice("initial_offset", initial_offset, tuple(InitialOffset))
        config = ConsumerConfig(prefetch, max_poll_interval, on_gap, on_gap_skipped)
        asked = {setting: value for setting, value in given.items() if value is not None}
        start = InitialOffset(initial_offset)
        shared, settings = open_shared(self, self._handle, group, asked, start)
        found = find_codec(self.config.codec if codec is None else codec)
        return SharedSubscriber(shared, settings, config, found)

    def shared_group(self, name: str) -> SharedGroup:
        """Return a shared group, to describe, purge, resume, check or delete it.

        Raises:
            GroupNotFound: It does not exist.
        """
        shared = SharedGroup(self, self._handle, name)
        shared._protocol.require()
        return shared

    def read(
        self, start: int | str | datetime = "earliest", stop: int | None = None
    ) -> Iterator[RecordBatch]:
        """Iterate over the batches from ``start`` to before ``stop``, and end there.

        Args:
            start: An offset, "earliest", "latest" (which gives nothing), or an aware datetime.
            stop: An offset, exclusive; None, or one beyond the end, means the end as it is now.

        Raises:
            ValueError: A negative offset, one beyond the end, or a datetime without a timezone.
            RecordsLost: Some are neither in the ring nor in the store.
            CorruptSegment: Some are damaged in the store.
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
        with self.subscriber() as sub:  # stands at the end
            if start != "latest":
                sub.seek(start)
            while sub.position < end:
                batch = sub.poll(max_records=min(end - sub.position, 10_000))
                if batch.last_offset >= end:  # "earliest" has moved in the meantime
                    batch = batch[: max(end - batch.first_offset, 0)]
                if batch:
                    yield batch

    def offset_at(self, time: datetime) -> int:
        """Return the first offset that was appended at ``time`` or later; the end if none was.

        Raises:
            ValueError: A datetime without a timezone.
            StreamNotFound: The stream was deleted.
            CorruptStream: The log holds an entry that is not a frame.
        """
        return self._handle.offset_at(time)

    def groups(self) -> list[GroupDescription]:
        """The groups of the stream, shared ones too, by name.

        Raises:
            StreamNotFound, LogTruncated: As ``describe``.
        """
        return self._groups(self.bounds()[1])

    def _groups(self, end: int) -> list[GroupDescription]:
        found = list_groups(self._handle, end)
        if self.config.ordering_key is not None:
            found += summarize_shared(self, self._handle)
        return sorted(found, key=lambda group: group.name)

    def group(self, name: str) -> GroupDescription:
        """One of them.

        Raises:
            GroupNotFound: There is none of that name.
        """
        for found in self._groups(self.bounds()[1]):
            if found.name == name:
                return found
        raise reply_errors.group_not_found(self.name, name)

    def seek_group(self, group: str, to: int | str | datetime, *, force: bool = False) -> int:
        """Let a group go on from somewhere else, and return the offset; it begins if it is new.

        Args:
            group: Its name.
            to: An offset, "earliest", "latest", or an aware datetime, as in ``Subscriber.seek``.
            force: Take an active group from its owner, whose confirms are then refused.

        Raises:
            GroupActive: A member has the lease, and ``force`` is False.
            ValueError: A negative offset, one beyond the end, or a datetime without a timezone.
        """
        keys.check_name(group, "group")
        offset, floating = self._handle.resolve(to)
        seek_group(self._handle, group, offset, floating=floating, force=force)
        return offset

    def delete_group(self, group: str, *, force: bool = False) -> None:
        """Delete a group, shared or not, with what it has confirmed.

        Args:
            group: Its name.
            force: Even if a member has the lease, or there are consumers; they will be told.

        Raises:
            GroupActive: Somebody is at work, and ``force`` is False.
            GroupNotFound: There is none.
        """
        keys.check_name(group, "group")
        if self.config.ordering_key is not None and group in list_shared(self._handle):
            SharedGroup(self, self._handle, group).delete(force=force)
        else:
            delete_group(self._handle, group, force=force)

    def describe(self) -> Description:
        """Look at the stream: bounds, size, settings, groups.

        Raises:
            StreamNotFound: The stream was deleted.
            LogTruncated: It was deleted and created anew: open it again.
        """
        meta, frames, first = self._handle.look()
        try:
            size = self._handle.connector.call(
                "MEMORY", "USAGE", self._handle.keys[0], "SAMPLES", 5
            )
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
            archiver=None if meta.store is None else find_archiver(self._handle),
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
        max_unarchived: int | None = None,
    ) -> None:
        """Change settings. Publishers that are open keep theirs for compression and checksum.

        A smaller capacity trims the ring in small steps, so that nobody has to wait.

        Raises:
            ValueError, TypeError: A setting out of its range, or of the wrong type.
            StreamNotFound: The stream was deleted.
            LogTruncated: It was deleted and created anew.
        """
        if max_unarchived is not None and self._handle.store_id is None:
            raise ValueError("max_unarchived is for a stream with a store, which this one has not.")
        given = {
            "capacity": capacity,
            "compression": compression,
            "checksum": checksum,
            "max_unarchived": max_unarchived,
        }
        asked = {setting: value for setting, value in given.items() if value is not None}
        present = self._handle.look()[0].config  # others may have changed it
        config = replace(present, **asked).check_room()  # type: ignore[arg-type]  # checked inside
        fields = config.to_fields()
        others = [item for s in asked if s != "capacity" for item in (s, fields[s])]
        new_capacity = fields["capacity"] if capacity is not None else ""
        logs = [*self._handle.keys, *self._handle.index_keys]
        while (
            self._handle.run(CONFIGURE_STREAM, [self.incarnation, new_capacity, *others], logs)[0]
            == b"MORE"
        ):
            pass  # ends: each step trims at least one entry of a finite ring
        self._handle.config = config

    @property
    def store(self) -> Archive:
        """What is in the store of the stream.

        Raises:
            StoreMismatch: It has none, or it is not found at its address.
            StoreUnavailable: It cannot be reached.
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
        """Return an archiver with settings of your own, described by ``ArchiverConfig``.

        ``run()`` it, or ``start()`` and ``close()`` it. The archiver that this client runs in the
        background stops when this one starts.

        Raises:
            StoreMismatch, StoreUnavailable: As ``store``.
            ValueError, TypeError: A setting out of its range, or of the wrong type.
        """
        config = ArchiverConfig(
            segment_records=segment_records,
            segment_bytes=segment_bytes,
            segment_age=segment_age,
            lease_ttl=lease_ttl,
        )
        return Archiver(self, self._handle, self._handle.find_store(), config)

    def delete(self, *, history: bool = False) -> None:
        """Delete the stream with all its records. Publishers and subscribers will be told.

        Args:
            history: Also what is in the store; else the files stay.

        Raises:
            StreamNotFound: It was deleted before.
            LogTruncated: It was deleted and created anew; the new one is left alone.
        """
        backend = (
            self._handle.find_store() if history and self._handle.store_id is not None else None
        )
        stop_archiver(self._handle)
        found: set[bytes] = set()  # of which some end with any bytes: the ids of groups
        cursor, log, meta = b"0", self._handle.keys[0].encode(), self._handle.keys[1].encode()
        while True:
            cursor, part = self._handle.connector.call(
                "SCAN", cursor, "MATCH", keys.everything(self.name), "COUNT", 1000
            )
            found.update(part)
            if cursor == b"0":
                break
        names: list[Any] = [meta, *sorted((found | {log}) - {meta})]
        answer = self._handle.connector.run(DELETE_STREAM, names, [self.incarnation])
        # Not found, though it was there before: deleted by a first try whose answer was lost.
        if answer[0] != b"OK" and not (answer[0] == b"NOSTREAM" and meta in found):
            raise reply_errors.stream_gone(self.name, answer[0])
        self._handle.connector.call("SREM", keys.STREAMS, self.name)
        if self._handle.connector.call(
            "EXISTS", self._handle.keys[1]
        ):  # created anew by somebody meanwhile
            self._handle.connector.call("SADD", keys.STREAMS, self.name)
        if backend is not None:
            backend.delete(self.incarnation)

    def __repr__(self) -> str:
        return f"<Stream {self.name!r} on {self.client.address}>"
