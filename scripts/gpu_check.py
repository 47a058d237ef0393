#!/usr/bin/env python3
"""Check kvferry on an accelerator: pages on the device in two processes, each byte compared.

    python scripts/gpu_check.py                     # the accelerator that torch finds, NIXL
    python scripts/gpu_check.py --device cuda:0 --target-device cuda:1 --json
    python scripts/gpu_check.py --device cpu --tokens 64 --layers 2      # the same steps without an accelerator

One process has the source's pages, another the target's; torch gathers and scatters on the device. Equal and different
tensor-parallel sizes, landing memory on the device and on the host. Layout addresses have bit 63 set. Bytes around each
region and in pages that are not written must stay as they were. Exit code 1 if any byte is wrong, 2 if nothing could
be checked here. docs/how-to/gpu.md says more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.errors import KVFerryError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance, Worker
from kvferry.layout.presets import tp_heads, uniform_instance
from kvferry.layout.request import Side, Table
from kvferry.plan.dense import Chunk, chunk_bytes, dense_copies, split
from kvferry.plan.route import route
from kvferry.transport.base import NAMES, open_transport
from kvferry.transport.nixl import need_nixl
from kvferry.transport.staging import Staging

HEADS, DIM_BYTES, PAGE_TOKENS, SPARE_PAGES = 8, 256, 16, 5
GUARD_BYTES, UNTOUCHED = 4096, 0xEE
SOURCE_BASE, TARGET_BASE = 0xFFFF81AB54E01000, 0xFFFF92AC00002000
ANSWER_S, WRITE_S = 120.0, 60.0
LANDINGS = ("device", "host")
TP_SIZES = ((1, 1), (2, 2), (1, 2), (2, 1))


@dataclass(frozen=True)
class Case:
    """`landing`: where the target's slots and the source's outgoing chunks are."""

    source_tp: int
    target_tp: int
    landing: str
    transport: str
    layers: int
    tokens: int
    slots: int
    slot_bytes: int

    @property
    def name(self) -> str:
        return f"TP {self.source_tp} → {self.target_tp}, {self.landing} landing"

    @property
    def pages(self) -> int:
        return self.tokens // PAGE_TOKENS

    def instance(self, name: str) -> Instance:
        tp, base = (self.source_tp, SOURCE_BASE) if name == "source" else (self.target_tp, TARGET_BASE)
        sizes = {"page_tokens": PAGE_TOKENS, "pages": self.pages + SPARE_PAGES, "bases": base}
        return uniform_instance(name, self.layers, HEADS, DIM_BYTES // 2, tp, layout="nhd", **sizes)  # type: ignore[arg-type]

    def table(self, name: str) -> list[int]:
        """The pages of `name`'s tokens: any order, and others than on the other side."""
        draw = np.random.default_rng(len(name) + (name == "source"))
        return [int(page) for page in draw.permutation(self.pages + SPARE_PAGES)[: self.pages]]

    def side(self, name: str) -> Side:
        return Side({"attn": Table(tuple(self.table(name)))})

    def cells(self) -> np.ndarray:
        """What is cached: [layer, part, token, head, bytes of a head]."""
        shape = (self.layers, 2, self.tokens, HEADS, DIM_BYTES)
        return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


