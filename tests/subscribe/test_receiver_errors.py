"""If the handler raises, ``on_error`` decides: stop, skip the record, retry, or dead-letter it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.subscribe.dead_letters import (
    GROUP_HEADER,
    OFFSET_HEADER,
    REASON_HEADER,
    STREAM_HEADER,
    TRIES_HEADER,
)
from tests.support.readers import fill, value
from tests.support.receivers import (
    Gate,
    Handler,
    confirmed,
    dies,
    fails_for,
    is_free,
    next_of,
    owner,
)
from tests.support.waiting import eventually


@pytest.fixture
def stream(url: str) -> Iterator[meteor.Stream]:
    with meteor.connect(url) as client:
        yield client.stream("s", create=True)


@pytest.fixture
def dead(stream: meteor.Stream) -> meteor.Stream:
    return stream.client.stream("dead", create=True)


def letters(dead: meteor.Stream) -> list[meteor.Record]:
    return [record for batch in dead.read() for record in batch]


def texts(record: meteor.Record) -> dict[str, str]:
    return {name: text.decode() for name, text in (record.headers or {}).items()}


# Stop


@pytest.mark.parametrize("closed", ["receiver", "subscriber", "with"])
def test_stop_leaves_the_record_to_the_next_member_and_raises_once(
    stream: meteor.Stream, closed: str
) -> None:
    fill(stream, 6)
    handler = Handler(fails_for(3))
    sub = stream.subscriber(group="g", auto_confirm=True)
    receiver = sub.attach_receiver(handler)
    assert receiver.join(20)
    assert not receiver.alive
    assert isinstance(receiver.error, ValueError)
    assert receiver.failed == 0
    assert handler.given == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no 3") as caught:  # noqa: PT012
        if closed == "receiver":
            receiver.close()
        elif closed == "subscriber":
            sub.close()
        else:
            with sub:
                pass
    assert caught.value is receiver.error
    receiver.close()
    sub.close()
    assert confirmed(stream) == 3
    assert next_of(stream) == [3, 4, 5]


def test_stop_tries_the_record_as_often_as_configured(stream: meteor.Stream) -> None:
    fill(stream, 3)
    handler = Handler(fails_for(1))
    sub = stream.subscriber(group="g")
    assert sub.attach_receiver(handler, tries=3).join(20)
    with pytest.raises(ValueError, match="no 1"):
        sub.close()
    assert handler.given == [0, 1, 1, 1]


def test_receiver_without_a_group_stops_at_an_error(stream: meteor.Stream) -> None:
    fill(stream, 3)
    sub = stream.subscriber(initial_offset="earliest")
    receiver = sub.attach_receiver(fails_for(1))
    assert receiver.join(20)
    assert sub.position == 1
    with pytest.raises(ValueError, match="no 1"):
        sub.close()


def test_error_during_close_is_raised(stream: meteor.Stream) -> None:
    fill(stream, 3)
    gate = Gate(1)

    def work(record: meteor.Record) -> None:
        gate(record)
        fails_for(1)(record)

    sub = stream.subscriber(group="g", auto_confirm=True)
    sub.attach_receiver(work)
    errors: list[BaseException] = []

    def close() -> None:
        try:
            sub.close(20)
        except ValueError as error:
            errors.append(error)

    closing = threading.Thread(target=close)
    with gate.hold():
        closing.start()
        eventually(lambda: sub._fetcher.interrupted)
    closing.join(20)
    assert [str(error) for error in errors] == ["no 1"]
    assert confirmed(stream) == 1


# Skip


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("tries", [None, 2])
def test_skip_counts_the_record_and_continues(
    stream: meteor.Stream, group: str | None, tries: int | None
) -> None:
    fill(stream, 6)
    handler = Handler(fails_for(0, 3, 5))
    auto = group is not None
    with stream.subscriber(group=group, initial_offset="earliest", auto_confirm=auto) as sub:
        receiver = sub.attach_receiver(handler, on_error="skip", tries=tries)
        handler.wait_for(1, 2, 4)
        eventually(lambda: receiver.failed == 3)
        assert handler.given.count(3) == (tries or 1)
        assert receiver.alive
    assert receiver.error is None
    if auto:
        assert confirmed(stream) == 6


def test_skipped_record_is_confirmed_if_all_earlier_records_are_confirmed(
    stream: meteor.Stream,
) -> None:
    fill(stream, 3)
    with stream.subscriber(group="g") as sub:
        receiver = sub.attach_receiver(fails_for(0, 2), on_error="skip")
        eventually(lambda: receiver.failed == 2)
    assert confirmed(stream) == 1  # record 2 stays unconfirmed, because record 1 does


# Retry


def test_retry_continues_until_success_with_growing_pauses(stream: meteor.Stream) -> None:
    fill(stream, 3)
    times: list[float] = []

    def work(record: meteor.Record) -> None:
        if record.offset == 1:
            times.append(time.monotonic())
            if len(times) < 5:
                raise ValueError("not yet")

    handler = Handler(work)
    with stream.subscriber(group="g", auto_confirm=True) as sub:
        receiver = sub.attach_receiver(handler, on_error="retry")
        handler.wait_for(0, 1, 2)
        assert receiver.failed == 0
    pauses = [after - before for before, after in pairwise(times)]
    for number, pause in enumerate(pauses):
        assert pause >= 0.05 * 2**number / 2
    assert confirmed(stream) == 3


def test_retry_pauses_longer_than_max_poll_interval_keep_the_lease(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each pause is between one and two seconds.
    monkeypatch.setattr("meteor_py.subscribe.receiver._BACKOFF_S", (2.0, 2.0))
    fill(stream, 3)
    quick: dict[str, Any] = {"group": "g", "lease_ttl": 0.4, "max_poll_interval": 0.4}

    def work(record: meteor.Record) -> None:
        if len(handler.given) == 1:
            raise ValueError("not yet")

    handler, waiting = Handler(work), Handler()
    with stream.subscriber(**quick) as sub, stream.subscriber(**quick) as rival:
        sub.attach_receiver(handler, on_error="retry")
        term = eventually(lambda: sub.term)
        rival.attach_receiver(waiting)
        handler.wait_for(0, 1, 2)
        assert sub.term == term
        assert waiting.given == []


def test_retry_stops_after_the_configured_tries(stream: meteor.Stream) -> None:
    fill(stream, 3)
    handler = Handler(fails_for(1))
    sub = stream.subscriber(group="g")
    assert sub.attach_receiver(handler, on_error="retry", tries=4).join(20)
    with pytest.raises(ValueError, match="no 1"):
        sub.close()
    assert handler.given == [0, 1, 1, 1, 1]


def test_close_does_not_wait_for_the_next_try(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meteor_py.subscribe.receiver._BACKOFF_S", (600.0, 600.0))
    fill(stream, 3)
    handler = Handler(fails_for(1))
    sub = stream.subscriber(group="g", lease_ttl=60, auto_confirm=True)
    receiver = sub.attach_receiver(handler, on_error="retry")
    eventually(lambda: handler.given.count(1) == 1)
    sub.close(timeout=30)
    assert receiver.error is None
    assert is_free(stream)
    assert confirmed(stream) == 1


def test_record_is_not_retried_after_the_lease_is_lost(
    stream: meteor.Stream, dead: meteor.Stream
) -> None:
    fill(stream, 5)
    handler = Handler(fails_for(1))
    with stream.subscriber(group="g", lease_ttl=1, auto_confirm=True) as sub:
        receiver = sub.attach_receiver(handler, on_error=dead, tries=1000)
        eventually(lambda: handler.given.count(1) >= 3)
        stream.seek_group("g", 4, force=True)
        handler.wait_for(0, 4)
        eventually(lambda: confirmed(stream) == 5)
        tried = handler.given.count(1)
        fill(stream, 1)
        handler.wait_for(0, 4, 5)
        assert handler.given.count(1) == tried
        assert receiver.failed == 0
    assert letters(dead) == []


def test_handler_that_raises_lease_lost_is_called_again_after_a_pause(
    stream: meteor.Stream,
) -> None:
    fill(stream, 1)

    def work(record: meteor.Record) -> None:
        if len(handler.given) < 5:
            raise meteor.LeaseLost("of another group", stream="other", group="other")

    handler = Handler(work)
    started = time.monotonic()
    with stream.subscriber(group="g") as sub:
        receiver = sub.attach_receiver(handler)
        handler.wait_for(0)
        assert receiver.alive
    assert time.monotonic() - started >= 0.2


# Dead letters


def test_record_becomes_a_dead_letter_after_three_tries(
    stream: meteor.Stream, dead: meteor.Stream
) -> None:
    with stream.publisher() as pub:
        pub.publish(b"good")
        pub.publish(b"bad", key=b"k", headers={"h": b"1"}, timestamp=1234)
        pub.publish(b"good").result()
    handler = Handler(fails_for(1))
    with stream.subscriber(group="g", auto_confirm=True) as sub:
        receiver = sub.attach_receiver(handler, on_error=dead)
        handler.wait_for(0, 2)
        assert receiver.failed == 1
    assert handler.given == [0, 1, 1, 1, 2]
    assert confirmed(stream) == 3
    (letter,) = letters(dead)
    assert (letter.value, letter.key, letter.timestamp) == (b"bad", b"k", 1234)
    assert texts(letter) == {
        "h": "1",
        STREAM_HEADER: "s",
        GROUP_HEADER: "g",
        OFFSET_HEADER: "1",
        REASON_HEADER: "ValueError: no 1",
        TRIES_HEADER: "3",
    }


@pytest.mark.parametrize("first", ["confirmed", "open"])
def test_dead_letter_is_confirmed_if_all_earlier_records_are_confirmed(
    stream: meteor.Stream, dead: meteor.Stream, first: str
) -> None:
    fill(stream, 3)
    with stream.subscriber(group="g") as sub:

        def work(record: meteor.Record) -> None:
            fails_for(1)(record)
            if record.offset == 0 and first == "confirmed":
                sub.confirm()

        handler = Handler(work)
        sub.attach_receiver(handler, on_error=dead, tries=1)
        handler.wait_for(0, 2)
    assert confirmed(stream) == (2 if first == "confirmed" else 0)
    assert len(letters(dead)) == 1


def test_every_record_in_a_stream_can_become_a_dead_letter(
    stream: meteor.Stream, dead: meteor.Stream
) -> None:
    fill(stream, 30)
    with stream.subscriber(group="g") as sub:
        receiver = sub.attach_receiver(fails_for(*range(30)), on_error=dead, tries=1)
        eventually(lambda: receiver.failed == 30)
    assert confirmed(stream) == 30
    assert [letter.value for letter in letters(dead)] == [value(offset) for offset in range(30)]


def test_dead_letter_from_a_subscriber_without_a_group_names_no_group(
    stream: meteor.Stream, dead: meteor.Stream
) -> None:
    fill(stream, 2)
    with stream.subscriber(initial_offset="earliest") as sub:
        handler = Handler(fails_for(0))
        receiver = sub.attach_receiver(handler, on_error=dead, tries=1)
        handler.wait_for(1)
        assert receiver.failed == 1
    (letter,) = letters(dead)
    assert GROUP_HEADER not in texts(letter)


_DIES = """
import os, signal, sys
import meteor_py as meteor
from meteor_py.subscribe.group_session import GroupSession

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def fail(record):
    raise ValueError("in " + sys.argv[2])

