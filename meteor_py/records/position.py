"""A position in a stream, and a check for lost records below it.

A server that fails over to a lagging replica, or restarts without its last second of data, assigns
some offsets a second time. So an offset alone does not identify a record. A position is
(incarnation, epoch, offset). A new incarnation starts when a stream is recreated. A new epoch
starts when the server's replication history changes (a new ``master_replid``, at each restart and
failover).

After a network split, two servers can continue the same stream, each with its own epochs. So a
stream's history is a tree, and each server knows one branch. The stream's meta hash on that server
holds the branch as the table ``epochs``: a list of ``number:first offset``, oldest epoch first.
Epoch numbers are random enough that none occurs on two branches. A position is on the server's
branch up to the last epoch that both have in common.

A ``+`` before a number means that no epoch is missing between this entry and the previous one.
Versions up to 0.1 wrote no ``+`` and left out epochs in which nothing was appended.
"""

from __future__ import annotations

from typing import NamedTuple

#: Maximum number of epochs that a position carries.
_PATH_EPOCHS = 8
#: Maximum number of epochs in a table, as in new_epoch.lua.
_TABLE_EPOCHS = 1000


class Position(NamedTuple):
    """The next offset to process, in one incarnation and one epoch of a stream.

    A tuple of strings and integers, which can be stored anywhere. ``Position(*saved)`` restores it.
    """

    incarnation: str
    epoch: int
    offset: int
    #: The last few epochs up to this position, in the format of the stream's epoch table; empty if
    #: unknown. They show exactly which records a server on another branch does not have.
    path: str = ""


class _Epoch(NamedTuple):
    number: int
    first: int
    #: Whether no epoch is missing between the previous entry and this one.
    follows: bool


def diverged_at(position: Position, epochs: str, end: int) -> int | None:
    """Return the first offset below ``position`` that the server lost, or None.

    If the position is on another branch and its path does not show where the branches split, the
    result is a lower bound, usually 0.

    Args:
        position: The position of a reader or publisher.
        epochs: The stream's epochs on the server, in the format of its meta hash.
        end: The stream's next offset on the server.

    >>> diverged_at(Position("i", 1, 200), "1:0,+2:100", 300)
    100
    >>> diverged_at(Position("i", 1, 100), "1:0,+2:100", 300) is None
    True
    >>> diverged_at(Position("i", 1, 200), "1:0", 150)
    150
    >>> diverged_at(Position("i", 3, 110, path="1:0,+2:90,+3:100"), "1:0,+2:90,+4:105", 300)
    100
    """
    table = _parse(epochs)
    path = _parse(position.path) if position.path else []
    firsts = [end, *(epoch.first for epoch in _after_split(table, path, position.epoch))]
    lowest = max(min(firsts), 0)
    return lowest if lowest < position.offset else None


def _after_split(table: list[_Epoch], path: list[_Epoch], number: int) -> list[_Epoch]:
    """Return the epochs of both branches that come after their last common epoch."""
    numbers = [epoch.number for epoch in table]
    if number in numbers:
        return table[numbers.index(number) + 1 :]
    steps = [epoch.number for epoch in path]
    if number in steps:
        path = path[: steps.index(number) + 1]
        for index in range(len(path) - 2, -1, -1):
            if path[index].number in numbers:
                return [*table[numbers.index(path[index].number) + 1 :], *path[index + 1 :]]
    complete_from = max(epoch.number for epoch in table if not epoch.follows)
    if number < complete_from:
        return [epoch for epoch in table if epoch.number > number]
    if not table[-1].follows:
        # Without a "+", the last entry is the only one, or version 0.1 wrote the table. In both
        # cases, do what version 0.1 did.
        return table[-1:]
    return table  # the branches may have split anywhere


def _parse(epochs: str) -> list[_Epoch]:
    table = []
    for index, entry in enumerate(epochs.split(",")):
        number, _, first = entry.partition(":")
        table.append(_Epoch(int(number), int(first), index > 0 and number.startswith("+")))
    return table


def path_of(epochs: str) -> str:
    """Return the part of an epoch table that positions carry."""
    return ",".join(epochs.split(",")[-_PATH_EPOCHS:])


def with_epoch(epochs: str, number: int, first: int) -> str:
    """Return a table with one more epoch. If the table is too long, omit the oldest epochs.

    >>> with_epoch("1:0,+2:100", 3, 150)
    '1:0,+2:100,+3:150'
    """
    entries = [*epochs.split(","), f"+{number}:{first}"]
    if len(entries) > _TABLE_EPOCHS:
        # As in new_epoch.lua, -1 means that all records of earlier epochs may have been lost.
        entries = entries[-_TABLE_EPOCHS:]
        entries[0] = f"{entries[0].lstrip('+').partition(':')[0]}:-1"
    return ",".join(entries)


def newest_epoch(epochs: str) -> int:
    """Return the number of the last epoch in a table.

    >>> newest_epoch("1:0,+2:100")
    2
    """
    return int(epochs.rpartition(",")[2].partition(":")[0])


def table_numbers(epochs: str) -> set[int]:
    """Return the numbers of the epochs in a table."""
    return {epoch.number for epoch in _parse(epochs)}


def epoch_of(epochs: str, offset: int) -> int:
    """Return the number of the epoch in which the record at ``offset`` was appended.

    >>> epoch_of("1:0,+2:100,+3:100", 99), epoch_of("1:0,+2:100,+3:100", 100)
    (1, 3)
    """
    table = _parse(epochs)
    return next((e.number for e in reversed(table) if e.first <= offset), table[0].number)


def epoch_numbers(epochs: str) -> set[int] | None:
    """Return the numbers of all epochs in a table, or None if some may be missing from it."""
    table = _parse(epochs)
    complete = table[0].first == 0 and all(epoch.follows for epoch in table[1:])
    return {epoch.number for epoch in table} if complete else None
