"""The ``meteor`` data source: Spark's entry point to the readers and writers in this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

_REQUIRED = (4, 2)


def check_version() -> None:
    """Raise ``ImportError`` if PySpark is too old."""
    if tuple(int(part) for part in pyspark.__version__.split(".")[:2]) < _REQUIRED:
        raise ImportError(
            f"The meteor data source needs PySpark {_REQUIRED[0]}.{_REQUIRED[1]} or newer, for "
            f"rate limits and Trigger.AvailableNow, but this is {pyspark.__version__}. Install it "
            "with: pip install 'meteor-py[spark]'"
        )


try:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
except ModuleNotFoundError:  # PySpark before 4.0, which cannot load data sources written in Python
    check_version()
    raise

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


class MeteorDataSource(DataSource):
    """meteor_py streams as a source and a sink.

    >>> spark.readStream.format("meteor").option("stream", "orders").load()  # doctest: +SKIP

    Spark creates instances in several processes, so an instance holds only its options.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format("meteor")``."""
        return "meteor"

    def schema(self) -> StructType:
        """Return the columns, some of which depend on options."""
        check_version()
        from pyspark_meteor.columns import source_schema
        from pyspark_meteor.options import NO_TABLES, parse_columns

        if "provider" in self.options:  # Spark adds it when a table is created
            raise ValueError(f"CREATE TABLE is not supported. {NO_TABLES}")
        return source_schema(parse_columns(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for ``spark.read``."""
        check_version()
        from pyspark_meteor.options import parse_source
        from pyspark_meteor.readers import BatchReader

        return BatchReader(parse_source(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for ``spark.readStream``."""
        check_version()
        from pyspark_meteor.readers import StreamReader

        return StreamReader(dict(self.options.items()), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer for ``df.write``."""
        check_version()
        from pyspark_meteor.sink_options import parse_sink
        from pyspark_meteor.writers import BatchWriter

        _check_append(overwrite)
        return BatchWriter(parse_sink(self.options, schema, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer for ``df.writeStream``."""
        check_version()
        from pyspark_meteor.sink_options import parse_sink
        from pyspark_meteor.writers import StreamWriter

        _check_append(overwrite)
        return StreamWriter(parse_sink(self.options, schema, streaming=True))


def _check_append(overwrite: bool) -> None:
    if overwrite:
        raise ValueError(
            'Streams are append-only. Write with mode("append") or outputMode("append"). For '
            'outputMode("update"), write in foreachBatch (docs/spark.md).'
        )


def register(spark: SparkSession) -> None:
    """Register the ``meteor`` format with a session that did not discover it.

    This is needed if the package was installed after the session first searched for data sources,
    or was shipped with ``--py-files``.

    >>> pyspark_meteor.register(spark)  # doctest: +SKIP
    """
    spark.dataSource.register(MeteorDataSource)
