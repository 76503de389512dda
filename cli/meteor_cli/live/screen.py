"""Layout of ``meteor top``: a table that fits the screen."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from meteor_cli.live.snapshot import Rates, Snapshot, StreamSnapshot
from meteor_cli.render.sanitize import sanitize
from meteor_cli.render.text import counted, product_name, show_bytes, show_count, show_span

if TYPE_CHECKING:
    from rich.text import Text

    from meteor_py import GroupDescription, ServerDescription

Sort = Literal["name", "rate", "lag", "memory"]

#: Number of lines above the rows: server, totals, a notice, titles.
_HEAD = 4
_GAP = 2
#: Fractions of maxmemory above which memory is shown in yellow and in red.
_MUCH, _TOO_MUCH = 0.75, 0.9


@dataclass(frozen=True)
class View:
    """The data to show."""

    server: ServerDescription
    address: str
    at: datetime
    snapshot: Snapshot
    rates: dict[str, Rates] = field(default_factory=dict)
    #: Why the data is out of date; None if it is current.
    problem: str | None = None


class Cell(NamedTuple):
    text: str = ""
    style: str = ""


class Row(NamedTuple):
    """A row of the table: a stream, its store, or one of its groups."""

    name: Cell
    rate: Cell = Cell()
    ring: Cell = Cell()
    memory: Cell = Cell()
    lag: Cell = Cell()
    owner: Cell = Cell()


class Block(NamedTuple):
    """A stream with its store and groups."""

    stream: Row
    parts: list[Row]
    #: Number of parts that are groups.
    groups: int


class Column(NamedTuple):
    title: str
    #: Minimum width, so that columns do not move while numbers change.
    width: int
    right: bool
    #: Minimum screen width, in characters, at which the column is shown.
    needs: int


_COLUMNS = (
    Column("stream, group", 13, False, 0),
    Column("rec/s", 6, True, 0),
    Column("in ring", 11, True, 52),
    Column("memory", 8, True, 70),
    Column("lag", 6, True, 0),
    Column("owner", 5, False, 36),
)
_NAME, _OWNER = 0, len(_COLUMNS) - 1


def draw(
    view: View, sort: Sort, *, width: int | None, height: int | None, number: int | None = None
) -> list[Text]:
    """Return the lines of a screen.

    Args:
        view: The data to show.
        sort: The order of streams.
        width: Screen width in columns; None means unlimited.
        height: Screen height in lines; None means that there is no screen and no limit.
        number: Maximum number of streams.
    """
    blocks = [
        _block(seen, view.rates.get(name, Rates()), sort) for name, seen in ranked(view, sort)
    ]
    rows_max = None if height is None else max(height - _HEAD, 0)
    rows, rest = _cut(blocks, rows_max, number)
    notice = Cell("Press q to quit." if height else "", "dim")
    if view.problem:
        notice = Cell(sanitize(view.problem), "bold red")
    lines = [*_head(view, width), _fit(notice, width), *_table(rows, width)]
    hint = "" if blocks else "There are no streams. `meteor publish NAME hello` creates one."
    lines += [_fit(Cell(text, "dim"), width) for text in (hint, rest) if text]
    return lines if height is None else lines[:height]


def ranked(view: View, sort: Sort) -> list[tuple[str, StreamSnapshot]]:
    """Return the streams in the given order. Numbers are sorted largest first."""

    def key(item: tuple[str, StreamSnapshot]) -> tuple[float, str]:
        name, seen = item
        rate = view.rates.get(name, Rates()).published or 0
        weights = {"name": 0, "rate": rate, "lag": seen.lag, "memory": seen.stream.bytes or 0}
        return -weights[sort], name

    return sorted(view.snapshot.streams.items(), key=key)


def _block(seen: StreamSnapshot, rates: Rates, sort: Sort) -> Block:
    stream = seen.stream
    capacity = stream.config.capacity
    row = Row(
        name=Cell(sanitize(stream.name), "bold"),
        rate=_rate(rates.published),
        ring=Cell(f"{show_count(stream.length)}/{show_count(capacity)}"),
        memory=Cell(show_bytes(stream.bytes)),
    )

    def key(group: GroupDescription) -> tuple[float, str]:
        weight = {"lag": group.lag, "rate": rates.confirmed.get(group.name, 0)}.get(sort, 0)
        return -weight, group.name

    parts = [] if stream.archived is None else [_store_row(seen, rates)]
    parts += [
        _group_row(group, stream.first, rates.confirmed.get(group.name))
        for group in sorted(stream.groups, key=key)
    ]
    return Block(row, parts, len(stream.groups))


def _store_row(seen: StreamSnapshot, rates: Rates) -> Row:
    stream, waiting = seen.stream, seen.unarchived
    is_full = waiting >= (stream.config.max_unarchived or waiting + 1)
    return Row(
        name=Cell("  (store)", "dim"),  # no group can have this name
        rate=_rate(rates.archived),
        ring=Cell(f"{show_count(stream.archived or 0)} stored"),
        lag=_lag(waiting, alarming=is_full),
        owner=_owner(stream.archiver, waiting),
    )


def _group_row(group: GroupDescription, first: int, rate: float | None) -> Row:
    # A shared group settles records out of order, so it may have settled most of the records that
    # the ring dropped above its confirmed offset.
    lost = max(first - group.confirmed, 0) if group.kind == "exclusive" else 0
    owner = counted(group.consumers, "consumer") if group.consumers else group.owner
    return Row(
        name=Cell(f"  {sanitize(group.name)}"),
        rate=_rate(rate),
        ring=Cell(f"{show_count(lost)} lost", "bold red") if lost else Cell(),
        lag=_lag(group.lag, alarming=lost > 0),
        owner=_owner(owner, group.lag),
    )


def _rate(rate: float | None) -> Cell:
    if rate is None:
        return Cell("-", "dim")
    return Cell(f"{rate:.1f}" if 0 < rate < 10 else show_count(round(rate)), "" if rate else "dim")


def _lag(lag: int, *, alarming: bool) -> Cell:
    return Cell(show_count(lag), "bold red" if alarming else "yellow" if lag else "dim")


def _owner(owner: str | None, lag: int) -> Cell:
    if owner is not None:
        return Cell(sanitize(owner))
    return Cell("none", "yellow" if lag else "dim")


def _cut(blocks: list[Block], rows_max: int | None, number: int | None) -> tuple[list[Row], str]:
    """Return the rows that fit on the screen, and a line about those that do not."""
    chosen = blocks[:number]
    needed = sum(1 + len(block.parts) for block in chosen) + (len(chosen) < len(blocks))
    # If some rows do not fit, keep the last line for the number of hidden streams and groups.
    room = needed if rows_max is None or needed <= rows_max else rows_max - 1
    # If some rows do not fit, a stream's groups get at most half of the screen, so that a stream
    # with very many groups does not hide the other streams.
    parts_max = needed if room == needed else room // 2
    rows: list[Row] = []
    streams, groups = len(blocks), sum(block.groups for block in blocks)
    for block in chosen:
        left = room - len(rows)
        if left <= 0:
            break
        parts = block.parts[: min(left - 1, parts_max)]
        rows += [block.stream, *parts]
        streams -= 1
        groups -= max(len(parts) - (len(block.parts) - block.groups), 0)  # do not count the store
    counts = [(streams, "stream"), (groups, "group")]
    more = [counted(count, f"more {what}") for count, what in counts if count]
    return rows, f"\u2026 and {', '.join(more)}" if more else ""


def _head(view: View, width: int | None) -> list[Text]:
    """Return two lines: one with the server and the time, one with totals."""
    from rich.text import Text

    server, found = view.server, view.snapshot
    name = f"{product_name(server)} at {sanitize(view.address)}"
    clock = f"{view.at:%H:%M:%S}"
    room = None if width is None else max(width - len(clock) - _GAP, 1)
    title = Text.assemble(_fit(Cell(name, "bold"), room, pad=True), " " * _GAP, clock)
    parts: list[Cell] = []
    if server.role == "replica":
        parts.append(Cell("replica", "yellow"))
    if server.nodes:
        parts.append(Cell(counted(len(server.nodes), "node")))
        silent = [node for node in server.nodes if node.role is None]
        if silent:
            parts.append(Cell(f"{len(silent):,} unreachable", "red"))
    if server.memory is not None:
        parts.append(_memory(server.memory, server.memory_max))
    if server.clients is not None:
        parts.append(Cell(counted(server.clients, "client")))
    groups = sum(len(seen.stream.groups) for seen in found.streams.values())
    parts += [Cell(counted(len(found.streams), "stream")), Cell(counted(groups, "group"))]
    if found.left_off:
        parts.append(Cell(f"{found.left_off:,} not shown", "yellow"))
    if found.unreadable:
        parts.append(Cell(f"{counted(len(found.unreadable), 'stream')} unreadable", "red"))
    if server.uptime is not None:
        parts.append(Cell(f"up {show_span(server.uptime)}"))
    totals = Text(" \u00b7 ", "dim").join(Text(*part) for part in parts)
    return [_fit_text(title, width), _fit_text(totals, width)]


def _memory(used: int, most: int | None) -> Cell:
    if most is None:
        return Cell(f"memory {show_bytes(used)}")
    part = used / most
    style = "bold red" if part > _TOO_MUCH else "yellow" if part > _MUCH else ""
    return Cell(f"memory {show_bytes(used)} of {show_bytes(most)}", style)


def _table(rows: list[Row], width: int | None) -> list[Text]:
    from rich.text import Text

    if not rows:
        return []
    chosen = [i for i, column in enumerate(_COLUMNS) if width is None or width >= column.needs]
    widths = _widths(rows, chosen, width)
    lines: list[Text] = []
    for row in (Row(*(Cell(column.title, "dim") for column in _COLUMNS)), *rows):
        cells = [_fit(row[i], widths[i], pad=True, right=_COLUMNS[i].right) for i in chosen]
        line = Text(" " * _GAP).join(cells)
        line.rstrip()
        lines.append(_fit_text(line, width))
    return lines


def _widths(rows: list[Row], chosen: list[int], width: int | None) -> dict[int, int]:
    """Return the column widths. Names and owners share the space left by numbers."""
    from rich.cells import cell_len

    widths = {i: max(_COLUMNS[i].width, *(cell_len(row[i].text) for row in rows)) for i in chosen}
    if width is None:
        return widths
    fixed = sum(widths[i] for i in chosen if i not in (_NAME, _OWNER))
    room = max(width - fixed - _GAP * (len(chosen) - 1), 2)
    if _OWNER not in widths:
        widths[_NAME] = room
    elif widths[_NAME] + widths[_OWNER] > room:
        half = room // 2
        widths[_NAME] = min(widths[_NAME], max(half, room - widths[_OWNER]))
        widths[_OWNER] = room - widths[_NAME]
    return widths


def _fit(cell: Cell, width: int | None, *, pad: bool = False, right: bool = False) -> Text:
    from rich.text import Text

    text = _fit_text(Text(*cell), width)
    if pad and width is not None:
        missing = width - text.cell_len
        text.pad_left(missing) if right else text.pad_right(missing)
    return text


def _fit_text(text: Text, width: int | None) -> Text:
    text.no_wrap = True
    if width is not None:
        text.truncate(max(width, 1), overflow="ellipsis")
    return text
