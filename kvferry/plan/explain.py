"""Who sends what to whom, for people: one row per box, totals per worker, and what the runs look like on whole pages.

Nothing here decides anything; it tells what `route` and the compiled programs decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np

from kvferry.layout.address import Address, Addresses
from kvferry.layout.document import Instance
from kvferry.plan.bind import Pages, bind_tokens, expand, token_runs
from kvferry.plan.document import pair_programs
from kvferry.plan.program import PoolPlace, Program, cell_bytes
from kvferry.plan.route import Cycle, Route, Segment, check_compatible, route

TYPICAL_TOKENS = 1 << 16
"""Runs are counted over the tokens after which both sides' pages line up again, or this many if that is later."""
ESTIMATE_TOKENS = 1024


@dataclass(frozen=True)
class Wire:
    """What moving costs over one transport, in seconds. `descriptor_s` None: it can't post runs as they lie."""

    transport: str
    descriptor_s: float | None
    byte_s: float
    gather_run_s: float
    gather_byte_s: float

    def straight_s(self, runs: float, nbytes: float) -> float | None:
        """Each run posted as it lies, one descriptor each."""
        return None if self.descriptor_s is None else runs * self.descriptor_s + nbytes * self.byte_s

    def gathered_s(self, runs: float, nbytes: float) -> float:
        """Gathered into one write."""
        gather_s = runs * self.gather_run_s + nbytes * self.gather_byte_s
        return gather_s + (self.descriptor_s or 0.0) + nbytes * self.byte_s

    def posting(self, runs: float, nbytes: float) -> str:
        straight_s = self.straight_s(runs, nbytes)
        return "straight" if straight_s is not None and straight_s <= self.gathered_s(runs, nbytes) else "gathered"

    def __str__(self) -> str:
        each = "" if self.descriptor_s is None else f"{self.descriptor_s * 1e6:.3g} µs per descriptor, "
        return (
            f"{self.transport}: {each}{1e-9 / self.byte_s:.3g} GB/s; "
            f"gathering {self.gather_run_s * 1e9:.3g} ns per run, {1e-9 / self.gather_byte_s:.3g} GB/s"
        )


@dataclass(frozen=True)
class TrafficRow:
    """One box from `source` to `target`; bytes are per token of the group (per request for a state).

    Runs are those of whole pages that don't lie side by side; pages that do may merge into longer ones.
    """

    source: int
    target: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    axes: dict[str, tuple[Segment, ...]]
    cycles: tuple[Cycle, ...]
    bytes_per_token: int
    run_bytes: int  # the shortest run
    longest_run_bytes: int
    copies_per_page: float  # runs per page of the target, on average
    replicas: tuple[int, ...]  # every source worker that could have sent it, `source` included
    choice: str = "only owner"  # how `source` was chosen among them
    token_share: float = 1.0  # part of all tokens that pass the cycles
    state: bool = False  # one row per request, so no tokens
    page_tokens: int = 1  # tokens of the sequence per page of the target
    posting: str = "gathered"  # or straight: what costs less for a request of 1,024 tokens

    @property
    def mean_bytes_per_token(self) -> float:
        """Bytes per token of the sequence: what other workers send under context parallelism left out."""
        return 0.0 if self.state else self.bytes_per_token * self.token_share

    def amount(self, tokens: int) -> tuple[float, float]:
        """(bytes, copies) of a request of `tokens` tokens."""
        if self.state:
            return float(self.bytes_per_token), self.copies_per_page
        return self.bytes_per_token * self.token_share * tokens, self.copies_per_page * tokens / self.page_tokens


@dataclass(frozen=True)
class WorkerTotal:
    """What one worker sends (a source) or receives (a target). Estimates are for a request of 1,024 tokens."""

    rank: int
    peers: tuple[int, ...]
    bytes_per_token: float
    state_bytes: int  # per request
    straight_ms: float | None  # every run posted as it lies; None where the transport can't
    gathered_ms: float


@dataclass(frozen=True)
class Traffic:
    source: str
    target: str
    rows: list[TrafficRow]
    senders: list[WorkerTotal]
    receivers: list[WorkerTotal]
    estimate_assumes: str
    estimate_tokens: int = ESTIMATE_TOKENS


def explain(source: Instance, target: Instance, wire: Wire) -> Traffic:
    """Rows and totals of the pair; IncompatibleError or PlanError as in `make_plan`."""
    rows = [_posted(row, wire) for row in who_sends_what(source, target)]
    senders = [
        _total(rank, [row for row in rows if row.source == rank], True, wire)
        for rank in sorted(worker.rank for worker in source.workers)
    ]
    takers = [
        _total(rank, [row for row in rows if row.target == rank], False, wire)
        for rank in sorted(worker.rank for worker in target.workers)
    ]
    return Traffic(source.instance, target.instance, rows, senders, takers, str(wire))


def who_sends_what(source: Instance, target: Instance) -> list[TrafficRow]:
    """Every route of the pair, ordered by target then source; IncompatibleError or PlanError as in `make_plan`."""
    check_compatible(source, target)
    rows = []
    for worker in sorted(target.workers, key=lambda w: w.rank):
        for step in route(source, target, worker.rank):
            box, group = step.box, target.group(step.box.group)
            runs = typical_runs(pair_programs(source.worker(step.source), worker, group, box))
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
                    run_bytes=runs.shortest,
                    longest_run_bytes=runs.longest,
                    copies_per_page=runs.copies_per_page,
                    replicas=step.replicas,
                    choice=choice(step),
                    token_share=_share(box.cycles),
                    state=group.growth == "state",
                    page_tokens=runs.page_tokens,
                )
            )
    return sorted(rows, key=lambda row: (row.target, row.source))


