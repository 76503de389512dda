"""Offset ranges: cutting them into tasks, limiting batches, and finding streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py import Position
from pyspark_meteor import planning
from pyspark_meteor.options import parse_source
from pyspark_meteor.ranges import Range, bounded, cut, ranges_between
from tests.support.readers import fill
from tests.support.spark_engine import own_process

INCARNATION = "5f1d"


def at(offset: int, incarnation: str = INCARNATION) -> Position:
    return Position(incarnation, 1, offset)


def test_ranges_are_cut_into_even_parts_within_the_limit() -> None:
    whole = [Range("a", 5, at(105)), Range("b", 0, at(3))]
    for least, most in [(1, 10**9), (2, 50), (7, 30), (500, 10), (3, 1)]:
        parts = cut(whole, least, most)
        assert max(map(len, parts)) <= most
        assert len(parts) >= min(least, 103)
        for name, first, stop in (("a", 5, 105), ("b", 0, 3)):
            mine = [part for part in parts if part.stream == name]
            edges = [mine[0].first, *(part.end.offset for part in mine)]
            assert edges == [first, *(part.first for part in mine[1:]), stop]
            assert max(map(len, mine)) - min(map(len, mine)) <= 1
    assert cut([], 3, 10) == []


def test_limit_is_shared_among_streams_and_never_exceeded() -> None:
    start = {"large": at(0), "small": at(7)}
    end = {"large": at(1_000_000), "small": at(10)}
    ranges = ranges_between(start, end)
    limited = bounded(ranges, end, 100)
    assert limited["small"].offset == 8
    assert sum(map(len, ranges_between(start, limited))) <= 100
    assert bounded(ranges, end, 1_000_003) == end
    assert sum(map(len, ranges_between(start, bounded(ranges, end, 1)))) == 1


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9])
def test_a_small_limit_lets_every_stream_make_progress(most: int) -> None:
    start = {name: at(0) for name in "abcde"}
    end = {name: at(1000 if name == "c" else 100) for name in start}
    for _ in range(5):
        limited = bounded(ranges_between(start, end), end, most)
        again = bounded(ranges_between(start, end), end, most)  # as after a crash
        assert again == limited
        assert 0 < sum(map(len, ranges_between(start, limited))) <= most
        start = limited
    assert min(position.offset for position in start.values()) >= min(most, 5)


def test_ranges_between_offsets_omit_new_and_recreated_streams() -> None:
    (found,) = ranges_between({"orders": at(3)}, {"orders": at(50), "late": at(7)})
    assert (found.stream, found.first, found.end.offset) == ("orders", 3, 50)
    assert ranges_between({"orders": at(50)}, {"orders": at(3, "other")}) == []
    assert ranges_between({"orders": at(50)}, {"orders": at(50)}) == []
    assert ranges_between({"orders": at(50)}, {"orders": at(20)}) == []


def test_partition_repr_shows_its_range() -> None:
    part = Range("orders", 3, at(9))
    assert repr(part) == "Range('orders', 3, 9)"
    assert replace(part, first=4) != part


# Finding streams


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m, own_process():
        yield m


def test_ends_are_requested_in_pipelines_and_new_streams_are_listed_periodically(
    url: str, m: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        fill(m.stream(f"p{number}", capacity=100), number + 1)
    monkeypatch.setattr(planning, "LIST_S", 3600.0)
    monkeypatch.setattr(planning, "_STREAMS_PER_REQUEST", 3)
    sizes: list[int] = []
    planner = planning.Planner(parse_source({"url": url, "streamsPattern": "p.*"}, streaming=True))
    client = planner._client
    pipeline = client._connector.pipeline

    def count(commands: list[tuple[str, ...]]) -> list[Any]:
        sizes.append(len(commands))
        return pipeline(commands)

    assert [position.offset for position in planner.ends().values()] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(client._connector, "pipeline", count)
    monkeypatch.setattr(client._connector, "call", None)
    m.stream("p9", create=True)
    m.stream("p3", create=True).delete()
    assert {name: position.offset for name, position in planner.ends().items()} == {
        "p0": 1, "p1": 2, "p2": 3, "p4": 5,
    }  # fmt: skip
    assert sizes == [3, 2]
    monkeypatch.undo()
    monkeypatch.setattr(planning, "LIST_S", 0.0)
    assert [*planner.ends()] == ["p0", "p1", "p2", "p4", "p9"]