GroupSession.confirm_silently = die
client = meteor.connect(sys.argv[1])
sub = client.stream("s", create=True).subscriber(group="g", lease_ttl=0.5)
sub.attach_receiver(fail, on_error=client.stream("dead", create=True), tries=2).join(60)
"""


def test_processes_killed_between_dead_letter_and_confirm_leave_one_dead_letter(
    url: str, stream: meteor.Stream, dead: meteor.Stream
) -> None:
    fill(stream, 2)
    for name in ("first", "second"):
        dies(_DIES, url, name)
        assert confirmed(stream) == 0
        assert len(letters(dead)) == 1
    handler = Handler(fails_for(0))
    with stream.subscriber(group="g") as sub:
        receiver = sub.attach_receiver(handler, on_error=dead)
        handler.wait_for(1)
        assert receiver.failed == 1
        eventually(lambda: confirmed(stream) == 1)
    (letter,) = letters(dead)
    assert texts(letter)[REASON_HEADER] == "ValueError: in first"


def test_deleted_dead_letter_stream_ends_the_receiver_with_an_error(
    stream: meteor.Stream, dead: meteor.Stream
) -> None:
    fill(stream, 2)
    dead.delete()
    sub = stream.subscriber(group="g")
    receiver = sub.attach_receiver(fails_for(0), on_error=dead, tries=1)
    assert receiver.join(20)
    assert isinstance(receiver.error, meteor.StreamNotFound)
    assert receiver.failed == 0
    with pytest.raises(meteor.StreamNotFound):
        sub.close()
    assert next_of(stream) == [0, 1]


def test_stream_cannot_be_its_own_dead_letter_stream(stream: meteor.Stream) -> None:
    same = stream.client.stream("s", create=True)
    with stream.subscriber() as sub, pytest.raises(ValueError, match="its own dead letters"):
        sub.attach_receiver(Handler(), on_error=same)


# Values that cannot be decoded


@pytest.fixture
def torn(stream: meteor.Stream) -> meteor.Stream:
    """A stream of JSON values with undecodable bytes in the middle."""
    torn = stream.client.stream("torn", codec="json")
    with torn.publisher(codec="bytes") as pub:
        pub.publish_many([b"0", b"\xff{", b"2"]).result()
    return torn


def test_stop_applies_to_an_undecodable_value(torn: meteor.Stream) -> None:
    handler = Handler()
    with pytest.raises(meteor.DecodeError) as caught, torn.subscriber(group="g") as sub:
        assert sub.attach_receiver(handler).join(20)
    assert caught.value.record.value == b"\xff{"
    assert handler.given == [0]


def test_skip_applies_to_an_undecodable_value(torn: meteor.Stream) -> None:
    handler = Handler()
    with torn.subscriber(group="g", auto_confirm=True) as sub:
        receiver = sub.attach_receiver(handler, on_error="skip")
        handler.wait_for(0, 2)
        assert receiver.failed == 1
    assert confirmed(torn) == 3


def test_undecodable_value_becomes_a_dead_letter_unchanged(
    torn: meteor.Stream, dead: meteor.Stream
) -> None:
    handler = Handler()
    with torn.subscriber(group="g", auto_confirm=True) as sub:
        sub.attach_receiver(handler, on_error=dead)
        handler.wait_for(0, 2)
    (letter,) = letters(dead)
    assert letter.value == b"\xff{"
    assert texts(letter)[REASON_HEADER].startswith("DecodeError: ")
    assert texts(letter)[TRIES_HEADER] == "3"


def test_ended_receiver_releases_the_lease_at_once(stream: meteor.Stream) -> None:
    fill(stream, 3)
    sub = stream.subscriber(group="g", lease_ttl=60)
    receiver = sub.attach_receiver(fails_for(1))
    assert receiver.join(20)
    assert next_of(stream) == [0, 1, 2]
    assert owner(stream) is None
    with pytest.raises(ValueError, match="no 1"):
        sub.close()
