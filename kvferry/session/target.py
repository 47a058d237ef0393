"""The target's half of the state machine: it routes, offers, grants slots, checks what lands, scatters, and commits."""

from __future__ import annotations

import math
from collections import deque

from kvferry.errors import IncompatibleError, Where
from kvferry.layout.address import Address
from kvferry.plan.digest import add
from kvferry.plan.route import check_compatible
from kvferry.session.core import ATTEMPT, EARLY_LIMIT, Core, Memory, failure, kind_of, told_by
from kvferry.session.delivery import SILENT_S
from kvferry.session.events import (
    Allow,
    Ended,
    Found,
    Lookup,
    Note,
    NotFound,
    Prepare,
    Prepared,
    PrepareFailed,
    ReceiveCall,
    Released,
    Report,
    Revoke,
    Scatter,
    Scattered,
    ScatterFailed,
    Verified,
    Verify,
    VerifyFailed,
)
from kvferry.session.farewell import Farewells
from kvferry.session.incoming import Flow, Incoming, follows, peers_of, waits_for
from kvferry.session.lease import claimer_end_s
from kvferry.session.messages import (
    Abort,
    ChunkDone,
    Commit,
    Complete,
    Digest,
    FailureKind,
    Grant,
    Grants,
    Landed,
    Offer,
    Peer,
    Ready,
)
from kvferry.session.registry import Entry
from kvferry.session.slots import Lease
from kvferry.session.source import covered
from kvferry.transport.runs import ROW_BYTES

EARLY_KEEP_S = 600.0
LOOK_AGAIN_S = 0.5
"""Who does not answer our hello may have been started again since the registry told us of it."""
TARGET_SAYS = (Offer, Grants, Landed)
"""What a target says of a transfer that runs."""


