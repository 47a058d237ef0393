"""What the rows of a benchmark say about costs per run and per byte: for `kvferry.transport.costs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvferry.cli.bench_transfer.cases import EQUAL, SPLIT
from kvferry.cli.bench_transfer.measure import ONE_PIECE, PER_RUN, STAGED, Row
from kvferry.errors import DocumentError, KVFerryError
from kvferry.layout.document import encode_json
from kvferry.transport.costs import Cost, Costs


def costs_of(rows: Sequence[Row]) -> Costs:
    """DocumentError where a case that is needed was not measured.

    A transport's cost per byte is the wire's; per run, what one descriptor per run took beyond that. Gathering is
    measured at two lengths of run: what the many short ones take more is the cost per run.
    """
    long = _find(rows, lambda row: (row.case, row.way) == (EQUAL.key, STAGED))
    short = _find(rows, lambda row: (row.case, row.way) == (SPLIT.key, STAGED))
    assert long.stages is not None and short.stages is not None  # every staged row has them
    byte_s = long.stages.gather_s / long.bytes
    run_s = max(0.0, short.stages.gather_s - short.bytes * byte_s) / short.runs
    ways = {}
    for transport in dict.fromkeys(row.transport for row in rows):
        mine = [row for row in rows if row.transport == transport]
        wire = _find(mine, lambda row: row.way == ONE_PIECE)
        runs = _find(mine, lambda row: (row.case, row.way) == (SPLIT.key, PER_RUN))
        wire_s = wire.best_s / wire.bytes
        ways[transport] = Cost(max(0.0, runs.best_s - runs.bytes * wire_s) / runs.runs, wire_s)
    return Costs("kvferry-costs/1", Cost(run_s, byte_s), ways)


def save(costs: Costs, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_json(costs) + b"\n")
    except OSError as error:
        raise KVFerryError(f"--save-costs: {path} can't be written: {error.strerror or error}") from None


def _find(rows: Iterable[Row], wanted: Callable[[Row], bool]) -> Row:
    found = next((row for row in rows if wanted(row)), None)
    if found is None:
        raise DocumentError("--save-costs", f"needs the cases {EQUAL.key} and {SPLIT.key}; leave out --case")
    return found
