"""The command itself: which checks are made, in which order, within which time."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.cli.doctor import machine, packages, pairs, registry, speeds, workers
from kvferry.cli.doctor.finding import EXIT, Check, Finding, run_checks, worst
from kvferry.cli.doctor.inquiry import Answer
from kvferry.cli.doctor.report import as_document, as_text
from kvferry.cli.progress import Progress
from kvferry.cli.verify.names import is_stand_in
from kvferry.errors import KVFerryError
from kvferry.layout.document import encode_json
from kvferry.session.keys import HOST_VARIABLE, KEYS_VARIABLE, Access, access, read_keys
from kvferry.session.registry import Listed
from kvferry.transport.select import WAYS

TRANSPORT_VARIABLE = "KVFERRY_TRANSPORT"
PARTS = ("packages", "machine", "speed", "peers")
SPEED_S, WORKERS_S, PAIRS_S = 60.0, 30.0, 30.0


@dataclass
class _Seen:
    """What one check hands on to the next: bytes per second by transport, the registry's entries, the answers."""

    speeds: dict[str, float] = field(default_factory=dict)
    listed: Sequence[Listed] = ()
    answers: Sequence[Answer] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--registry", metavar="URL", help="look at this registry and at the workers that it knows")
    parser.add_argument("--keys", metavar="DIR", type=Path, help=f"folder of `kvferry keys` (default: {KEYS_VARIABLE})")
    parser.add_argument(
        "--host", help=f"address of this machine that peers use (default: {HOST_VARIABLE}, else loopback)"
    )
    parser.add_argument(
        "--transport",
        choices=sorted(WAYS),
        default=os.environ.get(TRANSPORT_VARIABLE, "auto"),
        help=f"the one that the workers here are started with (default: {TRANSPORT_VARIABLE}, else auto)",
    )
    parser.add_argument(
        "--need", nargs="+", default=[], choices=packages.NEEDABLE, metavar="EXTRA",
        help=f"what must be installed here, of {', '.join(packages.NEEDABLE)}",
    )  # fmt: skip
    parser.add_argument(
        "--only", nargs="+", default=PARTS, choices=PARTS, metavar="PART", help=f"only these, of {', '.join(PARTS)}"
    )
    parser.add_argument("--json", action="store_true", help="print a kvferry-doctor/1 document")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 where all are green, 1 with a yellow one, 2 with a red one."""
    started_s = time.monotonic()
    with Progress(sys.stderr) as progress:
        findings = _examine(args, progress.say if sys.stderr.isatty() else lambda _: None)
    if args.json:
        print(encode_json(as_document(findings)).decode())
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(as_text(findings, time.monotonic() - started_s, colour))
    return EXIT[worst(findings)]


def _examine(args: argparse.Namespace, say: Callable[[str], None]) -> list[Finding]:
    seen = _Seen()
    say("looking at this machine")
    at, address = _access(args)
    checks = [check for check in _here(args) if check.area in args.only]
    findings = run_checks(checks) + (address if machine.AREA in args.only or at is None else [])
    if speeds.AREA in args.only:
        say("measuring between two processes here")
        findings += run_checks([Check(speeds.AREA, "speed", lambda: _speeds(seen), SPEED_S)])
    if args.registry and at is not None and "peers" in args.only:
        say("asking the registry and its workers")
        findings += _elsewhere(args.registry, at, args.transport, seen)
    return findings


def _access(args: argparse.Namespace) -> tuple[Access | None, list[Finding]]:
    """None, with the reason, where keys or address can't be used."""
    try:
        keys = read_keys(args.keys) if args.keys else None
        return access(args.host, keys), [machine.own_access(args.host, keys)]
    except KVFerryError as error:
        cure = f"mend that, or give another folder ({KEYS_VARIABLE}, --keys) or address ({HOST_VARIABLE}, --host)"
        return None, [Finding("red", machine.AREA, "address and keys", str(error), cure)]


def _here(args: argparse.Namespace) -> list[Check]:
    needed = {*args.need, *(["nixl"] if args.transport == "nixl" else [])}
    return [
        Check(packages.AREA, "core", lambda: [packages.core()]),
        Check(packages.AREA, "extras", lambda: packages.extras(needed)),
        Check(packages.AREA, "ucx", lambda: [packages.ucx()], packages.UCX_S + 5.0),
        Check(machine.AREA, "python", lambda: [machine.python()]),
        Check(machine.AREA, "memory", lambda: [machine.memory()]),
        Check(machine.AREA, "shared memory", lambda: [machine.shared_memory()]),
        Check(machine.AREA, "open files", lambda: [machine.open_files()]),
        Check(machine.AREA, "locked memory", lambda: [machine.locked_memory()]),
        Check(machine.AREA, "cores", lambda: [machine.cores()]),
        Check(machine.AREA, "ptrace scope", lambda: [machine.ptrace_scope(args.transport)]),
        Check(machine.AREA, "rdma devices", machine.rdma_devices),
    ]


def _speeds(seen: _Seen) -> Sequence[Finding]:
    findings, seen.speeds = speeds.measure()
    return findings


def _elsewhere(url: str, at: Access, transport: str, seen: _Seen) -> list[Finding]:
    """The registry, then its workers, then the pairs: each step needs what the one before has found."""

    def ask_registry() -> Sequence[Finding]:
        findings, listed = registry.ask(url, at)
        seen.listed = [one for one in listed if not is_stand_in(one.entry.instance)]
        return findings

    def ask_workers() -> Sequence[Finding]:
        entries = [one.entry for one in seen.listed]
        findings, seen.answers = workers.ask(entries, at, transport, seen.speeds)
        return findings

    findings = run_checks([Check(registry.AREA, "answers", ask_registry, 2 * registry.ASK_S)])
    findings += registry.instances(seen.listed)
    if seen.listed:
        findings += run_checks([Check(workers.AREA, "workers", ask_workers, WORKERS_S)])
        findings += run_checks([Check(pairs.AREA, "pairs", lambda: pairs.compare(seen.answers, seen.speeds), PAIRS_S)])
    return findings
