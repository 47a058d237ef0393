"""What a synthetic worker caches: SGLang's own pools, and plain NumPy views of each cell in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

SLOTS = 256
STATE_SLOTS = 8
MakeTensor = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass
class Cells:
    """One part of one layer on one worker: `view` [pages, tokens of a page, *axes] into its memory; `axes`: the global
    indices of each axis. `table`: which ids of a request it goes by.
    """

    tag: int
    layer: int
    table: str
    view: np.ndarray[Any, Any]
    axes: tuple[np.ndarray[Any, Any], ...]

    def write(self, pages: list[int], tokens: range, start: int | None = None) -> None:
        """Tokens in pages, whose first slot is token `start`'s, or the first token's."""
        for token in tokens:
            page, slot = divmod(token - (tokens.start if start is None else start), self.view.shape[1])
            self.view[pages[page], slot] = self.values(token)

    def values(self, token: int) -> np.ndarray[Any, Any]:
        """All different over everything, as far as the item has room."""
        grid = np.meshgrid(*self.axes, indexing="ij")
        value = np.full(grid[0].shape, (self.tag * 64 + self.layer) * 1024 + token, np.uint64)
        for index in grid:
            value = value * np.uint64(1021) + index.astype(np.uint64)
        mixed = value * np.uint64(0x9E37_79B9_7F4A_7C15) >> np.uint64(32)
        return mixed.astype(self.view.dtype)


@dataclass(frozen=True)
class Shape:
    """`kind`: attention, sliding (every other layer), latent, index (latent with index keys) or gated (every other
    layer has recurrent state, its convolution of channels q | k | v). `device`: the pool says that it is on one;
    `host`: there is a second one on the host for decode to receive into.
    """

    kind: str = "attention"
    layers: int = 4
    heads: int = 4
    dim: int = 32
    dtype: torch.dtype = torch.float32
    device: bool = False
    host: bool = False

    def arena_bytes(self, tp: int) -> int:
        heads = len(self.heads_of(0, tp)) if self.kind != "index" else 40
        return (1 << 20) + self.layers * (4 if self.host else 2) * ((SLOTS + 128) * heads * self.dim * 4 + (1 << 15))

    def heads_of(self, rank: int, tp: int) -> range:
        """As SGLang shares out KV heads; uneven where they don't divide, which its models don't do."""
        first = rank * self.heads // tp
        return range(first, max(first + 1, (rank + 1) * self.heads // tp))

    def make_pool(self, rank: Any, tensor: MakeTensor) -> Any:
        return getattr(self, f"_make_{self.kind}")(rank, tensor)

    def cells(self, rank: Any) -> list[Cells]:
        return getattr(self, f"_cells_{self.kind}")(rank)

    def twin_cells(self, rank: Any) -> list[Cells]:
        return self._attention_cells(rank, rank.twin, list(rank.layers), "kv", 0)

    def _make_attention(self, rank: Any, tensor: MakeTensor) -> Any:
        count, first = len(rank.layers), rank.layers.start
        options = {"start_layer": first, "end_layer": first + count}
        pool = MHATokenToKVPool(SLOTS, rank.page, self.dtype, len(rank.heads), self.dim, count, "cpu", False, **options)
        return _moved(pool, tensor)

    def _cells_attention(self, rank: Any) -> list[Cells]:
        return self._attention_cells(rank, rank.pool, list(rank.layers), "kv", 0)

    def _attention_cells(self, rank: Any, pool: Any, layers: list[int], table: str, tag: int) -> list[Cells]:
        axes = (np.array(rank.heads), np.arange(self.dim))
        return [
            Cells(tag + part, layer, table, _paged(buffer, rank.page), axes)
            for part, buffers in enumerate((pool.k_buffer, pool.v_buffer))
            for layer, buffer in zip(layers, buffers)
        ]

    def _make_sliding(self, rank: Any, tensor: MakeTensor) -> Any:
        odd, even = list(range(1, self.layers, 2)), list(range(0, self.layers, 2))
        heads = len(rank.heads)
        pool = SWAKVPool(SLOTS, SLOTS // 2, rank.page, torch.float32, heads, self.dim, even, odd, "cpu")
        _moved(pool.full_kv_pool, tensor)
        _moved(pool.swa_kv_pool, tensor)
        return pool

    def _cells_sliding(self, rank: Any) -> list[Cells]:
        odd, even = list(range(1, self.layers, 2)), list(range(0, self.layers, 2))
        full = self._attention_cells(rank, rank.pool.full_kv_pool, odd, "kv", 0)
        return full + self._attention_cells(rank, rank.pool.swa_kv_pool, even, "swa", 2)

    def _make_latent(self, rank: Any, tensor: MakeTensor) -> Any:
        return _moved(MLATokenToKVPool(SLOTS, rank.page, torch.float32, 24, 8, self.layers, "cpu", False), tensor)

    def _cells_latent(self, rank: Any) -> list[Cells]:
        axes = (np.arange(1), np.arange(32))
        return [Cells(0, i, "kv", _paged(each, rank.page), axes) for i, each in enumerate(rank.pool.kv_buffer)]

    def _make_index(self, rank: Any, tensor: MakeTensor) -> Any:
        skipped = [False] * (self.layers - 1) + [True]
        with get_parallel().override(attn_dcp_size=1, dcp_enabled=False):
            pool = DSATokenToKVPool(
                SLOTS, 64, 24, torch.float32, 8, self.layers, "cpu", 128, False, 32, skip_topk_layers=skipped
            )
        cache = pool.index_key_cache
        cache.buffer = [tensor(tuple(each.shape), each.dtype) if each.numel() else each for each in cache.buffer]
        return _moved(pool, tensor)

    def _cells_index(self, rank: Any) -> list[Cells]:
        found = self._cells_latent(rank)
        for layer, buffer in enumerate(rank.pool.index_k_with_scale_buffer):
            if buffer.numel():
                plain = _plain(buffer)
                # a page has all keys, then all scales; reshape would make copies
                pages, step = len(plain), plain.strides[0]
                keys = np.lib.stride_tricks.as_strided(plain, (pages, 64, 128), (step, 128, 1))
                scales = np.lib.stride_tricks.as_strided(plain[:, 64 * 128 :], (pages, 64, 4), (step, 4, 1))
                found.append(Cells(4, layer, "dsa", keys, (np.arange(128),)))
                found.append(Cells(5, layer, "dsa", scales, (np.arange(4),)))
        return found

    _BLOCKS = (32, 32, 64)

    def _make_gated(self, rank: Any, tensor: MakeTensor) -> Any:
        channels, heads = sum(self._BLOCKS) // rank.tp, 8 // rank.tp
        shape = SimpleNamespace(
            conv=[(channels, 3)], temporal=(heads, 8, 16), conv_shard_groups=list(self._BLOCKS), num_k_heads_per_tp=1
        )
        params = SimpleNamespace(
            shape=shape, dtype=SimpleNamespace(conv=torch.float32, temporal=torch.float32), is_kda=False
        )
        odd, even = list(range(1, self.layers, 2)), list(range(0, self.layers, 2))
        mamba = MambaPool(size=STATE_SLOTS, spec_state_size=0, cache_params=params, mamba_layer_ids=even, device="cpu")
        state = mamba.mamba_cache
        conv = [tensor(tuple(each.shape), each.dtype) for each in state.conv]
        temporal = tensor(tuple(state.temporal.shape), state.temporal.dtype)
        mamba.mamba_cache = dataclasses.replace(state, conv=conv, temporal=temporal)
        pool = HybridLinearKVPool(
            SLOTS, torch.float32, rank.page, len(rank.heads), self.dim, odd, "cpu", mamba_pool=mamba
        )
        _moved(pool.full_kv_pool, tensor)
        return pool

    def _cells_gated(self, rank: Any) -> list[Cells]:
        odd, even = list(range(1, self.layers, 2)), list(range(0, self.layers, 2))
        found = self._attention_cells(rank, rank.pool.full_kv_pool, odd, "kv", 0)
        cache = rank.pool.mamba_pool.mamba_cache
        starts = np.cumsum([0, *self._BLOCKS])
        shares = [block // rank.tp for block in self._BLOCKS]
        channels = np.concatenate(
            [np.arange(at + n * rank.tp_rank, at + n * (rank.tp_rank + 1)) for at, n in zip(starts, shares)]
        )
        each = 8 // rank.tp
        heads = np.arange(each * rank.tp_rank, each * (rank.tp_rank + 1))
        for local, layer in enumerate(even):
            conv, temporal = _plain(cache.conv[0][local]), _plain(cache.temporal[local])
            found.append(Cells(2, layer, "mamba", conv.view(np.uint32)[:, None], (channels, np.arange(3))))
            axes = (heads, np.arange(8), np.arange(16))
            found.append(Cells(3, layer, "mamba", temporal.view(np.uint32)[:, None], axes))
        return found


LLAMA = Shape()


def _moved(pool: Any, tensor: MakeTensor) -> Any:
    """The pool with its tensors in a worker's arena."""
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        buffers = getattr(pool, name, None)
        if buffers is not None:
            setattr(pool, name, [tensor(tuple(each.shape), each.dtype) for each in buffers])
    return pool


def _plain(buffer: torch.Tensor) -> np.ndarray[Any, Any]:
    return buffer.as_subclass(torch.Tensor).numpy()


def _paged(buffer: torch.Tensor, page: int) -> np.ndarray[Any, Any]:
    """[slots, …] as [pages, tokens of a page, …]."""
    plain = _plain(buffer).view(np.uint32)
    return plain[: len(plain) // page * page].reshape(-1, page, *plain.shape[1:])
