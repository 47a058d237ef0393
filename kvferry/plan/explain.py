"""Who sends what to whom, for people."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.layout.document import Instance
from kvferry.plan.bind import grow
from kvferry.plan.document import pair_programs
from kvferry.plan.program import cell_bytes
from kvferry.plan.route import Segment, check_compatible, route


@dataclass(frozen=True)
class TrafficRow:
    """One box from `source` to `target`; bytes are per token of the group (per request for a state)."""

    source: int
    target: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    axes: dict[str, tuple[Segment, ...]]
    cycles: tuple[tuple[int, int, int], ...]
    bytes_per_token: int
    run_bytes: int  # contiguous on both sides within one token
    replicas: tuple[int, ...]


def who_sends_what(source: Instance, target: Instance) -> list[TrafficRow]:
    """Every route of the pair, ordered by target then source; IncompatibleError or PlanError as in `make_plan`."""
    check_compatible(source, target)
    rows = []
    for worker in sorted(target.workers, key=lambda w: w.rank):
        for step in route(source, target, worker.rank):
            box, group = step.box, target.group(step.box.group)
            programs = pair_programs(source.worker(step.source), worker, group, box)
            rows.append(
                TrafficRow(
                    source=step.source,
                    target=worker.rank,
                    group=group.name,
                    layers=box.layers,
                    parts=box.parts,
                    axes=box.axes,
                    cycles=box.cycles,
                    bytes_per_token=cell_bytes(group, box) * len(box.layers) * len(box.parts),
                    run_bytes=min(grow(piece.folds)[0] for program in programs for piece in program.pieces),
                    replicas=step.replicas,
                )
            )
    return sorted(rows, key=lambda row: (row.target, row.source))
