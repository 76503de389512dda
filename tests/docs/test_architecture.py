"""ARCHITECTURE.md names modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PATHS = sorted(set(re.findall(r"`([\w/]+(?:\.py|\.lua|/))`", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_architecture_names_exists(path: str) -> None:
    places = (ROOT, ROOT / "meteor_py", ROOT / "spark_connector" / "pyspark_meteor")
    scripts = (ROOT / "meteor_py" / "redis" / "lua").rglob(Path(path).name)
    assert any((place / path).exists() for place in places) or any(
        script.as_posix().endswith(f"/{path}") for script in scripts
    )


def test_architecture_names_most_modules_of_the_library() -> None:
    assert len(PATHS) > 60
