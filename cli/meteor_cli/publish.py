"""``meteor publish``: records from the command line, or from a pipe."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from meteor_cli.command import command
from meteor_cli.completion import complete_stream
from meteor_cli.lines import read_lines, read_whole
from meteor_cli.output import counted, progress, say
from meteor_cli.session import Session

if TYPE_CHECKING:
    import meteor_py
    from meteor_cli.jsonl import Columns
    from meteor_py import Compression, ManyAck

_MAX_BYTES = 1024 * 1024
Encode = Callable[[bytes], bytes]


@command(
    example="""\
meteor publish orders '{"n": 1}' -k customer-7
tail -F app.log | meteor publish logs
meteor tail orders -e --json | meteor publish copy --jsonl"""
)
@click.argument("stream", shell_complete=complete_stream)
@click.argument("values", nargs=-1, metavar="[VALUE]...")
@click.option("--lines", "source", flag_value="lines", help="Each line of the input; the default.")
@click.option("--jsonl", "source", flag_value="jsonl", help="What `meteor tail --json` writes.")
@click.option("--whole", "source", flag_value="whole", help="The whole input is one record.")
@click.option("-0", "--null", is_flag=True, help="Lines end with NUL, not newline.")
@click.option("-k", "--key", metavar="KEY", help="The key of all records.")
@click.option(
    "-K", "--key-separator", metavar="TEXT", help="In a line, what is before it is the key."
)
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Of all.")
@click.option("--compression", type=click.Choice(["none", "lz4", "zstd"]), help="Of frames.")
@click.option("--acks", type=click.IntRange(min=0), default=0, help="Replicas that must have it.")
@click.option(
    "--max-bytes",
    type=click.IntRange(1, 32 * _MAX_BYTES),
    default=_MAX_BYTES,
    metavar="N",
    help="Of a record, key and headers included: 1 MiB, up to 32 MiB.",
)
@click.option("--create/--no-create", default=True, help="Make the stream if there is none.")
@click.option("--capacity", type=int, metavar="N", help="Of a stream that is made: 10,000 records.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing if all goes well.")
def publish(
    session: Session,
    stream: str,
    values: tuple[str, ...],
    source: str | None,
    null: bool,
    key: str | None,
    key_separator: str | None,
    headers: tuple[str, ...],
    compression: Compression | None,
    acks: int,
    max_bytes: int,
    create: bool,
    capacity: int | None,
    quiet: bool,
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
    with session.connect(writing=True) as m, ExitStack() as stack:
        opened = m.stream(stream, create=create, capacity=capacity)
        intake = Intake(opened.config.codec, key, key_separator, headers)
        if not values:
            _archive(opened, stack)
        pub = stack.enter_context(
            opened.publisher(
                compression=compression, acks=acks, max_record_bytes=max_bytes, codec="bytes"
            )
        )
        tally = Tally(stream)
        if values:
            rows = intake.columns([value.encode(errors="surrogateescape") for value in values])
            tally.settle(_publish(pub, rows))
            if not quiet:
                click.echo("\n".join(str(offset) for span in tally.ranges for offset in span))
            return
        typed = sys.stdin.isatty()
        if typed:
            say("type records, one on each line; Ctrl-D ends.")
        try:
            with progress(f"publishing to {stream}", None, quiet=quiet or typed) as advance:
                for rows in _read(source or "lines", intake, b"\0" if null else b"\n", max_bytes):
                    tally.add(_publish(pub, rows), at_once=typed)
                    advance(tally.count)
            tally.finish()
        finally:
            tally.report(quiet=quiet)
        tally.warn_of_ring(opened)


def _publish(pub: meteor_py.Publisher, rows: Columns) -> ManyAck:
    return pub.publish_many(rows.values, rows.keys, rows.headers, rows.timestamps)


def _archive(stream: meteor_py.Stream, stack: ExitStack) -> None:
    """Let a stream with a store have room for what comes, if the store is within reach."""
    from meteor_py import StoreMismatch, StoreUnavailable

    if stream.config.store is None:
        return
    try:
        archiver = stream.archiver()
    except (StoreMismatch, StoreUnavailable):
        return  # of another machine: so is its archiver
    stack.enter_context(archiver.start())


def _read(source: str, intake: Intake, delimiter: bytes, limit: int) -> Iterator[Columns]:
    """Records from the standard input, many at a time."""
    fd = sys.stdin.fileno()
    if source == "whole":
        yield intake.columns([read_whole(fd, limit)])
        return
    number = 1
    # A line of JSON is longer than the record: escapes, base64, names.
    room = limit if source == "lines" else 8 * limit
    for lines in read_lines(fd, delimiter, room):
        rows = intake.columns(lines, number) if source == "lines" else intake.records(lines, number)
        number += len(lines)
        if rows.values:
            yield rows


class Intake:
    """Makes records of what was read."""

    def __init__(
        self, codec: str, key: str | None, separator: str | None, headers: Sequence[str]
    ) -> None:
        from meteor_cli import jsonl

        self._jsonl = jsonl
        self._codec = codec
        self._key = None if key is None else key.encode(errors="surrogateescape")
        self._separator = separator.encode(errors="surrogateescape") if separator else None
        self._headers = dict(_header(header) for header in headers) or None

    def columns(self, values: list[bytes], number: int = 1) -> Columns:
        """Values, or lines of which the first has this number."""
        keys: list[bytes | None] | None = None
        if self._separator is not None:
            parts = [value.partition(self._separator) for value in values]
            keys = [key if found else None for key, found, _ in parts]
            values = [value if found else key for key, found, value in parts]
        elif self._key is not None:
            keys = [self._key] * len(values)
        headers: list[dict[str, bytes] | None] | None = None
        if self._headers is not None:
            headers = [self._headers] * len(values)
        return self._jsonl.Columns(self._encoded(values, number), keys, headers, None)

    def records(self, lines: list[bytes], number: int) -> Columns:
        """Lines of JSON, of which the first has this number."""
        rows = self._jsonl.decode(lines, number)
        if self._codec == "msgpack":
            self._check(rows.values, number)  # bytes as they were read, not JSON
        else:
            self._encoded(rows.values, number)
        return rows

    def _encoded(self, values: list[bytes], number: int) -> list[bytes]:
        if self._codec == "bytes":
            return values
        if self._codec != "msgpack":
            self._check(values, number)
            return values
        import msgspec

        try:
            return [msgspec.msgpack.encode(msgspec.json.decode(value)) for value in values]
        except msgspec.MsgspecError:
            self._check(values, number, "json")
            raise

    def _check(self, values: list[bytes], number: int, codec: str | None = None) -> None:
        """Raise unless readers of the stream will understand all of them."""
        from meteor_py.codec import find_codec

        found = find_codec(codec or self._codec)
        assert found is not None
        for at, value in enumerate(values, number):
            try:
                found.decode(value)
            except Exception as error:
                raise ValueError(
                    f"Record {at} of the input is not {codec or self._codec}, which this stream "
                    f"takes: {error}."
                ) from None


class Tally:
    """Counts what became of the records."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._waiting: deque[ManyAck] = deque()  # bounded by what the publisher has room for
        self._since = time.monotonic()
        self.count = 0
        #: The offsets, of which all but the first and the last few are forgotten.
        self.ranges: list[range] = []

    def add(self, ack: ManyAck, *, at_once: bool) -> None:
        """Note what was published, and what has become of what was before."""
        self._waiting.append(ack)
        while self._waiting and (at_once or self._waiting[0].done()):
            self.settle(self._waiting.popleft())

    def finish(self) -> None:
        """Wait for the rest."""
        while self._waiting:
            self.settle(self._waiting.popleft())

    def settle(self, ack: ManyAck) -> None:
        """Wait until it is known what became of some; raise what went wrong."""
        error = ack.exception()
        for found in ack.ranges:
            self.count += len(found)
            if self.ranges and self.ranges[-1].stop == found.start:
                found = range(self.ranges.pop().start, found.stop)
            self.ranges = [*self.ranges[:1], *self.ranges[1:][-1:], found]
        if error is not None:
            raise error

    def report(self, *, quiet: bool) -> None:
        """Tell how many there were, also if it ended early."""
        early = sys.exc_info()[0] is not None
        for ack in self._waiting:
            if ack.done():
                self.count += sum(map(len, ack.ranges))
        if quiet and not early:
            return
        took_s = max(time.monotonic() - self._since, 1e-6)
        where = ""
        if self.ranges and not early:
            where = f", offsets {self.ranges[0].start} to {self.ranges[-1].stop - 1}"
        say(
            f"{counted(self.count, 'record')} published to stream {self._stream!r}{where}, "
            f"{self.count / took_s:,.0f}/s."
        )

    def warn_of_ring(self, stream: meteor_py.Stream) -> None:
        """Tell if there were more than the stream keeps: that is easily overlooked."""
        capacity = stream.config.capacity
        if self.count > capacity and stream.config.store is None:
            say(
                f"warning: the ring of stream {stream.name!r} keeps {capacity:,} records, so the "
                f"first of these are gone already; `meteor streams configure {stream.name} "
                "--capacity N` makes it larger, and a stream with a --store forgets nothing."
            )


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint="-H")
    return name, value.encode(errors="surrogateescape")
