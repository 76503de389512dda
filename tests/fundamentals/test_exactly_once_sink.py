"""Exactly-once sink: a batch from several workers appears once, even if they die or repeat it.

Workers *stage* their part of a batch outside the stream, where readers do not see it. Then a
committer commits all parts as one version from one writer. If the committer dies halfway, the next
committer finishes its work. Committing a version again changes nothing. Spark's sink is built on
this.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import meteor_py as meteor
from meteor_py.publish.transaction import Stage, Staged, VersionPassed, commit
from meteor_py.records.frame import Columns
from tests.fundamentals.reading import numbers
from tests.support.proxy import Proxy
from tests.support.servers import HOST, Server


@pytest.fixture
def stream(m: meteor.Client) -> meteor.Stream:
    return m.stream("results", create=True)


@pytest.fixture
def network(server: Server, url: str) -> Iterator[Proxy]:
    with Proxy(HOST, server.port) as network:
        yield network


def stage(stream: meteor.Stream, worker: str, *values: int) -> Staged:
    """Stage one worker's part of a batch."""
    part = Stage(stream._handle, worker)
    part.write(Columns([b"%d" % value for value in values]))
    return part.finish()


def test_staged_records_appear_when_they_are_committed(stream: meteor.Stream) -> None:
    parts = [stage(stream, "worker-a", 0, 1), stage(stream, "worker-b", 2, 3)]
    assert numbers(stream) == []
    commit(stream._handle, "query", 1, parts)
    assert numbers(stream) == [0, 1, 2, 3]


def test_batch_that_is_written_and_committed_again_appears_once(stream: meteor.Stream) -> None:
    assert commit(stream._handle, "query", 1, [stage(stream, "first try", 0, 1, 2)])
    assert not commit(stream._handle, "query", 1, [stage(stream, "second try", 0, 1, 2)])
    assert commit(stream._handle, "query", 2, [stage(stream, "next batch", 3)])
    assert numbers(stream) == [0, 1, 2, 3]


@pytest.mark.parametrize("dies", ["before", "after"])
@pytest.mark.parametrize("request_number", [1, 2])
def test_dead_committers_commit_is_finished_once(
    stream: meteor.Stream, network: Proxy, dies: str, request_number: int
) -> None:
    parts = [stage(stream, "worker-a", 0, 1), stage(stream, "worker-b", 2, 3)]
    with meteor.connect(network.url) as far:
        committer = far.stream("results", create=True)
        network.refuse()  # the committer cannot reconnect
        cut = network.cut_before_request if dies == "before" else network.cut_after_request
        cut(request_number, match=b"EVAL")  # the first request plans, the second moves records
        with pytest.raises(meteor.ConnectionFailed):
            commit(committer._handle, "query", 1, parts)
    commit(stream._handle, "query", 1, parts)
    assert numbers(stream) == [0, 1, 2, 3]


def test_concurrent_committers_write_the_same_batch_once(url: str, m: meteor.Client) -> None:
    stream = m.stream("results", create=True)
    start = threading.Barrier(3)
    wrote: list[bool] = []

    def work(name: str) -> None:
        part = stage(stream, name, 0, 1, 2)
        start.wait(10)
        wrote.append(commit(stream._handle, "query", 1, [part]))

    threads = [threading.Thread(target=work, args=[name]) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrote) == 3
    assert numbers(stream) == [0, 1, 2]


def test_late_commit_of_an_old_batch_is_refused(stream: meteor.Stream) -> None:
    late = stage(stream, "slow worker", 0)
    commit(stream._handle, "query", 1, [stage(stream, "worker-a", 0)])
    commit(stream._handle, "query", 2, [stage(stream, "worker-b", 1)])
    with pytest.raises(VersionPassed):
        commit(stream._handle, "query", 1, [late])
    assert numbers(stream) == [0, 1]
