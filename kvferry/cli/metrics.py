"""`kvferry metrics`: the numbers of all workers of this user on this host, printed once or served to Prometheus."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from kvferry.layout.document import encode_json
from kvferry.observe import prometheus, runtime
from kvferry.observe.reach import ask_all
from kvferry.observe.records import Log, short
from kvferry.session.keys import access

EXIT_NOBODY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="answer Prometheus there until interrupted; the workers are asked at each scrape",
    )
    parser.add_argument(
        "--run",
        dest="folder",
        type=Path,
        metavar="DIR",
        help=f"folder in which endpoints can be asked (default: {runtime.VARIABLE}, else /tmp/kvferry-UID)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON rather than Prometheus' text format")


def run(args: argparse.Namespace) -> int:
    """0, or 1 where no worker has answered."""
    folder = args.folder or runtime.run_folder()
    if args.listen is not None:
        address = prometheus.parse_address(args.listen, "--listen", access().keys is not None)
        stop = prometheus.serve(address, lambda: _ask(folder))
        print(f"metrics at http://{address}/metrics", flush=True)
        try:
            threading.Event().wait()
        finally:
            stop()
    logs, silent = _ask(folder)
    if args.json:
        workers = {short(log.head.worker): log.samples for log in logs}
        print(encode_json({"workers": workers, "silent": silent}).decode())
    else:
        print(prometheus.text(logs, silent), end="")
    return 0 if logs else EXIT_NOBODY


def _ask(folder: Path) -> tuple[tuple[Log, ...], tuple[str, ...]]:
    found = ask_all(folder, records=False)
    return found.logs, tuple(one.worker for one in found.silent)
