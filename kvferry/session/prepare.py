"""Before a byte moves: which pieces come from which source worker and where each goes, proved for our own pages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from kvferry.errors import ProofError
from kvferry.layout.address import join
from kvferry.layout.document import Instance, Worker
from kvferry.layout.request import Wanted
from kvferry.plan.dense import DenseCopies, chunk_bytes, dense_copies, split
from kvferry.plan.program import DensePlace, compile_program, pool_places
from kvferry.plan.prove import Proof, prove_cells, prove_disjoint
from kvferry.plan.route import Route, route
from kvferry.plan.wanted import check_wanted, owned_bytes
from kvferry.session.events import Prepare, Prepared, Shipment
from kvferry.session.messages import Piece
from kvferry.transport.memory import HostMemory

CACHED_PAIRS = 64
DIRECT_PIECE_BYTES = 16 << 20
"""Of a piece that lands straight in pages: no slot limits it, but its grant lists its runs in one message."""


class Preparer:
    """Prepares transfers for one target rank; routes are kept per pair of instances (and generations).

    `pages`: the memory in whose pages pieces land straight; None where they land in slots of `slot_bytes` bytes.
    """

    def __init__(self, rank: int, slot_bytes: int, pages: HostMemory | None = None) -> None:
        self._rank, self._pages = rank, pages
        self._piece_bytes = slot_bytes if pages is None else DIRECT_PIECE_BYTES
        self._routes: dict[Hashable, dict[int, tuple[Route, ...]]] = {}

    def prepare(self, order: Prepare) -> Prepared:
        """PlanError (or ProofError) where the wanted cells can't each be written exactly once."""
        routes = self._routes.get(order.key)
        if routes is None:
            routes = {worker.rank: route(order.source, order.target, worker.rank) for worker in order.target.workers}
            if len(self._routes) >= CACHED_PAIRS:
                del self._routes[next(iter(self._routes))]
            self._routes[order.key] = routes
            _prove_routes(order.target, self._rank, routes[self._rank])
        check_wanted(order.source, order.target, order.groups)
        worker = order.target.worker(self._rank)
        pieces: dict[int, list[Piece]] = {}
        copies: dict[int, list[DenseCopies]] = {}
        for step in routes[self._rank]:
            group = order.target.group(step.box.group)
            wanted = order.groups.get(group.name)
            for chunk in (
                split(group, step.box, wanted.token_range, self._piece_bytes, order.piece_tokens) if wanted else ()
            ):
                pieces.setdefault(step.source, []).append(Piece(chunk, chunk_bytes(group, chunk)))
                copies.setdefault(step.source, []).append(dense_copies(worker, group, chunk, order.tables))
        proof = _prove(worker, order.target, order.groups, [c for some in copies.values() for c in some])
        shipments = {
            source: Shipment(
                tuple(pieces.get(source, ())), tuple(copies.get(source, ())), ranks, self._runs(copies.get(source, ()))
            )
            for source, ranks in takers(routes, [worker.rank for worker in order.source.workers]).items()
            if self._rank in ranks
        }
        return Prepared(order.transfer, shipments, proof)

    def _runs(self, copies: Sequence[DenseCopies]) -> tuple[bytes, ...]:
        return () if self._pages is None else tuple(self._pages.runs(piece).encode() for piece in copies)


def _prove_routes(target: Instance, rank: int, routes: tuple[Route, ...]) -> None:
    """Once per pair: the programs that will scatter into our pages pair each cell with itself."""
    for step in routes:
        group = target.group(step.box.group)
        for place, keys in pool_places(target.worker(rank), group, step.box):
            prove_cells(compile_program(place, DensePlace(group, step.box, 1, keys)))


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


def _prove(worker: Worker, target: Instance, groups: dict[str, Wanted], copies: list[DenseCopies]) -> Proof:
    """All that this worker owns of the wanted tokens arrives, and no byte twice: so each exactly once."""
    owed = sum(owned_bytes(worker, target.group(name), wanted.token_range) for name, wanted in groups.items())
    moved = sum(c.total_bytes for c in copies)
    if owed != moved:
        raise ProofError(f"target worker {worker.rank} wants {owed} bytes, the routes bring {moved}")
    lengths = np.concatenate([np.empty(0, np.uint64), *(c.lengths for c in copies)])
    prove_disjoint(join([c.addresses for c in copies]), lengths, f"target worker {worker.rank}")
    return Proof(moved, len(lengths))
