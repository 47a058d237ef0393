#!/bin/sh
# prefill.sh MODEL [vLLM option …]: a prefill server. PORT (default 8100), PYTHON (default python).
set -eu
model=$1
shift
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "${PORT:-8100}" "$@" \
    --kv-transfer-config '{
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm",
        "kv_role": "kv_producer"
    }'
