"""Random kills, pauses and cuts over many seeds, and a checker for the recorded histories.

Run it with ``python -m tests.chaos``. Publishers and group members are separate processes
(worker.py) that reach a real server through fault proxies. If the stream has a store, archivers and
readers take part too. Each process records its requests and their outcomes (history.py). Faults
are drawn from a seed (nemesis.py). When all faults are healed and the groups have drained (run.py),
the checker judges the merged histories (checker.py). Planted bugs prove that the checker works
(mutants.py).
"""
