"""Completion in the shell: names of streams and groups, and the scripts that switch it on."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from meteor_cli.command import command
from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Client

#: What names are made of. On a server there may be others, and a shell would do what they say.
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
#: Words for whom a message is for, and what stands before the id of a member named like them.
_TARGETS = ("any", "all", "leader")
BY_ID = "member:"
#: Seconds after which the shell gets its prompt back.
_PATIENCE_S = 1.0


def complete_stream(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of streams."""
    return _complete(context, None, incomplete)


def complete_group(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of the groups of the stream that was named before."""
    # Behind an option that has no value yet, as -g here, click has not looked at the rest.
    stream = context.params.get("stream") or next(iter(context.args), None)
    return [] if stream is None else _complete(context, stream, incomplete)


def complete_shared_group(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of the shared ones among them."""
    stream = context.params.get("stream")
    return [] if stream is None else _complete(context, stream, incomplete, shared=True)


def complete_peer_group(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of peer groups."""
    return _offer(context, incomplete, lambda m: m.peer_groups())


def complete_peer(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Members of the peer group that was named before."""
    return _complete_peer(context, incomplete)


def complete_target(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Whom a message can be for."""
    ids = [item.value for item in _complete_peer(context, "")]
    names = [f"{BY_ID}{name}" if name in _TARGETS else name for name in ids]
    return [CompletionItem(name) for name in (*_TARGETS, *names) if name.startswith(incomplete)]


def _complete_peer(context: click.Context, incomplete: str) -> list[CompletionItem]:
    name = context.params.get("group") or next(iter(context.args), None)

    def members(m: Client) -> list[str]:
        from meteor_py.peers.protocol import PeerProtocol

        return [] if name is None else sorted(PeerProtocol(m._connector, name).look().members)

    return _offer(context, incomplete, members)


def _complete(
    context: click.Context, stream: str | None, incomplete: str, *, shared: bool = False
) -> list[CompletionItem]:
    def names(m: Client) -> list[str]:
        if stream is None:
            return m.streams()
        groups = m.stream(stream, create=False).groups()
        return [group.name for group in groups if not shared or group.kind == "shared"]

    return _offer(context, incomplete, names)


def _offer(
    context: click.Context, incomplete: str, find: Callable[[Client], list[str]]
) -> list[CompletionItem]:
    try:
        names = _names(context.find_object(Session) or Session(), find)
    except Exception:
        return []  # a shell is no place for errors
    return [
        CompletionItem(name)
        for name in names
        if name.startswith(incomplete) and _NAME.fullmatch(name)
    ]


def _names(session: Session, find: Callable[[Client], list[str]]) -> list[str]:
    import meteor_py
    from meteor_py.server import default_directory

    warnings.simplefilter("ignore")
    if not session.url and not os.environ.get("METEOR_URL") and not default_directory().exists():
        return []  # a server would have to be set up for it
    with meteor_py.connect(session.url, timeout=_PATIENCE_S) as m:
        return find(m)


@command(
    short_help="Switch on completion in your shell.",
    example="""\
eval "$(meteor completion bash)"  # in ~/.bashrc
eval "$(meteor completion zsh)"   # in ~/.zshrc
meteor completion fish | source   # in ~/.config/fish/config.fish""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(session: Session, shell: str) -> None:
    """Print what switches completion on in your shell: commands, options, streams and groups."""
    from meteor_cli.main import meteor

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(meteor, {}, "meteor", "_METEOR_COMPLETE").source())
