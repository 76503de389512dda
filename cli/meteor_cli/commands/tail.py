"""``meteor tail``: print the records of a stream, and go on as they come."""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import completion, options, positions
from meteor_cli.args.input import to_bytes
from meteor_cli.args.positions import Place, Span, parse_span
from meteor_cli.command import command, section
from meteor_cli.render import records as rendering
from meteor_cli.render import template
from meteor_cli.render.records import Render
from meteor_cli.render.template import Template
from meteor_cli.render.terminal import Refused, Sink
from meteor_cli.render.text import say
from meteor_cli.session import Session

if TYPE_CHECKING:
    import meteor_py
    from meteor_py import Record, RecordBatch

Match = Callable[["Record"], bool]

#: Records shown of those that are there already, if nothing else is asked for.
LAST = 10
_BATCH = 10_000
#: Bytes to write at a time, roughly.
_PORTION_BYTES = 1024 * 1024
#: Seconds to wait for records before looking whether anybody still reads what is written.
_POLL_S = 1.0
#: Records looked at first when the last few that match are searched for, from the end.
_LOOK_BACK = 10_000
_LOOK_BACK_MAX = 1_000_000


class CountType(click.IntRange):
    """A number of records; ``+N`` means something else in tail(1)."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, str) and value.startswith("+"):
            self.fail(f"{value!r} is no number of records; `-o {value}` starts there.", param)
        count: int = super().convert(value, param, context)
        return count


@command(
    example="""\
meteor tail orders                        # the last 10 records, then new ones
meteor tail orders -e --json | jq .value  # all there are
meteor tail orders -o @-1h..-30m -k me    # half an hour of one customer
meteor tail orders -g billing --raw       # for a group, confirming""",
    more={"Positions": section(positions), "Formats": section(template)},
)
@options.stream_name
@click.option(
    "-o",
    "--offset",
    "span",
    type=options.Parsed("position", parse_span),
    metavar="POSITION",
    help="Where to start, or from where to where: earliest, latest, N, +N (behind earliest), -N "
    "(before latest), @TIME, or two with .. between. Default: the last 10, with -e all.",
)
@click.option(
    "-n",
    "--number",
    type=CountType(min=0),
    metavar="N",
    help="With -o or -g: end after N records. Else: begin with the last N.",
)
@click.option(
    "-f/-e",
    "--follow/--no-follow",
    " /--exit-at-end",
    default=True,
    help="Go on as records come, which is the default; or end at the end of the stream.",
)
@click.option(
    "-g",
    "--group",
    shell_complete=completion.group,
    metavar="GROUP",
    help="Read as a member of this group, and confirm what was printed.",
)
@click.option("-k", "--key", "keys", multiple=True, help="Only records with this key, or these.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME[=VALUE]",
    help="Only records with this header; with all, if repeated.",
)  # fmt: skip
@options.json_lines
@options.flag("--raw", help="The values as they are.")
@click.option("--format", "form", metavar="FORMAT", help="As this says, '%o %T %k %v\\n'.")
@options.flag("-0", "--null", help="With --raw: NUL behind each value, no newline.")
@options.flag("--force", help="With --raw: even to a terminal.")
def tail(
    session: Session,
    stream: str,
    span: Span | None,
    number: int | None,
    follow: bool,
    group: str | None,
    keys: tuple[str, ...],
    headers: tuple[str, ...],
    as_json: bool,
    raw: bool,
    form: str | None,
    null: bool,
    force: bool,
) -> None:
    """Print the records of a stream, and go on as they come.

    Whatever is in a record, a terminal is not harmed by it: control characters are escaped. Records
    that are gone are named on stderr, and the exit code is then 1.
    """
    if as_json + raw + (form is not None) > 1:
        raise click.UsageError("Say only one of --json, --raw and --format.")
    if null and not raw:
        raise click.UsageError("-0 goes with --raw; in a --format, \\0 is a NUL.")
    if group and span and (span.is_range or span.start.kind not in ("earliest", "latest")):
        raise click.UsageError(
            "A group goes on where it is, and only a new one can be told to start at `earliest` or "
            "`latest`; move it with `meteor seek`."
        )
    with session.stream(stream) as opened:
        render = _renderer(opened, form, as_json=as_json, raw=raw, null=null, force=force)
        tailer = Tailer(session, opened, render, matching(keys, headers))
        if group:
            tailer.read_for(group, span, number, follow=follow)
        else:
            tailer.read(span, number, follow=follow)
    if tailer.lost:
        raise click.exceptions.Exit(1)


