"""The command: two sides that it starts itself, or that wait on other hosts."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from kvferry.cli.crew import Member
from kvferry.cli.progress import Progress
from kvferry.cli.verify.drive import Driver
from kvferry.cli.verify.models import ALL, PRESETS, made_up, read_side
from kvferry.cli.verify.node import Node
from kvferry.cli.verify.report import as_document, as_text
from kvferry.errors import DocumentError, EngineError
from kvferry.layout.document import Instance, encode_json
from kvferry.session.keys import HOST_VARIABLE, KEYS_VARIABLE, access
from kvferry.session.registry import RegistryServer
from kvferry.transport.select import WAYS

WORKER = "worker"
MIB = 1 << 20
EXIT_WRONG = 1
USAGE = """
  kvferry verify [--prefill TP] [--decode TP] [--model MODEL]   two instances that are started here
  kvferry verify [--registry URL] PREFILL DECODE                each a name that workers wait under, or a file or
                                                                folder with the documents of one that is started here
  kvferry verify worker FILE [--name NAME] [--registry URL]     workers that wait for a driver on another host"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = USAGE
    parser.add_argument("sides", nargs="*", metavar="SIDE", help="see above")
    parser.add_argument(
        "--registry", metavar="URL", help="the registry that both hosts reach (default: one started here)"
    )
    parser.add_argument("--keys", metavar="DIR", type=Path, help=f"folder of `kvferry keys` (default: {KEYS_VARIABLE})")
    parser.add_argument("--host", help=f"address of this machine that the other host uses (default: {HOST_VARIABLE})")
    parser.add_argument("--transport", choices=sorted(WAYS), default="auto", help="of workers started here")
    parser.add_argument("--landing", choices=("slots", "pages"), default="slots", help="of workers started here")
    parser.add_argument("--prefill", default="tp=1", metavar="TP", help="2, or tp=2,pp=2,page=32,layout=hnd")
    parser.add_argument("--decode", default="tp=2,page=32", metavar="TP", help="likewise (default: %(default)s)")
    models = ", ".join([ALL, *PRESETS])
    parser.add_argument("--model", default=ALL, help=f"{models}, or a config.json (default: %(default)s)")
    parser.add_argument(
        "--name", help="as a worker: what the driver calls this side (default: the document's instance)"
    )
    parser.add_argument("--ranks", nargs="+", type=int, metavar="RANK", help="as a worker: only these (default: all)")
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="of one transfer (default: %(default)g)"
    )
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="for workers on other hosts to be there")
    parser.add_argument(
        "--mib", type=int, default=32, metavar="N", help="what is moved to measure the speed, 0: nothing (default: 32)"
    )
    parser.add_argument("--world", type=int, metavar="N", help="as a worker: ranks of this side on all hosts")
    parser.add_argument("--json", action="store_true", help="print a kvferry-verify/1 document")


def run(args: argparse.Namespace) -> int:
    """0 where every byte was right, 1 where not."""
    # the workers that are started here inherit both
    if args.keys:
        os.environ[KEYS_VARIABLE] = str(args.keys)
    if args.host:
        os.environ[HOST_VARIABLE] = args.host
    access()  # what is wrong with either is said before anything starts
    with ExitStack() as opened:
        url = args.registry or opened.enter_context(RegistryServer()).url
        if args.sides[:1] == [WORKER]:
            return _wait(args, url, opened)
        return _verify(args, url, opened)


def _wait(args: argparse.Namespace, url: str, opened: ExitStack) -> int:
    """Workers that do what a driver asks, until they are interrupted."""
    if len(args.sides) != 2:
        raise DocumentError("FILE", "expected one file or folder: kvferry verify worker FILE")
    document = read_side(Path(args.sides[1]))
    name = args.name or document.instance
    ranks = args.ranks or [worker.rank for worker in document.workers]
    _start(document, name, url, args, ranks, opened)
    print(f"{len(ranks)} worker(s) of {name!r} wait; on the other host: kvferry verify --registry {url} …", flush=True)
    threading.Event().wait()
    return 0


def _verify(args: argparse.Namespace, url: str, opened: ExitStack) -> int:
    names = _sides(args, url, opened)
    with Progress(sys.stderr) as progress, closing(Driver(url, access(), args.timeout)) as driver:
        say = progress.say if sys.stderr.isatty() else lambda _: None
        verdict = driver.verify(*names, args.wait, args.mib * MIB, say)
    if args.json:
        print(encode_json(as_document(verdict)).decode())
    else:
        print(as_text(verdict, sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
    return 0 if verdict.good else EXIT_WRONG


def _sides(args: argparse.Namespace, url: str, opened: ExitStack) -> tuple[str, str]:
    """The names of both sides; those that aren't waiting somewhere are started here."""
    if not args.sides:
        given = [made_up(args.model, args.prefill, "prefill"), made_up(args.model, args.decode, "decode")]
        names = [_start(document, document.instance, url, args, None, opened) for document in given]
        return names[0], names[1]
    if len(args.sides) != 2:
        raise DocumentError("PREFILL DECODE", f"expected two sides or none, got {len(args.sides)}")
    names = []
    for role, side in zip(("prefill", "decode"), args.sides):
        if Path(side).exists():
            document = read_side(Path(side))
            names.append(_start(document, f"{role} {document.instance} {os.getpid()}", url, args, None, opened))
        elif not args.registry:
            raise DocumentError(side, "no such file; for a side that waits on another host say --registry URL")
        else:
            names.append(side)
    return names[0], names[1]


def _start(
    document: Instance, name: str, url: str, args: argparse.Namespace, ranks: list[int] | None, opened: ExitStack
) -> str:
    """One process per worker."""
    known = [worker.rank for worker in document.workers]
    if absent := sorted(set(ranks or known) - set(known)):
        raise DocumentError("--ranks", f"{name!r} has the workers {known}, not {absent}")
    world = args.world or len(known)
    options = {"transport": args.transport, "landing": args.landing}
    members = []
    for rank in ranks or known:
        members.append(Member(f"verify {name} {rank}", Node))
        opened.callback(_stop, members[-1])
        members[-1].begin("start", document, rank, world, name, url, options)
    for member in members:
        member.answer()
    return name


def _stop(member: Member) -> None:
    """Signed off where it still can, so that nobody looks for it; then ended."""
    with suppress(EngineError):
        member("stop")
    member.kill()
