"""Spark finds the ``meteor`` format without registration, in the source tree and in a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import meteor_py as meteor
from tests.support.java import SPARK_ENVIRONMENT, SPARK_PYTHON, require_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds per test. On a loaded machine, starting Java may take most of this time.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
#: The installed packages, including our dependencies.
PACKAGES = Path(sysconfig.get_paths()["purelib"])
RECORDS = 1_234

#: A user's program. It does not import or register the connector before it reads.
COUNT = """
import json
import sys

from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .getOrCreate()
)
records = spark.read.format("meteor").option("url", sys.argv[1]).option("stream", "orders").load()
found = records.count()
import pyspark_meteor
print(json.dumps([found, pyspark_meteor.__file__]))
spark.stop()
"""


def count(python: Path, folder: Path) -> tuple[int, Path]:
    """Count records with Spark and a given Python; return the count and the connector's path."""
    url = f"embedded://{folder}/server"
    settings = SPARK_ENVIRONMENT | SPARK_PYTHON | {"METEOR_TEST_PYTHON": str(python)}
    with meteor.connect(url) as m:
        with m.stream("orders").publisher() as pub:
            pub.publish_many([b"%d" % n for n in range(RECORDS)])
        done = subprocess.run(
            [str(python), "-c", COUNT, url],
            cwd=folder,  # outside the source tree, whose packages Spark would otherwise find
            env=without_paths() | settings,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    found, place = json.loads(done.stdout.splitlines()[-1])
    return found, Path(place)


def without_paths() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_spark_finds_the_format_in_a_development_install(spark: SparkSession, url: str) -> None:
    with meteor.connect(url) as m, m.stream("orders").publisher() as pub:
        pub.publish_many([b"%d" % n for n in range(RECORDS)])
    records = spark.read.format("meteor").option("url", url).option("stream", "orders").load()
    assert records.count() == RECORDS
    places = spark.sparkContext.range(1).map(lambda _: import_module("pyspark_meteor").__file__)
    assert Path(str(places.first())).is_relative_to(ROOT / "spark_connector")


def test_register_adds_the_format_to_a_session(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark_meteor import register, source

    class ByHand(source.MeteorDataSource):
        """Has another name, because Spark finds the usual one on its own."""

        @classmethod
        def name(cls) -> str:
            return "meteor_by_hand"

    monkeypatch.setattr(source, "MeteorDataSource", ByHand)
    with meteor.connect(url) as m, m.stream("orders").publisher() as pub:
        pub.publish_many([b"x"] * 3)
    reader = spark.read.format("meteor_by_hand").option("url", url).option("stream", "orders")
    with pytest.raises(Exception, match="meteor_by_hand"):
        reader.load()
    register(spark)
    assert reader.load().count() == 3


@pytest.mark.slow
def test_spark_finds_the_format_when_installed_from_a_wheel(tmp_path: Path) -> None:
    require_java()
    home = installed(tmp_path)
    found, place = count(home / "bin" / "python", tmp_path)
    assert found == RECORDS
    assert place.is_relative_to(home)


def installed(folder: Path) -> Path:
    """Return a virtual environment with our package from a wheel, and links to all other packages.

    This needs no network, and the source tree is not on the environment's path.
    """
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = folder / "wheels"
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = wheels.glob("*.whl")
    home = folder / "venv"
    venv.create(home, symlinks=True)
    (packages,) = (home / "lib").glob("python3.*/site-packages")
    for path in PACKAGES.iterdir():
        ours = path.name.startswith(("meteor_py-", "__editable__")) or path.suffix == ".pth"
        if not ours and path.name != "__pycache__":
            (packages / path.name).symlink_to(path)
    python = home / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    return home


IMPORT = """
import sys
import pyspark.sql.datasource, pyspark.sql.types  # Spark imports these before it searches
import pyspark_meteor
assert pyspark_meteor.DefaultSource.name() == "meteor"
loaded = {name.partition(".")[0] for name in sys.modules} & {"meteor_py", "redis", "pyarrow"}
assert not loaded, loaded
"""


def test_importing_the_connector_needs_neither_a_server_nor_the_library(tmp_path: Path) -> None:
    # Spark imports this module whenever it looks up a format, even another data source's.
    env = without_paths() | {"METEOR_URL": "redis://127.0.0.1:1"}
    subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, env=env, check=True)


VERSIONS = """
import sys
import pyspark
pyspark.__version__ = sys.argv[1]
import pyspark_meteor  # must succeed, or Spark would find no data source at all
for version in sys.argv[1:]:
    pyspark.__version__ = version
    try:
        pyspark_meteor.DefaultSource({}).schema()
        print("fine")
    except ImportError as error:
        print(error)
"""


def test_older_spark_is_refused_with_an_install_command(tmp_path: Path) -> None:
    old, new = ["3.5.8", "4.0.0", "4.1.3"], ["4.2.0", "4.3.0.dev1", "4.10.0", "5.0.0"]
    command = [sys.executable, "-c", VERSIONS, *old, *new]
    output = subprocess.check_output(command, cwd=tmp_path, env=without_paths(), text=True)
    lines = output.splitlines()
    assert lines[len(old) :] == ["fine"] * len(new)
    for version, line in zip(old, lines, strict=False):
        assert line.startswith("The meteor data source needs PySpark 4.2 or newer")
        assert f"but this is {version}. Install it with: pip install 'meteor-py[spark]'" in line
