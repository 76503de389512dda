"""meteor_py streams in Spark: ``spark.readStream.format("meteor")``, without registration.

To find a data source, Spark imports every module named ``pyspark_*`` and looks for a
``DefaultSource``. If one import fails, Spark abandons the search, and no data source is found. This
module therefore imports little, needs no server, and checks the version of PySpark only on use.
"""

from __future__ import annotations

from pyspark_meteor.source import MeteorDataSource as DefaultSource
from pyspark_meteor.source import register

__all__ = ["DefaultSource", "register"]
