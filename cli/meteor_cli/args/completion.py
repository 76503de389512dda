"""Names that a shell offers: streams, groups, members."""

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

#: What names are made of. On a server there may be others, and a shell would do what they say.
_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?")
#: Words for whom a message is for, and what stands before the id of a member named like them.
_TARGETS = ("any", "all", "leader")
BY_ID = "member:"
#: Seconds after which the shell gets its prompt back.
_PATIENCE_S = 1.0


def _completer(find: Callable[[Client, str | None], list[str]], parent: str | None) -> Completer:
    """Offer what ``find`` returns.

    Args:
        find: Gets a client, and what was given for ``parent``.
        parent: The argument before, on which it depends; without it nothing is offered.
    """

    def complete(
        context: click.Context, option: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        above = None
        if parent is not None:
            # Behind an option that has no value yet, as -g, click has not looked at the rest.
            above = context.params.get(parent) or next(iter(context.args), None)
            if above is None:
                return []
        session = context.find_object(Session) or Session()
        try:
            names = find_names(session, above)
        except Exception:
            return []  # a shell is no place for errors
        fitting = [name for name in names if name.startswith(incomplete) and _NAME.fullmatch(name)]
        return [CompletionItem(name) for name in fitting]

    def find_names(session: Session, above: str | None) -> list[str]:
        import meteor_py
        from meteor_py.server import default_directory

        warnings.simplefilter("ignore")
        has_url = session.url or os.environ.get("METEOR_URL")
        if not has_url and not default_directory().exists():
            return []  # a server would have to be set up for it
        with meteor_py.connect(session.url, timeout=_PATIENCE_S) as m:
            return find(m, above)

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
    """Whom a message can be for."""
    ids = [item.value for item in member(context, option, "")]
    names = [f"{BY_ID}{name}" if name in _TARGETS else name for name in ids]
    return [CompletionItem(name) for name in (*_TARGETS, *names) if name.startswith(incomplete)]
