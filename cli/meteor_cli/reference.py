"""The reference of the command line, written from the commands themselves.

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

The command line of meteor_py. This page is written by `python -m meteor_cli.reference`, from what
the commands say of themselves with `--help`.
"""

_TAIL = """\
## Exit status

| code | meaning |
|---|---|
| 0 | all is well; also if whoever reads the output has closed the pipe |
| 1 | it could not be done, or records were lost on the way: a sentence on stderr says what |
| 2 | the command line is wrong |
| 130 | Ctrl-C |
| 143 | SIGTERM |

Results go to stdout, all else to stderr. `--debug` shows the traceback of an error.

## Environment

| variable | meaning |
|---|---|
| `METEOR_URL` | the server, if `--url` does not name one |
| `XDG_STATE_HOME` | where your own server keeps its data, in `meteor`; else `~/.local/state` |
| `TZ` | the zone of times that are shown, and of those written without one |
| `NO_COLOR` | no colours in a terminal |
"""


def reference() -> str:
    """The whole page."""
    parts = [_HEAD, *_describe(meteor, click.Context(meteor, info_name="meteor"))]
    parts += ["## Positions and times\n\n" + _prose(positions)]
    parts += ["## JSON\n\n" + _prose(jsonl), _prose(schema), *_schema()]
    parts += ["## Formats\n\n" + _prose(template), _TAIL]
    return "\n".join(parts)


def _describe(command: click.Command, context: click.Context) -> Iterator[str]:
    """A command, and then those below it."""
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
    """The fields of what ``--json`` prints, as tables."""
    for titles, table in (
        ("| command | fields |", schema.FIELDS),
        ("| in `groups` of | fields |", schema.GROUP_FIELDS),
        ("| in `keys` of | fields |", {"shared info": schema.KEY_FIELDS}),
        ("| in `consumers` of | fields |", {"shared": schema.CONSUMER_FIELDS}),
        ("| event of `watch` | fields besides |", schema.EVENTS),
        ("| event of `peers watch` | fields besides |", schema.PEER_EVENTS),
        ("| in `members` of | fields |", {"state": schema.MEMBER_FIELDS}),
    ):
        rows = [f"| `{name}` | {', '.join(fields)} |" for name, fields in table.items()]
        yield "\n".join([titles, "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(module: ModuleType) -> str:
    """What a module says of the language that it understands; indented parts are shown as code."""
    paragraphs = (module.__doc__ or "").strip().replace("``", "`").split("\n\n")
    return (
        "\n\n".join(
            f"```\n{dedent(paragraph)}\n```" if paragraph.startswith("    ") else paragraph
            for paragraph in paragraphs
        )
        + "\n"
    )


if __name__ == "__main__":
    click.echo(reference(), nl=False)
