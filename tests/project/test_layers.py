"""The folder tree is the architecture: packages import only from layers below them.

The tests read every import, including those under ``TYPE_CHECKING`` and inside functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Layers from bottom to top. Packages in one row do not import each other.
LAYERS = (
    ("errors", "_version"),
    ("runtime",),
    ("server",),
    ("redis",),
    ("records",),
    ("store",),
    ("log",),
    ("publish",),
    ("subscribe",),
    ("shared", "archive", "peers"),
    ("stream",),
    ("client",),
    ("__init__",),
    ("testing",),
)
LEVEL = {package: level for level, row in enumerate(LAYERS) for package in row}

_BACK_REFERENCE = "users reach the public Stream through the `stream` attribute of its objects"
#: Imports that point upwards, each with its reason. All of them are for type checkers only.
EXCEPTIONS = {
    ("errors", "records.record"): "DecodeError.record holds the record that could not be decoded",
    ("publish.publisher", "stream"): _BACK_REFERENCE,
    ("subscribe.subscriber", "stream"): _BACK_REFERENCE,
    ("shared.admin", "stream"): _BACK_REFERENCE,
    ("archive.archiver", "stream"): _BACK_REFERENCE,
    ("subscribe.receiver", "stream"): "on_error= takes the public Stream for dead letters",
    ("stream", "client"): "users reach the Client through the `client` attribute of a Stream",
}


def modules(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def imported(path: Path, package: str) -> Iterator[tuple[str, bool]]:
    """Yield each imported module, and whether the import is for type checkers only."""
    tree = ast.parse(path.read_text())
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name == package or name.startswith(f"{package}."):
                yield name.removeprefix(package).removeprefix("."), id(node) in typed


def resolve(name: str, known: set[str]) -> str:
    """Return the module that an imported name denotes or belongs to."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or "__init__"


def upward_imports() -> dict[tuple[str, str], bool]:
    folder = ROOT / "meteor_py"
    known = {name for name, _ in modules(folder)}
    found: dict[tuple[str, str], bool] = {}
    for name, path in modules(folder):
        package = name.partition(".")[0]
        for target, typed in imported(path, "meteor_py"):
            module = resolve(target, known)
            other = module.partition(".")[0]
            if other != package and LEVEL[other] >= LEVEL[package]:
                found[name, module] = found.get((name, module), True) and typed
    return found


def test_every_package_has_a_layer() -> None:
    packages = {name.partition(".")[0] for name, _ in modules(ROOT / "meteor_py")}
    assert packages == set(LEVEL)


def test_imports_point_downwards() -> None:
    assert sorted(upward_imports()) == sorted(EXCEPTIONS)


def test_upward_imports_are_for_type_checking_only() -> None:
    assert {pair for pair, typed in upward_imports().items() if not typed} == set()


@pytest.mark.parametrize("package", ["shared", "peers", "archive", "subscribe", "publish", "log"])
def test_package_has_no_import_cycle(package: str) -> None:
    folder = ROOT / "meteor_py" / package
    known = {name for name, _ in modules(folder)}
    graph = {
        name: {
            resolve(target, known)
            for target, typed in imported(path, f"meteor_py.{package}")
            if target and not typed
        }
        for name, path in modules(folder)
    }
    done: set[str] = set()
    while ready := {
        name for name, targets in graph.items() if targets <= done and name not in done
    }:
        done |= ready
    assert set(graph) - done == set()
