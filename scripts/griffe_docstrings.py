"""A Griffe extension for the site: converts docstrings to Markdown, and shows all public fields.

Docstrings are written for the terminal: examples start with ``>>>``, and a few names are Sphinx
roles. Markdown would show the examples as quotations, and the roles with their colons. The site
hides members without a docstring, but data class fields are public even without one.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_DOCTEST = re.compile(r"^( *)>>> .*\n(?:\1\S.*(?:\n|\Z))*", re.MULTILINE)
_FLAG = re.compile(r" *# doctest: .*")


class MarkdownDocstrings(griffe.Extension):
    """Turns doctests into code blocks and roles into code; shows undocumented public fields."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        public = not attr.name.startswith("_") and attr.annotation is not None
        if attr.docstring is None and public and _is_data_class(attr.parent):
            attr.docstring = griffe.Docstring("", parent=attr)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _DOCTEST.sub(_fence, obj.docstring.value)
            obj.docstring.value = _ROLE.sub(r"`\1`", text)


def _is_data_class(parent: griffe.Object | None) -> bool:
    if not isinstance(parent, griffe.Class):
        return False
    made_by = [str(base) for base in parent.bases] + [str(d.value) for d in parent.decorators]
    return any(re.search(r"\b(dataclass|NamedTuple|Struct)\b", each) for each in made_by)


def _fence(found: re.Match[str]) -> str:
    indent = found[1]
    return f"{indent}```pycon\n{_FLAG.sub('', found[0]).rstrip()}\n{indent}```\n"
