"""How the source looks for streams, and what becomes of their records: ranges, shares and tasks."""

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

LIFE = "5f1d"


def at(offset: int, life: str = LIFE) -> Position:
    return Position(life, 1, offset)


def test_ranges_are_cut_evenly_and_none_is_larger_than_allowed() -> None:
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


def test_a_limit_gives_each_stream_a_share_and_never_more_than_all() -> None:
    start = {"large": at(0), "small": at(7)}
    end = {"large": at(1_000_000), "small": at(10)}
    ranges = ranges_between(start, end)
    limited = bounded(ranges, end, 100)
    assert limited["small"].offset == 8
    assert sum(map(len, ranges_between(start, limited))) <= 100
    assert bounded(ranges, end, 1_000_003) == end
    assert sum(map(len, ranges_between(start, bounded(ranges, end, 1)))) == 1


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9])
def test_streams_take_turns_if_a_batch_cannot_have_a_record_of_each(most: int) -> None:
    start = {name: at(0) for name in "abcde"}
    end = {name: at(1000 if name == "c" else 100) for name in start}
    for _ in range(5):
        limited = bounded(ranges_between(start, end), end, most)
        assert bounded(ranges_between(start, end), end, most) == limited, "it may be planned again"
        assert 0 < sum(map(len, ranges_between(start, limited))) <= most
        start = limited
    assert min(place.offset for place in start.values()) >= min(most, 5)


def test_between_two_offsets_lies_what_is_new_of_streams_that_were_known() -> None:
    (found,) = ranges_between({"orders": at(3)}, {"orders": at(50), "late": at(7)})
    assert (found.stream, found.first, found.end.offset) == ("orders", 3, 50)
    assert ranges_between({"orders": at(50)}, {"orders": at(3, "other")}) == []
    assert ranges_between({"orders": at(50)}, {"orders": at(50)}) == []
    assert ranges_between({"orders": at(50)}, {"orders": at(20)}) == []


def test_a_partition_is_shown_by_what_it_reads() -> None:
    part = Range("orders", 3, at(9))
    assert repr(part) == "Range('orders', 3, 9)"
    assert replace(part, first=4) != part


# Looking for streams


@pytest.fixture
def m(url: str) -> Iterator[meteor.Client]:
    with meteor.connect(url) as m, own_process():
        yield m


def test_many_streams_are_asked_for_together_and_new_ones_are_looked_for_now_and_then(
    url: str, m: meteor.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        fill(m.stream(f"p{number}", capacity=100), number + 1)
    monkeypatch.setattr(planning, "LIST_S", 3600.0)
    monkeypatch.setattr(planning, "_ASKED", 3)
    asked: list[int] = []
    planner = planning.Planner(parse_source({"url": url, "streamsPattern": "p.*"}, streaming=True))
    client = planner._client
    pipeline = client._connector.pipeline

    def count(commands: list[tuple[str, ...]]) -> list[Any]:
        asked.append(len(commands))
        return pipeline(commands)

    assert [place.offset for place in planner.ends().values()] == [1, 2, 3, 4, 5]
    monkeypatch.setattr(client._connector, "pipeline", count)
    monkeypatch.setattr(client._connector, "call", None)
    m.stream("p9")
    m.stream("p3").delete()
    assert {name: place.offset for name, place in planner.ends().items()} == {
        "p0": 1, "p1": 2, "p2": 3, "p4": 5,
    }  # fmt: skip
    assert asked == [3, 2]
    monkeypatch.undo()
    monkeypatch.setattr(planning, "LIST_S", 0.0)
    assert [*planner.ends()] == ["p0", "p1", "p2", "p4", "p9"]
