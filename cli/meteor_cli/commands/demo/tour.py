"""The tour of ``meteor demo``. Each step takes a measurement and prints the code for it."""

from __future__ import annotations

import os
import random
import secrets
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click

import meteor_py as meteor
from meteor_cli.commands.bench import measure
from meteor_cli.commands.demo import crash, peers, spark, takeover
from meteor_cli.render.records import as_text
from meteor_cli.render.terminal import progress
from meteor_cli.render.text import product_name, show_bytes, show_count
from meteor_cli.session import Session
from meteor_py.server import open_embedded

#: Number of records to follow one by one, and number of those to print.
_FOLLOWED, _PRINTED = 500, 3
_SEEKS = 100
_RING = 1_000
_MENU = ("espresso", "flat white", "green tea", "apple pie")

#: Shell commands to try next.
SHELL = {
    "seq 10000 | meteor publish numbers": "create a stream",
    "meteor tail numbers": "print it, and wait for new records",
    "meteor publish numbers hello": "in another terminal",
    "meteor top": "a live table of streams and groups",
    "meteor streams ls": "the streams, once",
}
#: Python code to try next. It waits for more records at the end.
PYTHON = """\
import meteor_py as meteor
stream = meteor.connect().stream("orders")
with stream.publisher() as pub:
    pub.publish(b"hello").result()
with stream.subscriber(group="billing") as sub:
    for record in sub:
        print(record)
        sub.confirm(record)
"""


