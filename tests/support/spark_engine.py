"""A stand-in for Spark's engine, which calls a streaming source or a sink task as Spark does.

Like Spark's, it asks for the initial offset repeatedly, plans twice, reads with a reader that was
pickled before the run, commits late, and compares offsets as JSON. A test can make it crash between
any two of these steps.
"""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.datasource import CaseInsensitiveDict, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_meteor import server
from pyspark_meteor.readers import StreamReader
from pyspark_meteor.source import MeteorDataSource

#: Spark's pickler.
dumps: Callable[[object], bytes] = cloudpickle.dumps


@contextmanager
def own_process() -> Iterator[None]:
    """After the block, release the resources that a source keeps until its process ends."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        for client in server._clients.values():
            client.close()
        server._clients.clear()


class Checkpoint:
    """Spark's checkpoint: the planned batches, and the number of completed ones."""

    def __init__(self) -> None:
        self.planned: list[str] = []
        self.done = 0


class Engine:
    """One run of a query in this process.

    The end of a ``with`` block stops it. Dropping it without one simulates a crash.
    """

    def __init__(self, checkpoint: Checkpoint, **given: str) -> None:
        self.kept = checkpoint
        given = {"startingOffsets": "earliest"} | given
        if not {"streams", "streamsPattern"} & {*given}:
            given = {"stream": "orders"} | given
        source = pickle.loads(dumps(MeteorDataSource(CaseInsensitiveDict(given))))
        schema = source.schema()
        self.reader: StreamReader = source.streamReader(schema)
        self.pickled = dumps(self.reader)
        self.limit = self.reader.getDefaultReadLimit()
        self.arrow_schema = to_arrow_schema(schema, timezone="UTC")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()

    def initial(self) -> str:
        answers = {json.dumps(self.reader.initialOffset()) for _ in range(3)}
        (same,) = answers
        return same

    def begin(self) -> None:
        """Run the first batch of a query, which only saves its start in the checkpoint."""
        if not self.kept.planned:
            assert self._plan(), "the first batch was not planned"
        if not self.kept.done:
            assert self.read() == [], "the first batch had records"
            self.kept.done = 1

    def plan(self) -> bool:
        """Plan the next batch with records; return False if there are none."""
        self.begin()
        return self._plan()

    def _plan(self) -> bool:
        done = self.kept.done
        start = self.kept.planned[done - 1] if done else self.initial()
        found = json.dumps(self.reader.latestOffset(json.loads(start), self.limit))
        self.reader.reportLatestOffset()
        if found == start:
            return False
        assert json.dumps(json.loads(found), sort_keys=True) == found
        self.kept.planned.append(found)
        if done:
            self.reader.commit(json.loads(self.kept.planned[done - 1]))
        return True

    def read(self) -> list[tuple[str, int]]:
        """Read the planned batch twice, since a task may be repeated."""
        done = self.kept.done
        start = self.kept.planned[done - 1] if done else self.initial()
        end = self.kept.planned[done]
        again = [self.reader.partitions(json.loads(start), json.loads(end)) for _ in range(2)]
        assert again[0] == again[1]
        self.parts = [dumps(part) for part in again[0]]
        reads = [[row for part in self.parts for row in self.task(part)] for _ in range(2)]
        assert reads[0] == reads[1]
        return reads[0]

    def task(self, pickled: bytes) -> list[tuple[str, int]]:
        part: InputPartition = pickle.loads(pickled)
        batches: list[pa.RecordBatch] = list(pickle.loads(self.pickled).read(part))
        rows: list[tuple[str, int]] = []
        for batch in batches:
            assert batch.schema.equals(self.arrow_schema), "Spark would refuse this schema"
            assert batch.num_rows
            rows += zip(batch["stream"].to_pylist(), batch["offset"].to_pylist(), strict=True)
        return rows

    def batch(self) -> list[int]:
        """Run a micro-batch, planned by an earlier run or now; return its offsets."""
        self.begin()
        if self.kept.done == len(self.kept.planned) and not self._plan():
            return []
        rows = self.read()
        self.kept.done += 1
        return [offset for _, offset in rows]


class Task:
    """A stand-in for TaskContext, the same for all attempts at a task, even after a restart."""

    def __init__(self, batch: int, partition: int = 0, run: str = "run") -> None:
        self._partition = partition
        self._known = {
            "sql.streaming.queryId": "q",
            "streaming.sql.batchId": str(batch),
            "spark.jobGroup.id": run,
        }

    def getLocalProperty(self, name: str) -> str | None:
        return self._known.get(name)

    def partitionId(self) -> int:
        return self._partition

    def get(self) -> Task:
        return self
