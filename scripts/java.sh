#!/bin/sh
# Ensures that Java 17 or newer is installed, for Spark.
set -eu
cd "$(dirname "$0")/.."

java_version() {
    java="${JAVA_HOME:+$JAVA_HOME/bin/}java"
    # 'openjdk version "17.0.15" 2025-04-15' -> 17; the old '"1.8.0_402"' -> 1
    "$java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1
}

recent() {
    version=$(java_version)
    [ "${version:-0}" -ge 17 ]
}

if ! recent; then
    # Every supported release of Debian and Ubuntu has one of these packages.
    scripts/apt.sh openjdk-17-jre-headless || scripts/apt.sh openjdk-21-jre-headless || true
    recent || {
        echo "Spark needs Java 17 or newer: install it (Debian: sudo apt-get install openjdk-17-jre-headless)" \
            "or set JAVA_HOME, then run make spark again." >&2
        exit 1
    }
fi
echo "Java $(java_version) is ready."
