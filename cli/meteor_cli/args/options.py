"""Options and arguments that several commands have, and the kinds they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from meteor_cli.args import completion
from meteor_cli.args.keys import parse_rule
from meteor_cli.args.sizes import parse_size

T = TypeVar("T")
Decorator = Callable[[Any], Any]


class Parsed(click.ParamType[T]):
    """A parameter in a notation of ours.

    Args:
        name: What it is.
        parse: Understands it; the text of its ``ValueError`` is shown to the user.
    """

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> T:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # a default
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, context)


def together(*decorators: Decorator) -> Decorator:
    """Several options and arguments, in this order."""

    def decorate(function: Any) -> Any:
        for each in reversed(decorators):
            function = each(function)
        return function

    return decorate


def flag(*names: str, help: str) -> Decorator:
    """An option without a value."""
    return click.option(*names, is_flag=True, help=help)


def count(
    *names: str, help: str, min: int = 1, max: int | None = None, **settings: Any
) -> Decorator:
    """A whole number."""
    settings = {"metavar": "N"} | settings
    return click.option(*names, type=click.IntRange(min, max), help=help, **settings)


def seconds(
    *names: str, help: str, min: float = 0, max: float | None = None, **settings: Any
) -> Decorator:
    """A duration; one that must be more than 0 has ``positive``."""
    kind = click.FloatRange(min, max, min_open=settings.pop("positive", False))
    return click.option(*names, type=kind, metavar="SECONDS", help=help, **settings)


def interval(default: float) -> Decorator:
    """The option ``--interval`` of what looks again and again."""
    help = f"Time between two looks: {default:g}."
    return seconds("--interval", min=0.1, max=3600, default=default, help=help)


def size(name: str, *, help: str, min: int = 0) -> Decorator:
    """A number of bytes."""

    def parse(text: str) -> int:
        found = parse_size(text)
        if found < min:
            raise ValueError(f"{text!r} is less than {min}.")
        return found

    return click.option(name, type=Parsed("size", parse), metavar="SIZE", help=help)


def json(help: str) -> Decorator:
    """The option ``--json``."""
    return flag("--json", "as_json", help=help)


def confirmation(dry_run: str, yes: str = "Do not ask.") -> Decorator:
    """The options ``--dry-run`` and ``--yes`` of what is destructive."""
    return together(flag("--dry-run", help=dry_run), flag("-y", "--yes", help=yes))


json_lines = json("One JSON object on each line.")
json_object = json("One JSON object.")
rule = Parsed("rule", parse_rule)
compression = click.option(
    "--compression", type=click.Choice(["none", "lz4", "zstd"]), help="Of frames."
)

stream_name = click.argument("stream", shell_complete=completion.stream)
any_stream = click.argument("stream", required=False, shell_complete=completion.stream)
stream_names = click.argument(
    "streams", nargs=-1, metavar="[STREAM]...", shell_complete=completion.stream
)
group_of_stream = together(stream_name, click.argument("group", shell_complete=completion.group))
shared_group_of_stream = together(
    stream_name, click.argument("group", shell_complete=completion.shared_group)
)
peer_group_name = click.argument("group", shell_complete=completion.peer_group)
