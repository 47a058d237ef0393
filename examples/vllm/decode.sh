#!/bin/sh
# decode.sh MODEL [vLLM option …]: a decode server. PORT (default 8200), PYTHON (default python).
set -eu
model=$1
shift
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "${PORT:-8200}" "$@" \
    --kv-transfer-config '{
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute"
    }'
