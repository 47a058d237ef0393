"""One worker of a simulated world: its pages with real bytes, its landing memory, its clock and its machine."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import PlanError
from kvferry.layout.address import Address
from kvferry.plan.dense import dense_copies
from kvferry.plan.digest import layer_digests
from kvferry.session import events as e
from kvferry.session.machine import Machine
from kvferry.session.messages import Card, Peer, Process, Role
from kvferry.session.prepare import Preparer
from kvferry.transport.memory import HostMemory, map_array
from tests.session.pools import PARTS, UNTOUCHED, Shape, WorkerPool, cell_ids, instance

SLOT_BYTES = 256


class Violation(AssertionError):
    """A promise of the session was broken."""


@dataclass(frozen=True)
class Setup:
    sources: tuple[int, ...] = (2, 1)  # TP of each prefill instance: p, q
    target: int = 2
    slots: int = 3
    digests: bool = False
    direct: bool = False

    def shapes(self) -> dict[str, Shape]:
        shapes = {name: Shape(tp=tp, pages=8) for name, tp in zip("pq", self.sources)}
        return shapes | {"d": Shape(tp=self.target, page_tokens=6, pages=8, order="hnd")}


@dataclass
class Gate:
    """A producer fence: the forward pass that fills these cells has finished."""

    fill: Callable[[], None]
    open: bool = False

    def __call__(self) -> None:
        raise Violation("a fence is called by movers only")


@dataclass
class Call:
    """One side of one transfer, as its engine sees it."""

    role: Role
    number: int
    tokens: tuple[int, int]
    pages: list[int]
    start: int
    deadline_s: float
    ended: e.Ended | None = None
    holds: bool = True  # its pages may not be used for anything else


@dataclass
class Request:
    name: str
    number: int
    source: str
    target: str
    tokens: int
    offset: int
    grow: str
    piece_tokens: int
    timeout_s: float
    fenced: bool


class Node:
    """One start of one worker: its machine, pages, landing memory and clock."""

    def __init__(self, setup: Setup, peer: Peer, draw_grant: Callable[[], bytes], offset_s: float) -> None:
        shape = setup.shapes()[peer.instance]
        self.peer, self.shape = peer, shape
        self.pool = WorkerPool(shape, peer.rank)
        self.memory = HostMemory([map_array(self.pool.memory)])
        self.staging = np.zeros((setup.slots, SLOT_BYTES), np.uint8)
        self.given: dict[int, bytes] = {}  # slot → the grant that was last given out for it
        self.free = list(range(shape.pages))
        self.calls: dict[tuple[Role, str], Call] = {}
        self.inbox: deque[e.Event] = deque()
        self.lookups: list[e.Lookup] = []
        self.lines: set[Peer] = set()
        self.watches: set[Peer] = set()
        self.alive, self.paused, self.offset_s = True, False, offset_s
        self.stalled = False  # what it writes stands still on the way
        self.closes_s = math.inf  # its endpoint is closed, and waits for its peers until then
        self.document = instance(peer.instance, shape, (self.pool.worker(),))
        self.address = f"tcp://127.0.0.1:{1000 + peer.generation}"
        card = Card(self.address, shape.world, self.document, b"", Process(peer.generation, 1, "here"))
        direct = setup.direct and peer.instance == "d"
        self.preparer = Preparer(peer.rank, SLOT_BYTES, self.memory if direct else None)
        self.preparer._ways = _WAYS.setdefault((setup, peer.rank), {})
        self.machine = Machine(
            peer,
            card,
            setup.slots,
            lambda slot: Address(slot * SLOT_BYTES),
            draw_grant,
            setup.digests,
        )

    @property
    def open(self) -> bool:
        """Whether its engine may call it."""
        return self.alive and self.closes_s == math.inf

    def cells(self, call: Call, tokens: tuple[int, int], layers: range) -> Iterator[tuple[Any, Any, Any]]:
        """(view, index of the tokens, what must lie there) for each layer and part that this worker owns."""
        numbers = np.arange(*tokens)
        where = numbers - call.start
        index = (np.array(call.pages)[where // self.shape.page_tokens], where % self.shape.page_tokens)
        for layer in set(layers) & set(self.pool.layers):
            for part in range(len(PARTS)):
                ids = cell_ids(layer, part, numbers, self.pool.heads) + np.uint32(call.number << 20)
                yield self.pool.cells[layer, PARTS[part]], index, ids

    def fill(self, call: Call, tokens: tuple[int, int], layers: range) -> None:
        if call.holds:
            for view, index, ids in self.cells(call, tokens, layers):
                view[index] = ids

    def release(self, call: Call) -> None:
        """The engine may use these pages for something else, and does."""
        call.holds = False
        self.pool.memory[:, :, call.pages] = UNTOUCHED
        self.free += call.pages


_WAYS: dict[Any, dict[Any, Any]] = {}


def gather(node: Node, action: e.Write) -> tuple[Any, tuple[int, ...]]:
    worker, group = node.document.workers[0], node.document.group(action.chunk.box.group)
    copies = dense_copies(worker, group, action.chunk, action.tables)
    if copies.total_bytes != action.nbytes:
        raise PlanError(f"{copies.total_bytes} bytes here, {action.nbytes} were granted")
    data = np.empty(action.nbytes, np.uint8)
    node.memory.gather(copies, data)
    if action.digest is None:
        return data, ()
    found = layer_digests(group, action.chunk, data, action.digest.key, action.digest.whole[group.name])
    return data, tuple(found[layer] for layer in action.chunk.box.layers)


RUNNING = {
    "transfers_receiving", "transfers_sending", "offers_waiting", "slots_used", "slots_quarantined",
    "pieces_quarantined",
}  # fmt: skip


def check_rest(node: Node, slots: int, living: set[Peer]) -> None:
    """Nothing is held at quiescence."""
    machine = node.machine
    stats = machine.stats()
    held = {name: count for name, count in stats.items() if count and name in RUNNING}
    held |= {"slots": slots - stats["slots_free"]} if stats["slots_free"] != slots else {}
    tables = {
        "leases": machine.core.ledger._leases,
        "unheard": [] if machine.core.delivery.quiet else [1],
        "hellos": machine.core._hellos,
        "sources": machine.sources.running,
        "writing": machine.sources._writing,
        "acks owed": machine.sources._acks_owed,
        "targets": machine.targets.running,
        "ending": machine.targets.ending,
        "held pages": machine.targets.held,
        "early": machine.targets._early,
        "turns": machine.targets._turns,
        "dead peers": machine.core.known.keys() - living,
        "lines to the dead": node.lines - living,
        "pages": [call for call in node.calls.values() if call.holds],
        "calls": [call for call in node.calls.values() if call.ended is None],
    }
    held |= {name: len(entries) for name, entries in tables.items() if entries}
    if held or sorted(node.free) != list(range(node.shape.pages)):
        raise Violation(f"{node.peer} holds at rest: {held}")
