"""The ``RingbufferStore`` contract, as tests for your own store.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_store(self, tmp_path: Path) -> OpenStore:
            return lambda: MyStore(tmp_path)

A record's content depends only on its offset and branch, so tests can compute the expected record
for any offset. A branch is a number that distinguishes conflicting writes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, pairwise

import pyarrow as pa
import pytest

from meteor_py.errors import RecordsLost
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.base import (
    Bounds,
    ConcurrentStore,
    RingbufferStore,
    StatefulStore,
    read_columns,
)

OpenStore = Callable[[], RingbufferStore]

#: A term higher than that of any append in the tests.
NEWEST = 2**62
INCARNATION = "0a1b2c"
OTHER = "f00d"
#: Records per batch in the appended tables. Like an archiver's tables, they have many batches.
BATCH = 7
READERS = 3


def appended_at(offset: int, branch: int = 0) -> int:
    """Return a record's append time in ms since 1970.

    Three consecutive records share each time. Higher branches have later times.
    """
    return 1_700_000_000_000 + branch * 1_000_000_000 + offset // 3 * 10


def records(first: int, stop: int, branch: int = 0) -> pa.Table:
    """Return a branch's records, with all combinations of missing and empty keys and headers."""
    batches = [_batch(range(at, min(at + BATCH, stop)), branch) for at in range(first, stop, BATCH)]
    return pa.Table.from_batches(batches, ARROW_SCHEMA)


def _batch(offsets: range, branch: int) -> pa.RecordBatch:
    headers = [None, [], [("a", b"")], [("a", b"\x00\xff"), ("ü", b"2")]]
    columns = [
        list(offsets),
        [appended_at(n, branch) - n % 5 for n in offsets],
        [appended_at(n, branch) for n in offsets],
        [[None, b"", b"key %d" % (n % 4)][n % 3] for n in offsets],
        [b"" if n % 8 == 5 else b"record %d of branch %d" % (n, branch) for n in offsets],
        [headers[(n + branch) % 4] for n in offsets],
    ]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, ARROW_SCHEMA, strict=True)],
        schema=ARROW_SCHEMA,
    )


def read(store: RingbufferStore, start: int, stop: int, incarnation: str = INCARNATION) -> pa.Table:
    return pa.Table.from_batches(list(store.read(incarnation, start, stop)), ARROW_SCHEMA)


def check(
    store: RingbufferStore, start: int, stop: int, branch: int = 0, incarnation: str = INCARNATION
) -> None:
    """Check that the store returns the branch's records from ``start`` to ``stop`` - 1."""
    found, expected = read(store, start, stop, incarnation), records(start, stop, branch)
    assert found.column("offset").to_pylist() == expected.column("offset").to_pylist()
    assert found.equals(expected), f"records {start} to {stop - 1} are not from branch {branch}"


def check_lost(store: RingbufferStore, start: int, stop: int, first: int, last: int) -> None:
    """Check that reading yields the records before the gap, then reports exactly the gap."""
    found: list[int] = []
    with pytest.raises(RecordsLost) as caught:
        found.extend(
            n for x in store.read(INCARNATION, start, stop) for n in x["offset"].to_pylist()
        )
    assert found == list(range(start, first))
    assert (caught.value.first, caught.value.last) == (first, last)


