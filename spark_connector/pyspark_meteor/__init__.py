"""meteor_py streams in Spark: ``spark.readStream.format("meteor")``, no registration needed.

To find data sources, Spark imports every module named ``pyspark_*`` and looks for a
``DefaultSource``. If one import fails, Spark gives up and finds no data source at all. So this
module imports little, needs no server, and checks the PySpark version only when it is used.
"""

from __future__ import annotations

from pyspark_meteor.source import MeteorDataSource as DefaultSource
from pyspark_meteor.source import register

__all__ = ["DefaultSource", "register"]
