"""With a store, groups get each record once and from the right branch, even after failovers.

A group starts, is moved and continues in the store as it does in the ring. Readers in other
processes keep up while the ring is trimmed. A batch from the store is delivered only if the stream
was still the same after the batch was read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from tests.support.group_members import STREAM, GroupHarness, Member
from tests.support.proxied_stream import ReplicatedStream, poll_until
from tests.support.readers import background, check_values, value
from tests.support.stored_streams import (
    NAME,
    ObservedStore,
    archive,
    archiving,
    fill_segments,
    kept,
    read_ahead_of,
    records_of,
)


@pytest.fixture
def stored(url: str, tmp_path: Path) -> Iterator[GroupHarness]:
    """The store holds offsets 0 to 49 in segments of ten; the ring holds 40 to 49."""
    with GroupHarness(url, store=tmp_path, capacity=10, archive=False) as harness:
        fill_segments(harness.stream, *[10] * 5)
        yield harness


# Group positions


def test_a_new_group_begins_with_the_first_record_in_the_store(stored: GroupHarness) -> None:
    stored.stream.store.expire(offset=20)
    sub = stored.subscriber()
    assert sub.position == 20
    assert check_values(sub.poll(timeout=5)) == list(range(20, 30))
    assert stored.stream.groups()[0].lag == 30
    late = stored.subscriber(group="late", initial_offset="latest")
    assert late.position == 50


def test_a_group_moved_to_an_archived_offset_continues_there(stored: GroupHarness) -> None:
    stream = stored.stream
    time = datetime.fromtimestamp(records_of(stream, 25, 26)[0].appended / 1000, UTC)
    for place, first in ((48, 48), (13, 13), (time, stream.offset_at(time)), ("earliest", 0)):
        assert stream.seek_group(stored.group, place) == first
        with stream.subscriber(group=stored.group) as sub:
            assert check_values(sub.poll(timeout=5, max_records=1)) == [first]
            sub.confirm()
        with stream.subscriber(group=stored.group) as sub:
            assert check_values(sub.poll(timeout=5, max_records=1)) == [first + 1]
    sub = stored.subscriber()
    sub.poll(timeout=5)
    stream.seek_group(stored.group, 5, force=True)
    assert check_values(sub.poll(timeout=5)) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("at", [3, 27, 45])
def test_a_checkpoint_is_resumed_in_ring_or_store(stored: GroupHarness, at: int) -> None:
    stream = stored.stream
    with stream.subscriber() as reader:
        reader.seek(at)
        kept_outside = reader.checkpoint
    for start in (kept_outside, at):
        with stored.subscriber(on_assigned=lambda _, start=start: start) as sub:
            offsets: list[int] = []
            while len(offsets) < 50 - at:
                offsets += check_values(sub.poll(timeout=5))
            assert offsets == list(range(at, 50))


def test_a_member_fenced_while_it_reads_the_store_delivers_nothing(
    url: str, tmp_path: Path
) -> None:
    store = ObservedStore(tmp_path, STREAM)
    with GroupHarness(url, store=store, capacity=10, archive=False) as harness:
        fill_segments(harness.stream, *[10] * 5)
        sub = harness.subscriber()
        assert check_values(sub.poll(timeout=5)) == list(range(10))
        store.on_batch = lambda first: harness.take_away() if first == 10 else None
        assert not sub.poll(timeout=0.2)
        assert 10 in store.batches
        assert harness.owner == "somebody"


# Processes

READER = """
import random, sys
import meteor_py as meteor
from meteor_py.log.ring_reader import RingReader
from meteor_py.log.store_reader import StoreReader
from tests.support.readers import check_values

places = []  # sources of the records

def note(reader, name, place):
    read = getattr(reader, name)
    setattr(reader, name, lambda *args, **how: places.append(place) or read(*args, **how))

note(StoreReader, "read", "store")
note(RingReader, "read_ahead", "ring")  # called when records came from the ring
url, end, rng = sys.argv[1], int(sys.argv[2]), random.Random(sys.argv[3])
with meteor.connect(url) as m:
    with m.stream("orders", create=False).subscriber(initial_offset="earliest") as sub:
        while sub.position < end:
            position = sub.position
            batch = sub.poll(timeout=30, max_records=200)
            assert batch.first_offset == position, (batch, position)
            check_values(batch)
            if rng.random() < 0.1:  # fall behind
                sub.seek(max(sub.position - rng.randrange(400), 0))
        changes = sum(before != after for before, after in zip(places, places[1:]))
        print(sub.position, changes, flush=True)
