"""Twenty slot moves under load; part of ``make chaos``.

A publisher, a group, two shared consumers and a peer group work while the stream's slot and the
peer group's slot move. Some moves are fast, and some are slow. Others are abandoned halfway, and a
repair finishes them. On Valkey, some are atomic. The log must contain exactly the
acknowledged records, and the group and the shared consumers must get every record once and in
order. The test prints the publisher's longest pauses.
"""

from __future__ import annotations

import random
import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.chaos.backend import Proxies
from tests.chaos.mutants import FunctionText, plant, text_of
from tests.conftest import require_redis
from tests.support.client_load import PEERS, RESULT_S, STREAM, Load, read_log, wait_until
from tests.support.servers import HOST, binaries
from tests.support.slot_mover import WAYS, SlotMover

MOVES = 20
#: Number of rounds in which a publisher loses a reply, and the publisher's delivery timeout in
#: seconds.
ROUNDS = 3
TIMED_OUT_S = 0.8


def test_load_check_fails_if_scripts_run_on_the_importing_node(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the planted bugs, the client follows ASK, and its scripts have no guard key."""
    plant_here("unguarded-scripts", monkeypatch)
    plant_here("followed-ask", monkeypatch)
    with Cluster() as cluster, meteor.connect(cluster.url) as client:
        load, mover = Load(client), SlotMover(cluster, rng, (STREAM, PEERS))
        with pytest.raises((AssertionError, redis.ResponseError)):
            move_until_something_fails(load, mover)


def move_until_something_fails(load: Load, mover: SlotMover) -> None:
    with load:
        for _ in range(MOVES):
            mover.move("slow")
            if load.problems:
                break
    load.check_nothing_lost()


def plant_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug in this process for the duration of a test."""
    text = text_of(name)
    assert isinstance(text, FunctionText)
    monkeypatch.setattr(text.function, "__code__", text.function.__code__)
    monkeypatch.setitem(text.function.__dict__, "planted", None)
    plant(name)


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_publisher_that_times_out_while_its_slot_moves_reports_true_outcomes(kind: str) -> None:
    if kind == "redis":
        require_redis()
    assert false_outcomes(binaries()[kind]) == []


def test_outcome_check_fails_if_scripts_have_no_guard_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a guard key, a script can stop in the middle."""
    plant_here("unguarded-scripts", monkeypatch)
    assert false_outcomes(binaries()["valkey"]) != []


def false_outcomes(program: Path) -> list[str]:
    """Return the values whose outcome the publisher reported wrongly.

    In each round, a reply is lost, the batch times out, and the slot begins to move. The publisher
    begins a new producer epoch, so the script deletes a key and creates it again. Without a guard
    key, a node that is migrating the slot stops the script between these two steps.
    """
    outcomes: dict[bytes, str] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(primaries=2, program=program))
        proxies = Proxies.to([node.port for node in cluster.nodes], stack)
        remap = {(HOST, port): (HOST, proxy) for port, proxy in proxies.remap.items()}
        client = stack.enter_context(meteor.connect(cluster.url, remap=remap))
        stream = client.stream(STREAM, create=True)
        publisher = stack.enter_context(stream.publisher(delivery_timeout=TIMED_OUT_S))
        publisher.publish(b"first").result(RESULT_S)
        for number in range(ROUNDS):
            (target,) = cluster.others(cluster.owner(STREAM))
            proxies.stall("replies")
            in_doubt = publisher.publish(b"in doubt %d" % number)
            outcomes[b"in doubt %d" % number] = outcome(in_doubt)
            move = cluster.begin_move(cluster.slot(STREAM), target)
            proxies.cut()
            proxies.heal()
            after = publisher.publish(b"after %d" % number)
            wait_until(after.done, TIMED_OUT_S / 2)
            move.finish()
            outcomes[b"after %d" % number] = outcome(after)
        log = list(read_log(stream).values())
    return [
        f"{value!r} was reported as {told}, but is in the log {log.count(value)} times"
        for value, told in outcomes.items()
        if log.count(value) not in {"acknowledged": (1,), "unknown": (0, 1), "failed": (0,)}[told]
    ]


def outcome(ack: meteor.Ack) -> str:
    error = ack.exception(RESULT_S)
    if error is None:
        return "acknowledged"
    return "unknown" if isinstance(error, meteor.OutcomeUnknown) else "failed"


@pytest.mark.parametrize("kind", ["valkey", "redis"])
def test_twenty_slot_moves_neither_lose_nor_duplicate_nor_reorder_records(
    kind: str, rng: random.Random, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "redis":
        require_redis()
    ways = WAYS[kind]
    with (
        Cluster(program=binaries()[kind]) as cluster,
        meteor.connect(cluster.url) as client,
    ):
        load, mover = Load(client), SlotMover(cluster, rng, (STREAM, PEERS))
        pauses: dict[str, list[float]] = {}
        with load:
            for number in range(MOVES):
                how = ways[number % len(ways)]
                load.publishing.longest_pause_s = 0.0
                mover.move(how)
                assert load.publishing.continues(), f"nothing was published after move {number}"
                pauses.setdefault(how, []).append(load.publishing.longest_pause_s)
        load.check_nothing_lost()
    with capsys.disabled():
        print(
            f"\n{kind}: {MOVES} moves, {len(load.publishing.acked):,} records, {load.peer.sent} "
            "messages. Duration of a move, then the publisher's pause (median and maximum of each):"
        )
        for how, pause_s in pauses.items():
            took = mover.took_s[how]
            times = (statistics.median(took), max(took), statistics.median(pause_s), max(pause_s))
            print(f"  {how}: " + ", ".join(f"{each * 1000:.0f} ms" for each in times))
