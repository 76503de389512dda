"""Spark finds the format ``meteor`` without registration, in the source tree and from a wheel."""

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
from tests.support.java import SPARK_ENVIRONMENT, require_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds: of this, a loaded machine may need most to start a Java.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
#: Where the packages are that ours needs.
PACKAGES = Path(sysconfig.get_paths()["purelib"])
RECORDS = 1_234

#: What a user types; nothing of ours is imported, and nothing registered.
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
    """What Spark counts with a Python, and where that has the data source from."""
    url = f"embedded://{folder}/server"
    settings = SPARK_ENVIRONMENT | {"PYSPARK_PYTHON": str(python)}
    with meteor.connect(url) as m:
        with m.stream("orders").publisher() as pub:
            pub.publish_many([b"%d" % n for n in range(RECORDS)])
        done = subprocess.run(
            [str(python), "-c", COUNT, url],
            cwd=folder,  # not in the source tree, where everything is found
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


def test_spark_finds_it_in_a_development_install(spark: SparkSession, url: str) -> None:
    with meteor.connect(url) as m, m.stream("orders").publisher() as pub:
        pub.publish_many([b"%d" % n for n in range(RECORDS)])
    records = spark.read.format("meteor").option("url", url).option("stream", "orders").load()
    assert records.count() == RECORDS
    places = spark.sparkContext.range(1).map(lambda _: import_module("pyspark_meteor").__file__)
    assert Path(str(places.first())).is_relative_to(ROOT / "spark_connector")


def test_a_session_that_has_not_found_it_is_told_of_it(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark_meteor import register, source

    class ByHand(source.MeteorDataSource):
        """Spark would find the usual name by itself."""

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
def test_spark_finds_it_in_what_is_installed_from_a_wheel(tmp_path: Path) -> None:
    require_java()
    home = installed(tmp_path)
    found, place = count(home / "bin" / "python", tmp_path)
    assert found == RECORDS
    assert place.is_relative_to(home)


def installed(folder: Path) -> Path:
    """A virtual environment that has our package from a wheel, and all others by links.

    So no network is needed, and nothing of the source tree is on its path.
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
import pyspark.sql.datasource, pyspark.sql.types  # which whoever looks for data sources has already
import pyspark_meteor
assert pyspark_meteor.DefaultSource.name() == "meteor"
loaded = {name.partition(".")[0] for name in sys.modules} & {"meteor_py", "redis", "pyarrow"}
assert not loaded, loaded
"""


def test_importing_it_needs_neither_server_nor_library(tmp_path: Path) -> None:
    """Spark does so whenever it looks for a format, for people who have never heard of us too."""
    env = without_paths() | {"METEOR_URL": "redis://127.0.0.1:1"}
    subprocess.run([sys.executable, "-c", IMPORT], cwd=tmp_path, env=env, check=True)


OLDER = """
import sys
import pyspark
pyspark.__version__ = sys.argv[1]
import pyspark_meteor  # always: Spark would else give up on the data sources of all others
try:
    pyspark_meteor.DefaultSource({}).schema()
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("version", ["3.5.8", "4.0.0", "4.1.3"])
def test_an_older_spark_is_refused_in_one_sentence(version: str, tmp_path: Path) -> None:
    said = run_as(version, tmp_path)
    assert said.startswith("The data source meteor needs PySpark 4.2 or newer")
    assert f"this is {version}; pip install 'meteor-py[spark]'." in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("version", ["4.2.0", "4.3.0.dev1", "4.10.0", "5.0.0"])
def test_a_newer_one_is_not(version: str, tmp_path: Path) -> None:
    assert run_as(version, tmp_path) == ""


def run_as(version: str, folder: Path) -> str:
    return subprocess.run(
        [sys.executable, "-c", OLDER, version],
        cwd=folder,
        env=without_paths(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
