#!/bin/sh
# plain.sh [ARGUMENTS of sglang.launch_server…]: one server that does both, to compare with. PORT; see cpu.sh.
set -eu
. "$(dirname "$0")/cpu.sh"
serve "${PORT:-31000}" "$@"
