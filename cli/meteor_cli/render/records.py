"""Functions that format records for ``tail``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.template import Template, local_time, show_headers

if TYPE_CHECKING:
    from meteor_py import Record, RecordBatch

#: Maximum number of bytes to show of a MessagePack value that cannot be shown as JSON.
_BYTES_MAX = 1_000

Render = Callable[["RecordBatch | list[Record]"], bytes]


def as_json(stream: str) -> Render:
    from meteor_cli.render import jsonl

    return lambda records: jsonl.encode(stream, records)


def as_raw(delimiter: bytes) -> Render:
    def render(records: RecordBatch | list[Record]) -> bytes:
        if isinstance(records, list):
            values = [record.value for record in records]
        else:
            values = records.values()  # this is faster, because it builds no Record objects
        values.append(b"")
        return delimiter.join(values)

    return render


def as_template(template: Template) -> Render:
    return lambda records: b"".join([template.render(record) for record in records])


def as_text(codec: str, *, colour: bool) -> Render:
    """Render offset, time, key, value and headers on one line."""
    show = _show_msgpack if codec == "msgpack" else sanitize

    def style(text: str, **how: Any) -> str:
        return click.style(text, **how) if colour else text

    def line(record: Record) -> str:
        time = local_time(record.timestamp, "%Y-%m-%d %H:%M:%S")
        head = style(f"{record.offset} {time}.{record.timestamp % 1000:03}", dim=True)
        key = "" if record.key is None else style(sanitize(record.key), fg="cyan") + ": "
        headers = f" {{{show_headers(record)}}}" if record.headers else ""
        return f"{head} {key}{show(record.value)}{style(headers, dim=True)}\n"

    return lambda records: "".join([line(record) for record in records]).encode()


def _show_msgpack(value: bytes) -> str:
    """Show MessagePack as JSON, or as bytes if JSON cannot express the value."""
    import msgspec

    try:
        return sanitize(msgspec.json.encode(msgspec.msgpack.decode(value)))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return f"{sanitize(value[:_BYTES_MAX])} ({len(value):,} bytes of unreadable MessagePack)"
