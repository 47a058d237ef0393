"""What SGLang keeps beside keys and values, as groups: recurrent state, and the index keys of sparse attention. Pure.

Source of the formats: SGLang 0.5.23, `sglang/srt/mem_cache/memory_pool.py` (`MambaPool`: tensors `[layers, slots, …]`,
one slot per request, listed in KVArgs layer by layer) and `index_key_cache.py` (`IndexKeyCache`: one tensor of bytes
`[pages, page_tokens · (dim + 4 · dim / 128)]` per layer, in a page all keys and then all scales).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvferry.engines.sglang.layout import Described, Registered
from kvferry.errors import EngineError
from kvferry.layout.document import TOKEN, Buffer, Group, Mode, Pool, Region
from kvferry.layout.presets import packed
from kvferry.layout.tensors import TensorView

INDEX_SCALE_BLOCK = 128
"""Index keys are float8 with one float32 scale for so many of them."""


@dataclass(frozen=True)
class State:
    """One tensor of recurrent state per layer, `[slots, …]`. `cut`: which axis of a slot tensor parallelism cuts;
    `blocks`: the whole model's extents of the pieces of that axis, each cut on its own, () for one piece. None where
    SGLang doesn't say: then both sides must be cut alike, so that no piece is taken for another (F42).
    """

    group: str
    table: str
    layers: tuple[int, ...]
    views: tuple[TensorView, ...]
    registered: tuple[Registered, ...]
    cut: int
    blocks: tuple[int, ...] | None


def describe_state(state: State, rank: int, size: int) -> Described:
    """`rank`, `size`: of the group of workers that state is cut over. EngineError where the tensors contradict each
    other or the cut.
    """
    first = state.views[0]
    extents, strides = list(first.shape[1:]), first.strides_bytes[1:]
    for layer, view, listed in zip(state.layers, state.views, state.registered):
        said = (view.shape, view.strides_bytes, view.address, view.shape[0] * view.strides_bytes[0])
        expected = (first.shape, first.strides_bytes, listed.address, listed.bytes)
        if said != expected:
            raise EngineError(
                f"layer {layer}, {state.group}: shape, strides, address and bytes: the pool has {said}, expected were "
                f"{expected}; this version of SGLang keeps its state in a way that kvferry doesn't know"
            )
    blocks = state.blocks or (extents[state.cut] * size,)
    here = [block // size for block in blocks]
    if sum(here) != extents[state.cut] or any(block % size for block in blocks):
        raise EngineError(
            f"{state.group}: axis {state.cut} has {extents[state.cut]} of {list(blocks)} on {size} ranks, which is not "
            "an even share of each"
        )
    starts = itertools.accumulate(blocks, initial=0)
    owned: dict[str, tuple[int | tuple[int, ...], ...]] = {
        f"axis{state.cut}": tuple((at + n * rank, at + n * (rank + 1)) for at, n in zip(starts, here))
    }
    extents[state.cut] = sum(blocks)
    constants: dict[str, str | float | int | bool | None] = {} if state.blocks is not None else {"ranks": size}
    axes = {f"axis{i}": extent for i, extent in enumerate(extents)}
    group = Group(state.group, "state", first.dtype, state.layers, ("state",), axes, constants=constants)
    modes = [Mode(TOKEN, 1, first.strides_bytes[0])]
    modes += [Mode(f"axis{i}", first.shape[i + 1], stride) for i, stride in enumerate(strides)]
    buffers = tuple(Buffer(layer, "state", i, 0, first.shape[0]) for i, layer in enumerate(state.layers))
    pool = Pool(state.group, 1, first.strides_bytes[0], tuple(modes), buffers, table=state.table, owned=owned)
    regions = tuple(Region(r.address, r.bytes, v.memory, v.device) for r, v in zip(state.registered, state.views))
    return Described((group,), regions, (pool,))


@dataclass(frozen=True)
class Index:
    """Index keys with their scales: one tensor of bytes `[pages, page bytes]` per layer."""

    table: str
    page_tokens: int
    dim: int
    layers: tuple[int, ...]
    views: tuple[TensorView, ...]
    registered: tuple[Registered, ...]


def describe_index(index: Index) -> Described:
    """Two groups, keys and scales, so that a page may hold them in any order. Every rank has all of them."""
    blocks = index.dim // INDEX_SCALE_BLOCK
    key_modes, key_bytes = packed([(TOKEN, index.page_tokens), ("dim", index.dim)], 1)
    scale_modes, scale_bytes = packed([(TOKEN, index.page_tokens), ("block", blocks)], 4)
    page_bytes = key_bytes + scale_bytes
    for layer, view, listed in zip(index.layers, index.views, index.registered):
        said = (view.shape[1:], view.strides_bytes[0], view.address, listed.item_bytes)
        if said != ((page_bytes,), page_bytes, listed.address, page_bytes):
            raise EngineError(
                f"layer {layer}, index keys: shape of a page, stride, address and item: the pool has {said}, expected "
                f"were pages of {page_bytes} bytes at {listed.address}"
            )
    groups = (
        Group("index", "token", "float8_e4m3fn", index.layers, ("k",), {"dim": index.dim}),
        Group("index_scale", "token", "float32", index.layers, ("k",), {"block": blocks}),
    )
    pools = tuple(
        Pool(group.name, index.page_tokens, page_bytes, modes, _places(index, offset), table=index.table)
        for group, modes, offset in zip(groups, (key_modes, scale_modes), (0, key_bytes))
    )
    regions = tuple(Region(r.address, r.bytes, v.memory, v.device) for r, v in zip(index.registered, index.views))
    return Described(groups, regions, pools)


def _places(index: Index, offset_bytes: int) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(layer, "k", i, offset_bytes, listed.items)
        for i, (layer, listed) in enumerate(zip(index.layers, index.registered))
    )
