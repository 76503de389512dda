"""How many records ``run()`` buffers ahead of its worker threads."""

from __future__ import annotations

import pytest

from meteor_py.shared.work_ahead import WorkAhead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A fake clock: a list whose only element is the time in seconds."""
    time = [100.0]
    monkeypatch.setattr("meteor_py.shared.work_ahead.time.monotonic", lambda: time[0])
    return time


def process(ahead: WorkAhead, clock: list[float], records: int) -> None:
    """Process this many records in one second."""
    for _ in range(records):
        ahead.note_done()
    clock[0] += 1
    ahead.adjust(idle=False, full=True)


def test_limit_starts_at_two_records_per_thread() -> None:
    assert WorkAhead(threads=1, most=256).limit == 2
    assert WorkAhead(threads=8, most=256).limit == 16
    assert WorkAhead(threads=8, most=5).limit == 5


def test_limit_grows_up_to_prefetch_while_threads_are_idle() -> None:
    ahead = WorkAhead(threads=1, most=100)
    limits = []
    for _ in range(7):
        ahead.adjust(idle=True, full=True)
        limits.append(ahead.limit)
    assert limits == [4, 8, 16, 32, 64, 100, 100]


def test_limit_does_not_grow_if_the_group_has_no_more_records() -> None:
    ahead = WorkAhead(threads=1, most=100)
    ahead.adjust(idle=True, full=False)
    ahead.adjust(idle=False, full=True)
    assert ahead.limit == 2


def test_limit_falls_to_a_tenth_of_a_second_of_work(clock: list[float]) -> None:
    ahead = WorkAhead(threads=2, most=256)
    for _ in range(6):
        ahead.adjust(idle=True, full=True)
    assert ahead.limit == 256
    limits = []
    for _ in range(5):
        process(ahead, clock, 500)
        limits.append(ahead.limit)
    assert limits == [128, 64, 50, 50, 50]
    for _ in range(5):
        process(ahead, clock, 10)
    assert ahead.limit == 4
