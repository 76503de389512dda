"""The batch source: a range of offsets or of time, fixed when the query is planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from meteor_py import StreamNotFound
from pyspark_meteor.columns import check_schema
from pyspark_meteor.options import SourceOptions
from pyspark_meteor.planning import Planner
from pyspark_meteor.ranges import Range
from pyspark_meteor.reading import read_range

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class BatchReader(DataSourceReader):
    """For one query."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """What the tasks read. A stream that does not exist is an error: nothing waits for it."""
        options, planner = self._options, Planner(self._options)
        ranges: list[Range] = []
        for name in planner.names():
            try:
                start = planner.resolve(name, options.starting[name])
                end = planner.resolve(name, options.ending[name])
            except StreamNotFound:
                if options.pattern is None:
                    raise
                continue  # deleted since the names were listed
            if start.offset < end.offset:
                ranges.append(Range(name, start.offset, end))
        return planner.divide(ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The records of a partition, as Arrow."""
        if isinstance(partition, Range):  # else there is nothing: the engine makes one up
            yield from read_range(self._options, self._schema, partition)
