"""A source's columns, and the conversion of Arrow batches to these columns."""

from __future__ import annotations

from collections.abc import Sequence
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

    from pyspark_meteor.options import ColumnOptions


def source_schema(options: ColumnOptions) -> StructType:
    """Return all columns, in order."""
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


def check_schema(requested: StructType, options: ColumnOptions) -> None:
    """Check a schema that the user passed. It can select columns but not change their types.

    Raises:
        ValueError: A column is unknown or has the wrong type.
    """
    known = {f.name: f.dataType for f in source_schema(options)}
    for column in requested.fields:
        if known.get(column.name) != column.dataType:
            columns = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            raise ValueError(
                f"The schema has {column.name} {column.dataType.simpleString()}, but a stream has "
                f"only {columns}. Use includeHeaders and valueFormat to change these columns."
            )


class Columns:
    """Converts records to Arrow batches with exactly the names, order and types in a schema."""

    def __init__(self, schema: StructType) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")

    def of_records(self) -> list[str]:
        """Return the columns that come from records: all but the stream name."""
        return [name for name in self._schema.names if name != "stream"]

    def combine(self, stream: str, tables: Sequence[pa.Table]) -> list[pa.RecordBatch]:
        """Return a stream's records as Arrow batches: usually one, and none of them empty.

        Spark needs time for each Arrow batch, so this copies records from many frames into one.
        """
        import pyarrow as pa

        whole = pa.concat_tables(tables).combine_chunks()
        return [self._convert(stream, part) for part in whole.to_batches() if part.num_rows]

    def _convert(self, stream: str, part: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa

        if not len(self._schema):  # without columns, from_arrays would make an empty batch
            rows = pa.array([{}] * part.num_rows, pa.struct([]))
            return pa.RecordBatch.from_struct_array(rows)
        columns = [self._column(field, stream, part) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, field: pa.Field, stream: str, part: pa.RecordBatch) -> Any:
        import pyarrow as pa

        if field.name == "stream":
            return pa.repeat(pa.scalar(stream, pa.string()), part.num_rows)
        column = part.column(field.name)
        if column.type == field.type:
            return column
        if pa.types.is_string(field.type):
            # Pass invalid UTF-8 through unchanged: Spark's own strings may contain it.
            from pyarrow import compute

            return compute.cast(
                column, options=compute.CastOptions(field.type, allow_invalid_utf8=True)
            )
        return column.cast(field.type)
