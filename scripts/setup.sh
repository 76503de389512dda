#!/bin/sh
# Creates .venv with the project and its tools. Requires only Python 3.11 or newer.
# PYTHON=/path/to/python chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "$*" >&2
    exit 1
}

recent() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if recent "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# An interrupted run may have left a .venv without pip.
if ! recent .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || fail "meteor_py needs Python 3.11 or newer: install it, then run make again."
    # Debian ships venv and its pip (ensurepip) in a separate package.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package="$(basename "$python")-venv"
        scripts/apt.sh "$package" ||
            fail "Python's venv module is missing: run 'sudo apt-get install $package', then make again."
    fi
    echo "Creating .venv with $("$python" --version)."
    "$python" -m venv --clear .venv
fi

echo "Installing meteor_py and its tools into .venv; the first time this takes a minute."
.venv/bin/python -m pip install --quiet --upgrade "pip>=25.1" # the first version with --group
# The hashes pin these exact files, whichever index serves them. `make lock` updates the list.
.venv/bin/python -m pip install --quiet --require-hashes --requirement requirements-dev.txt
.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
touch .venv/installed
