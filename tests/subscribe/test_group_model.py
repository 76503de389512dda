"""A group matches a simple model under any sequence of operations.

Hypothesis drives the group scripts. Members open the group, acquire its lease before and after the
grace period, renew it, let it lapse, release it, and confirm, with credentials from current and
former terms. Leases expire, and other clients move and delete the group. Hypothesis shrinks a
failure to the shortest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import meteor_py as meteor
from tests.client.test_scripts import INCARNATION
from tests.support.group_scripts import GroupScripts

members = st.sampled_from(["a", "b", "c"])
sometimes = st.sampled_from([False, False, True])
names = count()


class Credential(NamedTuple):
    """The term and nonce of a member that has or had the lease."""

    term: int
    nonce: str


@dataclass
class Group:
    """The expected state of a group."""

    start: int
    floating: str
    confirmed: int | None = None
    term: int = 0
    nonce: str | None = None
    owner: str | None = None
    holder: str | None = None
    sought: str | None = None
    ended: str | None = None

    @property
    def position(self) -> int:
        return self.start if self.confirmed is None else self.confirmed

    def end_term(self, nonce: str) -> None:
        """End a term whose owner has not released the lease: another nonce replaces the owner's."""
        if self.nonce and self.nonce != nonce:
            self.ended = f"{self.nonce}:{self.position},{self.ended or ''}"[:256]

    def admits(self, credential: Credential) -> bool:
        return credential == (self.term, self.nonce)


