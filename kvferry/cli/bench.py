"""`kvferry bench plan`: what planning costs, beside what writing its result once costs. `kvferry bench transfer`: what
moving costs, beside the same bytes moved without kvferry.
"""

from __future__ import annotations

import argparse
import json

from kvferry.cli.bench_plan import WORKLOADS, Measured, measure
from kvferry.cli.bench_transfer import command as transfer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    plan = what.add_parser("plan", help="compile and bind of typical pairs, beside writing the result once")
    plan.add_argument("--json", action="store_true", help="print a JSON document")
    plan.add_argument("--repeat", type=int, default=5, metavar="N", help="take the best of N runs (default: 5)")
    plan.add_argument("--only", metavar="TEXT", default="", help="only workloads whose name contains TEXT")
    plan.set_defaults(measure=_plan)
    moving = what.add_parser("transfer", help="moving a cache between processes, beside the same bytes without kvferry")
    transfer.add_arguments(moving)
    moving.set_defaults(measure=transfer.run)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code


def _plan(args: argparse.Namespace) -> int:
    rows = [measure(workload, max(1, args.repeat)) for workload in WORKLOADS if args.only in workload.name]
    if args.json:
        print(json.dumps({"workloads": [row.as_json() for row in rows]}, indent=1))
    else:
        print(_table(rows))
    return 0


def _table(rows: list[Measured]) -> str:
    lines = [
        f"{'workload':<44} {'compile ms':>10} {'bind ms':>8} {'write once':>10} {'ratio':>6} {'copies':>10} "
        f"{'merged':>9} {'peak MB':>8}"
    ]
    for row in rows:
        ratio = f"{row.bind_ms / row.write_once_ms:.2f}" if row.short_runs else "-"
        lines.append(
            f"{row.name:<44} {row.compile_ms:>10.2f} {row.bind_ms:>8.2f} {row.write_once_ms:>10.2f} {ratio:>6} "
            f"{row.copies:>10} {row.merged_copies:>9} {row.peak_bytes / 1e6:>8.1f}"
        )
    return "\n".join(
        [*lines, "best of several runs; one (source, target) pair of workers; bind includes its proof of bounds"]
    )
