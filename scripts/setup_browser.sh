#!/bin/sh
# Installs Chromium from Debian's packages if it is missing and this user may. The tests that need it say so if it isn't there.
set -eu
if command -v chromium >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "Chromium is not installed, and this user can't install it: apt-get install chromium fonts-dejavu-core" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
