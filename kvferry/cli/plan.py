"""`kvferry plan`: what two instances would send each other, and the copies of one request."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from kvferry.errors import DocumentError
from kvferry.layout.document import encode_json
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.document import PlanDocument, make_plan
from kvferry.plan.explain import TrafficRow, who_sends_what

T = TypeVar("T")

TRAFFIC_COLUMNS = (
    "from", "to", "group", "layers", "parts", "axes", "tokens", "bytes/token", "run bytes", "also held by",
)  # fmt: skip
PLAN_COLUMNS = ("from", "to", "copies", "bytes", "shortest", "longest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefill", type=Path, metavar="PREFILL.json", help="the source, a kvferry-instance/1 document")
    parser.add_argument("decode", type=Path, metavar="DECODE.json", help="the target, a kvferry-instance/1 document")
    parser.add_argument(
        "--request",
        type=Path,
        metavar="REQUEST.json",
        help="a kvferry-request/1 document: plan its copies instead of showing who sends what",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --request a kvferry-plan/1 document")


def run(args: argparse.Namespace) -> int:
    """Print the table, the summary or the document; what is wrong with the user's files is raised."""
    source = _read(args.prefill, parse_instance)
    target = _read(args.decode, parse_instance)
    document: object
    if args.request is None:
        document = rows = who_sends_what(source, target)
        text = traffic_table(rows)
    else:
        request = _read(args.request, lambda data: parse_request(data, source, target))
        document = plan = make_plan(source, target, request)
        text = plan_summary(plan)
    print(encode_json(document).decode() if args.json else text)
    return 0


def traffic_table(rows: Sequence[TrafficRow]) -> str:
    """One line per box: what travels between which two workers, for any request."""
    cells = [
        (
            str(row.source),
            str(row.target),
            row.group,
            _ranges(row.layers),
            ",".join(row.parts),
            " ".join(f"{axis} {_segments(owned)}" for axis, owned in row.axes.items()) or "-",
            _tokens(row.cycles),
            str(row.bytes_per_token),
            str(row.run_bytes),
            " ".join(str(rank) for rank in row.replicas if rank != row.source) or "-",
        )
        for row in rows
    ]
    return _table(TRAFFIC_COLUMNS, cells)


def plan_summary(plan: PlanDocument) -> str:
    """One line per pair of workers, and the proof."""
    cells = [
        [str(n) for n in (t.source, t.target, len(t.bytes), sum(t.bytes), min(t.bytes), max(t.bytes))]
        for t in plan.transfers
    ]
    proof = plan.proof
    promises = {"in bounds": proof.in_bounds, "exactly once": proof.exactly_once, "complete": proof.complete}
    proved = ", ".join(promise for promise, kept in promises.items() if kept)
    return f"{_table(PLAN_COLUMNS, cells)}\n\n{proof.bytes} bytes in {proof.copies} copies; proved: {proved}"


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _segments(segments: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in segments)


def _tokens(cycles: Iterable[tuple[int, int, int]]) -> str:
    return " & ".join(f"t//{block}%{size}={rank}" for rank, size, block in cycles if size > 1) or "all"
