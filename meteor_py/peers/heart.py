"""The heart of a group handle: a thread that is heard of in time, and notices when it was not."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from meteor_py.backoff import pause_s
from meteor_py.errors import ConnectionFailed, MeteorError, PeerError
from meteor_py.lease import now
from meteor_py.peers.membership import Membership
from meteor_py.state import State

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup

_log = logging.getLogger(__name__)

HEART_PREFIX = "meteor-heart"
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)


class Heart:
    """Owned by its group handle: started with it, joined by it. Has a connection of its own."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._link = group.books.client.open_link()
        # Not to wait longer for an answer than until the next beat is due.
        self._link.timeout_s = min(self._link.timeout_s, max(group.config.ttl / 3, 0.1))
        self._state = State()
        self._ended = False
        self._hurry = False
        self._thread = threading.Thread(
            target=self._run, name=f"{HEART_PREFIX}-{group.name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Beat now: something has changed."""
        with self._state:
            self._hurry = True
            self._state.notify_all()

    def end(self) -> None:
        with self._state:
            self._ended = True
            self._state.notify_all()
        self._link.interrupt()

    def join(self, timeout_s: float) -> bool:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        interval = self._group.config.ttl / 3
        while not self._ended:
            started = now()
            try:
                self._beat()
                failures = 0
                pause = interval - (now() - started)
            except ConnectionFailed:
                failures += 1
                pause = min(pause_s(failures, *_BACKOFF_S), interval)
            except Exception:
                _log.exception("The heart of group %r missed a beat.", self._group.name)
                failures += 1
                pause = interval
            for membership in self._group.memberships():
                membership.check_belief()
            self._wait(pause)
        self._link.close()

    def _wait(self, pause: float) -> None:
        """Until the next beat, or until a term is no longer to be believed in."""
        deadline = now() + max(pause, 0.0)
        while not self._ended:
            with self._state:
                left = deadline - now()
                ends = [m.valid_until - now() for m in self._group.memberships() if m.term]
                self._state.wait_for(
                    lambda: self._ended or self._hurry, max(min([left, *ends]), 0.001)
                )
                if self._hurry or deadline - now() <= 0:
                    self._hurry = False
                    return
            for membership in self._group.memberships():
                membership.check_belief()

    def _beat(self) -> None:
        group = self._group
        by_session: dict[str, list[Membership]] = {}
        for membership in group.memberships():
            by_session.setdefault(membership.session, []).append(membership)
        if not by_session:
            by_session[""] = []
        for session, memberships in by_session.items():
            sent = now()
            try:
                beat = group.books.beat(self._link, session, [m.id for m in memberships])
            except PeerError:
                group.books.open(group.config)  # the server has forgotten it: begin it anew
                beat = group.books.beat(self._link, session, [m.id for m in memberships])
            group.clock.read(sent, now(), beat.time)
            group.compare(beat)
            for membership, here in zip(memberships, beat.here, strict=True):
                if not membership.heard(sent, beat, here):
                    self._recover(membership)

    def _recover(self, membership: Membership) -> None:
        """Somebody took it for dead, or out, or joined under its name."""
        if membership.lost.is_set():
            return
        group = self._group
        found = group.books.look(self._link).members.get(membership.id)
        if found is not None and found.alive:
            membership.lose("joined again elsewhere")
        elif group.was_removed(membership.id):
            membership.lose("removed")
        else:
            membership.begin_anew()
            try:
                joined = membership.join("fail", link=self._link)
            except MeteorError:
                raise
            if not joined:
                membership.lose("joined again elsewhere")
            else:
                _log.warning("%r was taken for dead, and has joined again.", membership)
                group.recovered(membership)