class Pool:
    """The pages of one worker on a device, with guards around each region. What should be there is worked out from
    `cells` alone, without layouts or plans.
    """

    def __init__(self, case: Case, worker: Worker, device: str, tp: int) -> None:
        import torch

        from kvferry.transport.torch_memory import TorchMemory, tensor_window

        ((first, stop),) = tp_heads(HEADS, tp, worker.rank)
        self._heads = slice(first, stop)
        self._shape = (case.pages + SPARE_PAGES, PAGE_TOKENS, stop - first, DIM_BYTES)
        sizes = [region.bytes + 2 * GUARD_BYTES for region in worker.regions]
        self._blocks = [torch.full((size,), UNTOUCHED, dtype=torch.uint8, device=device) for size in sizes]
        inside = [block[GUARD_BYTES:-GUARD_BYTES] for block in self._blocks]
        self.memory = TorchMemory([tensor_window(r.base, view) for r, view in zip(worker.regions, inside)])

    def expected(self, cells: np.ndarray, pages: Sequence[int]) -> Iterator[np.ndarray]:
        """Each region with its guards, in the order [layer][part]."""
        for layer in cells:
            for part in layer:
                block = np.full(int(np.prod(self._shape)) + 2 * GUARD_BYTES, UNTOUCHED, np.uint8)
                of_pages = block[GUARD_BYTES:-GUARD_BYTES].reshape(self._shape)
                of_pages[pages] = part[:, self._heads].reshape(len(pages), *self._shape[1:])
                yield block

    def fill(self, blocks: Iterator[np.ndarray]) -> None:
        import torch

        for block, values in zip(self._blocks, blocks):
            block.copy_(torch.from_numpy(values))
        self.memory.fence()

    def wrong_bytes(self, blocks: Iterator[np.ndarray]) -> int:
        return sum(int((block.cpu().numpy() != values).sum()) for block, values in zip(self._blocks, blocks))


def make_staging(case: Case, device: str, slots: int) -> Any:
    if case.landing == "host":
        return Staging(slots, case.slot_bytes)
    from kvferry.transport.torch_memory import DeviceStaging

    return DeviceStaging(slots, case.slot_bytes, device)


class OneSide:
    """All workers of one instance; runs in a process of its own."""

    name = ""

    def __init__(self, case: Case, device: str) -> None:
        self._case, self._instance = case, case.instance(self.name)
        self._pools = [Pool(case, worker, device, len(self._instance.workers)) for worker in self._instance.workers]

    def wrong_bytes(self) -> int:
        cells, pages = self._case.cells(), self._case.table(self.name)
        return sum(pool.wrong_bytes(pool.expected(cells, pages)) for pool in self._pools)


class SideOfTarget(OneSide):
    name = "target"

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        self._landing = [make_staging(case, device, case.slots) for _ in self._pools]
        self._transports = [open_transport(case.transport, landing) for landing in self._landing]

    def exports(self) -> list[tuple[bytes, list[Address]]]:
        slots = range(self._case.slots)
        return [(t.export(), [land.address(s) for s in slots]) for t, land in zip(self._transports, self._landing)]

    def grant(self, rank: int, grants: list[bytes]) -> None:
        for slot, grant in enumerate(grants):
            self._transports[rank].grant(grant, slot, self._case.slot_bytes)

    def scatter(self, rank: int, chunks: list[Chunk], grants: list[bytes]) -> tuple[int, float]:
        """(runs, seconds)."""
        (group,), worker, side = self._instance.groups, self._instance.workers[rank], self._case.side(self.name)
        runs, seconds = 0, 0.0
        for slot, (chunk, grant) in enumerate(zip(chunks, grants)):
            self._transports[rank].revoke(grant)
            copies = dense_copies(worker, group, chunk, side)
            started = time.perf_counter()
            self._pools[rank].memory.scatter(copies, self._landing[rank].view(slot)[: copies.total_bytes])
            seconds += time.perf_counter() - started
            runs += len(copies.lengths)
        return runs, seconds

    def close(self) -> None:
        for one in (*self._transports, *self._landing):
            one.close()


