from __future__ import annotations

import itertools

from tests.faults.cells import AXES, Cell, allowed, covering, every_cell, impossible, impossible_cells


def test_every_pair_of_values_that_can_meet_does_meet_in_the_covering_array() -> None:
    chosen = covering()
    met = set().union(*(cell.pairs for cell in chosen))
    for one, other in itertools.combinations(range(len(AXES)), 2):
        for values in itertools.product(AXES[one], AXES[other]):
            if any({*values} <= {*cell_values(cell)} for cell in every_cell()):
                assert frozenset(values) in met, values
    assert len(chosen) == len(set(chosen)) < 60
    assert chosen == covering(), "always the same"


def cell_values(cell: Cell) -> tuple[str, ...]:
    return cell.fault, cell.victim, cell.phase, cell.order, cell.transport


def test_each_combination_is_played_or_there_is_a_reason_why_not() -> None:
    combinations = {Cell(*names) for names in itertools.product(*AXES)}
    assert {*every_cell(), *impossible_cells()} == combinations
    assert all(impossible(cell) for cell in impossible_cells())


def test_no_cell_may_end_anyhow() -> None:
    ends = {"done", "timeout", "aborted", "lost"}
    for cell in every_cell():
        for right in allowed(cell).values():
            assert 1 <= len(right) <= 2 and right < ends, cell
