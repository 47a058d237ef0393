"""Connectors that are wrong or slow on purpose, each of which a test expects to be found out.

vLLM loads them by name, in processes of their own: nothing else can reach into a running server.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from kvferry.engines.vllm import connector, startup
from kvferry.layout.document import Instance, Worker
from kvferry.transport.memory import HostMemory

SLOW_S = 1.5
"""What the slow connector takes for each chunk that it gathers."""


class SwappedHeads(connector.KVFerryConnector):
    """Says, after the probe, that the two halves of its heads are the other way round."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        genuine = startup.open_endpoint

        def swapped(document: Instance, *arguments: Any) -> Any:
            return genuine(
                msgspec.structs.replace(document, workers=tuple(map(_swap_heads, document.workers))), *arguments
            )

        startup.open_endpoint = swapped
        super().register_kv_caches(kv_caches)


def _swap_heads(worker: Worker) -> Worker:
    pools = []
    for pool in worker.pools:
        ((start, stop),) = pool.segments("head", 0)
        middle = (start + stop) // 2
        owned = {**pool.owned, "head": ((middle, stop), (start, middle))}
        pools.append(msgspec.structs.replace(pool, owned=owned))
    return msgspec.structs.replace(worker, pools=tuple(pools))


class KeysAsShown(connector.KVFerryConnector):
    """Believes the shape of the CPU backend's tensors, which doesn't show that keys are transposed."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        from kvferry.engines.vllm import layout

        layout.KEYS_TRANSPOSED = frozenset()
        super().register_kv_caches(kv_caches)


class SlowPrefill(connector.KVFerryConnector):
    """Takes long for every chunk, so that a test can do something in the middle of a transfer."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        genuine = HostMemory.gather

        def slow(self: HostMemory, *arguments: Any) -> None:
            time.sleep(SLOW_S)
            genuine(self, *arguments)

        HostMemory.gather = slow  # type: ignore[method-assign]


class SlowWhenAsked(connector.KVFerryConnector):
    """Takes long for every chunk while a file named `slow` is in the server's folder."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        genuine, asked = HostMemory.gather, Path(tempfile.gettempdir(), "slow")

        def slow(self: HostMemory, *arguments: Any) -> None:
            if asked.exists():
                time.sleep(SLOW_S)
            genuine(self, *arguments)

        HostMemory.gather = slow  # type: ignore[method-assign]
