"""The options of the sink, checked whole before anything is written."""

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

from pyspark_meteor.options import Given
from pyspark_meteor.server import SERVER_OPTIONS, ServerOptions

_OWN = (*SERVER_OPTIONS, "stream", "path", "capacity", "commitDurability")
_BATCH = ("txnId", "txnVersion")
_STREAMING = ("delivery", "failOnDataLoss")
#: Spark puts its own among ours.
_ASYNC = "asyncProgressTrackingEnabled"
_OF_SPARK = ("checkpointLocation", "queryName", _ASYNC)
_COLUMNS: dict[str, tuple[DataType, ...]] = {
    "value": (BinaryType(), StringType()),
    "key": (BinaryType(), StringType()),
    "headers": (MapType(StringType(), BinaryType()),),
    "timestamp": (TimestampType(),),
    "stream": (StringType(),),
}


@dataclass(frozen=True)
class SinkOptions:
    """Where to write, and how surely."""

    server: ServerOptions
    #: None: the column ``stream`` says.
    stream: str | None
    exactly_once: bool
    #: What makes a batch write the same as an earlier one; None: nothing does.
    txn_id: str | None
    txn_version: int
    #: How many must have what was written before it counts as such.
    replicas: int
    #: Whether a batch fails that was written under its number with other rows.
    fail_on_data_loss: bool
    #: Records that the rings keep of streams that are made; None: as many as the library says.
    capacity: int | None


def parse_sink(given: Mapping[str, str], schema: StructType, *, streaming: bool) -> SinkOptions:
    """Understand the options and the columns of what is written.

    Raises:
        ValueError: One is unknown, wrong, or contradicts another.
    """
    more = (*_STREAMING, *_OF_SPARK) if streaming else _BATCH
    options = Given(given, (*_OWN, *more), other=_BATCH if streaming else _STREAMING)
    if options.flag(_ASYNC, False):
        raise ValueError(
            f"Exactly-once needs to know what a batch was; {_ASYNC} gives that up. Leave it out, "
            "or use another sink."
        )
    stream, path = options.text("stream"), options.text("path")
    if stream and path:
        raise ValueError("The stream is named by the option stream and by save(); once will do.")
    check_columns(schema, named=bool(stream or path))
    delivery = options.choice("delivery", ("exactlyOnce", "atLeastOnce"))
    if options.text("txnVersion") and not options.text("txnId"):
        raise ValueError("txnVersion counts what one txnId writes; give that, too.")
    return SinkOptions(
        server=ServerOptions.parse(options),
        stream=stream or path,
        exactly_once=delivery == "exactlyOnce",
        txn_id=options.text("txnId"),
        txn_version=_count(options, "txnVersion", 1, 2**53),
        replicas=_count(options, "commitDurability", 0, 1000),
        fail_on_data_loss=options.flag("failOnDataLoss", True),
        capacity=options.number("capacity"),
    )


def _count(options: Given, name: str, default: int, most: int) -> int:
    """A number from 0 on, as batches have: those of a query begin with it."""
    text = options.text(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) > most:
        raise ValueError(f"The option {name} is a number from 0 to {most}, not {text!r}.")
    return int(text)


def check_columns(schema: StructType, *, named: bool) -> None:
    """Raise unless the columns are those of records.

    Raises:
        ValueError: One is missing, unknown, or of another type.
    """
    for column in schema.fields:
        kinds = _COLUMNS.get(column.name, ())
        if not any(_is_kind(column.dataType, kind) for kind in kinds):
            known = ", ".join(
                f"{name} {' or '.join(kind.simpleString() for kind in kinds)}"
                for name, kinds in _COLUMNS.items()
            )
            raise ValueError(
                f"The column {column.name} {column.dataType.simpleString()} cannot be written to a "
                f"stream; it takes {known}."
            )
    names = schema.fieldNames()
    if "value" not in names:
        raise ValueError("A record needs a value: select or cast something as the column value.")
    if not named and "stream" not in names:
        raise ValueError("Name the stream to write to by the option stream, or a column stream.")


def _is_kind(found: DataType, kind: DataType) -> bool:
    if isinstance(kind, MapType) and isinstance(found, MapType):  # whether it may hold null or not
        return (found.keyType, found.valueType) == (kind.keyType, kind.valueType)
    return found == kind