def choice(step: Route) -> str:
    """How the source was chosen."""
    if len(step.replicas) < 2:
        return "only owner"
    return f"replica {step.replicas.index(step.source) + 1} of {len(step.replicas)}"


@dataclass(frozen=True)
class Runs:
    shortest: int
    longest: int
    copies_per_page: float
    page_tokens: int  # tokens of the sequence per page of the target


def typical_runs(programs: Sequence[Program]) -> Runs:
    """The runs of whole pages, counted over the tokens after which both sides' pages line up again."""
    shortest, longest, copies, page_tokens = 0, 0, 0.0, 1
    for program in programs:
        target = program.target
        assert isinstance(target, PoolPlace)  # a direct program
        page_tokens = target.pool.page_tokens * target.pool.cycle[1]
        tokens = max(page_tokens, min(period(program), TYPICAL_TOKENS // page_tokens * page_tokens))
        loose, tables = scattered(program, 0, tokens)
        segments = bind_tokens(loose, (0, tokens), *tables)
        for piece in loose.pieces:
            one = replace(piece, source_bases=_ORIGIN, target_bases=_ORIGIN)
            lengths = expand(replace(loose, pieces=(one,)), segments).lengths
            if len(lengths):
                shortest = min(shortest or int(lengths.min()), int(lengths.min()))
                longest = max(longest, int(lengths.max()))
                copies += len(lengths) * len(piece.source_bases) * page_tokens / tokens
    return Runs(shortest, longest, round(copies, 2), page_tokens)


_ORIGIN = Addresses(np.zeros(1, np.uint64))


def period(program: Program) -> int:
    """Tokens after which both sides' pages and cycles line up again."""
    return lcm(*(unit for place in (program.source, program.target) for unit in _units(place)))


def _units(place: object) -> tuple[int, int]:
    assert isinstance(place, PoolPlace)  # a direct program
    _, size, block = place.pool.cycle
    return place.pool.page_tokens * size, block * size


def scattered(program: Program, start: int, stop: int) -> tuple[Program, list[Pages]]:
    """The program as if its pools had pages without end in an address space of their own, and page tables for tokens
    [start, stop) in which no two pages lie side by side. `start` is a multiple of the program's period. For counting,
    never for copying.
    """
    places, tables = [], []
    low = origins(program)
    for place, origin in zip((program.source, program.target), low):
        assert isinstance(place, PoolPlace)  # a direct program
        pages = -(-(stop - start) // (place.pool.page_tokens * place.pool.cycle[1])) + place.pool.cycle[2]
        places.append(replace(place, pages=2 * pages + 2, bases=lowered(place.bases, origin)))
        tables.append(Pages(np.arange(pages, dtype=np.int64) * 2 + 1, start))
    pieces = tuple(
        replace(
            piece,
            source_bases=lowered(piece.source_bases, low[0]),
            target_bases=lowered(piece.target_bases, low[1]),
        )
        for piece in program.pieces
    )
    return replace(program, source=places[0], target=places[1], pieces=pieces), tables


def origins(program: Program) -> tuple[Address, Address]:
    """The lowest buffer of each side."""
    return program.source.bases.lowest(), program.target.bases.lowest()


def lowered(bases: Addresses, origin: Address) -> Addresses:
    """The same addresses if `origin` were 0."""
    return Addresses(bases.distances_from(origin))


def _share(cycles: Iterable[Cycle]) -> float:
    cut = [cycle for cycle in cycles if cycle[1] > 1]
    if not cut:
        return 1.0
    tokens = min(lcm(*(size * block for _, size, block in cut)), 1 << 20)
    return int(token_runs((0, tokens), cut)[1].sum()) / tokens


def _posted(row: TrafficRow, wire: Wire) -> TrafficRow:
    nbytes, copies = row.amount(ESTIMATE_TOKENS)
    return replace(row, posting=wire.posting(copies, nbytes))


def _total(rank: int, rows: Sequence[TrafficRow], sends: bool, wire: Wire) -> WorkerTotal:
    amounts = [row.amount(ESTIMATE_TOKENS) for row in rows]
    nbytes, copies = (sum(amount[i] for amount in amounts) for i in range(2))
    straight_s = wire.straight_s(copies, nbytes)
    return WorkerTotal(
        rank=rank,
        peers=tuple(sorted({row.target if sends else row.source for row in rows})),
        bytes_per_token=round(sum(row.mean_bytes_per_token for row in rows), 3),
        state_bytes=sum(row.bytes_per_token for row in rows if row.state),
        straight_ms=None if straight_s is None else round(straight_s * 1e3, 3),
        gathered_ms=round(wire.gathered_s(copies, nbytes) * 1e3, 3),
    )


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def slices(segments: Iterable[Segment]) -> str:
    """`0:4,8:12` for the half-open segments [0, 4) and [8, 12)."""
    return ",".join(f"{start}:{stop}" for start, stop in segments)


def cycle_text(cycles: Iterable[Cycle]) -> str:
    """The tokens that pass every cycle: `t//16%4=1`, or `all`."""
    return " & ".join(f"t//{block}%{size}={rank}" for rank, size, block in cycles if size > 1) or "all"
