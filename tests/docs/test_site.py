"""The navigation and the API pages of the documentation site are complete."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import meteor_py as meteor

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def nav_pages(items: list[dict[str, Any]]) -> Iterator[str]:
    for item in items:
        for target in item.values():
            if isinstance(target, str):
                yield target
            else:
                yield from nav_pages(target)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(nav_pages(nav)) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


def test_every_exported_name_is_on_one_api_page() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: meteor_py\.(\w+)$", pages, re.MULTILINE)
    errors = {name for name in meteor.__all__ if is_error(getattr(meteor, name))}
    assert "errors" in documented, "the page for all errors is missing"
    assert sorted(documented) == sorted({*meteor.__all__, "errors"} - errors - {"__version__"})


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, meteor.MeteorError)
