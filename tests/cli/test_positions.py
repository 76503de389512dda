"""Positions and times on the command line are parsed and resolved to offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meteor_py as meteor
from meteor_cli.args.positions import parse_span
from meteor_cli.args.times import parse_time

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("now", NOW),
        ("1794830400000", NOW),
        ("1794830400", NOW),
        ("1794830400.25", NOW + timedelta(seconds=0.25)),
        ("0", datetime(1970, 1, 1, tzinfo=UTC)),
        ("2026-11-16T12:00:00Z", NOW),
        ("2026-11-16T13:00:00+01:00", NOW),
        ("2026-11-16 12:00:00.5Z", NOW + timedelta(seconds=0.5)),
        ("-1h", NOW - timedelta(hours=1)),
        ("-1h30m", NOW - timedelta(hours=1.5)),
        ("-500ms", NOW - timedelta(seconds=0.5)),
        ("-2w", NOW - timedelta(days=14)),
        ("-1.5d", NOW - timedelta(days=1.5)),
    ],
)
def test_time_is_parsed_in_every_form(text: str, time: datetime) -> None:
    assert parse_time(text, NOW) == time


def test_a_time_without_a_zone_is_local() -> None:
    assert parse_time("2026-11-16", NOW) == datetime(2026, 11, 16).astimezone()
    assert parse_time("2026-11-16T14:30:00", NOW) == datetime(2026, 11, 16, 14, 30).astimezone()


@pytest.mark.parametrize("text", ["", "yesterday", "1h", "-1x", "--1h", "2026-13-01", "9" * 30])
def test_error_for_an_invalid_time_lists_the_valid_forms(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write ms"):
        parse_time(text, NOW)


@pytest.fixture(scope="module")
def stream() -> Iterator[meteor.Stream]:
    """A stream with offsets 2 to 11: the ring has dropped two records."""
    with meteor.connect("embedded://") as m:
        stream = m.stream("orders", capacity=10)
        with stream.publisher() as pub:
            for number in range(12):
                pub.publish(b"%d" % number).result()
        yield stream


@pytest.mark.parametrize(
    ("text", "start", "stop"),
    [
        ("earliest", 2, None),
        ("latest", 12, None),
        ("5", 5, None),
        ("0", 0, None),
        ("+0", 2, None),
        ("+3", 5, None),
        ("+99", 12, None),
        ("-0", 12, None),
        ("-3", 9, None),
        ("-99", 2, None),
        ("5..7", 5, 7),
        ("5..5", 5, 5),
        ("5..", 5, None),
        ("..7", 2, 7),
        ("..", 2, None),
        ("-5..-2", 7, 10),
        ("+1..latest", 3, 12),
        ("earliest..+2", 2, 4),
        ("5..99", 5, 99),
        ("@0", 2, None),
        ("@-1h..now", 2, 12),
        ("@-1h..latest", 2, 12),
        ("@1970-01-02T00:00:00Z..1h", 2, 2),
        ("@-1h..@-30m", 2, 2),
        ("@now", 12, None),
        ("7..@now", 7, 12),
    ],
)
def test_position_resolves_to_an_offset(
    stream: meteor.Stream, text: str, start: int, stop: int | None
) -> None:
    span = parse_span(text, datetime.now(UTC) + timedelta(seconds=1))
    assert span.start.resolve(stream) == start
    assert (None if span.stop is None else span.stop.resolve(stream)) == stop


def test_time_resolves_to_the_first_record_appended_at_or_after_it(stream: meteor.Stream) -> None:
    middle = next(record for batch in stream.read(7) for record in batch)
    found = parse_span(f"@{middle.appended}").start.resolve(stream)
    assert found <= 7
    assert next(iter(next(iter(stream.read(found))))).appended == middle.appended


@pytest.mark.parametrize(
    "text",
    ["", "first", "5..x", "1-2", "+", "-", "@", "@never", "5...7", "1e3", "٣", "0x10", "@1..x"],
)
def test_error_for_an_invalid_position_lists_the_valid_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (position|time); write"):
        parse_span(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("beginning", "earliest"), ("end", "latest"), ("-1h", "@-1h"), ("0:2", "0..2"),
     ("2026-11-16", "@2026-11-16"), ("5..end", "latest")],
)  # fmt: skip
def test_error_for_a_mistyped_position_suggests_the_right_one(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Did you mean {meant}?")):
        parse_span(text)


@pytest.mark.parametrize("text", ["7..5", "@-1h..-2h", "@2026-11-16..2026-11-15"])
def test_a_range_that_ends_before_it_begins_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        parse_span(text)


@given(st.text(max_size=20) | st.from_regex(r"[@+\-0-9.earlistTZ:hm]{0,20}", fullmatch=True))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    try:
        parse_span(text)
    except ValueError:
        pass
