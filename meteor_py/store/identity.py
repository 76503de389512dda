"""Store identity: opening a store, and checking that it belongs to its stream."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

from meteor_py.errors import ReadError
from meteor_py.records.position import newest_epoch, table_numbers, with_epoch
from meteor_py.store.base import TERMS, Bounds, RingbufferStore, StatefulStore
from meteor_py.store.errors import store_mismatch
from meteor_py.store.parquet import ParquetStore
from meteor_py.store.state import StreamState, restored

if TYPE_CHECKING:
    from meteor_py.records.descriptions import Meta
    from meteor_py.redis.connector import Connector

_log = logging.getLogger(__name__)

#: Maximum attempts to read a store and its state while another process changes them.
_ATTEMPTS = 5

#: The type of ``store=``: an address, or a store that the user has opened.
Store = str | os.PathLike[str] | RingbufferStore


def open_store(store: Store, stream: str) -> RingbufferStore:
    """Return the store at an address, or ``store`` itself if it is already open.

    Raises:
        TypeError: ``store`` is neither an address nor a store.
        ValueError: The store was opened for another stream, or the address is malformed.
        StoreUnavailable: The store cannot be reached.
    """
    if isinstance(store, (str, os.PathLike)):
        return ParquetStore(store, stream)
    if isinstance(store, type) or not isinstance(store, RingbufferStore):
        raise TypeError(f"store must be an address or a RingbufferStore, not {store!r}.")
    owner = getattr(store, "stream", stream)
    if owner != stream:
        raise ValueError(
            f"{store!r} belongs to stream {owner!r}, not {stream!r}. Open another store."
        )
    return store


def store_fields(
    connector: Connector, store: RingbufferStore, stream: str, resume: bool
) -> tuple[dict[str, str], StreamState | None]:
    """Claim the store for a new stream; return the ``meta`` fields that describe the store.

    With ``resume``, the fields make the stream continue where the last incarnation in the store
    ends. The second result is then the state to restore, if the store has one.

    Raises:
        StoreMismatch: The store belongs to another stream, or did not keep its new id.
        StoreUnavailable: The store cannot be reached.
    """
    if store.identity() is None:
        store.claim(secrets.token_hex(8))
    store_id = store.identity()
    if store_id is None:
        raise store_mismatch(stream, _location(store), None)
    # Number the first epoch by the server's time, so that epochs in different incarnations have
    # different numbers, and the newest epoch has the highest.
    seconds, micros = connector.use(lambda connection: connection.call("TIME"), stream)
    now = int(seconds) * 1000 + int(micros) // 1000
    fields = {"store": store_id, "archived": "0", "expired": "0"}
    fields |= {"epoch": str(now), "epochs": f"{now}:0"}
    incarnations = store.incarnations()
    if incarnations and resume:
        # Change the id, so that the former server's archiver cannot append if it starts again.
        fields |= {"store": secrets.token_hex(8), "store_before": store_id}
        bounds, state = _saved_state(store, stream, incarnations[-1])
        return fields | _resumed_fields(store, incarnations[-1], bounds, now, state), state
    if incarnations:
        _log.warning(
            "The store at %s already holds a history up to offset %d from an earlier stream %r, "
            "and keeps it. To continue that stream, create it with resume=True.",
            *(_location(store), store.bounds(incarnations[-1]).end, stream),
        )
    return fields, None


def _saved_state(
    store: RingbufferStore, stream: str, incarnation: str
) -> tuple[Bounds, StreamState | None]:
    """Return the store's bounds, and the stream's state at the end of the store.

    Log a warning if the store has no state.
    """
    bounds, state = store.bounds(incarnation), None
    if isinstance(store, StatefulStore):
        for _ in range(_ATTEMPTS):
            saved = store.load_states(incarnation)
            state = restored(stream, saved, store.epochs(incarnation), bounds.end)
            before, bounds = bounds, store.bounds(incarnation)
            if bounds == before:
                break  # otherwise, an archiver on the former server is still running
    if state is None:
        _log.warning(
            "The store at %s has the records of stream %r but not its state. Groups will start "
            "from the beginning, and a writer that repeats its last transaction will write it "
            "twice.",
            *(_location(store), stream),
        )
    return bounds, state


def _resumed_fields(
    store: RingbufferStore, incarnation: str, bounds: Bounds, now: int, state: StreamState | None
) -> dict[str, str]:
    first, end, term = bounds
    try:
        (last,) = store.read(incarnation, end - 1, end)
        appended = int(last.column("appended").cast("int64")[0].as_py())
    except ReadError as error:
        _log.warning("Cannot read the last record of stream %r: %s", error.stream, error)
        appended = 0
    # Begin a new epoch, so that readers that have seen more records than the store holds detect the
    # loss. The random part makes the epoch differ from any epoch that the former server began.
    known = term // TERMS if state is None else max(newest_epoch(state.epochs), term // TERMS)
    epoch = max(now, known) + 1 + secrets.randbelow(65_536)
    archived = store.epochs(incarnation)
    if state is not None and set(archived) <= table_numbers(state.epochs):
        epochs = with_epoch(state.epochs, epoch, end)
    else:
        table = [*sorted(archived.items()), (epoch, end)]
        epochs = ",".join(f"{number}:{first}" for number, first in table)
    return {
        "incarnation": incarnation,
        "next": str(end),
        "appended": str(max(now, appended)),
        "epoch": str(epoch),
        "epochs": epochs,
        "archived": str(end),
        "expired": str(first),
    }


def bind(store: RingbufferStore, stream: str, meta: Meta, *, created: bool, resume: bool) -> None:
    """Make sure that the store belongs to the stream.

    Args:
        created: Whether this call created the stream.
        resume: Whether the caller asked to resume the stream from the store.

    Raises:
        StoreMismatch: The store belongs to another stream.
        StoreUnavailable: The store's id could not be read.
    """
    assert meta.store is not None, "the stream has a store"
    found = store.identity()
    if found == meta.store:
        return
    # Another client may have claimed the store at the same time, or the process that resumed the
    # stream may have died before it claimed the store.
    if created or (resume and found is not None and found == meta.store_before):
        store.claim(meta.store, replacing=found)
    check_identity(store, stream, meta.store)


def check_identity(store: RingbufferStore, stream: str, identity: str) -> None:
    """Check that the store has this id.

    Raises:
        StoreMismatch: The store has another id, or none.
        StoreUnavailable: The store's id could not be read.
    """
    found = store.identity()
    if found != identity:
        raise store_mismatch(stream, _location(store), found)


def _location(store: RingbufferStore) -> str:
    return store.uri or repr(store)
