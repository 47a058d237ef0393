"""`kvferry keys`: keys without which nobody talks to the endpoints and the registry of a deployment."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvferry.session.keys import HOST_VARIABLE, KEYS_VARIABLE, make_keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="where the keys are written")
    parser.add_argument("--name", default="deployment", help="what logs call the holder (default: %(default)s)")
    parser.add_argument(
        "--join",
        metavar="OTHER",
        type=Path,
        help="make a further key pair for the deployment whose keys are in OTHER; each side then allows the other",
    )


def run(args: argparse.Namespace) -> int:
    keys = make_keys(args.folder, args.name, args.join)
    print(f"keys of {keys.name!r} are in {args.folder}, {len(keys.allowed)} allowed; secret.json must stay secret")
    print(f"on every host: {KEYS_VARIABLE}={args.folder} {HOST_VARIABLE}=<the address that peers use>")
    return 0
