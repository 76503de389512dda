"""Environment variables for Spark in tests, and a check for Java, which Spark needs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

#: Environment variables that make Spark start faster and stop it from looking up the host name.
SPARK_ENVIRONMENT = {
    "SPARK_LOCAL_IP": "127.0.0.1",
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
#: Environment variables that make Spark's Python processes start faster too.
SPARK_PYTHON = {
    "PYSPARK_PYTHON": str(Path(__file__).with_name("spark_python.sh")),
    "METEOR_TEST_PYTHON": sys.executable,
}


def require_java() -> None:
    """Skip the test if Java is not installed. In CI, where the whole suite must run, fail it."""
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        missing = "Java is not installed (Debian: apt-get install openjdk-17-jre-headless)."
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
