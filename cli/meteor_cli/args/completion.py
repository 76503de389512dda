"""Shell completion for stream, group and member names."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from meteor_cli.session import Session

if TYPE_CHECKING:
    from meteor_py import Client

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

#: Matches valid names. The server may hold other names, and completing one of those could make the
#: shell execute part of it.
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
#: Message targets, and the prefix for a member whose id is also a target keyword.
_TARGETS = ("any", "all", "leader")
BY_ID = "member:"
#: Maximum number of seconds to wait for the server: the user's shell is blocked meanwhile.
_PATIENCE_S = 1.0


def _completer(find: Callable[[Client, str | None], list[str]], parent: str | None) -> Completer:
    """Return a completer that offers the names returned by ``find``.

    Args:
        find: Called with a client and the value of the argument ``parent``.
        parent: The name of the argument on which the names depend, such as "stream", or None. While
            that argument is missing, there are no completions.
    """

    def find_names(session: Session, above: str | None) -> list[str]:
        import meteor_py
        from meteor_py.server import default_directory

        warnings.simplefilter("ignore")
        has_url = session.url or os.environ.get("METEOR_URL")
        if not has_url and not default_directory().exists():
            return []  # connecting would start the user's personal server
        with meteor_py.connect(session.url, timeout=_PATIENCE_S) as m:
            return find(m, above)

    def complete(
        context: click.Context, option: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        # While the user completes an option's value, such as the group after -g, click has not
        # parsed the arguments yet. They are still in context.args.
        above = parent and (context.params.get(parent) or next(iter(context.args), None))
        if parent and above is None:
            return []
        try:
            names = find_names(context.find_object(Session) or Session(), above)
        except Exception:
            return []  # an error message would appear within the user's command line
        fitting = [name for name in names if name.startswith(incomplete) and _NAME.fullmatch(name)]
        return [CompletionItem(name) for name in fitting]

    return complete


def _groups(m: Client, stream: str | None, *, shared: bool = False) -> list[str]:
    groups = m.stream(stream or "", create=False).groups()
    return [group.name for group in groups if not shared or group.kind == "shared"]


def _members(m: Client, group: str | None) -> list[str]:
    from meteor_py.peers.protocol import PeerProtocol

    return sorted(PeerProtocol(m._connector, group or "").look().members)


stream = _completer(lambda m, _: m.streams(), None)
group = _completer(_groups, "stream")
shared_group = _completer(lambda m, stream: _groups(m, stream, shared=True), "stream")
peer_group = _completer(lambda m, _: m.peer_groups(), None)
member = _completer(_members, "group")


def target(
    context: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a message target."""
    ids = [item.value for item in member(context, option, "")]
    names = [f"{BY_ID}{name}" if name in _TARGETS else name for name in ids]
    return [CompletionItem(name) for name in (*_TARGETS, *names) if name.startswith(incomplete)]
