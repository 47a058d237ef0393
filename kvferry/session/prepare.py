"""Before a byte moves: which pieces come from which source worker and where each goes, proved for our own pages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.errors import ProofError
from kvferry.layout.address import join
from kvferry.layout.document import Group, Instance, Worker
from kvferry.plan.dense import Chunk, DenseCopies, chunk_bytes, dense_copies, programs, split
from kvferry.plan.digest import add, layer_digests, whole_axes
from kvferry.plan.follow import best_order
from kvferry.plan.order import Order, Section
from kvferry.plan.prove import Proof, prove_cells, prove_disjoint
from kvferry.plan.route import Box, Route, route
from kvferry.plan.wanted import check_wanted, owned_bytes
from kvferry.session.events import Prepare, Prepared, Shipment, Verify
from kvferry.session.messages import Piece
from kvferry.transport.base import Memory
from kvferry.transport.copies import Bytes

CACHED_PAIRS = 64
LANDED_PIECE_BYTES = 4 << 20
"""Of a piece that lands in a slot, or a sixteenth of the whole where that is more and slots are larger: pieces overlap
on their way, but each costs its plans and messages.
"""
DIRECT_PIECE_BYTES = 16 << 20, 64 << 20
"""Of a piece that lands straight in pages, an eighth of the whole between these: no slot limits it, but its grant lists
its runs in one message, and the next one is planned while it is on the wire."""


@dataclass(frozen=True)
class _Way:
    """What a pair of instances decides, whatever the request: `steps` of our rank, `takers` of each source rank."""

    steps: tuple[tuple[Route, Order], ...]
    takers: dict[int, tuple[int, ...]]


class Preparer:
    """Prepares transfers for one target rank; ways are kept per pair of instances (and generations).

    `pages`: the memory in whose pages pieces land straight; None where they land in slots of `slot_bytes` bytes.
    """

    def __init__(self, rank: int, slot_bytes: int, pages: Memory | None = None) -> None:
        self._rank, self._pages, self._slot_bytes = rank, pages, slot_bytes
        self._ways: dict[Hashable, _Way] = {}

    def prepare(self, order: Prepare) -> Prepared:
        """PlanError (or ProofError) where the wanted cells can't each be written exactly once.

        Proved is what will land as a whole; where a piece goes is found by the same layout and tables when it is here.
        """
        way = self._ways.get(order.key)
        if way is None:
            way = _way(order.source, order.target, self._rank)
            if len(self._ways) >= CACHED_PAIRS:
                del self._ways[next(iter(self._ways))]
            self._ways[order.key] = way
        check_wanted(order.source, order.target, order.groups)
        worker = order.target.worker(self._rank)
        owed = sum(owned_bytes(worker, order.target.group(name), w.token_range) for name, w in order.groups.items())
        direct = self._pages is not None
        piece_bytes = _direct_piece_bytes(owed) if direct else landed_piece_bytes(owed, self._slot_bytes)
        pieces: dict[int, list[Piece]] = {}
        runs: dict[int, list[bytes]] = {}
        proved: list[DenseCopies] = []
        for step, dense_order in way.steps:
            group = order.target.group(step.box.group)
            wanted = order.groups.get(group.name)
            if wanted is None:
                continue
            one = Chunk(step.box, wanted.token_range, dense_order)
            chunks = split(group, step.box, one.tokens, piece_bytes, order.piece_tokens, dense_order)
            pieces.setdefault(step.source, []).extend(Piece(chunk, chunk_bytes(group, chunk)) for chunk in chunks)
            copies = [dense_copies(worker, group, c, order.tables) for c in (chunks if direct else [one])]
            runs.setdefault(step.source, []).extend(self._runs(copies))
            proved += copies
        proof = _prove(worker, owed, proved)
        shipments = {
            source: Shipment(tuple(pieces.get(source, ())), ranks, tuple(runs.get(source, ())))
            for source, ranks in way.takers.items()
            if self._rank in ranks
        }
        sides = (order.source, order.target)
        whole = {name: whole_axes(order.target.group(name), sides) for name in order.groups}
        return Prepared(order.transfer, shipments, proof, whole)

    def _runs(self, copies: Sequence[DenseCopies]) -> list[bytes]:
        return [] if self._pages is None else [self._pages.runs(piece).encode() for piece in copies]


def _way(source: Instance, target: Instance, rank: int) -> _Way:
    """Once per pair. The programs that will scatter into our pages are proved to pair each cell with itself."""
    routes = {worker.rank: route(source, target, worker.rank) for worker in target.workers}
    worker, steps = target.worker(rank), []
    for step in routes[rank]:
        group = target.group(step.box.group)
        order = best_order(group, step.box, source.worker(step.source), worker)
        tokens = max(1, order.block_tokens)
        for program in programs(worker, group, Chunk(step.box, (0, tokens), order), Section((0, tokens), tokens, 0)):
            prove_cells(program)
        steps.append((step, order))
    return _Way(tuple(steps), takers(routes, [worker.rank for worker in source.workers]))


def owned_digests(
    order: Verify, instance: Instance, worker: Worker, gather: Callable[[DenseCopies, Bytes], None], limit_bytes: int
) -> dict[tuple[str, int], int]:
    """Digests, by (group, layer), of all that `worker` owns of what was wanted, found by its own layout alone: a hole
    in the plan shows as well as a wrong byte.
    """
    total: dict[tuple[str, int], int] = {}
    for name, wanted in order.groups.items():
        group = instance.group(name)
        for box in _owned_boxes(worker, group):
            for chunk in split(group, box, wanted.token_range, limit_bytes):
                copies = dense_copies(worker, group, chunk, order.tables)
                data = np.empty(copies.total_bytes, np.uint8)
                gather(copies, data)
                add(total, name, layer_digests(group, chunk, data, order.digest.key, order.digest.whole[name]))
    return total


def _owned_boxes(worker: Worker, group: Group) -> list[Box]:
    """One per pool and set of layers that have the same parts."""
    boxes = []
    for pool in worker.pools:
        if pool.group != group.name:
            continue
        axes = {axis: pool.segments(axis, extent) for axis, extent in group.axes.items()}
        by_parts: dict[tuple[str, ...], list[int]] = {}
        for layer in dict.fromkeys(buffer.layer for buffer in pool.buffers):
            parts = tuple(part for part in group.parts if any((b.layer, b.part) == (layer, part) for b in pool.buffers))
            by_parts.setdefault(parts, []).append(layer)
        boxes += [Box(group.name, tuple(layers), parts, axes, (pool.cycle,)) for parts, layers in by_parts.items()]
    return boxes


def takers(routes: dict[int, tuple[Route, ...]], sources: list[int]) -> dict[int, tuple[int, ...]]:
    """Which target ranks send an offer to each source rank. A source that nobody takes from gets an empty offer from
    one rank, so that it ends with the others.
    """
    ranks = sorted(routes)
    found = {
        source: tuple(t for t in ranks if any(step.source == source for step in routes[t]))
        for source in sorted(sources)
    }
    return {source: some or (ranks[source % len(ranks)],) for source, some in found.items()}


def landed_piece_bytes(whole_bytes: int, slot_bytes: int) -> int:
    return min(slot_bytes, max(LANDED_PIECE_BYTES, whole_bytes // 16))


def _direct_piece_bytes(whole_bytes: int) -> int:
    low, high = DIRECT_PIECE_BYTES
    return min(max(whole_bytes // 8, low), high)


def _prove(worker: Worker, owed: int, copies: list[DenseCopies]) -> Proof:
    """All `owed` bytes, which this worker owns of the wanted tokens, arrive, and none twice: so each exactly once."""
    moved = sum(c.total_bytes for c in copies)
    if owed != moved:
        raise ProofError(f"target worker {worker.rank} wants {owed} bytes, the routes bring {moved}")
    lengths = np.concatenate([np.empty(0, np.uint64), *(c.lengths for c in copies)])
    prove_disjoint(join([c.addresses for c in copies]), lengths, f"target worker {worker.rank}")
    return Proof(moved, len(lengths))
