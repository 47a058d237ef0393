"""Follow one cell: from which worker, why that one, between which addresses and in which run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from kvferry.errors import DocumentError, PlanError
from kvferry.layout.address import Address
from kvferry.layout.document import Group, Instance
from kvferry.layout.request import Request, Side
from kvferry.plan.bind import Pages, Segments, bind_tokens, expand, page_array
from kvferry.plan.document import pair_programs
from kvferry.plan.explain import lowered, origins, period, ranges, scattered, slices
from kvferry.plan.program import PoolPlace, Program, local_tokens, pool_places
from kvferry.plan.route import Box, Route, check_compatible, owners, route, shared_groups

OPTION = "--why"
SHAPE = "TARGET_RANK:GROUP:LAYER:PART:HEAD:TOKEN"
WINDOW = 16
"""Segments that are expanded around the cell; doubled while its run reaches the window's edge."""


@dataclass(frozen=True)
class Cell:
    """One element that target worker `rank` wants; `index` has every axis of the group."""

    rank: int
    group: str
    layer: int
    part: str
    index: dict[str, int]
    token: int


@dataclass(frozen=True)
class End:
    """Where the cell lies on one side. `page` and `address` are None without a request: they need its page table."""

    rank: int
    table: str
    table_entry: int  # which page of the table
    page: Optional[int]
    slot: int  # token slot in the page
    page_offset: int  # bytes from the start of the page to the cell; may exceed page_bytes in interleaved pools
    page_bytes: int
    base: str  # where page 0 of this layer and part starts
    address: Optional[str]


@dataclass(frozen=True)
class Run:
    """The copy that carries the cell: addresses (offsets from the start of the cell's pages without a request)."""

    source_start: str
    target_start: str
    bytes: int
    cell_at: int  # the cell's offset in the run


@dataclass(frozen=True)
class Why:
    cell: Cell
    cell_bytes: int
    source: End
    target: End
    replicas: tuple[int, ...]
    reason: str
    run: Run


def parse_cell(text: str, target: Instance) -> Cell:
    """Read `TARGET_RANK:GROUP:LAYER:PART:HEAD:TOKEN`; DocumentError with what is wrong.

    HEAD is a number, `AXIS=INDEX` pairs with commas, or `-`. An axis left out is the first index that the target
    worker holds.
    """
    head, _, rest = text.partition(":")
    fields = rest.rsplit(":", 4)  # a group's name may contain colons
    if len(fields) != 5:
        raise DocumentError(OPTION, f"expected {SHAPE}, got {text!r}")
    name, layer_text, part, axes, token_text = fields
    rank, layer = _number(head, "TARGET_RANK"), _number(layer_text, "LAYER")
    group = next((group for group in target.groups if group.name == name), None)
    if group is None:
        raise DocumentError(OPTION, f"the target has no group {name!r}; expected one of {_list(target.groups)}")
    if rank not in {worker.rank for worker in target.workers}:
        raise DocumentError(OPTION, f"there is no target worker {rank}; {_ranks(target)}")
    if layer not in group.layers:
        raise DocumentError(OPTION, f"group {name!r} has no layer {layer}; it has layers {ranges(group.layers)}")
    if part not in group.parts:
        raise DocumentError(OPTION, f"group {name!r} has no part {part!r}; it has {', '.join(group.parts)}")
    index = {**_first_owned(target, rank, group, layer, part), **_axes(axes, group)}
    token = 0 if token_text == "-" and group.growth == "state" else _number(token_text, "TOKEN")
    if group.growth == "state" and token:
        raise DocumentError(OPTION, f"group {name!r} is a state, one row per request: TOKEN must be 0, got {token}")
    return Cell(rank, name, layer, part, index, token)


