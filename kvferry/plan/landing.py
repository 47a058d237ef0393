"""Before a target offers its pages: no byte may be wanted twice, over all groups, since pools may share memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvferry.errors import ProofError
from kvferry.layout.address import U64, Address, Addresses, join
from kvferry.layout.document import Group, Instance, Pool, Worker
from kvferry.layout.request import Side, Wanted
from kvferry.plan.bind import Index, bind_tokens, expand, page_array, token_runs
from kvferry.plan.program import DensePlace, PoolPlace, compile_program, local_tokens, pool_places
from kvferry.plan.prove import prove_bounds, prove_disjoint
from kvferry.plan.route import Box


def prove_landing(worker: Worker, instance: Instance, wanted: Mapping[str, Wanted], side: Side) -> None:
    """Raise PlanError or ProofError unless every page that `wanted` lands in exists and no byte of the worker is wanted
    twice.

    Inside a pool two elements never share a byte, so comparing (page, slot) is enough; pools whose memory overlaps are
    compared by address.
    """
    pools = [
        (instance.group(pool.group), pool)
        for pool in worker.pools
        if pool.group in wanted and pool.buffers and all(_owned_counts(instance.group(pool.group), pool))
    ]
    for group, pool in pools:
        slots = _slots(worker, group, pool, wanted[group.name], side)
        values, counts = np.unique(slots, return_counts=True)
        if (counts > 1).any():
            page = int(values[np.flatnonzero(counts > 1)[0]]) // pool.page_tokens
            raise ProofError(f"group {group.name}, worker {worker.rank}: page {page} serves two wanted ranges")
    sharing = _sharing_memory(worker, [pool for _, pool in pools])
    copies = [_writes(worker, group, pool, wanted[group.name], side) for group, pool in pools if pool in sharing]
    lengths = [np.empty(0, np.uint64), *(n for _, n in copies)]
    prove_disjoint(join([a for a, _ in copies]), np.concatenate(lengths), f"worker {worker.rank}")


def _owned_counts(group: Group, pool: Pool) -> list[int]:
    return [sum(b - a for a, b in pool.segments(axis, extent)) for axis, extent in group.axes.items()]


def _box(group: Group, pool: Pool) -> Box:
    layers = tuple(dict.fromkeys(b.layer for b in pool.buffers))
    parts = tuple(dict.fromkeys(b.part for b in pool.buffers))
    axes = {axis: pool.segments(axis, extent) for axis, extent in group.axes.items()}
    return Box(group.name, layers, parts, axes, (pool.cycle,))


def _place(worker: Worker, group: Group, pool: Pool, want: Wanted) -> list[tuple[PoolPlace, DensePlace]]:
    """One place for each layer: a pool may hold other parts in other layers."""
    start, stop = want.token_range
    places = []
    for layer in dict.fromkeys(b.layer for b in pool.buffers):
        box = _box(group, pool)
        parts = tuple(b.part for b in pool.buffers if b.layer == layer)
        box = Box(box.group, (layer,), parts, box.axes, box.cycles)
        for place, keys in pool_places(worker, group, box):
            places.append((place, DensePlace(group, box, stop - start, keys)))
    return places


def _slots(worker: Worker, group: Group, pool: Pool, want: Wanted, side: Side) -> Index:
    """page · page_tokens + slot of every wanted token that the worker owns."""
    place, dense = _place(worker, group, pool, want)[0]
    table = side.table(worker.rank, pool.table_name)
    pages = page_array(table) if table else None
    program = compile_program(place, dense)
    segments = bind_tokens(program, want.token_range, pages, None)
    prove_bounds(program, segments)
    if pages is None:
        return np.empty(0, np.int64)
    starts, lengths = token_runs(want.token_range, [pool.cycle])
    first = np.repeat(local_tokens(starts, pool.cycle) - np.cumsum(lengths) + lengths, lengths)
    local = first + np.arange(len(first)) - pages.start // pool.cycle[1]
    return np.asarray(pages.numbers[local // pool.page_tokens] * pool.page_tokens + local % pool.page_tokens)


def _writes(worker: Worker, group: Group, pool: Pool, want: Wanted, side: Side) -> tuple[Addresses, U64]:
    table = side.table(worker.rank, pool.table_name)
    pages = page_array(table) if table else None
    programs = [compile_program(place, dense) for place, dense in _place(worker, group, pool, want)]
    copies = [expand(p, bind_tokens(p, want.token_range, pages, None)) for p in programs]
    return join([c.source for c in copies]), np.concatenate([np.empty(0, np.uint64), *(c.lengths for c in copies)])


def _sharing_memory(worker: Worker, pools: list[Pool]) -> list[Pool]:
    """Pools of which some buffer's span overlaps a buffer of another pool."""
    spans = []
    for index, pool in enumerate(pools):
        for buffer in pool.buffers:
            start: Address = worker.regions[buffer.region].base.plus(buffer.offset_bytes)
            reach = (buffer.pages - 1) * pool.page_bytes + sum((m.extent - 1) * m.stride_bytes for m in pool.modes)
            spans.append((start.value, start.plus(reach).value, index))
    shared: set[int] = set()
    reach_so_far: list[tuple[int, int]] = []
    for start_at, end, index in sorted(spans):
        reach_so_far = [(stop, other) for stop, other in reach_so_far if stop >= start_at]
        for _, other in reach_so_far:
            if other != index:
                shared |= {other, index}
        reach_so_far.append((end, index))
    return [pool for i, pool in enumerate(pools) if i in shared]
