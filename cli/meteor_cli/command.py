"""Command classes: global options in any position, examples in the help, hints for wrong names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from textwrap import dedent
from types import ModuleType
from typing import Any

import click

from meteor_cli.args.options import Option
from meteor_cli.session import TIMEOUT_S, Session

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


def common_options(*, hidden: bool) -> list[click.Option]:
    """Return the options that every command accepts. If ``hidden``, the help does not list them."""

    def store(context: click.Context, option: click.Parameter, value: Any) -> None:
        name = option.name or ""
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            setattr(context.find_object(Session), name, value)

    def set_logging(context: click.Context, option: click.Parameter, value: int) -> None:
        if value:
            store(context, option, value)
            logging.getLogger("meteor_py").setLevel(logging.INFO if value == 1 else logging.DEBUG)

    def option(*names: str, callback: Callable[..., None] = store, **settings: Any) -> click.Option:
        return Option(names, expose_value=False, hidden=hidden, callback=callback, **settings)

    return [
        option(
            "--url",
            metavar="URL",
            help="Server to use: redis://host:port, rediss://, redis+cluster://, "
            "redis+sentinel://, unix:///socket, embedded:///dir. "
            "Default: $METEOR_URL or, if that is not set, your personal server, which keeps its "
            "data on disk.",
        ),
        option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True, max=3600),
            default=TIMEOUT_S,
            metavar="SECONDS",
            help=f"How long to wait for the server. Default: {TIMEOUT_S:g}.",
        ),
        option("--debug", is_flag=True, help="Show tracebacks."),
        option("-v", "--verbose", count=True, help="Log more; -vv for even more.",
               callback=set_logging),
    ]  # fmt: skip


class Command(click.Command):
    """A command whose help ends with an example.

    Args:
        example: Shell commands, one per line.
        more: Further help sections, by title. They are printed verbatim.
    """

    def __init__(
        self, *args: Any, example: str, more: dict[str, str] | None = None, **settings: Any
    ) -> None:
        settings["context_settings"] = CONTEXT_SETTINGS | (settings.get("context_settings") or {})
        super().__init__(*args, **settings)
        # A command's own option replaces the global one: `peers ask` has its own --timeout.
        own = {option.name for option in self.params}
        common = (name for name in ("url", "timeout", "debug") if name not in own)
        self._others = ", ".join(f"--{name}" for name in common)
        self.params += [each for each in common_options(hidden=True) if each.name not in own]
        self.example = example
        self._more = more or {}

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        title = "Example" if "\n" not in self.example else "Examples"
        for name, text in (self._more | {title: self.example}).items():
            with formatter.section(name):
                formatter.write("".join(f"  {line}\n" for line in text.splitlines()))
        formatter.write(f"\nGlobal options ({self._others}, -v): see `meteor --help`.\n")


class Group(click.Group):
    """A group of commands, listed in the order in which they were added."""

    command_class = Command
    group_class = type

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if not self.params:
            self.params += common_options(hidden=True)

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        own = self.list_commands(context)
        meant = [name for name, words in _ALIASES.items() if args[0] in words.split()]
        meant = [name for name in meant if name in own]
        if meant and self.get_command(context, args[0]) is None:
            paths = " or ".join(f"`{context.command_path} {name}`" for name in meant)
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {paths}?", context)
        return super().resolve_command(context, args)


class CommandGroup(Command, Group):
    """A command that also has subcommands."""


#: For each command, the names from other tools that a user may type instead.
_ALIASES = {
    "tail": "consume read sub subscribe",
    "publish": "pub produce",
    "streams": "stream topic topics",
    "groups": "group",
    "peers": "peer",
    "archive": "archiver",
    "fsck": "check verify",
    "ls": "list",
    "info": "describe show",
    "members": "info",
    "configure": "set alter",
    "delete": "rm",
    "remove": "rm",
    "rm": "delete remove",
}


def section(module: ModuleType) -> str:
    """Return the first indented paragraph of a module's docstring, without its indentation."""
    paragraphs = (module.__doc__ or "").split("\n\n")
    return dedent(next(part for part in paragraphs if part.startswith("    ")))


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., object]], Command]:
    """Return a decorator that turns a function into a ``Command``.

    The function gets the session as its first argument.
    """

    def decorate(function: Callable[..., object]) -> Command:
        made: Command = click.command(name, cls=Command, **settings)(click.pass_obj(function))
        return made

    return decorate
