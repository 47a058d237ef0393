"""`kvferry plan`: what two instances would send each other, and the copies of one request."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvferry.errors import DocumentError
from kvferry.layout.document import encode_json
from kvferry.layout.validate import check_request, parse_instance, parse_request
from kvferry.plan.document import PlanDocument, make_plan
from kvferry.plan.explain import who_sends_what

T = TypeVar("T")


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
    """Print the table, the summary or the document; errors of the user's files are raised."""
    source = _read(args.prefill, parse_instance)
    target = _read(args.decode, parse_instance)
    if args.request is None:
        rows = who_sends_what(source, target)
        print(encode_json(rows).decode() if args.json else table(rows))
        return 0
    request = _read(args.request, parse_request)
    check_request(request, source, target)
    plan = make_plan(source, target, request)
    print(encode_json(plan).decode() if args.json else summary(plan))
    return 0
