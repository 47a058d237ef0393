"""Start of the worker side: read the layout off vLLM's tensors, agree with the other workers, probe, open the endpoint.

vLLM starts its workers before its scheduler, so the instance's registry runs in worker 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from kvferry.engines.dump import write_dump
from kvferry.engines.vllm.layers import cached_layers
from kvferry.engines.vllm.layout import merge_groups, read_groups, read_pieces, read_worker
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.probe import probe
from kvferry.engines.vllm.scheduler import block_tables
from kvferry.engines.vllm.states import Split
from kvferry.engines.vllm.worker import WorkerSide, open_endpoint
from kvferry.engines.weights import model_name
from kvferry.errors import EngineError
from kvferry.layout.document import Instance
from kvferry.layout.validate import check_instance
from kvferry.session.registry import RegistryServer
from kvferry.transport.memory import HostMemory, map_array


@dataclass(frozen=True)
class Place:
    """This worker among those of its instance: rank = pipeline stage × tp + tensor rank."""

    tp_rank: int
    tp: int
    pp_rank: int
    pp: int

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp + self.tp_rank

    @property
    def world(self) -> int:
        return self.tp * self.pp


@dataclass
class Started:
    """The running worker side, and the instance's registry: its URL everywhere, its server in worker 0."""

    worker: WorkerSide
    registry: str
    server: RegistryServer | None

    def close(self) -> None:
        self.worker.close()
        if self.server is not None:
            self.server.close()


def start_worker(config: Any, cache_config: Any, tensors: Mapping[str, Any], options: Options) -> Started:
    """`config` is vLLM's, `tensors` are what it registers, by layer name. EngineError where they can't be served."""
    place = _place(config.parallel_config)
    attention = config.compilation_config.static_forward_context
    layers = cached_layers(cache_config.kv_cache_groups, attention)
    pieces = read_pieces(layers, tensors, cache_config.num_blocks, _split(config, place))
    server = RegistryServer() if place.rank == 0 and not options.registry else None
    try:
        mine = (server.url if server else options.registry, read_groups(pieces))
        everyone = _exchange(mine, place)
        registry, _ = everyone[0]  # only worker 0 knows it
        groups = merge_groups(found for _, found in everyone)
        worker = read_worker(place.rank, pieces, groups)
        engine = config.kv_transfer_config.engine_id
        document = Instance(
            "kvferry-instance/1", engine, _model(config.model_config), tuple(groups.values()), (worker,)
        )
        check_instance(document)
        folder = os.environ.get("KVFERRY_DUMP")
        if folder:
            write_dump(Path(folder), "vllm", vllm.__version__, document, place.rank, dict(tensors))
        memory = HostMemory([map_array(tensors[cached.name]) for cached in layers])
        probe(worker, pieces, groups, memory, attention, cache_config.num_blocks)
        endpoint = open_endpoint(document, place.rank, memory, place.world, registry, options)
    except BaseException:
        if server is not None:
            server.close()
        raise
    tables = block_tables(cache_config.kv_cache_groups)
    side = WorkerSide(endpoint, groups, tables, options)
    return Started(side, registry, server)


def _place(parallel: Any) -> Place:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise EngineError(f"{name} {getattr(parallel, name)}: context parallelism isn't supported yet, set it to 1")
    tensor, pipeline = get_tp_group(), get_pp_group()
    return Place(tensor.rank_in_group, tensor.world_size, pipeline.rank_in_group, pipeline.world_size)


def _split(config: Any, place: Place) -> Split:
    text = config.model_config.hf_text_config
    counts = [getattr(text, name, None) for name in ("mamba_n_groups", "n_groups")]
    return Split(
        place.tp_rank,
        place.tp,
        config.model_config.get_total_num_kv_heads(),
        next((count for count in counts if count), None),
        is_conv_state_dim_first(),
    )


def _exchange(mine: Any, place: Place) -> list[Any]:
    """What every worker of the instance says, by rank."""
    stage: list[Any] = [mine]
    if place.tp > 1:
        stage = [None] * place.tp
        torch.distributed.all_gather_object(stage, mine, group=get_tp_group().cpu_group)
    stages: list[Any] = [stage]
    if place.pp > 1:
        stages = [None] * place.pp
        torch.distributed.all_gather_object(stages, stage, group=get_pp_group().cpu_group)
    return [said for one in stages for said in one]


def _model(model: Any) -> str:
    """What both sides must have in common: the name and a digest for a folder, else the name and the revision."""
    folder = Path(model.model)
    return model_name(folder) if folder.is_dir() else f"{model.model}@{model.revision or 'main'}"
