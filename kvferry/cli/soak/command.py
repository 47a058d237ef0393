"""The options of `kvferry soak`, and how it ends."""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from kvferry.cli.progress import Progress
from kvferry.cli.soak.report import as_text, report_of
from kvferry.cli.soak.soak import Outcome, Settings, soak
from kvferry.cli.soak.worker import Worker

TRANSPORTS = ("auto", "shm", "process_vm", "tcp", "nixl")
EXIT_NOT_GOOD = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Moves random requests between two prefill instances and a decode instance, all of them real processes, while "
        "these and the registry are paused, killed and started again and requests are aborted. Every byte is compared. "
        "Ends with 0 if nothing was wrong, leaked or hung, and with 1 otherwise; Ctrl-C ends it early, with a report."
    )
    parser.add_argument("--minutes", type=_minutes, default=10.0, metavar="N", help="how long (default: 10)")
    parser.add_argument("--seed", type=int, metavar="S", help="draw the same requests and faults as an earlier run")
    parser.add_argument(
        "--transport", choices=TRANSPORTS, default="auto", help="how bytes travel (default: the fastest that works)"
    )
    parser.add_argument(
        "--keys", action="store_true", help="give the registry and each worker a key pair of its own, as in production"
    )
    parser.add_argument("--json", action="store_true", help="print a kvferry-soak/1 document")


def run(args: argparse.Namespace, make: Callable[[], Worker] = Worker) -> int:
    """`make`: what each worker process holds."""
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    settings = Settings(args.minutes, seed, args.transport, make, args.keys)
    outcome = Outcome(settings)
    with Progress(sys.stderr) as progress, interrupts() as interrupted:
        progress.total = 1000

        def say(line: str) -> None:
            progress.reach(round(1000 * outcome.seconds / (60 * settings.minutes)))
            progress.say(line)

        progress.say(f"starting the processes; seed {seed}")
        soak(settings, outcome, say, interrupted)
    report = report_of(outcome)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        print(as_text(report))
    if not report.good:
        return EXIT_NOT_GOOD
    return EXIT_INTERRUPTED if report.interrupted else 0


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C, or SIGTERM, has come. The second one ends everything at once."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes <= 100_000:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return minutes
