"""The heart of a group handle: a thread that is heard of in time, and notices when it was not."""

from __future__ import annotations

import logging
import math
import random
import weakref
from typing import TYPE_CHECKING

from meteor_py.errors import ConnectionFailed, PeerGroupNotFound
from meteor_py.peers.membership import Membership
from meteor_py.peers.protocol import Beat, Here
from meteor_py.runtime.backoff import pause_s
from meteor_py.runtime.clock import now
from meteor_py.runtime.locks import SignalSafeCondition
from meteor_py.runtime.threads import JoinableThread

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup

_log = logging.getLogger(__name__)

HEART_PREFIX = "meteor-heart"
#: Seconds between two tries, doubled each time up to the second figure.
_BACKOFF_S = (0.02, 0.64)
#: Seconds over which those who miss somebody say so, at most.
_SPREAD_S = 0.3


class Heartbeat:
    """Owned by its group handle: started with it, joined by it. Has a connection of its own."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._connection = group.books.connector.open_connection()
        # Not to wait longer for an answer than until the next beat is due.
        self._timeout_s = min(self._connection.timeout_s, max(group.config.ttl / 3, 0.1))
        self._state = SignalSafeCondition()
        self._ended = False
        self._hurry = False
        #: Members that could not be told of last time, for whatever reason.
        self._failing: weakref.WeakSet[Membership] = weakref.WeakSet()
        #: When somebody will be overdue, if it is not heard of before.
        self._overdue_at = math.inf
        self._thread = JoinableThread(self._run, f"{HEART_PREFIX}-{group.name}")

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
        self._connection.interrupt()

    def join(self, timeout_s: float) -> bool:
        # Again and again: it may have connected only now.
        return self._thread.ends_within(timeout_s, self._connection.interrupt)

    def _run(self) -> None:
        failures = 0
        while not self._ended:
            started = now()
            interval = self._group.config.ttl / 3
            try:
                self._beat()
                failures = 0
                interval = self._group.config.ttl / 3
                pause = min(interval - (now() - started), self._overdue_at - now())
            except ConnectionFailed:
                failures += 1
                pause = min(pause_s(failures, *_BACKOFF_S), interval)
            except Exception:
                if not self._ended:
                    _log.exception("The heart of group %r missed a beat.", self._group.name)
                failures += 1
                pause = interval
            self._wait(pause)
        self._connection.close()

    def _wait(self, pause: float) -> None:
        """Until the next beat, or until a term is no longer to be believed in."""
        deadline = now() + max(pause, 0.0)
        while not self._ended:
            left = min(deadline - now(), self._belief_ends() - now())
            with self._state:
                self._state.wait_for(lambda: self._ended or self._hurry, max(left, 0.001))
                if self._hurry or deadline <= now():
                    self._hurry = False
                    return

    def _belief_ends(self) -> float:
        """When the first of the terms of our members is no longer to be believed in; those that
        are not already are lost."""
        ends = math.inf
        for membership in self._group.memberships():
            membership.check_belief()
            if membership.term is not None:
                ends = min(ends, membership.valid_until)
        return ends

    def _beat(self) -> None:
        group = self._group
        self._overdue_at = math.inf  # as long as the server does not say otherwise
        memberships, ends = group.memberships(), self._belief_ends()
        for membership in memberships:
            # Who waits for an answer must notice in time that it cannot believe any more.
            self._connection.timeout_s = max(min(self._timeout_s, ends - now()), 0.05)
            try:
                self._beat_for(membership)
            except ConnectionFailed:
                raise
            except Exception as error:  # the others must be heard of all the same
                if not self._ended and membership not in self._failing:
                    _log.exception("%r is not heard of: %s", membership, error)
                self._failing.add(membership)
            else:
                self._failing.discard(membership)
        if not memberships:
            self._connection.timeout_s = self._timeout_s
            try:
                self._ask("", [])
            except PeerGroupNotFound:
                group.resync(
                    connection=self._connection
                )  # nobody is there; who joins begins it anew

    def _beat_for(self, membership: Membership) -> None:
        if membership.recovering:
            if not membership.going:
                self._recover(membership)
            return
        session, member = membership.session, membership.id
        sent, beat = self._ask(session, [member])
        if session != membership.session:
            return
        if beat.here[0] is not Here.YES:
            self._dropped(membership, beat.here[0])
        elif membership.heard(sent, beat):
            membership.lay_down(beat.term, self._connection)  # the server was not told before

    def _ask(self, session: str, members: list[str]) -> tuple[float, Beat]:
        """A sign of life: when it was sent, and the answer."""
        group = self._group
        seen = group.moment()
        sent = now()
        try:
            beat = group.books.beat(self._connection, session, members)
        except PeerGroupNotFound:
            if not members:
                raise
            group.books.open(group.config, self._connection)
            beat = group.books.beat(self._connection, session, members)
        group.clock.read(sent, now(), beat.time)
        if beat.ttl != group.config.ttl:
            group.read_settings(self._connection)
        # Somebody who is silent is missed on time, not with the next beat; not by all at once.
        spread = random.uniform(0.002, min(_SPREAD_S, group.config.ttl / 10))
        left_s = 0.0 if beat.has_orphans else beat.overdue_s
        self._overdue_at = math.inf if left_s is None else now() + left_s + spread
        group.compare(beat, seen, self._connection)
        return sent, beat

    def _dropped(self, membership: Membership, why: Here) -> None:
        if why is Here.REMOVED:
            membership.lose("removed")
        elif why is Here.REPLACED:
            membership.lose("joined again elsewhere")
        elif not membership.going:
            membership.begin_anew()
            self._recover(membership)

    def _recover(self, membership: Membership) -> None:
        """It was taken for dead, or the server has lost the group: join again."""
        try:
            joined = membership.join("fail", connection=self._connection)
        except PeerGroupNotFound:
            self._group.books.open(self._group.config, self._connection)  # the group is gone, too
            joined = membership.join("fail", connection=self._connection)
        if not joined:
            membership.lose("joined again elsewhere")
            return
        membership.recovering = False
        if membership.going:  # it left meanwhile, and may not have known of this session
            membership.withdraw(self._connection)
            return
        _log.warning("%r was taken for dead, and has joined again.", membership)
        self._group.recovered(membership)
