"""The kvferry-plan/1 document: every copy of one request, with its proof. For people, tests and tools; live transfers
use chunks.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import numpy as np

from kvferry.errors import ProofError
from kvferry.layout.address import join
from kvferry.layout.document import Group, Instance, Struct, Worker
from kvferry.layout.request import Request, Wanted
from kvferry.plan.bind import Copies, bind_tokens, expand, page_array
from kvferry.plan.landing import prove_landing
from kvferry.plan.program import Program, compile_program, pool_places, restrict
from kvferry.plan.prove import Proof, prove_bounds, prove_cells, prove_disjoint
from kvferry.plan.route import Box, check_compatible, route
from kvferry.plan.wanted import check_wanted, owned_bytes


class TransferCopies(Struct, frozen=True):
    """Copies from worker `source` to worker `target`; the three lists have the same length."""

    source: int
    target: int
    source_addresses: list[str]
    target_addresses: list[str]
    bytes: list[int]


class PlanDocument(Struct, frozen=True):
    format: Literal["kvferry-plan/1"]
    transfers: list[TransferCopies]
    proof: Proof


def make_plan(source: Instance, target: Instance, request: Request) -> PlanDocument:
    """Plan one request between two checked instances.

    IncompatibleError where the instances differ; PlanError (or ProofError) where the request can't be served with
    every wanted byte written exactly once.
    """
    copies = plan_copies(source, target, request)
    transfers = [
        TransferCopies(s, t, c.source.hex(), c.target.hex(), c.lengths.tolist())
        for (s, t), c in copies.items()
        if len(c)
    ]
    proof = Proof(sum(c.total_bytes for c in copies.values()), sum(len(c) for c in copies.values()))
    return PlanDocument("kvferry-plan/1", transfers, proof)


def plan_copies(source: Instance, target: Instance, request: Request) -> dict[tuple[int, int], Copies]:
    """Proved copies per (source rank, target rank)."""
    check_compatible(source, target)
    wanted = request.groups
    check_wanted(source, target, wanted)
    senders = {worker.rank: worker for worker in source.workers}
    parts: dict[tuple[int, int], list[Copies]] = defaultdict(list)
    for worker in target.workers:
        for step in route(source, target, worker.rank):
            if step.box.group in wanted:
                group = target.group(step.box.group)
                tokens = wanted[group.name].token_range
                parts[step.source, worker.rank] += _box_copies(
                    senders[step.source], worker, group, step.box, tokens, request
                )
        _prove_worker(
            worker, target, wanted, request, [c for (_, t), some in parts.items() if t == worker.rank for c in some]
        )
    return {pair: _concatenate(some) for pair, some in sorted(parts.items())}


def pair_programs(source: Worker, target: Worker, group: Group, box: Box) -> list[Program]:
    """Direct programs for a box: one for each pair of pools that holds some of it on both sides."""
    programs = []
    targets = pool_places(target, group, box)
    for source_place, source_keys in pool_places(source, group, box):
        for target_place, target_keys in targets:
            keys = [key for key in source_keys if key in set(target_keys)]
            if keys:
                programs.append(
                    compile_program(
                        restrict(source_place, source_keys, keys), restrict(target_place, target_keys, keys)
                    )
                )
    return programs


def _box_copies(
    source: Worker, target: Worker, group: Group, box: Box, tokens: tuple[int, int], request: Request
) -> list[Copies]:
    copies = []
    for program in pair_programs(source, target, group, box):
        prove_cells(program)
        tables = [
            side.table(worker.rank, place.pool.table_name)  # type: ignore[union-attr]  # pools by construction
            for side, worker, place in (
                (request.source, source, program.source),
                (request.target, target, program.target),
            )
        ]
        segments = bind_tokens(program, tokens, *(page_array(table) if table else None for table in tables))
        prove_bounds(program, segments)
        copies.append(expand(program, segments))
    return copies


def _prove_worker(
    worker: Worker, target: Instance, wanted: dict[str, Wanted], request: Request, copies: list[Copies]
) -> None:
    """Everything that the worker owns of the wanted tokens arrives (by count), and no byte twice: so exactly once."""
    owed = sum(owned_bytes(worker, target.group(name), want.token_range) for name, want in wanted.items())
    moved = sum(c.total_bytes for c in copies)
    if owed != moved:
        raise ProofError(f"target worker {worker.rank} wants {owed} bytes, the plan moves {moved}")
    prove_landing(worker, target, wanted, request.target)  # names the page, where a page is the reason
    prove_disjoint(
        join([c.target for c in copies]),
        np.concatenate([np.empty(0, np.uint64), *(c.lengths for c in copies)]),
        f"target worker {worker.rank}",
    )


def _concatenate(copies: list[Copies]) -> Copies:
    return Copies(
        join([c.source for c in copies]),
        join([c.target for c in copies]),
        np.concatenate([np.empty(0, np.uint64), *(c.lengths for c in copies)]),
    )
