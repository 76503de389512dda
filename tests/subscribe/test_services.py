"""The documented service patterns end cleanly on SIGTERM, and count each record exactly once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.group_members import GROUP, STREAM, GroupHarness, Process
from tests.support.waiting import eventually

_PLACE = f"""
STREAM, GROUP = {STREAM!r}, {GROUP!r}
"""


@pytest.fixture
def harness(url: str) -> Iterator[GroupHarness]:
    with GroupHarness(url, capacity=1_000_000) as harness:
        yield harness


# SIGTERM

_BEGINS = (
    _PLACE
    + """
import signal, sys
import meteor_py as meteor

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
done = -1


def handle(record):
    global done
    sub.confirm(record)
    done = record.offset
    if done in (0, 9):
        print(done, flush=True)


m = meteor.connect(sys.argv[1])
sub = m.stream(STREAM, create=False).subscriber(group=GROUP, lease_ttl=60)
"""
)

_LOOP = """
for record in sub:
    handle(record)
"""
_RECEIVER = "sub.attach_receiver(handle).join()"

# The service runs inside one of these frames, which print the last processed offset when it ends.
_WITH = """
try:
    with m, sub:
        {}
finally:
    print(done, flush=True)
"""
_BARE = """
try:
    if True:
        {}
finally:
    print(done, flush=True)
"""


def service(harness: GroupHarness, body: str, frame: str) -> Process:
    return harness.program(_BEGINS + frame.format(body.strip().replace("\n", "\n        ")))


BODIES = pytest.mark.parametrize("body", [_LOOP, _RECEIVER], ids=["loop", "receiver"])
FRAMES = pytest.mark.parametrize("frame", [_WITH, _BARE], ids=["with", "bare"])


def check_released(harness: GroupHarness, program: Process, at_least: int) -> int:
    """Check that the service has ended cleanly; return the confirmed offset."""
    assert program.wait() == 0
    # The lease was released; it did not expire.
    assert (harness.owner, harness.field("owner")) == (None, "")
    assert [event.what for event in harness.events()] == ["assigned", "released"]
    confirmed = harness.confirmed
    assert confirmed is not None
    # The record in progress may be confirmed too, because the receiver's thread is still running.
    assert confirmed >= at_least
    return confirmed


@BODIES
@FRAMES
def test_waiting_service_confirms_and_releases_its_lease_on_sigterm(
    harness: GroupHarness, body: str, frame: str
) -> None:
    harness.fill(10)
    program = service(harness, body, frame)
    assert [program.read(), program.read()] == ["0", "9"]
    program.terminate()  # just after the last confirm, which is usually not sent yet
    program.read()
    assert check_released(harness, program, 10) == 10
    harness.fill(1)
    with harness.subscriber() as sub:
        assert list(sub.poll(5).offsets) == [10]


@BODIES
@FRAMES
def test_busy_service_confirms_and_releases_its_lease_on_sigterm(
    harness: GroupHarness, body: str, frame: str
) -> None:
    end = harness.fill(*[10_000] * 30)
    program = service(harness, body, frame)
    assert program.read() == "0"
    eventually(lambda: (harness.confirmed or 0) > 1000)
    program.terminate()
    line = program.read()
    if line == "9":
        line = program.read()
    confirmed = check_released(harness, program, int(line) + 1)
    assert confirmed < end, "the service had already finished"
    with harness.subscriber() as sub:
        assert sub.poll(5, max_records=1).first_offset == confirmed


# Exactly once

_COUNTS = (
    _PLACE
    + """
import sqlite3, sys
import meteor_py as meteor

url, path, where, stop, end = sys.argv[1:]
db = sqlite3.connect(path, timeout=30)
begun = False


def where_we_are(sub):
    return db.execute("SELECT next FROM total").fetchone()[0]


def add(batch):
    row = (sum(batch.values()), batch.last_offset + 1, batch.first_offset)
    with db:
        changed = db.execute("UPDATE total SET amount = amount + ?1, next = ?2 " + where, row)
    return changed.rowcount == 1


def pause(place):
    global begun
    if place == stop and not begun:
        begun = True
        print(place, flush=True)
        sys.stdin.readline()


with meteor.connect(url) as m:
    stream = m.stream("amounts", create=False)
    with stream.subscriber(group=GROUP, lease_ttl=0.7, on_assigned=where_we_are) as sub:
        print("ready", flush=True)
        sys.stdin.readline()
        while where_we_are(sub) < int(end):
            batch = sub.poll(max_records=10)
            if batch:
                pause("before")
                changed = add(batch)
                pause("after")
                try:
                    if changed:
                        sub.confirm().result(30)
                except meteor.LeaseLost:
                    print("lost", flush=True)
print("end", flush=True)
"""
)

_GUARD = "WHERE next = ?3"
#: Takes the same parameters, but does not check the offset.
_NO_GUARD = "WHERE next >= 0 AND ?3 >= 0"

TOTAL = sum(range(100))


def count(harness: GroupHarness, path: Path, guard: str, stop: str) -> tuple[int, int]:
    """Sum up 100 amounts in two processes, and stop the owner for longer than its lease.

    Return the sum and the next offset.
    """
    with closing(sqlite3.connect(path)) as db:
        with db:
            db.execute("CREATE TABLE total (amount INT, next INT)")
            db.execute("INSERT INTO total VALUES (0, 0)")
        stream = harness.client.stream("amounts", codec="json")
        with stream.publisher() as pub:
            for first in range(0, 100, 5):
                pub.publish_many(list(range(first, first + 5))).result(10)
        one = harness.program(_COUNTS, str(path), guard, stop, "100")
        other = harness.program(_COUNTS, str(path), guard, "never", "60")
        assert [one.read(), other.read()] == ["ready", "ready"]
        one.write("go")
        assert one.read() == stop
        one.pause()
        one.write("go")  # the process reads this when it is resumed
        other.write("go")
        assert other.read() == "end"
        one.resume()
        words = [one.read()]
        while words[-1] != "end":
            words.append(one.read())
        # A member whose commit took effect learns from its confirm that it was replaced.
        assert ("lost" in words) is (stop == "after" or guard == _NO_GUARD)
        amount, following = db.execute("SELECT amount, next FROM total").fetchone()
        return amount, following


@pytest.mark.parametrize("stop", ["before", "after"])
def test_amounts_are_summed_once_if_the_owner_is_stopped_around_its_commit(
    harness: GroupHarness, tmp_path: Path, stop: str
) -> None:
    assert count(harness, tmp_path / "db", _GUARD, stop) == (TOTAL, 100)


def test_amounts_are_summed_twice_without_the_offset_guard(
    harness: GroupHarness, tmp_path: Path
) -> None:
    amount, _ = count(harness, tmp_path / "db", _NO_GUARD, "before")
    assert amount > TOTAL, "nothing was summed twice, so the test above proves nothing"
