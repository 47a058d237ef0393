"""The instance document of a vLLM worker, read from the tensors that vLLM registers. Pure; needs torch, not vLLM.

vLLM 0.32 registers each layer as `[block, head, token, content]`, where the content of a token is its key, then its
value; whatever lies in memory (NHD, HND, layers or blocks outermost, padding), the strides say. Backends with K and V
as an axis of their own are `[2, block, token, head, dim]` or `[block, 2, token, head, dim]`. One thing no stride says:
the CPU backend keeps, per block and head, all keys as `[dim][token]` and then all values as `[token][dim]`.

A kernel may cut each block of the block table into smaller ones; that is one more digit of the token axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.engines.vllm.layers import CachedLayer, window_of
from kvferry.errors import EngineError
from kvferry.layout.document import Buffer, Group, Pool, Region, Worker
from kvferry.layout.presets import Segments
from kvferry.layout.tensors import pool_of, view_of

Groups = dict[str, Group]
"""Logical groups by kind of cache: `full`, `window-128`, or with `.k` and `.v` behind."""

KEYS_TRANSPOSED = frozenset({"CPU_ATTN"})
"""Backends that store keys transposed inside a block."""


@dataclass(frozen=True)
class PartView:
    """K or V of one layer: a torch tensor over the layer's own memory, and what each of its dimensions is."""

    tensor: Any
    axes: tuple[str, ...]


def table_name(table: int) -> str:
    """The page table of a KV cache group."""
    return f"blocks{table}"


def read_groups(layers: Sequence[CachedLayer], tensors: Mapping[str, Any], kv_heads: int) -> Groups:
    """The logical groups of these layers, by kind. K and V of different width are two, `full.k` and `full.v`.

    EngineError where layers of one kind differ in head size or data type.
    """
    found: Groups = {}
    for cached in layers:
        dtype = str(tensors[cached.name].dtype).removeprefix("torch.")
        for kind, parts, dim in _parts(cached):
            group = Group(kind, "token", dtype, (cached.layer,), parts, {"head": kv_heads, "dim": dim})
            found[kind] = _joined(found.get(kind, group), group)
    return found


def merge_groups(stages: Iterable[Groups]) -> Groups:
    """The groups of an instance, by kind, from those of its pipeline stages.

    They get the names that `kvferry layout` and other engines use: `attn` where there is one kind, `full` and `sliding`
    where there are two; and `sliding-N` where windows differ.
    """
    found: Groups = {}
    for kind, group in ((kind, group) for groups in stages for kind, group in groups.items()):
        found[kind] = _joined(found.get(kind, group), group)
    windows = {window_of(base_kind(kind)) for kind in found} - {None}
    return {kind: _named(group, len(windows)) for kind, group in sorted(found.items())}


def base_kind(kind: str) -> str:
    """The kind of cache without what tells its keys from its values."""
    return kind.partition(".")[0]


def _named(group: Group, windows: int) -> Group:
    kind, dot, part = group.name.partition(".")
    window = window_of(kind)
    if window is None:
        return msgspec.structs.replace(group, name=("full" if windows else "attn") + dot + part)
    name = "sliding" if windows == 1 else f"sliding-{window}"
    return msgspec.structs.replace(group, name=name + dot + part, constants={"window": window})


def _joined(one: Group, other: Group) -> Group:
    layers = tuple(sorted({*one.layers, *other.layers}))
    joined = msgspec.structs.replace(one, layers=layers)
    if msgspec.structs.replace(other, layers=layers) != joined:
        raise EngineError(
            f"cache of kind {one.name}: layer {one.layers[0]} has {one.dtype} and {one.axes}, layer {other.layers[0]} "
            f"has {other.dtype} and {other.axes}; layers of one kind that differ can't be moved yet"
        )
    return joined


def _parts(cached: CachedLayer) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """(kind, parts, head size) of what one layer caches."""
    if cached.key_dim == cached.value_dim:
        return ((cached.kind, ("k", "v"), cached.key_dim),)
    return ((f"{cached.kind}.k", ("k",), cached.key_dim), (f"{cached.kind}.v", ("v",), cached.value_dim))


