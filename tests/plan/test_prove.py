"""The prover, on programs that are broken on purpose: each break must be caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.errors import AddressError, PlanError, ProofError
from kvferry.layout.address import Address, Addresses
from kvferry.layout.request import Table
from kvferry.plan.bind import bind_tokens, expand, page_array
from kvferry.plan.document import pair_programs
from kvferry.plan.program import Fold, Program
from kvferry.plan.prove import prove_bounds, prove_cells, prove_disjoint
from kvferry.plan.route import route
from tests.plan.build import DIM, ITEM, instance

HEAD_BYTES = DIM * ITEM
PAGE_BYTES = 8 * 2 * HEAD_BYTES


def sound() -> Program:
    """Two layers, heads 0 and 1 of four: NHD on the source, HND on the target."""
    source, target = instance(tp=1), instance("decode", tp=2, layout="hnd", base=1 << 40)
    (step,) = route(source, target, 0)
    (program,) = pair_programs(source.worker(0), target.worker(0), source.groups[0], step.box)
    prove_cells(program)
    return program


def with_target(program: Program, shift_bytes: int) -> Program:
    pieces = tuple(replace(p, target_bases=p.target_bases.plus(shift_bytes)) for p in program.pieces)
    return replace(program, pieces=pieces)


def with_folds(program: Program, axis_extent: int, source_shift: int) -> Program:
    """Change the source stride of the fold with this extent."""

    def change(fold: Fold) -> Fold:
        extent, source, target = fold
        return (extent, source + source_shift, target) if extent == axis_extent else fold

    pieces = tuple(replace(p, folds=(p.folds[0], *map(change, p.folds[1:]))) for p in program.pieces)
    return replace(program, pieces=pieces)


BROKEN = {
    "off by one page": lambda p: with_target(p, PAGE_BYTES),
    "off by one head on the target": lambda p: with_target(p, 8 * HEAD_BYTES),
    "off by one element": lambda p: with_target(p, ITEM),
    "a wrong stride": lambda p: with_folds(p, DIM, ITEM),
    "off by one head on the source": lambda p: replace(
        p, pieces=tuple(replace(x, source_starts=x.source_starts + np.uint64(HEAD_BYTES)) for x in p.pieces)
    ),
    "a hole": lambda p: replace(p, pieces=tuple(replace(x, folds=x.folds[:-1]) for x in p.pieces)),
    "nothing at all": lambda p: replace(p, pieces=()),
    "twice": lambda p: replace(p, pieces=p.pieces * 2),
    "sources exchanged": lambda p: replace(
        p, pieces=tuple(replace(x, source_bases=x.target_bases, target_bases=x.source_bases) for x in p.pieces)
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_program_is_caught(name: str) -> None:
    broken = BROKEN[name](sound())
    with pytest.raises(ProofError, match="each cell"):
        prove_cells(broken)


def test_layers_exchanged_are_caught() -> None:
    """Separate regions per layer, so that the buffers stay a list: its order on one side is what pairs the layers."""
    from kvferry.layout.presets import uniform_instance

    one = uniform_instance("one", 3, 2, 8, 1)
    (program,) = pair_programs(one.worker(0), one.worker(0), one.groups[0], route(one, one, 0)[0].box)
    prove_cells(program)
    (piece,) = program.pieces
    rolled = Addresses(np.roll(piece.target_bases.u64, 2))
    with pytest.raises(ProofError, match="each cell"):
        prove_cells(replace(program, pieces=(replace(piece, target_bases=rolled),)))


def test_a_sum_that_would_wrap_is_caught() -> None:
    top = Address((1 << 64) - 8)
    broken = replace(sound(), pieces=tuple(replace(p, target_bases=Addresses([top])) for p in sound().pieces))
    with pytest.raises((AddressError, ProofError)):
        prove_cells(broken)
    segments = bind_tokens(sound(), (0, 8), page_array(Table((0,))), page_array(Table((0,))))
    with pytest.raises(AddressError, match=r"passes 2\*\*64"):
        expand(broken, segments)


@pytest.mark.parametrize("side", ["source", "target"])
def test_bounds_are_checked_on_both_sides(side: str) -> None:
    """A region one byte too short for the last page: refused at bind, before an address is made."""
    program = sound()
    place = getattr(program, side)
    last = page_array(Table((15,)))
    segments = bind_tokens(program, (0, 8), last, last)
    prove_bounds(program, segments)
    unused = 2 * HEAD_BYTES if side == "source" else 0  # the source's last token ends with heads 2 and 3
    exact = place.pool.page_bytes * 16 - unused
    for rooms, fits in ((exact, True), (exact - 1, False)):
        tight = replace(program, **{side: replace(place, rooms=(rooms,) * len(place.rooms))})
        if fits:
            prove_bounds(tight, segments)
        else:
            with pytest.raises(ProofError, match=f"worker {place.rank}.*region ends after {rooms}"):
                prove_bounds(tight, segments)


def test_pages_outside_the_pool_are_caught_at_bind() -> None:
    with pytest.raises(PlanError, match="page 16 is outside"):
        bind_tokens(sound(), (0, 8), page_array(Table((0,))), page_array(Table((16,))))


def test_aliases_are_caught_by_address() -> None:
    starts = Addresses(np.array([(1 << 64) - 16, 64, (1 << 64) - 8], dtype=np.uint64))
    prove_disjoint(starts, np.array([8, 64, 8], dtype=np.uint64), "worker 0")
    with pytest.raises(ProofError, match="0xfffffffffffffff8"):
        prove_disjoint(starts, np.array([9, 64, 8], dtype=np.uint64), "worker 0")
