"""The instance document of a vLLM worker, read from the tensors that vLLM registers. Pure; needs torch, not vLLM.

vLLM 0.32 registers each attention layer as `[block, head, token, content]`, where the content of a token is its key,
then its value; whatever lies in memory (NHD, HND, layers or blocks outermost, padding), the strides say. Backends with
K and V as an axis of their own are `[2, block, token, head, dim]` or `[block, 2, token, head, dim]`. One thing no
stride says: the CPU backend keeps, per block and head, all keys as `[dim][token]` and then all values as
`[token][dim]`. Latent attention is `[block, 1, token, dim]`; for recurrent layers see `states`.

A kernel may cut each block of the block table into smaller ones; that is one more digit of the token axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.engines.vllm.layers import FULL, LATENT, CachedLayer, dtype_name, is_state, window_of
from kvferry.engines.vllm.states import Split, state_axes, state_views
from kvferry.errors import EngineError
from kvferry.layout.document import Buffer, Group, Pool, Region, Worker
from kvferry.layout.presets import Segments, tp_heads
from kvferry.layout.tensors import pool_of, view_of

Groups = dict[str, Group]
"""Logical groups by kind of cache: `full`, `window-128`, `latent`; or with a part behind: `full.k`, `state-X.conv`."""

KEYS_TRANSPOSED = frozenset({"CPU_ATTN"})
"""Backends that store keys transposed inside a block."""


@dataclass(frozen=True)
class PartView:
    """K or V of one layer: a torch tensor over the layer's own memory, and what each of its dimensions is."""

    tensor: Any
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Piece:
    """What one layer caches of one logical group: the group's axes at their global size, what of them is owned here,
    and a view of each part.
    """

    layer: CachedLayer
    kind: str
    dtype: str
    axes: dict[str, int]
    owned: dict[str, Segments]
    views: dict[str, PartView]
    within: Region

    @property
    def group(self) -> Group:
        growth = "state" if is_state(self.kind) else "token"
        return Group(self.kind, growth, self.dtype, (self.layer.layer,), tuple(self.views), self.axes)  # type: ignore[arg-type]


def table_name(table: int) -> str:
    """The page table of a KV cache group."""
    return f"blocks{table}"


def read_pieces(
    layers: Sequence[CachedLayer], tensors: Mapping[str, Any], blocks: int, split: Split
) -> tuple[Piece, ...]:
    """What these layers cache. `tensors` by layer name, `blocks` in each block table. EngineError for what isn't known.

    Keys and values of different width are two groups, as are the tensors of a recurrent state.
    """
    return tuple(piece for cached in layers for piece in _read_layer(cached, tensors[cached.name], blocks, split))


def _read_layer(cached: CachedLayer, tensor: Any, blocks: int, split: Split) -> tuple[Piece, ...]:
    region = view_of(tensor).region()
    if cached.states:
        views = state_views(tensor, cached)
        return tuple(
            Piece(cached, f"{cached.kind}.{axes.name}", state.dtype, axes.extents, axes.owned,
                  {"state": PartView(view, ("page", *axes.axes))}, region)
            for axes, state, view in zip(state_axes(cached, split), cached.states, views, strict=True)
        )  # fmt: skip
    dtype = dtype_name(tensor.dtype)
    if cached.kind == LATENT:
        view = _latent_view(tensor, cached, blocks)
        return (Piece(cached, cached.kind, dtype, {"dim": cached.key_dim}, {}, {cached.kind: view}, region),)
    heads = tp_heads(split.kv_heads, split.tp, split.rank)
    owned = sum(stop - start for start, stop in heads)
    if owned != cached.heads:
        raise EngineError(f"layer {cached.name}: vLLM caches {cached.heads} KV heads here, {owned} were expected")
    found = read_views(tensor, cached, blocks)
    return tuple(
        Piece(cached, kind, dtype, {"head": split.kv_heads, "dim": dim}, {"head": heads},
              {part: found[part] for part in parts}, region)
        for kind, parts, dim in _parts(cached)
    )  # fmt: skip


def read_groups(pieces: Sequence[Piece]) -> Groups:
    """The logical groups of these pieces, by kind. EngineError where layers of one kind differ in size or data type."""
    found: Groups = {}
    for piece in pieces:
        found[piece.kind] = _joined(found.get(piece.kind, piece.group), piece.group)
    return found


def merge_groups(stages: Iterable[Groups]) -> Groups:
    """The groups of an instance, by kind, from those of its pipeline stages.

    They get the names that `kvferry layout` and other engines use: `attn` where there is one kind of attention, `full`
    and `sliding` where there are two, `sliding-N` where windows differ; `conv` and `ssm` for the parts of a state.
    """
    found: Groups = {}
    for kind, group in ((kind, group) for groups in stages for kind, group in groups.items()):
        found[kind] = _joined(found.get(kind, group), group)
    windows = {window_of(base_kind(kind)) for kind in found} - {None}
    states = {base_kind(kind) for kind in found if is_state(kind)}
    return {kind: _named(group, len(windows), len(states)) for kind, group in sorted(found.items())}


def base_kind(kind: str) -> str:
    """The kind of cache without what tells its keys from its values."""
    return kind.partition(".")[0]


def _named(group: Group, windows: int, states: int) -> Group:
    kind, dot, part = group.name.partition(".")
    window = window_of(kind)
    if is_state(kind):
        return msgspec.structs.replace(group, name=part if states == 1 else f"{kind}.{part}")
    if window is not None:
        name = "sliding" if windows == 1 else f"sliding-{window}"
        return msgspec.structs.replace(group, name=name + dot + part, constants={"window": window})
    if kind == FULL and not windows:
        return msgspec.structs.replace(group, name="attn" + dot + part)
    return group


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


def read_worker(rank: int, pieces: Sequence[Piece], groups: Groups) -> Worker:
    """One worker, its pools in the instance's `groups`. Pieces of one layer share its region."""
    regions: dict[str, int] = {}
    places: list[Region] = []
    pools: list[Pool] = []
    for piece in pieces:
        if piece.layer.name not in regions:
            regions[piece.layer.name] = len(places)
            places.append(piece.within)
        for part, view in piece.views.items():
            _, pool = pool_of(
                view.tensor,
                view.axes,
                groups[piece.kind],
                layers=(piece.layer.layer,),
                parts=(part,),
                owned=piece.owned,
                region=regions[piece.layer.name],
                within=piece.within,
                table=table_name(piece.layer.table),
            )
            pools.append(pool)
    return Worker(rank, tuple(places), _merged(pools))


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


def _latent_view(tensor: Any, cached: CachedLayer, blocks: int) -> PartView:
    """`[block, 1, token, dim]`, or without the one head."""
    flat = tensor.select(1, 0) if tensor.dim() == 4 and tensor.shape[1] == 1 else tensor
    pages, tokens, dim = flat.shape if flat.dim() == 3 else (0, 0, 0)
    if dim != cached.key_dim or not pages or not _cuts(pages, tokens, cached, blocks):
        raise EngineError(
            f"layer {cached.name} ({cached.backend}): expected {blocks} blocks of {cached.block_tokens} tokens, "
            f"{cached.key_dim} numbers each, registered was {list(tensor.shape)}"
        )
    return _whole_blocks(PartView(flat, ("page", "token", "dim")), blocks)


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