class SideOfSource(OneSide):
    name = "source"

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(case, device)
        for pool in self._pools:
            pool.fill(pool.expected(case.cells(), case.table(self.name)))
        self._landing = make_staging(case, device, 1)
        self._transport = open_transport(case.transport, self._landing)
        self._peers: list[Any] = []

    def connect(self, exports: list[bytes]) -> None:
        self._peers = [self._transport.connect(export) for export in exports]

    def write(self, target: int, orders: list[tuple[int, Chunk, Address, bytes]]) -> tuple[int, float, float]:
        """(runs, seconds of gathering, seconds of the rest)."""
        (group,), side = self._instance.groups, self._case.side(self.name)
        runs, gathered_s = 0, 0.0
        planned = [dense_copies(self._instance.workers[rank], group, chunk, side) for rank, chunk, _, _ in orders]
        started = time.perf_counter()
        for copies, (rank, _, address, grant) in zip(planned, orders):
            runs += len(copies.lengths)

            def fill(out: Any, rank: int = rank, copies: Any = copies) -> None:
                nonlocal gathered_s
                began = time.perf_counter()
                self._pools[rank].memory.gather(copies, out)
                gathered_s += time.perf_counter() - began

            self._peers[target].write(address, grant, copies.total_bytes, fill, WRITE_S)
        return runs, gathered_s, time.perf_counter() - started - gathered_s

    def close(self) -> None:
        for one in (*self._peers, self._transport, self._landing):
            one.close()


