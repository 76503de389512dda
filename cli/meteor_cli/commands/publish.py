"""``meteor publish``: publishes arguments or standard input."""

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
#: Maximum time to retry a record, as a multiple of ``--timeout``. By default, this is 30 s.
_PATIENCE = 6


@command(
    short_help="Publish records from arguments or a pipe.",
    example="""\
meteor publish orders '{"n": 1}' -k customer-7
tail -F app.log | meteor publish logs
meteor tail orders -e --json | meteor publish copy --jsonl""",
)
@options.stream_name
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("--lines", "source", flag_value="lines", help="Publish each line (the default).")
@click.option("--jsonl", "source", flag_value="jsonl", help="Read the output of `tail --json`.")
@click.option("--whole", "source", flag_value="whole", help="Publish the input as one record.")
@options.flag("-0", "--null", help="Lines end with NUL instead of newline.")
@click.option("-k", "--key", metavar="KEY", help="Key for all records.")
@click.option(
    "-K", "--key-separator", metavar="TEXT", help="Split each line into key and value at TEXT."
)
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=lambda _context, _option, given: parse_headers(given),
    help="Header for all records; can be repeated.",
)
@options.compression
@options.count("--acks", min=0, default=0, help="Wait for N replicas. Default: 0.")
@options.count(
    "--max-bytes",
    max=32 * _MAX_BYTES,
    default=_MAX_BYTES,
    help="Maximum record size, including key and headers. Default: 1 MiB; at most 32 MiB.",
)
@click.option("--create/--no-create", default=True, help="Create the stream if it is missing.")
@options.count("--capacity", help="Capacity of a new stream. Default: 10,000.")
@click.option(
    "--ordering-key",
    type=options.rule,
    metavar="RULE",
    help="Ordering key of a new stream: key or header:NAME.",
)
@options.flag("-q", "--quiet", help="Print nothing on success.")
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
    """Publish values and print their offsets, or publish each line of standard input.

    If the stream has a codec, values must be valid for it. For msgpack, write them as JSON.
    """
    if values and source:
        raise click.UsageError(f"Pass either values or --{source}, not both.")
    if source == "jsonl" and (key is not None or key_separator or headers):
        raise click.UsageError("With --jsonl, keys and headers are in the input: omit -k, -K, -H.")
    if key is not None and key_separator:
        raise click.UsageError("Pass either -k or -K, not both.")
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
        say("type one record per line, and press Ctrl-D to finish.")
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
    finally:  # the publisher is closed, so no outcome can change any more
        tally.report(quiet=quiet)


def _publish(pub: meteor_py.Publisher, rows: Columns) -> ManyAck:
    return pub.publish_many(rows.values, rows.keys, rows.headers, rows.timestamps)


@contextmanager
def _archiving(stream: meteor_py.Stream) -> Iterator[None]:
    """Archive a stream that has a store, so that the input does not fill the stream."""
    from meteor_py import StoreMismatch, StoreUnavailable

    with ExitStack() as stack:
        try:
            if stream.config.store is not None:
                stack.enter_context(stream.archiver().start())
        except (StoreMismatch, StoreUnavailable):
            pass  # this machine cannot use the store, so another machine must run the archiver
        yield


def _read(source: str, parser: RecordParser, delimiter: bytes, limit: int) -> Iterator[Columns]:
    """Yield batches of records from standard input."""
    from meteor_cli.render.jsonl import Unreadable

    fd = sys.stdin.fileno()
    if source == "whole":
        yield parser.columns([read_whole(fd, limit)], 1)
        return
    make = parser.columns if source == "lines" else parser.records
    number = 1
    # In JSON, a record is longer because of escapes, base64 and field names.
    for lines in read_lines(fd, delimiter, limit if source == "lines" else 8 * limit):
        try:
            rows = make(lines, number)
        except Unreadable as error:
            # Publish the lines before the unreadable one, so that the result does not depend on how
            # the input was split into reads.
            if error.index and (rows := make(lines[: error.index], number)).values:
                yield rows
            raise
        number += len(lines)
        if rows.values:
            yield from _cut(rows, limit)


def _cut(rows: Columns, limit: int) -> Iterator[Columns]:
    """Split rows before the first record that is too large.

    The publisher then refuses only the second part, so the result does not depend on how the input
    was split into reads.
    """
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
    """Counts the outcomes of published records."""

    def __init__(self, stream: meteor_py.Stream, patience_s: float) -> None:
        self._stream = stream
        self._patience_s = patience_s
        #: Acks that are not counted yet, each with its number of records. The publisher's memory
        #: limit bounds their number.
        self._waiting: deque[tuple[ManyAck, int]] = deque()
        self._since = time.monotonic()
        self._first: int | None = None
        self._last = -1
        self.count = 0

    def add(self, ack: ManyAck, records: int, *, at_once: bool) -> None:
        """Add a batch, and count the batches that are done; if ``at_once``, wait for all of them.

        Raises the error of a batch that failed.
        """
        self._waiting.append((ack, records))
        while self._waiting and (at_once or self._waiting[0][0].done()):
            self._settle()

    def finish(self) -> None:
        """Wait for all outcomes."""
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        # The ack stays in the queue while we wait, so that report() counts it after Ctrl-C.
        ack = self._waiting[0][0]
        try:
            error = ack.exception(self._patience_s)
        except TimeoutError:
            say("the server is not replying; waiting for it.")
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
        """Count a batch that is still in the queue; return the number of unknown outcomes."""
        from meteor_py import OutcomeUnknown

        before = self.count
        self._count(ack)
        is_known = ack.done() and not isinstance(ack.exception(), OutcomeUnknown)
        return 0 if is_known else records - (self.count - before)

    def report(self, *, quiet: bool) -> None:
        """Print how many records were published; if ``quiet``, only after an error."""
        unknown = sum(self._count_unknown(ack, records) for ack, records in self._waiting)
        if not quiet or sys.exc_info()[0] is not None:
            took_s = max(time.monotonic() - self._since, 1e-6)
            where = "" if self._first is None else f", offsets {self._first} to {self._last}"
            say(
                f"{counted(self.count, 'record')} published to stream {self._stream.name!r}{where}"
                f", {self.count / took_s:,.0f}/s."
            )
        if unknown:
            say(f"the outcome of {counted(unknown, 'more record')} is unknown.")
        name, capacity = self._stream.name, self._stream.config.capacity
        if self.count > capacity and self._stream.config.store is None:
            say(
                f"warning: stream {name!r} keeps only {capacity:,} records, so the first records "
                f"are already gone. Enlarge it with `meteor streams configure {name} --capacity "
                "N`, or create it with a --store to keep everything."
            )
