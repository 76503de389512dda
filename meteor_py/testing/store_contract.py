"""The contract of a store as tests: each sentence of ``RingbufferStore`` that can be put to one.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def open_store(self, tmp_path: Path) -> OpenStore:
            return lambda: MyStore(tmp_path)

A record's content follows from its offset and its branch, a number that says which of several
writes it is from: so whatever is read can be compared with what should be there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise, product

import pyarrow as pa
import pytest

from meteor_py.errors import RecordsLost
from meteor_py.records.record import ARROW_SCHEMA
from meteor_py.store.base import Bounds, RingbufferStore

OpenStore = Callable[[], RingbufferStore]

#: A term that no append of the tests has reached.
NEWEST = 2**62
INCARNATION = "0a1b2c"
OTHER = "f00d"
#: Records of a batch in the tables that are appended; an archiver's have many batches, too.
BATCH = 7
READERS = 3


def appended_at(offset: int, branch: int = 0) -> int:
    """Three records each were appended in the same millisecond; later branches later."""
    return 1_700_000_000_000 + branch * 1_000_000_000 + offset // 3 * 10


def records(first: int, stop: int, branch: int = 0) -> pa.Table:
    """The records of a branch: with and without a key, headers, a value; two out of three times."""
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
    """The records from `start` to before `stop` are there, and are those of the branch."""
    found, expected = read(store, start, stop, incarnation), records(start, stop, branch)
    assert found.column("offset").to_pylist() == expected.column("offset").to_pylist()
    assert found.equals(expected), f"{start} to {stop} are not those of branch {branch}"


def check_lost(store: RingbufferStore, start: int, stop: int, first: int, last: int) -> None:
    """Reading gives what comes before the hole, and then says exactly what the hole is."""
    found: list[int] = []
    with pytest.raises(RecordsLost) as caught:
        found.extend(
            n for x in store.read(INCARNATION, start, stop) for n in x["offset"].to_pylist()
        )
    assert found == list(range(start, first))
    assert (caught.value.first, caught.value.last) == (first, last)


class StoreContract:
    """Run it on your own store: subclass it, and say in `open_store` how to open one."""

    @pytest.fixture
    def open_store(self) -> OpenStore:
        """Opens the store of a stream, empty at first; called again, the same one."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, open_store: OpenStore) -> RingbufferStore:
        """One that was claimed, as it is when a stream has been created."""
        store = open_store()
        store.claim("its id")
        return store

    # Whose it is

    def test_it_has_all_methods_of_a_store(self, store: RingbufferStore) -> None:
        assert isinstance(store, RingbufferStore)

    def test_an_address_is_one_at_which_others_find_it(self, store: RingbufferStore) -> None:
        assert store.uri is None or "://" in store.uri

    def test_there_is_no_id_until_it_is_claimed(self, open_store: OpenStore) -> None:
        store = open_store()
        assert store.identity() is None
        store.claim("first")
        assert store.identity() == open_store().identity() == "first"

    def test_of_two_that_claim_it_the_first_one_wins(self, open_store: OpenStore) -> None:
        # Both had seen that it has no id; each asks again what it is.
        open_store().claim("first")
        open_store().claim("second")
        assert open_store().identity() == "first"

    # Appending and reading

    def test_what_was_appended_is_read_as_it_was(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 40))
        check(store, 0, 40)

    def test_who_opens_it_again_finds_everything(
        self, store: RingbufferStore, open_store: OpenStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.append(INCARNATION, 2, records(10, 20))
        again = open_store()
        check(again, 0, 20)
        assert again.bounds(INCARNATION) == Bounds(0, 20, 2)

    def test_any_part_can_be_read(self, store: RingbufferStore) -> None:
        for first, stop in pairwise([0, 8, 9, 24]):
            store.append(INCARNATION, 1, records(first, stop))
        edges = (0, 1, 6, 8, 9, 10, 16, 23, 24)
        for start, stop in product(edges, edges):
            if start < stop:
                check(store, start, stop)

    def test_a_single_record_can_be_read(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 9))
        store.append(INCARNATION, 1, records(9, 16))
        for offset in range(16):
            check(store, offset, offset + 1)

    def test_nothing_is_read_of_nothing(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 9))
        assert list(store.read(INCARNATION, 5, 5)) == []

    def test_batches_have_the_columns_of_the_schema_and_at_least_one_record(
        self, store: RingbufferStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 30))
        for batch in store.read(INCARNATION, 3, 29):
            assert isinstance(batch, pa.RecordBatch)
            assert batch.schema.equals(ARROW_SCHEMA)
            assert len(batch) > 0

    def test_a_reader_need_not_read_to_the_end(self, store: RingbufferStore) -> None:
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

    def test_offsets_may_begin_anywhere_and_be_large(self, store: RingbufferStore) -> None:
        first = (1 << 53) - 12
        store.append(INCARNATION, 1, records(first, first + 10))
        check(store, first + 4, first + 7)
        assert store.bounds(INCARNATION) == Bounds(first, first + 10, 1)

    # Repeats

    def test_an_append_that_is_repeated_changes_nothing(self, store: RingbufferStore) -> None:
        for part in (records(0, 10), records(10, 20), records(10, 20), records(0, 10)):
            store.append(INCARNATION, 1, part)
        check(store, 0, 20)
        assert store.bounds(INCARNATION) == Bounds(0, 20, 1)

    def test_an_append_may_come_again_with_more_behind(self, store: RingbufferStore) -> None:
        for part in (records(0, 10), records(10, 20), records(10, 35), records(35, 40)):
            store.append(INCARNATION, 1, part)
        check(store, 0, 40)
        assert store.bounds(INCARNATION) == Bounds(0, 40, 1)

    # Terms

    def test_a_newer_term_replaces_all_from_its_first_offset_on(
        self, store: RingbufferStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 10, branch=1))
        store.append(INCARNATION, 1, records(10, 30, branch=1))
        store.append(INCARNATION, 2, records(14, 20, branch=2))
        check(store, 0, 14, branch=1)
        check(store, 14, 20, branch=2)
        assert store.bounds(INCARNATION) == Bounds(0, 20, 2)
        check_lost(store, 12, 30, first=20, last=29)
        store.append(INCARNATION, 2, records(20, 40, branch=2))
        check(store, 14, 40, branch=2)

    def test_a_newer_term_that_begins_at_the_end_goes_on(self, store: RingbufferStore) -> None:
        for term in range(1, 5):
            store.append(INCARNATION, term, records(term * 10, term * 10 + 10))
        check(store, 10, 50)
        assert store.bounds(INCARNATION) == Bounds(10, 50, 4)

    @pytest.mark.parametrize("late", [(20, 30), (20, 60), (30, 40)])
    def test_an_append_in_an_older_term_does_not_count(
        self, store: RingbufferStore, late: tuple[int, int]
    ) -> None:
        store.append(INCARNATION, 3, records(0, 20))
        store.append(INCARNATION, 5, records(20, 30))
        store.append(
            INCARNATION, 3, records(*late, branch=1)
        )  # by one that was paused before its commit
        check(store, 0, 30)
        assert store.bounds(INCARNATION).term == 5
        check_lost(store, 10, 60, first=30, last=59)
        store.append(INCARNATION, 5, records(30, 70))
        check(store, 0, 70)

    def test_each_fail_over_may_go_further_back(self, store: RingbufferStore) -> None:
        for term, first, stop in [(1, 0, 50), (2, 40, 60), (3, 20, 45), (4, 30, 33)]:
            store.append(INCARNATION, term, records(first, stop, branch=term))
        check(store, 0, 20, branch=1)
        check(store, 20, 30, branch=3)
        check(store, 30, 33, branch=4)
        check_lost(store, 0, 60, first=33, last=59)

    def test_the_whole_of_a_life_can_be_replaced(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(5, 20, branch=1))
        store.append(INCARNATION, 2, records(5, 9, branch=2))
        check(store, 5, 9, branch=2)
        assert store.bounds(INCARNATION) == Bounds(5, 9, 2)

    # What is not there

    @pytest.mark.parametrize(
        ("start", "stop", "first", "last"),
        [
            (100, 130, 110, 119),  # the hole as a whole
            (105, 115, 110, 114),  # no further than asked for
            (113, 130, 113, 119),  # from inside of it
            (112, 114, 112, 113),
            (125, 140, 130, 139),  # behind the end
            (200, 201, 200, 200),
            (90, 130, 90, 99),  # before the beginning
            (0, 50, 0, 49),
        ],
    )
    def test_records_that_are_not_there_are_named_exactly(
        self, store: RingbufferStore, start: int, stop: int, first: int, last: int
    ) -> None:
        store.append(INCARNATION, 1, records(100, 110))
        store.append(INCARNATION, 1, records(120, 130))
        check_lost(store, start, stop, first, last)
        check(store, 100, 110)
        check(store, 120, 130)

    def test_of_an_unknown_life_everything_is_lost(self, store: RingbufferStore) -> None:
        check_lost(store, 0, 5, first=0, last=4)

    # Finding by time

    def test_a_time_is_found_in_any_part(self, store: RingbufferStore) -> None:
        for first, stop in pairwise([0, 10, 11, 24]):
            store.append(INCARNATION, 1, records(first, stop))
        for start, stop in [(0, 24), (4, 20), (10, 11), (12, 24), (7, 7)]:
            for ms in (appended_at(0) + ms for ms in (-5, 0, 5, 20, 30, 35, 70, 75)):
                late = (n for n in range(start, stop) if appended_at(n) >= ms)
                assert store.locate(INCARNATION, ms, start, stop) == next(late, stop), (
                    ms,
                    start,
                    stop,
                )

    def test_times_of_records_that_do_not_count_are_not_found(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(12, 20, branch=2))
        assert store.locate(INCARNATION, appended_at(9, 1), 0, 20) == 9
        assert store.locate(INCARNATION, appended_at(12, 1), 0, 20) == 12
        assert store.locate(INCARNATION, appended_at(29, 1), 0, 20) == 12
        assert store.locate(INCARNATION, appended_at(15, 2), 0, 20) == 15
        assert store.locate(INCARNATION, appended_at(15, 2), 0, 14) == 14

    # Lives and bounds

    def test_of_an_unknown_life_there_is_nothing(self, store: RingbufferStore) -> None:
        assert store.incarnations() == []
        assert store.bounds(INCARNATION) == Bounds(0, 0, 0)

    def test_lives_are_apart(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 20, branch=1))
        store.append(OTHER, 2, records(0, 10, branch=2))
        check(store, 0, 20, branch=1)
        check(store, 0, 10, branch=2, incarnation=OTHER)
        assert store.bounds(INCARNATION) == Bounds(0, 20, 1)
        assert store.bounds(OTHER) == Bounds(0, 10, 2)

    def test_the_life_that_was_last_appended_to_is_the_last(self, store: RingbufferStore) -> None:
        names = ["0b", "0c", "0a"]
        for term, incarnation in enumerate(names, 1):
            store.append(incarnation, term, records(0, 3))
        assert store.incarnations() == names
        store.append("0c", 4, records(3, 6))  # it was resumed
        assert store.incarnations() == ["0b", "0a", "0c"]

    # Upkeep

    def test_of_a_store_that_is_whole_there_is_nothing_to_tell(
        self, store: RingbufferStore
    ) -> None:
        for first, stop in pairwise([0, 10, 20, 30]):
            store.append(INCARNATION, 1, records(first, stop))
        done: list[tuple[int, int]] = []
        assert list(store.verify(INCARNATION, 10, 30, lambda *told: done.append(told))) == []
        assert done == sorted(done)
        assert done[-1] == (20, 20)
        assert list(store.verify(INCARNATION, 0, 30)) == []

    def test_missing_records_are_told_by_their_offsets(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(10, 20))
        store.append(INCARNATION, 1, records(25, 30))
        flaws = list(store.verify(INCARNATION, 0, 40))
        missing = [(0, 9), (20, 24), (30, 39)]
        assert [(flaw.kind, flaw.first, flaw.last) for flaw in flaws] == [
            ("missing", *each) for each in missing
        ]
        assert not any(flaw.harmless for flaw in flaws)
        assert all(flaw.problem for flaw in flaws)

    def test_what_was_replaced_does_no_harm(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(20, 40, branch=2))
        assert all(flaw.harmless for flaw in store.verify(INCARNATION, 0, 40))

    def test_tidying_leaves_all_that_counts(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(20, 40, branch=2))
        store.append(INCARNATION, 2, records(40, 50, branch=2))
        for still in (False, True):
            store.tidy(INCARNATION, NEWEST, 36, partial(bool, still))
            check(store, 0, 20, branch=1)
            check(store, 20, 36, branch=2)
        store.append(INCARNATION, 3, records(36, 60, branch=3))
        check(store, 20, 36, branch=2)
        check(store, 36, 60, branch=3)

    def test_deleting_below_an_offset_leaves_all_from_there_on(
        self, store: RingbufferStore
    ) -> None:
        for first, stop in pairwise([0, 10, 20, 30]):
            store.append(INCARNATION, 1, records(first, stop))
        store.delete(INCARNATION, 15)
        first = store.bounds(INCARNATION).first  # as far as that is easy
        assert first <= 15
        check(store, first, 30)
        if first:
            check_lost(store, 0, 30, first=0, last=first - 1)
        store.append(INCARNATION, 2, records(30, 40))
        check(store, 15, 40)

    def test_what_was_replaced_does_not_come_back_when_others_are_deleted(
        self, store: RingbufferStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 30, branch=1))
        store.append(INCARNATION, 2, records(10, 20, branch=2))
        store.append(INCARNATION, 2, records(20, 25, branch=2))
        store.delete(INCARNATION, 20)
        check(store, 20, 25, branch=2)
        first = store.bounds(INCARNATION).first
        assert store.bounds(INCARNATION).end == 25
        check(store, max(first, 10), 25, branch=2)

    def test_all_below_the_end_can_be_deleted(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.delete(INCARNATION, 10)
        bounds = store.bounds(INCARNATION)
        assert bounds.first == bounds.end or bounds == Bounds(0, 10, 1)
        store.append(INCARNATION, 2, records(10, 20))
        check(store, 10, 20)

    def test_a_life_is_deleted_as_a_whole_and_others_stay(self, store: RingbufferStore) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.append(OTHER, 2, records(0, 10, branch=2))
        store.delete(INCARNATION)
        assert store.incarnations() == [OTHER]
        assert store.bounds(INCARNATION) == Bounds(0, 0, 0)
        check_lost(store, 0, 10, first=0, last=9)
        check(store, 0, 10, branch=2, incarnation=OTHER)
        assert store.identity() == "its id"

    def test_what_is_not_there_can_be_deleted(self, store: RingbufferStore) -> None:
        store.delete(INCARNATION)
        store.delete(INCARNATION, 10)
        assert store.incarnations() == []

    def test_after_the_last_life_another_can_begin(
        self, store: RingbufferStore, open_store: OpenStore
    ) -> None:
        store.append(INCARNATION, 1, records(0, 10))
        store.delete(INCARNATION)
        again = open_store()
        if again.identity() is None:  # as at the creation of a stream
            again.claim("another")
        again.append(OTHER, 2, records(0, 10))
        check(again, 0, 10, incarnation=OTHER)

    # Concurrency

    def test_many_read_while_terms_come_and_go(
        self, store: RingbufferStore, open_store: OpenStore, rng: random.Random
    ) -> None:
        end = 0
        over = threading.Event()

        def archive() -> None:
            nonlocal end
            try:
                for term in range(1, 7):
                    # Two commits, and an append whose archiver dies before its own.
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
            readers = [pool.submit(consume, rng.getrandbits(32)) for _ in range(READERS)]
            pool.submit(archive).result()
            assert all(reader.result() > 0 for reader in readers)
        check(store, 0, end)
        assert end == 60