def serve(pipe: Connection, side: type[OneSide], device: str) -> None:
    """A process with one side: `open` makes it for a case, everything else is one of its methods."""
    made: Any = None
    while True:
        try:
            command, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if command == "open":
                made = side(*arguments, device)
                pipe.send((None, None))
            else:
                pipe.send((getattr(made, command)(*arguments), None))
        except Exception as error:  # told to the other process, which has it in its table
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Remote:
    def __init__(self, side: type[OneSide], device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = side.name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, side, device), daemon=True)
        self._process.start()
        theirs.close()

    def do(self, command: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((command, *arguments))
            if not self._pipe.poll(ANSWER_S):
                raise KVFerryError(f"{self._name}: no answer to {command!r} in {ANSWER_S:g} s")
            value, problem = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise KVFerryError(f"{self._name}: its process ended with code {self._process.exitcode}") from None
        if problem:
            raise KVFerryError(f"{self._name}: {command}: {problem}")
        return value

    def stop(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass
class Row:
    name: str
    problem: str = ""
    bytes: int = 0
    runs_out: int = 0
    runs_in: int = 0
    wrong_bytes: int = 0
    gather_s: float = 0.0
    wire_s: float = 0.0
    scatter_s: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.problem and not self.wrong_bytes and self.bytes > 0

    @property
    def speeds(self) -> dict[str, float]:
        """GB/s."""
        seconds = {"gather": self.gather_s, "wire": self.wire_s, "scatter": self.scatter_s}
        return {name: self.bytes / taken / 1e9 if taken else 0.0 for name, taken in seconds.items()}


def run_cases(cases: Sequence[Case], device: str, target_device: str) -> list[Row]:
    """One pair of processes for all cases, a fresh one after a failed case."""
    rows, pair = [], None
    for case in cases:
        pair = pair or (Remote(SideOfSource, device), Remote(SideOfTarget, target_device))
        rows.append(Row(case.name))
        try:
            move(case, *pair, rows[-1])
        except KVFerryError as error:
            rows[-1].problem = str(error)
            stop(pair)
            pair = None
    if pair:
        stop(pair)
    return rows


def stop(pair: Sequence[Remote]) -> None:
    for side in pair:
        side.stop()


def move(case: Case, source: Remote, target: Remote, row: Row) -> None:
    """The whole cache from one to the other, slot by slot; then both compare all their memory."""
    for side in (source, target):
        side.do("open", case)
    exports = target.do("exports")
    source.do("connect", [export for export, _ in exports])
    source_instance, target_instance = case.instance("source"), case.instance("target")
    (group,) = target_instance.groups
    for worker, (_, addresses) in zip(target_instance.workers, exports):
        orders = [
            (step.source, chunk)
            for step in route(source_instance, target_instance, worker.rank)
            for chunk in split(group, step.box, (0, case.tokens), case.slot_bytes)
        ]
        for first in range(0, len(orders), case.slots):
            some = orders[first : first + case.slots]
            grants = [secrets.token_bytes(16) for _ in some]
            target.do("grant", worker.rank, grants)
            placed = [(rank, chunk, at, key) for (rank, chunk), at, key in zip(some, addresses, grants)]
            runs, gather_s, wire_s = source.do("write", worker.rank, placed)
            runs_in, scatter_s = target.do("scatter", worker.rank, [chunk for _, chunk in some], grants)
            row.runs_out, row.runs_in = row.runs_out + runs, row.runs_in + runs_in
            row.gather_s, row.wire_s = row.gather_s + gather_s, row.wire_s + wire_s
            row.scatter_s += scatter_s
            row.bytes += sum(chunk_bytes(group, chunk) for _, chunk in some)
    row.wrong_bytes = source.do("wrong_bytes") + target.do("wrong_bytes")
    for side in (source, target):
        side.do("close")


def find_device(wanted: str) -> str:
    """The device to use; KVFerryError, with the reason, where there is none."""
    try:
        import torch
    except ImportError:
        raise KVFerryError("torch is not installed; pip install 'kvferry[torch]'") from None
    if wanted:
        try:
            torch.zeros(1, device=wanted)
        except Exception as error:  # each kind of device has its own
            raise KVFerryError(f"device {wanted!r} can't be used: {str(error).splitlines()[0]}") from None
        return wanted
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        raise KVFerryError(f"torch {torch.__version__} can't say which accelerator is there; name one with --device")
    if not accelerator.is_available():
        raise KVFerryError(f"no accelerator here (torch {torch.__version__}); --device cpu runs the same steps without")
    return str(accelerator.current_accelerator())


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'GB/s':<30} {'MB':>7} {'runs out':>9} {'runs in':>9} {'gather':>8} {'wire':>8} {'scatter':>8}"]
    for row in rows:
        speeds = " ".join(f"{row.speeds[name]:>8.2f}" for name in ("gather", "wire", "scatter"))
        result = "pass" if row.passed else f"FAIL: {row.problem or f'{row.wrong_bytes} wrong bytes'}"
        lines.append(f"{row.name:<30} {row.bytes / 1e6:>7.1f} {row.runs_out:>9} {row.runs_in:>9} {speeds}  {result}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="", help="as torch names it (default: the accelerator that torch finds)")
    parser.add_argument("--target-device", default="", help="of the target's process (default: the same)")
    parser.add_argument("--transport", default="nixl", choices=NAMES, help="default: nixl")
    parser.add_argument("--landing", default="both", choices=(*LANDINGS, "both"), help="default: both")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help=f"a multiple of {PAGE_TOKENS} (default: 2048)")
    parser.add_argument("--slots", type=int, default=4, help="landing slots (default: 4)")
    parser.add_argument("--slot-bytes", type=int, default=4 << 20, help="default: 4 MiB")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    args = parser.parse_args(arguments)
    if args.tokens < 1 or args.tokens % PAGE_TOKENS or args.layers < 1 or args.slots < 1:
        parser.error(f"--tokens must be a multiple of {PAGE_TOKENS}, --layers and --slots at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        device = find_device(args.device)
        target_device = find_device(args.target_device) if args.target_device else device
        if args.transport == "nixl":
            need_nixl()
    except KVFerryError as error:
        print(f"nothing was checked: {error}", file=sys.stderr)
        return 2
    landings = LANDINGS if args.landing == "both" else (args.landing,)
    sizes = (args.transport, args.layers, args.tokens, args.slots, args.slot_bytes)
    cases = [Case(*tp_sizes, landing, *sizes) for landing in landings for tp_sizes in TP_SIZES]
    rows = run_cases(cases, device, target_device)
    if args.json:
        found = [{**asdict(row), "GB/s": row.speeds, "pass": row.passed} for row in rows]
        print(json.dumps({"device": device, "target_device": target_device, "cases": found}, indent=1))
    else:
        print(f"pages on {device} → {target_device}, over {args.transport}")
        print(table(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
