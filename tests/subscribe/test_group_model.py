"""Whatever members do in whatever order, a group is what a simple model says.

Hypothesis drives the scripts of groups: members that open, acquire with and without patience,
renew, lapse, release and confirm, with credentials of present and former terms; leases that run
out; seeks and deletions by others. A failure is shrunk to the shortest story.
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
from tests.client.test_scripts import LIFE
from tests.support.group_scripts import GroupBench

members = st.sampled_from(["a", "b", "c"])
sometimes = st.sampled_from([False, False, True])
names = count()


class Credential(NamedTuple):
    """What entitles a member: it had the lease in this term."""

    term: int
    nonce: str


@dataclass
class Group:
    """What a group must look like."""

    start: int
    floating: str
    confirmed: int | None = None
    term: int = 0
    nonce: str | None = None
    owner: str | None = None
    holder: str | None = None
    sought: str | None = None

    @property
    def position(self) -> int:
        return self.start if self.confirmed is None else self.confirmed

    def admits(self, credential: Credential) -> bool:
        return credential == (self.term, self.nonce)


class Machine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.client = meteor.connect(self.url)
        self.bench = GroupBench(self.client, f"model-{next(names)}")
        self.group: Group | None = None
        self.end = 0
        self.nonces = {name: f"{name}0" for name in "abc"}
        self.numbers = count(1)
        self.ever: list[Credential] = []
        #: What may not be undercut: by the position except after a seek, by the next term.
        self.floor = 0
        self.highest = 0

    @initialize(end=st.integers(0, 20))
    def create(self, end: int) -> None:
        self.bench.create(next=end)
        self.end = end

    def teardown(self) -> None:
        self.client.close()

    # -- members -------------------------------------------------------------------------------

    @rule(data=st.data(), create=st.booleans(), floating=st.booleans())
    def open(self, data: st.DataObject, create: bool, floating: bool) -> None:
        start: Any = data.draw(st.one_of(st.just(""), st.integers(0, self.end)))
        answer = self.bench.open(start, create=create, floating=floating)
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
        answer = self.bench.acquire(nonce, name, expired=terms.get(waited, ""))
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
        answer = self.bench.renew(credential.nonce, credential.term, member=name)
        if self.refused(credential, answer):
            return
        assert self.group is not None
        assert answer == ("OK",)
        self.group.owner, self.group.holder = name, f"{name} {credential.term}"

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), lapse=st.booleans())
    def release(self, data: st.DataObject, lapse: bool) -> None:
        credential, _ = self.draw(data)
        answer = self.bench.release(credential.nonce, lapse=lapse)
        if self.group is None or self.group.nonce != credential.nonce:
            assert answer == ("FENCED",)
            return
        if lapse and self.group.holder is None:
            assert answer == ("FENCED",)  # there is nothing to let go
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
        answer = self.bench.confirm(credential.nonce, credential.term, offset)
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
                answer = self.bench.confirm(credential.nonce, credential.term, self.end)
                assert self.refused(credential, answer)

    # -- others --------------------------------------------------------------------------------

    @rule(n=st.integers(1, 5))
    def publish(self, n: int) -> None:
        self.end += n
        self.bench.plain.hset(self.bench.meta, "next", self.end)

    @rule()
    def expire(self) -> None:
        self.bench.expire()
        if self.group is not None:
            self.group.holder = None

    @rule(data=st.data(), floating=st.booleans(), force=st.booleans(), again=sometimes)
    def seek(self, data: st.DataObject, floating: bool, force: bool, again: bool) -> None:
        offset = data.draw(st.integers(0, self.end + 1))
        group, request = self.group, f"r{next(self.numbers)}"
        if again and group is not None and group.sought is not None:
            assert self.bench.seek(offset, force=force, request=group.sought) == ("OK",)
            return  # and nothing has changed
        answer = self.bench.seek(offset, floating=floating, force=force, request=request)
        if group is not None and group.holder is not None and not force:
            assert answer == ("ACTIVE", self.bench.lease_text())
        elif offset > self.end:
            assert answer == ("BEYOND", self.end)
        else:
            assert answer == ("OK",)
            term = self.begins(int(self.bench.field("term") or 0))
            words = "floating" if floating else ""
            self.group = Group(offset, words, offset, term, "", "", None, request)
            self.floor = offset

    @rule(force=st.booleans(), really=sometimes)
    def delete(self, force: bool, really: bool) -> None:
        if not really:
            return
        group = self.group
        answer = self.bench.delete(force=force)
        if group is None:
            assert answer == ("NOGROUP",)
        elif group.holder is not None and not force:
            assert answer == ("ACTIVE", self.bench.lease_text())
        else:
            assert answer == ("OK",)
            self.group = None
            self.floor = self.highest = 0

    # -- what must hold ------------------------------------------------------------------------

    def draw(self, data: st.DataObject) -> tuple[Credential, str]:
        """Somebody who had the lease once, more often the last one, and his name."""
        index = data.draw(st.one_of(st.just(-1), st.integers(0, len(self.ever) - 1)))
        credential = self.ever[index]
        return credential, credential.nonce[0]

    def refused(self, credential: Credential, answer: tuple[Any, ...]) -> bool:
        """Whether it had to be refused, as it was."""
        if self.group is None:
            assert answer == ("NOGROUP",)
        elif not self.group.admits(credential):
            assert answer == ("FENCED", self.group.term)
        else:
            return False
        return True

    def begins(self, term: int) -> int:
        assert term > self.highest, "a term must be higher than all before it"
        self.highest = term
        return term

    @invariant()
    def the_group_is_as_the_model_says(self) -> None:
        bench, group = self.bench, self.group
        stored = bench.fields()
        holder = bench.holder()
        listed: Any = bench.plain.smembers(bench.groups)
        assert holder == (None if group is None else group.holder)
        if group is None:
            assert (stored, listed) == ({}, set())
            return
        assert listed == {b"g"}
        fields = {
            "incarnation": LIFE,
            "start": group.start,
            "confirmed": group.confirmed,
            "term": group.term or None,
            "nonce": group.nonce,
            "owner": group.owner,
            "floating": group.floating,
            "sought": group.sought,
        }
        assert stored == {k: str(v) for k, v in fields.items() if v is not None}
        # The same once more without the model.
        assert int(stored.get("confirmed", stored["start"])) >= self.floor, "it went back by itself"
        present = (stored.get("term"), stored.get("nonce"))
        entitled = {c for c in self.ever if (str(c.term), c.nonce) == present}
        assert len(entitled) <= 1
        if holder is not None:
            (only,) = entitled
            assert holder == f"{only.nonce[0]} {only.term}"


@pytest.mark.timeout(600)  # to shrink a failure; else seconds
def test_a_group_is_what_a_simple_model_says(any_url: str) -> None:
    Machine.url = any_url
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
