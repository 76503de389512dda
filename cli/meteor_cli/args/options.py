"""Options and arguments that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.types import OptionHelpExtra

from meteor_cli.args import completion
from meteor_cli.args.keys import parse_rule
from meteor_cli.args.sizes import parse_size
from meteor_cli.args.times import parse_duration

T = TypeVar("T")
Decorator = Callable[[Any], Any]


class Option(click.Option):
    """An option that shows a number's range only in errors, not in the help."""

    def get_help_extra(self, context: click.Context) -> OptionHelpExtra:
        extra = super().get_help_extra(context)
        extra.pop("range", None)
        return extra


class Parsed(click.ParamType[T]):
    """A parameter type based on a parser. Users see the text of the parser's ``ValueError``."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> T:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # a parsed default
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, context)


def together(*decorators: Decorator) -> Decorator:
    """Combine options and arguments in the given order."""

    def decorate(function: Any) -> Any:
        for each in reversed(decorators):
            function = each(function)
        return function

    return decorate


def flag(*names: str, help: str) -> Decorator:
    return click.option(*names, is_flag=True, help=help)


def count(
    *names: str, help: str, min: int = 1, max: int | None = None, **settings: Any
) -> Decorator:
    settings = {"metavar": "N", "type": click.IntRange(min, max), "help": help} | settings
    return click.option(*names, cls=Option, **settings)


def seconds(
    *names: str, help: str, min: float = 0, max: float | None = None, **settings: Any
) -> Decorator:
    """Return an option for a number of seconds; ``positive`` excludes 0."""
    kind = click.FloatRange(min, max, min_open=settings.pop("positive", False))
    return click.option(*names, cls=Option, type=kind, metavar="SECONDS", help=help, **settings)


def interval(default: float) -> Decorator:
    help = f"Time between updates. Default: {default:g}."
    return seconds("--interval", min=0.1, max=3600, default=default, help=help)


def size(name: str, *, help: str, min: int = 0) -> Decorator:
    def parse(text: str) -> int:
        found = parse_size(text)
        if found < min:
            raise ValueError(f"{text!r} is less than {min}.")
        return found

    return click.option(name, type=Parsed("size", parse), metavar="SIZE", help=help)


def duration(name: str, *, help: str) -> Decorator:
    kind = Parsed("duration", parse_duration)
    return click.option(name, type=kind, metavar="DURATION", help=help)


def json(help: str) -> Decorator:
    return flag("--json", "as_json", help=help)


def confirmation(dry_run: str, yes: str = "Do not ask for confirmation.") -> Decorator:
    """Return the options ``--dry-run`` and ``--yes``, for destructive commands."""
    return together(flag("--dry-run", help=dry_run), flag("-y", "--yes", help=yes))


json_lines = json("Print one JSON object per line.")
json_object = json("Print a JSON object.")
rule = Parsed("rule", parse_rule)
compression = click.option(
    "--compression",
    type=click.Choice(["none", "lz4", "zstd"]),
    help="Frame compression. Default: the stream's, or none for a new stream.",
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
