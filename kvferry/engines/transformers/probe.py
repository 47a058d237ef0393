"""The layout probe of this engine: its cache's own update writes the tags; `kvferry.engines.probe` looks for them."""

from __future__ import annotations

import torch

from kvferry.engines.probe import check_written, tags
from kvferry.engines.transformers.cache import PARTS, PagedCache, PagePool
from kvferry.layout.document import Worker
from kvferry.transport.memory import HostMemory


def check_layout(pool: PagePool, described: Worker, memory: HostMemory) -> None:
    """Write tags into a page and the start of another. EngineError where they are not where `described` says."""
    tokens = min(pool.page_tokens + 1, pool.page_tokens * pool.free_pages)
    group, shape = pool.shape.group, pool.shape
    size = (tokens, pool.heads[1] - pool.heads[0], shape.dim)
    cache = PagedCache(pool)
    try:
        for layer in range(shape.layers):
            drawn = {part: tags(size, group.item_bytes, seed=layer * len(PARTS) + i) for i, part in enumerate(PARTS)}
            values = (torch.from_numpy(drawn[part]).view(shape.dtype) for part in PARTS)
            cache.update(*(value.transpose(0, 1).unsqueeze(0) for value in values), layer_idx=layer)
            written = {(layer, part): drawn[part] for part in PARTS}
            check_written(described, group, memory, cache.tables(), (0, tokens), written)
    finally:
        cache.close()
        for pair in pool.tensors:
            for tensor in pair:
                tensor.zero_()
