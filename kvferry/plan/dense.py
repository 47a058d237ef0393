"""Chunks: how cells travel. A chunk is a layout of its own, dense, in the order that it names.

The source gathers its pages into it and the target scatters it into other pages; each side needs its own layout and
the chunk, never the other's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kvferry.errors import PlanError
from kvferry.layout.address import U64, Addresses, join
from kvferry.layout.document import Group, Struct, Worker
from kvferry.layout.request import Side
from kvferry.plan.bind import Index, bind_tokens, expand, page_array, token_runs
from kvferry.plan.order import CANONICAL, Order, Section, sections
from kvferry.plan.program import DensePlace, Program, cell_bytes, compile_program, pool_places
from kvferry.plan.prove import prove_bounds
from kvferry.plan.route import Box


class Chunk(Struct, frozen=True):
    """`box`'s cells of tokens [start, stop), without gaps; a state group has tokens (0, 1)."""

    box: Box
    tokens: tuple[int, int]
    order: Order = CANONICAL


@dataclass(frozen=True)
class DenseCopies:
    """Run i lies at `addresses[i]` in the pages and at `dense_offsets[i]` in the chunk, `lengths[i]` bytes; together
    they are the chunk.
    """

    addresses: Addresses
    dense_offsets: U64
    lengths: U64
    total_bytes: int


def chunk_bytes(group: Group, chunk: Chunk) -> int:
    box = chunk.box
    return _tokens_in(chunk) * len(box.layers) * len(box.parts) * cell_bytes(group, box)


def _tokens_in(chunk: Chunk) -> int:
    if not any(size > 1 for _, size, _ in chunk.box.cycles):
        return max(0, chunk.tokens[1] - chunk.tokens[0])
    return int(token_runs(chunk.tokens, chunk.box.cycles)[1].sum())


def split(
    group: Group,
    box: Box,
    tokens: tuple[int, int],
    limit_bytes: int,
    limit_tokens: int = 0,
    order: Order = CANONICAL,
) -> list[Chunk]:
    """Cut into chunks of at most `limit_bytes`: whole layers where one fits, else pieces of one layer, between blocks
    of tokens where one fits. Chunks without bytes are left out. `limit_tokens`, if any: at most that many in each.

    PlanError if one token of one part doesn't fit.
    """
    cell = cell_bytes(group, box)
    if not cell or not box.layers or tokens[1] <= tokens[0]:
        return []
    if cell > limit_bytes:
        raise PlanError(
            f"group {group.name}: one token of one part has {cell} bytes, a staging slot {limit_bytes}; "
            "use larger slots"
        )
    chunks = []
    for parts in [box.parts] if cell * len(box.parts) <= limit_bytes else [(part,) for part in box.parts]:
        starts, lengths = token_runs(tokens, box.cycles)
        step = limit_bytes // (cell * len(parts))
        step = min(step, limit_tokens) if limit_tokens else step
        whole_blocks = 0 < order.block_tokens <= step
        ranges = (
            _block_ranges(tokens, order.block_tokens, step) if whole_blocks else _token_ranges(starts, lengths, step)
        )
        for low, high in ranges:
            count = int(np.clip(np.minimum(starts + lengths, high) - np.maximum(starts, low), 0, None).sum())
            layers = max(1, limit_bytes // (cell * len(parts) * count))
            for i in range(0, len(box.layers), layers):
                part_box = Box(box.group, box.layers[i : i + layers], parts, box.axes, box.cycles)
                chunks.append(Chunk(part_box, (low, high), order))
    return chunks


def _token_ranges(starts: Index, lengths: Index, step: int) -> list[tuple[int, int]]:
    """Cut runs into consecutive global ranges that hold at most `step` of their tokens each, about equally many."""
    total = int(lengths.sum())
    if not total:
        return []
    pieces = -(-total // step)
    ends = np.cumsum(lengths)
    edges = [int(starts[0])]
    for piece in range(1, pieces):
        position = total * piece // pieces  # the edge lies before the token with this position among the tokens
        run = int(np.searchsorted(ends, position, side="right"))
        edges.append(int(starts[run] + position - (ends[run] - lengths[run])))
    edges.append(int(starts[-1] + lengths[-1]))
    return list(itertools.pairwise(edges))


def _block_ranges(tokens: tuple[int, int], block_tokens: int, step: int) -> list[tuple[int, int]]:
    """Cut at blocks into ranges of at most `step` tokens, about equally many blocks in each."""
    start, stop = tokens
    first, last = start // block_tokens, -(-stop // block_tokens)
    pieces = -(-(last - first) // (step // block_tokens))
    edges = [block_tokens * (first + (last - first) * piece // pieces) for piece in range(1, pieces)]
    return list(itertools.pairwise([start, *edges, stop]))


def dense_copies(worker: Worker, group: Group, chunk: Chunk, side: Side) -> DenseCopies:
    """Runs between `worker`'s pages and the chunk, in chunk order of each program, proved in bounds and complete.

    PlanError names group, worker and token where the worker doesn't own a cell, a page is missing or outside its pool.
    """
    addresses, offsets, lengths = [], [], []
    for section in sections(chunk.order, chunk.tokens, _tokens_in(chunk)):
        for program in programs(worker, group, chunk, section):
            table = side.table(worker.rank, program.source.pool.table_name)  # type: ignore[union-attr]  # a pool by construction
            segments = bind_tokens(program, section.tokens, page_array(table) if table else None, None)
            prove_bounds(program, segments)
            copies = expand(program, segments)
            addresses.append(copies.source)
            offsets.append(copies.target.u64)
            lengths.append(copies.lengths)
    total, moved = chunk_bytes(group, chunk), sum(int(n.sum(dtype=np.uint64)) for n in lengths)
    if total != moved:
        raise PlanError(f"group {group.name}, worker {worker.rank}: the chunk has {total} bytes, its runs {moved}")
    empty = np.empty(0, np.uint64)
    return DenseCopies(join(addresses), np.concatenate([empty, *offsets]), np.concatenate([empty, *lengths]), total)


def programs(worker: Worker, group: Group, chunk: Chunk, section: Section) -> tuple[Program, ...]:
    """From the pages of `worker` into one section of the chunk; PlanError where it doesn't hold all of its box."""
    start, stop = section.tokens
    tokens_in = stop - start if chunk.order.block_tokens else section.block_tokens
    box, axes = chunk.box, chunk.order.axes
    before_bytes = section.before * len(box.layers) * len(box.parts) * cell_bytes(group, box)
    return _compiled(_Shape(worker, group, box, (tokens_in, axes, section.block_tokens, before_bytes)))


class _Shape:
    """All that a section's programs depend on. Chunks of one size come again and again, with other tokens and pages."""

    def __init__(self, worker: Worker, group: Group, box: Box, section: tuple[int, tuple[int, ...], int, int]) -> None:
        self.worker, self.group, self.box, self.section = worker, group, box, section
        self._key = (id(worker), section, box.layers, box.parts, tuple(box.axes.items()), box.cycles)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        # a shape keeps its worker, so that no other one can get its id
        return isinstance(other, _Shape) and self._key == other._key and self.group == other.group


@lru_cache(maxsize=4096)
def _compiled(shape: _Shape) -> tuple[Program, ...]:
    group, box = shape.group, shape.box
    tokens_in, axes, block_tokens, before_bytes = shape.section
    return tuple(
        compile_program(place, DensePlace(group, box, tokens_in, keys, axes, block_tokens, before_bytes))
        for place, keys in pool_places(shape.worker, group, box)
    )
