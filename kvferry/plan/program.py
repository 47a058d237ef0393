"""Compile: how the cells of a box lie on two sides, as a short list of strides that knows nothing of pages or tokens.

A *place* says where a side keeps a box: `PoolPlace` for a worker's pages, `DensePlace` for a chunk. Any two places make
a program, so a direct copy, a gather and a scatter are one algorithm. Within a place the offset of a cell is a sum of
one term per axis, so each axis is compiled alone: the two sides' offsets of its indices, side by side, are folded into
(extent, source stride, target stride) modes that hold on both. Where no fold exists (2×3 against 3×2) the indices stay
enumerated: slower, never wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Union

import numpy as np

from kvferry.errors import PlanError
from kvferry.layout.address import U64, Addresses
from kvferry.layout.document import TOKEN, Group, Mode, Pool, Worker
from kvferry.plan.order import BLOCK, FIRST, LAYER, PART
from kvferry.plan.order import TOKEN as TOKENS
from kvferry.plan.route import Box, Cycle, Segment

Fold = tuple[int, int, int]
"""(extent, source stride, target stride), strides in bytes."""


@dataclass(frozen=True)
class TokenSteps:
    """Offsets of the token slots of a page: `offsets[slot]`; every `unit` slots from a multiple of `unit` lie `stride`
    bytes apart.
    """

    offsets: U64
    unit: int
    stride: int


@dataclass(frozen=True)
class PoolPlace:
    """A worker's pages: the part of `box` that lies in one pool."""

    rank: int
    group: Group
    pool: Pool
    box: Box
    bases: Addresses  # per (layer, part) in the box's order, where page 0 starts
    rooms: tuple[int, ...]  # per (layer, part): bytes from there to the end of its region
    pages: int  # pages that every one of these buffers has
    regions: tuple[int, ...]  # per (layer, part)

    def axis_offsets(self, axis: str) -> U64:
        owned = self.pool.segments(axis, self.group.axes[axis])
        try:
            return _pool_axis(self.pool.modes, axis, owned, self.box.axes[axis])
        except LookupError as missing:
            raise PlanError(
                f"group {self.group.name}, layer {self.box.layers[0]}, {axis} {missing}: "
                f"worker {self.rank} doesn't own it"
            ) from None

    @cached_property
    def tokens(self) -> TokenSteps:
        return _token_steps(self.pool.modes, self.pool.page_tokens)


@dataclass(frozen=True)
class DensePlace:
    """A section of a chunk: `tokens_in` tokens in blocks of `block_tokens` (0: in one block), without gaps from
    `offset_bytes` on. `axes`: see `kvferry.plan.order`.
    """

    group: Group
    box: Box
    tokens_in: int
    keys: tuple[tuple[int, str], ...]  # the (layer, part) of this program, out of the box's
    axes: tuple[int, ...] = ()
    block_tokens: int = 0
    offset_bytes: int = 0

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours on each axis, by number."""
        block_tokens = self.block_tokens or self.tokens_in
        blocks = self.tokens_in // self.block_tokens if self.block_tokens else 1
        own = (sum(stop - start for start, stop in segments) for segments in self.box.axes.values())
        extents = (len(self.box.layers), len(self.box.parts), blocks, block_tokens, *own)
        strides, stride = [0] * len(extents), self.group.item_bytes
        for axis in reversed(self.axes or range(len(extents))):
            strides[axis] = stride
            stride *= extents[axis]
        return tuple(strides)

    @cached_property
    def tokens(self) -> TokenSteps:
        """`offsets` are left out: all of a block's tokens are `stride` bytes apart."""
        block_tokens = self.block_tokens or self.tokens_in
        straight = self.strides[BLOCK] == block_tokens * self.strides[TOKENS]
        unit = self.tokens_in if straight else block_tokens
        return TokenSteps(np.empty(0, np.uint64), max(unit, 1), self.strides[TOKENS])

    def axis_offsets(self, axis: str) -> U64:
        number = list(self.box.axes).index(axis)
        count = sum(stop - start for start, stop in self.box.axes[axis])
        return np.arange(count, dtype=np.uint64) * np.uint64(self.strides[FIRST + number])

    @property
    def bases(self) -> Addresses:
        layers = {layer: i for i, layer in enumerate(self.box.layers)}
        parts = {part: i for i, part in enumerate(self.box.parts)}
        index = np.array([(layers[layer], parts[part]) for layer, part in self.keys], np.uint64).reshape(-1, 2)
        steps = np.array([self.strides[LAYER], self.strides[PART]], np.uint64)
        return Addresses((index * steps).sum(axis=1, dtype=np.uint64) + np.uint64(self.offset_bytes))

    @property
    def regions(self) -> tuple[int, ...]:
        return (0,) * len(self.keys)


Place = Union[PoolPlace, DensePlace]