"""

END = 20_000


def publish_all(stream: meteor.Stream, rng: random.Random) -> None:
    """Publish the records up to ``END`` as fast as the archiver makes room for them."""
    first = stream.describe().next
    with stream.publisher() as pub:
        while first < END:
            size = min(rng.choice([1, 7, 50]), END - first)
            pub.publish_many([value(first + n) for n in range(size)])
            first += size


def test_two_processes_read_everything_while_the_ring_is_trimmed(
    url: str, tmp_path: Path, rng: random.Random
) -> None:
    with GroupHarness(url, store=tmp_path, capacity=50, archive=False) as harness:
        readers = [harness.program(READER, str(END), str(rng.random())) for _ in range(2)]
        with archiving(harness.stream, segment_records=1):
            publish_all(harness.stream, rng)
            found = [tuple(map(int, reader.read(60).split())) for reader in readers]
        assert [end for end, _ in found] == [END, END]
        # How often a reader switches sources depends on the scheduler.
        assert sum(changes for _, changes in found) > 1, (
            "no reader moved between store and ring twice"
        )
        assert len(list(tmp_path.rglob("*.parquet"))) > 50


def test_a_group_continues_without_a_gap_when_its_owner_dies_while_reading_the_store(
    url: str, tmp_path: Path, rng: random.Random
) -> None:
    with GroupHarness(url, store=tmp_path, capacity=50, archive=False) as harness:
        members = harness.members(2, lease_ttl=0.5)
        confirmed = 0

        def read(member: Member, until: int) -> None:
            """Poll and confirm in turn until all records below ``until`` are confirmed."""
            nonlocal confirmed
            begun = False
            while not begun or confirmed < until:
                offsets = member.poll(20, rng.choice([100, 1_000]))
                if not offsets:
                    continue
                assert offsets == list(range(confirmed, confirmed + len(offsets)))
                confirmed = member.confirm()
                begun = True

        with (
            archiving(harness.stream, segment_records=1),
            background(lambda _: publish_all(harness.stream, rng)),
        ):
            first, second = members
            if harness.owner == second.name:
                first, second = second, first
            read(first, 3_000)
            first.poll(20, 10)  # these records are not confirmed
            first.kill()
            read(second, 9_000)
            second.poll(20, 10)
            third = harness.member(lease_ttl=0.5)
            second.pause()
            read(third, END)
            second.resume()
            assert harness.confirmed == END
            assert second.poll(0.2) == []


# Failovers


def numbered(branch: str, start: int, stop: int) -> list[bytes]:
    return [f"{branch}{n}".encode() for n in range(start, stop)]


def publish(stream: meteor.Stream, branch: str, start: int, stop: int) -> None:
    """Publish records that name their branch and offset, in frames of ten."""
    with stream.publisher() as pub:
        for first in range(start, stop, 10):
            values = numbered(branch, first, min(first + 10, stop))
            assert pub.publish_many(values).result(10) == first


def after_fail_over(replicated: ReplicatedStream) -> meteor.Stream:
    replicated.fail_over()
    return replicated.proxied.client.stream(NAME, create=False)


@pytest.fixture
def lagging(replicated: ReplicatedStream, tmp_path: Path) -> ReplicatedStream:
    """The replica has 50 records, 40 of them archived. The primary has 100, all archived."""
    stream = kept(replicated.proxied.client, tmp_path, max_unarchived=1_000)
    for first in range(0, 40, 10):
        publish(stream, "a", first, first + 10)
        archive(stream)
    publish(stream, "a", 40, 50)
    replicated.lag()
    publish(stream, "a", 50, 100)
    archive(stream)
    return replicated


def reader(replicated: ReplicatedStream, stack: ExitStack) -> meteor.Subscriber:
    """Return a subscriber that connects through the proxy, so it survives the failover."""
    stream = replicated.proxied.through.stream(NAME, create=False)
    return stack.enter_context(stream.subscriber(initial_offset="earliest"))


def read_to(sub: meteor.Subscriber, end: int) -> list[bytes]:
    return poll_until(sub, lambda _: sub.position >= end)


def test_records_that_the_server_lost_are_not_read_from_the_store(
    lagging: ReplicatedStream,
) -> None:
    with ExitStack() as stack:
        subs = [reader(lagging, stack) for _ in range(3)]
        for sub, position in zip(subs, (10, 30, 40), strict=True):
            assert read_to(sub, position) == numbered("a", 0, position)
        stream = after_fail_over(lagging)
        for sub, position in zip(subs, (10, 30, 40), strict=True):
            # No client has written to the new server, so only its end and 'archived' show the loss.
            assert read_to(sub, 50) == numbered("a", position, 50)
            assert not sub.poll(timeout=0.05)
        publish(stream, "b", 50, 130)
        archive(stream)
        for sub in subs:
            assert read_to(sub, 130) == numbered("b", 50, 130)
        values = [record.value for record in records_of(stream)]
        assert values == numbered("a", 0, 50) + numbered("b", 50, 130)
        assert [flaw for flaw in stream.store.verify() if not flaw.harmless] == []


def test_reader_that_has_read_lost_archived_records_learns_of_the_loss_and_continues(
    lagging: ReplicatedStream,
) -> None:
    with ExitStack() as stack:
        ahead, between = reader(lagging, stack), reader(lagging, stack)
        assert read_to(ahead, 100) == numbered("a", 0, 100)
        between.seek(70)
        between.poll(timeout=0, max_records=1)
        between.seek(71)
        stream = after_fail_over(lagging)
        publish(stream, "b", 50, 200)
        archive(stream)
        for sub, last in ((ahead, 99), (between, 70)):
            with pytest.raises(meteor.LogTruncated) as caught:
                poll_until(sub, lambda _: False, 3)
            assert (caught.value.first, caught.value.last) == (50, last)
            sub.skip_gap()
            assert read_to(sub, 200) == numbered("b", 50, 200)


def test_a_failover_does_not_affect_a_reader_still_at_older_archived_records(
    lagging: ReplicatedStream,
) -> None:
    with ExitStack() as stack:
        sub = reader(lagging, stack)
        values: list[bytes] = []
        while read_ahead_of(sub).ahead == 0:
            values += sub.poll(timeout=5).values()
        stream = after_fail_over(lagging)
        publish(stream, "b", 50, 130)
        archive(stream)
        values += read_to(sub, 130)
        assert values == numbered("a", 0, 50) + numbered("b", 50, 130)


def lose(stream: meteor.Stream, first: int) -> None:
    """Make the server look as if it had lost all records from ``first`` on, in a new epoch."""
    plain, old = stream.client.redis, stream.describe().epoch
    fields = {
        "epoch": old + 1,
        "epochs": f"{old}:0,{old + 1}:{first}",
        "next": first,
        "archived": first,
    }
    plain.hset(keys.meta(stream.name), mapping=fields)  # type: ignore[arg-type]
    plain.delete(keys.log(stream.name))


def test_a_batch_prefetched_in_an_old_epoch_is_not_delivered_after_a_seek(
    url: str, tmp_path: Path
) -> None:
    with meteor.connect(url) as m:
        stream = kept(m, tmp_path)
        for first in range(0, 50, 10):
            publish(stream, "a", first, first + 10)
            archive(stream)
        with stream.subscriber(initial_offset="earliest") as sub:
            while read_ahead_of(sub).ahead == 0:
                sub.poll(timeout=0)
            ahead = sub.position
            assert ahead == 20
            lose(stream, ahead)
            publish(stream, "b", ahead, 60)
            archive(stream)
            sub.seek(ahead)
            assert read_to(sub, 60) == numbered("b", ahead, 60)


@pytest.mark.parametrize("when", [10, 20, 30])
def test_a_batch_read_before_a_new_epoch_is_not_delivered(
    url: str, tmp_path: Path, when: int
) -> None:
    store = ObservedStore(tmp_path)
    with meteor.connect(url) as m:
        stream = m.stream(NAME, capacity=10, store=store, archive=False)
        fill_segments(stream, *[10] * 5)

        store.on_batch = lambda first: lose(stream, when) if first == when else None
        with stream.subscriber(initial_offset="earliest") as sub:
            offsets: list[int] = []
            while sub.position < when:
                offsets += check_values(sub.poll(timeout=0))
            assert offsets == list(range(when))
            for _ in range(3):
                assert not sub.poll(timeout=0)
            assert when in store.batches
            with stream.publisher() as pub:
                pub.publish(b"from the new branch").result()
            assert sub.poll(timeout=5).values() == [b"from the new branch"]
