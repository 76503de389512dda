"""Work of a leader: one function of the application, called with each term, in one thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from meteor_py.peers.leadership import Term
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.membership import Membership

_log = logging.getLogger(__name__)

#: Seconds after which what leads and failed lets others try.
_FAILED_S = 1.0


class LeaderTask:
    """Owned by its membership. Has a thread while there is something to do; of the terms that
    begin meanwhile only the last one waits, as those before it are over."""

    def __init__(self, membership: Membership, function: Callable[[Term], object]) -> None:
        self._membership = membership
        self._function = function
        self._state = SignalSafeCondition()
        self._next: Term | None = None
        self._thread: JoinableThread | None = None

    @property
    def thread(self) -> JoinableThread | None:
        """The one that does it; None if nothing is to be done."""
        return self._thread

    def begin(self, term: Term) -> None:
        """Call the function with a term, when the call before has returned."""
        group = self._membership.group
        with self._state:
            self._next = term
            if self._thread is not None:
                return
            name = f"meteor-leader-{group.name}"
            self._thread = JoinableThread(self._run, name)
            group.own(self._thread)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._state:
                term, self._next = self._next, None
                if term is None:
                    self._thread = None
                    return
            if term.valid:
                self._call(term)

    def _call(self, term: Term) -> None:
        group = self._membership.group
        try:
            self._function(term)
        except BaseException:  # also SystemExit: nobody would lead, and nobody be told
            _log.exception("What leads group %r failed.", group.name)
            if not term.lost.wait(min(_FAILED_S, group.config.ttl / 3)):
                self._membership.resign_from(term)