def cell_bytes(group: Group, box: Box) -> int:
    """Bytes of one (layer, part, token) of the box."""
    return group.item_bytes * prod(sum(b - a for a, b in segments) for segments in box.axes.values())


def pool_places(worker: Worker, group: Group, box: Box) -> list[tuple[PoolPlace, tuple[tuple[int, str], ...]]]:
    """The pools of `worker` that hold the box, each with its (layer, part) keys; PlanError if it doesn't hold all of
    it.
    """
    if set(box.axes) != set(group.axes):
        raise PlanError(f"group {group.name}: the box names axes {list(box.axes)}, the group has {list(group.axes)}")
    wanted = list(itertools.product(box.layers, box.parts))
    left = set(wanted)
    if len(left) != len(wanted):
        raise PlanError(f"group {group.name}: the box names a layer or part twice")
    places = []
    for pool in worker.pools:
        if pool.group != group.name:
            continue
        at = {(b.layer, b.part): b for b in pool.buffers if (b.layer, b.part) in left}
        if not at:
            continue
        keys = tuple(key for key in wanted if key in at)
        buffers = [at[key] for key in keys]
        regions = [worker.regions[b.region] for b in buffers]
        place = PoolPlace(
            rank=worker.rank,
            group=group,
            pool=pool,
            box=box,
            bases=Addresses([r.base.plus(b.offset_bytes) for r, b in zip(regions, buffers, strict=True)]),
            rooms=tuple(r.bytes - b.offset_bytes for r, b in zip(regions, buffers, strict=True)),
            pages=min(b.pages for b in buffers),
            regions=tuple(b.region for b in buffers),
        )
        places.append((place, keys))
        left -= set(keys)
    if left:
        layer, part = min(left)
        raise PlanError(f"group {group.name}, layer {layer}, part {part}: worker {worker.rank} doesn't hold it")
    return places


def restrict(place: PoolPlace, keys: Sequence[tuple[int, str]], wanted: Sequence[tuple[int, str]]) -> PoolPlace:
    """The same place with only the (layer, part) in `wanted`, in that order; `keys` are those it has now."""
    order = {key: i for i, key in enumerate(keys)}
    index = [order[key] for key in wanted]
    return PoolPlace(
        place.rank, place.group, place.pool, place.box, place.bases.take(np.array(index, dtype=np.intp)),
        tuple(place.rooms[i] for i in index), place.pages, tuple(place.regions[i] for i in index),
    )  # fmt: skip


@dataclass(frozen=True)
class AxisPart:
    """Indices of one axis: start pairs, each the corner of the same nest of folds."""

    source: U64
    target: U64
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Piece:
    """Runs of equal shape. Copy (i, j, …) goes from `source_bases[i] + source_starts[j] + Σ index·stride` to the same
    on the target.
    """

    source_bases: Addresses
    target_bases: Addresses
    source_starts: U64
    target_starts: U64
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class Program:
    """Two places' common strides. Independent of pages and tokens; `pieces` are disjoint and together cover the box."""

    source: Place
    target: Place
    axes: tuple[tuple[AxisPart, ...], ...]  # per axis of the box; pieces are their product, times the buffers
    pieces: tuple[Piece, ...]


def compile_program(source: Place, target: Place) -> Program:
    """Compile two places of the same box and the same (layer, part) keys. Cost: a few NumPy calls per axis."""
    box, item = source.box, source.group.item_bytes
    axes = [fold_axis(source.axis_offsets(axis).tobytes(), target.axis_offsets(axis).tobytes()) for axis in box.axes]
    buffers = _fold_buffers(source, target)
    pieces = []
    for combination in itertools.product(*axes):
        s, t = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        folds: list[Fold] = [(item, 1, 1)]
        for part in combination:
            s = (s[:, None] + part.source[None, :]).ravel()
            t = (t[:, None] + part.target[None, :]).ravel()
            folds += part.folds
        for source_bases, target_bases, buffer_folds in buffers:
            pieces.append(Piece(source_bases, target_bases, s, t, (*folds, *buffer_folds)))
    return Program(source, target, tuple(axes), tuple(pieces))


def _fold_buffers(source: Place, target: Place) -> list[tuple[Addresses, Addresses, tuple[Fold, ...]]]:
    """Fold the (layer, part) buffers too: in one tensor for all layers, or for keys and values, they are a stride like
    any other, and pages may merge across them. Only buffers that share their regions, on both sides, are folded.
    """
    s, t = source.bases, target.bases
    order = np.lexsort((s.u64, np.array(target.regions), np.array(source.regions)))
    pairs = np.array([source.regions, target.regions])[:, order]
    starts = np.flatnonzero(np.concatenate([[True], (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)]))
    count = len(s) // len(starts)
    if count == 1 or not np.array_equal(starts, np.arange(0, len(s), count)):
        return [(s, t, ())]
    (low_s, one), (low_t, other) = (bases.take(order).reshape(-1, count).rows() for bases in (s, t))
    if (one != one[0]).any() or (other != other[0]).any():
        return [(s, t, ())]
    parts = fold_axis(one[0].tobytes(), other[0].tobytes())
    return [(low_s.plus(p.source).ravel(), low_t.plus(p.target).ravel(), p.folds) for p in parts]


