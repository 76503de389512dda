"""Errors that only stores raise. ``redis/reply_errors.py`` has those that packages share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meteor_py.errors import CorruptSegment, StoreMismatch, StoreUnavailable
from meteor_py.redis.address import mask


def corrupt_segment(stream: str, first: int, last: int, file: str, problem: str) -> CorruptSegment:
    return CorruptSegment(
        f"Records {first} to {last} of stream {stream!r} are damaged in the store: "
        f"{problem.rstrip('.')}. Restore the file {file} from a copy, or continue after the "
        f"damaged records with skip_gap() or with read() from {last + 1}.",
        stream=stream,
        first=first,
        last=last,
    )


def store_mismatch(stream: str, location: str, found: str | None) -> StoreMismatch:
    problem = f"There is no store for stream {stream!r} at {location}."
    if found is not None:
        problem = f"The store at {location} holds another stream's history, not that of {stream!r}."
    return StoreMismatch(
        f"{problem} No records were read or written. Check the address, and that the right disk is "
        "mounted there.",
        stream=stream,
    )


def store_unavailable(
    stream: str, location: str, action: str, error: BaseException
) -> StoreUnavailable:
    return StoreUnavailable(
        f"The store for stream {stream!r} at {location} cannot be {action} at the moment: "
        f"{mask(str(error)).rstrip('.')}.",
        stream=stream,
    )


@contextmanager
def unavailable(stream: str, location: str, action: str) -> Iterator[None]:
    """Convert filesystem errors to ``StoreUnavailable``."""
    try:
        yield
    except OSError as error:
        raise store_unavailable(stream, location, action, error) from error
