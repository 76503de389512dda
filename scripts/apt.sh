#!/bin/sh
# Installs Debian packages if this user is allowed to: apt.sh PACKAGE...
# Fails silently without apt-get, or without permission to use it.
set -eu

command -v apt-get >/dev/null || exit 1
if [ "$(id -u)" -eq 0 ]; then
    sudo=
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    sudo="sudo -n"
else
    exit 1
fi

export DEBIAN_FRONTEND=noninteractive
echo "Installing $* with apt-get."
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "$@"
