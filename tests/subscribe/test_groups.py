"""Subscriber groups as in Meteor's own tests, on each kind of server.

One process suffices here; ``test_failover.py`` uses several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import meteor_py as meteor
from meteor_py.redis import keys
from meteor_py.subscribe.lease import Lease, LeaseUnavailable, Term
from tests.support.group_members import GROUP, STREAM, GroupHarness
from tests.support.readers import background, check_values, drain, entries, fill, replace_frame
from tests.support.waiting import eventually


@pytest.fixture
def harness(any_url: str) -> Iterator[GroupHarness]:
    with GroupHarness(any_url) as harness:
        yield harness


@pytest.fixture
def served(url: str) -> Iterator[GroupHarness]:
    """A harness on a real server, for receivers: a wait in fake:// cannot be interrupted."""
    with GroupHarness(url) as harness:
        yield harness


# As in Meteor's SubscriberGroupedTest


def test_subscriber_in_a_group_cannot_seek(harness: GroupHarness) -> None:
    sub = harness.subscriber()
    with pytest.raises(meteor.GroupError, match="seek_group"):
        sub.seek(0)


def test_polling_an_empty_stream_acquires_the_lease(harness: GroupHarness) -> None:
    sub = harness.subscriber()
    assert (sub.is_assigned, sub.term) == (False, None)
    assert len(sub.poll(0)) == 0
    assert sub.is_assigned
    assert len(sub.poll(0.05)) == 0
    assert (harness.owner, harness.field("term")) == (sub.member, str(sub.term))


def test_confirm_before_the_first_read_changes_nothing(harness: GroupHarness) -> None:
    sub = harness.subscriber()
    assert sub.confirm().result(5) == 0
    sub.poll(0)
    assert sub.confirm().result(5) == 0
    assert sub.confirmed == 0
    assert harness.confirmed is None


def test_confirm_of_an_empty_batch_confirms_only_the_records_before_it(
    harness: GroupHarness,
) -> None:
    sub, standby = harness.subscriber(), harness.subscriber()
    assert sub.confirm(sub.poll(0)).result(5) == 0
    assert standby.confirm(standby.poll(0)).result(5) == 0
    assert harness.confirmed is None
    harness.fill(2)
    assert check_values(sub.poll(5)) == [0, 1]
    assert sub.confirm(sub.poll(0)).result(5) == 2
    assert harness.confirmed == 2


def test_waiting_poll_returns_records_once_the_lease_is_free(harness: GroupHarness) -> None:
    harness.fill(2)
    sub = harness.subscriber(lease_ttl=0.3)
    harness.take_away()  # a lease that never expires, and has no owner that would release it
    assert len(sub.poll(0.2)) == 0
    assert not sub.is_assigned

    def free_it(stop: threading.Event) -> None:
        eventually(lambda: sub._fetcher.session and sub._fetcher.session.polling)
        harness.redis.delete(keys.lease(STREAM, GROUP))

    with background(free_it):
        assert check_values(sub.poll(60)) == [0, 1]
    assert sub.is_assigned


def test_polls_with_timeout_zero_get_a_released_lease_promptly(harness: GroupHarness) -> None:
    harness.fill(2)
    owner, waiter = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
    assert check_values(owner.poll(5)) == [0, 1]
    assert not waiter.poll(0)
    owner.close()
    found = eventually(lambda: waiter.poll(0), 5, "the free lease was not taken")
    assert check_values(found) == [0, 1]
    assert waiter.is_assigned


def test_poll_with_timeout_zero_replaces_a_dead_connection_while_it_waits(
    served: GroupHarness,
) -> None:
    owner, waiter = served.subscriber(lease_ttl=60), served.subscriber(lease_ttl=60)
    owner.poll(0)
    assert not waiter.poll(0)
    served.redis.client_kill_filter(_type="normal", skipme=True)
    assert not waiter.poll(0)


