#!/bin/sh
# The Python of Spark's workers. Spark gives each of them its own copy of PySpark in a zip file, which
# Python compiles anew every time: 1.2 s, for a dozen processes of each query. It is installed.
unset PYTHONPATH
exec "$METEOR_TEST_PYTHON" "$@"
