"""What ``--json`` prints, besides records: objects, one on each line."""

from __future__ import annotations

from typing import Any

import click

from meteor_cli.render.sanitize import sanitize_json


def print_json(fields: object) -> None:
    """One object on a line of its own, safe for a terminal."""
    click.echo(to_json(fields))


def to_json(fields: object) -> str:
    """JSON on one line, safe for a terminal."""
    import msgspec

    return sanitize_json(msgspec.json.encode(fields).decode())


def to_fields(found: object, **first: object) -> dict[str, Any]:
    """The fields of a description, those of its settings among them; ``first`` come first."""
    import msgspec

    fields: dict[str, Any] = first | msgspec.to_builtins(found, builtin_types=(bytes,))
    settings: dict[str, Any] = fields.pop("config", {})
    return fields | settings


def writable(value: object) -> object:
    """Of bytes the same form as in records; anything else as it is."""
    from meteor_cli.render.jsonl import to_data

    return to_data(value) if isinstance(value, bytes) else value
