"""A world of machines with real bytes: engines with pages, a network that misbehaves, one-sided writers that nobody can
stop, processes that pause, die and come back. Everything that must never happen raises `Violation` when it happens.

Time, loss, order and the moment of each write are decided from outside; nothing here sleeps or starts a thread.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvferry.errors import CutOff, KVFerryError, TransportError
from kvferry.layout.address import Address
from kvferry.layout.request import Wanted
from kvferry.plan.dense import dense_copies
from kvferry.session import events as e
from kvferry.session.messages import ChunkDone, Peer, Role, decode, encode
from kvferry.session.prepare import owned_digests
from kvferry.session.registry import Entry
from kvferry.transport.memory import HostMemory
from kvferry.transport.runs import decode_runs
from tests.session.node import SLOT_BYTES, Call, Gate, Node, Request, Setup, Violation, check_rest, gather
from tests.session.pools import table


@dataclass
class Faults:
    """Probabilities per message or write."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    corrupt: float = 0.0
    fail: float = 0.0


@dataclass
class Job:
    node: Node
    action: e.Write | e.Scatter | e.Prepare | e.Verify
    cancelled: bool = False
    stage: int = 0  # of a write: waits, gathered, half of it landed, all of it landed
    data: Any = None
    digests: tuple[int, ...] = ()


@dataclass
class Leaving:
    node: Node


CLOSE_S = 2.0
"""What an endpoint waits for its peers when it is closed."""
MARGIN_S = 0.1
"""What a transfer may end after its deadline, by its own worker's clock, unless that worker stood still."""


