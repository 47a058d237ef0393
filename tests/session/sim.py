"""Endpoints' state machines in one process, with a network and movers that do what a random source tells them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import KVFerryError, TransportError
from kvferry.layout.address import Address
from kvferry.layout.request import Side, Wanted
from kvferry.session.events import (
    Action,
    CancelWrites,
    Died,
    Ended,
    Event,
    Found,
    Lookup,
    Prepare,
    PrepareFailed,
    ReceiveCall,
    Received,
    Scatter,
    Scattered,
    Send,
    SendCall,
    Write,
    WriteFailed,
    Written,
)
from kvferry.session.machine import Machine
from kvferry.session.messages import Card, Message, Peer, decode, encode
from kvferry.session.prepare import Preparer
from kvferry.session.registry import Entry
from tests.session.pools import Shape, WorkerPool, instance, table

SLOT_BYTES = 256
TOKENS = {"attn": Wanted((0, 8))}
TABLES: Side = table([0, 1])


@dataclass
class Job:
    owner: Peer
    action: Write | Scatter | Prepare
    begun: bool = False
    cancelled: bool = False


@dataclass
class Sim:
    rng: random.Random
    shapes: dict[str, Shape]
    slots: int = 2
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    now: float = 0.0
    machines: dict[Peer, Machine] = field(default_factory=dict)
    wire: dict[tuple[Peer, Peer], list[bytes]] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    ended: list[tuple[Peer, Ended, float]] = field(default_factory=list)
    landing: dict[tuple[Peer, int], tuple[str, Peer, int]] = field(default_factory=dict)
    scattered: dict[tuple[Peer, str], list[tuple[Peer, int]]] = field(default_factory=dict)
    wanted: dict[tuple[Peer, str], set[tuple[Peer, int]]] = field(default_factory=dict)

    takers: dict[tuple[Peer, str], set[int]] = field(default_factory=dict)
    lose: Callable[[Peer, Peer, Message], bool] = lambda sender, recipient, body: False
    asked: list[tuple[Peer, Lookup]] = field(default_factory=list)  # of registries that don't know yet

    def __post_init__(self) -> None:
        self.entries: dict[str, tuple[Entry, ...]] = {}
        self.preparers: dict[Peer, Preparer] = {}
        self.grants = itertools.count(1)
        for name, shape in self.shapes.items():
            for rank in range(shape.world):
                self.boot(Peer(name, 1, rank))

    def boot(self, peer: Peer) -> None:
        """A worker starts, perhaps not for the first time, and is registered."""
        shape, address = self.shapes[peer.instance], f"tcp://127.0.0.1:{1000 + len(self.preparers)}"
        own = instance(peer.instance, shape, (WorkerPool(shape, peer.rank).worker(),))
        self.machines[peer] = Machine(
            peer,
            Card(address, shape.world, own, b""),
            self.slots,
            lambda slot: Address(slot * SLOT_BYTES),
            lambda: next(self.grants).to_bytes(16, "big"),
        )
        self.preparers[peer] = Preparer(peer.rank, SLOT_BYTES)
        others = [entry for entry in self.entries.get(peer.instance, ()) if entry.rank != peer.rank]
        entry = Entry(peer.instance, peer.generation, peer.rank, shape.world, address)
        self.entries[peer.instance] = tuple(sorted((*others, entry), key=lambda entry: entry.rank))

    def peers(self, name: str) -> list[Peer]:
        return [peer for peer in self.machines if peer.instance == name]

    def event(self, peer: Peer, event: Event) -> None:
        if peer in self.machines:
            self.act(peer, self.machines[peer].handle(event, self.now))

    def start(self, transfer: str, source: str, target: str, timeout_s: float = 10.0) -> list[tuple[Peer, Event]]:
        calls: list[tuple[Peer, Event]] = [
            (peer, SendCall(transfer, TOKENS, TABLES, timeout_s)) for peer in self.peers(source)
        ]
        return calls + [(peer, ReceiveCall(transfer, source, TOKENS, TABLES, timeout_s)) for peer in self.peers(target)]

    def act(self, peer: Peer, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                # through the codec, so that only what the wire can carry arrives
                self.wire.setdefault((peer, action.peer), []).append(
                    encode(peer, action.peer, action.body, action.place)
                )
            elif isinstance(action, (Write, Scatter, Prepare)):
                self.jobs.append(Job(peer, action))
            elif isinstance(action, CancelWrites):
                for job in self.jobs:
                    if job.owner == peer and isinstance(job.action, Write) and job.action.transfer == action.transfer:
                        job.cancelled = True
            elif isinstance(action, Lookup):
                self.asked.append((peer, action))
                self.find()
            elif isinstance(action, Ended):
                self.ended.append((peer, action, self.now))

    def find(self) -> None:
        """Answer the lookups that can be."""
        asked, self.asked = self.asked, []
        for peer, lookup in asked:
            if lookup.instance in self.entries:
                self.event(peer, Found(lookup.instance, self.entries[lookup.instance], lookup.registry))
            else:
                self.asked.append((peer, lookup))

    def kill(self, peer: Peer) -> None:
        del self.machines[peer]
        self.jobs = [job for job in self.jobs if job.owner != peer]
        self.wire = {line: m for line, m in self.wire.items() if line[1] != peer}
        for other in list(self.machines):
            self.event(other, Died(peer))

    def step(self) -> bool:
        """One random thing; False where nothing is left to do now."""
        lines = [line for line, messages in self.wire.items() if messages]
        if not lines and not self.jobs:
            return False
        choice = self.rng.randrange(len(lines) + len(self.jobs))
        if choice >= len(lines):
            self.work(self.jobs[choice - len(lines)])
            return True
        line = lines[choice]
        messages = self.wire[line]
        data = messages.pop(self.rng.randrange(len(messages)) if self.reorder else 0)
        if self.rng.random() < self.duplicate:
            messages.insert(0, data)
        envelope = decode(data)
        if self.rng.random() >= self.drop and not self.lose(line[0], line[1], envelope.body):
            self.event(line[1], Received(envelope.sender, envelope.recipient, envelope.body, envelope.place))
        return True

    def work(self, job: Job) -> None:
        action = job.action
        if isinstance(action, Write) and not job.cancelled and not job.begun:
            job.begun = True  # a write takes time; a cancel in between comes too late
            return
        self.jobs.remove(job)
        if isinstance(action, Write):
            if not job.begun:
                error = TransportError("cancelled")
                return self.event(job.owner, WriteFailed(action.transfer, action.peer, action.piece, error))
            # the write itself needs no leave of the target: this is what one-sided means
            slot = action.address.value // SLOT_BYTES
            self.landing[action.peer, slot] = (action.transfer, job.owner, action.piece)
            self.event(job.owner, Written(action.transfer, action.peer, action.piece, 1))
        elif isinstance(action, Scatter):
            content = self.landing[job.owner, action.slot]
            assert content == (action.transfer, action.peer, action.piece), "somebody else's bytes were scattered"
            self.scattered.setdefault((job.owner, action.transfer), []).append((action.peer, action.piece))
            self.event(job.owner, Scattered(action.transfer, action.peer, action.piece, 1))
        else:
            self.prepare(job.owner, action)

    def prepare(self, peer: Peer, action: Prepare) -> None:
        try:
            prepared = self.preparers[peer].prepare(action)
        except KVFerryError as error:
            return self.event(peer, PrepareFailed(action.transfer, error))
        sources = {source.rank: source for source in action.key[0]}
        self.wanted[peer, action.transfer] = {
            (sources[rank], piece) for rank, ship in prepared.shipments.items() for piece in range(len(ship.pieces))
        }
        for rank, shipment in prepared.shipments.items():
            self.takers[sources[rank], action.transfer] = set(shipment.takers)
        self.event(peer, prepared)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for peer, machine in list(self.machines.items()):
            self.act(peer, machine.tick(self.now))

    def settle(self, limit: int = 100_000) -> None:
        """Run until nothing is left that time could bring."""
        for _ in range(limit):
            if self.step():
                continue
            due = min((machine.next_s() for machine in self.machines.values()), default=float("inf"))
            if due == float("inf") or due > self.now + 100:
                return
            self.pass_time(max(0.0, due - self.now) + 1e-6)
        raise AssertionError("the machines never came to rest")
