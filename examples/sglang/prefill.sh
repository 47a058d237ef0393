#!/bin/sh
# prefill.sh [ARGUMENTS of sglang.launch_server…]: a prefill server. PORT, BOOTSTRAP_PORT; see cpu.sh for the rest.
set -eu
. "$(dirname "$0")/cpu.sh"
serve "${PORT:-31001}" --disaggregation-mode prefill --disaggregation-transfer-backend kvferry \
    --disaggregation-bootstrap-port "${BOOTSTRAP_PORT:-31002}" "$@"