class Machine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.client = meteor.connect(self.url)
        self.lua = GroupScripts(self.client, f"model-{next(names)}")
        self.group: Group | None = None
        self.end = 0
        self.nonces = {name: f"{name}0" for name in "abc"}
        self.numbers = count(1)
        self.ever: list[Credential] = []
        #: Lower bounds of the position (unless the group is moved) and of the next term.
        self.floor = 0
        self.highest = 0

    @initialize(end=st.integers(0, 20))
    def create(self, end: int) -> None:
        self.lua.create(next=end)
        self.end = end

    def teardown(self) -> None:
        self.client.close()

    # -- members -------------------------------------------------------------------------------

    @rule(data=st.data(), create=st.booleans(), floating=st.booleans())
    def open(self, data: st.DataObject, create: bool, floating: bool) -> None:
        start: Any = data.draw(st.one_of(st.just(""), st.integers(0, self.end)))
        answer = self.lua.open(start, create=create, floating=floating)
        if self.group is None and create:
            place = self.end if start == "" else start
            self.group = Group(place, "floating" if floating else "")
            self.floor = place
        elif self.group is None or (not create and self.group.confirmed is None):
            assert answer == ("NOOFFSET",)
            return
        assert answer == ("OK", self.group.position)

    @rule(name=members, waited=st.sampled_from(["not", "for this term", "for another"]))
    def acquire(self, name: str, waited: str) -> None:
        group, nonce = self.group, self.nonces[name]
        terms = {"for this term": self.highest, "for another": self.highest - 1}
        patient = waited == "for this term"
        answer = self.lua.acquire(nonce, name, expired=terms.get(waited, ""))
        if group is None:
            assert answer == ("NOGROUP",)
        elif group.nonce == nonce and group.holder is not None:
            floating = "floating" if group.floating == str(group.term) else ""
            assert answer == ("OK", group.term, group.position, 1, self.end, floating)
            group.holder = f"{name} {group.term}"
        elif group.holder is not None:
            assert (answer[0], answer[3]) == ("HELD", group.owner)
        elif group.nonce != nonce and group.owner and not patient:
            assert (answer[0], *answer[3:]) == ("EXPIRED", group.owner, group.term)
        else:
            term = self.begins(answer[1])
            floating = "floating" if group.floating == "floating" else ""
            assert answer == ("OK", term, group.position, 1, self.end, floating)
            group.floating = str(term) if floating else ""
            group.end_term(nonce)
            group.term, group.nonce, group.owner = term, nonce, name
            group.holder = f"{name} {term}"
            self.ever.append(Credential(term, nonce))

    @rule(name=members)
    def forget_the_nonce(self, name: str) -> None:
        self.nonces[name] = f"{name}{next(self.numbers)}"

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        credential, name = self.draw(data)
        answer = self.lua.renew(credential.nonce, credential.term, member=name)
        if self.refused(credential, answer):
            return
        assert self.group is not None
        assert answer == ("OK",)
        self.group.owner, self.group.holder = name, f"{name} {credential.term}"

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), lapse=st.booleans())
    def release(self, data: st.DataObject, lapse: bool) -> None:
        credential, _ = self.draw(data)
        answer = self.lua.release(credential.nonce, lapse=lapse)
        if self.group is None or self.group.nonce != credential.nonce:
            assert answer == ("FENCED",)
            return
        if lapse and self.group.holder is None:
            assert answer == ("FENCED",)  # there is no lease to release
            return
        assert answer == ("OK",)
        self.group.owner, self.group.holder = "", None
        if not lapse:
            self.group.nonce = ""

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        credential, _ = self.draw(data)
        offset = data.draw(st.integers(0, self.end + 1))
        answer = self.lua.confirm(credential.nonce, credential.term, offset)
        if self.refused(credential, answer):
            return
        assert self.group is not None
        if offset > self.end:
            assert answer == ("BEYOND", self.end)
            return
        if offset > self.group.position:
            self.group.confirmed = self.floor = offset
        assert answer == ("OK", self.group.position)

    @rule()
    def zombies_confirm(self) -> None:
        for credential in set(self.ever):
            if self.group is None or not self.group.admits(credential):
                answer = self.lua.confirm(credential.nonce, credential.term, self.end)
                assert self.refused(credential, answer)

    # -- others --------------------------------------------------------------------------------

    @rule(n=st.integers(1, 5))
    def publish(self, n: int) -> None:
        self.end += n
        self.lua.plain.hset(self.lua.meta, "next", self.end)

    @rule()
    def expire(self) -> None:
        self.lua.expire()
        if self.group is not None:
            self.group.holder = None

    @rule(data=st.data(), floating=st.booleans(), force=st.booleans(), again=sometimes)
    def seek(self, data: st.DataObject, floating: bool, force: bool, again: bool) -> None:
        offset = data.draw(st.integers(0, self.end + 1))
        group, request = self.group, f"r{next(self.numbers)}"
        if again and group is not None and group.sought is not None:
            assert self.lua.seek(offset, force=force, request=group.sought) == ("OK",)
            return  # nothing has changed
        answer = self.lua.seek(offset, floating=floating, force=force, request=request)
        if group is not None and group.holder is not None and not force:
            assert answer == ("ACTIVE", self.lua.lease_text())
        elif offset > self.end:
            assert answer == ("BEYOND", self.end)
        else:
            assert answer == ("OK",)
            term = self.begins(int(self.lua.field("term") or 0))
            words = "floating" if floating else ""
            if group is not None:
                group.end_term("")
            ended = None if group is None else group.ended
            self.group = Group(offset, words, offset, term, "", "", None, request, ended)
            self.floor = offset

    @rule(force=st.booleans(), really=sometimes)
    def delete(self, force: bool, really: bool) -> None:
        if not really:
            return
        group = self.group
        answer = self.lua.delete(force=force)
        if group is None:
            assert answer == ("NOGROUP",)
        elif group.holder is not None and not force:
            assert answer == ("ACTIVE", self.lua.lease_text())
        else:
            assert answer == ("OK",)
            self.group = None
            self.floor = self.highest = 0

    # -- invariants ----------------------------------------------------------------------------

    def draw(self, data: st.DataObject) -> tuple[Credential, str]:
        """Draw a current or former owner's credential, often the last, and the owner's name."""
        index = data.draw(st.one_of(st.just(-1), st.integers(0, len(self.ever) - 1)))
        credential = self.ever[index]
        return credential, credential.nonce[0]

    def refused(self, credential: Credential, answer: tuple[Any, ...]) -> bool:
        """Return whether the call had to be refused; if so, check that it was."""
        if self.group is None:
            assert answer == ("NOGROUP",)
        elif not self.group.admits(credential):
            assert answer == ("FENCED", self.group.term)
        else:
            return False
        return True

    def begins(self, term: int) -> int:
        assert term > self.highest, "a term is not higher than all before it"
        self.highest = term
        return term

    @invariant()
    def group_matches_the_model(self) -> None:
        lua, group = self.lua, self.group
        stored = lua.fields()
        holder = lua.holder()
        listed: Any = lua.plain.smembers(lua.groups)
        assert holder == (None if group is None else group.holder)
        if group is None:
            assert (stored, listed) == ({}, set())
            return
        assert listed == {b"g"}
        fields = {
            "incarnation": INCARNATION,
            "start": group.start,
            "confirmed": group.confirmed,
            "term": group.term or None,
            "nonce": group.nonce,
            "owner": group.owner,
            "floating": group.floating,
            "sought": group.sought,
            "ended": group.ended,
        }
        assert stored == {k: str(v) for k, v in fields.items() if v is not None}
        # Bounds that do not depend on the model.
        assert int(stored.get("confirmed", stored["start"])) >= self.floor, (
            "the position moved back"
        )
        present = (stored.get("term"), stored.get("nonce"))
        entitled = {c for c in self.ever if (str(c.term), c.nonce) == present}
        assert len(entitled) <= 1
        if holder is not None:
            (only,) = entitled
            assert holder == f"{only.nonce[0]} {only.term}"


@pytest.mark.timeout(600)  # enough time to shrink a failure
def test_group_matches_its_model(any_url: str) -> None:
    Machine.url = any_url
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
