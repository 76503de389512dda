"""Streams keep every record, once and in order, while the cluster moves their slots."""

from __future__ import annotations

import random
from typing import Any

import pytest

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.support.client_load import STREAM, Load
from tests.support.waiting import eventually

SLOT = Cluster.slot(STREAM)


def test_no_record_is_lost_duplicated_or_reordered_while_its_slot_moves(
    cluster: Cluster, rng: random.Random
) -> None:
    with meteor.connect(cluster.url) as m:
        with Load(m) as load:
            assert load.publishing.continues()
            for number in range(4):
                target = rng.choice(cluster.others(cluster.owner(SLOT)))
                move = cluster.begin_move(SLOT, target)
                if number % 2:  # key by key, so that clients find the slot in every state
                    while move.migrate(1):
                        pass
                move.finish()
                assert load.publishing.continues()
        load.check_nothing_lost()


@pytest.mark.parametrize("keys_moved", [1, 1000])
def test_abandoned_slot_move_delays_publishing_until_it_is_repaired(
    cluster: Cluster, keys_moved: int
) -> None:
    with meteor.connect(cluster.url) as m, m.stream(STREAM, create=True).publisher() as pub:
        pub.publish(b"before").result()
        target = cluster.others(cluster.owner(SLOT))[0]
        with target.client() as plain:
            plain.config_resetstat()
        move = cluster.begin_move(SLOT, target)
        move.migrate(keys_moved)
        ack = pub.publish(b"during")
        eventually(lambda: pub._sender._failures > 3)
        assert not ack.done()
        with target.client() as plain:
            stats: Any = plain.info("commandstats")
            assert "cmdstat_asking" not in stats, "a client has followed ASK"
        cluster.repair()
        assert ack.result(10) == 1


def test_error_after_an_abandoned_move_names_the_slot_and_the_remedy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meteor_py.redis.connection.ABANDONED_S", 0.2)
    with meteor.connect(cluster.url, timeout=1) as m:
        stream = m.stream(STREAM, create=True)
        cluster.begin_move(SLOT, cluster.others(cluster.owner(SLOT))[0])
        with pytest.raises(meteor.ConnectionFailed) as failed:
            stream.describe()
    assert f"Slot {SLOT} of the cluster is being moved" in str(failed.value)
    assert "redis-cli --cluster fix" in str(failed.value)
    assert failed.value.redirected


def test_atomic_slot_move_in_valkey_loses_nothing(cluster: Cluster, rng: random.Random) -> None:
    with cluster.nodes[0].client() as plain:
        if plain.info("server").get("server_name") != "valkey":
            pytest.skip("Only Valkey 9 has CLUSTER MIGRATESLOTS.")
    with meteor.connect(cluster.url) as m:
        with Load(m) as load:
            assert load.publishing.continues()
            for _ in range(2):
                target = rng.choice(cluster.others(cluster.owner(SLOT)))
                cluster.move_slot(SLOT, target, atomic=True)
                assert load.publishing.continues()
        load.check_nothing_lost()
