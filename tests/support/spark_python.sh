#!/bin/sh
# The Python interpreter for Spark's workers. Spark passes PySpark to each of them in a zip file, which Python compiles
# again every time: 1.2 s, for a dozen processes per query. The installed PySpark is already compiled.
unset PYTHONPATH
exec "$METEOR_TEST_PYTHON" "$@"
