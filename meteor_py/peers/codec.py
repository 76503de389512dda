"""Codecs for peer groups. They encode message bodies and never use pickle.

Each encoded body carries its type: the name of a format, or the number or name of a registered
type. Members with different codecs can therefore exchange messages, provided that each of them has
registered the types in these messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from meteor_py.records.codec import encode_json
from meteor_py.records.config import check_choice, check_int

Format = Literal["json", "msgpack", "bytes"]
_T = TypeVar("_T")

#: The largest type number.
TYPE_MAX = 2**31 - 1


class UnknownType(Exception):
    """The type of the data is not registered here, or the bytes do not match the type."""


@dataclass(frozen=True)
class _Kind:
    """A registered type."""

    type: type
    #: The type's number, or ``@`` and its module and class name.
    tag: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


class PeerCodec:
    """A message format plus registered types, each with the same number or name in all processes.

    >>> codec = PeerCodec("msgpack")
    >>> codec.register(complex, id=1, encode=lambda z: str(z).encode(),
    ...                decode=lambda data: complex(data.decode()))
    >>> codec.decode(*codec.encode(2 + 1j))
    (2+1j)

    Register types before the first message. The codec uses a registered type only for a whole body,
    not for a value nested inside another.
    """

    def __init__(self, format: Format = "json") -> None:
        check_choice("format", format, ("json", "msgpack", "bytes"))
        self.format: Format = format
        self._by_type: dict[type, _Kind] = {}
        self._by_tag: dict[str, _Kind] = {}

    def register(
        self,
        type: type[_T],
        *,
        id: int | None = None,
        encode: Callable[[_T], bytes] | None = None,
        decode: Callable[[bytes], _T] | None = None,
    ) -> None:
        """Register a type, under a number or under its name.

        Args:
            type: The class. Its subclasses are not included.
            id: The type's number, 0 to 2^31 - 1. It must be the same in all processes, and must
                never be reused. Without a number, messages carry the module and class name, which
                must be the same in all processes.
            encode: Converts a value to bytes. Omit it for dataclasses, attrs classes and
                ``msgspec.Struct``, which the format can encode.
            decode: Converts bytes back to a value.

        Raises:
            ValueError: The number, name or type is already registered; ``id`` is out of range; only
                one of ``encode`` and ``decode`` was passed; or neither was, and the format is
                "bytes".
            TypeError: ``id`` is not an int.
        """
        if id is not None:
            check_int("id", id, 0, TYPE_MAX)
        tag = f"@{type.__module__}.{type.__qualname__}" if id is None else str(id)
        if (encode is None) != (decode is None):
            raise ValueError("Pass both encode and decode, or neither.")
        if type in self._by_type or tag in self._by_tag:
            raise ValueError(
                f"The type {type.__name__} or its identifier {tag!r} is already registered. "
                "Register each type once, under its own number or name."
            )
        if encode is None or decode is None:
            if self.format == "bytes":
                raise ValueError(
                    'The format "bytes" cannot encode types itself. Pass both encode and decode.'
                )
            format: Any = msgspec.json if self.format == "json" else msgspec.msgpack
            encode, decode = _ENCODERS[self.format], format.Decoder(type).decode
        self._by_type[type] = self._by_tag[tag] = _Kind(type, tag, encode, decode)

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Return a value's type and its encoded bytes.

        Raises:
            TypeError, ValueError: The format, or the registered function, cannot encode the value.
                JSON cannot represent NaN or infinity; "msgpack" can.
        """
        try:
            return self._encode(value)
        except (TypeError, ValueError):
            raise
        except Exception as error:  # RecursionError, or any error from a registered function
            raise ValueError(
                f"Cannot encode this {type(value).__name__} ({type(error).__name__}: {error})."
            ) from error

    def _encode(self, value: Any) -> tuple[str, bytes]:
        kind = self._by_type.get(type(value))
        if kind is not None:
            data = kind.encode(value)
            if not isinstance(data, bytes):
                raise TypeError(
                    f"The encode function for {kind.type.__name__} must return bytes, not "
                    f"{type(data).__name__}."
                )
            return kind.tag, data
        if value is None:
            return "", b""
        if self.format == "bytes":
            if not isinstance(value, (bytes, bytearray, memoryview)):
                raise TypeError(
                    f'The codec "bytes" can send only bytes, not {type(value).__name__}. Choose '
                    "another codec for the group, or register the type."
                )
            return "bytes", bytes(value)
        return self.format, _ENCODERS[self.format](value)

    def is_plain(self, kind: str) -> bool:
        """Return whether this type can be decoded without calling an application function."""
        return kind == "" or kind in _DECODERS

    def decode(self, kind: str, data: bytes) -> Any:
        """Decode bytes as the given type, and return the value.

        Raises:
            UnknownType: The type is not registered here, or the bytes do not match it.
        """
        known = self._by_tag.get(kind)
        try:
            if known is not None:
                return known.decode(data)
            if kind == "":
                return None
            if kind in _DECODERS:
                return _DECODERS[kind](data)
        except Exception as error:
            raise UnknownType(f"Cannot decode the bytes as type {kind!r}: {error}") from error
        raise UnknownType(
            f"The type {kind!r} is not known here. Register it in every process with "
            "codec.register()."
        )


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "json": encode_json,
    "msgpack": msgspec.msgpack.encode,
}
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "json": msgspec.json.decode,
    "msgpack": msgspec.msgpack.decode,
    "bytes": bytes,
}


def find_codec(codec: Format | PeerCodec) -> PeerCodec:
    """Return a new codec for a format. A ``PeerCodec`` is returned unchanged."""
    if isinstance(codec, PeerCodec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(
            f"codec must be a PeerCodec or one of json, msgpack, bytes, not {type(codec).__name__}."
        )
    check_choice("codec", codec, ("json", "msgpack", "bytes"))
    return PeerCodec(codec)
