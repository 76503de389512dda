"""docs/exceptions.md describes every public exception, its fields, and whether it is retriable."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import meteor_py as meteor
from meteor_py import errors

PAGE = Path(__file__).parents[2] / "docs" / "exceptions.md"
ROWS = {
    cells[0].strip("`"): cells
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
PUBLIC = {
    name: error
    for name, error in vars(errors).items()
    if inspect.isclass(error) and issubclass(error, errors.MeteorError) and not name.startswith("_")
}


def test_page_describes_the_public_exceptions_and_no_others() -> None:
    assert sorted(ROWS) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_exception_can_be_imported_from_the_package(name: str) -> None:
    assert getattr(meteor, name) is PUBLIC[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_page_says_whether_an_exception_is_retriable(name: str) -> None:
    assert ROWS[name][2] == ("yes" if PUBLIC[name].retriable else "no")


@pytest.mark.parametrize("name", PUBLIC)
def test_page_names_the_fields_of_an_exception(name: str) -> None:
    parameters = inspect.signature(PUBLIC[name].__init__).parameters.values()
    fields = {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    fields.discard("hint")  # which every exception has
    assert {field for field in fields if f"`{field}`" not in ROWS[name][3]} == set()
