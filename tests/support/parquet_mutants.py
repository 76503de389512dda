"""A program that reads broken segment files. It runs in a separate process, because it may crash.

python -m tests.support.parquet_mutants SEED CASES

It prints how many of the CASES files were refused and how many were read, and the growth of its
memory in MiB.
"""

from __future__ import annotations

import io
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.segment import Segment
from meteor_py.store.segment_file import BAD_BYTES, SegmentFile

#: Maximum growth of the address space, in bytes, after the program has started.
_SPACE = 2 * 1024**3
OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["key", "timestamp", "appended", "headers.key_value.key"],
    "column_encoding": {"offset": "DELTA_BINARY_PACKED"},
    "write_statistics": ["offset", "timestamp", "appended"],
}
#: Sizes that are likely to reveal an overflow or a missing check.
_SIZES = (0, 1, -1, 127, 128, 2**16, 2**28, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62)


@dataclass(frozen=True)
class Outcome:
    """How many broken files were refused and read, and the process's memory growth in MiB."""

    refused: int
    read: int
    grown_mb: int


def fuzz(seed: int, cases: int) -> Outcome:
    """Read broken files in a separate process; raise if it crashes or finds a problem."""
    command = [sys.executable, "-m", __name__, str(seed), str(cases)]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, f"{' '.join(command)}: {run.returncode}\n{run.stderr[-3000:]}"
    return Outcome(*map(int, run.stdout.split()))


def bases(rng: random.Random) -> list[tuple[bytes, Segment]]:
    """Return small files in the format of ``segment_file.write``, with their segments.

    Half of the files have no page checksums, so that damage to a page reaches the decoder.
    """
    found = []
    for rows, group in ((1, 1), (40, 16), (300, 300), (2000, 1000)):
        for checksums in (True, False):
            table = pa.Table.from_pylist([_record(rng, row) for row in range(rows)], ARROW_SCHEMA)
            out = io.BytesIO()
            options = {**OPTIONS, "row_group_size": group, "write_page_checksum": checksums}
            pq.write_table(table, out, **options)
            found.append((out.getvalue(), Segment(0, rows - 1, 1, "0" * 8)))
    return found


def _record(rng: random.Random, offset: int) -> dict[str, object]:
    headers = [(rng.choice(("trace", "é", "")), rng.randbytes(3)) for _ in range(rng.randrange(3))]
    key = rng.choice((None, b"", b"customer-%d" % rng.randrange(9), rng.randbytes(20)))
    times = {"timestamp": rng.randrange(10**12), "appended": 10**12 + offset}
    value = rng.randbytes(rng.randrange(60)) + b"v" * rng.randrange(60)
    return {"offset": offset, **times, "key": key, "value": value, "headers": headers or None}


def mutate(rng: random.Random, whole: bytes) -> bytes:
    """Break a file, mostly its metadata: flip bits, change numbers, cut, repeat or copy parts."""
    data = bytearray(whole)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        low, high = rng.choice(((footer, len(data)), (footer, len(data)), (0, footer), (4, 120)))
        at = rng.randrange(low, max(min(high, len(data)), low + 1)) % len(data)
        kind = rng.randrange(6)
        if kind <= 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at] = rng.randrange(256)
        elif kind == 3:  # another number, whose encoding may have a different length
            data[at : at + rng.randrange(1, 5)] = varint(rng.choice(_SIZES))
        elif kind == 4:
            length = rng.randrange(1, 40)
            data[at : at + length] = data[at : at + length] * rng.choice((0, 2, 3))
        else:
            other, length = rng.randrange(len(data)), rng.randrange(1, 60)
            data[at : at + length] = data[other : other + length]
    if rng.random() < 0.5 and len(data) != len(whole):  # correct the footer's length
        data[-8:] = (len(data) - 8 - footer).to_bytes(4, "little", signed=True) + b"PAR1"
    return bytes(data) if rng.random() < 0.98 else bytes(data[: rng.randrange(len(data))])


def flipped_footers(whole: bytes) -> Iterator[bytes]:
    """Yield a copy per footer byte, with one bit of that byte flipped, such as in a length."""
    for at in range(len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole)):
        data = bytearray(whole)
        data[at] ^= 64
        yield bytes(data)


def varint(value: int) -> bytes:
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw > 127:
        out.append(raw & 127 | 128)
        raw >>= 7
    return bytes([*out, raw])


def is_read(data: bytes, segment: Segment) -> bool:
    """Return whether a reader accepts the file. If so, check that its batches are well-formed."""
    try:
        file = SegmentFile(pa.BufferReader(data), segment)
        for group in range(len(file.edges) - 1):
            batch = file.read(group)
            file.appended(group)
            assert batch.schema.equals(ARROW_SCHEMA)
            assert batch.column("offset").to_pylist() == list(
                range(file.edges[group], file.edges[group + 1])
            )
            batch.select(["key", "value", "headers"]).to_pylist()
    except BAD_BYTES:
        return False
    return True


def main() -> None:
    seed, cases = map(int, sys.argv[1:])
    rng = random.Random(seed)
    files = bases(rng)
    assert all(is_read(*file) for file in files)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    space = pages * resource.getpagesize() + _SPACE
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    data, segment = files[2]
    for flipped in flipped_footers(data):
        is_read(flipped, segment)
    read = 0
    for case in range(cases):
        data, segment = files[case % len(files)]
        read += is_read(mutate(rng, data), segment)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - usage.ru_maxrss
    print(cases - read, read, grown // 1024)


if __name__ == "__main__":
    main()