class StoreContract:
    """The contract's tests. In a subclass, override ``open_store`` to open your store."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Return a function that opens the stream's store, which is empty at first."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_store: OpenStore) -> RingbufferStore:
        """A store that has an id, as if a stream had been created with it."""
        store = open_store()
        store.claim("its id")
        return store

    # Identity

    def test_store_has_all_methods_and_its_uri_is_a_url_or_none(
        self, store: RingbufferStore
    ) -> None:
        assert isinstance(store, RingbufferStore)
        assert store.uri is None or "://" in store.uri

    def test_first_claim_wins(self, open_store: OpenStore) -> None:
        store, other = open_store(), open_store()
        assert store.identity() is other.identity() is None
        store.claim("first")
        assert store.identity() == other.identity() == "first"
        other.claim("second")
        assert store.identity() == other.identity() == open_store().identity() == "first"

    # Appending and reading

    def test_reopened_store_has_all_records(
        self, store: RingbufferStore, open_store: OpenStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.append(INCARNATION, 2, records(10, 20))
        again = open_store()
        check(again, 0, 20)
        assert again.bounds(INCARNATION) == Bounds(0, 20, 2)

    def test_any_range_can_be_read(self, store: RingbufferStore) -> None:
        for first, stop in pairwise([0, 8, 9, 24]):
            store.append(INCARNATION, 1, records(first, stop))
        for start, stop in combinations((0, 1, 6, 7, 8, 9, 10, 16, 23, 24), 2):
            check(store, start, stop)
        assert list(store.read(INCARNATION, 5, 5)) == []

    def test_batches_have_the_schema_and_are_not_empty(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30))
        for batch in store.read(INCARNATION, 3, 29):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema.equals(ARROW_SCHEMA)
            assert len(batch) > 0

    def test_reader_can_stop_early(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.append(INCARNATION, 1, records(10, 20))
        for _ in range(3):
            assert next(iter(store.read(INCARNATION, 0, 20))).column("offset")[0].as_py() == 0
        store.append(INCARNATION, 1, records(20, 30))
        check(store, 0, 30)

    def test_large_values_can_be_read_one_by_one(self, store: RingbufferStore) -> None:
        table = records(0, 5)
        values = [bytes([n]) * size for n, size in enumerate((3_000_000, 0, 5_000_000, 1, 9))]
        position = ARROW_SCHEMA.get_field_index("value")
        table = table.set_column(position, ARROW_SCHEMA.field("value"), pa.array(values))
        store.append(INCARNATION, 1, table)
        for n in range(5):
            assert read(store, n, n + 1).column("value").to_pylist() == [values[n]]
        assert read(store, 0, 5).equals(table)

    def test_first_offset_can_be_large(self, store: RingbufferStore) -> None:
        first = (1 << 53) - 12
        store.append(INCARNATION, 1, records(first, first + 10))
        check(store, first + 4, first + 7)
        assert store.bounds(INCARNATION) == Bounds(first, first + 10, 1)

    @pytest.mark.parametrize(
        "columns", [("value",), ("appended", "offset"), ("headers", "key"), ()]
    )
    def test_only_requested_columns_are_read(
        self, store: RingbufferStore, columns: tuple[str, ...]
    ) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.append(INCARNATION, 1, records(10, 30))
        found = list(read_columns(store, INCARNATION, 4, 25, columns))
        assert sum(len(batch) for batch in found) == 21
        assert {tuple(batch.schema.names) for batch in found} == {columns}
        if columns:
            expected = records(4, 25).select(list(columns))
            assert pa.Table.from_batches(found).equals(expected.combine_chunks())
        with pytest.raises(RecordsLost):
            list(read_columns(store, INCARNATION, 25, 31, columns))

    def test_deferred_batches_can_be_read_at_once_in_any_order_or_dropped(
        self, store: RingbufferStore
    ) -> None:
        if not isinstance(store, ConcurrentStore):
            pytest.skip("Concurrent reading is optional, and this store does not support it.")
        for first in range(0, 40, 10):
            store.append(INCARNATION, 1, records(first, first + 10))
        batches = list(store.deferred_batches(INCARNATION, 3, 38))
        with ThreadPoolExecutor(READERS) as threads:
            found = list(threads.map(lambda read_batch: read_batch(), reversed(batches)))
        expected = records(3, 38)
        assert pa.Table.from_batches(found[::-1]).equals(expected.combine_chunks())
        columns = ["value", "key"]
        dropped = [*store.deferred_batches(INCARNATION, 0, 40, columns)]
        assert dropped.pop()().num_rows > 0
        with pytest.raises(RecordsLost):
            [read_batch() for read_batch in store.deferred_batches(INCARNATION, 35, 45)]

    # States

    def test_store_keeps_last_state_of_each_term(
        self, store: RingbufferStore, open_store: OpenStore
    ) -> None:
        if not isinstance(store, StatefulStore):
            pytest.skip("Keeping states is optional, and this store does not keep them.")
        assert store.load_states(INCARNATION) == {}
        store.save_state(INCARNATION, 1, b"one")
        store.append(INCARNATION, 1, records(0, 10))
        store.save_state(INCARNATION, 1, b"two")
        store.save_state(INCARNATION, 2, b"three")  # term 2's archiver dies before its append
        store.save_state(OTHER, 7, b"other")
        again = open_store()
        assert isinstance(again, StatefulStore)
        assert again.load_states(INCARNATION) == {1: b"two", 2: b"three"}
        assert store.bounds(INCARNATION) == Bounds(0, 10, 1)
        assert store.incarnations() == [INCARNATION]
        store.tidy(INCARNATION, 2, 10, lambda: True)
        assert store.load_states(INCARNATION) == {1: b"two", 2: b"three"}
        store.delete(INCARNATION)
        assert store.load_states(INCARNATION) == {}

    # Repeats

    def test_repeated_append_changes_nothing(self, store: RingbufferStore) -> None:
        for part in (records(0, 10), records(10, 20), records(10, 20), records(0, 10)):
            store.append(INCARNATION, 1, part)
        check(store, 0, 20)
        assert store.bounds(INCARNATION) == Bounds(0, 20, 1)

    def test_append_can_be_repeated_with_more_records(self, store: RingbufferStore) -> None:
        for part in (records(0, 10), records(10, 20), records(10, 35), records(35, 40)):
            store.append(INCARNATION, 1, part)
        check(store, 0, 40)
        assert store.bounds(INCARNATION) == Bounds(0, 40, 1)

    # Terms

    def test_newer_term_replaces_all_records_from_its_start(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 10, branch=1))
        store.append(INCARNATION, 1, records(10, 30, branch=1))
        store.append(INCARNATION, 2, records(14, 20, branch=2))
        check(store, 0, 14, branch=1)
        check(store, 14, 20, branch=2)
        assert store.bounds(INCARNATION) == Bounds(0, 20, 2)
        check_lost(store, 12, 30, first=20, last=29)
        store.append(INCARNATION, 2, records(20, 40, branch=2))
        check(store, 14, 40, branch=2)

    def test_newer_term_that_starts_at_the_end_replaces_nothing(
        self, store: RingbufferStore
    ) -> None:
        for term in range(1, 5):
            store.append(INCARNATION, term, records(term * 10, term * 10 + 10))
        check(store, 10, 50)
        assert store.bounds(INCARNATION) == Bounds(10, 50, 4)

    @pytest.mark.parametrize("late", [(20, 30), (20, 60), (30, 40)])
    def test_late_append_in_an_older_term_is_ignored(
        self, store: RingbufferStore, late: tuple[int, int]
    ) -> None:
        store.append(INCARNATION, 3, records(0, 20))
        store.append(INCARNATION, 5, records(20, 30))
        # An archiver that was paused before its commit continues.
        store.append(INCARNATION, 3, records(*late, branch=1))
        check(store, 0, 30)
        assert store.bounds(INCARNATION).term == 5
        check_lost(store, 10, 60, first=30, last=59)
        store.append(INCARNATION, 5, records(30, 70))
        check(store, 0, 70)

    def test_each_of_several_newer_terms_replaces_records(self, store: RingbufferStore) -> None:
        for term, first, stop in [(1, 0, 50), (2, 40, 60), (3, 20, 45), (4, 30, 33)]:
            store.append(INCARNATION, term, records(first, stop, branch=term))
        check(store, 0, 20, branch=1)
        check(store, 20, 30, branch=3)
        check(store, 30, 33, branch=4)
        check_lost(store, 0, 60, first=33, last=59)

    def test_newer_term_can_replace_all_records(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(5, 20, branch=1))
        store.append(INCARNATION, 2, records(5, 9, branch=2))
        check(store, 5, 9, branch=2)
        assert store.bounds(INCARNATION) == Bounds(5, 9, 2)

    # Gaps

    @pytest.mark.parametrize(
        ("start", "stop", "first", "last"),
        [
            (100, 130, 110, 119),  # the whole gap
            (105, 115, 110, 114),  # up to the end of the request
            (113, 130, 113, 119),  # from inside the gap
            (112, 114, 112, 113),
            (125, 140, 130, 139),  # beyond the last record
            (200, 201, 200, 200),
            (90, 130, 90, 99),  # before the first record
            (0, 50, 0, 49),
        ],
    )
    def test_missing_records_are_reported_exactly(
        self, store: RingbufferStore, start: int, stop: int, first: int, last: int
    ) -> None:
        store.append(INCARNATION, 1, records(100, 110))
        store.append(INCARNATION, 1, records(120, 130))
        check_lost(store, start, stop, first, last)
        check(store, 100, 110)
        check(store, 120, 130)

    # Times

    def test_locate_finds_a_time_in_any_range(self, store: RingbufferStore) -> None:
        for first, stop in pairwise([0, 10, 11, 24]):
            store.append(INCARNATION, 1, records(first, stop))
        for start, stop in [(0, 24), (4, 20), (10, 11), (12, 24), (7, 7)]:
            for ms in (appended_at(0) + ms for ms in (-5, 0, 5, 20, 30, 35, 70, 75)):
                late = (n for n in range(start, stop) if appended_at(n) >= ms)
                found = store.locate(INCARNATION, ms, start, stop)
                assert found == next(late, stop), (ms, start, stop)

    def test_locate_ignores_replaced_records(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(12, 20, branch=2))
        assert store.locate(INCARNATION, appended_at(9, 1), 0, 20) == 9
        assert store.locate(INCARNATION, appended_at(12, 1), 0, 20) == 12
        assert store.locate(INCARNATION, appended_at(29, 1), 0, 20) == 12
        assert store.locate(INCARNATION, appended_at(15, 2), 0, 20) == 15
        assert store.locate(INCARNATION, appended_at(15, 2), 0, 14) == 14

    # Incarnations and bounds

    def test_unknown_incarnation_is_empty_and_can_be_deleted(self, store: RingbufferStore) -> None:
        store.delete(INCARNATION)
        store.delete(INCARNATION, 10)
        assert store.incarnations() == []
        assert store.bounds(INCARNATION) == Bounds(0, 0, 0)
        check_lost(store, 0, 5, first=0, last=4)

    def test_incarnations_are_separate(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 20, branch=1))
        store.append(OTHER, 2, records(0, 10, branch=2))
        check(store, 0, 20, branch=1)
        check(store, 0, 10, branch=2, incarnation=OTHER)
        assert store.bounds(INCARNATION) == Bounds(0, 20, 1)
        assert store.bounds(OTHER) == Bounds(0, 10, 2)

    def test_incarnations_are_ordered_by_last_append(self, store: RingbufferStore) -> None:
        names = ["0b", "0c", "0a"]
        for term, incarnation in enumerate(names, 1):
            store.append(incarnation, term, records(0, 3))
        assert store.incarnations() == names
        store.append("0c", 4, records(3, 6))  # the incarnation was resumed
        assert store.incarnations() == ["0b", "0a", "0c"]

    # Maintenance

    def test_verify_finds_no_flaws_in_an_intact_store(self, store: RingbufferStore) -> None:
        for first, stop in pairwise([0, 10, 20, 30]):
            store.append(INCARNATION, 1, records(first, stop))
        done: list[tuple[int, int]] = []
        assert list(store.verify(INCARNATION, 10, 30, lambda *step: done.append(step))) == []
        assert done == sorted(done)
        assert done[-1] == (20, 20)
        assert list(store.verify(INCARNATION, 0, 30)) == []

    def test_verify_reports_missing_records(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(10, 20))
        store.append(INCARNATION, 1, records(25, 30))
        flaws = list(store.verify(INCARNATION, 0, 40))
        missing = [(0, 9), (20, 24), (30, 39)]
        assert [(flaw.kind, flaw.first, flaw.last) for flaw in flaws] == [
            ("missing", *each) for each in missing
        ]
        assert not any(flaw.harmless for flaw in flaws)
        assert all(flaw.problem for flaw in flaws)

    def test_verify_reports_no_harmful_flaw_for_replaced_records(
        self, store: RingbufferStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(20, 40, branch=2))
        assert all(flaw.harmless for flaw in store.verify(INCARNATION, 0, 40))

    def test_tidy_keeps_all_live_records(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(20, 40, branch=2))
        store.append(INCARNATION, 2, records(40, 50, branch=2))
        for is_owner in (False, True):
            store.tidy(INCARNATION, NEWEST, 36, partial(bool, is_owner))
            check(store, 0, 20, branch=1)
            check(store, 20, 36, branch=2)
        store.append(INCARNATION, 3, records(36, 60, branch=3))
        check(store, 20, 36, branch=2)
        check(store, 36, 60, branch=3)

    def test_delete_below_an_offset_keeps_later_records(self, store: RingbufferStore) -> None:
        for first, stop in pairwise([0, 10, 20, 30]):
            store.append(INCARNATION, 1, records(first, stop))
        store.delete(INCARNATION, 15)
        first = store.bounds(INCARNATION).first  # a store may keep more records
        assert first <= 15
        check(store, first, 30)
        if first:
            check_lost(store, 0, 30, first=0, last=first - 1)
        store.append(INCARNATION, 2, records(30, 40))
        check(store, 15, 40)

    def test_delete_does_not_revive_replaced_records(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(10, 20, branch=2))
        store.append(INCARNATION, 2, records(20, 25, branch=2))
        store.delete(INCARNATION, 20)
        check(store, 20, 25, branch=2)
        first = store.bounds(INCARNATION).first
        assert store.bounds(INCARNATION).end == 25
        check(store, max(first, 10), 25, branch=2)

    def test_append_continues_after_all_records_were_deleted(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.delete(INCARNATION, 10)
        bounds = store.bounds(INCARNATION)
        assert bounds.first == bounds.end or bounds == Bounds(0, 10, 1)
        store.append(INCARNATION, 2, records(10, 20))
        check(store, 10, 20)

    def test_deleting_an_incarnation_keeps_the_others(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.append(OTHER, 2, records(0, 10, branch=2))
        store.delete(INCARNATION)
        assert store.incarnations() == [OTHER]
        assert store.bounds(INCARNATION) == Bounds(0, 0, 0)
        check_lost(store, 0, 10, first=0, last=9)
        check(store, 0, 10, branch=2, incarnation=OTHER)
        assert store.identity() == "its id"

    def test_another_incarnation_can_follow_a_deleted_one(
        self, store: RingbufferStore, open_store: OpenStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.delete(INCARNATION)
        again = open_store()
        if again.identity() is None:  # then a new stream would claim the store
            again.claim("another")
        again.append(OTHER, 2, records(0, 10))
        check(again, 0, 10, incarnation=OTHER)

    # Concurrency

    def test_readers_see_consistent_records_while_terms_change(
        self, store: RingbufferStore, open_store: OpenStore
    ) -> None:
        end = 0
        over = threading.Event()

        def archive() -> None:
            nonlocal end
            try:
                for term in range(1, 7):
                    # Two committed appends, and one whose archiver dies before the commit.
                    for _ in range(2):
                        store.append(INCARNATION, term, records(end, end + 5))
                        end += 5
                    store.append(INCARNATION, term, records(end, end + 9, branch=term))
            finally:
                over.set()

        def consume(seed: int) -> int:
            mine, choose, rounds = open_store(), random.Random(seed), 0
            while not over.is_set() or rounds == 0:
                stop = end
                start = choose.randint(0, stop)
                check(mine, start, stop)
                assert mine.bounds(INCARNATION).end >= stop
                assert mine.locate(INCARNATION, appended_at(start), 0, stop) == start // 3 * 3
                rounds += stop > 0
            return rounds

        with ThreadPoolExecutor(READERS + 1) as pool:
            readers = [pool.submit(consume, seed) for seed in range(READERS)]
            pool.submit(archive).result()
            assert all(reader.result() > 0 for reader in readers)
        check(store, 0, end)
        assert end == 60
