"""The default values in the documentation tables equal those in the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from meteor_py.records.config import PublisherConfig, StreamConfig, SubscriberConfig
from meteor_py.shared.config import ConsumerConfig, SharedConfig

DOCS = Path(__file__).parents[2] / "docs"
UNITS = {"": 1, "s": 1, "records": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
#: Documented defaults that are words, and their values in the code.
WORDS = {"none": None, "the stream's": None, "True": True, "False": False}
TABLES = (
    ("publish-subscribe.md", "setting", StreamConfig),
    ("publish-subscribe.md", "setting of `stream.publisher()`", PublisherConfig),
    ("shared.md", "group setting", SharedConfig),
    ("shared.md", "consumer setting", ConsumerConfig),
    ("groups.md", "setting of `stream.subscriber()`", SubscriberConfig),
)


def rows(page: str, heading: str) -> Iterator[tuple[list[str], str]]:
    """Yield the setting names and the default in each row of a table."""
    text = (DOCS / page).read_text()
    _, found, rest = text.partition(f"| {heading} | default |")
    assert found, f"{page} has no table with the heading {heading!r}"
    for line in rest.splitlines()[2:]:
        if not line.startswith("|"):
            return
        names, default = line.split("|")[1:3]
        yield re.findall(r"`(\w+)`", names), default.strip()


def value_of(text: str) -> Any:
    text = text.strip("`")
    if text in WORDS:
        return WORDS[text]
    if text.startswith('"'):
        return text.strip('"')
    match = re.fullmatch(r"([\d,.]+) ?(\w*)", text)
    assert match, f"{text!r} is not a value"
    return float(match[1].replace(",", "")) * UNITS[match[2]]


@pytest.mark.parametrize(("page", "heading", "config"), TABLES)
def test_documented_defaults_equal_those_in_the_code(page: str, heading: str, config: Any) -> None:
    defaults = {field.name: field.default for field in fields(config)}
    documented = {
        name: value_of(default)
        for names, default in rows(page, heading)
        for name in names
        if default and name in defaults
    }
    assert len(documented) >= 2
    assert documented == {name: defaults[name] for name in documented}


def test_every_setting_is_documented() -> None:
    for page, heading, config in TABLES:
        named = {name for names, _ in rows(page, heading) for name in names}
        assert {field.name for field in fields(config)} <= named, page
