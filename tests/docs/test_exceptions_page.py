"""docs/exceptions.md describes every public exception, its fields, and whether it is retriable."""

from __future__ import annotations

import inspect
from pathlib import Path

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


def test_every_exception_can_be_imported_from_the_package() -> None:
    assert {name: getattr(meteor, name, None) for name in PUBLIC} == PUBLIC


def test_page_says_whether_each_exception_is_retriable() -> None:
    expected = {name: "yes" if error.retriable else "no" for name, error in PUBLIC.items()}
    assert {name: row[2] for name, row in ROWS.items()} == expected


def test_page_names_all_fields_of_each_exception() -> None:
    missing = {
        (name, field)
        for name, error in PUBLIC.items()
        for field, parameter in inspect.signature(error.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and f"`{field}`" not in ROWS[name][3]
    }
    assert {(name, field) for name, field in missing if field != "hint"} == set()
