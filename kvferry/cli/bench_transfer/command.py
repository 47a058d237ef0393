"""The options of `kvferry bench transfer`, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from kvferry.cli.bench_transfer.cases import CASES, CURVE, CURVE_RUN_BYTES, longest_run
from kvferry.cli.bench_transfer.costs import costs_of, save
from kvferry.cli.bench_transfer.measure import Order, measure
from kvferry.cli.bench_transfer.plot import draw
from kvferry.cli.bench_transfer.table import as_json, as_text
from kvferry.cli.bench_transfer.worker import Worker
from kvferry.cli.crew import Crew
from kvferry.cli.progress import Progress
from kvferry.errors import DocumentError, TransportUnavailable
from kvferry.transport.costs import costs_file

TRANSPORTS = ("shm", "process_vm", "tcp", "nixl")
ALL = "all"
MIB = 1 << 20
UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": MIB, "gib": 1 << 30}
SMALLEST, LARGEST = MIB, 512 * MIB
BYTES, QUICK_BYTES = 64 * MIB, MIB
REPEAT, QUICK_REPEAT = 5, 1
QUICK_RUN_BYTES = (512, 16 << 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--transport", default=ALL, metavar="NAMES", help=f"all, or some of {','.join(TRANSPORTS)} (default: all)"
    )
    parser.add_argument("--bytes", metavar="SIZE", help="moved per transfer, 1MiB … 512MiB (default: 64MiB)")
    parser.add_argument(
        "--case",
        nargs="+",
        metavar="NAME",
        help=f"only these of {', '.join(CASES)}; the wire is always measured (default: all, {CURVE} with --plot only)",
    )
    parser.add_argument("--repeat", metavar="N", help=f"take the best of N transfers (default: {REPEAT})")
    parser.add_argument("--quick", action="store_true", help="1 MiB once: whether it works, not how fast it is")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    parser.add_argument("--plot", metavar="FILE.svg", help=f"draw GB/s over run lengths (case {CURVE})")
    parser.add_argument(
        "--save-costs",
        action="store_true",
        help="keep the costs per run and byte: endpoints and `kvferry plan` then use them to choose what to gather",
    )


def run(args: argparse.Namespace) -> int:
    order = order_of(args)
    plot = _plot_path(args.plot)
    load_before = os.getloadavg()[0]
    with Progress(sys.stderr) as progress, Crew("bench worker", Worker) as crew:
        progress.total = order.steps

        def step(text: str) -> None:
            progress.say(text)
            progress.advance()

        outcome = measure(order, crew, step)
    context = _context(order, load_before)
    if args.transport != ALL and outcome.left_out:
        transport, why = next(iter(outcome.left_out.items()))
        raise TransportUnavailable(f"--transport {transport}: {why}")
    if args.save_costs:
        save(costs_of(outcome.rows), costs_file())
    if plot is not None:
        plot.write_text(draw(outcome.rows, f"{order.bytes // MIB} MiB between two processes"), encoding="utf-8")
    print(json.dumps(as_json(outcome, context), indent=1) if args.json else as_text(outcome, _footer(order, context)))
    return 0


def order_of(args: argparse.Namespace) -> Order:
    """DocumentError that names the option."""
    cases = tuple(args.case or [case for case in CASES if case != CURVE])
    for case in cases:
        if case not in CASES:
            raise DocumentError("--case", f"expected some of {', '.join(CASES)}, got {case!r}")
    if args.plot and CURVE not in cases:
        cases = (*cases, CURVE)
    nbytes = _bytes(args.bytes) if args.bytes else QUICK_BYTES if args.quick else BYTES
    repeat = _repeat(args.repeat) if args.repeat else QUICK_REPEAT if args.quick else REPEAT
    run_bytes = QUICK_RUN_BYTES if args.quick else CURVE_RUN_BYTES
    possible = tuple(length for length in run_bytes if length <= longest_run(nbytes))
    return Order(_transports(args.transport), cases, nbytes, repeat, possible)


def _transports(text: str) -> tuple[str, ...]:
    names = TRANSPORTS if text == ALL else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TRANSPORTS:
            raise DocumentError("--transport", f"expected {ALL} or some of {','.join(TRANSPORTS)}, got {name!r}")
    return names


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([a-z]*)", text.lower())
    nbytes = int(match[1]) * UNITS.get(match[2], 0) if match else 0
    if not SMALLEST <= nbytes <= LARGEST:
        raise DocumentError("--bytes", f"expected 1MiB … 512MiB, got {text!r}")
    return nbytes


def _repeat(text: str) -> int:
    repeat = int(text) if text.isdecimal() and len(text) < 5 else 0
    if repeat < 1:
        raise DocumentError("--repeat", f"expected a number from 1 to 9999, got {text!r}")
    return repeat


def _plot_path(text: str | None) -> Path | None:
    """Checked before anything is measured."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise DocumentError("--plot", f"only SVG is drawn; expected a name that ends with .svg, got {text!r}")
    if path.is_dir() or not path.parent.is_dir():
        raise DocumentError("--plot", f"expected a file in a folder that is there, got {text!r}")
    return path


def _context(order: Order, load_before: float) -> dict[str, Any]:
    return {
        "bytes": order.bytes,
        "repeat": order.repeat,
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }


def _footer(order: Order, context: dict[str, Any]) -> list[str]:
    before, after = context["load"]
    return [
        f"best of {order.repeat} after one to warm up; {context['cores']} cores, "
        f"load {before:g} before and {after:g} after",
        "staged, direct: from the first send() to the last target's wait(); receive() came before, as during prefill",
        "wire, merged, per run: without kvferry, from the first post to the last completion; arrays are made before",
        "every byte of every target and the guards around it were compared after each transfer",
    ]
