"""How fast meteor_py is, beside redis-py on the same server in the same run.

``python -m benchmarks`` measures everything (``make bench`` too); see ``--help``. What is printed
are ratios: figures of two machines, or of two days on one machine, do not compare.
"""
