"""The testing kit: real servers for testing programs that use streams.

    from meteor_py.testing import Server, eventually

    with Server("--appendonly", "yes") as server:
        with meteor_py.connect(server.url) as m: ...
        server.kill()
        server.restart()        # keeps the address, and the data that reached the disk

``Cluster`` and ``Sentinels`` start several servers and can trigger failovers. A cluster can also
move slots.

The pytest fixtures are in ``meteor_py.testing.fixtures``. Of the other modules here, only
``store_contract`` needs pytest. ``Server`` does not depend on the client library, so the library's
own tests use this kit too. See ``docs/testing.md`` for a guide.
"""

from meteor_py.testing.cluster import Cluster, ClusterFactory
from meteor_py.testing.cluster_node import Node
from meteor_py.testing.sentinels import Sentinel, Sentinels, SentinelsFactory
from meteor_py.testing.server import Server, ServerFactory
from meteor_py.testing.slot_move import SlotMove
from meteor_py.testing.waiting import eventually

__all__ = [
    "Cluster",
    "ClusterFactory",
    "Node",
    "Sentinel",
    "Sentinels",
    "SentinelsFactory",
    "Server",
    "ServerFactory",
    "SlotMove",
    "eventually",
]
