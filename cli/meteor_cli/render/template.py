r"""``tail --format`` takes a template, similar to those of kcat and rpk.

    %o %k %v %h %s   offset, key, value, headers, stream
    %T %A            timestamp and append time, in ms
    %d %d{%H:%M:%S}  timestamp as RFC 3339, or in strftime format
    %K %V            size of the key and of the value in bytes
    %v{hex}          value as hex, base64 or raw; also %k{...}
    %% \n \t \r \\ \0 \xHH

Keys, values and headers are made safe for a terminal, except with ``raw``.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING

from meteor_cli.render.sanitize import sanitize

if TYPE_CHECKING:
    from meteor_py import Record

Piece = Callable[["Record"], bytes]

_TOKEN = re.compile(
    r"%(?P<letter>.)(?:\{(?P<how>[^}]*)\})?|\\(?P<escape>x[0-9a-fA-F]{2}|.)|[^%\\]+", re.DOTALL
)
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "\\": b"\\", "0": b"\0"}
_ENCODINGS: dict[str | None, Callable[[bytes], bytes]] = {
    None: lambda data: sanitize(data).encode(),
    "hex": lambda data: data.hex().encode(),
    "base64": b64encode,
    "raw": bytes,
}


class Template:
    """A parsed template.

    Raises:
        ValueError: The text is not a valid template.
    """

    def __init__(self, text: str, stream: str) -> None:
        self._stream = stream
        #: Whether the output contains unescaped record bytes.
        self.raw = False
        self._pieces: list[bytes | Piece] = []
        end = 0
        for token in _TOKEN.finditer(text):
            self._pieces.append(self._piece(token))
            end = token.end()
        if end < len(text):
            raise ValueError(f"The format ends with a single {text[end:]!r}. Double it.")

    def render(self, record: Record) -> bytes:
        return b"".join(
            [piece if isinstance(piece, bytes) else piece(record) for piece in self._pieces]
        )

    def _piece(self, token: re.Match[str]) -> bytes | Piece:
        letter, how, escape = token["letter"], token["how"], token["escape"]
        if escape is not None:
            if len(escape) == 3:
                return bytes.fromhex(escape[1:])
            if escape not in _ESCAPES:
                raise ValueError(
                    rf"The format has an unknown escape \{escape}. Write \\ for a backslash."
                )
            return _ESCAPES[escape]
        if letter is None:
            return token[0].encode()
        if letter == "%":
            return b"%"
        if letter == "d":
            return lambda record: sanitize(local_time(record.timestamp, how)).encode()
        if letter in "kv" and how in _ENCODINGS:
            self.raw |= how == "raw"
            encode = _ENCODINGS[how]
            if letter == "v":
                return lambda record: encode(record.value)
            return lambda record: encode(record.key or b"")
        if how is None and letter in _PLAIN:
            return _PLAIN[letter]
        if how is None and letter == "s":
            return self._stream.encode()
        raise ValueError(
            f"The format has an unknown field {token[0]}. Write %% for a percent sign."
        )


def show_headers(record: Record) -> str:
    """Return the headers as NAME=VALUE on one line."""
    pairs = (record.headers or {}).items()
    return " ".join(f"{sanitize(name)}={sanitize(value)}" for name, value in pairs)


@lru_cache(4096)  # neighboring records often share a time, and converting to local time is slow
def local_time(ms: int, form: str | None = None) -> str:
    """Return a time in the user's zone, as RFC 3339 or in the given strftime format."""
    time = datetime.fromtimestamp(ms / 1000, UTC).astimezone()
    return time.isoformat(timespec="milliseconds") if form is None else time.strftime(form)


_PLAIN: dict[str, Piece] = {
    "o": lambda record: b"%d" % record.offset,
    "T": lambda record: b"%d" % record.timestamp,
    "A": lambda record: b"%d" % record.appended,
    "K": lambda record: b"%d" % len(record.key or b""),
    "V": lambda record: b"%d" % len(record.value),
    "h": lambda record: show_headers(record).encode(),
}
