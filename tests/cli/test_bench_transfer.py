"""`kvferry bench transfer` runs in every way, its numbers hang together, and a wrong byte is found.

Only sizes are tiny here: processes, transports and pools are the real ones. No time is asserted: the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.cli.bench_transfer import command
from kvferry.cli.bench_transfer.cases import (
    CURVE_RUN_BYTES,
    EQUAL,
    SPLIT,
    TABLE,
    WIRE,
    Scenario,
    Shape,
    apart,
    longest_run,
    of_run_length,
)
from kvferry.cli.bench_transfer.measure import DIRECT, MERGED, ONE_PIECE, PER_RUN, STAGED, Outcome, Row, _Stand
from kvferry.cli.bench_transfer.plot import draw
from kvferry.cli.bench_transfer.pool import GUARD_BYTES, WorkerPool
from kvferry.cli.bench_transfer.raw import cut
from kvferry.cli.bench_transfer.table import as_text, bounds
from kvferry.cli.bench_transfer.worker import Stages
from kvferry.cli.main import main
from kvferry.errors import EngineError
from kvferry.layout.address import Address, Addresses
from kvferry.plan.bind import Copies
from kvferry.plan.document import plan_copies
from tests.transport.installed import NIXL

MIB = 1 << 20
SIZED = [scenario.sized(MIB) for scenario in (WIRE, *TABLE, of_run_length(128), of_run_length(4096))]
QUICK = ["bench", "transfer", "--quick"]


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main([*QUICK, "--json", *options]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_json_of_two_transports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    found = run_json(capsys, "--transport", "shm,tcp", "--case", "equal", "split", "runs", "--plot", str(plot))
    assert found["format"] == "kvferry-bench-transfer/1" and found["repeat"] == 1 and found["left_out"] == {}
    rows = {(r["transport"], r["title"], r["way"]): r for r in found["rows"]}
    ways = {
        "wire, 1 MiB": [ONE_PIECE],
        "equal TP": [MERGED, STAGED],  # neither transport can write straight into pages
        "TP1→TP4 NHD": [PER_RUN, STAGED],
        "runs of 512 B": [PER_RUN, STAGED],
        "runs of 16384 B": [PER_RUN, STAGED],
    }
    assert list(rows) == [(t, title, way) for t in ("shm", "tcp") for title, some in ways.items() for way in some]
    for row in rows.values():
        assert row["bytes"] == MIB and min(row["samples_s"]) == row["best_s"] > 0 and row["wire_s"] > 0
        assert (row["stages"] is not None) == (row["way"] in (STAGED, DIRECT))
    split = rows["tcp", "TP1→TP4 NHD", STAGED]
    assert (split["run_bytes"], split["runs"], split["workers"]) == (512, 2048, [1, 4])
    assert rows["shm", "runs of 16384 B", PER_RUN]["run_bytes"] == 16384
    assert min(split["stages"].values()) > 0 and split["control_s"] > 0
    assert min(split["processor_s"]) > 0  # of source and targets
    root = ET.fromstring(plot.read_text(encoding="utf-8"))
    assert len(root.findall(".//{*}circle")) == 2 * 2 * 2  # transports × ways × run lengths


def test_table_with_direct(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--transport", "process_vm", "--case", "equal", "cp"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split()[:3] == ["transport", "case", "way"]
    assert [line[28:36].strip() for line in lines[1:6]] == [ONE_PIECE, MERGED, DIRECT, STAGED, STAGED]
    assert "1→8" in lines[5] and "cyclic CP1→CP8" in lines[5]
    assert "compared after each transfer" in lines[-1]
    assert "process_vm: equal TP" in captured.err


@pytest.mark.parametrize("transport", [NIXL])
def test_bounds_of_nixl(capsys: pytest.CaptureFixture[str], transport: str) -> None:
    found = run_json(capsys, "--transport", transport, "--case", "equal", "split")
    assert [bound["limit"] for bound in found["bounds"]] == [6.0, 2.5, 0.95]
    for bound in found["bounds"]:
        reached = bound["measured"] - bound["limit"]
        assert bound["met"] == (reached >= 0 if bound["at_least"] else reached <= 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--transport", "carrier_pigeon"], "--transport"),
        (["--case", "nothing"], "--case"),
        (["--bytes", "64 parsecs"], "--bytes"),
        (["--bytes", "1GiB"], "--bytes"),
        (["--repeat", "0"], "--repeat"),
        (["--plot", "curve.png"], "only SVG"),
        (["--plot", "/nowhere/curve.svg"], "folder"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], options: list[str], named: str) -> None:
    assert main([*QUICK, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and named in captured.err and captured.err.count("\n") == 1


def test_a_transport_that_does_not_work_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out with its reason where all were asked for, an error where it was named."""
    outcome = Outcome([_row("shm", WIRE, ONE_PIECE, 0.01)], {"nixl": "nixl is not installed"})
    monkeypatch.setattr(command, "measure", lambda order, crew, step: outcome)
    assert main(QUICK) == 0
    assert "nixl: left out, nixl is not installed" in capsys.readouterr().out
    assert main([*QUICK, "--transport", "nixl"]) == 2
    assert capsys.readouterr().err == "kvferry: error: --transport nixl: nixl is not installed\n"


