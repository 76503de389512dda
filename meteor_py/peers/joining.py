"""Joining a peer group: how a handle gets its members."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from meteor_py.errors import MemberTaken, MeteorError, PeerGroupNotFound
from meteor_py.peers.config import PeersConfig
from meteor_py.peers.event_reader import CallbackThread
from meteor_py.peers.member import dump_metadata
from meteor_py.peers.membership import Membership, new_id
from meteor_py.peers.protocol import PeerProtocol
from meteor_py.peers.view import GroupView
from meteor_py.records.config import check_choice, check_int, check_seconds
from meteor_py.redis import keys

if TYPE_CHECKING:
    from meteor_py.peers.group import PeerGroup

OnConflict = Literal["takeover", "fail", "wait"]

#: Seconds between two tries to join under a name that somebody has.
_WAIT_S = 0.1


class Joining:
    """What a group handle does to become a member, once or several times."""

    name: str
    config: PeersConfig
    books: PeerProtocol
    picture: GroupView
    lock: threading.RLock
    caller: CallbackThread
    _closed: bool

    def __init__(self) -> None:
        super().__init__()
        self._memberships: list[Membership] = []

    def join(
        self,
        name: str | None = None,
        *,
        metadata: Any = None,
        priority: int = 0,
        on_conflict: OnConflict = "takeover",
        timeout: float | None = None,
    ) -> Membership:
        """Become a member.

        Args:
            name: A name makes it persistent: it stays a member when its process dies, what is sent
                to it waits, and it goes on when it joins again, here or elsewhere.
            metadata: Whatever it wants to say of itself: JSON, up to 4 KiB.
            priority: Who has a higher one leads before others: -1,000 to 1,000.
            on_conflict: If somebody alive has the name: "takeover" replaces it, which is what a
                restart wants; "fail", or "wait" until it is free.
            timeout: Seconds to wait then; None for as long as it takes.

        The callbacks for it are called when it has joined, and others have to wait for that.

        Raises:
            MemberTaken: Somebody alive has the name, or a member without one has that id.
            PeerError: The group has as many members as it can.
            TimeoutError: It was not free in time.
            ValueError, TypeError: A name or a setting that cannot be.
        """
        self._check_open()
        check_choice("on_conflict", on_conflict, ("takeover", "fail", "wait"))
        check_int("priority", priority, -1_000, 1_000)
        if name is not None:
            keys.check_name(name, "member")
        data = dump_metadata(metadata)
        membership = Membership(
            self._this(), name or new_id(), persistent=name is not None, priority=priority
        )
        deadline = None if timeout is None else time.monotonic() + check_seconds("timeout", timeout)
        while True:
            with self.caller.held():
                if self._join(membership, on_conflict, data):
                    return membership
            if on_conflict != "wait":
                raise self._taken(name, on_conflict)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"The name {name!r} was not free within {timeout:g} seconds.")
            time.sleep(_WAIT_S)
            self._check_open()

    def _taken(self, name: str | None, on_conflict: str) -> MemberTaken:
        if on_conflict == "takeover":
            why = "That is the id of a member that joined without a name; choose another."
        else:
            why = 'Choose another, or take it over with on_conflict="takeover".'
        text = f"Somebody in group {self.name!r} has the name {name!r}, and is alive. {why}"
        return MemberTaken(text, group=self.name)

    def _join(self, membership: Membership, on_conflict: str, data: bytes) -> bool:
        how = "takeover" if on_conflict == "takeover" else "fail"
        try:
            if not self._begin_membership(membership, how, data):
                return False
            self._check_open()
            self.catch_up()
        except MeteorError:
            raise
        except BaseException:  # Ctrl-C, or a SIGTERM: nobody would have it
            membership.lose("interrupted")
            with suppress(MeteorError):
                membership.withdraw()
            raise
        return True

    def _begin_membership(self, membership: Membership, how: str, data: bytes) -> bool:
        try:
            joined = membership.join(how, data)
        except PeerGroupNotFound:
            if self.books.open(self.config) != self.config:  # else it was deleted: begun anew
                raise
            joined = membership.join(how, data)
        if not joined:
            return False
        with self.lock:
            closed = self._closed
            if not closed:
                self._memberships.append(membership)
                if self.picture.leader == membership.id:
                    self._tell_elected(membership)
        if closed:
            membership.close()
        return True

    def memberships(self) -> list[Membership]:
        """The members that this handle has joined, and not lost."""
        with self.lock:
            return list(self._memberships)

    def forget(self, membership: Membership) -> None:
        with self.lock:
            if membership in self._memberships:
                self._memberships.remove(membership)

    def _tell_elected(self, membership: Membership) -> None:
        found = self.picture.members.get(membership.id)
        if found is not None and found.session == membership.session:
            membership.elected(self.picture.term)

    def _this(self) -> PeerGroup:
        raise NotImplementedError  # pragma: no cover

    def _check_open(self) -> None:
        raise NotImplementedError  # pragma: no cover

    def catch_up(self) -> None:
        raise NotImplementedError  # pragma: no cover
