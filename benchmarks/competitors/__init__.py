"""The same jobs for meteor_py, Apache Kafka, NATS JetStream, redis-py and FastStream, in one run.

``make bench-competitors`` installs the competitors into ``benchmarks/.cache``. This needs Java,
Maven and network access. The tests never run this package. ``systems`` describes each competitor
with its best settings, ``jobs.py`` contains the jobs, and ``servers.py`` starts the servers on
loopback.
"""
