"""The identity of a store: opening it, and checking that it belongs to its stream."""

from __future__ import annotations

import logging
import os
import secrets
from typing import TYPE_CHECKING

from meteor_py.errors import ReadError
from meteor_py.redis import reply_errors
from meteor_py.store.base import TERMS, RingbufferStore
from meteor_py.store.parquet import ParquetStore

if TYPE_CHECKING:
    from meteor_py.records.descriptions import Meta
    from meteor_py.redis.connector import Connector

_log = logging.getLogger(__name__)

Store = str | os.PathLike[str] | RingbufferStore


def open_store(store: Store, stream: str) -> RingbufferStore:
    """Return the store at an address, or ``store`` itself if it is one.

    Raises:
        ValueError, TypeError: It is neither, or was made for another stream.
        StoreUnavailable: It cannot be reached.
    """
    if isinstance(store, (str, os.PathLike)):
        return ParquetStore(store, stream)
    if isinstance(store, type) or not isinstance(store, RingbufferStore):
        raise TypeError(f"store must be an address or a RingbufferStore, not {store!r}.")
    made_for = getattr(store, "stream", stream)
    if made_for != stream:
        raise ValueError(f"{store!r} is for stream {made_for!r}, not {stream!r}; make another.")
    return store


def store_fields(
    connector: Connector, store: RingbufferStore, stream: str, resume: bool
) -> dict[str, str]:
    """Claim the store for a new stream and return the fields of ``meta`` that concern it.

    With ``resume``, they continue the last incarnation in the store at its end.
    """
    if store.identity() is None:
        store.claim(secrets.token_hex(8))
    identity = store.identity()
    if identity is None:
        raise reply_errors.store_mismatch(stream, _shown(store), None)
    # Epochs must also differ between incarnations, and the newest must have the highest number. So
    # the first epoch is the server's time.
    seconds, micros = connector.call("TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    fields = {"store": identity, "archived": "0", "expired": "0"}
    fields |= {"epoch": str(now), "epochs": f"{now}:0"}
    incarnations = store.incarnations()
    if incarnations and resume:
        # Another id: the server that was believed lost may come back, and must not append to it.
        fields |= {"store": secrets.token_hex(8), "store_before": identity}
        fields |= _resumed(store, incarnations[-1], now)
    elif incarnations:
        end = store.bounds(incarnations[-1]).end
        _log.warning(
            "The store at %s holds %d records of an earlier stream %r, which are left there; "
            "resume=True would continue that stream.",
            *(_shown(store), end, stream),
        )
    return fields


def _resumed(store: RingbufferStore, incarnation: str, now: int) -> dict[str, str]:
    first, end, term = store.bounds(incarnation)
    try:
        (last,) = store.read(incarnation, end - 1, end)
        appended = int(last.column("appended").cast("int64")[0].as_py())
    except ReadError as error:
        _log.warning("The last record of stream %r cannot be read: %s", error.stream, error)
        appended = 0
    # A new epoch: a reader that has seen more than the store holds learns that it is gone.
    epoch = max(now, term // TERMS + 1)
    epochs = [*sorted(store.epochs(incarnation).items()), (epoch, end)]
    return {
        "incarnation": incarnation,
        "next": str(end),
        "appended": str(max(now, appended)),
        "epoch": str(epoch),
        "epochs": ",".join(f"{number}:{start}" for number, start in epochs),
        "archived": str(end),
        "expired": str(first),
    }


def bind(store: RingbufferStore, stream: str, meta: Meta, *, created: bool, resume: bool) -> None:
    """Make sure that this is the store of the stream.

    Args:
        created: This call created the stream.
        resume: The caller asked to resume the stream from the store.

    Raises:
        StoreMismatch: It is not.
        StoreUnavailable: It could not be looked at.
    """
    assert meta.store is not None, "it has a store"
    seen = store.identity()
    if seen == meta.store:
        return
    # Another creator may have claimed it at the same moment; or the process that resumed the stream
    # died before it had claimed the store.
    if created or (resume and seen is not None and seen == meta.store_before):
        store.claim(meta.store, replacing=seen)
    check_identity(store, stream, meta.store)


def check_identity(store: RingbufferStore, stream: str, identity: str) -> None:
    """Check that this is the store with that id.

    Raises:
        StoreMismatch: It is another, or there is none.
        StoreUnavailable: It could not be looked at.
    """
    seen = store.identity()
    if seen != identity:
        raise reply_errors.store_mismatch(stream, _shown(store), seen)


def _shown(store: RingbufferStore) -> str:
    return store.uri or repr(store)
