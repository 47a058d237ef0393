"""`kvferry plan`: what two instances would send each other, as a table or a picture; the copies of one request; the
way of one cell.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional, TypeVar

from kvferry.cli.tables import table
from kvferry.errors import DocumentError
from kvferry.layout.document import Instance, encode_json
from kvferry.layout.request import Request
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.document import PlanDocument, make_plan
from kvferry.plan.explain import (
    Traffic,
    TrafficRow,
    Wire,
    WorkerTotal,
    cycle_text,
    explain,
    ranges,
    slices,
    who_sends_what,
)
from kvferry.plan.picture import draw
from kvferry.plan.why import SHAPE, parse_cell, why, why_text
from kvferry.transport.costs import DEFAULTS, MOVES, known_costs

T = TypeVar("T")

TRAFFIC_COLUMNS = (
    "from", "to", "group", "layers", "parts", "axes", "tokens", "bytes/token", "run bytes", "copies/page", "posted",
    "chosen", "also held by",
)  # fmt: skip
TOTAL_COLUMNS = ("worker", "role", "peers", "bytes/token", "state bytes", "straight ms", "gathered ms")
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
    parser.add_argument(
        "--transport",
        choices=sorted(DEFAULTS.ways),
        default="nixl",
        help="whose costs decide whether runs are gathered or posted straight, and make the estimates (default: nixl)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --request a kvferry-plan/1 document")
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw, per target worker, a map of layers × heads coloured by source worker",
    )
    parser.add_argument(
        "--why",
        metavar=SHAPE,
        help="follow one cell: source worker, addresses and run. HEAD may be AXIS=INDEX pairs, or - ; with --request "
        "its page tables are used",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, the summary, the cell or the document; what is wrong with the user's files is raised."""
    source = _read(args.prefill, parse_instance)
    target = _read(args.decode, parse_instance)
    request = None if args.request is None else _read(args.request, lambda data: parse_request(data, source, target))
    document: object
    if args.why is not None:
        document = found = why(source, target, parse_cell(args.why, target), request)
        text = why_text(found)
    elif request is not None:
        document = plan = make_plan(source, target, request)
        text = plan_summary(plan)
    else:
        document = traffic = explain(source, target, _wire(args.transport))
        text = traffic_text(traffic)
    if args.svg is not None:
        args.svg.write_text(picture(source, target, request), encoding="utf-8")
    print(encode_json(document).decode() if args.json else text)
    return 0


def _wire(transport: str) -> Wire:
    """What this machine's costs say of the transport, measured or the defaults."""
    costs = known_costs()
    cost = costs.ways.get(transport, DEFAULTS.ways[transport])
    run_s = cost.run_s if transport in MOVES else None
    return Wire(transport, run_s, cost.byte_s, costs.gather.run_s, costs.gather.byte_s)


def picture(source: Instance, target: Instance, request: Optional[Request]) -> str:
    """The SVG of everything that would travel; with a request, of the groups of which it wants some."""
    rows = who_sends_what(source, target)
    if request is not None:
        moving = {name for name, wanted in request.groups.items() if wanted.token_range[0] < wanted.token_range[1]}
        rows = [row for row in rows if row.group in moving]
    return draw(source, target, rows)


def traffic_text(traffic: Traffic) -> str:
    """The table, and what it adds up to per worker."""
    lines = [traffic_table(traffic.rows), "", totals_table(traffic)]
    if any(len(row.replicas) > 1 for row in traffic.rows):
        lines += [
            "",
            "replicas: the target workers that want the same cells are spread evenly over those that hold them",
        ]
    lines += ["", f"ms: estimates for {traffic.estimate_tokens} tokens, with {traffic.estimate_assumes}"]
    return "\n".join(lines)


def traffic_table(rows: Sequence[TrafficRow]) -> str:
    """One line per box: what travels between which two workers, for any request."""
    cells = [
        (
            str(row.source),
            str(row.target),
            row.group,
            ranges(row.layers),
            ",".join(row.parts),
            " ".join(f"{axis} {slices(owned)}" for axis, owned in row.axes.items()) or "-",
            cycle_text(row.cycles),
            str(row.bytes_per_token),
            str(row.run_bytes)
            if row.run_bytes == row.longest_run_bytes
            else f"{row.run_bytes}-{row.longest_run_bytes}",
            f"{row.copies_per_page:g}",
            row.posting,
            row.choice,
            " ".join(str(rank) for rank in row.replicas if rank != row.source) or "-",
        )
        for row in rows
    ]
    return table(TRAFFIC_COLUMNS, cells)


def totals_table(traffic: Traffic) -> str:
    """One line per worker of either side."""

    def line(total: WorkerTotal, role: str) -> Sequence[str]:
        numbers = (total.bytes_per_token, total.state_bytes, total.straight_ms, total.gathered_ms)
        texts = ("-" if number is None else f"{number:.12g}" for number in numbers)
        return (str(total.rank), role, ranges(total.peers) or "-", *texts)

    senders = [line(total, f"{traffic.source} sends") for total in traffic.senders]
    return table(TOTAL_COLUMNS, [*senders, *(line(total, f"{traffic.target} receives") for total in traffic.receivers)])


def plan_summary(plan: PlanDocument) -> str:
    """One line per pair of workers, and the proof."""
    cells = [
        [str(n) for n in (t.source, t.target, len(t.bytes), sum(t.bytes), min(t.bytes), max(t.bytes))]
        for t in plan.transfers
    ]
    proof = plan.proof
    promises = {"in bounds": proof.in_bounds, "exactly once": proof.exactly_once, "complete": proof.complete}
    proved = ", ".join(promise for promise, kept in promises.items() if kept)
    return f"{table(PLAN_COLUMNS, cells)}\n\n{proof.bytes} bytes in {proof.copies} copies; proved: {proved}"


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except DocumentError as error:
        raise DocumentError(f"{path}: {error.path}" if error.path else str(path), error.problem) from None
