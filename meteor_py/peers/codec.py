"""Codecs of peer groups: how the bodies of messages become bytes. No pickle, anywhere.

What kind of bytes they are is written beside them: the name of a format, or the number of a type
that was registered. So members with different codecs understand each other, as far as they know
the types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from meteor_py.records.config import check_choice, check_int

Format = Literal["json", "msgpack", "bytes"]
_T = TypeVar("_T")

#: The largest number of a type.
TYPE_MAX = 2**31 - 1


class UnknownType(Exception):
    """The bytes are of a type that is not registered here, or are not what their type says."""


@dataclass(frozen=True)
class _Kind:
    """A registered type."""

    type: type
    id: int
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


class PeerCodec:
    """A format, and types of your own with numbers that are the same on all nodes.

    >>> codec = PeerCodec("msgpack")
    >>> codec.register(complex, id=1, encode=lambda z: str(z).encode(),
    ...                decode=lambda data: complex(data.decode()))
    >>> codec.decode(*codec.encode(2 + 1j))
    (2+1j)

    Register the types before the first message. Only a value that is of the type itself is written
    under its number, not one that lies inside of another.
    """

    def __init__(self, format: Format = "json") -> None:
        check_choice("format", format, ("json", "msgpack", "bytes"))
        self.format: Format = format
        self._by_type: dict[type, _Kind] = {}
        self._by_id: dict[str, _Kind] = {}

    def register(
        self,
        type: type[_T],
        *,
        id: int,
        encode: Callable[[_T], bytes] | None = None,
        decode: Callable[[bytes], _T] | None = None,
    ) -> None:
        """Give a type its number.

        Args:
            type: The class; values of its subclasses are not meant.
            id: 0 to 2^31 - 1, the same on all nodes, for ever.
            encode: Makes bytes of a value; without it, the format does: for dataclasses, attrs
                classes and ``msgspec.Struct``.
            decode: Makes a value of these bytes.

        Raises:
            ValueError: The number or the type is taken, or only one of the functions is given.
        """
        check_int("id", id, 0, TYPE_MAX)
        if (encode is None) != (decode is None):
            raise ValueError("Give encode and decode, or neither of them.")
        if type in self._by_type or str(id) in self._by_id:
            raise ValueError(f"The number {id} or the type {type.__name__} is registered already.")
        if encode is None or decode is None:
            if self.format == "bytes":
                raise ValueError('With the format "bytes" a type needs encode and decode.')
            encode, decode = _by_format(self.format, type)
        kind = _Kind(type, id, encode, decode)
        self._by_type[type] = kind
        self._by_id[str(id)] = kind

    def encode(self, value: Any) -> tuple[str, bytes]:
        """The type of a value, and its bytes.

        Raises:
            TypeError, ValueError: The format, or the type's own function, cannot write it. JSON
                has no NaN and no infinity; "msgpack" has.
        """
        try:
            return self._encode(value)
        except (TypeError, ValueError):
            raise
        except Exception as error:  # OverflowError, RecursionError, or whatever an encode raises
            raise ValueError(
                f"This {type(value).__name__} cannot be written ({type(error).__name__}: {error})."
            ) from error

    def _encode(self, value: Any) -> tuple[str, bytes]:
        kind = self._by_type.get(type(value))
        if kind is not None:
            data = kind.encode(value)
            if not isinstance(data, bytes):
                raise TypeError(
                    f"The encode function of {kind.type.__name__} must return bytes, not "
                    f"{type(data).__name__}."
                )
            return str(kind.id), data
        if value is None:
            return "", b""
        if self.format == "bytes":
            if not isinstance(value, (bytes, bytearray, memoryview)):
                raise TypeError(
                    f'The codec "bytes" sends bytes, not {type(value).__name__}; choose another '
                    "codec of the group, or register the type."
                )
            return "bytes", bytes(value)
        return self.format, _ENCODERS[self.format](value)

    def decode(self, kind: str, data: bytes) -> Any:
        """The value that bytes of a type stand for.

        Raises:
            UnknownType: The type is not known here, or the bytes are not of it.
        """
        known = self._by_id.get(kind)
        try:
            if known is not None:
                return known.decode(data)
            if kind == "":
                return None
            if kind in _DECODERS:
                return _DECODERS[kind](data)
        except Exception as error:
            raise UnknownType(f"The bytes are not of the type {kind!r}: {error}") from error
        raise UnknownType(
            f"The type {kind!r} is not known here; register it with codec.register() on all nodes."
        )


def encode_json(value: Any) -> bytes:
    """JSON, which has no NaN and no infinity: they would be null, and None for who gets them.

    Raises:
        TypeError: It cannot be written as JSON.
        ValueError: Something in it is not a finite number.
    """
    data: bytes = msgspec.json.encode(value)
    if b"null" in data and _has_infinite(value):  # rarely looked at
        raise ValueError(
            'NaN and infinity cannot be written as JSON; messages with codec="msgpack" have them.'
        )
    return data


def _has_infinite(value: Any) -> bool:
    try:
        waiting = [msgspec.to_builtins(value)]
    except TypeError:  # msgspec.Raw: that is JSON already
        return False
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return True
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
    return False


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "json": encode_json,
    "msgpack": msgspec.msgpack.encode,
}
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": msgspec.json.decode,
    "msgpack": msgspec.msgpack.decode,
    "bytes": bytes,
}


def _by_format(
    format: Literal["json", "msgpack"], type: type[_T]
) -> tuple[Callable[[_T], bytes], Callable[[bytes], _T]]:
    if format == "json":
        return encode_json, msgspec.json.Decoder(type).decode
    return msgspec.msgpack.encode, msgspec.msgpack.Decoder(type).decode


def find_codec(codec: Format | PeerCodec) -> PeerCodec:
    """The codec of that name, or the object itself."""
    if isinstance(codec, PeerCodec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(
            "codec must be a PeerCodec, or one of json, msgpack, bytes; not "
            f"{type(codec).__name__}."
        )
    check_choice("codec", codec, ("json", "msgpack", "bytes"))
    return PeerCodec(codec)
