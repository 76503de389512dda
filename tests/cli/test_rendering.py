"""Records are rendered as text that is safe for a terminal, as exact JSON, or with a template."""

from __future__ import annotations

import os
import time
import unicodedata
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meteor_cli.commands.tail import matching
from meteor_cli.render import jsonl
from meteor_cli.render.records import as_raw, as_text
from meteor_cli.render.sanitize import sanitize, sanitize_json
from meteor_cli.render.template import Template, local_time
from meteor_py import Record

HOSTILE = [
    b"\x1b[2J\x1b]0;title\x07",  # clears the screen, sets the title
    b"\x9b2J",  # the same control sequence, introduced by one byte
    "\x9b2J".encode(),
    "\u202eevil\u202c".encode(),  # reverses the text that follows
    "\u2066a\u2069\u200f\u061c".encode(),
    "a\u2028b\u2029c".encode(),
    "\ufeffbom\u200bzero\u00adsoft".encode(),
    "\U000e0041tag".encode(),
    b"a\rb\nc\td\0e\x7ff",
    b"\xff\xfe\xc3(",
]


def record(value: bytes = b"v", **fields: object) -> Record:
    given = {"offset": 7, "key": None, "headers": None, "timestamp": 1_000, "appended": 2_000}
    return Record(value=value, **(given | fields))  # type: ignore[arg-type]


def is_harmless(text: str) -> bool:
    return not any(unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") for char in text)


@pytest.mark.parametrize("data", HOSTILE)
def test_hostile_bytes_are_shown_as_escapes_on_one_line(data: bytes) -> None:
    assert is_harmless(sanitize(data))
    shown = as_text("bytes", colour=False)([record(data, key=data, headers={"h": data})])
    assert shown.endswith(b"\n")
    assert is_harmless(shown.decode()[:-1])


def test_every_control_and_format_character_is_escaped() -> None:
    everything = [chr(n) for n in range(0x110000) if not 0xD800 <= n < 0xE000]
    assert [char for char in everything if not is_harmless(sanitize(char))] == []


@pytest.mark.parametrize(
    "text", ["plain", "caffè ☕", "日本語　空白", "עברית", "🎉", "a\\nb", "\xa0"]
)
def test_printable_text_is_unchanged(text: str) -> None:
    assert sanitize(text.encode()) == text


@given(st.binary() | st.text().map(str.encode))
def test_sanitized_bytes_are_harmless(data: bytes) -> None:
    assert is_harmless(sanitize(data))


binary = st.binary(max_size=30) | st.text(max_size=20).map(str.encode)
records = st.builds(
    record,
    binary,
    key=st.none() | binary,
    headers=st.none() | st.dictionaries(st.text(max_size=5), binary, max_size=3),
    timestamp=st.integers(0, 253_402_300_799_999),
)


@given(st.lists(records, max_size=5))
@example([record(data, key=data, headers={"h": data}) for data in HOSTILE])
def test_json_round_trips_records_and_is_harmless(found: list[Record]) -> None:
    written = jsonl.encode("orders", found)
    assert is_harmless(written.decode().replace("\n", ""))
    assert written.count(b"\n") == len(found)
    read = jsonl.decode(written.splitlines())
    assert read.values == [r.value for r in found]
    assert (read.keys or [None] * len(found)) == [r.key for r in found]
    assert (read.headers or [None] * len(found)) == [r.headers for r in found]
    assert (read.timestamps or []) == [r.timestamp for r in found]


def test_json_format_of_records_is_stable() -> None:
    full = record(b"\xff", key=b"k", headers={"a": b"1", "b": b"\xfe"})
    assert jsonl.encode("orders", [full, record(b"\x1b\x9b")]).decode() == (
        '{"stream":"orders","offset":7,"timestamp":1000,"appended":2000,"key":"k",'
        '"value":{"b64":"/w=="},"headers":{"a":"1","b":{"b64":"/g=="}}}\n'
        '{"stream":"orders","offset":7,"timestamp":1000,"appended":2000,"key":null,'
        '"value":{"b64":"G5s="},"headers":null}\n'
    )
    assert msgspec.json.decode(jsonl.encode("s", [record("\u202e\x7f".encode())]))["value"] == (
        "\u202e\x7f"
    )


@pytest.mark.parametrize(
    "line",
    [b"{", b"1", b"{}", b'{"value":1}', b'{"value":null}', b'{"value":{"b64":"*"}}',
     b'{"value":{"b64":"YQ==","x":1}}', b'{"value":"a","key":1}', b'{"value":"a","headers":[]}',
     b'{"value":"a","timestamp":"now"}', b'{"value":"\\ud800"}', b"\xff"],
)  # fmt: skip
def test_invalid_line_is_reported_with_its_number(line: bytes) -> None:
    with pytest.raises(ValueError, match="Line 12 is not a record in"):
        jsonl.decode([b'{"value":"ok"}', b"", line], 10)


def test_sanitized_json_keeps_its_meaning() -> None:
    text = msgspec.json.encode({"\u202e": "\U000e0041\x9b\x7f"}).decode()
    assert is_harmless(sanitize_json(text))
    assert msgspec.json.decode(sanitize_json(text)) == msgspec.json.decode(text)


@pytest.fixture
def in_utc() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        local_time.cache_clear()
        yield
    time.tzset()
    local_time.cache_clear()


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (r"%o %T %A %k %v\n", b"7 1000 2000 k \xc3\xa9\\x1b\n"),
        (r"%s\t%K\t%V%%", b"orders\t1\t3%"),
        ("%v{hex} %k{base64}", b"c3a91b aw=="),
        ("%v{raw}", b"\xc3\xa9\x1b"),
        ("%h", b"a=1 b=\\x00"),
        (r"\x41\\\0", b"A\\\0"),
        ("%d{%Y}", b"1970"),
        ("%d", b"1970-01-01T00:00:01.000+00:00"),
        ("", b""),
    ],
)
@pytest.mark.usefixtures("in_utc")
def test_template_renders_a_record(template: str, shown: bytes) -> None:
    found = record("é\x1b".encode(), key=b"k", headers={"a": b"1", "b": b"\0"})
    assert Template(template, "orders").render(found) == shown


