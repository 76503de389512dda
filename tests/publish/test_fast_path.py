"""The fast path accepts records up to the granted number of bytes, and counts them."""

from __future__ import annotations

import threading

import pytest

from meteor_py.publish.ack import Ack
from meteor_py.publish.batch import Batch
from meteor_py.publish.fast_path import RECORD_OVERHEAD, FastPath
from meteor_py.runtime.locks import SignalSafeCondition

SLOW = Ack(Batch(0.0, 0.0), -1)


@pytest.fixture
def lock() -> threading.RLock:
    return threading.RLock()


@pytest.fixture
def path(lock: threading.RLock) -> FastPath:
    path = FastPath(4, lambda value, size: SLOW)
    path.use_lock(lock, SignalSafeCondition(lock))
    return path


def grant(path: FastPath, batch: Batch, values: list[bytes], nbytes: int) -> None:
    path.batch, path.values, path.count = batch, values, len(values)
    path.granted = path.left = nbytes


def test_nothing_is_granted_initially_or_after_a_grant_was_revoked(path: FastPath) -> None:
    assert path.put(b"", 0) is SLOW
    grant(path, Batch(0.0, 0.0), [], 1000)
    path.granted = path.left = 0
    assert path.put(b"", 0) is SLOW


def test_values_are_appended_until_the_granted_bytes_are_used_up(path: FastPath) -> None:
    values: list[bytes] = []
    grant(path, Batch(0.0, 0.0), values, 2 * (RECORD_OVERHEAD + 5))
    assert path.put(b"12345", 5) is not SLOW
    assert (path.count, path.granted - path.left) == (1, RECORD_OVERHEAD + 5)
    assert path.put(b"123456", 6) is SLOW, "one byte too many was accepted"
    assert path.put(b"12345", 5) is not SLOW
    assert path.put(b"", 0) is SLOW
    assert values == [b"12345"] * 2


def test_the_record_that_fills_a_batch_is_left_to_the_accumulator(path: FastPath) -> None:
    grant(path, Batch(0.0, 0.0), [b"first"], 1000)
    assert [path.put(b"", 0) is SLOW for _ in range(3)] == [False, False, True]


def test_an_ack_has_the_index_of_its_record(path: FastPath) -> None:
    batch = Batch(0.0, 0.0)
    grant(path, batch, [b"first"], 1000)
    ack = path.put(b"second", 6)
    batch.base_offset = 10
    batch.settle()
    assert ack.offset == 11


def test_reentrant_publishing_is_refused(path: FastPath, lock: threading.RLock) -> None:
    with lock, pytest.raises(RuntimeError, match="signal handler"):
        path.put(b"", 0)