def test_expired_lease_is_taken_over_and_renewed(harness: GroupHarness) -> None:
    harness.fill(2)
    sub = harness.subscriber(lease_ttl=0.6)
    harness.set_fields(term=7, owner="dead member", nonce="old nonce")
    assert check_values(sub.poll(10)) == [0, 1]
    assert harness.field("confirmed") is None
    assert sub.term is not None
    assert sub.term > 7
    assert sub.confirm().result(10) == 2
    assert harness.confirmed == 2
    for _ in range(2):
        before = harness.lease_left_ms

        def renewed() -> bool:
            nonlocal before
            left, before = before, harness.lease_left_ms
            return before > left

        eventually(renewed)
    eventually(lambda: sub.is_assigned)


def test_frequent_polling_does_not_cause_frequent_renewals(harness: GroupHarness) -> None:
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(0)
    left_ms = harness.lease_left_ms

    def polled_until_it_is_older() -> bool:
        sub.poll(0)
        return harness.lease_left_ms < left_ms - 100

    eventually(polled_until_it_is_older)


def test_confirm_under_a_lost_lease_changes_nothing_and_raises_once(harness: GroupHarness) -> None:
    harness.fill(1)
    sub = harness.subscriber(lease_ttl=60)
    assert check_values(sub.poll(5)) == [0]
    harness.take_away()
    ack = sub.confirm()
    eventually(ack.done)
    with pytest.raises(meteor.LeaseLost) as caught:
        sub.poll(0)
    assert (caught.value.stream, caught.value.group) == (STREAM, GROUP)
    assert len(sub.poll(0)) == 0
    assert (sub.is_assigned, sub.term, harness.confirmed) == (False, None, None)
    sub.deactivate()
    sub.close()
    assert harness.owner == "somebody"


def test_checked_confirm_refusal_is_not_raised_by_poll(harness: GroupHarness) -> None:
    harness.fill(1)
    sub = harness.subscriber(lease_ttl=60)
    sub.poll(5)
    harness.take_away()
    with pytest.raises(meteor.LeaseLost):
        sub.confirm().result(5)
    assert len(sub.poll(0)) == 0
    sub.close()


def test_failing_poll_keeps_the_lease_until_a_renewal_is_refused(harness: GroupHarness) -> None:
    harness.fill(1)
    ((entry_id, _),) = entries(harness.redis, STREAM)
    replace_frame(harness.redis, STREAM, entry_id, b"not a frame", b"0kv")
    sub = harness.subscriber(lease_ttl=0.5)
    for _ in range(2):
        with pytest.raises(meteor.CorruptFrame):
            sub.poll(5)
    assert sub.is_assigned
    assert sub.position == 0
    harness.take_away()
    eventually(lambda: not sub.is_assigned)
    assert len(sub.poll(0)) == 0
    assert harness.owner == "somebody"


@pytest.mark.parametrize(("initial_offset", "seen"), [("earliest", [0, 1]), ("latest", [])])
def test_new_group_starts_at_its_initial_offset(
    harness: GroupHarness, initial_offset: str, seen: list[int]
) -> None:
    harness.fill(2)
    sub = harness.subscriber(initial_offset=initial_offset)
    assert drain(sub) == seen
    harness.fill(1)
    assert check_values(sub.poll(5)) == [2]


def test_initial_offset_none_needs_a_confirmed_offset(harness: GroupHarness) -> None:
    harness.fill(3)
    with pytest.raises(meteor.NoConfirmedOffset):
        harness.subscriber(initial_offset="none")
    assert harness.stream.groups() == []  # no group was created
    with harness.subscriber() as sub:
        sub.poll(5, max_records=2)
        with pytest.raises(meteor.NoConfirmedOffset):  # read, but not confirmed
            harness.subscriber(initial_offset="none")
        sub.confirm()
    assert check_values(harness.subscriber(initial_offset="none").poll(5)) == [2]


def test_subscribers_of_both_kinds_name_their_group_and_themselves(url: str) -> None:
    with meteor.connect(url) as m:
        stream = m.stream("s", ordering_key="key")
        alone, member = stream.subscriber(), stream.subscriber(group="a")
        consumer = stream.shared_subscriber("b")
        assert (alone.group, member.group, consumer.group) == (None, "a", "b")
        member.poll(0)
        assert stream.group("a").owner == member.member
        assert [each.name for each in stream.shared_group("b").describe().consumers] == [
            consumer.member
        ]


