#!/bin/sh
# The Python interpreter for Spark's workers. Spark passes PySpark to each worker in a zip file,
# which Python compiles every time. That takes 1.2 s in each of a dozen processes per query. Without
# PYTHONPATH, workers use the installed PySpark, which is already compiled.
unset PYTHONPATH
exec "$METEOR_TEST_PYTHON" "$@"