class Targets:
    def __init__(self, core: Core, digests: bool) -> None:
        self._core, self._digests = core, digests
        self.running: dict[str, Incoming] = {}
        self.ending: dict[str, Incoming] = {}  # failed, but a scatter into the caller's pages still runs
        self.held: dict[str, Incoming] = {}  # failed, but a peer may still write into the caller's pages
        self._past = Memory()
        self._early: dict[str, tuple[set[Peer], float]] = {}  # Landed before our own receive()
        self._turns: deque[tuple[str, Peer]] = deque()
        self._own = ("", core.me.instance)  # (registry, instance)
        self._farewells = Farewells(core)

    # the call, rendezvous, handshake, plan

    def call(self, call: ReceiveCall) -> None:
        core = self._core
        t = Incoming(call, core.now, core.now + call.timeout_s)
        if call.transfer in self._past:
            past = self._past[call.transfer] or ("refused", "this transfer id has been used before; ids are unique")
            return self._end(t, Ended("target", call.transfer, error=failure(past[0], self._where(t), past[1])))
        if call.source == core.me.instance:
            problem = f"{call.source!r} is this worker's own instance; name the prefill instance"
            return self._end(t, Ended("target", call.transfer, error=failure("refused", self._where(t), problem)))
        self.running[call.transfer] = t
        self._look_up(t)
        t.problem = f"the registry has not answered about {call.source!r}"

    def _look_up(self, t: Incoming) -> None:
        self._core.out += [Lookup(name, t.deadline_s, registry) for registry, name in t.names(self._own)]

    def found(self, event: Found) -> None:
        self._farewells.found(event)
        for t in list(self.running.values()):
            key = (event.registry, event.instance)
            if t.phase == "preparing" and not t.planning and key in t.names(self._own):
                t.found[key] = event.entries
                self.advance(t)
            elif t.flows and key == (t.call.registry, t.call.source):
                self._greet_later_starts(t, event.entries)

    def not_found(self, event: NotFound) -> None:
        for t in self.running.values():
            key = (event.registry, event.instance)
            if t.phase == "preparing" and key in t.names(self._own) and key not in t.found:
                t.problem = event.problem

    def handshaken(self, peer: Peer) -> None:
        """A handshake with `peer` has ended, well or badly."""
        self._farewells.handshaken(peer)
        for t in list(self.running.values()):
            if t.phase == "preparing" and (peer in t.sources or peer in t.ranks):
                self.advance(t)

    def advance(self, t: Incoming) -> None:
        """Go on as far as what is known allows: registry → handshakes → plan."""
        core, call = self._core, t.call
        source = t.found.get((call.registry, call.source))
        own = () if call.connect_only else t.found.get(self._own)
        if source is None or own is None or t.planning:
            return
        if not call.connect_only and core.me not in peers_of(own):
            later = next((peer for peer in peers_of(own) if follows(peer, core.me)), None)
            if later is not None:
                return self.fail(
                    t, "refused", f"this worker, {core.me}, was superseded by a later start, {later}", later
                )
            t.problem = f"the registry does not list this worker, {core.me}, but an earlier start of it"
            del t.found[self._own]
            t.look_again_s = core.now + LOOK_AGAIN_S
            return
        t.sources, t.ranks = peers_of(source), peers_of(own)
        absent = []
        for peer, entry in zip(t.sources + t.ranks, (*source, *own)):
            if peer == core.me or (core.knows(peer, entry.key) and peer not in core.superseded):
                continue
            if peer in core.problems:
                return self.fail(t, "refused", core.problems.pop(peer), peer)
            core.hello(peer, entry.address, entry.key, t.deadline_s)
            if peer in core.problems:  # there is no line to it
                return self.fail(t, "refused", core.problems.pop(peer), peer)
            absent.append(str(peer))
        t.problem = f"no answer to our hello from {', '.join(absent[:4])}"
        t.look_again_s = core.now + LOOK_AGAIN_S if absent else math.inf
        if not absent:
            self._compare(t)

    def _compare(self, t: Incoming) -> None:
        core = self._core
        try:
            source = core.instance(t.sources)
            target = core.instance(t.ranks or (core.me,))
            check_compatible(source, target)
        except IncompatibleError as error:
            return self.fail(t, "refused", str(error), None, error)
        if t.call.connect_only:
            return self._finish(t)
        t.planning = True
        call, key = t.call, (t.sources, t.ranks)
        core.out.append(Prepare(call.transfer, key, source, target, call.groups, call.tables, call.piece_tokens))

    def prepared(self, event: Prepared) -> None:
        t = self.running.get(event.transfer)
        if t is None:
            return
        t.phase, t.look_again_s = "matching", self._core.now + SILENT_S
        t.proof = event.proof
        t.digest = Digest(self._core.draw_grant(), event.whole) if self._digests else None
        left_s = max(0.0, t.deadline_s - self._core.now)
        for peer in t.sources:
            shipment = event.shipments.get(peer.rank)
            if shipment is not None:
                t.flows[peer] = Flow(shipment, list(range(len(shipment.pieces))))
                offer = Offer(
                    t.call.transfer, ATTEMPT, t.call.groups, shipment.pieces, shipment.takers, left_s, t.digest
                )
                self._core.send(peer, offer)
                self._note_silence(t, peer)
        early = self._early.pop(t.call.transfer, None)
        t.landed |= {peer for peer in early[0] if peer in t.ranks} if early else set()
        self._progress(t)

    def _note_silence(self, t: Incoming, peer: Peer) -> None:
        """Early: its deadline may be far away."""
        quiet_s = self._core.delivery.silent_s(peer)
        if quiet_s:
            self._core.out.append(
                Note(f"transfer {t.call.transfer!r} needs {peer}: no word from it for {quiet_s:.1f} s")
            )

    def prepare_failed(self, event: PrepareFailed) -> None:
        t = self.running.get(event.transfer)
        if t is not None:
            self.fail(t, "refused", str(event.error), None, event.error)

    # moving and landing

    def on_ready(self, peer: Peer, body: Ready) -> None:
        found = self._flow(peer, body.transfer)
        if found is None:
            return
        t, flow = found
        now_ready = [i for i in flow.unready if covered(flow.shipment.pieces[i].chunk, body.parts)]
        if body.last and len(now_ready) != len(flow.unready):
            return self.fail(t, "refused", "the source is through but has not named all that it was asked for", peer)
        flow.unready = [i for i in flow.unready if i not in set(now_ready)]
        if now_ready and not flow.waiting:
            self._turns.append((body.transfer, peer))
        flow.waiting.extend(now_ready)
        flow.ready = flow.ready or body.last
        if t.phase == "matching":
            t.phase = "moving"
        self._progress(t)

    def pump(self) -> None:
        """Hand free slots to those that wait, one each in turn."""
        batches: dict[tuple[str, Peer], list[Grant]] = {}
        idle = 0
        while self._turns and idle < len(self._turns):
            transfer, peer = turn = self._turns.popleft()
            t = self.running.get(transfer)
            flow = t.flows.get(peer) if t is not None else None
            if flow is None or not flow.waiting:
                continue
            self._turns.append(turn)
            grant = self._grant(transfer, peer, flow)
            idle = 0 if grant else idle + 1
            if grant:
                batches.setdefault(turn, []).append(grant)
        for (transfer, peer), grants in batches.items():
            self._core.send(peer, Grants(transfer, ATTEMPT, tuple(grants)))

    def _grant(self, transfer: str, peer: Peer, flow: Flow) -> Grant | None:
        core, piece = self._core, flow.waiting[0]
        what = (transfer, peer, piece, flow.shipment.pieces[piece].bytes, core.draw_grant(), core.now)
        lease = core.ledger.take_pages(*what) if flow.shipment.runs else core.ledger.take(*what)
        if lease is None:
            return None
        flow.waiting.popleft()
        flow.granted[piece] = lease
        if lease.slot is None:
            return Grant(piece, lease.grant, Address(0), lease.nbytes, flow.shipment.runs[piece])
        core.out.append(Allow(lease.grant, lease.slot, lease.nbytes))
        return Grant(piece, lease.grant, core.slot_address(lease.slot), lease.nbytes)

    def on_chunk_done(self, peer: Peer, body: ChunkDone) -> None:
        """The one gate before our pages: transfer, peer, piece, grant and bytes must all be those of a living lease."""
        found = self._flow(peer, body.transfer)
        if found is None:
            return
        t, flow = found
        lease = flow.granted.get(body.piece)
        if lease is None or lease.grant != body.grant:
            return self._core.refuse("chunk without a living grant")
        if body.bytes != lease.nbytes:
            problem = f"piece {body.piece}: the source reports {body.bytes} bytes, {lease.nbytes} were wanted"
            return self.fail(t, "refused", problem, peer)
        chunk = flow.shipment.pieces[body.piece].chunk
        if t.digest is not None:
            if len(body.digests) != len(chunk.box.layers):
                layers = len(chunk.box.layers)
                problem = f"piece {body.piece}: {len(body.digests)} digests came for its {layers} layers"
                return self.fail(t, "refused", problem, peer)
            add(t.sums, chunk.box.group, dict(zip(chunk.box.layers, body.digests)))
        del flow.granted[body.piece]
        flow.lease_end_s = max(flow.lease_end_s, claimer_end_s(lease.granted_s, body.lease_s))
        if lease.slot is None:  # it is where it belongs
            self._core.ledger.release(lease)
            self._landed(t, peer, lease, len(flow.shipment.runs[body.piece]) // ROW_BYTES)
        else:
            t.scattering[peer, body.piece] = lease
            self._core.out.append(Revoke(lease.grant))
            self._core.out.append(
                Scatter(body.transfer, peer, body.piece, lease.slot, lease.nbytes, chunk, t.call.tables)
            )
        if t.phase == "moving" and not any(f.unready or f.waiting or f.granted for f in t.flows.values()):
            t.phase = "landing"

    def scattered(self, event: Scattered | ScatterFailed) -> None:
        t = self.running.get(event.transfer) or self.ending[event.transfer]
        lease = t.scattering.pop((event.peer, event.piece))
        self._core.ledger.release(lease)
        if t.error is not None:
            return None if t.scattering else self._end(t, t.error)
        if isinstance(event, ScatterFailed):
            return self.fail(t, "refused", str(event.error), None, event.error)
        self._landed(t, event.peer, lease, event.copies)

    def _landed(self, t: Incoming, peer: Peer, lease: Lease, copies: int) -> None:
        flow = t.flows[peer]
        flow.landed += 1
        t.bytes += lease.nbytes
        t.copies += copies
        self._progress(t)

    # commit

    def _progress(self, t: Incoming) -> None:
        core = self._core
        # a process that was stopped may hear of it only now; the others have given up, as it is about to
        if core.now >= t.deadline_s:
            return None
        if t.phase in ("matching", "moving", "landing") and all(flow.done for flow in t.flows.values()):
            if t.digest is not None:
                t.phase = "verifying"
                core.out.append(Verify(t.call.transfer, t.call.groups, t.call.tables, t.digest))
                return None
            t.phase = "verifying"
        if t.phase == "verifying" and (t.digest is None or t.verified):
            t.phase = "committing"
            if self._lapsed(t):
                return None
            if core.me != t.ranks[0]:
                return core.send(t.ranks[0], Landed(t.call.transfer, ATTEMPT))
            t.landed.add(core.me)
        if t.phase == "committing" and t.landed.issuperset(t.ranks) and not self._lapsed(t):
            for peer in t.ranks[1:]:
                core.send(peer, Commit(t.call.transfer, ATTEMPT))
            self._finish(t)

    def _lapsed(self, t: Incoming) -> bool:
        """Whether a source may have given up by now: then this side must not have success where that one has none."""
        late = next((p for p, flow in t.flows.items() if flow.landed and flow.lease_end_s <= self._core.now), None)
        if late is not None:
            self.fail(t, "timeout", f"all of it is here, but too late: {late} kept its pages no longer", late)
        return late is not None

    def verified(self, event: Verified | VerifyFailed) -> None:
        t = self.running.get(event.transfer)
        if t is None:
            return
        if isinstance(event, VerifyFailed):
            return self.fail(t, "refused", str(event.error), None, event.error)
        keys = sorted(event.digests.keys() | t.sums.keys())
        wrong = [key for key in keys if event.digests.get(key, 0) != t.sums.get(key, 0)]
        if wrong:
            group = wrong[0][0]
            layers = [layer for name, layer in wrong if name == group]
            problem = f"what lies in the pages is not what was sent: group {group}, layers {layers}, digests differ"
            return self.fail(t, "corrupted", problem, None)
        t.verified = True
        self._progress(t)

    def on_landed(self, peer: Peer, body: Landed) -> None:
        t = self.running.get(body.transfer)
        if t is not None and t.phase != "preparing":
            if peer not in t.ranks:
                return self._core.refuse("landed from a stranger")
            t.landed.add(peer)
            self._progress(t)
        elif body.transfer not in self._past and peer.instance == self._core.me.instance:
            if len(self._early) >= EARLY_LIMIT:
                return self._core.refuse("too many early messages")
            self._early.setdefault(body.transfer, (set(), self._core.now + EARLY_KEEP_S))[0].add(peer)
        else:
            self._core.refuse("landed for no transfer")

    def on_commit(self, peer: Peer, body: Commit) -> None:
        t = self.running.get(body.transfer)
        if t is None or t.phase != "committing" or peer != t.ranks[0]:
            return self._core.refuse("commit for no transfer")
        self._finish(t)

    def _finish(self, t: Incoming) -> None:
        self._core.delivery.drop(t.call.transfer, TARGET_SAYS)
        for peer in t.flows:
            self._core.send(peer, Complete(t.call.transfer, ATTEMPT))
        chunks = sum(flow.landed for flow in t.flows.values())
        peers = tuple(str(peer) for peer, flow in t.flows.items() if flow.landed)
        report = Report(t.bytes, t.copies, chunks, self._core.now - t.started_s, peers, t.proof)
        self._end(t, Ended("target", t.call.transfer, report=report))

    # failure

    def on_abort(self, peer: Peer, body: Abort) -> None:
        t = self.running.get(body.transfer)
        if t is not None and (peer in t.sources or peer in t.ranks or peer.instance in self._names(t)):
            return self.fail(t, body.kind, told_by(peer, body), peer)
        if t is None and body.transfer not in self._past and peer.instance == self._core.me.instance:
            self._early.pop(body.transfer, None)
            self._past.add(body.transfer, (body.kind, told_by(peer, body)), peer)

    def fail(
        self, t: Incoming, kind: FailureKind, problem: str, peer: Peer | None, cause: BaseException | None = None
    ) -> None:
        """End this side, tell everyone; slots whose writers are in doubt go into quarantine."""
        core, transfer = self._core, t.call.transfer
        error = failure(kind, self._where(t, peer), problem, cause)
        t.error = Ended("target", transfer, error=error)
        del self.running[transfer]
        for lease in [lease for flow in t.flows.values() for lease in flow.granted.values()]:
            core.out.append(Revoke(lease.grant))
            if lease.peer in core.known:
                core.ledger.quarantine(lease)
                if lease.slot is None:
                    t.error = Ended("target", transfer, error=error, pages_held=True)
            else:
                core.ledger.release(lease)
        core.delivery.drop(transfer, TARGET_SAYS)
        if not t.call.connect_only:
            self._farewells.add(t, self._own, kind, problem, peer if peer in t.ranks else None)
        if t.scattering:
            self.ending[transfer] = t
        else:
            self._end(t, t.error)

    def died(self, peer: Peer, how: str) -> None:
        self._farewells.died(peer)
        for t in list(self.running.values()):
            if peer in t.sources or peer in t.ranks:
                self.fail(t, "lost", how, peer)

    def _end(self, t: Incoming, ended: Ended) -> None:
        transfer = t.call.transfer
        self.running.pop(transfer, None)
        self.ending.pop(transfer, None)
        if transfer not in self._past:
            error = ended.error
            self._past.add(transfer, (kind_of(error), error.problem) if error is not None else None)
        self._core.out.append(ended)
        if ended.pages_held:
            self.held[transfer] = t

    # time

    def tick(self) -> None:
        now = self._core.now
        for transfer, t in list(self.held.items()):
            if not any(self._core.ledger.in_doubt(transfer, peer) for peer in t.flows):
                del self.held[transfer]
                self._core.out.append(Released(transfer))
        for t in [t for t in self.running.values() if t.deadline_s <= now]:
            waiting, what = waits_for(t, self._core.me, self._core.delivery.silent_s)
            problem = f"the deadline of {t.call.timeout_s:g} s has passed; {what}"
            self.fail(t, "timeout", problem, waiting)
        for t in [t for t in self.running.values() if t.look_again_s <= now]:
            self._look_again(t)
        for transfer in [key for key, (_, end_s) in self._early.items() if end_s <= now]:
            del self._early[transfer]
        self._farewells.tick()

    def _look_again(self, t: Incoming) -> None:
        core = self._core
        if t.phase == "preparing":
            t.look_again_s = core.now + LOOK_AGAIN_S
            return self._look_up(t)
        t.look_again_s = core.now + SILENT_S
        if any(core.delivery.silent_s(peer) for peer in t.flows):
            core.out.append(Lookup(t.call.source, t.deadline_s, t.call.registry))

    def _greet_later_starts(self, t: Incoming, entries: tuple[Entry, ...]) -> None:
        """Of sources that may be silent since they are gone: their hello ends what runs with the earlier start."""
        for peer, entry in zip(peers_of(entries), entries):
            if peer not in self._core.known and any(follows(peer, source) for source in t.sources):
                self._core.hello(peer, entry.address, entry.key, t.deadline_s)
                self._core.problems.pop(peer, None)

    def next_s(self) -> float:
        deadlines = (t.due_s for t in self.running.values())
        return min(*deadlines, *(end_s for _, end_s in self._early.values()), self._farewells.next_s(), math.inf)

    def runs_with(self, peer: Peer) -> bool:
        return any(peer in t.sources or peer in t.ranks for t in self.running.values())

    def _flow(self, peer: Peer, transfer: str) -> tuple[Incoming, Flow] | None:
        t = self.running.get(transfer)
        flow = t.flows.get(peer) if t is not None else None
        if t is None or flow is None:
            self._core.refuse("message for no transfer of this peer")
            return None
        return t, flow

    def _names(self, t: Incoming) -> tuple[str, ...]:
        """Instances whose workers take part, while it is not known yet which workers those are."""
        return () if t.sources else (t.call.source, self._core.me.instance)

    def _where(self, t: Incoming, peer: Peer | None = None) -> Where:
        return Where(t.call.transfer, str(peer or t.who), t.phase, self._core.now - t.started_s)
