"""``meteor completion``: scripts that enable shell completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from meteor_cli.command import command
from meteor_cli.session import Session


@command(
    example="""\
eval "$(meteor completion bash)"  # in ~/.bashrc
eval "$(meteor completion zsh)"   # in ~/.zshrc
meteor completion fish | source   # in ~/.config/fish/config.fish"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(session: Session, shell: str) -> None:
    """Print a script that enables completion in your shell.

    It completes commands, options, and the names of streams, groups and members.
    """
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "meteor", "_METEOR_COMPLETE").source())
