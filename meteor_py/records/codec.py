"""Codecs: how values become bytes and bytes values. No pickle, anywhere.

A codec is any object with ``encode(value) -> bytes`` and ``decode(data) -> value``. Both are
called once per record, in the thread of the caller, and must not keep state: a record may be
decoded again after a seek. An exception in ``encode`` reaches the caller of ``publish`` as it is,
one in ``decode`` becomes a :class:`~meteor_py.DecodeError` that carries the raw record.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec


@runtime_checkable
class Codec(Protocol):
    """What ``codec=`` takes besides a name."""

    def encode(self, value: Any) -> bytes:
        """Return the bytes to publish for ``value``."""

    def decode(self, data: bytes) -> Any:
        """Return the value that ``data`` stands for."""


class _Text:
    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise TypeError(f"The text codec publishes str, not {type(value).__name__}.")
        return value.encode()

    def decode(self, data: bytes) -> str:
        return data.decode()


class _Json:
    def encode(self, value: Any) -> bytes:
        return msgspec.json.encode(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.json.decode(data)


class _MessagePack:
    def encode(self, value: Any) -> bytes:
        return msgspec.msgpack.encode(value)

    def decode(self, data: bytes) -> Any:
        return msgspec.msgpack.decode(data)


_BY_NAME: dict[str, Codec | None] = {
    "bytes": None,
    "text": _Text(),
    "json": _Json(),
    "msgpack": _MessagePack(),
}


def find_codec(codec: str | Codec) -> Codec | None:
    """Return the codec of that name, or the object itself; None = values are bytes already."""
    if isinstance(codec, str):
        if codec not in _BY_NAME:
            raise ValueError(
                f"There is no codec {codec!r}; use one of {', '.join(_BY_NAME)}, "
                "or an object with encode and decode."
            )
        return _BY_NAME[codec]
    if not isinstance(codec, Codec):
        raise TypeError(
            f"A codec needs the methods encode and decode; {type(codec).__name__} lacks one."
        )
    return codec
