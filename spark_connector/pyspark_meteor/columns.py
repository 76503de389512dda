"""The columns of a source, and records brought into them without touching a record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.types import (
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from meteor_py import RecordBatch
    from pyspark_meteor.options import ColumnOptions


def source_schema(options: ColumnOptions) -> StructType:
    """The columns, in order."""
    fields = [
        StructField("stream", StringType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("key", BinaryType()),
        StructField("value", StringType() if options.text else BinaryType()),
        StructField("appended", TimestampType()),
    ]
    if options.headers:
        fields.append(StructField("headers", MapType(StringType(), BinaryType())))
    return StructType(fields)


def check_schema(wanted: StructType, options: ColumnOptions) -> None:
    """A schema that the user gives chooses among the columns; it cannot change them.

    Raises:
        ValueError: A column is unknown, or of another type.
    """
    known = {f.name: f.dataType for f in source_schema(options)}
    for column in wanted.fields:
        if known.get(column.name) != column.dataType:
            columns = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            raise ValueError(
                f"The schema has {column.name} {column.dataType.simpleString()}, and a stream has "
                f"only {columns}; includeHeaders and valueFormat change that."
            )


class Columns:
    """Makes Arrow batches as Spark wants them: its names, order and types, exactly."""

    def __init__(self, schema: StructType) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")

    def batches(self, stream: str, batch: RecordBatch) -> list[pa.RecordBatch]:
        """The records of a stream."""
        import pyarrow as pa

        return [
            pa.RecordBatch.from_arrays(
                [self._column(field, stream, part) for field in self._schema], schema=self._schema
            )
            for part in batch.to_arrow().to_batches()
        ]

    def _column(self, field: pa.Field, stream: str, part: pa.RecordBatch) -> Any:
        import pyarrow as pa

        if field.name == "stream":
            return pa.repeat(pa.scalar(stream, pa.string()), part.num_rows)
        column = part.column(field.name)
        if column.type == field.type:
            return column
        if pa.types.is_string(field.type):
            # What is not UTF-8 is left to Spark, which shows it as it shows its own.
            from pyarrow import compute

            return compute.cast(
                column, options=compute.CastOptions(field.type, allow_invalid_utf8=True)
            )
        return column.cast(field.type)
