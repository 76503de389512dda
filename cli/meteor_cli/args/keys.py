r"""Ordering keys as text.

Bytes that are not text, or not safe for a terminal, are written as ``\xNN``, and a backslash as
``\\``. So users can pass the printed key back to a command; in a shell, put it in single quotes.
"""

from __future__ import annotations

import re
from typing import Any

import click

from meteor_cli.render.sanitize import sanitize

_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|([\\nrt])|)")
_SHORT = {"\\": b"\\", "n": b"\n", "r": b"\r", "t": b"\t"}


def show_key(key: bytes) -> str:
    r"""Format a key on one line; the inverse of ``parse_key``.

    >>> show_key(b"customer 7"), show_key(b"\xff\x00C:\\")
    ('customer 7', '\\xff\\x00C:\\\\')
    """

    def show(char: str) -> str:
        if char == "\\":
            return r"\\"
        data = char.encode(errors="surrogateescape")
        is_safe = not "\udc80" <= char <= "\udcff" and sanitize(char) == char
        return char if is_safe else "".join(f"\\x{byte:02x}" for byte in data)

    return "".join(map(show, key.decode(errors="surrogateescape")))


def parse_key(text: str) -> bytes:
    r"""Parse a key; raise ``ValueError`` if a backslash does not start an escape.

    >>> parse_key(r"a\x00\\")
    b'a\x00\\'
    """
    parts: list[bytes] = []
    end = 0
    for match in _ESCAPE.finditer(text):
        parts.append(text[end : match.start()].encode(errors="surrogateescape"))
        end = match.end()
        if match[1]:
            parts.append(bytes.fromhex(match[1]))
        elif match[2]:
            parts.append(_SHORT[match[2]])
        else:
            raise ValueError(r"write a backslash as \\ and other bytes as \xNN")
    parts.append(text[end:].encode(errors="surrogateescape"))
    return b"".join(parts)


class KeyType(click.ParamType[bytes]):
    """The KEY argument of commands that have a ``--hex`` flag."""

    name = "key"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> bytes:
        as_hex = context is not None and bool(context.params.get("as_hex"))
        try:
            found = bytes.fromhex(value) if as_hex else parse_key(value)
        except ValueError as error:
            why = "it is not hexadecimal" if as_hex else str(error)
            self.fail(f"{sanitize(value)!r} is not an ordering key: {why}.", param, context)
        if not 1 <= len(found) <= 256:
            self.fail(f"An ordering key has 1 to 256 bytes, not {len(found)}.", param, context)
        return found


def parse_rule(text: str) -> str:
    """Validate an ``--ordering-key``: "key" or "header:NAME"."""
    if text != "key" and not re.fullmatch(r"header:.+", text, re.DOTALL):
        raise ValueError(f"{sanitize(text)!r} is neither 'key' nor 'header:NAME'.")
    return text
