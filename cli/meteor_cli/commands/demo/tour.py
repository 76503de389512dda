"""The tour of ``meteor demo``: each step does something, tells what was measured, and how."""

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
from meteor_cli.commands.server import product_name
from meteor_cli.render.records import as_text
from meteor_cli.render.terminal import progress
from meteor_cli.render.text import show_bytes
from meteor_cli.session import Session
from meteor_py.server import open_embedded

#: Records that are followed one by one, and how many of them are shown.
_FOLLOWED, _SHOWN = 500, 3
_SEEKS = 100
_RING = 1_000
_MENU = ("espresso", "flat white", "green tea", "apple pie")

#: What can be tried in a shell, and what it is good for.
SHELL = {
    "seq 10000 | meteor publish numbers": "make a stream",
    "meteor tail numbers": "see it, and new records as they come",
    "meteor publish numbers hello": "from another terminal: they meet",
    "meteor top": "all streams and groups, live",
    "meteor streams ls": "the same, once",
}
#: The same in Python; it waits for more at the end.
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
    """One run of it."""

    def __init__(self, session: Session, records: int, *, spark: bool = True) -> None:
        if session.url and session.url.startswith("fake:"):
            raise click.UsageError("fake:// lives in one process only; the tour needs several.")
        self._session = session
        self._records = records
        self._with_spark = spark
        self._colour = sys.stdout.isatty()
        #: None: a private one, and we have to know its address to tell other processes.
        self._url = None if session.url == "embedded://" else session.url
        # On a server that others use too, names are not to meet theirs.
        self._suffix = f"-{secrets.token_hex(4)}" if self._url else ""

    def run(self) -> None:
        """Take it; leaves nothing behind, whatever happens."""
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
        click.echo(f"\nThat took {time.perf_counter() - began:.0f} s, and nothing is left of it.")
        self._say_what_next()

    # -- the steps -------------------------------------------------------------------------------

    @contextmanager
    def _server(self) -> Iterator[tuple[meteor.Client, str]]:
        start = time.perf_counter()
        with ExitStack() as stack:
            url = self._url
            if not url:
                # It keeps nothing on disk, on purpose.
                warnings.simplefilter("ignore", meteor.DataSafetyWarning)
                url = stack.enter_context(open_embedded()).url
            m = stack.enter_context(self._session.connect(writing=True, url=url))
            name = product_name(m.describe())
            took = self._figure(f"{(time.perf_counter() - start) * 1000:.0f} ms")
            title = click.style("A tour of meteor_py", bold=True)
            click.echo(f"{title}: every figure is measured, here and now.")
            if self._url:
                self._tell(f"Connected to a {name}: {took}")
                self._how(f'>>> m = meteor.connect("{m.address}")')
            else:
                self._tell(f"A private {name} is up: {took}")
                self._how('>>> m = meteor.connect("embedded://")')
            yield m, url

    def _publish(self, stream: meteor.Stream) -> None:
        with progress("making records", self._records) as advance:
            parts = list(self._parts(advance))
        with progress("publishing", self._records) as advance:
            took = measure.publish_many(stream, parts, advance)
        size = sum(len(value) for part in parts for value in part)
        self._check(stream.bounds()[1] == self._records, "every record is in the stream")
        self._tell(
            f"Published {self._records:,} records of {size // self._records} bytes in {took:.2f} s:"
            f" {self._rate(self._records, took)}"
        )
        self._how(f'>>> m.stream("{stream.name}").publisher().publish_many(values)')

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
        self._tell(f"Read them all back: {', '.join(rates)}")
        self._how(">>> for batch in stream.read(): batch.to_arrow()")

    def _follow(self, stream: meteor.Stream) -> None:
        orders = [
            (b"table-%d" % random.randrange(1, 10), random.choice(_MENU).encode())
            for _ in range(_FOLLOWED)
        ]
        with progress("following", _FOLLOWED) as advance:
            records, took = measure.follow(stream, orders, advance)
        self._check([(r.key, r.value) for r in records] == orders, "every record is followed")
        median = f"{measure.percentile(took, 50) * 1000:.2f} ms"
        self._tell(
            f"Followed it live: a new record is there after {self._figure(median)} "
            f"(median of {_FOLLOWED})"
        )
        shown = as_text("bytes", colour=self._colour)(records[-_SHOWN:]).decode()
        for line in shown.splitlines():
            click.echo(f"    {line}")
        self._how(f"$ meteor tail {stream.name} -n {_SHOWN}")

    def _seek(self, stream: meteor.Stream) -> None:
        with stream.subscriber() as sub:
            start = time.perf_counter()
            for _ in range(_SEEKS):
                offset = random.randrange(self._records)
                sub.seek(offset)
                self._check(sub.poll(max_records=1).first_offset == offset, "a seek hits")
            took_ms = (time.perf_counter() - start) / _SEEKS * 1000
        self._tell(
            f"Went to {_SEEKS} random records and read them: "
            f"{self._figure(f'{took_ms:.2f} ms')} each"
        )
        self._how(f">>> sub.seek({offset}); sub.poll()")

    def _spark(self, stream: meteor.Stream, url: str) -> None:
        needed = spark.missing()
        if needed:
            self._how(f"(Spark reads streams, too: {needed}.)")
            return
        rows = stream.bounds()[1]
        with progress("Spark starts, and reads it", rows) as advance:
            try:
                outcome = spark.read(url, stream.name)
            except RuntimeError as error:
                raise click.ClickException(f"Spark failed: {error}") from None
            advance(rows)
        whole = (outcome.rows, outcome.first, outcome.last) == (rows, 0, rows - 1)
        self._check(whole, "Spark sees every record")
        self._tell(
            f"Started Spark, which had a first row after {outcome.start_s:.1f} s, and read all "
            f"{rows:,}",
            f"rows in {outcome.read_s:.1f} s: {self._rate(rows, outcome.read_s)}",
        )
        self._how(f'>>> spark.read.format("meteor").option("stream", "{stream.name}").load()')

    def _fail_over(self, stream: meteor.Stream, url: str) -> None:
        outcome = self._take_over("exclusive", stream, url, "a group of two, one is killed")
        self._tell(
            f"Killed the process that read for a group after {outcome.before:,} records:",
            f"the next went on {self._aftermath(outcome)}",
        )
        lease_s = takeover.KINDS["exclusive"].lease_s
        self._how(f'>>> stream.subscriber(group="{takeover.GROUP}", lease_ttl={lease_s:g})')

    def _share(self, stream: meteor.Stream, url: str) -> None:
        outcome = self._take_over("shared", stream, url, "three consumers share, one is killed")
        processes = takeover.KINDS["shared"].processes
        self._tell(
            f"Shared {takeover.CARTS} carts out to {processes} processes, "
            f"{self._figure('each in order')}, and killed one of them:",
            f"its carts went on {self._aftermath(outcome)}",
        )
        self._how(f'>>> stream.shared_subscriber("{takeover.GROUP}")  # ordering_key="key"')

    def _take_over(self, kind: str, stream: meteor.Stream, url: str, what: str) -> takeover.Outcome:
        with progress(what, takeover.RECORDS) as advance:
            outcome = takeover.take_over(kind, stream, url, advance)
        self._check(outcome.lost == 0, "no record is lost with the process that had it")
        self._check(outcome.out_of_order == 0, "each cart is handled in order")
        return outcome

    def _aftermath(self, outcome: takeover.Outcome) -> str:
        pause, lost = f"{outcome.pause_s:.2f} s", f"{outcome.lost} lost"
        return (
            f"{self._figure(pause)} later; of {takeover.RECORDS:,} records {self._figure(lost)}, "
            f"{outcome.twice} handled again"
        )

    def _coordinate(self, group: meteor.PeerGroup, url: str) -> None:
        with progress("three members, the leader is killed", peers.STEPS) as advance:
            outcome = peers.coordinate(group, url, advance)
        self._check(outcome.terms[1] > outcome.terms[0], "the next term is higher")
        self._check(outcome.vote.passed, "those who are left agree")
        self._check(outcome.acted == peers.MEMBERS - 1, "all of them act")
        self._tell(
            f"Killed the leader of {peers.MEMBERS} processes: another led in a higher term "
            f"{self._figure(f'{outcome.pause_s:.2f} s')} later;",
            f"a vote took {self._figure(f'{outcome.vote_s * 1000:.0f} ms')}, and then both acted "
            f"within {self._figure(f'{outcome.spread_s * 1000:.2f} ms')}; clocks agree to "
            f"{outcome.bound_s * 1000:.1f} ms",
        )
        self._how('>>> m.peer_group("workers").join().leadership()  # propose()')

    def _crash(self) -> None:
        with progress("publishing, and the server is killed", crash.RECORDS) as advance:
            outcome = crash.crash(advance)
        if outcome.lost:  # possible on a slow disk: the last second is in nobody's hands
            self._tell(
                "Killed a server while publishing: it lost acknowledged records, for its disk",
                f"was slow; the publisher was told that {outcome.lost[0]} to {outcome.lost[-1]} "
                "are gone",
            )
        else:
            self._check(outcome.complete, "each record is there once, in order")
            self._tell(
                "Killed a server while publishing, and started it again: the publisher went",
                f"on after {self._figure(f'{outcome.pause_s:.2f} s')}; all {crash.RECORDS:,} "
                "records are there once, in order",
            )
        self._how('>>> m = meteor.connect("embedded:///directory")  # kept on disk')

    def _overrun(self, stream: meteor.Stream) -> None:
        with stream.subscriber() as sub, stream.publisher() as pub:
            for _ in range(5):
                pub.publish_many([b"x"] * _RING).result()
            try:
                sub.poll()
            except meteor.RecordsLost as gap:
                sub.skip_gap()
                batch = sub.poll()
                self._tell(
                    f"Read too slowly for a ring of {_RING:,}: was told that records "
                    f"{gap.first} to {gap.last:,}",
                    f"are gone, and went on at {batch.first_offset:,}",
                )
                self._how(">>> sub.poll()  # except meteor.RecordsLost: sub.skip_gap()")
                return
        self._check(False, "a reader that is too slow is told so")

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
            self._check(seen == self._records, "all history is read")
            self._check(not stream.store.verify(), "all files are whole")
            files = stream.store.files()
            size = show_bytes(sum(os.path.getsize(file) for file in files))
            kept = stream.describe().length
        self._tell(
            f"Published {self._records:,} records through a ring of {kept:,}, and into "
            f"{len(files)} Parquet",
            f"files, {size} in all, in {wrote_s:.1f} s; read all of it: {self._rate(seen, took)}",
        )
        self._how(f'>>> m.stream("trades", capacity={ring:_}, store="data/meteor")  # or s3://')

    # -- what they share -------------------------------------------------------------------------

    def _parts(self, advance: measure.Advance) -> Iterator[list[bytes]]:
        """All records, of a hundred bytes each, in lists."""
        for first in range(0, self._records, measure.CALL):
            last = min(first + measure.CALL, self._records)
            numbers = range(first, last)
            yield [b"order %010d: %82s" % (n, _MENU[n % len(_MENU)].encode()) for n in numbers]
            advance(last)

    @contextmanager
    def _stream(self, m: meteor.Client, name: str, **settings: Any) -> Iterator[meteor.Stream]:
        """A stream that is deleted in the end."""
        stream = m.stream(name + self._suffix, **settings)
        try:
            yield stream
        finally:
            stream.delete(history="store" in settings)

    @contextmanager
    def _group(self, m: meteor.Client, name: str) -> Iterator[meteor.PeerGroup]:
        """A peer group that is deleted in the end."""
        group = m.peer_group(name + self._suffix, ttl=peers.TTL_S)
        try:
            yield group
        finally:
            group.delete(force=True)

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise click.ClickException(f"The tour ends here, for this is not so: {what}.")

    def _tell(self, *lines: str) -> None:
        click.echo(f"{click.style('✓', fg='green')} " + "\n  ".join(lines))

    def _how(self, text: str) -> None:
        click.echo(click.style(f"    {text}", dim=True))

    def _figure(self, text: str) -> str:
        return click.style(text, bold=True)

    def _rate(self, records: int, took_s: float) -> str:
        return self._figure(f"{records / took_s / 1e6:.2f} million/s")

    def _say_what_next(self) -> None:
        click.echo(
            f"{click.style('Try next', bold=True)}, on a server of your own that is kept on disk:"
        )
        width = max(map(len, SHELL))
        for line, what in SHELL.items():
            click.echo(f"  {line:<{width}}  {click.style(f'# {what}', dim=True)}")
        click.echo("or in Python:")
        click.echo("".join(f"  {line}\n" for line in PYTHON.splitlines()), nl=False)
