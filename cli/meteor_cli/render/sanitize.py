"""Functions that make untrusted text safe for a terminal.

A record may contain C0 and C1 control characters. Sequences of these can move the cursor, set the
title or send input as if the user had typed it. A record may also contain bidirectional and
invisible characters, which disguise text.
"""

from __future__ import annotations

import re

#: Control, format and line separator characters: the Unicode categories Cc, Cf, Zl and Zp.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001-\U000e007f]"
)
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def sanitize(data: bytes | str) -> str:
    """Return the text on one line, with unsafe characters escaped. Not reversible.

    >>> sanitize(b"caf\\xc3\\xa9 \\x1b[2J \\xff")
    'café \\\\x1b[2J \\\\xff'
    """
    text = data if isinstance(data, str) else data.decode(errors="backslashreplace")
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_escape, text)


def sanitize_json(text: str) -> str:
    r"""Replace unsafe characters in encoded JSON with ``\u`` escapes. Keep newlines."""
    if text.isascii() and "\x7f" not in text:
        return text  # the encoder has escaped the other control characters
    return _UNSAFE.sub(_escape_json, text)


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    return _SHORT.get(char) or char.encode("unicode-escape").decode()


def _escape_json(match: re.Match[str]) -> str:
    char = match[0]
    if char == "\n":
        return char
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
