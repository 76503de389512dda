"""Generator for the command-line reference, based on the commands' help texts.

python -m meteor_cli.reference > docs/cli.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from textwrap import dedent
from types import ModuleType

import click

from meteor_cli.args import positions
from meteor_cli.command import Command
from meteor_cli.main import meteor
from meteor_cli.render import jsonl, schema, template

_HEAD = """\
# meteor(1)

This page describes the command line of meteor_py. `python -m meteor_cli.reference` generates it
from the commands' `--help` output.
"""

_TAIL = """\
## Exit status

| code | meaning |
|---|---|
| 0 | success, even if the reader of the output has closed the pipe |
| 1 | failure, or records were lost; a message on stderr says which |
| 2 | invalid command line |
| 130 | ended by Ctrl-C |
| 143 | ended by SIGTERM |

Results go to stdout, everything else to stderr. `--debug` shows an error's traceback.

## Environment

| variable | meaning |
|---|---|
| `METEOR_URL` | the server, unless you pass `--url` |
| `METEOR_SERVER` | the server program of `embedded://` and `meteor server`; default: Valkey |
| `XDG_STATE_HOME` | parent of your personal server's directory `meteor`; default `~/.local/state` |
| `TZ` | the time zone of times in the output, and of times that you write without a zone |
| `NO_COLOR` | if set, the output has no colors |
"""


def reference() -> str:
    """Return the whole page."""
    parts = [_HEAD, *_describe(meteor, click.Context(meteor, info_name="meteor"))]
    parts += ["## Positions and times\n\n" + _prose(positions)]
    parts += ["## JSON\n\n" + _prose(jsonl), _prose(schema), *_schema()]
    parts += ["## Formats\n\n" + _prose(template), _TAIL]
    return "\n".join(parts)


def _describe(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a command's section, then its subcommands' sections."""
    help_text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f"## {context.command_path}\n",
        f"`{context.command_path} {usage}`\n",
        f"{help_text}\n",
    ]
    options = [
        record
        for option in command.get_params(context)
        if (record := option.get_help_record(context)) and record[1] and "--help" not in record[0]
    ]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in options]
        lines.append("")
    if isinstance(command, Command):
        lines += ["```sh", command.example, "```\n"]
    yield "\n".join(lines)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _describe(below, click.Context(below, context, name))


def _schema() -> Iterator[str]:
    """Yield tables of the fields that ``--json`` prints."""
    for titles, table in (
        ("| command | fields |", schema.FIELDS),
        ("| in `groups` of | fields |", schema.GROUP_FIELDS),
        ("| in `keys` of | fields |", {"shared info": schema.KEY_FIELDS}),
        (
            "| in `consumers` of | fields |",
            dict.fromkeys(("shared ls", "shared info"), schema.CONSUMER_FIELDS),
        ),
        ("| `watch` event | additional fields |", schema.EVENTS),
        ("| `peers watch` event | additional fields |", schema.PEER_EVENTS),
        ("| in `members` of | fields |", {"state": schema.MEMBER_FIELDS}),
    ):
        rows = [f"| `{name}` | {', '.join(fields)} |" for name, fields in table.items()]
        yield "\n".join([titles, "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(module: ModuleType) -> str:
    """Return a module's docstring as Markdown; indented paragraphs become code blocks."""
    paragraphs = (module.__doc__ or "").strip().replace("``", "`").split("\n\n")
    parts = [f"```\n{dedent(part)}\n```" if part[:4].isspace() else part for part in paragraphs]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    click.echo(reference(), nl=False)
