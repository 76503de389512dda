"""A stream that gets an ordering key after records have been published to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py.publish import transaction
from meteor_py.publish.transaction import Stage
from meteor_py.records.frame import Columns
from meteor_py.redis import keys
from tests.support.readers import background
from tests.support.sharing import Queue, check, drain, offsets
from tests.support.waiting import eventually


@pytest.fixture
def client(any_url: str) -> Iterator[meteor.Client]:
    with meteor.connect(any_url) as opened:
        yield opened


def publish(stream: meteor.Stream, letters: str, *, frame: int = 2) -> None:
    names = [letter.encode() for letter in letters]
    with stream.publisher() as pub:
        for start in range(0, len(names), frame):
            part = names[start : start + frame]
            pub.publish_many(part, keys=part).result(20)


def indexed(client: meteor.Client, name: str = "s") -> list[bytes]:
    """Return the IDs of the index entries."""
    return [entry[0] for entry in client._connector.call("XRANGE", keys.index(name), "-", "+")]


def logged(client: meteor.Client, name: str = "s") -> list[bytes]:
    """Return the IDs of the frames."""
    return [entry[0] for entry in client._connector.call("XRANGE", keys.log(name), "-", "+")]


def processed(stream: meteor.Stream, group: str = "g") -> list[tuple[int, bytes]]:
    """Drain the group; return the offset and ordering key of each record, by offset."""
    with stream.shared_subscriber(group) as sub:
        found = [(record.offset, record.ordering_key) for record in drain(sub)]
        check(stream, group)
    return sorted(found)


def test_added_ordering_key_also_applies_to_earlier_records(client: meteor.Client) -> None:
    stream = client.stream("s", create=True)
    publish(stream, "ABABA")
    stream.configure(ordering_key="key")
    assert stream.config.ordering_key == "key"
    publish(stream, "AC")
    wanted = [letter.encode() for letter in "ABABAAC"]
    assert processed(stream) == [*enumerate(wanted)]
    with (
        stream.shared_subscriber("h", prefetch=10) as one,
        stream.shared_subscriber("h", prefetch=10) as two,
    ):
        assert offsets(one.poll(5, max_records=1)) == [0]
        assert two.poll(0) == []  # `one` owns all keys
        assert {state.key: state.count for state in one.keys(look_ahead=True)} == {
            b"A": 4,
            b"B": 2,
            b"C": 1,
        }


def test_keys_are_listed_and_purged_before_any_consumer_has_indexed_them(
    client: meteor.Client,
) -> None:
    stream = client.stream("s", create=True)
    publish(stream, "ABAB")
    stream.configure(ordering_key="key")
    stream.shared_subscriber("g").close()
    shared = stream.shared_group("g")
    assert shared.purge(b"A") == 2
    assert [state.key for state in shared.keys(look_ahead=True)] == [b"B"]


def test_open_publisher_adopts_the_ordering_key(client: meteor.Client, any_url: str) -> None:
    stream = client.stream("s", create=True)
    with stream.publisher() as pub:
        pub.publish(b"1", key=b"A").result(20)
        with meteor.connect(any_url) as other:
            other.stream("s").configure(ordering_key="key")
            pub.publish(b"2", key=b"A").result(20)
            pub.publish(b"3", key=b"B").result(20)
            assert indexed(client) == logged(client)[1:]
            assert processed(other.stream("s")) == [(0, b"A"), (1, b"A"), (2, b"B")]
        assert stream.config.ordering_key == "key"


def test_open_publisher_refuses_keys_that_are_too_long_once_it_has_adopted_the_ordering_key(
    client: meteor.Client, any_url: str
) -> None:
    stream = client.stream("s", create=True)
    long = {"id": bytes(257)}
    with stream.publisher() as pub, meteor.connect(any_url) as other:
        pub.publish(b"1", headers={"id": b"A"}).result(20)
        other.stream("s").configure(ordering_key="header:id")
        # The publisher learns of the ordering key only from the reply to this record.
        pub.publish(b"2", headers=long).result(20)
        with pytest.raises(ValueError, match="limit is 256 bytes"):
            pub.publish(b"3", headers=long)
        for records in (2, 1_000):  # a short batch stays a list; a long one becomes Arrow arrays
            with pytest.raises(ValueError, match="limit is 256 bytes"):
                pub.publish_many([b"3"] * records, headers=[long] * records)
        pub.publish(b"4", headers={"id": b"A"}).result(20)
        found = dict(processed(other.stream("s")))
    assert (found[0], found[2]) == (b"A", b"A")
    assert len(found[1]) < 257, "the key that is too long did not count as missing"


def test_busy_publisher_adopts_the_ordering_key_without_loss_or_duplicates(
    client: meteor.Client, any_url: str
) -> None:
    stream = client.stream("s", create=True)
    published = 0

    def flow(stop: threading.Event) -> None:
        nonlocal published
        with stream.publisher() as pub:
            while not stop.is_set():
                pub.publish(b"%d" % published, key=b"%d" % (published % 7))
                published += 1
                if published % 100 == 0:
                    pub.flush()

    with meteor.connect(any_url) as other, background(flow):
        eventually(lambda: stream.end().offset > 300)
        other.stream("s").configure(ordering_key="key")
        eventually(lambda: len(indexed(client)) > 3)
    values = [record.value for batch in stream.read() for record in batch]
    assert values == [b"%d" % number for number in range(published)]
    found = processed(stream)
    assert found == [(number, b"%d" % (number % 7)) for number in range(published)]


def test_publisher_opened_before_the_ordering_key_was_added_wakes_a_consumer(any_url: str) -> None:
    with Queue(any_url) as queue:
        queue.stream.delete()
        stream = queue.client.stream("orders", create=True)
        queue.stream = stream
        with stream.publisher() as pub:
            pub.publish(b"early", key=b"A").result(20)
            stream.configure(ordering_key="key")
            c1 = queue.consumer()
            assert offsets(c1.poll(5)) == [0]

            def more(stop: threading.Event) -> None:
                eventually(lambda: c1._lease_renewer.polling)
                pub.publish(b"late", key=b"A").result(20)

            with background(more):
                # Without a wake-up, the consumer would claim again only after 18 seconds.
                assert offsets(c1.poll(15)) == [1]
        c1.commit()


def test_earlier_records_that_the_ring_drops_are_reported_as_lost(client: meteor.Client) -> None:
    stream = client.stream("s", capacity=10)
    publish(stream, "ABABAB")
    stream.configure(ordering_key="key")
    with stream.shared_subscriber("g") as sub:
        publish(stream, "CD" * 6)
        with pytest.raises(meteor.RecordsLost) as caught:
            sub.poll(5)
        assert (caught.value.first, caught.value.last) == (0, stream.bounds()[0] - 1)
        left = [record.ordering_key for record in drain(sub)]
        assert left == [b"C", b"D"] * (len(left) // 2)
        assert sub.confirmed == 18


def test_earlier_records_are_indexed_from_ring_and_store(url: str, tmp_path: Path) -> None:
    with meteor.connect(url) as client:
        stream = client.stream("s", capacity=10, store=str(tmp_path), max_unarchived=1_000)
        publish(stream, "ABC" * 20, frame=5)
        stream.store.flush()
        publish(stream, "D" * 5)
        stream.configure(ordering_key="key")
        publish(stream, "A" * 5)
        wanted = [letter.encode() for letter in "ABC" * 20 + "DDDDD" + "AAAAA"]
        assert processed(stream) == [*enumerate(wanted)]


def test_frames_staged_before_the_key_was_added_are_indexed_by_consumers(
    client: meteor.Client,
) -> None:
    stream = client.stream("s", create=True)
    early = Stage(stream._handle, "w.0.0")
    early.write(Columns([b"1", b"2"], [b"a", b"b"]))
    old = stream._handle.reopen()
    stream.configure(ordering_key="key")
    late = Stage(stream._handle, "w.0.1")
    late.write(Columns([b"3"], [b"a"]))
    stages = [early.finish(), late.finish()]
    transaction.commit(stream._handle, "w", 0, stages)
    assert indexed(client) == logged(client)[1:]
    assert processed(stream) == [(0, b"a"), (1, b"b"), (2, b"a")]
    # The next committer does not know about the ordering key yet.
    stage = Stage(stream._handle, "w.1.0")
    stage.write(Columns([b"4"], [b"c"]))
    transaction.commit(old, "w", 1, [stage.finish()])
    assert processed(stream) == [(3, b"c")]


def test_commit_refuses_a_stage_that_has_lost_a_frame(client: meteor.Client) -> None:
    stream = client.stream("s", ordering_key="key")
    stage = Stage(stream._handle, "w.0.0")
    # Without one of its five frames, the stage has 4 x 5 fields. Five frames without index entries
    # have as many, 5 x 4. A check of the number of fields alone would therefore miss the loss.
    for number in range(5):
        stage.write(Columns([b"v"], [b"%d" % number]))
    staged = stage.finish()
    fields = ["0n", "0f", "0p", "0c", "0g"]
    client._connector.call("HDEL", keys.stage("s", staged.name), *fields)
    with pytest.raises(meteor.PublishError, match="are gone"):
        transaction.commit(stream._handle, "w", 0, [staged])
    assert stream.end().offset == 0


def test_dead_letter_stream_can_get_an_ordering_key_while_in_use(any_url: str) -> None:
    with Queue(any_url, "AB", dead_letter="dead") as queue:
        c1 = queue.consumer()
        first, second = c1.poll(5)
        first.reject()
        c1.flush()
        c1.poll(0)
        dead = queue.client.stream("dead")
        dead.configure(ordering_key="key")
        second.reject()
        c1.flush()
        c1.poll(0)
        assert len(indexed(queue.client, "dead")) == 1
        assert processed(dead) == [(0, b"A"), (1, b"B")]


def test_ordering_key_can_be_added_once_but_not_changed(client: meteor.Client) -> None:
    stream, other = client.stream("s", create=True), client.stream("s")
    with pytest.raises(meteor.StreamConfigMismatch, match=r"stream\.configure") as caught:
        client.stream("s", ordering_key="key")
    assert caught.value.changeable
    with pytest.raises(meteor.MeteorError, match="has no ordering key"):
        stream.shared_subscriber("g")
    stream.configure(ordering_key="key")
    other.configure(ordering_key="key", capacity=5)
    with pytest.raises(meteor.StreamConfigMismatch, match="create another") as caught:
        other.configure(ordering_key="header:x", capacity=7)
    assert (caught.value.setting, caught.value.changeable) == ("ordering_key", False)
    assert client.stream("s").config.capacity == 5
    with pytest.raises(ValueError, match="ordering_key"):
        client.stream("t", create=True).configure(ordering_key="keys")


def test_one_client_wins_if_two_add_different_ordering_keys(
    client: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, other = client.stream("s", create=True), client.stream("s")
    real = stream._handle.run

    def run(*args: object, **options: object) -> object:
        monkeypatch.setattr(stream._handle, "run", real)
        other.configure(ordering_key="key")  # after this client's check, before its script
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(stream._handle, "run", run)
    with pytest.raises(meteor.StreamConfigMismatch, match="exists with ordering_key='key'"):
        stream.configure(ordering_key="header:x", capacity=7)
    assert client.stream("s").config.ordering_key == "key"
    assert client.stream("s").config.capacity == 10_000


def test_stream_object_from_before_the_ordering_key_can_open_shared_subscribers(
    client: meteor.Client,
) -> None:
    stream, old = client.stream("s", create=True), client.stream("s")
    assert old.config.ordering_key is None
    stream.configure(ordering_key="key")
    old.shared_subscriber("g").close()
    assert [group.name for group in old.groups()] == ["g"]
