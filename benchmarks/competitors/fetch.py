"""The Kafka broker and Spark's Kafka source, which Maven downloads into a cache folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_POMS = Path(__file__).parent


def libraries(part: str, cache: Path) -> Path:
    """Return the folder with the jars of ``part`` ("kafka" or "spark"), fetched on first use.

    Raises:
        FileNotFoundError: Maven is not installed.
    """
    folder = cache / part
    if not any(folder.glob("*.jar")):
        if shutil.which("mvn") is None:
            raise FileNotFoundError("mvn was not found. Install Maven, which downloads Kafka.")
        partial = cache / f"{part}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(
            [
                *("mvn", "--quiet", "--batch-mode", "--file", str(_POMS / f"pom-{part}.xml")),
                "dependency:copy-dependencies",
                *("-DincludeScope=runtime", f"-DoutputDirectory={partial.absolute()}"),
            ],
            check=True,
        )
        partial.rename(folder)
    return folder