def test_two_members_take_turns_by_deactivating(harness: GroupHarness) -> None:
    harness.fill(2)
    first, second = harness.subscriber(lease_ttl=60), harness.subscriber(lease_ttl=60)
    assert check_values(first.poll(5)) == [0, 1]
    assert first.confirm().result(5) == 2
    assert len(second.poll(0)) == 0
    harness.fill(2)
    assert check_values(first.poll(5)) == [2, 3]
    assert (first.is_assigned, second.is_assigned) == (True, False)
    first.deactivate()
    assert (first.is_assigned, len(first.poll(0))) == (False, 0)
    assert check_values(second.poll(5)) == [2, 3]  # the first member did not confirm them
    second.confirm(2)
    second.deactivate()
    first.reactivate()
    assert check_values(first.poll(5)) == [3]


def test_each_of_two_groups_gets_every_record(harness: GroupHarness) -> None:
    harness.fill(3)
    first, second = harness.subscriber(group="first"), harness.subscriber(group="second")
    assert [drain(first), drain(second)] == [[0, 1, 2]] * 2
    first.confirm().result(5)
    harness.group = "second"
    assert harness.confirmed is None
    assert [first.lag, second.lag] == [0, 3]


def test_groups_with_the_same_name_on_two_streams_are_independent(harness: GroupHarness) -> None:
    other = harness.client.stream("other", create=True)
    harness.fill(2)
    fill(other, 3)
    first = harness.subscriber()
    with other.subscriber(group=GROUP) as second:
        assert (drain(first), drain(second)) == ([0, 1], [0, 1, 2])
        assert second.confirm().result(5) == 3
        first.deactivate()
        assert second.is_assigned
        assert harness.confirmed is None


# As in Meteor's PubSubTest and Blackstrom's ledger test


def test_each_receiver_without_a_group_gets_every_record_in_order(served: GroupHarness) -> None:
    seen: list[list[int]] = [[], [], []]
    for offsets in seen:
        sub = served.subscriber(group=None)
        sub.attach_receiver(_note(offsets))
    served.fill(1, 1, 1, 1, 1)
    eventually(lambda: all(len(offsets) >= 5 for offsets in seen))
    assert seen == [[0, 1, 2, 3, 4]] * 3


def test_one_receiver_in_a_group_gets_every_record_in_order(served: GroupHarness) -> None:
    seen: list[list[int]] = [[], [], []]
    subs = [served.subscriber() for _ in seen]
    for sub, offsets in zip(subs, seen, strict=True):
        sub.attach_receiver(_note(offsets))
    served.fill(1, 1, 1, 1, 1)
    eventually(lambda: sum(map(len, seen)) >= 5)
    assert sorted(seen) == [[], [], [0, 1, 2, 3, 4]]


def test_later_members_get_no_records_while_the_first_member_is_alive(served: GroupHarness) -> None:
    seen: list[list[int]] = [[], [], []]
    subs = [served.subscriber(lease_ttl=60)]
    subs[0].attach_receiver(_note(seen[0], subs[0]))
    served.fill(1)
    eventually(lambda: seen[0])
    for offsets in seen[1:]:
        subs.append(served.subscriber(lease_ttl=60))
        subs[-1].attach_receiver(_note(offsets, subs[-1]))
    served.fill(1, 1, 1, 1)
    eventually(lambda: sum(map(len, seen)) >= 5)
    assert [sub.is_assigned for sub in subs] == [True, False, False]
    subs[0].close()
    served.fill(1)
    eventually(lambda: sum(map(len, seen)) >= 6)
    for sub in subs[1:]:
        sub.close()
    assert seen[0] == [0, 1, 2, 3, 4]
    assert sorted(seen[1:]) == [[], [5]]  # no record twice: all were confirmed