def _number(text: str, field: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise DocumentError(OPTION, f"{field} must be a whole number, got {text!r} (expected {SHAPE})")
    return int(text)


def _list(groups: tuple[Group, ...]) -> str:
    return ", ".join(group.name for group in groups)


def _ranks(instance: Instance) -> str:
    return f"its ranks are {ranges(worker.rank for worker in instance.workers)}"


def _axes(text: str, group: Group) -> dict[str, int]:
    names = ", ".join(group.axes) or "none"
    found: dict[str, int] = {}
    for pair in [] if text in ("", "-") else text.split(","):
        axis, equals, number = pair.rpartition("=")
        if not equals:
            if "head" not in group.axes:
                raise DocumentError(
                    OPTION,
                    f"group {group.name!r} has no axis head; write AXIS=INDEX (its axes: {names}) or -, not {pair!r}",
                )
            axis = "head"
        if axis not in group.axes:
            raise DocumentError(OPTION, f"group {group.name!r} has no axis {axis!r}; its axes: {names}")
        if axis in found:
            raise DocumentError(OPTION, f"axis {axis!r} is given twice")
        found[axis] = _number(number, f"the index of axis {axis}")
        if found[axis] >= group.axes[axis]:
            raise DocumentError(
                OPTION, f"{axis} {found[axis]} is outside the {group.axes[axis]} of group {group.name!r}"
            )
    return found


def _first_owned(target: Instance, rank: int, group: Group, layer: int, part: str) -> dict[str, int]:
    mine = next((owner for owner in owners(target, group).get((layer, part), ()) if owner.rank == rank), None)
    if mine is None:
        raise DocumentError(OPTION, f"target worker {rank} doesn't hold layer {layer}, part {part} of {group.name!r}")
    first = {}
    for axis, segments in zip(group.axes, mine.segments, strict=True):
        held = [start for start, stop in segments if start < stop]
        if not held:
            raise DocumentError(OPTION, f"target worker {rank} holds no {axis} of group {group.name!r}")
        first[axis] = min(held)
    return first


def why(source: Instance, target: Instance, cell: Cell, request: Optional[Request] = None) -> Why:
    """Follow `cell`. DocumentError where the target worker doesn't want it; IncompatibleError or PlanError as in
    `make_plan`.
    """
    check_compatible(source, target)
    if cell.group not in {group.name for group in shared_groups(source, target)}:
        raise DocumentError(OPTION, f"the source has no group {cell.group!r}, so nothing of it travels")
    group = target.group(cell.group)
    step = _route_of(source, target, group, cell)
    box = Box(cell.group, (cell.layer,), (cell.part,), {axis: ((i, i + 1),) for axis, i in cell.index.items()})
    workers = source.worker(step.source), target.worker(cell.rank)
    places = [pool_places(worker, group, box)[0][0] for worker in workers]
    programs = [p for p in pair_programs(*workers, group, step.box) if _same_pools(p, places)]
    if request is None:
        ends = [_end(place, cell, None) for place in places]
        run = _run_in_pages(programs, places, ends, cell)
    else:
        _check_wanted(request, cell)
        sides = request.source, request.target
        tables = [_table(side, place) for side, place in zip(sides, places)]
        ends = [_end(place, cell, table) for place, table in zip(places, tables)]
        run = _run_of_request(programs, places, ends, cell, request)
    reason = _reason(step, target, group, cell)
    return Why(cell, group.item_bytes, ends[0], ends[1], step.replicas, reason, run)


def _same_pools(program: Program, places: list[PoolPlace]) -> bool:
    ends = program.source, program.target
    return all(isinstance(end, PoolPlace) and end.pool is place.pool for end, place in zip(ends, places))


def _route_of(source: Instance, target: Instance, group: Group, cell: Cell) -> Route:
    for step in route(source, target, cell.rank):
        box = step.box
        if (box.group, cell.layer in box.layers, cell.part in box.parts) == (cell.group, True, True):
            inside = all(any(a <= cell.index[axis] < b for a, b in segments) for axis, segments in box.axes.items())
            if inside and all(cell.token // block % size == rank for rank, size, block in box.cycles):
                return step
    mine = next(o for o in owners(target, group)[cell.layer, cell.part] if o.rank == cell.rank)
    for axis, segments in zip(group.axes, mine.segments, strict=True):
        if not any(start <= cell.index[axis] < stop for start, stop in segments):
            raise DocumentError(
                OPTION,
                f"target worker {cell.rank} doesn't hold {axis} {cell.index[axis]}; it holds {axis} {slices(segments)}",
            )
    rank, size, block = mine.cycle
    raise DocumentError(
        OPTION,
        f"target worker {cell.rank} doesn't hold token {cell.token}, only t with t // {block} % {size} = {rank}",
    )


def _reason(step: Route, target: Instance, group: Group, cell: Cell) -> str:
    """Why this source: the rule that `route` follows, with its numbers."""
    replicas = step.replicas
    if len(replicas) == 1:
        return "it is the only source worker that holds it"
    wanting = [
        owner.rank
        for owner in owners(target, group)[cell.layer, cell.part]
        if owner.covers([(i, i + 1) for i in cell.index.values()])
    ]
    place = wanting.index(cell.rank) + 1
    return (
        f"source workers {ranges(replicas)} hold it and target workers {ranges(wanting)} want it, spread evenly: "
        f"target {cell.rank} is number {place} of {len(wanting)}, so it takes replica "
        f"{replicas.index(step.source) + 1} of {len(replicas)}, worker {step.source}"
    )


def _check_wanted(request: Request, cell: Cell) -> None:
    wanted = request.groups.get(cell.group)
    if wanted is None:
        raise DocumentError(OPTION, f"the request doesn't name group {cell.group!r}")
    start, stop = wanted.token_range
    if not start <= cell.token < stop:
        raise DocumentError(OPTION, f"token {cell.token} isn't wanted; the request wants tokens {start} to {stop - 1}")


def _table(side: Side, place: PoolPlace) -> Pages:
    table = side.table(place.rank, place.pool.table_name)
    if table is None:
        raise PlanError(f"worker {place.rank}: the request has no page table {place.pool.table_name!r}")
    return page_array(table)


def _end(place: PoolPlace, cell: Cell, table: Optional[Pages]) -> End:
    """Without a table, as if it began at token 0."""
    pool = place.pool
    position = int(local_tokens(np.array([cell.token], np.int64), pool.cycle)[0])
    position -= 0 if table is None else table.start // pool.cycle[1]
    entry, slot = divmod(position, pool.page_tokens)
    page = None
    if table is not None:
        where = f"group {cell.group}, worker {place.rank}, table {pool.table_name}, token {cell.token}"
        if not 0 <= entry < len(table.numbers):
            raise PlanError(f"{where}: its {len(table.numbers)} pages from token {table.start} on don't hold it")
        page = int(table.numbers[entry])
        if not 0 <= page < place.pages:
            raise PlanError(
                f"{where}: {'that page does not exist (null)' if page < 0 else f'page {page} is outside the pool'}"
            )
    offset = int(place.tokens.offsets[slot]) + sum(int(place.axis_offsets(axis)[0]) for axis in cell.index)
    base = Address(int(place.bases.u64[0]))
    address = None if page is None else str(base.plus(page * pool.page_bytes + offset))
    return End(place.rank, pool.table_name, entry, page, slot, offset, pool.page_bytes, str(base), address)


def _run_of_request(
    programs: list[Program], places: list[PoolPlace], ends: list[End], cell: Cell, request: Request
) -> Run:
    tokens = request.groups[cell.group].token_range
    at = [Address.parse(end.address) for end in ends]
    for program in programs:
        tables = [
            _table(side, place)
            for side, place in ((request.source, program.source), (request.target, program.target))
            if isinstance(place, PoolPlace)
        ]
        segments = bind_tokens(program, tokens, *tables)
        for narrow in _pieces_of(program, places):
            found = _find(narrow, segments, places, at)
            if found is not None:
                start, length = found
                return Run(str(at[0].minus(start)), str(at[1].minus(start)), length, start)
    raise PlanError("no copy of the plan carries this cell")


def _run_in_pages(programs: list[Program], places: list[PoolPlace], ends: list[End], cell: Cell) -> Run:
    """The run on pages that don't lie side by side, with tables that begin at token 0."""
    for program in programs:
        span = period(program)
        start = cell.token // span * span
        loose, tables = scattered(program, start, start + span)
        low = [replace(place, bases=lowered(place.bases, origin)) for place, origin in zip(places, origins(program))]
        reach = max(place.pool.page_tokens * place.pool.cycle[1] for place in places)
        tokens = max(start, cell.token - reach), min(start + span, cell.token + reach + 1)
        segments = bind_tokens(loose, tokens, *tables)
        at = []
        for place, table, end in zip(low, tables, ends):
            entry = end.table_entry - table.start // place.pool.cycle[1] // place.pool.page_tokens
            at.append(place.bases.first().plus(int(table.numbers[entry]) * end.page_bytes + end.page_offset))
        for narrow in _pieces_of(loose, low):
            found = _find(narrow, segments, low, at)
            if found is not None:
                back, length = found
                return Run(_signed(ends[0].page_offset - back), _signed(ends[1].page_offset - back), length, back)
    raise PlanError("no copy of the plan carries this cell")


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else ''}0x{abs(number):x}"


def _pieces_of(program: Program, places: list[PoolPlace]) -> Iterator[Program]:
    """Programs of one piece each, cut down to the cell's own buffer where the piece has a base for each."""
    for piece in program.pieces:
        own = np.flatnonzero(piece.target_bases.u64 == places[1].bases.u64[0])
        if len(own):
            piece = replace(piece, source_bases=piece.source_bases.take(own), target_bases=piece.target_bases.take(own))
        yield replace(program, pieces=(piece,))


def _find(
    program: Program, segments: Segments, places: list[PoolPlace], at: list[Address]
) -> Optional[tuple[int, int]]:
    """(the cell's offset in its run, the run's bytes), or None if this program doesn't carry it.

    Expands a window of segments around the cell, wider until the run no longer grows.
    """
    middle, width = _segment_of(segments, places[1], at[1]), WINDOW
    found: Optional[tuple[int, int]] = None
    while True:
        low, high = max(0, middle - width), min(len(segments.tokens), middle + width)
        some = Segments(segments.source[low:high], segments.target[low:high], segments.tokens[low:high])
        copies = expand(program, some)
        back = copies.target.distances_to(at[1])
        hits = np.flatnonzero((back < copies.lengths) & (copies.source.distances_to(at[0]) == back))
        before = found
        found = (int(back[hits[0]]), int(copies.lengths[hits[0]])) if len(hits) else None
        if (low, high) == (0, len(segments.tokens)) or (found is not None and found == before):
            return found
        width *= 8


def _segment_of(segments: Segments, place: PoolPlace, address: Address) -> int:
    """The segment that holds the cell's token or, in unusual nestings, one near it."""
    in_token = sum(int(place.axis_offsets(axis)[0]) for axis in place.box.axes)
    below = segments.target <= np.uint64(address.distance_from(place.bases.first()) - in_token)
    return int(np.argmax(np.where(below, segments.target, np.uint64(0)))) if len(below) else 0


def why_text(found: Why) -> str:
    """A few lines for people."""
    cell = found.cell
    index = ", ".join(f"{axis} {i}" for axis, i in cell.index.items())
    lines = [
        f"cell      group {cell.group}, layer {cell.layer}, part {cell.part}{', ' + index if index else ''}, "
        f"token {cell.token} ({found.cell_bytes} bytes)",
        f"source    worker {found.source.rank}: {found.reason}",
        *(_end_text(side, end) for side, end in (("from", found.source), ("to", found.target))),
    ]
    run = found.run
    if found.source.address is None:
        pages = f"{run.source_start} in the source page to {run.target_start} in the target page"
        note = "          offsets inside a page, for tables that begin at token 0; --request gives addresses"
    else:
        pages, note = f"{run.source_start} to {run.target_start}", ""
    lines.append(f"run       {run.bytes} bytes from {pages}; the cell is at byte {run.cell_at} of it")
    return "\n".join([*lines, note] if note else lines)


def _end_text(side: str, end: End) -> str:
    where = f"worker {end.rank}, table {end.table}, entry {end.table_entry}"
    if end.address is None:
        place = f"0x{end.page_offset:x} in the page; pages of 0x{end.page_bytes:x} bytes from {end.base} on"
        return f"{side:<9} {where}: slot {end.slot} of its page, {place}"
    return f"{side:<9} {where}: page {end.page}, slot {end.slot}, address {end.address}"