@pytest.mark.parametrize("template", ["%", "%x", "%v{rot13}", "%o{hex}", "\\", "\\q", "100%"])
def test_invalid_template_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"^The format .*\.$"):
        Template(template, "orders")


def test_raw_templates_are_recognized() -> None:
    assert Template("%k{raw}", "s").raw
    assert not Template("%k{hex} %v", "s").raw


def test_raw_output_has_only_values_and_delimiters() -> None:
    values = [b"", b"\xff", b"a\nb"]
    assert as_raw(b"\0")([record(value) for value in values]) == b"\0\xff\0a\nb\0"


def test_messagepack_is_shown_as_json() -> None:
    shown = as_text("msgpack", colour=False)([record(msgspec.msgpack.encode({"a": 1}))])
    assert shown.endswith(b' {"a":1}\n')
    for value, shown in ((b"\xc1", b" \\xc1 (1 "), (b"\x91" * 100_000, b"\\x91 (100,000 ")):
        line = as_text("msgpack", colour=False)([record(value)])
        assert line.endswith(shown + b"bytes of unreadable MessagePack)\n"), value[:9]


def test_filter_matches_any_key_and_all_headers() -> None:
    match = matching(["a", "b"], ["h", "n=1"])
    assert match is not None
    assert match(record(key=b"b", headers={"h": b"", "n": b"1"}))
    assert not match(record(key=b"c", headers={"h": b"", "n": b"1"}))
    assert not match(record(key=b"a", headers={"h": b"", "n": b"2"}))
    assert not match(record(key=b"a", headers={"n": b"1"}))
    assert not match(record(key=None))
    assert matching([], []) is None


def test_filter_matches_a_binary_key() -> None:
    match = matching([os.fsdecode(b"\xff")], [])
    assert match is not None
    assert match(record(key=b"\xff"))
