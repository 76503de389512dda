"""Exclusive groups: one member reads at a time, and another takes over if that member stops.

A group is a reliable queue over a stream. The member that holds the lease, the owner, gets the
records; the others wait. If the owner closes, another takes over at once. If it dies or hangs,
another takes over when the lease expires. The next member continues at the confirmed offset, so no
record is skipped.
"""

from __future__ import annotations

import meteor_py as meteor
from tests.fundamentals.reading import publish
from tests.support.group_members import GroupHarness

#: Lease TTLs in seconds: one that expires during a test, and one that does not.
SHORT, LONG = 0.6, 60.0


def test_one_member_reads_and_the_others_wait(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(5))
    with (
        stream.subscriber(group="billing", lease_ttl=3.0) as one,
        stream.subscriber(group="billing", lease_ttl=3.0) as two,
    ):
        assert list(one.poll(5).offsets) == [0, 1, 2, 3, 4]
        assert len(two.poll(0.6)) == 0
        assert (one.is_assigned, two.is_assigned) == (True, False)


def test_next_member_continues_at_once_when_a_member_closes(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(5))
    one = stream.subscriber(group="billing", lease_ttl=LONG)
    with stream.subscriber(group="billing", lease_ttl=LONG) as two:
        one.poll(5)
        one.confirm(2)  # 0, 1 and 2 are done
        one.close()
        assert list(two.poll(5).offsets) == [3, 4]


def test_next_member_continues_when_a_killed_members_lease_expires(
    harness: GroupHarness,
) -> None:
    harness.fill(5)
    one, two = harness.members(2, lease_ttl=SHORT)  # each in its own process
    assert one.poll() == [0, 1, 2, 3, 4]
    assert one.confirm(2) == 3
    one.kill()
    assert two.poll(10) == [3, 4]


def test_next_member_continues_when_a_member_hangs(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(5))
    with (
        stream.subscriber(group="billing", lease_ttl=SHORT, max_poll_interval=0.2) as hanging,
        stream.subscriber(group="billing", lease_ttl=SHORT) as two,
    ):
        assert len(hanging.poll(5)) == 5  # from here on, this member does not poll
        assert list(two.poll(10).offsets) == [0, 1, 2, 3, 4]  # no record was confirmed
        assert not hanging.is_assigned


def test_groups_do_not_share_records_with_each_other(m: meteor.Client) -> None:
    stream = m.stream("orders", create=True)
    publish(stream, range(5))
    with stream.subscriber(group="billing") as one, stream.subscriber(group="audit") as two:
        assert list(one.poll(5).offsets) == list(two.poll(5).offsets) == [0, 1, 2, 3, 4]
        one.confirm().result(5)
    assert (stream.group("billing").lag, stream.group("audit").lag) == (0, 5)
