"""The rows as a table, the bounds that they are held against, and where the time goes where a bound is not met."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.cli.bench_transfer.cases import CURVE, EQUAL, SPLIT, WIRE
from kvferry.cli.bench_transfer.measure import DIRECT, MERGED, ONE_PIECE, PER_RUN, RAW, STAGED, Outcome, Row

SHORT_BYTES = 4096
"""Up to here runs count as short: same-host memory must beat NIXL."""


@dataclass(frozen=True)
class Bound:
    """`measured` is a ratio that has to be at least (or at most) `limit`."""

    text: str
    limit: float
    at_least: bool
    measured: float
    numbers: str
    where: str = ""  # the time goes, where that is known

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def lines(self) -> list[str]:
        sign = "≥" if self.at_least else "≤"
        first = f"{'met' if self.met else 'not met':<8} {self.text}: {self.measured:.2f}, bound {sign} {self.limit:g} "
        return [f"{first}({self.numbers})", *([f"{'':<8} {self.where}"] if self.where and not self.met else [])]


class Rows:
    """The rows by transport, case and way."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._by_key = {
            (row.transport, row.case, row.run_bytes if row.case == CURVE else 0, row.way): row for row in rows
        }

    def find(self, transport: str, case: str, way: str, run_bytes: int = 0) -> Row | None:
        return self._by_key.get((transport, case, run_bytes, way))

    def wire_of(self, row: Row) -> float:
        """Seconds that the wire of its transport takes for as many bytes."""
        wire = self._by_key[row.transport, WIRE.key, 0, ONE_PIECE]
        return wire.best_s * row.bytes / wire.bytes

    def raw_of(self, row: Row) -> Row | None:
        """The row of the same case without kvferry."""
        run_bytes = row.run_bytes if row.case == CURVE else 0
        return next((r for way in RAW if (r := self.find(row.transport, row.case, way, run_bytes))), None)


def as_text(outcome: Outcome, footer: Sequence[str]) -> str:
    rows = Rows(outcome.rows)
    lines = [
        f"{'transport':<10} {'case':<16} {'way':<8} {'workers':>7} {'MiB':>6} {'runs':>8} {'run bytes':>9} {'ms':>8} "
        f"{'GB/s':>6} {'× wire':>7} {'raw : it':>8}"
    ]
    for row in outcome.rows:
        raw = rows.raw_of(row)
        speed_up = f"{raw.best_s / row.best_s:.2f}" if raw is not None and row.way not in RAW else "-"
        workers = f"{row.workers[0]}→{row.workers[1]}"
        lines.append(
            f"{row.transport:<10} {row.title:<16} {row.way:<8} {workers:>7} {row.bytes / (1 << 20):>6.1f} "
            f"{row.runs:>8} {row.run_bytes:>9} {row.best_s * 1e3:>8.2f} {row.gb_s:>6.2f} "
            f"{row.best_s / rows.wire_of(row):>7.2f} {speed_up:>8}"
        )
    lines += [f"{transport}: left out, {why}" for transport, why in outcome.left_out.items()]
    found = [line for bound in bounds(outcome.rows) for line in bound.lines()]
    return "\n".join([*lines, *(["", *found] if found else []), "", *footer])


def as_json(outcome: Outcome, context: dict[str, Any]) -> dict[str, Any]:
    rows = Rows(outcome.rows)
    return {
        "format": "kvferry-bench-transfer/1",
        **context,
        "rows": [{**asdict(row), "best_s": row.best_s, "wire_s": rows.wire_of(row)} for row in outcome.rows],
        "left_out": outcome.left_out,
        "bounds": [{**asdict(bound), "met": bound.met} for bound in bounds(outcome.rows)],
    }


def bounds(found: Sequence[Row]) -> list[Bound]:
    """Those for which the rows are there."""
    rows = Rows(found)
    return [*_split(rows), *_direct(rows), *_local(rows, found)]


def _split(rows: Rows) -> Iterator[Bound]:
    staged, per_run = (rows.find("nixl", SPLIT.key, way) for way in (STAGED, PER_RUN))
    if staged is None or per_run is None:
        return
    where = _where(rows, staged)
    text = f"nixl, {SPLIT.title}, runs of {staged.run_bytes} B: staged"
    faster = per_run.best_s / staged.best_s
    yield Bound(f"{text} against per run, times faster", 6.0, True, faster, _ms(per_run, staged), where)
    wire_s = rows.wire_of(staged)
    numbers = f"{staged.best_s * 1e3:.1f} ms against {wire_s * 1e3:.1f} ms"
    yield Bound(f"{text}, times of the wire", 2.5, False, staged.best_s / wire_s, numbers, where)


def _direct(rows: Rows) -> Iterator[Bound]:
    direct, merged = (rows.find("nixl", EQUAL.key, way) for way in (DIRECT, MERGED))
    if direct is not None and merged is not None:
        text = f"nixl, {EQUAL.title}: direct against raw NIXL merged by hand, share of its speed"
        yield Bound(text, 0.95, True, merged.best_s / direct.best_s, _ms(merged, direct), _where(rows, direct))


def _local(rows: Rows, found: Sequence[Row]) -> Iterator[Bound]:
    """The same host's memory against NIXL, at the run length where it is least ahead."""
    lengths = sorted({row.run_bytes for row in found if row.case == CURVE and row.run_bytes <= SHORT_BYTES})
    for way, what in ((STAGED, "kvferry over NIXL"), (PER_RUN, "NIXL per run")):
        pairs = [
            (nixl, shm)
            for nbytes in lengths
            if (nixl := rows.find("nixl", CURVE, way, nbytes)) and (shm := rows.find("shm", CURVE, STAGED, nbytes))
        ]
        if pairs:
            nixl, shm = min(pairs, key=lambda pair: pair[0].best_s / pair[1].best_s)
            text = f"shm staged against {what}, times faster, least of runs up to {SHORT_BYTES} B"
            numbers = f"{_ms(nixl, shm)}, runs of {shm.run_bytes} B"
            yield Bound(text, 1.5, True, nixl.best_s / shm.best_s, numbers, _where(rows, shm))


def _ms(one: Row, other: Row) -> str:
    return f"{one.best_s * 1e3:.1f} ms against {other.best_s * 1e3:.1f} ms"


def _where(rows: Rows, row: Row) -> str:
    steps = {"wire": rows.wire_of(row), "control": row.control_s}
    if row.stages is not None:
        stages = row.stages
        steps = {"bind": stages.bind_s, "gather": stages.gather_s, **steps, "scatter": stages.scatter_s}
    if row.transport == "shm":
        del steps["wire"]  # the gather writes into the target's slot
    if row.way == DIRECT:
        del steps["gather"], steps["scatter"]
    parts = " + ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in steps.items())
    sources_ms, targets_ms = (seconds * 1e3 for seconds in row.processor_s)
    cores = os.cpu_count() or 1
    return (
        f"each step alone, one after the other: {parts} = {sum(steps.values()) * 1e3:.1f} ms; processor time of the "
        f"whole: sources {sources_ms:.1f} + targets {targets_ms:.1f} of {cores} cores × {row.best_s * 1e3:.1f} ms"
    )
