"""The layout probe: write tags through the attention backend's own cache update, and see whether they lie where our
layout says. No stride shows how a backend arranges the inside of a block, so no layout is believed before this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvferry.engines.probe import check_written, tags
from kvferry.engines.vllm.layers import CachedLayer
from kvferry.engines.vllm.layout import Groups, base_kind, table_name
from kvferry.errors import EngineError
from kvferry.layout.document import Worker
from kvferry.layout.request import Side, Table
from kvferry.transport.memory import HostMemory

Written = dict[tuple[int, str], np.ndarray[Any, Any]]


def probe(
    worker: Worker,
    groups: Groups,
    memory: HostMemory,
    layers: Sequence[CachedLayer],
    attention: Mapping[str, Any],
    blocks: int,
) -> None:
    """EngineError unless every layer's cache update puts each number where `worker` says. No request may run yet.

    Each block table has a scratch block of its own, since tables may share memory; it is zeroed afterwards.
    """
    scratch = {cached.table: blocks - 1 - cached.table for cached in layers}
    side = Side({table_name(table): Table((block,)) for table, block in scratch.items()})
    seeds = iter(range(2 * len(layers)))
    try:
        for kind, group in groups.items():
            written: Written = {}
            mine = [cached for cached in layers if cached.kind == base_kind(kind)]
            for cached in mine:
                pair = {"k": (cached.key_dim, next(seeds)), "v": (cached.value_dim, next(seeds))}
                values = {
                    part: tags((cached.block_tokens, cached.heads, dim), group.item_bytes, seed)
                    for part, (dim, seed) in pair.items()
                }
                _update(attention[cached.name], cached, values["k"], values["v"], scratch[cached.table])
                written |= {(cached.layer, part): values[part] for part in group.parts}
            if mine:
                check_written(worker, group, memory, side, (0, mine[0].block_tokens), written)
    finally:
        for cached in layers:
            _zero(attention[cached.name].kv_cache, scratch[cached.table], blocks)


def _update(attention: Any, cached: CachedLayer, keys: Any, values: Any, block: int) -> None:
    update = getattr(attention.impl, "do_kv_cache_update", None)
    if update is None:
        raise EngineError(
            f"layer {cached.name} ({cached.backend}): this backend has no cache update of its own that could show "
            "where it stores what; choose another one with --attention-backend"
        )
    cache = attention.kv_cache
    first = block * cached.block_tokens
    slots = torch.arange(first, first + cached.block_tokens, dtype=torch.int64, device=cache.device)
    update(attention, _tensor(keys, cache), _tensor(values, cache), cache, slots)


def _tensor(values: np.ndarray[Any, Any], like: Any) -> Any:
    """The same bits as numbers of the cache's data type."""
    signed = values.view(f"i{values.itemsize}")
    return torch.from_numpy(signed).view(like.dtype).to(like.device)


def _zero(cache: Any, block: int, blocks: int) -> None:
    """Zero a block in the tensor that the attention layer uses, whichever of its dimensions counts the blocks."""
    page = next(axis for axis, extent in enumerate(cache.shape) if extent % blocks == 0)
    cut = cache.shape[page] // blocks
    cache.narrow(page, block * cut, cut).zero_()
