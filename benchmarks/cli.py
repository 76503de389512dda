"""The ``meteor`` command compared with ``redis-cli``: whole processes, from start to end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import meteor_py as meteor
from benchmarks.common import CALL, RECORD_BYTES, Bench, Row, cut, faster, plain_client, within

METEOR = Path(sys.executable).parent / "meteor"
_STREAM, _PLAIN = "bench", "plain"
#: Goal for publishing lines, in lines per second. It does not depend on the peer.
_LINES_PER_S = 300_000


def run(bench: Bench) -> list[Row]:
    count = bench.pick(1_000_000, 100_000)
    lines = [b"%0*d" % (RECORD_BYTES, number) for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="meteor-bench-") as folder:
        ours, plain = Path(folder, "lines"), Path(folder, "commands")
        ours.write_bytes(b"\n".join(lines) + b"\n")
        plain.write_bytes(b"".join(map(_command, lines)))
        rows = _publish(bench, count, ours, plain)
        rows += _tail(bench, lines)
    return [*rows, _help(bench)]


def _publish(bench: Bench, count: int, lines: Path, commands: Path) -> list[Row]:
    def clean(work: Callable[[], float]) -> Callable[[], float]:
        def case() -> float:
            bench.clear()
            return count / work()

        return case

    publish = [str(METEOR), "publish", _STREAM, "--lines", "--capacity", str(count)]
    cases = {"meteor publish --lines": clean(lambda: _took(publish, bench, lines))}
    if cli := _redis_cli(bench):
        cases["redis-cli --pipe"] = clean(lambda: _took([*cli, "--pipe"], bench, commands))
    found = bench.best(cases, bench.pick(3, 1))
    row = _row("meteor publish --lines, from a pipe", found, None)
    return [replace(row, goal=f">= {_LINES_PER_S // 1000} k/s", met=row.ours >= _LINES_PER_S)]


def _tail(bench: Bench, lines: list[bytes]) -> list[Row]:
    bench.clear()
    with meteor.connect(bench.url) as m, m.stream(_STREAM, capacity=len(lines)).publisher() as pub:
        for part in cut(lines, CALL):
            pub.publish_many(list(part))
    with plain_client(bench.url) as client:
        for part in cut(lines, 500):
            pipeline = client.pipeline(transaction=False)
            for line in part:
                pipeline.execute_command("XADD", _PLAIN, "*", "v", line)
            pipeline.execute()
    tail = [str(METEOR), "tail", _STREAM, "--no-follow", "--raw"]
    cases = {"meteor tail --raw": lambda: len(lines) / _took(tail, bench)}
    if cli := _redis_cli(bench):
        xrange = [*cli, "--raw", "XRANGE", _PLAIN, "-", "+"]
        cases["redis-cli --raw XRANGE"] = lambda: len(lines) / _took(xrange, bench)
    found = bench.best(cases, bench.pick(3, 1))
    return [_row("meteor tail --no-follow --raw", found, 5.0)]


def _row(what: str, found: dict[str, float], goal: float | None) -> Row:
    (_, ours), *others = found.items()
    if not others:
        return Row(what, "/s", ours)
    name, peer = others[0]
    return faster(what, ours, peer, name, goal)


def _help(bench: Bench) -> Row:
    seconds = []
    for _ in range(bench.pick(7, 3)):
        bench.step("meteor --help")
        seconds.append(_took([str(METEOR), "--help"], bench))
    return within("meteor --help", "s", min(seconds), 0.1)


def _took(command: list[str], bench: Bench, given: Path | None = None) -> float:
    """Return the run time, in seconds, of a process that reads ``given`` from a pipe.

    The output of the process is discarded.
    """
    environment = os.environ | {"METEOR_URL": bench.url}
    # Let Python write and use bytecode files, as it does for an installed command.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    with subprocess.Popen(["cat", given or os.devnull], stdout=subprocess.PIPE) as source:
        subprocess.run(
            command,
            stdin=source.stdout,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            check=True,
        )
    return time.perf_counter() - start


def _redis_cli(bench: Bench) -> list[str] | None:
    """Return the redis-cli command with the server's address; None if it is not installed."""
    found = shutil.which("redis-cli")
    return None if found is None else [found, "-s", unquote(urlsplit(bench.url).path)]


def _command(line: bytes) -> bytes:
    """Return an XADD in wire format, which ``redis-cli --pipe`` takes as input."""
    parts = [b"XADD", _PLAIN.encode(), b"*", b"v", line]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)
