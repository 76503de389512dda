"""The ways in which ``tail`` shows records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.harmless import harmless
from meteor_cli.template import Template, local_time, show_headers

if TYPE_CHECKING:
    from meteor_py import Record, RecordBatch

Render = Callable[["RecordBatch | list[Record]"], bytes]


def as_json(stream: str) -> Render:
    """One object on each line."""
    from meteor_cli import jsonl

    return lambda records: jsonl.encode(stream, records)


def as_raw(delimiter: bytes) -> Render:
    """The values as they are."""

    def render(records: RecordBatch | list[Record]) -> bytes:
        if isinstance(records, list):
            values = [record.value for record in records]
        else:
            values = records.values()  # columnar: no object is made for a record
        values.append(b"")
        return delimiter.join(values)

    return render


def as_template(template: Template) -> Render:
    """What the user wants."""
    return lambda records: b"".join([template.render(record) for record in records])


def as_text(codec: str, *, colour: bool) -> Render:
    """For people: offset, time, key, value and headers on one line."""
    show = _show_msgpack if codec == "msgpack" else harmless

    def style(text: str, **how: Any) -> str:
        return click.style(text, **how) if colour else text

    def line(record: Record) -> str:
        time = local_time(record.timestamp, "%Y-%m-%d %H:%M:%S")
        head = style(f"{record.offset} {time}.{record.timestamp % 1000:03}", dim=True)
        key = "" if record.key is None else style(harmless(record.key), fg="cyan") + ": "
        headers = f" {{{show_headers(record)}}}" if record.headers else ""
        return f"{head} {key}{show(record.value)}{style(headers, dim=True)}\n"

    return lambda records: "".join([line(record) for record in records]).encode()


def _show_msgpack(value: bytes) -> str:
    """MessagePack as JSON, which can be read."""
    import msgspec

    try:
        return harmless(msgspec.json.encode(msgspec.msgpack.decode(value)))
    except (msgspec.MsgspecError, TypeError, ValueError):
        return harmless(value)


Match = Callable[["Record"], bool]


def matching(keys: Sequence[str], headers: Sequence[str]) -> Match | None:
    """Whether a record has one of the keys and all of the headers; None if all records do."""
    if not keys and not headers:
        return None
    wanted_keys = {key.encode(errors="surrogateescape") for key in keys}
    wanted_headers = [_header(header) for header in headers]

    def match(record: Record) -> bool:
        if wanted_keys and record.key not in wanted_keys:
            return False
        found = record.headers or {}
        return all(
            name in found and (value is None or found[name] == value)
            for name, value in wanted_headers
        )

    return match


def _header(text: str) -> tuple[str, bytes | None]:
    name, equals, value = text.partition("=")
    return name, value.encode(errors="surrogateescape") if equals else None
