"""Rules that no linter checks: functions are short, and no code parses error messages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("meteor_py", "cli/meteor_cli", "spark_connector/pyspark_meteor")

#: Maximum number of lines in a function, including its docstring.
FUNCTION_MAX_LINES = 60

#: The only file that may inspect error text. It reads the error code at the start of a reply.
READS_ERROR_TEXT = "meteor_py/redis/connection.py"
#: Methods that inspect a str.
_QUESTIONS = {"startswith", "endswith", "find", "index", "count", "partition", "split"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def test_no_function_is_longer_than_60_lines() -> None:
    long = {
        f"{name}:{node.lineno} {node.name}": lines
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None
        if (lines := node.end_lineno - node.lineno + 1) > FUNCTION_MAX_LINES
    }
    assert long == {}


def test_no_code_depends_on_error_text() -> None:
    found = [
        f"{name}:{line}"
        for name, tree in trees()
        if name != READS_ERROR_TEXT
        for line in sorted(set(lines_that_read_error_text(tree)))
    ]
    assert found == []


def lines_that_read_error_text(tree: ast.AST) -> Iterator[int]:
    for handler in ast.walk(tree):
        names = set(_error_names(handler))
        for node in ast.walk(handler) if names else ():
            match node:
                case ast.Compare(left=left, comparators=others):
                    if any(_is_text(side, names) for side in (left, *others)):
                        yield node.lineno
                case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                    if attr in _QUESTIONS and _is_text(value, names):
                        yield node.lineno
                case ast.Match(subject=subject) if _is_text(subject, names):
                    yield node.lineno


def _error_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that an ``except`` clause or a function gives to an error."""
    if isinstance(node, ast.ExceptHandler) and node.name is not None:
        yield node.name
    elif isinstance(node, ast.FunctionDef):
        yield from (each.arg for each in node.args.args if each.arg in ("error", "exc", "failure"))


def _is_text(node: ast.expr, names: set[str]) -> bool:
    """Return whether an expression yields an error's text, such as ``str(error).lower()``."""
    match node:
        case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
            return name in names
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="args")):
            return name in names
        case ast.Call(func=ast.Attribute(value=value)):  # str(error).lower()
            return _is_text(value, names)
    return False


def test_error_text_rule_finds_violations() -> None:
    forbidden = """
try:
    work()
except ValueError as error:
    if "late" in str(error) or str(error).startswith("late"):
        pass
    if error.args[0] == "late" or str(error).lower().endswith("late"):
        pass

def explain(error):
    return "late" in str(error)
"""
    assert set(lines_that_read_error_text(ast.parse(forbidden))) == {5, 7, 11}
    allowed = "try:\n    work()\nexcept ValueError as error:\n    print(str(error).rstrip('.'))\n"
    assert list(lines_that_read_error_text(ast.parse(allowed))) == []
