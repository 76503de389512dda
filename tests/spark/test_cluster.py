"""The source and the sink reach a cluster's nodes through ``remap`` in the address."""

from __future__ import annotations

from pyspark.sql import SparkSession

import meteor_py as meteor
from meteor_py.testing import Cluster
from tests.support.proxied_cluster import ProxiedCluster

NAMES = [f"s{number}" for number in range(6)]


def test_every_process_in_a_query_reaches_remapped_nodes(spark: SparkSession) -> None:
    with Cluster() as cluster, ProxiedCluster(cluster) as proxied:
        assert {cluster.owner(name).port for name in NAMES} == {n.port for n in cluster.primaries}
        with meteor.connect(cluster.url) as m:
            for name in NAMES:
                with m.stream(name).publisher() as pub:
                    pub.publish(name.encode()).result()
            reader = spark.read.format("meteor").option("url", proxied.url)
            rows = reader.option("streamsPattern", "s[0-9]").load().select("value")
            before = proxied.requests
            rows.write.format("meteor").option("url", proxied.url).mode("append").save("copy")
            passed = [now - past for now, past in zip(proxied.requests, before, strict=True)]
            copied = {value for batch in m.stream("copy").read() for value in batch.values()}
    assert copied == {name.encode() for name in NAMES}
    assert all(passed), "some node was reached without its proxy"