def test_orders() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    plain = command.order_of(parser.parse_args([]))
    assert (plain.bytes, plain.repeat) == (64 * MIB, 5) and "runs" not in plain.cases
    assert len(plain.transports) == 4
    assert plain.steps == 4 * (1 + 1 + len(TABLE))
    small = command.order_of(parser.parse_args(["--quick", "--bytes", "2 MiB", "--repeat", "3", "--plot", "a.svg"]))
    assert (small.bytes, small.repeat) == (2 * MIB, 3) and "runs" in small.cases


@pytest.mark.parametrize("scenario", SIZED, ids=lambda scenario: scenario.title)
def test_a_pool_finds_wrong_bytes(scenario: Scenario) -> None:
    """Each cell where the layout says, checked against the planner's own copies; then single bytes are turned over."""
    target = WorkerPool(scenario, "target", scenario.target.world - 1)
    sources = [WorkerPool(scenario, "source", rank) for rank in range(scenario.source.world)]
    try:
        for source in sources:
            source.fill()
        assert target.wrong_bytes() > 0
        bases = [target.address.value] * scenario.target.world
        instances = (
            scenario.instance("source", "a", [source.address.value for source in sources]),
            scenario.instance("target", "b", bases),
        )
        for (rank, to), copies in plan_copies(*instances, scenario.request()).items():
            if to == target.rank:
                _copy(copies, sources[rank], target)
        assert target.wrong_bytes() == 0
        for offset in (0, GUARD_BYTES + 1, target.file.nbytes - 1):  # guard, a cell, guard
            target.file[offset] ^= 0xFF
        assert target.wrong_bytes() == 3
    finally:
        for pool in (target, *sources):
            pool.close()


def _copy(copies: Copies, source: WorkerPool, target: WorkerPool) -> None:
    outs = copies.source.offsets_in(source.address, source.bytes.nbytes, copies.lengths, "source")
    ins = copies.target.offsets_in(target.address, target.bytes.nbytes, copies.lengths, "target")
    for out, into, length in zip(outs.tolist(), ins.tolist(), copies.lengths.tolist(), strict=True):
        target.bytes[into : into + length] = source.bytes[out : out + length]


@pytest.mark.parametrize("scenario", SIZED, ids=lambda scenario: scenario.title)
def test_sizes(scenario: Scenario) -> None:
    assert 0.95 * MIB <= scenario.bytes <= 1.05 * MIB
    for side in ("source", "target"):
        pages = scenario.page_list(side)
        assert len(set(pages)) == len(pages) and max(pages) < scenario.pool_pages(side) - 3


