"""The fault matrix on real processes: whatever is killed, stopped, restarted, cut off or aborted, and whenever, the
transfer ends in success or in the right typed error before its deadline, no byte is wrong, and nothing stays held.

`make test-faults` plays a covering array of it, in which every two values of any two axes meet; `make test-long` all.
"""

from __future__ import annotations

import pytest

from tests.faults.cells import Cell, covering, every_cell
from tests.faults.conftest import Theatre
from tests.faults.trial import Row, play
from tests.transport.installed import NIXL_PROBLEM

NEEDS_NIXL = pytest.mark.skipif(bool(NIXL_PROBLEM), reason=NIXL_PROBLEM)


def parameters() -> list[object]:
    chosen = set(covering())
    found = []
    for cell in every_cell():
        marks = [pytest.mark.slow, pytest.mark.faults if cell in chosen else pytest.mark.long]
        if cell.transport == "nixl":
            marks.append(NEEDS_NIXL)
        found.append(pytest.param(cell, marks=marks, id=str(cell).replace(" ", "-")))
    return found


@pytest.mark.parametrize("cell", parameters())
def test_cell(cell: Cell, theatre: Theatre, rows: list[Row]) -> None:
    good = False
    try:
        row = play(theatre.stage(cell.transport), cell)
        rows.append(row)
        good = not row.problems
        assert good, "; ".join(row.problems)
    finally:
        if not good:  # the next cell begins afresh
            theatre.close()