def _note(
    offsets: list[int], sub: meteor.Subscriber | None = None
) -> Callable[[meteor.Record], None]:
    def note(record: meteor.Record) -> None:
        offsets.append(record.offset)
        if sub is not None:
            sub.confirm()

    return note


# As in Meteor's ElectionTest


class Candidate:
    """A member that asks for the lease without a subscriber."""

    def __init__(self, harness: GroupHarness, name: str, nonce: str = "") -> None:
        self.name = name
        self.nonce = nonce or f"nonce of {name}"
        self.link = harness.client._connector.open_connection(STREAM)
        self.lease = Lease(STREAM, harness.stream.incarnation, GROUP, name, 60.0)

    def acquire(self, expired: int | None = None) -> Term | LeaseUnavailable:
        return self.lease.acquire(self.link, self.nonce, expired)

    def win(self) -> Term:
        term = self.acquire()
        assert isinstance(term, Term)
        return term


@pytest.fixture
def candidates(harness: GroupHarness) -> Iterator[tuple[Candidate, Candidate]]:
    harness.subscriber()  # creates the group
    both = Candidate(harness, "one"), Candidate(harness, "two")
    yield both
    for candidate in both:
        candidate.link.close()


def test_member_that_never_polls_does_not_take_the_lease(harness: GroupHarness) -> None:
    sub = harness.subscriber()
    assert (harness.events(), harness.owner, sub.is_assigned) == ([], None, False)


def test_deactivated_member_does_not_take_an_expired_lease(harness: GroupHarness) -> None:
    sub = harness.subscriber(lease_ttl=0.2)
    harness.set_fields(term=7, owner="dead member", nonce="old nonce")
    sub.deactivate()
    assert len(sub.poll(0.5)) == 0
    assert (harness.events(), harness.owner) == ([], None)
    assert harness.field("owner") == "dead member"


def test_free_lease_is_acquired_renewed_and_released(
    harness: GroupHarness, candidates: tuple[Candidate, Candidate]
) -> None:
    one, _ = candidates
    term = one.win()
    assert harness.owner == "one"
    harness.redis.pexpire(keys.lease(STREAM, GROUP), 20_000)
    one.lease.renew(one.link, term)
    assert harness.lease_left_ms > 20_000
    one.lease.release(one.link, term.nonce)
    assert harness.lease_left_ms == -2
    assert [(event.what, event.term) for event in harness.events()] == [
        ("assigned", term.number),
        ("released", term.number),
    ]


def test_expired_lease_is_taken_over_after_the_grace_period(
    harness: GroupHarness, candidates: tuple[Candidate, Candidate]
) -> None:
    one, two = candidates
    old = one.win()
    harness.redis.delete(keys.lease(STREAM, GROUP))
    first_answer = two.acquire()
    assert isinstance(first_answer, LeaseUnavailable)
    assert first_answer.expired == old.number
    assert isinstance(two.acquire(old.number - 1), LeaseUnavailable)  # not the expired term
    new = two.acquire(first_answer.expired)
    assert isinstance(new, Term)
    assert new.number > old.number
    assert harness.owner == "two"


@pytest.mark.parametrize("how", ["released", "taken over", "sought", "never owner"])
def test_former_owner_can_neither_renew_nor_release_the_lease(
    harness: GroupHarness, candidates: tuple[Candidate, Candidate], how: str
) -> None:
    one, two = candidates
    old = one.win()
    one.lease.release(one.link, old.nonce)
    owner = None
    if how == "taken over":
        two.win()
        owner = "two"
    elif how == "sought":
        harness.stream.seek_group(GROUP, 0)
    elif how == "never owner":
        old = old._replace(number=two.win().number)  # the new owner's term with the old nonce
        owner = "two"
    events = harness.events()
    with pytest.raises(meteor.LeaseLost):
        one.lease.renew(one.link, old)
    with pytest.raises(meteor.LeaseLost):
        one.lease.confirm(one.link, old, old.start._replace(offset=0))
    one.lease.release(one.link, old.nonce)
    assert (harness.owner, harness.events()) == (owner, events)
