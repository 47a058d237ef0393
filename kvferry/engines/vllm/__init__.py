"""vLLM: `KVFerryConnector`, for `--kv-transfer-config` with `"kv_connector_module_path": "kvferry.engines.vllm"`.

Importing this package imports no vLLM; asking it for the connector does.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KVFerryConnector":
        from kvferry.engines.vllm.connector import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
