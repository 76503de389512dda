"""Unreadable records in a shared group are reported once, and all other records are delivered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.shared.frame_cache import FrameCache
from tests.support.servers import plain_client
from tests.support.sharing import STREAM, Queue, drain, offsets
from tests.support.waiting import eventually


def rewrite(url: str, number: int, change: Callable[[dict[bytes, bytes]], object]) -> None:
    """Change the fields of one entry in the log."""
    log = keys.log(STREAM)
    with plain_client(url) as plain:
        entries = plain.xrange(log)
        plain.delete(log)
        for at, (entry_id, fields) in enumerate(entries):
            if at == number:
                change(fields)
            plain.xadd(log, fields, id=entry_id)


def damage(fields: dict[bytes, bytes]) -> None:
    fields[b"crc"] = b"1"


def make_newer(fields: dict[bytes, bytes]) -> None:
    del fields[b"crc"]
    (name,) = fields.keys() - {b"t"}
    fields[b"9" + name[1:]] = fields.pop(name)


def make_foreign(fields: dict[bytes, bytes]) -> None:
    fields[b"more"] = b"of it"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (damage, meteor.CorruptFrame),
        (make_newer, meteor.UnsupportedFrame),
        (make_foreign, meteor.CorruptFrame),
    ],
)
def test_unreadable_frame_is_reported_once_and_others_are_delivered(
    url: str, change: Callable[[dict[bytes, bytes]], object], error: type[meteor.ReadError]
) -> None:
    with Queue(url, settings={"checksum": True}) as queue:
        for _ in range(3):
            queue.publish("AB", frame=2)
        rewrite(url, 1, change)
        consumer = queue.consumer()
        with pytest.raises(error) as raised:
            consumer.poll(5)
        assert (raised.value.first, raised.value.last) == (2, 3)  # type: ignore[attr-defined]
        assert "seek" not in str(raised.value)
        assert offsets(drain(consumer)) == [0, 1, 4, 5]
        consumer.flush()
        state = queue.shared.describe()
        assert (state.confirmed, state.acked, state.lost) == (6, 4, 2)


def test_unreadable_frame_can_be_skipped(url: str) -> None:
    gaps: list[tuple[int, int]] = []
    with Queue(url, settings={"checksum": True}) as queue:
        for _ in range(3):
            queue.publish("AB", frame=2)
        rewrite(url, 0, damage)
        consumer = queue.consumer(on_gap="skip", on_gap_skipped=lambda *gap: gaps.append(gap))
        assert offsets(drain(consumer)) == [2, 3, 4, 5]
        assert gaps == [(0, 1)]


def test_dead_letter_for_an_unreadable_record_is_reported_and_not_retried(url: str) -> None:
    with Queue(url, "AB", settings={"checksum": True}, dead_letter="dead") as queue:
        consumer = queue.consumer()
        first, second = consumer.poll(5)
        rewrite(url, 0, damage)
        consumer._prefetcher._frame_cache.forget()
        first.reject("why")
        second.ack()
        with pytest.raises(meteor.CorruptFrame):
            eventually(lambda: consumer.poll(0))
        consumer.flush()
        assert queue.shared.confirmed == 2


@pytest.mark.parametrize("state", ["unscanned", "waiting"])
def test_damaged_records_in_the_store_are_reported_once_and_others_are_delivered(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    settings = {"capacity": 20, "store": str(tmp_path), "max_unarchived": 200_000}
    with Queue(url, settings=settings) as queue:
        queue.publish("AB" * 10, frame=5)
        consumer = queue.consumer()
        if state == "waiting":
            holders = [queue.consumer(prefetch=1) for _ in "AB"]
            assert [offsets(holder.poll(5)) for holder in holders] == [[0], [1]]
            assert not consumer.poll(0)  # scans the other records, which wait for their keys
            assert queue.shared.describe().waiting == 18
            for holder in holders:
                holder.close()  # returns its record
        archive(queue)
        real = FrameCache.read_stored

        def read(self: FrameCache, offset: int, records: int) -> Any:
            if offset < 7:
                raise meteor.CorruptSegment("Bad.", stream=STREAM, first=0, last=6)
            return real(self, offset, records)

        monkeypatch.setattr(FrameCache, "read_stored", read)
        with pytest.raises(meteor.CorruptSegment) as raised:
            consumer.poll(5)
        assert (raised.value.first, raised.value.last) == (0, 6)
        assert "skip_gap" not in str(raised.value)
        assert sorted(offsets(drain(consumer))) == [*range(7, queue.stream.end().offset)]
        consumer.flush()
        assert queue.shared.describe().lost == 7


def archive(queue: Queue) -> None:
    """Publish and archive more records until the ring has dropped all earlier ones."""

    def dropped() -> bool:
        queue.publish("CCCCC", frame=5)
        queue.stream.store.flush()
        entries = queue.client._connector.call("XRANGE", keys.log(STREAM), "-", "+", "COUNT", 1)
        return int(entries[0][0].split(b"-")[0]) >= 25

    eventually(dropped)