class World:
    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup, self.rng, self.now, self.starts = setup, random.Random(seed), 0.0, 0
        self.faults = Faults()
        self.nodes: dict[Peer, Node] = {}
        self.registry: dict[str, dict[int, Entry]] = {}
        self.wire: dict[tuple[Peer, Peer], list[bytes]] = {}
        self.heard: deque[tuple[tuple[Peer, Peer], bytes]] = deque(maxlen=500)
        self.jobs: list[Job] = []
        self.gates: list[Gate] = []
        self.deaths: list[tuple[Node, Peer]] = []  # to be witnessed
        self.unseen: list[tuple[Node, Peer]] = []  # deaths on other hosts: nobody is told before the very end
        self.dead: dict[Peer, bool] = {}  # whether it is witnessed
        self.takers: dict[tuple[Peer, str], set[Peer]] = {}
        self.ranks: dict[tuple[Peer, str], set[Peer]] = {}
        self.requests: dict[str, Request] = {}
        self.todo: list[Callable[[], bool]] = []
        self.outcomes: list[str] = []
        grants = itertools.count(1)
        self.draw_grant = lambda: next(grants).to_bytes(16, "big")
        for name, shape in setup.shapes().items():
            for rank in range(shape.world):
                self.boot(name, rank)

    # what people and accidents do

    def boot(self, name: str, rank: int) -> None:
        self.starts += 1
        shape = self.setup.shapes()[name]
        offset_s = float(self.rng.randrange(1000))
        node = Node(self.setup, Peer(name, self.starts, rank), self.draw_grant, offset_s)
        self.nodes[node.peer] = node
        entry = Entry(name, self.starts, rank, shape.world, node.address)
        self.registry.setdefault(name, {})[rank] = entry

    def current(self, name: str) -> list[Node]:
        """The ranks' newest starts."""
        return [self.nodes[Peer(name, e.generation, rank)] for rank, e in sorted(self.registry[name].items())]

    def vacant(self) -> list[Peer]:
        """Of ranks that have closed, a start that could be followed."""
        shapes = self.setup.shapes().items()
        ranks = [(name, rank) for name, shape in shapes for rank in range(shape.world)]
        return [Peer(name, 0, rank) for name, rank in ranks if rank not in self.registry[name]]

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def request(self, request: Request) -> None:
        """Its calls may be made from now on, in any order."""
        self.requests[request.name] = request
        for node in self.current(request.source):
            self.todo.append(partial(self._send, node, request))
        for node in self.current(request.target):
            self.todo.append(partial(self._receive, node, request))

    def call(self, index: int) -> None:
        """Make one of the calls that are due; it waits on where there are no pages."""
        act = self.todo.pop(index % len(self.todo))
        if not act():
            self.todo.append(act)

    def abort(self, node: Node, role: Role, name: str) -> None:
        self.post(node, e.AbortCall(role, name, "changed my mind"))

    def kill(self, node: Node, witnessed: bool) -> None:
        node.alive = False
        self.dead[node.peer] = witnessed
        self.jobs = [job for job in self.jobs if job.node is not node]
        self.wire = {line: some for line, some in self.wire.items() if line[1] != node.peer}
        for other in self.living():
            if node.peer in other.watches:
                (self.deaths if witnessed else self.unseen).append((other, node.peer))

    def close(self, node: Node) -> None:
        """Its endpoint is closed: it ends everything, and leaves when its peers have heard, or doesn't wait longer."""
        entries, rank = self.registry[node.peer.instance], node.peer.rank
        if rank in entries and entries[rank].generation == node.peer.generation:
            del entries[rank]
        node.closes_s = self._clock(node) + CLOSE_S
        self._apply(node, node.machine.close(self._clock(node)))

    def _leave(self, node: Node) -> None:
        """Nobody is told but by its Goodbye; the process lives on, and so does a write of it that is under way."""
        self._apply(node, node.machine.goodbye())
        if any(call.ended is None for call in node.calls.values()):
            raise Violation(f"{node.peer} has closed and left a transfer behind")
        node.alive, self.dead[node.peer] = False, False
        self.jobs = [job for job in self.jobs if job.node is not node or job.stage in (1, 2)]
        self.wire = {line: some for line, some in self.wire.items() if line[1] != node.peer}
        self.unseen += [(other, node.peer) for other in self.living() if node.peer in other.watches]

    def replay(self, pick: int) -> None:
        """Something that was heard before is heard again, however late."""
        if self.heard:
            line, data = self.heard[pick % len(self.heard)]
            envelope = decode(data)
            self.post(
                self.nodes[line[1]], e.Received(envelope.sender, envelope.recipient, envelope.body, envelope.place)
            )

    def running(self) -> list[tuple[Node, Role, str]]:
        return [(node, *key) for node in self.living() for key, call in node.calls.items() if call.ended is None]

    def forge(self, node: Node, grant: bytes) -> None:
        """A source reports pieces that it hasn't written, with a grant that it wasn't given."""
        for transfer, incoming in list(node.machine.targets.running.items()):
            for peer, flow in list(incoming.flows.items()):
                for piece, lease in list(flow.granted.items()):
                    done = ChunkDone(transfer, 1, piece, grant, lease.nbytes)
                    self.post(node, e.Received(peer, node.peer, done))

    def pause(self, node: Node) -> None:
        node.paused = True

    def resume(self, node: Node) -> None:
        node.paused = False
        while node.inbox:
            self.post(node, node.inbox.popleft())
        self._tick(node)

    def pass_time(self, seconds: float, coarse: bool = False) -> None:
        """Nothing moves meanwhile but the clocks. `coarse`: as if every process had been stopped for that long."""
        end_s, rounds = self.now + seconds, 0
        while not coarse:
            awake = [node for node in self.living() if not node.paused]
            due_s = min((node.machine.next_s() - node.offset_s for node in awake), default=end_s)
            if due_s >= end_s:
                break
            if (rounds := rounds + 1) > 20_000:
                raise Violation("a machine wants to be woken again and again")
            self.now = max(self.now, due_s) + 1e-6
            for node in awake:
                self._tick(node)
        self.now = max(self.now, end_s)
        for node in self.living():
            self._tick(node)

    # one step of whatever can go on

    def step(self) -> bool:
        """One random thing; False where nothing is left to do now."""
        lines = [line for line, some in self.wire.items() if some]
        jobs = [job for job in self.jobs if self._can_go_on(job)]
        gates = [gate for gate in self.gates if not gate.open]
        asking = [node for node in self.living() if not node.paused and any(map(self._complete, node.lookups))]
        dying = [(node, peer) for node, peer in self.deaths if not self.wire.get((peer, node.peer))]
        leaving = [node for node in self.living() if not node.paused and self._may_leave(node)]
        choices = [*lines, *jobs, *gates, *asking, *dying, *map(Leaving, leaving)]
        if not choices:
            return False
        choice: Any = choices[self.rng.randrange(len(choices))]
        if isinstance(choice, Job):
            self._work(choice)
        elif isinstance(choice, Gate):
            choice.fill()
            choice.open = True
            self.gates.remove(choice)
        elif isinstance(choice, Node):
            self._answer(choice)
        elif isinstance(choice, Leaving):
            self._leave(choice.node)
        elif isinstance(choice[0], Node):
            self.deaths.remove(choice)
            self.post(choice[0], e.Died(choice[1]))
        else:
            self._deliver(choice)
        return True

    def _may_leave(self, node: Node) -> bool:
        over = node.closes_s <= self._clock(node) and not node.machine.targets.ending
        return over or (node.closes_s < math.inf and node.machine.quiet)

    def settle(self) -> None:
        for _ in range(50_000):
            if not self.step():
                return
        raise Violation("the machines never came to rest")

    def post(self, node: Node, event: e.Event) -> None:
        if node.paused:
            node.inbox.append(event)
        elif node.alive:
            self._apply(node, node.machine.handle(event, self._clock(node)))

    def check_deadlines(self) -> None:
        for node in self.living():
            for (role, name), call in node.calls.items():
                late = self._clock(node) > call.deadline_s + MARGIN_S and call.ended is None and not node.paused
                if late and not any(job.node is node and isinstance(job.action, e.Scatter) for job in self.jobs):
                    raise Violation(f"{role} of {name} at {node.peer} has not ended by its deadline")

    def finish(self) -> None:
        """Everything heals, everything is told; then nothing may be held."""
        self.faults, self.todo = Faults(), []
        for node in self.nodes.values():
            node.stalled = False
        for node in self.living():
            self.resume(node)
        for seconds in (0, 1, 2, 5, 10, 31, 31, 100, 700):
            self.pass_time(seconds, coarse=True)
            self.settle()
        self.check_deadlines()
        self.deaths += [(node, peer) for node, peer in self.unseen if node.alive]
        for seconds in (0, 31, 31, 4000, 31):
            self.settle()
            self.pass_time(seconds, coarse=True)
        self.settle()
        for node in self.living():
            check_rest(node, self.setup.slots, {other.peer for other in self.living()})

    # calls of the engines

    def _send(self, node: Node, request: Request) -> bool:
        if not node.open or node.paused:
            return not node.open
        count, layers = request.tokens, range(node.shape.layers)
        pages = self._allocate(node, -(-count // node.shape.page_tokens))
        if pages is None:
            return False
        deadline_s = self._clock(node) + request.timeout_s
        call = node.calls["source", request.name] = Call("source", request.number, (0, count), pages, 0, deadline_s)
        steps: list[tuple[int, range | None]] = {
            "tokens": [((count + 1) // 2, None), (count, None)],
            "layers": [(count, layers[:1]), (count, layers[1:])],
        }.get(request.grow, [(count, None)])
        parts = [self._part(node, call, request, *step, step is steps[-1]) for step in steps]
        self.post(node, e.SendCall(request.name, timeout_s=request.timeout_s, **parts[0]()))
        for part in parts[1:]:
            self.todo.append(partial(self._extend, node, request.name, part))
        return True

    def _extend(self, node: Node, name: str, part: Callable[[], dict[str, Any]]) -> bool:
        if node.open and not node.paused:
            self.post(node, e.ExtendCall(name, **part()))
        return not node.paused

    def _part(
        self, node: Node, call: Call, request: Request, stop: int, layers: range | None, last: bool
    ) -> Callable[[], dict[str, Any]]:
        """What send or extend is given, once it is called; the cells are filled then, or behind a fence."""

        def fill() -> None:
            node.fill(call, (0, stop), layers or range(node.shape.layers))

        def arguments() -> dict[str, Any]:
            gate = Gate(fill) if request.fenced else None
            if gate is None:
                fill()
            else:
                self.gates.append(gate)
            chosen = None if layers is None else tuple(layers)
            groups, tables = {"attn": Wanted((0, stop))}, table(call.pages)
            return {"groups": groups, "tables": tables, "layers": chosen, "last": last, "fence": gate}

        return arguments

    def _receive(self, node: Node, request: Request) -> bool:
        if not node.open or node.paused:
            return not node.open
        size = node.shape.page_tokens
        start = request.offset - request.offset % size
        pages = self._allocate(node, -(-(request.tokens - start) // size))
        if pages is None:
            return False
        tokens, deadline_s = (request.offset, request.tokens), self._clock(node) + request.timeout_s
        node.calls["target", request.name] = Call("target", request.number, tokens, pages, start, deadline_s)
        groups, tables = {"attn": Wanted(tokens)}, table(pages, start)
        where = (request.name, request.source, groups, tables, request.timeout_s)
        self.post(node, e.ReceiveCall(*where, piece_tokens=request.piece_tokens))
        return True

    def _allocate(self, node: Node, count: int) -> list[int] | None:
        """The pages that became free last, so that what comes too late finds somebody else's bytes there."""
        return [node.free.pop() for _ in range(count)] if count <= len(node.free) else None

    # the shell

    def _clock(self, node: Node) -> float:
        return self.now + node.offset_s

    def _tick(self, node: Node) -> None:
        if node.alive and not node.paused:
            self._apply(node, node.machine.tick(self._clock(node)))

    def _apply(self, node: Node, actions: list[e.Action]) -> None:
        for action in actions:
            self._act(node, action)

    def _act(self, node: Node, action: e.Action) -> None:
        if isinstance(action, e.Send):
            if action.peer not in node.lines:
                raise Violation(f"{node.peer} has no line to {action.peer} for {action.body}")
            if action.peer in self.nodes and self.nodes[action.peer].alive:
                data = encode(node.peer, action.peer, action.body, action.place)
                self.wire.setdefault((node.peer, action.peer), []).append(data)
        elif isinstance(action, (e.Write, e.Scatter, e.Prepare, e.Verify)):
            self.jobs.append(Job(node, action))
        elif isinstance(action, e.CancelWrites):
            for job in self.jobs:
                if job.node is node and isinstance(job.action, e.Write) and job.action.transfer == action.transfer:
                    job.cancelled = True
        elif isinstance(action, e.Allow):
            self._check_reuse(node, action)
        elif isinstance(action, e.Lookup):
            node.lookups.append(action)
        elif isinstance(action, e.Open):
            node.lines.add(action.peer)
        elif isinstance(action, e.Close):
            node.lines.remove(action.peer)
            node.watches.discard(action.peer)
        elif isinstance(action, e.Watch):
            node.watches.add(action.peer)
            if action.peer in self.dead:
                (self.deaths if self.dead[action.peer] else self.unseen).append((node, action.peer))
        elif isinstance(action, e.Ended):
            self._end(node, action)
        elif isinstance(action, e.Released):
            self._give_back(node, node.calls["target", action.transfer])

    def _check_reuse(self, node: Node, action: e.Allow) -> None:
        for job in self.jobs:
            write = job.action
            if isinstance(write, e.Write) and write.peer == node.peer and not write.runs and job.stage < 3:
                if write.address.value // SLOT_BYTES == action.slot and (job.stage or not job.cancelled):
                    raise Violation(
                        f"slot {action.slot} of {node.peer} is reused, {job.node.peer} may still write there"
                    )
        node.given[action.slot] = action.grant

    def _end(self, node: Node, ended: e.Ended) -> None:
        call = node.calls.get((ended.role, ended.transfer))
        if call is None or call.ended is not None:
            raise Violation(f"{ended.role} of {ended.transfer} at {node.peer} ended twice or never began")
        call.ended = ended
        self.outcomes.append(type(ended.error).__name__ if ended.error else "success")
        if ended.error is None and ended.role == "target":
            # while a rank that has ended otherwise may have given its pages to somebody else
            ranks = {node.peer: call} | {
                peer: theirs
                for peer in self.ranks[node.peer, ended.transfer]
                if (theirs := self.nodes[peer].calls.get(("target", ended.transfer))) is not None and theirs.holds
            }
            for peer, theirs in ranks.items():
                for view, index, ids in self.nodes[peer].cells(theirs, theirs.tokens, range(node.shape.layers)):
                    if not np.array_equal(view[index], ids):
                        raise Violation(f"success of {ended.transfer} at {node.peer} with wrong bytes at {peer}")
        if ended.error is None and ended.role == "source":
            for taker in self.takers.get((node.peer, ended.transfer), set()):
                theirs = self.nodes[taker].calls["target", ended.transfer].ended
                if theirs is None or theirs.error is not None:
                    raise Violation(f"{node.peer} was told of success that {taker} did not have")
        if not ended.pages_held:
            self._give_back(node, call)

    def _give_back(self, node: Node, call: Call) -> None:
        if not call.holds or call.ended is None:
            raise Violation(f"pages of {node.peer} are given back twice, or before the end")
        node.release(call)

    def _complete(self, lookup: e.Lookup) -> bool:
        return len(self.registry[lookup.instance]) == self.setup.shapes()[lookup.instance].world

    def _answer(self, node: Node) -> None:
        lookup = next(filter(self._complete, node.lookups))
        entries = self.registry[lookup.instance]
        if self.rng.random() < 0.8:
            node.lookups.remove(lookup)
            found = tuple(entry for _, entry in sorted(entries.items()))
            self.post(node, e.Found(lookup.instance, found, lookup.registry))
        else:
            self.post(node, e.NotFound(lookup.instance, "not yet", lookup.registry))

    def _deliver(self, line: tuple[Peer, Peer]) -> None:
        some, rng = self.wire[line], self.rng
        data = some.pop(rng.randrange(len(some)) if self.faults.reorder else 0)
        if rng.random() < self.faults.duplicate:
            some.insert(rng.randrange(len(some) + 1), data)
        if rng.random() >= self.faults.drop:
            self.heard.append((line, data))
            envelope = decode(data)
            self.post(
                self.nodes[line[1]], e.Received(envelope.sender, envelope.recipient, envelope.body, envelope.place)
            )

    # movers

    def _can_go_on(self, job: Job) -> bool:
        if not isinstance(job.action, e.Write):
            return not job.node.paused
        if job.stage in (1, 2):  # what is under way goes on without its process
            return not job.node.stalled
        gates = [fence for fence in job.action.fences if isinstance(fence, Gate)]
        return not job.node.paused and (job.stage == 3 or job.cancelled or all(gate.open for gate in gates))

    def _work(self, job: Job) -> None:
        action, node = job.action, job.node
        if isinstance(action, e.Write):
            return self._write(job, action)
        self.jobs.remove(job)
        if isinstance(action, e.Scatter):
            chunk = node.staging[action.slot][: action.nbytes]
            group = node.document.group(action.chunk.box.group)
            copies = dense_copies(node.document.workers[0], group, action.chunk, action.tables)
            self._into_pages(node, action.transfer, lambda: node.memory.scatter(copies, chunk))
            self.post(node, e.Scattered(action.transfer, action.peer, action.piece, len(copies.lengths)))
        elif isinstance(action, e.Verify):
            worker, gather = node.document.workers[0], node.memory.gather
            found = owned_digests(action, node.document, worker, gather, SLOT_BYTES)
            self.post(node, e.Verified(action.transfer, found))
        else:
            self._prepare(node, action)

    def _prepare(self, node: Node, action: e.Prepare) -> None:
        try:
            prepared = node.preparer.prepare(action)
        except KVFerryError as error:
            return self.post(node, e.PrepareFailed(action.transfer, error))
        sources, ranks = ({peer.rank: peer for peer in peers} for peers in action.key)
        for rank, shipment in prepared.shipments.items():
            self.takers[sources[rank], action.transfer] = {ranks[taker] for taker in shipment.takers}
        self.ranks[node.peer, action.transfer] = set(action.key[1])
        self.post(node, prepared)

    def _write(self, job: Job, action: e.Write) -> None:
        broken = self.rng.random() < self.faults.fail
        if broken or (job.stage == 0 and job.cancelled):
            kind = CutOff if self.rng.random() < 0.5 else TransportError
            return self._written(job, kind("the line broke"))
        if job.stage == 3:
            return self._written(job)
        if job.stage == 0:
            try:
                job.data, job.digests = gather(job.node, action)
            except KVFerryError as error:
                return self._written(job, error)
        else:
            self._land(job, action)
        job.stage += 1

    def _written(self, job: Job, error: KVFerryError | None = None) -> None:
        self.jobs.remove(job)
        action = job.action
        assert isinstance(action, e.Write)
        where = (action.transfer, action.peer, action.piece)
        self.post(job.node, e.WriteFailed(*where, error) if error else e.Written(*where, 1, job.digests))

    def _land(self, job: Job, action: e.Write) -> None:
        """Half of the bytes reach the target. The write needs no leave of it: this is what one-sided means."""
        target = self.nodes[action.peer]
        if not target.alive:
            return
        half = action.nbytes // 2
        first, stop = (0, half) if job.stage == 1 else (half, action.nbytes)
        if action.runs:
            runs = decode_runs(action.runs, action.nbytes)
            self._into_pages(target, action.transfer, lambda: _write_runs(target.memory, runs, job.data, first, stop))
            return
        slot = action.address.value // SLOT_BYTES
        if target.given.get(slot) != action.grant:
            raise Violation(f"{job.node.peer} wrote into slot {slot} of {target.peer}, which is another one's by now")
        target.staging[slot][first:stop] = job.data[first:stop]
        if self.rng.random() < self.faults.corrupt:
            target.staging[slot][self.rng.randrange(first, stop)] ^= 1 + self.rng.randrange(255)

    def _into_pages(self, node: Node, transfer: str, write: Callable[[], None]) -> None:
        before = node.pool.memory.copy()
        write()
        touched = np.flatnonzero((before != node.pool.memory).any(axis=(0, 1, 3, 4, 5))).tolist()
        call = node.calls.get(("target", transfer))
        owned = set(call.pages) if call is not None and call.holds else set()
        if not owned.issuperset(touched):
            raise Violation(f"{transfer} wrote into pages {touched} of {node.peer}, its own are {sorted(owned)}")


def _write_runs(memory: HostMemory, runs: Any, data: Any, first: int, stop: int) -> None:
    at = 0
    for address, length in zip(runs.addresses.u64.tolist(), runs.lengths.tolist()):
        if first <= at < stop:
            memory.view(Address(address), length)[:] = data[at : at + length]
        at += length
