"""``meteor publish``: records from the command line, or from a pipe."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from operator import add
from typing import TYPE_CHECKING, Any

import click

from meteor_cli.args import options
from meteor_cli.args.input import RecordParser, parse_headers, read_lines, read_whole, to_bytes
from meteor_cli.command import command
from meteor_cli.render.terminal import progress
from meteor_cli.render.text import counted, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    import meteor_py
    from meteor_cli.render.jsonl import Columns
    from meteor_py import ManyAck

_MAX_BYTES = 1024 * 1024
#: How many times as long as for an answer a record may take, with repeats: 30 s.
_PATIENCE = 6


@command(
    short_help="Publish records, from arguments or a pipe.",
    example="""\
meteor publish orders '{"n": 1}' -k customer-7
tail -F app.log | meteor publish logs
meteor tail orders -e --json | meteor publish copy --jsonl""",
)
@options.stream_name
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("--lines", "source", flag_value="lines", help="Each line of the input; the default.")
@click.option("--jsonl", "source", flag_value="jsonl", help="What `meteor tail --json` writes.")
@click.option("--whole", "source", flag_value="whole", help="The whole input is one record.")
@options.flag("-0", "--null", help="Lines end with NUL, not newline.")
@click.option("-k", "--key", metavar="KEY", help="The key of all records.")
@click.option(
    "-K", "--key-separator", metavar="TEXT", help="In a line, what is before it is the key."
)
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda _context, _option, given: parse_headers(given),
    help="A header of all records.",
)
@options.compression
@options.count("--acks", min=0, default=0, help="Replicas that must have it.")
@options.count(
    "--max-bytes",
    max=32 * _MAX_BYTES,
    default=_MAX_BYTES,
    help="Of a record, key and headers included: 1 MiB, up to 32 MiB.",
)
@click.option("--create/--no-create", default=True, help="Make the stream if there is none.")
@options.count("--capacity", help="Of a stream that is made: 10,000 records.")
@click.option(
    "--ordering-key",
    type=options.rule,
    metavar="RULE",
    help="Of a stream that is made: key or header:NAME.",
)
@options.flag("-q", "--quiet", help="Say nothing if all goes well.")
def publish(
    session: Session,
    stream: str,
    values: tuple[str, ...],
    source: str | None,
    null: bool,
    key: str | None,
    key_separator: str | None,
    headers: dict[str, bytes] | None,
    max_bytes: int,
    create: bool,
    capacity: int | None,
    ordering_key: str | None,
    quiet: bool,
    **settings: Any,
) -> None:
    """Publish records: the values given, or else the standard input, line by line as it comes.

    Of values the offsets are printed. A stream with a codec takes only what that can read; for
    msgpack, values and lines are JSON.
    """
    if values and source:
        raise click.UsageError("The records are either values or the input, not both.")
    if source == "jsonl" and (key is not None or key_separator or headers):
        raise click.UsageError("With --jsonl, keys and headers are in the input.")
    if key is not None and key_separator:
        raise click.UsageError("The key is either -k for all, or before -K in each line.")
    with session.connect(writing=True) as m:
        opened = m.stream(stream, create=create, capacity=capacity, ordering_key=ordering_key)
        parser = RecordParser(opened.config.codec, key, key_separator, headers)
        settings |= {"codec": "bytes", "max_record_bytes": max_bytes}
        settings["delivery_timeout"] = _PATIENCE * session.timeout
        if values:
            rows = parser.columns([to_bytes(value) for value in values], 1)
            with opened.publisher(**settings) as pub:
                ack = _publish(pub, rows)
                ack.result()
            if not quiet:
                click.echo("\n".join(str(offset) for span in ack.ranges for offset in span))
        else:
            parts = _read(source or "lines", parser, b"\0" if null else b"\n", max_bytes)
            _publish_input(opened, parts, session.timeout, quiet=quiet, **settings)


def _publish_input(
    stream: meteor_py.Stream,
    parts: Iterator[Columns],
    patience_s: float,
    *,
    quiet: bool,
    **settings: Any,
) -> None:
    typed = sys.stdin.isatty()
    if typed:
        say("type records, one on each line; Ctrl-D ends.")
    tally = Tally(stream, patience_s)
    try:
        with (
            _archiving(stream),
            stream.publisher(**settings) as pub,
            progress(f"publishing to {stream.name}", None, quiet=quiet or typed) as advance,
        ):
            for rows in parts:
                tally.add(_publish(pub, rows), len(rows.values), at_once=typed)
                advance(tally.count)
            tally.finish()
    finally:  # the publisher is closed: what became of each record is known
        tally.report(quiet=quiet)


def _publish(pub: meteor_py.Publisher, rows: Columns) -> ManyAck:
    return pub.publish_many(rows.values, rows.keys, rows.headers, rows.timestamps)


@contextmanager
def _archiving(stream: meteor_py.Stream) -> Iterator[None]:
    """Let a stream with a store have room for what comes, if the store is within reach."""
    from meteor_py import StoreMismatch, StoreUnavailable

    with ExitStack() as stack:
        try:
            if stream.config.store is not None:
                stack.enter_context(stream.archiver().start())
        except (StoreMismatch, StoreUnavailable):
            pass  # of another machine: so is its archiver
        yield


def _read(source: str, parser: RecordParser, delimiter: bytes, limit: int) -> Iterator[Columns]:
    """Records from the standard input, many at a time."""
    from meteor_cli.render.jsonl import Unreadable

    fd = sys.stdin.fileno()
    if source == "whole":
        yield parser.columns([read_whole(fd, limit)], 1)
        return
    make = parser.columns if source == "lines" else parser.records
    number = 1
    # A line of JSON is longer than the record: escapes, base64, names.
    for lines in read_lines(fd, delimiter, limit if source == "lines" else 8 * limit):
        try:
            rows = make(lines, number)
        except Unreadable as error:  # so that it does not depend on how the input was cut
            if error.index and (rows := make(lines[: error.index], number)).values:
                yield rows
            raise
        number += len(lines)
        if rows.values:
            yield from _cut(rows, limit)


def _cut(rows: Columns, limit: int) -> Iterator[Columns]:
    """Apart what comes before a record that is too large: it is published, however the input was
    cut, and the publisher refuses the rest."""
    from meteor_py.publish.validation import headers_size

    sizes = list(map(len, rows.values))
    if rows.keys is not None:
        sizes = [size + len(key or b"") for size, key in zip(sizes, rows.keys, strict=True)]
    if rows.headers is not None:
        extra = [headers_size(headers or {}) for headers in rows.headers]
        sizes = list(map(add, sizes, extra))
    index = next((index for index, size in enumerate(sizes) if size > limit), 0)
    if index:
        yield rows.part(0, index)
    yield rows.part(index, len(sizes)) if index else rows


class Tally:
    """Counts what became of the records."""

    def __init__(self, stream: meteor_py.Stream, patience_s: float) -> None:
        self._stream = stream
        self._patience_s = patience_s
        #: Each with its number of records; bounded by what the publisher has room for.
        self._waiting: deque[tuple[ManyAck, int]] = deque()
        self._since = time.monotonic()
        self._first: int | None = None
        self._last = -1
        self.count = 0

    def add(self, ack: ManyAck, records: int, *, at_once: bool) -> None:
        """Note what was published, and what has become of what was before; raise what failed."""
        self._waiting.append((ack, records))
        while self._waiting and (at_once or self._waiting[0][0].done()):
            self._settle()

    def finish(self) -> None:
        """Wait for the rest."""
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        # Ctrl-C may come while it waits: it is not taken out yet.
        ack = self._waiting[0][0]
        try:
            error = ack.exception(self._patience_s)
        except TimeoutError:
            say("the server does not answer; waiting for it.")
            error = ack.exception()
        self._count(self._waiting.popleft()[0])
        if error is not None:
            raise error

    def _count(self, ack: ManyAck) -> None:
        for span in ack.ranges:
            self.count += len(span)
            self._first = span.start if self._first is None else self._first
            self._last = span.stop - 1

    def _count_unknown(self, ack: ManyAck, records: int) -> int:
        """Count what nobody waited for any more; how many have an outcome that is not known."""
        from meteor_py import OutcomeUnknown

        before = self.count
        self._count(ack)
        is_known = ack.done() and not isinstance(ack.exception(), OutcomeUnknown)
        return 0 if is_known else records - (self.count - before)

    def report(self, *, quiet: bool) -> None:
        """Tell how many there were, also if it ended early."""
        unknown = sum(self._count_unknown(ack, records) for ack, records in self._waiting)
        if not quiet or sys.exc_info()[0] is not None:
            took_s = max(time.monotonic() - self._since, 1e-6)
            where = "" if self._first is None else f", offsets {self._first} to {self._last}"
            say(
                f"{counted(self.count, 'record')} published to stream {self._stream.name!r}{where}"
                f", {self.count / took_s:,.0f}/s."
            )
        if unknown:
            say(f"of {counted(unknown, 'more record')} it is not known whether they arrived.")
        capacity = self._stream.config.capacity
        if self.count > capacity and self._stream.config.store is None:
            say(
                f"warning: the ring of stream {self._stream.name!r} keeps {capacity:,} records, so "
                "the first of these are gone already; `meteor streams configure "
                f"{self._stream.name} --capacity N` makes it larger, and a stream with a --store "
                "forgets nothing."
            )
