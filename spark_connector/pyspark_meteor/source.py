"""The data source ``meteor``: what Spark finds by that name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

_NEEDED = (4, 2)


def check_version() -> None:
    """Raise ``ImportError`` where PySpark has not all that is needed."""
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < _NEEDED:
        raise ImportError(
            f"The data source meteor needs PySpark {_NEEDED[0]}.{_NEEDED[1]} or newer, for rate "
            f"limits and Trigger.AvailableNow, and this is {pyspark.__version__}; pip install "
            "'meteor-py[spark]'."
        )


try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
except ModuleNotFoundError:  # before 4.0, which does not look for data sources, either
    check_version()
    raise

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class MeteorDataSource(DataSource):
    """Streams of meteor_py as a source and a sink.

    >>> spark.readStream.format("meteor").option("stream", "orders").load()  # doctest: +SKIP

    Spark makes it anew in several processes: it only remembers its options.
    """

    @classmethod
    def name(cls) -> str:
        """As in ``format("meteor")``."""
        return "meteor"

    def schema(self) -> StructType:
        """The columns; some depend on options."""
        check_version()
        from pyspark_meteor.columns import source_schema
        from pyspark_meteor.options import parse_columns

        return source_schema(parse_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For ``spark.read``."""
        check_version()
        from pyspark_meteor.batch_reader import BatchReader
        from pyspark_meteor.options import parse_source

        return BatchReader(parse_source(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For ``spark.readStream``."""
        check_version()
        from pyspark_meteor.stream_reader import StreamReader

        return StreamReader(dict(self.options.items()), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For ``df.write``."""
        check_version()
        from pyspark_meteor.sink_options import parse_sink
        from pyspark_meteor.writers import BatchWriter

        _check_appending(overwrite)
        return BatchWriter(parse_sink(self.options, schema, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """For ``df.writeStream``."""
        check_version()
        from pyspark_meteor.sink_options import parse_sink
        from pyspark_meteor.writers import StreamWriter

        _check_appending(overwrite)
        return StreamWriter(parse_sink(self.options, schema, streaming=True))


def _check_appending(overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            'A stream is only ever appended to; write with mode("append"), or outputMode append or '
            "update."
        )


def register(spark: SparkSession) -> None:
    """Let a session know the format ``meteor``, where Spark does not find it by itself.

    That is so if the package was installed after the first use of an unknown format, or came with
    ``--py-files``.

    >>> pyspark_meteor.register(spark)  # doctest: +SKIP
    """
    spark.dataSource.register(MeteorDataSource)
