"""JSON output for everything except records: one object per line."""

from __future__ import annotations

from typing import Any

import click

from meteor_cli.render.sanitize import sanitize_json


def print_json(fields: object) -> None:
    """Print one object on a line, safe for a terminal."""
    click.echo(to_json(fields))


def to_json(fields: object) -> str:
    """Return JSON on one line, safe for a terminal."""
    import msgspec

    return sanitize_json(msgspec.json.encode(fields).decode())


def to_fields(found: object, **first: object) -> dict[str, Any]:
    """Return ``first``, the fields of a description, and its settings, as one flat dict."""
    import msgspec

    fields: dict[str, Any] = first | msgspec.to_builtins(found, builtin_types=(bytes,))
    settings: dict[str, Any] = fields.pop("config", {})
    return fields | settings


def writable(value: object) -> object:
    """Convert bytes to a string or ``{"b64": ...}``. Return other values unchanged."""
    from meteor_cli.render.jsonl import to_data

    return to_data(value) if isinstance(value, bytes) else value
