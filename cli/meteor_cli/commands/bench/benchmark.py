"""``Benchmark``: the measurements that ``meteor bench`` takes one after another."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat

import click
import msgspec

import meteor_py as meteor
from meteor_cli.commands.bench import measure
from meteor_cli.render.terminal import progress
from meteor_cli.render.text import print_table, product_name, say
from meteor_cli.session import Session

#: Maximum size, in bytes, of the records in the ring, and of the values prepared in advance.
_KEPT_MAX_BYTES = 256_000_000
_MADE_MAX_BYTES = 16_000_000
#: Maximum number of records whose latency is measured.
_LATENCIES = 2_000
#: The measurements, by their names in ``--json``.
_NAMES = {
    "publish_many": "publish_many with lists",
    "read_bytes": "read as bytes",
    "read_arrow": "read as Arrow",
    "read_group": "read in a group",
    "publish": "publish in a loop",
    "latency": "latency of one record",
}

_READINGS: dict[str, Callable[[meteor.Stream, measure.Advance], tuple[int, float]]] = {
    "read_bytes": partial(measure.read, convert=meteor.RecordBatch.values),
    "read_arrow": partial(measure.read, convert=meteor.RecordBatch.to_arrow),
    "read_group": partial(measure.read_in_group, group="bench"),
}


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one measurement, and one line of ``--json`` output."""

    #: One of ``_NAMES``.
    what: str
    server: str
    records: int
    size: int
    seconds: float
    records_per_s: float | None = None
    megabytes_per_s: float | None = None
    #: Percentiles of the milliseconds from publishing a record to reading it.
    p50_ms: float | None = None
    p99_ms: float | None = None


class Benchmark:
    def __init__(self, session: Session, records: int, size: int) -> None:
        self._session = session
        self._records = records
        self._size = size
        # Prepare and reuse values, so that the measured time does not include making them.
        made = max(min(records, measure.CALL, _MADE_MAX_BYTES // size), 1)
        self._values = [random.randbytes(size) for _ in range(made)]
        self._server = ""

    def run(self, *, as_json: bool) -> None:
        """Measure everything; print a table at the end, or JSON after each measurement."""
        results: list[Result] = []
        with self._connect() as m:
            say(f"{self._records:,} records of {self._size:,} bytes on {self._server}:")
            for result in self._measure(m):
                results.append(result)
                if as_json:
                    click.echo(msgspec.json.encode(result))
        if not as_json:
            headings = " | records# | records/s# | MB/s# | p50 ms# | p99 ms#"
            print_table(headings, [_row(result) for result in results])

    @contextmanager
    def _connect(self) -> Iterator[meteor.Client]:
        private = not (self._session.url or os.environ.get("METEOR_URL"))
        with self._session.connect(url="embedded://" if private else None) as m:
            name = product_name(m.describe())
            self._server = f"{name}, private" if private else f"{name} at {m.address}"
            yield m

    def _measure(self, m: meteor.Client) -> Iterator[Result]:
        with self._stream(m) as stream:  # warm up: the first calls load modules
            measure.publish_many(stream, [self._values], lambda done: None)
            measure.read(stream, lambda done: None, convert=meteor.RecordBatch.to_arrow)
        with self._stream(m) as stream:
            with progress(_NAMES["publish_many"], self._records) as advance:
                took = measure.publish_many(stream, self._parts(), advance)
            yield self._result("publish_many", self._records, took)
            kept = stream.describe().length
            for what, read in _READINGS.items():
                with progress(_NAMES[what], kept) as advance:
                    seen, took = read(stream, advance)
                yield self._result(what, seen, took)
        with self._stream(m) as stream:
            with progress(_NAMES["publish"], self._records) as advance:
                took = measure.publish_each(stream, self._parts(), advance)
            yield self._result("publish", self._records, took)
        with self._stream(m) as stream:
            yield self._latency(stream)

    def _latency(self, stream: meteor.Stream) -> Result:
        count = min(_LATENCIES, self._records)
        values = [(None, self._values[number % len(self._values)]) for number in range(count)]
        with progress(_NAMES["latency"], count) as advance:
            took = measure.follow(stream, values, advance)[1]
        p50, p99 = (measure.percentile(took, percent) * 1000 for percent in (50, 99))
        return Result("latency", self._server, count, self._size, sum(took), p50_ms=p50, p99_ms=p99)

    def _parts(self) -> Iterator[list[bytes]]:
        whole, rest = divmod(self._records, len(self._values))
        return chain(repeat(self._values, whole), [self._values[:rest]] if rest else [])

    def _result(self, what: str, records: int, took_s: float) -> Result:
        rate = records / took_s
        return Result(
            what, self._server, records, self._size, took_s, rate, rate * self._size / 1e6
        )

    @contextmanager
    def _stream(self, m: meteor.Client) -> Iterator[meteor.Stream]:
        """Create a stream and delete it afterwards."""
        capacity = max(min(self._records, _KEPT_MAX_BYTES // self._size), 1)
        stream = m.stream(f"bench-{secrets.token_hex(8)}", capacity=capacity)
        try:
            yield stream
        except meteor.ConnectionFailed:
            raise  # deleting would only wait for the server again
        except BaseException:
            stream.delete()
            raise
        stream.delete()


def _row(result: Result) -> list[object]:
    def show(value: float | None, form: str = ",.0f") -> str | None:
        return None if value is None else format(value, form)

    rates = [show(result.records_per_s), show(result.megabytes_per_s)]
    latencies = [show(result.p50_ms, ".2f"), show(result.p99_ms, ".2f")]
    return [_NAMES[result.what], result.records, *rates, *latencies]
