"""`KVFerryConnector`: vLLM's connector interface, each method handed to the side that it belongs to.

vLLM builds one in its scheduler and one in each worker; either has only one of the two sides.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.orders import Orders
from kvferry.engines.vllm.scheduler import SchedulerSide, block_tables
from kvferry.engines.vllm.startup import Started, start_worker
from kvferry.engines.vllm.stats import KVFerryMetrics, KVFerryStats
from kvferry.errors import EngineError

IDLE_S = 0.002
"""vLLM runs empty steps one after the other while a transfer lives: a pause in each, until one ends, leaves the core to
the transfers.
"""


@dataclass(frozen=True)
class StepOrders(KVConnectorMetadata):
    orders: Orders


@dataclass(frozen=True)
class RegistryAt(KVConnectorHandshakeMetadata):
    """What the workers tell the scheduler once they have started."""

    url: str


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the KV cache of finished prompts from a prefill instance to a decode instance, whatever their layouts."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config)
        self._started: Started | None = None
        self._failed_blocks: set[int] = set()
        self._idle = False
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            self._scheduler = SchedulerSide(
                transfer.engine_id,
                block_tables(kv_cache_config.kv_cache_groups),
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
            )

    @property
    def _schedules(self) -> SchedulerSide:
        if self._scheduler is None:
            raise EngineError("this connector is a worker's, it schedules nothing")
        return self._scheduler

    @property
    def _works(self) -> Started:
        if self._started is None:
            raise EngineError("vLLM has not registered its KV caches with this connector")
        return self._started

    # the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers say the same."""
        told = next(iter(metadata.values()))
        if isinstance(told, RegistryAt):
            self._schedules.registry = told.url

    def on_new_request(self, request: Any) -> None:
        self._schedules.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._schedules.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group: the request's own blocks are transferred, not hashed ones."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        held = tuple(tuple(group) for group in blocks.get_block_ids())
        self._schedules.allocated(request, held, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return StepOrders(self._schedules.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._schedules.finished(request, tuple(tuple(group) for group in block_ids))

    # a worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._started = start_worker(self._vllm_config, self._kv_cache_config, kv_caches, self._options)

    def get_handshake_metadata(self) -> RegistryAt | None:
        return RegistryAt(self._started.registry) if self._started is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        if isinstance(orders, StepOrders):
            self._works.worker.submit(orders.orders)
        self._idle = forward_context.attn_metadata is None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps; a request that runs has its cache."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved during a step: blocks are sent when their request has finished."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = self._works.worker.collect(finished_req_ids, IDLE_S if self._idle else 0.0)
        self._failed_blocks |= ended.failed_blocks
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Asked once a step, after `get_transfer_results`."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # statistics

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        if self._started is None:
            return None
        stats = KVFerryStats(asdict(self._started.worker.moved()))
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        return KVFerryStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryMetrics:
        return KVFerryMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._started is not None:
            self._started.close()
            self._started = None
