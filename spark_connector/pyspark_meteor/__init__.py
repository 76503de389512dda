"""Streams of meteor_py in Spark: ``spark.readStream.format("meteor")``, without registration.

Spark imports every module called ``pyspark_*`` to look for a ``DefaultSource``, also for people who
have never heard of us, and gives up on all of them if one fails: so this does little, needs no
server, and leaves it to the source itself to say that a PySpark is too old.
"""

from __future__ import annotations

from pyspark_meteor.source import MeteorDataSource as DefaultSource
from pyspark_meteor.source import register

__all__ = ["DefaultSource", "register"]
