"""The layout probe: write tags through the attention backend's own cache update, and see whether they lie where our
layout says. No stride shows how a backend arranges the inside of a block, so no layout is believed before this.

A recurrent layer has no such operation: there the tags go into the tensors that the layer itself computes with. Which
channels of a convolution are which section is not seen that way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvferry.engines.probe import check_written, tags
from kvferry.engines.vllm.layers import CachedLayer
from kvferry.engines.vllm.layout import Groups, Piece, table_name
from kvferry.errors import EngineError
from kvferry.layout.document import Worker
from kvferry.layout.request import Side, Table
from kvferry.transport.memory import HostMemory

Written = dict[tuple[int, str], np.ndarray[Any, Any]]
"""By layer and part: [token, *axes of the group]."""


def probe(
    worker: Worker,
    pieces: Sequence[Piece],
    groups: Groups,
    memory: HostMemory,
    attention: Mapping[str, Any],
    blocks: int,
) -> None:
    """EngineError unless every layer's cache update puts each number where `worker` says. No request may run yet.

    Each block table has a scratch block of its own, since tables may share memory; it is zeroed afterwards.
    """
    layers = {piece.layer.name: piece.layer for piece in pieces}
    scratch = {cached.table: blocks - 1 - cached.table for cached in layers.values()}
    side = Side({table_name(table): Table((block,)) for table, block in scratch.items()})
    written: dict[str, Written] = {}
    try:
        for number, cached in enumerate(layers.values()):
            mine = [piece for piece in pieces if piece.layer is cached]
            for piece, cells in zip(mine, _write(attention[cached.name], mine, scratch[cached.table], number)):
                written.setdefault(piece.kind, {}).update(cells)
        for kind, found in written.items():
            tokens = len(next(iter(found.values())))
            check_written(worker, groups[kind], memory, side, (0, tokens), found)
    finally:
        for cached in layers.values():
            caches = attention[cached.name].kv_cache
            for cache in caches if isinstance(caches, (list, tuple)) else (caches,):
                _zero(cache, scratch[cached.table], blocks)


def _write(attention: Any, pieces: Sequence[Piece], block: int, seed: int) -> list[Written]:
    """Fill one block of a layer with tags; what was written of each of its pieces."""
    cached = pieces[0].layer
    if cached.states:
        both = zip(attention.kv_cache, pieces, strict=True)
        return [_write_state(tensor, piece, block, seed + i) for i, (tensor, piece) in enumerate(both)]
    dims = (cached.key_dim, cached.value_dim)
    item_bytes = attention.kv_cache.element_size()
    if not cached.value_dim:
        latent = tags((cached.block_tokens, cached.key_dim), item_bytes, seed)
        _update_latent(attention, cached, latent, block)
        return [{(cached.layer, part): latent for part in pieces[0].views}]
    keys, values = (
        tags((cached.block_tokens, cached.heads, dim), item_bytes, 2 * seed + i) for i, dim in enumerate(dims)
    )
    _update(attention, cached, keys, values, block)
    return [{(cached.layer, part): {"k": keys, "v": values}[part] for part in piece.views} for piece in pieces]


def _write_state(tensor: Any, piece: Piece, block: int, seed: int) -> Written:
    cells = tags(tuple(tensor.shape[1:]), tensor.element_size(), seed)
    tensor[block] = _tensor(cells, tensor)
    ((part, view),) = piece.views.items()
    # from the order of the tensor's dimensions to that of the group's axes
    order = [view.axes.index(axis) - 1 for axis in piece.axes]
    return {(piece.layer.layer, part): cells.transpose(order)[None]}


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


def _update_latent(attention: Any, cached: CachedLayer, latent: np.ndarray[Any, Any], block: int) -> None:
    """The update of latent attention takes a token's compressed part and its rotary part apart."""
    update = getattr(attention.impl, "do_kv_cache_update", None)
    if update is None:
        raise EngineError(f"layer {cached.name} ({cached.backend}): this backend has no cache update of its own")
    cache, rank = attention.kv_cache, attention.kv_lora_rank
    first = block * cached.block_tokens
    slots = torch.arange(first, first + cached.block_tokens, dtype=torch.int64, device=cache.device)
    both = _tensor(latent, cache)
    update(both[:, :rank], both[:, None, rank:], cache, slots, attention.kv_cache_dtype, attention._k_scale)


def _tensor(values: np.ndarray[Any, Any], like: Any) -> Any:
    """The same bits as numbers of the cache's data type."""
    signed = values.view(f"i{values.itemsize}")
    return torch.from_numpy(signed).view(like.dtype).to(like.device)


def _zero(cache: Any, block: int, blocks: int) -> None:
    """Zero a block in the tensor that the attention layer uses, whichever of its dimensions counts the blocks."""
    page = next(axis for axis, extent in enumerate(cache.shape) if extent % blocks == 0)
    cut = cache.shape[page] // blocks
    cache.narrow(page, block * cut, cut).zero_()