@lru_cache(maxsize=4096)
def fold_axis(source: bytes, target: bytes) -> tuple[AxisPart, ...]:
    """Fold two equally long uint64 offset lists (raw bytes, so that they can be a cache key) into parts, largest
    common strides first.
    """
    return tuple(_fold(np.frombuffer(source, np.uint64), np.frombuffer(target, np.uint64)))


def _fold(s: U64, t: U64) -> list[AxisPart]:
    count = len(s)
    if count <= 1:
        return [AxisPart(s, t, ())] if count else []
    runs = _affine_runs(s, t)
    inner = runs[0][1]
    if inner == count:
        return [AxisPart(s[:1], t[:1], ((count, int(s[1] - s[0]), int(t[1] - t[0])),))]
    if inner > 1 and count % inner == 0:
        rows_s, rows_t = s.reshape(-1, inner), t.reshape(-1, inner)
        even = (rows_s - rows_s[:, :1] == rows_s[0] - rows_s[0, 0]) & (
            rows_t - rows_t[:, :1] == rows_t[0] - rows_t[0, 0]
        )
        if even.all():
            fold = (inner, int(s[1] - s[0]), int(t[1] - t[0]))
            return [AxisPart(p.source, p.target, (fold, *p.folds)) for p in _fold(rows_s[:, 0], rows_t[:, 0])]
    shapes: dict[tuple[Fold, ...], list[int]] = {}
    for start, length in runs:
        step = (length, int(s[start + 1] - s[start]), int(t[start + 1] - t[start])) if length > 1 else None
        shapes.setdefault((step,) if step else (), []).append(start)
    return [AxisPart(s[starts], t[starts], folds) for folds, starts in shapes.items()]


def _affine_runs(s: U64, t: U64) -> list[tuple[int, int]]:
    """Greedy maximal runs (start, length) in which both sides rise by a constant step."""
    rising = ((s[1:] > s[:-1]) & (t[1:] > t[:-1])).tolist()
    steps = list(zip((s[1:] - s[:-1]).tolist(), (t[1:] - t[:-1]).tolist(), strict=True))
    runs, start, count = [], 0, len(s)
    while start < count:
        end = start + 1
        while end < count and rising[end - 1] and steps[end - 1] == steps[start]:
            end += 1
        runs.append((start, end - start))
        start = end
    return runs


@lru_cache(maxsize=4096)
def _pool_axis(modes: tuple[Mode, ...], axis: str, owned: tuple[Segment, ...], wanted: tuple[Segment, ...]) -> U64:
    """Byte offsets in a page of the wanted global indices; LookupError(index) for the first that is not owned."""
    local = np.concatenate([np.arange(0, 0), *(np.arange(a, b) for a, b in owned)])
    index = np.concatenate([np.arange(0, 0), *(np.arange(a, b) for a, b in wanted)])
    if not len(index):
        return np.empty(0, np.uint64)
    order = np.argsort(local, kind="stable")
    at = np.minimum(np.searchsorted(local, index, sorter=order), max(len(local) - 1, 0))
    found = local[order[at]] == index if len(local) else np.zeros(len(index), bool)
    if not found.all():
        raise LookupError(int(index[np.flatnonzero(~found)[0]]))
    return _radix(modes, axis, order[at])


def _radix(modes: tuple[Mode, ...], axis: str, local: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> U64:
    """Mixed-radix number over the axis's modes, outermost first, times their strides."""
    rest, offset = local.astype(np.uint64), np.zeros(len(local), np.uint64)
    for mode in reversed([mode for mode in modes if mode.axis == axis]):
        extent = np.uint64(mode.extent)
        offset = offset + rest % extent * np.uint64(mode.stride_bytes)
        rest = rest // extent
    return offset


@lru_cache(maxsize=1024)
def _token_steps(modes: tuple[Mode, ...], page_tokens: int) -> TokenSteps:
    offsets = _radix(modes, TOKEN, np.arange(page_tokens))
    unit = _affine_runs(offsets, offsets)[0][1]
    if (
        page_tokens % unit
        or (np.diff(offsets.reshape(-1, unit), axis=1) != (offsets[1] - offsets[0] if unit > 1 else 0)).any()
    ):
        unit = 1
    return TokenSteps(offsets, unit, int(offsets[1] - offsets[0]) if unit > 1 else 0)


def local_tokens(
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int64]], cycle: Cycle
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Local index of global tokens that a worker with this cycle owns: (t // (block·size))·block + t % block."""
    _, size, block = cycle
    return tokens if size == 1 else tokens // (block * size) * block + tokens % block