def test_run_lengths() -> None:
    """Each point of the curve has runs of exactly its length, down to the smallest size for which it is measured."""
    for nbytes in CURVE_RUN_BYTES:
        total = max(MIB, 64 * nbytes)
        assert longest_run(total) >= nbytes
        scenario = of_run_length(nbytes).sized(total)
        instances = (scenario.instance("source", "a", [1 << 30]), scenario.instance("target", "b", [1 << 30]))
        (copies,) = plan_copies(*instances, scenario.request()).values()
        assert (copies.lengths == nbytes).all() and copies.total_bytes == total


def test_apart() -> None:
    for count in range(1, 100):
        for share in (0.38, 0.62):
            order = apart(count, share)
            assert sorted(order) == list(range(count)) and not (np.diff(order) == 1).any()


def test_cut() -> None:
    base = Addresses([Address(0xFFFF_81AB_54E0_1000)])
    whole = Copies(base, base, np.array([2500], np.uint64))
    pieces = cut(whole, 1000)
    assert pieces.lengths.tolist() == [1000, 1000, 500]
    assert pieces.source.distances_from(base.first()).tolist() == [0, 1000, 2000]


def _row(transport: str, scenario: Scenario, way: str, seconds: float, run_bytes: int = 512) -> Row:
    stages = Stages(0.001, 0.002, 0.003) if way in (STAGED, DIRECT) else None
    parts = (transport, scenario.key, scenario.title, way, (1, 1), 64 * MIB, 64 * MIB // run_bytes, run_bytes)
    return Row(*parts, (seconds, 2 * seconds), stages, 0.0005)


def test_bounds_met_and_not() -> None:
    wire = [_row(transport, WIRE, ONE_PIECE, 0.010, MIB) for transport in ("nixl", "shm")]
    rows = [
        *wire,
        _row("nixl", EQUAL, MERGED, 0.0095),
        _row("nixl", EQUAL, DIRECT, 0.010),
        _row("nixl", SPLIT, PER_RUN, 0.120),
        _row("nixl", SPLIT, STAGED, 0.020),
    ]
    for run_bytes, seconds in ((128, 0.020), (4096, 0.016), (16384, 0.001)):
        scenario = of_run_length(run_bytes)
        rows += [_row("nixl", scenario, way, seconds, run_bytes) for way in (STAGED, PER_RUN)]
        rows.append(_row("shm", scenario, STAGED, 0.010, run_bytes))
    found = bounds(rows)
    assert [round(bound.measured, 6) for bound in found] == [6.0, 2.0, 0.95, 1.6, 1.6]
    assert all(bound.met for bound in found)
    slower = [replace(row, samples_s=(0.050,)) if row.way == STAGED else row for row in rows]
    found = bounds(slower)
    assert [bound.met for bound in found] == [False, False, True, False, False]
    text = as_text(Outcome(slower), ["the end"])
    assert "not met  nixl, TP1→TP4 NHD, runs of 512 B: staged against per run, times faster: 2.40, bound ≥ 6" in text
    assert "bind 1.0 + gather 2.0 + wire 10.0 + control 0.5 + scatter 3.0 = 16.5 ms" in text
    assert bounds(wire) == []


def test_plot_of_one_point() -> None:
    scenario = of_run_length(512)
    rows = [
        _row("shm", WIRE, ONE_PIECE, 0.01),
        _row("shm", scenario, PER_RUN, 0.1),
        _row("shm", scenario, STAGED, 0.02),
    ]
    assert draw(rows, "one") == draw(rows, "one")
    assert "shm staged: 3.36 at 512" in draw(rows, "one")


def test_shapes() -> None:
    shape = Shape(tp=2, pp=3, cp=4)
    assert shape.world == 24 and shape.place(0) == (0, 0, 0) and shape.place(23) == (2, 1, 3)


class _Liar:
    """A worker whose target is never quite as it must be."""

    def begin(self, command: str, *arguments: object) -> None:
        pass

    def answer(self) -> int:
        return 7


def test_a_wrong_byte_ends_the_benchmark() -> None:
    stand = _Stand(EQUAL, "shm", [], [_Liar()], repeat=1)  # type: ignore[list-item]
    with pytest.raises(EngineError, match="shm, equal TP, staged: 7 bytes are wrong"):
        stand.repeated(STAGED, lambda: 0.001)