def read_worker(
    rank: int,
    heads: Segments,
    layers: Sequence[CachedLayer],
    tensors: Mapping[str, Any],
    groups: Groups,
    blocks: int,
) -> Worker:
    """One worker: `tensors` by layer name, `blocks` in each block table, `heads` the global KV heads that it owns."""
    regions: list[Region] = []
    pools: list[Pool] = []
    for cached in layers:
        owned = sum(stop - start for start, stop in heads)
        if owned != cached.heads:
            raise EngineError(f"layer {cached.name}: vLLM caches {cached.heads} KV heads here, {owned} were expected")
        tensor = tensors[cached.name]
        views = read_views(tensor, cached, blocks)
        for kind, parts, _ in _parts(cached):
            for part in parts:
                region, pool = pool_of(
                    views[part].tensor,
                    views[part].axes,
                    groups[kind],
                    layers=(cached.layer,),
                    parts=(part,),
                    owned={"head": heads},
                    region=len(regions),
                    within=view_of(tensor).region(),
                    table=table_name(cached.table),
                )
                pools.append(pool)
        regions.append(region)
    return Worker(rank, tuple(regions), _merged(pools))


def _merged(pools: Sequence[Pool]) -> tuple[Pool, ...]:
    """Pools that differ in nothing but where their buffers are become one."""
    buffers: dict[bytes, list[Buffer]] = {}
    shapes: dict[bytes, Pool] = {}
    for pool in pools:
        shape = msgspec.structs.replace(pool, buffers=())
        key = msgspec.msgpack.encode(shape)
        shapes.setdefault(key, shape)
        buffers.setdefault(key, []).extend(pool.buffers)
    return tuple(msgspec.structs.replace(shape, buffers=tuple(buffers[key])) for key, shape in shapes.items())


def read_views(tensor: Any, cached: CachedLayer, blocks: int) -> dict[str, PartView]:
    """K and V of one layer, dimension by dimension; EngineError where the tensor has none of the known shapes.

    `blocks` is the number of blocks that the block table counts, each of `cached.block_tokens` tokens.
    """
    shape = tuple(tensor.shape)
    heads, dims = cached.heads, (cached.key_dim, cached.value_dim)
    found: list[tuple[tuple[Any, Any], tuple[str, ...]]] = []
    if len(shape) == 4 and shape[1] == heads and shape[3] == sum(dims) and _cuts(shape[0], shape[2], cached, blocks):
        found.append(((tensor[..., : dims[0]], tensor[..., dims[0] :]), ("page", "head", "token", "dim")))
    if len(shape) == 5 and shape[3] == heads and dims == (shape[4],) * 2:
        for page, part in ((1, 0), (0, 1)):
            if shape[part] == 2 and _cuts(shape[page], shape[2], cached, blocks):
                found.append(((tensor.select(part, 0), tensor.select(part, 1)), ("page", "token", "head", "dim")))
    if len(found) != 1:
        known = "none" if not found else "more than one"
        raise EngineError(
            f"layer {cached.name} ({cached.backend}): {known} of the known shapes fits the registered tensor "
            f"{list(shape)}, strides {list(tensor.stride())}; expected {blocks} blocks of {cached.block_tokens} "
            f"tokens, {heads} KV heads of {dims[0]} + {dims[1]} numbers"
        )
    (keys, values), axes = found[0]
    views = {"k": PartView(keys, axes), "v": PartView(values, axes)}
    if cached.backend in KEYS_TRANSPOSED:
        views = _keys_transposed(tensor, cached)
    return {part: _whole_blocks(view, blocks) for part, view in views.items()}


def _cuts(pages: int, tokens: int, cached: CachedLayer, blocks: int) -> bool:
    """Whether pages of `tokens` tokens are the table's blocks, each cut into equally many."""
    return pages % blocks == 0 and pages // blocks * tokens == cached.block_tokens


def _keys_transposed(tensor: Any, cached: CachedLayer) -> dict[str, PartView]:
    """Per block and head `[dim][token]` of keys, then `[token][dim]` of values."""
    pages, heads, tokens, content = tensor.shape
    dim = cached.key_dim
    if cached.value_dim != dim or tensor.stride()[2:] != (content, 1):
        raise EngineError(
            f"layer {cached.name} ({cached.backend}): expected keys and values of one width, and the tokens of a head "
            f"side by side; got {dim} and {cached.value_dim}, strides {list(tensor.stride())}"
        )
    page, head = tensor.stride()[:2]
    start = tensor.storage_offset()
    keys = tensor.as_strided((pages, heads, dim, tokens), (page, head, tokens, 1), start)
    values = tensor.as_strided((pages, heads, tokens, dim), (page, head, dim, 1), start + tokens * dim)
    return {
        "k": PartView(keys, ("page", "head", "dim", "token")),
        "v": PartView(values, ("page", "head", "token", "dim")),
    }


def _whole_blocks(view: PartView, blocks: int) -> PartView:
    """The pages that a kernel cut a block into become the outermost digit of the block's tokens."""
    cut = view.tensor.shape[0] // blocks
    if cut == 1:
        return view
    return PartView(view.tensor.unflatten(0, (blocks, cut)), ("page", "token", *view.axes[1:]))