class Tour:
    def __init__(self, session: Session, records: int, *, spark: bool = True) -> None:
        if session.url and session.url.startswith("fake:"):
            raise click.UsageError("The tour needs several processes, but fake:// serves only one.")
        self._session = session
        self._records = records
        self._with_spark = spark
        self._colour = sys.stdout.isatty()
        #: The server's address; None means a private server, which the tour starts.
        self._url = None if session.url == "embedded://" else session.url
        # A random suffix avoids clashes with other users' names on the server.
        self._suffix = f"-{secrets.token_hex(4)}" if self._url else ""

    def run(self) -> None:
        """Take the tour; leave nothing behind, even if it fails."""
        began = time.perf_counter()
        with self._server() as (m, url):
            with self._stream(m, "orders", capacity=self._records + _FOLLOWED) as stream:
                self._publish(stream)
                self._read(stream)
                self._follow(stream)
                self._seek(stream)
                if self._with_spark:
                    self._spark(stream, url)
            with self._stream(m, "work") as stream:
                self._fail_over(stream, url)
            with self._stream(m, "carts", ordering_key="key") as stream:
                self._share(stream, url)
            with self._group(m, "workers") as group:
                self._coordinate(group, url)
            self._crash()
            with self._stream(m, "ring", capacity=_RING) as stream:
                self._overrun(stream)
            self._archive(m)
        click.echo(f"\nDone in {time.perf_counter() - began:.0f} s. Nothing was left behind.")
        self._suggest()

    # -- the steps -------------------------------------------------------------------------------

    @contextmanager
    def _server(self) -> Iterator[tuple[meteor.Client, str]]:
        start = time.perf_counter()
        with ExitStack() as stack:
            url = self._url
            if not url:
                # The private server deliberately keeps nothing on disk.
                warnings.simplefilter("ignore", meteor.DataSafetyWarning)
                url = stack.enter_context(open_embedded()).url
            m = stack.enter_context(self._session.connect(writing=True, url=url))
            verb = "Connected to" if self._url else "Started a private"
            took = self._figure(f"{(time.perf_counter() - start) * 1000:.0f} ms")
            title = click.style("A tour of meteor_py", bold=True)
            click.echo(f"{title}. Every figure is measured live, on this machine.")
            self._report(f"{verb} {product_name(m.describe())} in {took}")
            self._code(f'>>> m = meteor.connect("{m.address if self._url else "embedded://"}")')
            yield m, url

    def _publish(self, stream: meteor.Stream) -> None:
        with progress("preparing records", self._records) as advance:
            parts = list(self._parts(advance))
        with progress("publishing", self._records) as advance:
            took = measure.publish_many(stream, parts, advance)
        size = sum(len(value) for part in parts for value in part)
        self._check(stream.bounds()[1] == self._records, "every record is in the stream")
        self._report(
            f"Published {self._records:,} records of {size // self._records} bytes in {took:.2f} s:"
            f" {self._rate(self._records, took)}"
        )
        self._code(f'>>> m.stream("{stream.name}").publisher().publish_many(values)')

    def _read(self, stream: meteor.Stream) -> None:
        rates: list[str] = []
        for what, convert in (
            ("bytes", meteor.RecordBatch.values),
            ("Arrow", meteor.RecordBatch.to_arrow),
        ):
            with progress(f"reading as {what}", self._records) as advance:
                seen, took = measure.read(stream, advance, convert=convert)
            self._check(seen == self._records, "every record is read")
            rates.append(f"{self._rate(seen, took)} as {what}")
        self._report(f"Read them all back: {', '.join(rates)}")
        self._code(">>> for batch in stream.read(): batch.to_arrow()")

    def _follow(self, stream: meteor.Stream) -> None:
        orders = [
            (b"table-%d" % random.randrange(1, 10), random.choice(_MENU).encode())
            for _ in range(_FOLLOWED)
        ]
        with progress("following the stream", _FOLLOWED) as advance:
            records, took = measure.follow(stream, orders, advance)
        self._check([(r.key, r.value) for r in records] == orders, "every new record arrives")
        median = f"{measure.percentile(took, 50) * 1000:.2f} ms"
        self._report(
            f"Followed the stream live: records arrived within {self._figure(median)} (median)"
        )
        lines = as_text("bytes", colour=self._colour)(records[-_PRINTED:]).decode()
        for line in lines.splitlines():
            click.echo(f"    {line}")
        self._code(f"$ meteor tail {stream.name} -n {_PRINTED}")

    def _seek(self, stream: meteor.Stream) -> None:
        with stream.subscriber() as sub:
            start = time.perf_counter()
            for _ in range(_SEEKS):
                offset = random.randrange(self._records)
                sub.seek(offset)
                record = sub.poll(max_records=1)
                self._check(record.first_offset == offset, "a seek finds the right record")
            took_ms = (time.perf_counter() - start) / _SEEKS * 1000
        each = self._figure(f"{took_ms:.2f} ms")
        self._report(f"Read {_SEEKS} records at random offsets: {each} each")
        self._code(f">>> sub.seek({offset}); sub.poll()")

    def _spark(self, stream: meteor.Stream, url: str) -> None:
        needed = spark.missing()
        if needed:
            self._code(f"(Spark can read streams as well. It needs {needed}.)")
            return
        rows = stream.bounds()[1]
        with progress("starting Spark", None):
            try:
                outcome = spark.read(url, stream.name)
            except RuntimeError as error:
                raise click.ClickException(f"Spark failed: {error}") from None
        whole = (outcome.rows, outcome.first, outcome.last) == (rows, 0, rows - 1)
        self._check(whole, "Spark sees every record")
        self._report(
            f"Started Spark (first row after {outcome.start_s:.1f} s), and read {rows:,} rows",
            f"in {outcome.read_s:.1f} s: {self._rate(rows, outcome.read_s)}",
        )
        self._code(f'>>> spark.read.format("meteor").option("stream", "{stream.name}").load()')

    def _fail_over(self, stream: meteor.Stream, url: str) -> None:
        outcome = self._take_over("exclusive", stream, url, "killing the reader of a group")
        self._report(
            f"Killed the reader of a group after {outcome.before:,} records; another",
            f"took over {self._aftermath(outcome)}",
        )
        lease_s = takeover.KINDS["exclusive"].lease_s
        self._code(f'>>> stream.subscriber(group="{takeover.GROUP}", lease_ttl={lease_s:g})')

    def _share(self, stream: meteor.Stream, url: str) -> None:
        outcome = self._take_over("shared", stream, url, "killing one of three consumers")
        processes = takeover.KINDS["shared"].processes
        self._report(
            f"Shared {takeover.CARTS} carts among {processes} processes, "
            f"{self._figure('each cart in order')}; killed one,",
            f"and the others took over {self._aftermath(outcome)}",
        )
        self._code(f'>>> stream.shared_subscriber("{takeover.GROUP}")  # ordering_key="key"')

    def _take_over(self, kind: str, stream: meteor.Stream, url: str, what: str) -> takeover.Outcome:
        with progress(what, takeover.RECORDS) as advance:
            outcome = takeover.take_over(kind, stream, url, advance)
        self._check(outcome.lost == 0, "no record is lost when a process is killed")
        self._check(outcome.out_of_order == 0, "each cart is handled in order")
        return outcome

    def _aftermath(self, outcome: takeover.Outcome) -> str:
        pause, lost = f"{outcome.pause_s:.2f} s", f"lost {outcome.lost}"
        return (
            f"after {self._figure(pause)}; {self._figure(lost)} of {takeover.RECORDS:,} records, "
            f"{outcome.twice} redelivered"
        )

    def _coordinate(self, group: meteor.PeerGroup, url: str) -> None:
        with progress("killing the leader of a peer group", peers.STEPS) as advance:
            outcome = peers.coordinate(group, url, advance)
        self._check(outcome.terms[1] > outcome.terms[0], "the next term is higher")
        self._check(outcome.vote.passed, "the remaining members agree")
        self._check(outcome.acted == peers.MEMBERS - 1, "all remaining members act")
        self._report(
            f"Killed the leader of {peers.MEMBERS} peers; the others elected a new one after "
            f"{self._figure(f'{outcome.pause_s:.2f} s')};",
            f"a vote took {self._figure(f'{outcome.vote_s * 1000:.0f} ms')}, then both acted "
            f"within {self._figure(f'{outcome.spread_s * 1000:.2f} ms')} (clocks within "
            f"{outcome.bound_s * 1000:.1f} ms)",
        )
        self._code('>>> with m.peer_group("workers").join().leadership() as term: ...')

    def _crash(self) -> None:
        with progress("killing a server while publishing", crash.RECORDS) as advance:
            outcome = crash.crash(advance)
        if outcome.lost:  # possible if a slow disk had not synced the last second of writes
            self._report(
                "Killed a server while publishing: the slow disk lost acknowledged records;",
                f"the publisher got an error for records {outcome.lost[0]} to {outcome.lost[-1]}",
            )
        else:
            self._check(outcome.complete, "each record is there once, in order")
            self._report(
                "Killed and restarted a server while publishing: the publisher continued after",
                f"{self._figure(f'{outcome.pause_s:.2f} s')}; all {crash.RECORDS:,} records are "
                "there, once and in order",
            )
        self._code('>>> m = meteor.connect("embedded:///directory")  # data is kept on disk')

    def _overrun(self, stream: meteor.Stream) -> None:
        with stream.subscriber() as sub, stream.publisher() as pub:
            for _ in range(5):
                pub.publish_many([b"x"] * _RING).result()
            try:
                sub.poll()
            except meteor.RecordsLost as gap:
                sub.skip_gap()
                batch = sub.poll()
                self._report(
                    f"Overran a ring of {_RING:,}: the reader got RecordsLost for {gap.first} to "
                    f"{gap.last:,},",
                    f"and continued at {batch.first_offset:,}",
                )
                self._code(">>> sub.poll()  # except meteor.RecordsLost: sub.skip_gap()")
                return
        self._check(False, "a reader that is too slow gets an error")

    def _archive(self, m: meteor.Client) -> None:
        ring = max(self._records // 100, 1)
        with (
            tempfile.TemporaryDirectory(prefix="meteor-demo-") as folder,
            self._stream(m, "trades", capacity=ring, store=folder) as stream,
        ):
            start = time.perf_counter()
            with progress("archiving", self._records) as advance, stream.publisher() as pub:
                for part in self._parts(advance):
                    pub.publish_many(part).result()
                stream.store.flush()
            wrote_s = time.perf_counter() - start
            with progress("reading history", self._records) as advance:
                seen, took = measure.read(stream, advance, convert=meteor.RecordBatch.to_arrow)
            self._check(seen == self._records, "every archived record is read")
            self._check(not stream.store.verify(), "all files are intact")
            files = stream.store.files()
            size = show_bytes(sum(os.path.getsize(file) for file in files))
            kept = stream.describe().length
        self._report(
            f"Archived {self._records:,} records through a ring of {kept:,} to {len(files)} "
            "Parquet files",
            f"({size}) in {wrote_s:.1f} s, and read them back: {self._rate(seen, took)}",
        )
        self._code(f'>>> m.stream("trades", capacity={ring:_}, store="data/meteor")  # or s3://')

    # -- helpers ---------------------------------------------------------------------------------

    def _parts(self, advance: measure.Advance) -> Iterator[list[bytes]]:
        """Yield all records in lists; each record has a hundred bytes."""
        for first in range(0, self._records, measure.CALL):
            last = min(first + measure.CALL, self._records)
            numbers = range(first, last)
            yield [b"order %010d: %82s" % (n, _MENU[n % len(_MENU)].encode()) for n in numbers]
            advance(last)

    @contextmanager
    def _stream(self, m: meteor.Client, name: str, **settings: Any) -> Iterator[meteor.Stream]:
        """Create a stream and delete it afterwards."""
        stream = m.stream(name + self._suffix, create=True, **settings)
        try:
            yield stream
        finally:
            stream.delete(history="store" in settings)

    @contextmanager
    def _group(self, m: meteor.Client, name: str) -> Iterator[meteor.PeerGroup]:
        """Create a peer group and delete it afterwards."""
        group = m.peer_group(name + self._suffix, ttl=peers.TTL_S)
        try:
            yield group
        finally:
            group.delete(force=True)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise click.ClickException(f"The tour stopped, because this check failed: {what}.")

    def _report(self, *lines: str) -> None:
        click.echo(f"{click.style('✓', fg='green')} " + "\n  ".join(lines))

    def _code(self, text: str) -> None:
        click.echo(click.style(f"    {text}", dim=True))

    def _figure(self, text: str) -> str:
        return click.style(text, bold=True)

    def _rate(self, records: int, took_s: float) -> str:
        return self._figure(f"{show_count(round(records / took_s))} records/s")

    def _suggest(self) -> None:
        click.echo(f"{click.style('Next', bold=True)}, try these on your personal server:")
        width = max(map(len, SHELL))
        for line, what in SHELL.items():
            click.echo(f"  {line:<{width}}  {click.style(f'# {what}', dim=True)}")
        click.echo("or in Python:")
        click.echo("".join(f"  {line}\n" for line in PYTHON.splitlines()), nl=False)
