"""``meteor tail``: prints the records of a stream and follows it."""

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
from meteor_cli.args.positions import Position, Span, parse_span
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

#: Number of existing records to print by default.
LAST = 10
_BATCH = 10_000
#: Approximate number of bytes to write at a time.
_CHUNK_BYTES = 1024 * 1024
#: Seconds to wait for records before checking that the output still has a reader.
_POLL_S = 1.0
#: Records in the first scan, and the maximum per scan, when searching backwards for matches.
_SCAN, _SCAN_MAX = 10_000, 1_000_000


class CountType(click.IntRange):
    """A number of records. Rejects ``+N``, which means something else in tail(1)."""

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        if isinstance(value, str) and value.startswith("+"):
            self.fail(f"{value!r} is not a count; to start at an offset, use `-o {value}`.", param)
        count: int = super().convert(value, param, context)
        return count


@command(
    example="""\
meteor tail orders                        # the last 10 records, then new ones
meteor tail orders -e --json | jq .value  # all records, then exit
meteor tail orders -o @-1h..-30m -k me    # half an hour of one customer
meteor tail orders -g billing --raw       # read for a group, and confirm""",
    more={"Positions": section(positions), "Formats": section(template)},
)
@options.stream_name
@click.option(
    "-o", "--offset", "span", metavar="POSITION",
    type=options.Parsed("position", parse_span),
    help="Where to start, or a range; see below. Default: the last 10 records; all with -e.",
)  # fmt: skip
@click.option(
    "-n", "--number", cls=options.Option, type=CountType(min=0), metavar="N",
    help="Start with the last N records. With -o or -g: exit after N records.",
)  # fmt: skip
@click.option(
    "-f/-e", "--follow/--no-follow", " /--exit-at-end", default=True,
    help="Wait for new records (the default), or exit at the end of the stream.",
)  # fmt: skip
@click.option(
    "-g", "--group", shell_complete=completion.group, metavar="GROUP",
    help="Read as a member of this group, and confirm records once they are printed.",
)  # fmt: skip
@click.option(
    "-k", "--key", "keys", multiple=True, metavar="KEY",
    help="Only records with this key; repeat for several keys.",
)  # fmt: skip
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME[=VALUE]",
    help="Only records with this header; repeat to require several.",
)  # fmt: skip
@options.json_lines
@options.flag("--raw", help="Print unmodified values.")
@click.option("--format", "form", metavar="FORMAT", help="Print in this format: '%o %T %k %v\\n'.")
@options.flag("-0", "--null", help="With --raw: end values with NUL instead of newline.")
@options.flag("--force", help="Print raw values even to a terminal.")
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
    """Print the records of a stream, and follow it.

    Control characters are escaped, so that records cannot harm the terminal. If records are gone,
    the command reports them on stderr and exits with 1.
    """
    if as_json + raw + (form is not None) > 1:
        raise click.UsageError("Use only one of --json, --raw and --format.")
    if null and not raw:
        raise click.UsageError("-0 needs --raw; in a --format, write \\0.")
    if group and span and (span.is_range or span.start.kind not in ("earliest", "latest")):
        raise click.UsageError(
            "With -g, -o can only be `earliest` or `latest`, and applies to a new group. Move an "
            "existing group with `meteor seek`."
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
            "Raw values can contain control sequences that harm a terminal. Write them to a file "
            "or a pipe, or use --force."
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
    """Return a filter for records with one of the keys and all headers; None matches all."""
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
    """Limits at which to stop; the first one reached applies."""

    #: The offset at which to stop, exclusive.
    stop: int | None = None
    #: The time at which to stop. Once it has passed, ``stop`` replaces it.
    until: datetime | None = None
    #: Number of records left to print.
    number: int | None = None

    def stop_at(self, offset: int) -> None:
        self.stop = offset if self.stop is None else min(self.stop, offset)


class Tailer:
    """Reads a stream and prints its records."""

    def __init__(
        self, session: Session, stream: meteor_py.Stream, render: Render, match: Match | None
    ) -> None:
        self._session = session
        self._stream = stream
        self._render = render
        self._match = match
        self._sink = Sink()
        self._chunk = 1
        self._waiting_since: float | None = None
        self._reported_owner = False
        #: Number of records that were gone before they could be read.
        self.lost = 0

    def read(self, span: Span | None, number: int | None, *, follow: bool) -> None:
        """Read and print records without a group."""
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
        """Read as a member of a group, and confirm the records that were printed."""
        bounds = Bounds(None if follow else self._stream.bounds()[1], number=number)
        initial = "auto" if span is None else span.start.kind
        self._loop(bounds, group=group, initial_offset=initial)

    def _start(self, end: int, number: int | None, *, follow: bool) -> int | str:
        """Return the default start: the last few records, or all with ``--exit-at-end``."""
        if number is None and not follow:
            return "earliest"
        number = LAST if number is None else number
        if self._match is None:
            return self._resolve(Position("-", number))
        return self._last_matching(end, number)

    def _resolve(self, position: Position) -> int | str:
        """Resolve a position to an offset.

        A relative position that reaches the oldest record becomes "earliest". Records that
        the ring drops before we read them then do not count as lost: the user did not ask for them.
        """
        offset = position.resolve(self._stream)
        is_relative = position.kind not in ("", "@")
        return "earliest" if is_relative and offset <= self._stream.bounds()[0] else offset

    def _last_matching(self, end: int, number: int) -> int | str:
        """Scan backwards until ``number`` records match, and return the first one's offset.

        If fewer match, return "earliest".
        """
        start, step, found = end, _SCAN, 0
        while found < number:
            first = self._stream.bounds()[0]
            if start <= first:
                return "earliest"
            start, stop = max(start - step, first), start
            offsets = self._matching(start, stop)
            if found + len(offsets) >= number:
                return offsets[found - number]
            found += len(offsets)
            step = min(step * 2, _SCAN_MAX)
        return end

    def _matching(self, start: int, stop: int) -> list[int]:
        """Return the offsets of matching records in a range."""
        assert self._match is not None
        offsets: list[int] = []
        with self._stream.subscriber(codec="bytes", on_gap="skip") as sub:
            sub.seek(start)
            while sub.position < stop:
                batch = sub.poll(_POLL_S, _BATCH)
                offsets += [record.offset for record in batch if self._match(record)]
        return offsets[: bisect_left(offsets, stop)]

    def _limit(self, bounds: Bounds, stop: Position | None) -> None:
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
                self._check_time(batch, bounds)
            if bounds.stop is not None:  # after a gap, a batch may extend beyond the stop
                batch = batch[: max(bounds.stop - batch.first_offset, 0)]
            if batch:
                self._print(sub, batch, bounds)
                continue
            self._sink.check_reader()
            if sub.config.group is not None and self._is_done_by_others(sub, bounds):
                return

    def _poll(self, sub: meteor_py.Subscriber, bounds: Bounds) -> RecordBatch | None:
        """Poll once; return None after an error that may be temporary."""
        from meteor_py import ConnectionFailed, LeaseLost, OutcomeUnknown

        most = _BATCH
        if bounds.stop is not None:
            most = min(most, bounds.stop - sub.position)
        if bounds.number is not None and self._match is None:
            most = min(most, bounds.number)
        try:
            batch = sub.poll(_POLL_S, max(most, 1))
        except (LeaseLost, OutcomeUnknown):
            _report_lost_lease(sub)
            return None
        except ConnectionFailed:
            now = time.monotonic()
            if self._waiting_since is None:
                self._waiting_since = now
                say("the server is not replying; waiting for it.")
            if now - self._waiting_since >= self._session.timeout:
                raise
            return None
        self._waiting_since = None
        return batch

    def _check_time(self, batch: RecordBatch, bounds: Bounds) -> None:
        """Replace the time limit with an offset once our clock or the server's has reached it."""
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
        """Write in chunks, because escapes can make the text much larger than the records."""
        start = 0
        while start < len(records):
            part = records[start : start + self._chunk]
            data = self._render(part)
            self._sink.write(data)
            start += len(part)
            is_large = len(data) > _CHUNK_BYTES
            self._chunk = max(self._chunk // 2, 1) if is_large else min(self._chunk * 2, _BATCH)

    def _confirm(self, sub: meteor_py.Subscriber, done: int) -> None:
        from meteor_py import LeaseLost

        try:
            sub.confirm(done)
        except LeaseLost:  # for example, because the reader of the pipe was slow
            _report_lost_lease(sub)

    def _is_done_by_others(self, sub: meteor_py.Subscriber, bounds: Bounds) -> bool:
        """Return whether other members have read up to our stop offset. Report the owner once."""
        from meteor_py import ConnectionFailed

        if sub.is_assigned:
            return False
        try:
            groups = {group.name: group for group in self._stream.groups()}
        except ConnectionFailed:
            return False  # the next poll waits for the server, or reports that it is gone
        found = groups.get(sub.config.group or "")
        if found is None:
            return False
        if found.owner not in (None, sub.member) and not self._reported_owner:
            self._reported_owner = True
            say(f"{found.owner} holds the lease of group {found.name!r}; waiting for it.")
        return bounds.stop is not None and found.confirmed >= bounds.stop

    def _note_gap(self, first: int, last: int) -> None:
        self.lost += last - first + 1
        say(
            f"records {first} to {last} of stream {self._stream.name!r} are gone: the ring dropped "
            "them, and no store has them."
        )


def _report_lost_lease(sub: meteor_py.Subscriber) -> None:
    say(
        f"another member has taken over group {sub.config.group!r}, or the group was moved. "
        "The last records may be printed again."
    )
