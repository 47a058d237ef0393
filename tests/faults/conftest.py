"""One stage per transport, and the table of all cells at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cells import impossible, impossible_cells
from tests.faults.stage import Stage
from tests.faults.trial import Row

ROWS = pytest.StashKey[list[Row]]()


class Theatre:
    """Keeps the stage of the transport that is tested; one that a cell has left in disorder is not used again."""

    def __init__(self) -> None:
        self._stage: Stage | None = None

    def stage(self, transport: str) -> Stage:
        if self._stage is None or self._stage.transport != transport:
            self.close()
            self._stage = Stage(transport)
        return self._stage

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()
        self._stage = None


@pytest.fixture(scope="session")
def theatre() -> Iterator[Theatre]:
    one = Theatre()
    yield one
    one.close()


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    line = terminalreporter.write_line
    terminalreporter.section("fault matrix")
    line(f"{'cell':<52} {'time s':>7} {'settled':>7} {'wrong B':>7} {'pages':>5} {'slots':>5}  outcome")
    for row in rows:
        numbers = (
            f"{row.seconds:>7.2f} {row.settled_s:>7.2f} {row.wrong_bytes:>7} {row.pages_held:>5} {row.slots_held:>5}"
        )
        line(f"{row.cell!s:<52} {numbers}  {row.outcome}")
        for problem in row.problems:
            line(f"    WRONG: {problem}")
    bad = sum(bool(row.problems) for row in rows)
    line(f"{len(rows)} cells, {bad} wrong; pages and slots: held at the end on all workers together")
    for reason, cells in groups_of_impossible_cells().items():
        line(f"not played, {len(cells)} cells: {reason} ({', '.join(sorted(cells))})")


def groups_of_impossible_cells() -> dict[str, set[str]]:
    """By reason: which fault, victim, phase and order."""
    groups: dict[str, set[str]] = {}
    for cell in impossible_cells():
        groups.setdefault(impossible(cell), set()).add(f"{cell.fault} {cell.victim} {cell.phase} {cell.order}")
    return groups