def _renderer(
    stream: meteor_py.Stream, form: str | None, *, as_json: bool, raw: bool, null: bool, force: bool
) -> Render:
    terminal = sys.stdout.isatty()
    parsed = None
    if form is not None:
        try:
            parsed = Template(form, stream.name)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--format") from None
    if terminal and not force and (raw or (parsed and parsed.raw)):
        raise Refused(
            "Raw values can do anything to a terminal; send them to a file or a pipe, or say "
            "--force."
        )
    if parsed:
        return rendering.as_template(parsed)
    if as_json:
        return rendering.as_json(stream.name)
    if raw:
        return rendering.as_raw(b"\0" if null else b"\n")
    colour = terminal and not os.environ.get("NO_COLOR")
    return rendering.as_text(stream.config.codec, colour=colour)


def matching(keys: Sequence[str], headers: Sequence[str]) -> Match | None:
    """Whether a record has one of the keys and all of the headers; None if all records do."""
    if not keys and not headers:
        return None
    wanted_keys = set(map(to_bytes, keys))
    wanted_headers = [_header(header) for header in headers]

    def match(record: Record) -> bool:
        if wanted_keys and record.key not in wanted_keys:
            return False
        found = record.headers or {}
        return all(
            name in found and (value is None or found[name] == value)
            for name, value in wanted_headers
        )

    return match


def _header(text: str) -> tuple[str, bytes | None]:
    name, equals, value = text.partition("=")
    return name, to_bytes(value) if equals else None


@dataclass
class Bounds:
    """Where to end: whichever comes first."""

    #: The offset, exclusive.
    stop: int | None = None
    #: The time, if it had not come yet when it was looked at.
    until: datetime | None = None
    #: Records left to print.
    number: int | None = None

    def stop_at(self, offset: int) -> None:
        self.stop = offset if self.stop is None else min(self.stop, offset)


