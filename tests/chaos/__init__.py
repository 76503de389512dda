"""Random kills, pauses and cuts over many seeds, and a checker of what everybody saw.

``python -m tests.chaos`` runs it. Publishers and members of groups are processes of their own
(worker.py) that reach a real server through fault proxies, and where the stream has a store so are
archivers and readers of everything; each writes down what it asked for and what it was told
(history.py). Faults come from a seed (nemesis.py). When all is healed and drained (run.py), the
histories are put together and judged (checker.py). That the judge can see is proven by planted bugs
(mutants.py).
"""
