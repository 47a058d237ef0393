"""`kvferry registry`: the registry by which instances find each other, as a process of its own."""

from __future__ import annotations

import argparse
import signal
import threading
from contextlib import closing
from pathlib import Path

from kvferry.session.keys import read_keys
from kvferry.session.registry import RegistryServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (default: KVFERRY_HOST, else 127.0.0.1)")
    parser.add_argument("--keys", metavar="DIR", type=Path, help="folder of `kvferry keys` (default: KVFERRY_KEYS)")
    parser.add_argument("--port", type=_port, default=7700, help="TCP port, 0 for any free one (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, or ended in good order by SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    keys = read_keys(args.keys) if args.keys else None
    with closing(RegistryServer(host=args.host, port=args.port, keys=keys)) as server:
        print(f"registry at {server.url}", flush=True)
        stop.wait()
    return 0


def _port(text: str) -> int:
    port = int(text) if text.isdecimal() else -1
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"expected a port in 0 … 65535, got {text!r}")
    return port