class Tailer:
    """Reads a stream and writes what it reads."""

    def __init__(
        self, session: Session, stream: meteor_py.Stream, render: Render, match: Match | None
    ) -> None:
        self._session = session
        self._stream = stream
        self._render = render
        self._match = match
        self._sink = Sink()
        self._portion = 1
        self._waiting_since: float | None = None
        self._told_owner = False
        #: Records that were gone.
        self.lost = 0

    def read(self, span: Span | None, number: int | None, *, follow: bool) -> None:
        """Read from anywhere, leaving no trace."""
        end = self._stream.bounds()[1]
        bounds = Bounds(stop=None if follow else end)
        if span is None:
            start = self._start(end, number, follow=follow)
        else:
            bounds.number = number
            start = self._resolve(span.start)
            self._limit(bounds, span.stop)
        self._loop(bounds, start)

    def read_for(self, group: str, span: Span | None, number: int | None, *, follow: bool) -> None:
        """Read as a member of a group; what was written is confirmed."""
        bounds = Bounds(None if follow else self._stream.bounds()[1], number=number)
        initial = "auto" if span is None else span.start.kind
        self._loop(bounds, group=group, initial_offset=initial)

    def _start(self, end: int, number: int | None, *, follow: bool) -> int | str:
        """Where to start if nobody said: with the last few, or with all if it ends there."""
        if number is None and not follow:
            return "earliest"
        number = LAST if number is None else number
        if self._match is None:
            return self._resolve(Place("-", number))
        return self._last_matching(end, number)

    def _resolve(self, place: Place) -> int | str:
        """Where a position is now. One that leads to the first record there is goes with it: what
        the ring drops before it is read was not asked for by anybody."""
        offset = place.resolve(self._stream)
        is_counted = place.kind not in ("", "@")
        return "earliest" if is_counted and offset <= self._stream.bounds()[0] else offset

    def _last_matching(self, end: int, number: int) -> int | str:
        """The offset from which on so many records match, found from the end backwards."""
        start, step, found = end, _LOOK_BACK, 0
        while found < number:
            first = self._stream.bounds()[0]
            if start <= first:
                return "earliest"
            start, stop = max(start - step, first), start
            offsets = self._matching(start, stop)
            if found + len(offsets) >= number:
                return offsets[found - number]
            found += len(offsets)
            step = min(step * 2, _LOOK_BACK_MAX)
        return end

    def _matching(self, start: int, stop: int) -> list[int]:
        """The offsets of the records in a range that match; those that are gone do not."""
        assert self._match is not None
        offsets: list[int] = []
        with self._stream.subscriber(codec="bytes", on_gap="skip") as sub:
            sub.seek(start)
            while sub.position < stop:
                batch = sub.poll(_POLL_S, _BATCH)
                offsets += [record.offset for record in batch if self._match(record)]
        return offsets[: bisect_left(offsets, stop)]

    def _limit(self, bounds: Bounds, stop: Place | None) -> None:
        if stop is None:
            return
        if stop.time is not None and stop.time > datetime.now(stop.time.tzinfo):
            bounds.until = stop.time
            return
        bounds.stop_at(stop.resolve(self._stream))

    def _loop(self, bounds: Bounds, start: int | str | None = None, **settings: Any) -> None:
        with self._stream.subscriber(
            codec="bytes", on_gap="skip", on_gap_skipped=self._note_gap, **settings
        ) as sub:
            if start is not None:
                sub.seek(start)
            self._follow(sub, bounds)

    def _follow(self, sub: meteor_py.Subscriber, bounds: Bounds) -> None:
        while bounds.number != 0 and not (bounds.stop is not None and sub.position >= bounds.stop):
            batch = self._poll(sub, bounds)
            if batch is None:
                continue
            if bounds.until is not None:
                self._look_at_clock(batch, bounds)
            if bounds.stop is not None:  # behind a gap there may be more than was asked for
                batch = batch[: max(bounds.stop - batch.first_offset, 0)]
            if batch:
                self._print(sub, batch, bounds)
                continue
            self._sink.check_reader()
            if sub.config.group is not None and self._is_done_by_others(sub, bounds):
                return

    def _poll(self, sub: meteor_py.Subscriber, bounds: Bounds) -> RecordBatch | None:
        """Records, perhaps none; None if that failed and may succeed yet."""
        from meteor_py import ConnectionFailed, LeaseLost

        most = _BATCH
        if bounds.stop is not None:
            most = min(most, bounds.stop - sub.position)
        if bounds.number is not None and self._match is None:
            most = min(most, bounds.number)
        try:
            batch = sub.poll(_POLL_S, max(most, 1))
        except LeaseLost:
            _tell_lease_lost(sub)
            return None
        except ConnectionFailed:
            now = time.monotonic()
            if self._waiting_since is None:
                self._waiting_since = now
                say("the server does not answer; waiting for it.")
            if now - self._waiting_since >= self._session.timeout:
                raise
            return None
        self._waiting_since = None
        return batch

    def _look_at_clock(self, batch: RecordBatch, bounds: Bounds) -> None:
        """Once the time at which to end has come, by our clock or the server's, find its offset."""
        assert bounds.until is not None
        until_ms = int(bounds.until.timestamp() * 1000)
        if time.time() * 1000 >= until_ms or (batch and batch[-1].appended >= until_ms):
            bounds.stop_at(self._stream.offset_at(bounds.until))
            bounds.until = None

    def _print(self, sub: meteor_py.Subscriber, batch: RecordBatch, bounds: Bounds) -> None:
        records: RecordBatch | list[Record] = batch
        done = batch.last_offset
        if self._match is not None:
            records = [record for record in batch if self._match(record)]
            if bounds.number is not None and len(records) >= bounds.number:
                records = records[: bounds.number]
                done = records[-1].offset
        self._write(records)
        if bounds.number is not None:
            bounds.number -= len(records)
        if sub.config.group is not None:
            self._confirm(sub, done)

    def _write(self, records: RecordBatch | list[Record]) -> None:
        """In portions: as text, with escapes, records may be many times as large."""
        start = 0
        while start < len(records):
            part = records[start : start + self._portion]
            data = self._render(part)
            self._sink.write(data)
            start += len(part)
            if len(data) > _PORTION_BYTES:
                self._portion = max(self._portion // 2, 1)
            else:
                self._portion = min(self._portion * 2, _BATCH)

    def _confirm(self, sub: meteor_py.Subscriber, done: int) -> None:
        from meteor_py import LeaseLost

        try:
            sub.confirm(done)
        except LeaseLost:  # while it was written: whoever reads the pipe took his time
            _tell_lease_lost(sub)

    def _is_done_by_others(self, sub: meteor_py.Subscriber, bounds: Bounds) -> bool:
        """Tell once for whom we wait; whether others have read up to where we would end."""
        from meteor_py import ConnectionFailed

        if sub.is_assigned:
            return False
        try:
            groups = {group.name: group for group in self._stream.groups()}
        except ConnectionFailed:
            return False  # the next poll meets the same, and has patience
        found = groups.get(sub.config.group or "")
        if found is None:
            return False
        if found.owner not in (None, sub.member) and not self._told_owner:
            self._told_owner = True
            say(f"{found.owner} reads for group {found.name!r}; waiting for it to end.")
        return bounds.stop is not None and found.confirmed >= bounds.stop

    def _note_gap(self, first: int, last: int) -> None:
        self.lost += last - first + 1
        say(
            f"records {first} to {last} of stream {self._stream.name!r} are gone: the ring has "
            "dropped them, and no store has them."
        )


def _tell_lease_lost(sub: meteor_py.Subscriber) -> None:
    say(
        f"another member has taken over group {sub.config.group!r}, or it was moved; records that "
        "were printed last may be read again."
    )
