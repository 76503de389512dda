"""The entry point of the ``meteor`` command: parses, calls the library, renders."""

from __future__ import annotations

import sys
import warnings
from typing import TextIO

import click

import meteor_py


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", envvar="METEOR_URL", metavar="URL", help="Server; default: $METEOR_URL.")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(meteor_py.__version__, prog_name="meteor")
@click.pass_context
def meteor(context: click.Context, url: str | None, debug: bool) -> None:
    """Real-time streaming on Redis or Valkey: Kafka without the brokers."""
    context.obj = {"url": url, "debug": debug}


@meteor.command()
@click.option("--records", default=1_000_000, show_default=True, type=click.IntRange(min=1_000))
@click.pass_context
def demo(context: click.Context, records: int) -> None:
    """A tour of a few seconds, on a server of its own unless --url names one.

    Example: meteor demo --records 100000
    """
    from meteor_cli.demo import run_demo

    run_demo(context.obj["url"], records)


def main() -> None:
    """Run the command; errors and warnings are one sentence on stderr."""
    warnings.showwarning = _show_warning
    try:
        sys.exit(meteor.main(standalone_mode=False))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (meteor_py.MeteorError, ValueError, TimeoutError, ImportError) as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"meteor: {error}", err=True)
        sys.exit(1)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of Python's own, which shows a line of the source."""
    click.echo(f"meteor: warning: {message}", err=True)


if __name__ == "__main__":
    main()
