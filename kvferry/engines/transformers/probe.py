"""The layout probe: what the cache really writes must lie where its description says, or the worker does not start.

A wrong description would not show in a transfer, where both sides only follow descriptions: the model would read
garbage.
"""

from __future__ import annotations

import numpy as np
import torch

from kvferry.engines.transformers.cache import GROUP, PARTS, PagedCache, PagePool
from kvferry.errors import EngineError
from kvferry.layout.document import Worker
from kvferry.plan.dense import Chunk, chunk_bytes, dense_copies
from kvferry.plan.route import Box
from kvferry.transport.memory import HostMemory


def check_layout(pool: PagePool, described: Worker, memory: HostMemory) -> None:
    """Write tagged values through the cache's own update and read the raw bytes back through the description.

    EngineError names the first layer and part that differ.
    """
    tokens = min(pool.page_tokens + 1, pool.page_tokens * pool.free_pages)
    group = pool.shape.group
    axes: dict[str, tuple[tuple[int, int], ...]] = {"head": (pool.heads,), "dim": ((0, pool.shape.dim),)}
    cache = PagedCache(pool)
    try:
        for layer in range(pool.shape.layers):
            expected = [_tagged(pool, layer, part, tokens) for part in range(len(PARTS))]
            cache.update(*(values.transpose(0, 1).unsqueeze(0) for values in expected), layer_idx=layer)
            for part, values in zip(PARTS, expected, strict=True):
                chunk = Chunk(Box(group=GROUP, layers=(layer,), parts=(part,), axes=axes), (0, tokens))
                found = np.zeros(chunk_bytes(group, chunk), dtype=np.uint8)
                memory.gather(dense_copies(described, group, chunk, cache.tables()), found)
                if found.tobytes() != values.contiguous().view(torch.uint8).numpy().tobytes():
                    raise EngineError(
                        f"layer {layer}, part {part!r}: what the cache writes is not where its layout says; "
                        "the description and the cache of this version don't fit together"
                    )
    finally:
        cache.close()
        for pair in pool.tensors:
            for tensor in pair:
                tensor.zero_()


def _tagged(pool: PagePool, layer: int, part: int, tokens: int) -> torch.Tensor:
    """[token, head, dim], no value twice in a page as far as the dtype can tell them apart."""
    shape = (tokens, pool.heads[1] - pool.heads[0], pool.shape.dim)
    generator = torch.Generator().manual_seed(layer * len(PARTS) + part)
    return torch.randn(shape, generator=generator).to(pool.shape.dtype)
