#!/bin/sh
# decode.sh [ARGUMENTS of sglang.launch_server…]: a decode server. PORT; see cpu.sh for the rest.
set -eu
. "$(dirname "$0")/cpu.sh"
serve "${PORT:-31003}" --disaggregation-mode decode --disaggregation-transfer-backend kvferry \
    --disaggregation-decode-retraction-backup none "$@"
