"""ARCHITECTURE.md names modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (ROOT, ROOT / "meteor_py", ROOT / "spark_connector" / "pyspark_meteor")


def test_architecture_names_many_modules_and_only_existing_ones() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|\.lua|/))`", (ROOT / "ARCHITECTURE.md").read_text()))
    scripts = [path.as_posix() for path in (ROOT / "meteor_py" / "redis" / "lua").rglob("*.lua")]
    missing = {
        path
        for path in named
        if not any((place / path).exists() for place in PLACES)
        and not any(script.endswith(f"/{path}") for script in scripts)
    }
    assert missing == set()
    assert len(named) > 60
