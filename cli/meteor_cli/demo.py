"""The tour: what the library does, with every figure measured on the spot."""

from __future__ import annotations

import random
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import meteor_py as meteor
from meteor_cli import failover

_CALL = 10_000
_CUT_RECORDS = 100_000
_NEXT = """\
[bold]Try next[/bold], in Python, with no server to install:
  import meteor_py as meteor
  stream = meteor.connect().stream("orders")
  with stream.publisher() as pub: pub.publish(b"hello").result()
  with stream.subscriber(group="billing") as sub:
      for record in sub: print(record); sub.confirm(record)"""


def run_demo(url: str | None, records: int) -> None:
    """Show the parts one after the other; leaves nothing behind."""
    console = Console(highlight=False, soft_wrap=True)
    started = time.perf_counter()
    with meteor.connect(url or "embedded://") as m:
        name = f"demo-{secrets.token_hex(4)}"
        stream = m.stream(name, capacity=records)
        took = (time.perf_counter() - started) * 1000
        where = "A private server is up" if url is None else f"Connected to {m.address}"
        console.print(f"[green]✓[/green] {where}, stream {name!r} created: {took:.0f} ms")
        try:
            _publish(console, stream, records)
            _read(console, stream, records)
            _seek(console, stream, records)
            _cut(console)
            _fail_over(console)
            _lag(console, m, f"{name}-ring")
            _history(console, m, f"{name}-history", records)
        finally:
            stream.delete()
    console.print(f"\n{_NEXT}")


def _publish(console: Console, stream: meteor.Stream, records: int) -> None:
    values = [b"record %092d" % number for number in range(records)]
    with _bar(console, "publishing", records) as advance, stream.publisher() as pub:
        start = time.perf_counter()
        for first in range(0, records, _CALL):
            ack = pub.publish_many(values[first : first + _CALL])
            ack.add_done_callback(lambda a: advance(sum(map(len, a.ranges))))
        pub.flush()
        took = time.perf_counter() - start
    size = sum(map(len, values)) / 1e6
    _say(console, f"published {records:,} records, {size:.0f} MB", records, took)


def _read(console: Console, stream: meteor.Stream, records: int) -> None:
    ways: dict[str, Callable[[meteor.RecordBatch], object]] = {
        "bytes": meteor.RecordBatch.values,
        "Arrow": meteor.RecordBatch.to_arrow,
    }
    for kind, convert in ways.items():
        seen = 0
        start = time.perf_counter()
        for batch in stream.read(0):
            convert(batch)
            seen += len(batch)
        took = time.perf_counter() - start
        assert seen == records
        _say(console, f"read them all back, as {kind}", records, took)


def _seek(console: Console, stream: meteor.Stream, records: int) -> None:
    with stream.subscriber() as sub:
        start = time.perf_counter()
        for _ in range(100):
            offset = random.randrange(records)
            sub.seek(offset)
            assert sub.poll(max_records=1).first_offset == offset
        took = (time.perf_counter() - start) / 100 * 1000
        sub.seek(datetime.now(UTC) - timedelta(hours=1))
        console.print(
            f"[green]✓[/green] sought and read 100 random offsets: {took:.2f} ms each; "
            f"an hour ago: {sub.position}"
        )


def _cut(console: Console) -> None:
    """Kill the publisher's connections under way: every record must arrive exactly once.

    Always on a private server: on another one these would be everybody's connections.
    """
    with meteor.connect("embedded://") as m:
        cuts, found = _publish_under_cuts(console, m)
    assert found == [b"%d" % n for n in range(_CUT_RECORDS)], "each record once, in order"
    console.print(
        f"[green]✓[/green] cut {cuts} connections while publishing {_CUT_RECORDS:,} records:\n"
        "  each of them is there once, in order"
    )


def _publish_under_cuts(console: Console, m: meteor.Client) -> tuple[int, list[bytes]]:
    """Publish while connections are cut; return how many were, and all values in the log."""
    stream = m.stream("cut", capacity=_CUT_RECORDS)
    stop = threading.Event()
    cuts = 0

    def cut() -> None:
        nonlocal cuts
        with m.redis as server:
            while not stop.wait(0.005):
                cuts += int(server.client_kill_filter(_type="normal", skipme=True))

    cutter = threading.Thread(target=cut, name="demo-cutter")
    cutter.start()
    try:
        with (
            _bar(console, "cutting connections", _CUT_RECORDS) as advance,
            stream.publisher() as pub,
        ):
            for start in range(0, _CUT_RECORDS, 500):
                pub.publish_many([b"%d" % n for n in range(start, start + 500)]).result()
                advance(500)
    finally:
        stop.set()
        cutter.join()
    return cuts, [value for batch in stream.read() for value in batch.values()]


def _fail_over(console: Console) -> None:
    """Kill the process that reads for a group: another goes on, and nothing is lost."""
    with _bar(console, "two workers of a group, one is killed", failover.RECORDS) as advance:
        outcome = failover.fail_over(advance)
    assert outcome.lost == 0, "every record was handled"
    assert outcome.confirmed == failover.RECORDS, "and confirmed"
    console.print(
        f"[green]✓[/green] killed a worker after {len(outcome.first):,} records: the other of its "
        f"group went on after\n  {outcome.pause_s:.2f} s (a lease lives "
        f"{failover.LEASE_S:g} s); of {failover.RECORDS:,} records 0 are lost, "
        f"{outcome.twice} were handled twice"
    )


def _lag(console: Console, m: meteor.Client, name: str) -> None:
    """A reader that is too slow for a small ring: it is told exactly what it missed."""
    ring = m.stream(name, capacity=1_000)
    try:
        with ring.subscriber() as sub, ring.publisher() as pub:
            for _ in range(5):
                pub.publish_many([b"x"] * 1_000).result()
            try:
                sub.poll()
            except meteor.RecordsLost as gap:
                sub.skip_gap()
                batch = sub.poll()
                console.print(
                    "[green]✓[/green] a reader too slow for its ring was told that records "
                    f"{gap.first} to {gap.last}\n  are gone, and went on at {batch.first_offset}"
                )
    finally:
        ring.delete()


def _history(console: Console, m: meteor.Client, name: str, records: int) -> None:
    """A ring with a store behind it: everything can be read, and the files by others too."""
    with tempfile.TemporaryDirectory(prefix="meteor-demo-") as folder:
        stream = m.stream(name, capacity=max(records // 100, 1), store=folder)
        try:
            with _bar(console, "archiving", records) as advance, stream.publisher() as pub:
                for first in range(0, records, _CALL):
                    part = range(first, min(first + _CALL, records))
                    pub.publish_many([b"%d" % n for n in part]).result()
                    advance(len(part))
            stream.store.flush()
            start = time.perf_counter()
            seen = sum(len(batch) for batch in stream.read(0))
            took = time.perf_counter() - start
            assert seen == records
            assert not stream.store.verify(), "all files are whole"
            files, ring = len(stream.store.files()), stream.describe().length
        finally:
            stream.delete(history=True)
    _say(console, f"read {records:,} records through a ring of {ring:,}", records, took)
    console.print(f"  the others lie in Parquet files, {files} of them, for Spark or DuckDB too")


@contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _say(console: Console, what: str, records: int, took_s: float) -> None:
    rate = records / took_s / 1e6
    console.print(f"[green]✓[/green] {what}: {took_s:.2f} s, [bold]{rate:.2f} million/s[/bold]")
