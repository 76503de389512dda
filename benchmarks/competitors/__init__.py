"""The same jobs for meteor_py, Apache Kafka, NATS JetStream, redis-py and FastStream, in one run.

``make bench-competitors`` installs the competitors into ``.cache/competitors``, which needs Java,
Maven and a network. The tests never run this package. ``systems.py`` describes each competitor with
its best settings, ``jobs.py`` the jobs, ``servers.py`` the servers on loopback.
"""
