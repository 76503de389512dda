"""A reader that goes through a store sequentially prefetches the next two batches.

A prefetched batch is delivered at its offset or not at all, even after a seek, Ctrl-C, a fork, a
close or a change to the stream.
"""

from __future__ import annotations

import gc
import io
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import meteor_py as meteor
from meteor_py.runtime.threads import JoinableThread
from meteor_py.store.storage import LocalStorage
from tests.support.group_members import Process
from tests.support.readers import background, check_values, drain, fill
from tests.support.stored_streams import (
    ObservedStore,
    archive,
    fill_segments,
    kept,
    read_all,
    read_straight,
    segments,
)
from tests.support.waiting import eventually

#: Readers get offsets below STORED from the store, in twelve batches. The log ends at END.
STORED = 60
END = 70


@pytest.fixture
def store(tmp_path: Path) -> ObservedStore:
    return ObservedStore(tmp_path)


@pytest.fixture
def stream(
    url: str, store: ObservedStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[meteor.Stream]:
    """Segments of 30 records, row groups of five, and a ring of ten."""
    monkeypatch.setattr("meteor_py.store.segment_file.GROUP_RECORDS", 5)
    with meteor.connect(url) as m:
        stream = m.stream(store.stream, capacity=10, store=store, archive=False)
        for size in (30, 30, 10):
            fill(stream, *[10] * (size // 10))
            archive(stream)
        yield stream


def threads() -> list[str]:
    return [
        each.name for each in threading.enumerate() if each.name.startswith("meteor-read-ahead")
    ]


def open_files(folder: Path) -> list[str]:
    """Return the names of this process's open files in a folder."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in found if name.startswith(str(folder))]


def hold_batch(store: ObservedStore, at: int) -> tuple[threading.Event, threading.Event]:
    """Let the store block in the batch at this offset; return events that it sets and waits for."""
    begun, finish = threading.Event(), threading.Event()

    def hold(first: int) -> None:
        if first == at:
            begun.set()
            assert finish.wait(30)

    store.on_batch = hold
    return begun, finish


# Reading ahead


def test_sequential_reader_finds_the_next_two_batches_already_fetched(
    stream: meteor.Stream, store: ObservedStore
) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        assert check_values(sub.poll(timeout=0)) == [0, 1, 2, 3, 4]
        assert (store.batches, threads()) == ([0], [])
        assert read_straight(sub) == [5, 6, 7, 8, 9]
        assert sorted(store.batches) == [0, 5, 10, 15]
        assert drain(sub) == list(range(10, END))
        assert sorted(store.batches) == list(range(0, STORED, 5))  # each batch was read once
    assert threads() == []


def test_two_batches_are_fetched_at_once_and_returned_in_order(
    stream: meteor.Stream, store: ObservedStore
) -> None:
    second = threading.Event()

    def finish_the_second_batch_first(first: int) -> None:
        if first == 10:
            assert second.wait(30), "the next batch was not fetched at the same time"
        elif first == 15:
            second.set()

    store.on_batch = finish_the_second_batch_first
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == list(range(END))


def test_reader_that_pauses_ends_its_threads_and_starts_others_later(
    stream: meteor.Stream, store: ObservedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meteor_py.store.read_ahead._IDLE_S", 0.01)
    offsets: list[int] = []
    most = 0
    with stream.subscriber(initial_offset="earliest") as sub:
        while sub.position < END:
            offsets += check_values(sub.poll(timeout=5))
            most = max(most, len(threads()))
            eventually(lambda: threads() == [])
    assert offsets == list(range(END))
    assert 1 <= most <= 2
    assert sorted(store.batches) == list(range(0, STORED, 5))


def test_reader_that_is_dropped_without_close_leaves_no_threads(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meteor_py.store.read_ahead._IDLE_S", 0.01)
    batches = stream.read()
    while not threads():
        next(batches)
    del batches
    gc.collect()
    eventually(lambda: threads() == [])


def test_reader_that_seeks_often_prefetches_nothing(
    stream: meteor.Stream, store: ObservedStore, rng: random.Random
) -> None:
    targets = [n for n in rng.sample(range(STORED), 30) if n % 5]  # never where a batch ends
    with stream.subscriber() as sub:
        for target in targets:
            sub.seek(target)
            assert check_values(sub.poll(timeout=0, max_records=1)) == [target]
    assert store.batches == targets
    assert threads() == []


def test_a_seek_does_not_return_prefetched_records(stream: meteor.Stream) -> None:
    with stream.subscriber() as sub:
        for target in (3, 42, 0, STORED - 1, STORED, END - 1, 12):
            sub.seek(0)
            read_straight(sub)
            sub.seek(target)
            assert drain(sub) == list(range(target, END))


def test_a_seek_to_the_prefetched_offset_works(stream: meteor.Stream) -> None:
    with stream.subscriber(initial_offset="earliest") as sub:
        seen = read_straight(sub)
        sub.seek(len(seen))
        assert drain(sub) == list(range(len(seen), END))


def test_an_error_while_prefetching_is_raised_when_its_batch_is_due(
    stream: meteor.Stream, store: ObservedStore
) -> None:
    def fail(first: int) -> None:
        if first == 10 and store.batches.count(10) == 1:
            raise meteor.StoreUnavailable("The disk is unavailable.", stream=stream.name)

    store.on_batch = fail
    with stream.subscriber(initial_offset="earliest") as sub:
        assert read_straight(sub) == list(range(10))
        with pytest.raises(meteor.StoreUnavailable, match="The disk is unavailable"):
            sub.poll(timeout=0)
        assert sub.position == 10
        assert drain(sub) == list(range(10, END))


def test_two_subscribers_on_one_stream_object_do_not_interfere(
    stream: meteor.Stream, rng: random.Random
) -> None:
    subs = [stream.subscriber(initial_offset="earliest") for _ in range(2)]
    seen: list[list[int]] = [[], []]
    try:
        while min(map(len, seen)) < END:
            which = rng.randrange(2)
            batch = subs[which].poll(timeout=0, max_records=rng.choice([1, 4, 100]))
            seen[which] += check_values(batch)
    finally:
        for sub in subs:
            sub.close()
    assert seen == [list(range(END))] * 2


def test_a_reply_to_a_prefetch_is_not_mistaken_for_the_reply_to_another_command(
    url: str, tmp_path: Path
) -> None:
    with meteor.connect(url) as m:
        stream = kept(m, tmp_path, capacity=1_000, max_unarchived=100_000)
        fill(stream, *[1] * 400)
        archive(stream)
        with stream.subscriber(initial_offset="earliest") as sub:
            log = sub._fetcher.buffer._log
            while log._ring._ahead is None:
                check_values(sub.poll(timeout=0))
            # As if the ring had been trimmed between the replies to the last fetch.
            assert log._store is not None
            log._store.ring_start = 400
            position = sub.position
            assert drain(sub) == list(range(position, 400))


# Interruptions


@pytest.mark.parametrize("when", [0, 5, 10, 15, 30, 55])
def test_ctrl_c_while_reading_the_store_neither_loses_nor_duplicates_a_record(
    stream: meteor.Stream, store: ObservedStore, when: int
) -> None:
    def interrupt(first: int) -> None:
        if first == when and store.batches.count(when) < 3:
            raise KeyboardInterrupt

    store.on_batch = interrupt
    offsets: list[int] = []
    interrupts = 0
    with stream.subscriber(initial_offset="earliest") as sub:
        while len(offsets) < END:
            try:
                offsets += check_values(sub.poll(timeout=0))
            except KeyboardInterrupt:
                interrupts += 1
    assert offsets == list(range(END))
    assert interrupts == 2


# An interrupt may leave a socket to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_keeps_position_and_records_consistent(
    stream: meteor.Stream, rng: random.Random
) -> None:
    gc.collect()
    gc.disable()  # Python swallows exceptions raised in a finalizer
    interrupts = 0
    try:
        with stream.subscriber() as sub:
            for _ in range(150):
                timer = threading.Timer(rng.uniform(0.0005, 0.006), interrupt_main)
                try:
                    timer.start()
                    while timer.is_alive():
                        position = sub.position
                        batch = sub.poll(timeout=0, max_records=3)
                        assert batch.first_offset == position
                        check_values(batch)
                        if sub.position == END:
                            sub.seek(rng.randrange(20))
                except KeyboardInterrupt:
                    interrupts += 1
                timer.join()
            position = sub.position
            assert drain(sub) == list(range(position, END))
    finally:
        gc.enable()
    assert interrupts > 20


def interrupt_main() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_close_waits_for_a_running_fetch_and_leaves_no_thread(
    stream: meteor.Stream, store: ObservedStore
) -> None:
    begun, finish = hold_batch(store, 10)
    sub = stream.subscriber(initial_offset="earliest")
    while sub.position < 10:
        sub.poll(timeout=0)
    assert begun.wait(30)
    with background(lambda _: sub.close()) as closing:
        assert threads()
        finish.set()
        closing.join(30)
    assert threads() == []
    sub.close()


@pytest.mark.parametrize("when", [0, 5, 10, 15])
def test_close_in_another_thread_ends_a_poll_that_waits_for_the_store(
    stream: meteor.Stream, store: ObservedStore, when: int
) -> None:
    begun, finish = hold_batch(store, when)
    sub = stream.subscriber(initial_offset="earliest")
    offsets: list[int] = []
    refusals: list[str] = []

    def read(stop: threading.Event) -> None:
        while not sub.closed:
            try:
                offsets.extend(check_values(sub.poll(timeout=20)))
            except meteor.MeteorError as error:
                refusals.append(str(error))

    with background(read):
        assert begun.wait(30)
        with background(lambda _: sub.close()):
            eventually(lambda: sub.closed)
            finish.set()
    assert offsets == list(range(len(offsets)))
    assert all("closed" in refusal for refusal in refusals)
    assert threads() == []


def test_close_by_a_signal_handler_while_a_thread_starts_leaves_no_thread(
    stream: meteor.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = JoinableThread.start

    def close_and_start(thread: JoinableThread) -> None:
        if thread.name.startswith("meteor-read-ahead"):
            sub.close()
        start(thread)

    monkeypatch.setattr(JoinableThread, "start", close_and_start)
    sub = stream.subscriber(initial_offset="earliest")
    offsets: list[int] = []
    while not sub.closed:
        offsets += check_values(sub.poll(timeout=0))
    assert offsets == list(range(len(offsets)))
    assert threads() == []


@pytest.fixture
def allow_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that limits the number of threads that read ahead at the same time."""
    start = JoinableThread.start

    def allow(most: int) -> None:
        def start_if_allowed(thread: JoinableThread) -> None:
            if thread.name.startswith("meteor-read-ahead") and len(threads()) >= most:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(JoinableThread, "start", start_if_allowed)

    return allow


@pytest.mark.parametrize("most", [0, 1])
def test_reader_that_cannot_start_threads_reads_every_batch_once(
    stream: meteor.Stream, store: ObservedStore, allow_threads: Callable[[int], None], most: int
) -> None:
    allow_threads(most)
    with stream.subscriber(initial_offset="earliest") as sub:
        assert drain(sub) == list(range(END))
    assert sorted(store.batches) == list(range(0, STORED, 5))
    assert threads() == []


def test_batches_requested_before_a_seek_are_not_read(
    stream: meteor.Stream, store: ObservedStore, allow_threads: Callable[[int], None]
) -> None:
    begun, finish = hold_batch(store, 10)
    allow_threads(1)  # it reads the batch at 10, so the one at 15 waits
    with stream.subscriber(initial_offset="earliest") as sub:
        for first in (0, 5):
            assert check_values(sub.poll(timeout=0)) == list(range(first, first + 5))
        assert begun.wait(30)
        sub.seek(40)
        assert check_values(sub.poll(timeout=0)) == list(range(40, 45))
        finish.set()
        eventually(lambda: threads() == [])
    assert sorted(store.batches) == [0, 5, 10, 40]


def test_files_are_closed_after_an_error_without_the_garbage_collector(
    stream: meteor.Stream, store: ObservedStore, tmp_path: Path
) -> None:
    def fail(first: int) -> None:
        if first >= 10:
            raise meteor.CorruptSegment("Damaged.", stream=stream.name, first=first, last=first)

    store.on_batch = fail
    gc.disable()
    try:
        with stream.subscriber(initial_offset="earliest") as sub:
            assert read_straight(sub) == list(range(10))
            assert open_files(tmp_path)
            with pytest.raises(meteor.CorruptSegment):
                sub.poll(timeout=0)
        eventually(lambda: open_files(tmp_path) == [])
    finally:
        gc.enable()


FORK = """
import os, sys, threading
import meteor_py as meteor
from tests.support.readers import check_values, drain
from tests.support.stored_streams import ObservedStore, read_ahead_of, wait_fetched

url, root, state = sys.argv[1:]
parent, begun, finish = os.getpid(), threading.Event(), threading.Event()
store = ObservedStore(root)

def hold(first):
    if os.getpid() == parent and threading.current_thread() is not threading.main_thread():
        begun.set()
        assert state == "done" or finish.wait(30)

store.on_batch = hold
stream = meteor.connect(url).stream("kept", store=store, archive=False)
sub = stream.subscriber(initial_offset="earliest")
seen = []
while read_ahead_of(sub).ahead == 0:
    seen += check_values(sub.poll(timeout=0))
assert begun.wait(30)
if state == "done":
    wait_fetched(read_ahead_of(sub))
pid = os.fork()
finish.set()
seen += drain(sub)
good = seen == list(range(70))
if pid == 0:
    sub.close()
    os._exit(0 if good else 1)
print(good, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
sub.close()
"""


@pytest.mark.parametrize("state", ["running", "done"])
def test_after_a_fork_parent_and_child_continue_despite_a_prefetched_batch(
    url: str, stream: meteor.Stream, tmp_path: Path, state: str
) -> None:
    process = Process("-W", "ignore", "-c", FORK, url, str(tmp_path), state)
    try:
        assert process.read() == "True 0"
    finally:
        process.close()


# Reading no more than needed


class CountingFile(io.FileIO):
    """A file that adds the number of bytes it reads to a total for all files."""

    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        CountingFile.total += len(data)
        return data


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the segments opened so far. All reads go through ``CountingFile``."""
    paths: list[str] = []

    def open_counted(folder: LocalStorage, path: str) -> Any:
        paths.append(path)
        return pa.PythonFile(CountingFile(folder._inside(path)), mode="r")

    monkeypatch.setattr(LocalStorage, "open", open_counted)
    monkeypatch.setattr(CountingFile, "total", 0)
    return paths


def test_reading_one_record_among_many_segments_opens_at_most_three_files(
    url: str, tmp_path: Path, opened: list[str], rng: random.Random
) -> None:
    with meteor.connect(url) as m:
        stream = kept(m, tmp_path)
        fill_segments(stream, *[3] * 40)
        assert len(segments(tmp_path)) == 40
        for target in [0, 109, *rng.sample(range(110), 10)]:
            opened.clear()
            assert read_all(stream, target, target + 1) == [target]
            assert len(opened) <= 3


def test_reading_one_record_does_not_read_the_rest_of_its_file(
    url: str, tmp_path: Path, opened: list[str], rng: random.Random
) -> None:
    values = [rng.randbytes(1_000) for _ in range(40_000)]  # incompressible
    with meteor.connect(url) as m:
        stream = kept(m, tmp_path, capacity=100_000)
        with stream.publisher() as pub:
            pub.publish_many(values)
        archive(stream)
        stream.configure(capacity=1)
        (path,) = segments(tmp_path)
        assert path.stat().st_size > 40_000_000
        for target in (0, 12_345, 39_000):
            CountingFile.total = 0
            (batch,) = stream.read(target, target + 1)
            assert batch.values() == [values[target]]
            assert 0 < CountingFile.total < 6_000_000


def test_sequential_reader_does_not_open_a_file_for_each_batch(
    stream: meteor.Stream, opened: list[str]
) -> None:
    assert read_all(stream) == list(range(END))
    assert len(opened) == 2
