"""Fenced confirms: only the member that holds the lease can confirm.

Each time a member acquires the lease, a new term with a higher number begins. The server checks the
term of every confirm. If a member was cut off, paused or replaced and has not noticed yet, its
confirm raises ``LeaseLost`` and changes nothing. If a confirm took effect before the member lost
the lease, the confirm is reported as successful, even if its reply was lost. Confirmed offsets
never decrease.
"""

from __future__ import annotations

import pytest

import meteor_py as meteor
from tests.fundamentals.reading import publish
from tests.support.group_members import GroupHarness, Refused


def test_confirm_from_an_expired_term_is_refused(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(10))
    with (
        stream.subscriber(group="billing", lease_ttl=0.5, max_poll_interval=0.2) as old,
        stream.subscriber(group="billing", lease_ttl=0.5) as new,
    ):
        old.poll(5)  # from here on, this member hangs
        new.poll(10)
        assert new.confirm(3).result(5) == 4
        with pytest.raises(meteor.LeaseLost):
            old.confirm(7).result(5)
        assert stream.group("billing").confirmed == 4


def test_process_that_was_paused_cannot_confirm_when_it_wakes_up(harness: GroupHarness) -> None:
    harness.fill(10)
    zombie, heir = harness.members(2, lease_ttl=0.6)  # each in its own process
    assert len(zombie.poll()) == 10
    zombie.pause()
    assert len(heir.poll(10)) == 10
    assert heir.confirm(3) == 4
    zombie.resume()
    with pytest.raises(Refused, match="LeaseLost"):
        zombie.confirm(7)
    assert harness.stream.group(harness.group).confirmed == 4


def test_owner_is_fenced_when_its_group_is_moved_by_hand(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(10))
    with stream.subscriber(group="billing") as sub:
        sub.poll(5)
        sub.confirm(7).result(5)
        stream.seek_group("billing", 2, force=True)
        with pytest.raises(meteor.LeaseLost):
            sub.confirm(9).result(5)
        assert stream.group("billing").confirmed == 2


def test_confirmed_offset_never_moves_backwards(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(10))
    with stream.subscriber(group="billing") as sub:
        sub.poll(5)
        for offset in (6, 2, 5, 6):
            sub.confirm(offset).result(5)
            assert sub.confirmed == stream.group("billing").confirmed == 7


def test_every_term_has_a_higher_number_than_earlier_terms(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, [0])
    terms: list[int] = []
    for _ in range(4):
        with stream.subscriber(group="billing") as sub:
            sub.poll(5)
            assert sub.term is not None
            terms.append(sub.term)
    assert terms == sorted(set(terms))
