"""Why a shared group delivers nothing, or not all, in plain words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meteor_cli.output import counted

if TYPE_CHECKING:
    from meteor_py import GroupState, SharedDescription

#: Consumers that are named.
_NAMED = 3


def reasons(stream: str, found: SharedDescription, groups: Sequence[GroupState]) -> list[str]:
    """Sentences, what somebody has to see to first; what others have named is in them as it came.

    Args:
        stream: Its name.
        found: The shared group.
        groups: All its groups of records.
    """
    if found.lag == 0:
        return ["All records are settled: it waits for new ones."]
    told = _stopped(stream, found, groups)
    dead = [consumer.name for consumer in found.consumers if consumer.lease <= 0]
    if len(dead) == len(found.consumers):
        told.append(f"There is no consumer, and {_lag(found)}.")
    if dead:
        told.append(
            f"{dead[0]} is dead{f', and {len(dead) - 1:,} more' if len(dead) > 1 else ''}: whoever "
            "asks for records next gets what it held."
        )
    if len(dead) == len(found.consumers):
        return told
    told += _held(found, groups)
    if found.ready:
        told.append(
            f"{counted(found.ready, 'group')} can be had at once: whoever asks gets records, "
            "unless it holds as many as its prefetch allows."
        )
    new = found.confirmed + found.lag - found.looked
    if new > 0 and found.waiting < _most():
        told.append(
            f"{counted(new, 'record')} {'has' if new == 1 else 'have'} not been looked at yet: "
            "consumers do that when they ask for records."
        )
    return told or [f"Nothing is in the way: {_at_work(found)}."]


def _at_work(found: SharedDescription) -> str:
    busy = [consumer for consumer in found.consumers if consumer.records]
    if not busy:
        return _lag(found)
    held = sum(consumer.records for consumer in busy)
    who = busy[0].name if len(busy) == 1 else counted(len(busy), "consumer")
    return f"{who} {'has' if len(busy) == 1 else 'have'} {counted(held, 'record')} to settle"


def _most() -> int:
    from meteor_py.shared.config import WAITING_MAX

    return WAITING_MAX


def _lag(found: SharedDescription) -> str:
    return f"{counted(found.lag, 'record')} {'is' if found.lag == 1 else 'are'} not settled"


def _stopped(stream: str, found: SharedDescription, groups: Sequence[GroupState]) -> list[str]:
    """What somebody has to act upon."""
    told: list[str] = []
    if found.waiting >= _most():
        told.append(
            f"{found.waiting:,} records wait for their groups, and more may not: nothing new is "
            "delivered before some of those are settled, resumed or purged."
        )
    parked = [group for group in groups if group.state == "parked"]
    if parked:
        told.append(
            f"{counted(len(parked), 'group')} {_is(parked)} parked, with "
            f"{counted(sum(group.count for group in parked), 'record')}: `meteor shared resume "
            f"{stream} {found.name} ID` lets one go on."
        )
    delayed = [group for group in groups if group.state == "delayed"]
    if delayed:
        told.append(
            f"{counted(len(delayed), 'group')} {_is(delayed)} delayed after a failure, with "
            f"{counted(sum(group.count for group in delayed), 'record')}, and will go on."
        )
    if found.dying:
        told.append(
            f"{counted(found.dying, 'record')} {'was' if found.dying == 1 else 'were'} given up, "
            f"and not yet published to stream {found.config.dead_letter!r}: a consumer has to, "
            "and must be allowed to."
        )
    return told


def _held(found: SharedDescription, groups: Sequence[GroupState]) -> list[str]:
    """Who holds what others wait for."""
    busy = [group for group in groups if group.state == "owned"]
    owners = Counter(group.owner or "somebody" for group in busy)
    told: list[str] = []
    if len(owners) == 1 and len(found.consumers) > 1 and len(busy) == len(groups) > 1:
        (name,) = owners
        told.append(f"All {counted(len(busy), 'group')} are held by {name}.")
    waiting = [group for group in busy if group.waiting]
    per_owner = Counter[str]()
    for group in waiting:
        per_owner[group.owner or "somebody"] += group.waiting
    for name, records in per_owner.most_common(_NAMED):
        told.append(
            f"{counted(records, 'record')} {'waits' if records == 1 else 'wait'} for {name}, which "
            "has to settle what it holds of their groups first."
        )
    if len(per_owner) > _NAMED:
        told.append(f"The same goes for {counted(len(per_owner) - _NAMED, 'more consumer')}.")
    return told


def _is(groups: Sequence[GroupState]) -> str:
    return "is" if len(groups) == 1 else "are"
