"""Benchmarks that compare meteor_py with redis-py, on the same server and in the same run.

``python -m benchmarks`` or ``make bench`` runs all families of benchmarks; see ``--help``. A few
modules, such as ``bytes_per_record``, are separate programs. Compare the ratios: absolute figures
from two machines, or from two days on one machine, are not comparable.
"""
