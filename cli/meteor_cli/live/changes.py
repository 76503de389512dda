"""Changes between two snapshots of the streams, for logs and alerts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meteor_cli.live.snapshot import Snapshot, StreamSnapshot
from meteor_cli.render.text import counted

if TYPE_CHECKING:
    from meteor_py import Description, GroupDescription

Fact = int | str | None


@dataclass(frozen=True)
class Change:
    """A change to a stream or group."""

    stream: str | None
    group: str | None
    #: A machine-readable name. The names of events and facts are stable across versions.
    event: str
    #: A human-readable description. It contains untrusted names and is not sanitized.
    text: str
    facts: dict[str, Fact] = field(default_factory=dict)


def changes(before: Snapshot | None, after: Snapshot, lag_max: int | None = None) -> list[Change]:
    """Return the changes between two snapshots, ordered by stream and group.

    Args:
        before: The earlier snapshot. If None, return only problems that need attention.
        after: The later snapshot.
        lag_max: Report a group's lag when it rises above this number, and when it falls back.
    """
    if before is None:
        found = [_problems(None, seen, lag_max) for seen in after.streams.values()]
        return [change for part in found for change in part] + _unreadable(Snapshot(), after)
    found = [
        _stream(name, before.streams.get(name), after.streams.get(name), lag_max)
        for name in sorted(before.streams.keys() | after.streams.keys())
        if name not in before.unreadable and name not in after.unreadable
    ]
    return [change for part in found for change in part] + _unreadable(before, after)


def _unreadable(before: Snapshot, after: Snapshot) -> list[Change]:
    """Report streams that became unreadable, became readable again, or vanished while unreadable.

    Other changes to an unreadable stream are unknown.
    """
    found: list[Change] = []
    for name, reason in sorted(after.unreadable.items()):
        if name not in before.unreadable:
            found.append(_change(name, "unreadable", f"cannot be read: {reason}", reason=reason))
    for name in sorted(before.unreadable.keys() - after.unreadable.keys()):
        if name in after.streams:
            found.append(_change(name, "readable", "can be read again"))
        else:
            found.append(_change(name, "deleted", "deleted"))
    return found


def _stream(
    name: str, before: StreamSnapshot | None, after: StreamSnapshot | None, lag_max: int | None
) -> Iterator[Change]:
    if after is None:
        yield _change(name, "deleted", "deleted")
        return
    if before is None:
        yield _change(name, "created", "created", next=after.stream.next)
    elif before.stream.incarnation != after.stream.incarnation:
        yield _change(name, "recreated", "deleted and recreated", next=after.stream.next)
        before = None
    else:
        yield from _history(before.stream, after.stream)
    yield from _archiver(before, after)
    old_groups, new_groups = _groups(before), _groups(after)
    for group in sorted(old_groups.keys() | new_groups.keys()):
        yield from _group(name, old_groups.get(group), new_groups.get(group))
    yield from _problems(before, after, lag_max)


def _history(before: Description, after: Description) -> Iterator[Change]:
    """Report a change of the epoch and a loss of records, if there was one."""
    kept = after.next
    if before.epoch != after.epoch:
        kept = min(kept, after.epoch_first)
        text = "the server was restarted or failed over, or the stream's slot moved"
        yield _change(after.name, "epoch_changed", text, epoch=after.epoch, before=before.epoch)
    if kept < before.next:
        last = before.next - 1
        text = f"the server lost records {kept} to {last}"
        yield _change(after.name, "log_truncated", text, first=kept, last=last)


def _archiver(before: StreamSnapshot | None, after: StreamSnapshot) -> Iterator[Change]:
    name, now = after.stream.name, after.stream.archiver
    was = before.stream.archiver if before else None
    if now is not None and now != was:
        text = f"archived by {now}" if was is None else f"archived by {now} instead of {was}"
        yield _change(name, "archiver_taken", text, owner=now, before=was)
    elif now is None and was is not None and not after.unarchived:
        yield _change(name, "archiver_ended", f"no longer archived by {was}", before=was)


def _group(
    stream: str, before: GroupDescription | None, after: GroupDescription | None
) -> Iterator[Change]:
    if after is None:
        if before is not None:
            name, done = before.name, before.confirmed
            yield _change(stream, "group_deleted", "deleted", name, confirmed=done)
        return
    name, at, now, term = after.name, after.confirmed, after.owner, after.term
    was = before.owner if before else None
    if before is None:
        text = f"created at {at}"
        yield _change(stream, "group_created", text, name, confirmed=at, lag=after.lag)
    elif at < before.confirmed:
        text = f"moved back from {before.confirmed} to {at}"
        facts = {"confirmed": at, "before": before.confirmed}
        yield _change(stream, "group_moved_back", text, name, **facts)
    if after.consumers is not None and before is not None and before.consumers is not None:
        count, other = after.consumers, before.consumers
        if count != other:
            text = f"{counted(count, 'consumer')}, previously {other:,}"
            facts = {"consumers": count, "before": other}
            yield _change(stream, "consumers_changed", text, name, **facts)
    if now is None:
        if was is not None:
            # The server does not say whether the lease was released or expired.
            text = f"{was} no longer holds the lease"
            yield _change(stream, "lease_ended", text, name, before=was, term=term)
    elif was is None or before is None:
        yield _change(stream, "lease_taken", f"lease taken by {now}", name, owner=now, term=term)
    elif now != was:
        text = f"lease taken over from {was} by {now}"
        yield _change(stream, "lease_taken_over", text, name, owner=now, before=was, term=term)
    elif term != before.term:
        text = f"lease lost and taken again by {now}"
        yield _change(stream, "lease_taken", text, name, owner=now, term=term)


def _problems(
    before: StreamSnapshot | None, after: StreamSnapshot, lag_max: int | None
) -> Iterator[Change]:
    """Report the start of each condition that needs attention, and the end of a high lag."""
    stream, waiting = after.stream.name, after.unarchived
    if _lacks_archiver(after) and not (before and _lacks_archiver(before)):
        text = f"no archiver, {counted(waiting, 'record')} waiting"
        was = before.stream.archiver if before else None
        if was is not None:
            text += f"; {was} stopped"
        yield _change(stream, "archiver_missing", text, unarchived=waiting, before=was)
    old_groups = _groups(before)
    for name, group in _groups(after).items():
        old = old_groups.get(name)
        first, done = after.stream.first, group.confirmed
        # A shared group settles records out of order, so it may have settled most of the records
        # that the ring dropped above its confirmed offset.
        dropped = first > done and group.kind == "exclusive"
        if dropped and not (before and old and before.stream.first > old.confirmed):
            text = f"records {done} to {first - 1} were dropped before they were confirmed"
            yield _change(stream, "records_dropped", text, name, first=done, last=first - 1)
        if lag_max is None:
            continue
        was_behind = old is not None and old.lag > lag_max
        facts = {"lag": group.lag, "limit": lag_max}
        if group.lag > lag_max and not was_behind:
            text = f"lag is {group.lag:,}, above {lag_max:,}"
            yield _change(stream, "lag_high", text, name, **facts)
        elif group.lag <= lag_max and was_behind:
            text = f"lag is {group.lag:,}, no longer above {lag_max:,}"
            yield _change(stream, "lag_normal", text, name, **facts)


def _lacks_archiver(seen: StreamSnapshot) -> bool:
    return seen.stream.archiver is None and seen.unarchived > 0


def _groups(seen: StreamSnapshot | None) -> dict[str, GroupDescription]:
    return {} if seen is None else {group.name: group for group in seen.stream.groups}


def _change(stream: str, event: str, text: str, group: str | None = None, **facts: Fact) -> Change:
    return Change(stream, group, event, text, facts)
