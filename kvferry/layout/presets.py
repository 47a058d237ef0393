"""Ready-made layouts: the usual pools of engines, and whole instances of them for tests, demos and synthetic runs.

A preset is a list of modes and the places of its buffers, nothing more; what it can't say is written as a document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional, Union

from kvferry.layout.address import Address
from kvferry.layout.document import TOKEN, Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.validate import check_instance

LAYOUTS = ("nhd", "hnd", "vectorised")
PACKINGS = ("separate", "interleaved", "one_tensor")
VECTOR_BYTES = 16

Segments = tuple[tuple[int, int], ...]


def tp_heads(kv_heads: int, tp: int, rank: int) -> Segments:
    """Heads of one tensor-parallel rank: an even split, as even as the sizes allow, and replicas where tp > heads."""
    if not 0 <= rank < tp or kv_heads < 1:
        raise ValueError(f"no rank {rank} of {tp} over {kv_heads} heads")
    first = kv_heads * rank // tp
    return ((first, max(kv_heads * (rank + 1) // tp, first + 1)),)


def pp_layers(layers: Sequence[int], pp: int, stage: int) -> tuple[int, ...]:
    """Layers of one pipeline stage: contiguous, as even as the sizes allow."""
    if not 0 <= stage < pp:
        raise ValueError(f"no stage {stage} of {pp}")
    return tuple(layers[len(layers) * stage // pp : len(layers) * (stage + 1) // pp])


def packed(order: Sequence[tuple[str, int]], item_bytes: int) -> tuple[tuple[Mode, ...], int]:
    """(modes, bytes of one page) of a contiguous nest, outermost first: `[("token", 16), ("head", 8), ("dim", 64)]`."""
    modes: list[Mode] = []
    stride_bytes = item_bytes
    for axis, extent in reversed(order):
        modes.append(Mode(axis, extent, stride_bytes))
        stride_bytes *= max(extent, 1)
    return tuple(reversed(modes)), stride_bytes


def nhd(page_tokens: int, heads: int, head_dim: int, item_bytes: int) -> tuple[tuple[Mode, ...], int]:
    """`[token][head][dim]`: (modes, bytes of one page)."""
    return packed([(TOKEN, page_tokens), ("head", heads), ("dim", head_dim)], item_bytes)


def hnd(page_tokens: int, heads: int, head_dim: int, item_bytes: int) -> tuple[tuple[Mode, ...], int]:
    """`[head][token][dim]`: (modes, bytes of one page)."""
    return packed([("head", heads), (TOKEN, page_tokens), ("dim", head_dim)], item_bytes)


def vectorised(
    page_tokens: int, heads: int, head_dim: int, item_bytes: int, vector: Optional[int] = None
) -> tuple[tuple[Mode, ...], int]:
    """`[head][dim/x][token][x]`: (modes, bytes of one page); x is `vector`, else as many items as fill 16 bytes."""
    items = vector or max(VECTOR_BYTES // item_bytes, 1)
    if head_dim % items:
        raise ValueError(f"head_dim {head_dim} is no multiple of the vector of {items} items")
    order = [("head", heads), ("dim", head_dim // items), (TOKEN, page_tokens), ("dim", items)]
    return packed(order, item_bytes)


def latent(page_tokens: int, dim: int, item_bytes: int) -> tuple[tuple[Mode, ...], int]:
    """`[token][dim]`, one MLA latent per token, a replica on every tensor-parallel rank: (modes, bytes of one page)."""
    return packed([(TOKEN, page_tokens), ("dim", dim)], item_bytes)


_BUILDERS: Mapping[str, Callable[[int, int, int, int], tuple[tuple[Mode, ...], int]]] = {
    "nhd": nhd,
    "hnd": hnd,
    "vectorised": vectorised,
}


def modes_of(layout: str, page_tokens: int, heads: int, head_dim: int, item_bytes: int) -> tuple[tuple[Mode, ...], int]:
    """(modes, bytes of one page) of one part in the layout named `"nhd"`, `"hnd"` or `"vectorised"`."""
    if layout not in _BUILDERS:
        raise ValueError(f"unknown layout {layout!r}; expected one of {', '.join(LAYOUTS)}")
    return _BUILDERS[layout](page_tokens, heads, head_dim, item_bytes)


def attention_group(
    layers: Union[int, Sequence[int]], kv_heads: int, head_dim: int, dtype: str = "bfloat16", name: str = "attn"
) -> Group:
    """The usual K and V group; `layers` is a count or the global layer ids."""
    ids = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
    return Group(name, "token", dtype, ids, ("k", "v"), {"head": kv_heads, "dim": head_dim})


@dataclass(frozen=True)
class Packing:
    """Where the buffers of one worker lie: bytes from page to page, each buffer's place, and the regions' sizes."""

    page_bytes: int
    buffers: tuple[Buffer, ...]
    region_bytes: tuple[int, ...]


def pack(packing: str, layers: Sequence[int], parts: Sequence[str], pages: int, page_bytes: int) -> Packing:
    """Place every (layer, part) of a worker, whose page takes `page_bytes` for each of them.

    `"separate"`: one region per layer and part, `[page]`. `"interleaved"`: one region per layer, `[page][part]`, so K
    and V lie side by side in each page. `"one_tensor"`: one region for everything, `[layer][part][page]`.
    """
    keys = [(layer, part) for layer in layers for part in parts]
    whole = pages * page_bytes
    if packing == "separate":
        buffers = tuple(Buffer(layer, part, index, 0, pages) for index, (layer, part) in enumerate(keys))
        return Packing(page_bytes, buffers, (whole,) * len(keys))
    if packing == "interleaved":
        count = len(parts)
        buffers = tuple(
            Buffer(layer, part, index // count, index % count * page_bytes, pages)
            for index, (layer, part) in enumerate(keys)
        )
        return Packing(page_bytes * count, buffers, (whole * count,) * len(layers))
    if packing == "one_tensor":
        buffers = tuple(Buffer(layer, part, 0, index * whole, pages) for index, (layer, part) in enumerate(keys))
        return Packing(page_bytes, buffers, (whole * len(keys),) if keys else ())
    raise ValueError(f"unknown packing {packing!r}; expected one of {', '.join(PACKINGS)}")


def memory_bytes(worker: Worker) -> int:
    """Bytes from the lowest region to the end of the highest: how large one array behind all of them must be."""
    if not worker.regions:
        return 0
    base = min((region.base for region in worker.regions), key=lambda address: address.value)
    return max(region.base.distance_from(base) + region.bytes for region in worker.regions)


def uniform_instance(
    name: str,
    layers: Union[int, Sequence[int]],
    kv_heads: int,
    head_dim: int,
    tp: int,
    pp: int = 1,
    *,
    page_tokens: int = 16,
    layout: str = "nhd",
    dtype: str = "bfloat16",
    pages: int = 64,
    bases: Union[int, Sequence[int]] = 0x10000,
    packing: str = "separate",
    stages: Optional[Sequence[Sequence[int]]] = None,
    model: str = "synthetic",
    group: str = "attn",
) -> Instance:
    """An instance of one K/V attention group, checked: rank = stage × tp + tensor rank.

    `bases` is where each worker's regions start, one after the other, each on the next 64-byte border; a single number
    serves all workers (each has an address space of its own). `stages` lists the layers of each pipeline stage where
    they are not an even split.
    """
    cached = attention_group(layers, kv_heads, head_dim, dtype, group)
    cuts = [pp_layers(cached.layers, pp, stage) for stage in range(pp)] if stages is None else [*map(tuple, stages)]
    starts = [bases] * (len(cuts) * tp) if isinstance(bases, int) else list(bases)
    if len(starts) != len(cuts) * tp:
        raise ValueError(f"{len(cuts) * tp} workers need as many bases, got {len(starts)}")
    workers = []
    for rank, base in enumerate(starts):
        heads = tp_heads(kv_heads, tp, rank % tp)
        local_heads = sum(stop - start for start, stop in heads)
        modes, part_bytes = modes_of(layout, page_tokens, local_heads, head_dim, cached.item_bytes)
        packing_of = pack(packing, cuts[rank // tp], cached.parts, pages, part_bytes)
        owned: dict[str, tuple[Union[int, tuple[int, ...]], ...]] = {"head": heads}
        pool = Pool(group, page_tokens, packing_of.page_bytes, modes, packing_of.buffers, owned=owned)
        workers.append(Worker(rank, regions_from(base, packing_of.region_bytes), (pool,)))
    return check_instance(Instance("kvferry-instance/1", name, model, (cached,), tuple(workers)))


def regions_from(base: int, region_bytes: Sequence[int], align_bytes: int = 64) -> tuple[Region, ...]:
    """Regions one after the other from `base` on, each at a multiple of `align_bytes` from it."""
    regions = []
    offset = 0
    for nbytes in region_bytes:
        regions.append(Region(Address(base).plus(offset), nbytes))
        offset += -(-nbytes // align_bytes) * align_bytes
    return tuple(regions)
