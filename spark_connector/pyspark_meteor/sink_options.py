"""Sink options. All of them are checked before any row is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import (
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from pyspark_meteor.options import RawOptions
from pyspark_meteor.server import SERVER_OPTIONS, ServerOptions

_COMMON = (*SERVER_OPTIONS, "stream", "path", "capacity", "commitDurability")
_BATCH = ("txnId", "txnVersion")
_STREAMING = ("delivery", "failOnDataLoss")
#: Spark's own options, which it also passes to the sink.
_ASYNC = "asyncProgressTrackingEnabled"
_SPARK = ("checkpointLocation", "queryName", _ASYNC)
_COLUMNS: dict[str, tuple[DataType, ...]] = {
    "value": (BinaryType(), StringType()),
    "key": (BinaryType(), StringType()),
    "headers": (MapType(StringType(), BinaryType()),),
    "timestamp": (TimestampType(),),
    "stream": (StringType(),),
}


@dataclass(frozen=True)
class SinkOptions:
    """All options for a sink."""

    server: ServerOptions
    #: The stream to write to. None means that each row names its stream in a ``stream`` column.
    stream: str | None
    exactly_once: bool
    #: Identifies a batch write, so that a retry has no additional effect. If None, every write is
    #: new.
    txn_id: str | None
    txn_version: int
    #: Number of replicas that must have a batch before it counts as written.
    replicas: int
    #: Whether a batch fails if the stream already has that batch with a different number of rows.
    fail_on_data_loss: bool
    #: Ring capacity for streams that the sink creates. None means the library's default.
    capacity: int | None


def parse_sink(given: Mapping[str, str], schema: StructType, *, streaming: bool) -> SinkOptions:
    """Parse sink options, and check the rows' columns.

    Raises:
        ValueError: An option is unknown, invalid, or contradicts another; or a column is missing,
            unknown, or has the wrong type.
    """
    known, other = ((*_STREAMING, *_SPARK), _BATCH) if streaming else (_BATCH, _STREAMING)
    options = RawOptions(given, (*_COMMON, *known), other)
    if options.flag(_ASYNC, False):
        raise ValueError(
            f"With {_ASYNC}, batch numbers are not reliable, but exactly-once writing needs "
            "reliable ones. Leave the option out, or use another sink."
        )
    stream, path = options.text("stream"), options.text("path")
    if stream and path:
        raise ValueError("Both the stream option and save() set the stream. Set it only once.")
    check_columns(schema, named=bool(stream or path))
    delivery = options.choice("delivery", ("exactlyOnce", "atLeastOnce"))
    if options.text("txnVersion") and not options.text("txnId"):
        raise ValueError("txnVersion needs a txnId. Set txnId as well, or omit txnVersion.")
    return SinkOptions(
        server=ServerOptions.parse(options),
        stream=stream or path,
        exactly_once=delivery == "exactlyOnce",
        txn_id=options.text("txnId"),
        txn_version=options.number("txnVersion", 1, least=0),
        replicas=options.number("commitDurability", 0, least=0, most=1000),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        capacity=options.number("capacity", None),
    )


def check_columns(schema: StructType, *, named: bool) -> None:
    """Check that rows with this schema can be written as records.

    Raises:
        ValueError: A column is missing, unknown, or has the wrong type.
    """
    for column in schema.fields:
        kinds = _COLUMNS.get(column.name, ())
        if not any(_is_kind(column.dataType, kind) for kind in kinds):
            known = ", ".join(
                f"{name} {' or '.join(kind.simpleString() for kind in kinds)}"
                for name, kinds in _COLUMNS.items()
            )
            raise ValueError(
                f"Cannot write column {column.name} of type {column.dataType.simpleString()} to a "
                f"stream. Supported columns: {known}."
            )
    names = schema.fieldNames()
    if "value" not in names:
        raise ValueError("A record needs a value. Select or cast a column as value.")
    if not named and "stream" not in names:
        raise ValueError("No target stream is set. Set the stream option, or add a stream column.")


def _is_kind(found: DataType, kind: DataType) -> bool:
    if isinstance(kind, MapType) and isinstance(found, MapType):  # do not compare nullability
        return (found.keyType, found.valueType) == (kind.keyType, kind.valueType)
    return found == kind
