"""Transfer statistics through vLLM's connector metrics: in its log every interval, and in its `/metrics`.

A worker counts what ended in a step; vLLM adds up workers and steps. Names follow vLLM's own, `vllm:kvferry_…`; each
worker's part of a request is one observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
COUNTS = {
    "received_bytes": "Bytes of KV cache that arrived.",
    "sent_bytes": "Bytes of KV cache that were taken.",
    "copies": "Runs of memory that these bytes were copied in, on this side.",
    "failed_loads": "Loads that ended without their cache, and were failed or recomputed.",
    "unclaimed_prompts": "Prompts that were kept for decode and whose lease or transfer ended without it.",
}


@dataclass
class KVFerryStats(KVConnectorStats):
    """`data`: the counts above, and `seconds` of every load that arrived."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "seconds": []}

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data["seconds"]
        mean_ms = 1000 * sum(seconds) / len(seconds) if seconds else 0.0
        return {"loads": len(seconds), "mean load time (ms)": round(mean_ms, 3), **{n: self.data[n] for n in COUNTS}}


class KVFerryMetrics(KVConnectorPromMetrics):
    """The same in Prometheus, one metric for each count."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        self._counts = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:kvferry_{name}", documentation=text, labelnames=labels), values
            )
            for name, text in COUNTS.items()
        }
        seconds = self._histogram_cls(
            name="vllm:kvferry_load_seconds",
            documentation="Seconds from a load's start to its commit, per worker.",
            buckets=SECONDS_BUCKETS,
            labelnames=labels,
        )
        self._seconds = create_metric_per_engine(seconds, values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, metrics in self._counts.items():
            metrics[engine_idx].inc(transfer_stats_data[name])
        for value in transfer_stats_data["seconds"]:
            self._seconds[engine_idx].observe(value)
