"""A paged KV cache that any Llama-family model of Transformers runs with: `model(ids, cache=PagedCache(pool))`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvferry.errors import EngineError
from kvferry.layout.document import Group, Worker
from kvferry.layout.request import Side, Table
from kvferry.layout.tensors import pool_of

PageLayout = Literal["nhd", "hnd"]
GROUP = "attn"
"""The name of the one group, and of its page table."""
PARTS = ("k", "v")


@dataclass(frozen=True)
class CacheShape:
    """What a model caches: `layers` layers of K and V with `heads` KV heads of `dim` numbers, over all ranks."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(model: Any) -> CacheShape:
        """The shape of a Transformers model's cache; of the whole model, also where `model` is one shard of it."""
        config = model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return CacheShape(config.num_hidden_layers, config.num_key_value_heads, dim, model.dtype)

    @property
    def group(self) -> Group:
        """The group that both sides of a transfer must agree on."""
        return Group(
            name=GROUP,
            growth="token",
            dtype=str(self.dtype).removeprefix("torch."),
            layers=tuple(range(self.layers)),
            parts=PARTS,
            axes={"head": self.heads, "dim": self.dim},
        )


class PagePool:
    """Page memory of one rank and the list of free pages.

    K and V of each layer are a tensor `[page][token][head][dim]` ("nhd") or `[page][head][token][dim]` ("hnd") with
    this rank's heads only.
    `parts[layer][0 or 1]` is that tensor seen as `[page, token, head, dim]`, whatever lies in memory.
    Pages are handed out in a shuffled order (the same on every rank for one `seed`), so that nothing works only
    because pages are consecutive.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        page_tokens: int,
        pages: int,
        layout: PageLayout = "nhd",
        rank: int = 0,
        tp: int = 1,
        seed: str = "",
    ) -> None:
        self.shape = shape
        self.heads = local_heads(shape.heads, rank, tp)
        self.page_tokens = page_tokens
        self.pages = pages
        count = self.heads[1] - self.heads[0]
        inside = (page_tokens, count) if layout == "nhd" else (count, page_tokens)
        self.tensors = [
            [torch.zeros(pages, *inside, shape.dim, dtype=shape.dtype) for _ in PARTS] for _ in range(shape.layers)
        ]
        self.parts = [[t if layout == "nhd" else t.transpose(1, 2) for t in pair] for pair in self.tensors]
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` free pages; EngineError where there are too few, and then none is taken."""
        if count > len(self._free):
            raise EngineError(
                f"{count} pages wanted, {len(self._free)} of {self.pages} are free; give the pool more pages"
            )
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Make pages free again; EngineError for a page that is free already or was never there."""
        known = set(self._free)
        for page in pages:
            if page in known or not 0 <= page < self.pages:
                raise EngineError(f"page {page} given back, but it is not in use")
            known.add(page)
        self._free.extend(pages)

    def describe(self, rank: int) -> Worker:
        """This rank's part of the kvferry-instance/1 document: addresses and strides are the live tensors' own."""
        group = self.shape.group
        described = [
            pool_of(
                view,
                ("page", "token", "head", "dim"),
                group,
                layers=(layer,),
                parts=(PARTS[part],),
                owned={"head": (self.heads,)},
                region=layer * len(PARTS) + part,
            )
            for layer, pair in enumerate(self.parts)
            for part, view in enumerate(pair)
        ]
        # the tensors differ in nothing but where they are, so one pool holds them all
        buffers = tuple(buffer for _, pool in described for buffer in pool.buffers)
        pool = msgspec.structs.replace(described[0][1], buffers=buffers)
        return Worker(rank=rank, regions=tuple(region for region, _ in described), pools=(pool,))


def local_heads(heads: int, rank: int, tp: int) -> tuple[int, int]:
    """KV heads [start, stop) of `rank`; EngineError where `tp` ranks can't split them evenly."""
    if heads % tp:
        raise EngineError(
            f"tensor-parallel size {tp} does not divide the model's {heads} KV heads, which Transformers needs; "
            f"use one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}"
        )
    each = heads // tp
    return rank * each, (rank + 1) * each


class PagedCache(Cache):
    """The cache of one request (batch size 1). It takes pages from `pool` as it grows; `close` gives them back.

    `tokens`: that many tokens lie in its first pages already, or will before the model runs: what a transfer fills.
    """

    def __init__(self, pool: PagePool, tokens: int = 0) -> None:
        self.pool = pool
        self.pages: list[int] = []
        self.page_index = torch.empty(0, dtype=torch.long)
        self.reserve(tokens)
        super().__init__(layers=[PagedLayer(self, layer, tokens) for layer in range(pool.shape.layers)])

    def reserve(self, tokens: int) -> None:
        """Have pages for at least `tokens` tokens."""
        missing = -(-tokens // self.pool.page_tokens) - len(self.pages)
        if missing > 0:
            self.pages += self.pool.take(missing)
            self.page_index = torch.tensor(self.pages, dtype=torch.long)

    def tables(self) -> Side:
        """The page table as it is now."""
        return Side(tables={GROUP: Table(pages=tuple(self.pages))})

    def close(self) -> None:
        """Give the pages back. Harmless a second time."""
        pages, self.pages = self.pages, []
        self.page_index = self.page_index[:0]
        self.pool.give_back(pages)


class PagedLayer(CacheLayerMixin):
    """One layer of a PagedCache."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedCache, layer: int, tokens: int) -> None:
        super().__init__()
        self.cache = cache
        self.layer = layer
        self.tokens = tokens
        self.is_initialized = True  # the pool holds the memory, there is nothing to do lazily

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool holds the memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V, `[1, head, new, dim]`, behind those so far; return all, `[1, head, token, dim]`."""
        if key_states.shape[0] != 1:
            raise EngineError(f"a PagedCache holds one request, got a batch of {key_states.shape[0]}")
        start, self.tokens = self.tokens, self.tokens + key_states.shape[2]
        self.cache.reserve(self.tokens)
        positions = torch.arange(start, self.tokens)
        page = self.cache.page_index[positions // self.cache.pool.page_tokens]
        slot = positions % self.cache.pool.page_tokens
        key_pages, value_pages = self.cache.pool.parts[self.layer]
        return self._write(key_pages, page, slot, key_states), self._write(value_pages, page, slot, value_states)

    def _write(self, pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        pages[page, slot] = states[0].transpose(0, 1)
        rows = pages[self.cache.page_index].flatten(0, 1)[: self.tokens]
        return rows.transpose(0, 1).contiguous().unsqueeze(0)

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; their pages stay with the cache."""
        self.tokens = max(0, self.tokens - abs(tokens_to_remove))

    def reset(self) -> None:
        self.tokens = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise EngineError("a PagedCache holds one request: beam search is not supported")
