"""A Griffe extension for the documentation site: our docstrings as Markdown.

Docstrings are written for the terminal: examples start with ``>>>``, and a few names are Sphinx
roles. Markdown would show the first as quotations and the second with colons.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1\S.*(?:\n|\Z))*", re.MULTILINE)
_FLAG = re.compile(r" *# doctest: .*")


class MarkdownDocstrings(griffe.Extension):
    """Turns doctests into code blocks and roles into code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _DOCTEST.sub(_fence, obj.docstring.value)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)


def _fence(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{_FLAG.sub('', found[0]).rstrip()}\n{indent}```\n"
