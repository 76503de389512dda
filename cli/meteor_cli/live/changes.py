"""What changed between two looks at the streams: for logs and alerts."""

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
    """Something that happened."""

    stream: str | None
    group: str | None
    #: One word for programs. It does not change from version to version, nor do the facts' names.
    event: str
    #: The same for people; what others have named is in it as it came, and not to be trusted.
    text: str
    facts: dict[str, Fact] = field(default_factory=dict)


def changes(before: Snapshot | None, after: Snapshot, lag_max: int | None = None) -> list[Change]:
    """What happened from one look to the next, by stream and group.

    Args:
        before: None: there was no look before; only what calls for somebody to act is told.
        after: The later look.
        lag_max: Tell of groups that are farther behind than that, and when they no longer are.
    """
    if before is None:
        found = [_troubles(None, seen, lag_max) for seen in after.streams.values()]
        return [change for part in found for change in part] + _hidden(Snapshot(), after)
    found = [
        _life(name, before.streams.get(name), after.streams.get(name), lag_max)
        for name in sorted(before.streams.keys() | after.streams.keys())
        if name not in before.unreadable and name not in after.unreadable
    ]
    return [change for part in found for change in part] + _hidden(before, after)


def _hidden(before: Snapshot, after: Snapshot) -> list[Change]:
    """Streams that cannot be looked at: whether they have changed is not known."""
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


def _life(
    name: str, before: StreamSnapshot | None, after: StreamSnapshot | None, lag_max: int | None
) -> Iterator[Change]:
    """What happened to a stream as a whole, and then to its parts."""
    if after is None:
        yield _change(name, "deleted", "deleted")
        return
    if before is None:
        yield _change(name, "created", "created", next=after.stream.next)
    elif before.stream.incarnation != after.stream.incarnation:
        yield _change(name, "created_anew", "deleted and created anew", next=after.stream.next)
        before = None
    else:
        yield from _history(before.stream, after.stream)
    yield from _archiver(before, after)
    old_groups, new_groups = _groups(before), _groups(after)
    for group in sorted(old_groups.keys() | new_groups.keys()):
        yield from _group(name, old_groups.get(group), new_groups.get(group))
    yield from _troubles(before, after, lag_max)


def _history(before: Description, after: Description) -> Iterator[Change]:
    """Whether the server has forgotten something."""
    kept = after.next
    if before.epoch != after.epoch:
        kept = min(kept, after.epoch_first)
        text = "the server was restarted or has failed over"
        yield _change(after.name, "epoch_changed", text, epoch=after.epoch, before=before.epoch)
    if kept < before.next:
        last = before.next - 1
        text = f"the server has lost records {kept} to {last}"
        yield _change(after.name, "records_lost", text, first=kept, last=last)


def _archiver(before: StreamSnapshot | None, after: StreamSnapshot) -> Iterator[Change]:
    name, now = after.stream.name, after.stream.archiver
    was = before.stream.archiver if before else None
    if now is not None and now != was:
        text = f"archived by {now}" if was is None else f"archived by {now}, no longer by {was}"
        yield _change(name, "archiver_taken", text, owner=now, before=was)
    elif now is None and was is not None and not after.unarchived:
        yield _change(name, "archiver_ended", f"no longer archived by {was}", before=was)


def _group(
    stream: str, before: GroupDescription | None, after: GroupDescription | None
) -> Iterator[Change]:
    """What happened to a group, and to its lease."""
    if after is None:
        if before is not None:
            name, done = before.name, before.confirmed
            yield _change(stream, "group_deleted", "deleted", name, confirmed=done)
        return
    name, at, now, term = after.name, after.confirmed, after.owner, after.term
    was = before.owner if before else None
    if before is None:
        yield _change(stream, "group_begun", f"begun at {at}", name, confirmed=at, lag=after.lag)
    elif at < before.confirmed:
        text = f"moved back from {before.confirmed} to {at}"
        facts = {"confirmed": at, "before": before.confirmed}
        yield _change(stream, "group_moved_back", text, name, **facts)
    if after.consumers is not None and before is not None and before.consumers is not None:
        count, other = after.consumers, before.consumers
        if count != other:
            text = f"{counted(count, 'consumer')}, {other:,} before"
            facts = {"consumers": count, "before": other}
            yield _change(stream, "consumers_changed", text, name, **facts)
    if now is None:
        if was is not None:
            # Given up or run out: the lease is gone either way, and does not say.
            text = f"{was} no longer has the lease"
            yield _change(stream, "lease_ended", text, name, before=was, term=term)
    elif was is None or before is None:
        yield _change(stream, "lease_taken", f"lease taken by {now}", name, owner=now, term=term)
    elif now != was:
        text = f"lease taken over from {was} by {now}"
        yield _change(stream, "lease_taken_over", text, name, owner=now, before=was, term=term)
    elif term != before.term:
        text = f"lease lost and taken again by {now}"
        yield _change(stream, "lease_taken", text, name, owner=now, term=term)


def _troubles(
    before: StreamSnapshot | None, after: StreamSnapshot, lag_max: int | None
) -> Iterator[Change]:
    """What calls for somebody to act: told when it begins, not as long as it lasts."""
    stream, waiting = after.stream.name, after.unarchived
    if _nobody_archives(after) and not (before and _nobody_archives(before)):
        text = f"{waiting} {'record waits' if waiting == 1 else 'records wait'}, nobody archives"
        was = before.stream.archiver if before else None
        if was is not None:
            text += f" since {was} ended"
        yield _change(stream, "archiver_missing", text, unarchived=waiting, before=was)
    old_groups = _groups(before)
    for name, group in _groups(after).items():
        old = old_groups.get(name)
        first, done = after.stream.first, group.confirmed
        # Of a shared group, most of what lies between may be settled.
        dropped = first > done and group.kind == "exclusive"
        if dropped and not (before and old and before.stream.first > old.confirmed):
            text = f"records {done} to {first - 1} were dropped before it had read them"
            yield _change(stream, "records_dropped", text, name, first=done, last=first - 1)
        if lag_max is None:
            continue
        was_behind = old is not None and old.lag > lag_max
        facts = {"lag": group.lag, "limit": lag_max}
        if group.lag > lag_max and not was_behind:
            text = f"lag is {group.lag}, above {lag_max}"
            yield _change(stream, "lag_high", text, name, **facts)
        elif group.lag <= lag_max and was_behind:
            text = f"lag is {group.lag}, no longer above {lag_max}"
            yield _change(stream, "lag_normal", text, name, **facts)


def _nobody_archives(seen: StreamSnapshot) -> bool:
    return seen.stream.archiver is None and seen.unarchived > 0


def _groups(seen: StreamSnapshot | None) -> dict[str, GroupDescription]:
    return {} if seen is None else {group.name: group for group in seen.stream.groups}


def _change(stream: str, event: str, text: str, group: str | None = None, **facts: Fact) -> Change:
    return Change(stream, group, event, text, facts)
