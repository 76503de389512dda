"""Codecs, which convert values to bytes and back. None of them uses pickle.

A codec is any object with ``encode(value) -> bytes`` and ``decode(data) -> value``. Both are
called for each record, in the caller's thread, and must be stateless: a record may be decoded more
than once. An exception in ``encode`` reaches the caller of ``publish`` unchanged. An exception
in ``decode`` becomes a :class:`~meteor_py.DecodeError` that carries the raw record.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

CodecName = Literal["bytes", "text", "json", "msgpack"]


@runtime_checkable
class Codec(Protocol):
    """An object that can be passed as ``codec=`` instead of a name."""

    def encode(self, value: Any) -> bytes:
        """Return the bytes to publish for ``value``."""

    def decode(self, data: bytes) -> Any:
        """Return the value that ``data`` encodes."""


class _Text:
    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"The text codec publishes str, not {type(value).__name__}.")
        return value.encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


class _Json:
    def encode(self, value: Any) -> bytes:
        return encode_json(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.json.decode(data)


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON. Refuse NaN and infinity, which JSON cannot represent.

    Raises:
        TypeError: The value cannot be written as JSON.
        ValueError: The value contains NaN or infinity, other than as a key of a dict.
    """
    data: bytes = msgspec.json.encode(value)
    if b"null" in data and _has_infinite(value):  # msgspec writes NaN and infinity as null
        raise ValueError(
            'NaN and infinity cannot be written as JSON. Replace them, or use codec="msgpack".'
        )
    return data


def _has_infinite(value: Any) -> bool:
    waiting = [msgspec.to_builtins(value, enc_hook=_skip_raw)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return True
        if isinstance(item, dict):
            waiting += item.keys()
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
    return False


def _skip_raw(value: Any) -> None:
    """Replace a ``msgspec.Raw``: it is JSON already, in which NaN and infinity cannot occur."""


_BY_NAME: dict[CodecName, Any] = {
    "bytes": None,
    "text": _Text(),
    "json": _Json(),
    "msgpack": msgspec.msgpack,  # this module has encode and decode
}
#: The names of all codecs.
CODECS = tuple(_BY_NAME)


def find_codec(codec: CodecName | Codec) -> Codec | None:
    """Return the codec named ``codec``, or ``codec`` itself if it is an object; None for "bytes".

    Raises:
        ValueError: No codec has this name.
        TypeError: The object lacks ``encode`` or ``decode``.
    """
    if isinstance(codec, str):
        if codec not in _BY_NAME:
            raise ValueError(
                f"There is no codec {codec!r}. Use one of {', '.join(_BY_NAME)}, "
                "or an object with encode and decode."
            )
        found: Codec | None = _BY_NAME[codec]
        return found
    if not isinstance(codec, Codec):
        raise TypeError(
            "A codec needs the methods encode and decode. "
            f"{type(codec).__name__} lacks at least one of them."
        )
    return codec
