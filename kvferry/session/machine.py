"""The state machine of one endpoint. Pure: events and the time go in, actions come out; no I/O, threads or clock."""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvferry.layout.address import Address
from kvferry.session.core import ATTEMPT, Core
from kvferry.session.events import (
    AbortCall,
    Action,
    Died,
    DrainCall,
    Ended,
    Event,
    ExtendCall,
    Found,
    NotFound,
    Prepared,
    PrepareFailed,
    ReceiveCall,
    Received,
    Scattered,
    ScatterFailed,
    Send,
    SendCall,
    Verified,
    VerifyFailed,
    WriteFailed,
    Written,
)
from kvferry.session.messages import (
    Abort,
    AbortAck,
    About,
    Beat,
    Card,
    ChunkDone,
    Commit,
    Complete,
    Goodbye,
    Grants,
    Hello,
    Landed,
    Offer,
    Peer,
    Ready,
    Welcome,
)
from kvferry.session.source import EARLY_MAX_S, Sources
from kvferry.session.target import Targets


class Machine:
    """`handle` and `tick` take the time in seconds of any monotonic clock, and return what to do, in order."""

    def __init__(
        self,
        me: Peer,
        card: Card,
        slots: int,
        slot_address: Callable[[int], Address],
        draw_grant: Callable[[], bytes],
        digests: bool = False,
        allowed: Collection[str] = (),
        early_s: float = EARLY_MAX_S,
    ) -> None:
        self.core = Core(me, card, slots, slot_address, draw_grant, allowed)
        self.targets = Targets(self.core, digests)
        self.sources = Sources(self.core, early_s)

    def handle(self, event: Event, now: float) -> list[Action]:
        self.core.now = now
        if isinstance(event, Received):
            self._message(event)
        elif isinstance(event, SendCall):
            self.sources.call(event)
        elif isinstance(event, ExtendCall):
            self.sources.extend(event)
        elif isinstance(event, ReceiveCall):
            self.targets.call(event)
        elif isinstance(event, AbortCall):
            self._abort(event)
        elif isinstance(event, DrainCall):
            self.sources.drain()
        elif isinstance(event, Found):
            self.targets.found(event)
        elif isinstance(event, NotFound):
            self.targets.not_found(event)
        elif isinstance(event, Prepared):
            self.targets.prepared(event)
        elif isinstance(event, PrepareFailed):
            self.targets.prepare_failed(event)
        elif isinstance(event, (Written, WriteFailed)):
            self.sources.written(event)
        elif isinstance(event, (Scattered, ScatterFailed)):
            self.targets.scattered(event)
        elif isinstance(event, (Verified, VerifyFailed)):
            self.targets.verified(event)
        elif isinstance(event, Died):
            self._lost(event.peer, "the peer's process has ended")
        return self.tick(now)

    def barred(self, peer: Peer, problem: str, now: float) -> list[Action]:
        """The peer's socket has refused our line."""
        self.core.now = now
        self.core.barred(peer, problem)
        self.targets.handshaken(peer)
        return self.tick(now)

    def close(self, now: float) -> list[Action]:
        """End every transfer; our peers are told."""
        self.core.now = now
        for t in list(self.targets.running.values()):
            self.targets.fail(t, "aborted", "the endpoint was closed", None)
        for transfer in list(self.sources.running):
            self.sources.fail(transfer, "aborted", "the endpoint was closed", None)
        self.core.delivery.ask_all()
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """Deadlines and repeats."""
        self.core.now = now
        self.targets.tick()
        self.sources.tick()
        self.core.tick()
        for peer in self.core.outlived():
            self._lost(peer, "a later start of it has taken over")
        self.targets.pump()
        self.core.delivery.tick(self._runs_with)
        actions, self.core.out = self.core.out, []
        for action in actions:
            if isinstance(action, Ended):
                self.core.counters["transfers_failed" if action.error else "transfers_done"] += 1
        return actions

    def next_s(self) -> float:
        """When `tick` has something to do at the latest; infinity when only an event can bring work."""
        return min(self.core.next_s(), self.targets.next_s(), self.sources.next_s())

    @property
    def quiet(self) -> bool:
        """Whether nothing is owed to anybody: all was heard, no write or scatter runs, no slot is in doubt."""
        return self.core.quiet and self.sources.quiet and not self.targets.ending

    def goodbye(self) -> list[Action]:
        """Sign off. Only when none of our writers runs: peers take it as their leave to reuse the slots."""
        return [Send(peer, Goodbye()) for peer in self.core.known] if self.sources.quiet else []

    def stats(self) -> dict[str, int]:
        counts = {
            "transfers_receiving": len(self.targets.running) + len(self.targets.ending),
            "transfers_sending": sum(1 for o in self.sources.running.values() if o.called),
            "offers_waiting": sum(1 for o in self.sources.running.values() if not o.called),
            "peers": len(self.core.known) - len(self.core.superseded),
            "peers_greeted": self.core.greeting,
            "transfers_done": 0,
            "transfers_failed": 0,
            "refused_messages": 0,
            "peers_silent": len(self.core.delivery.silent().keys() - self.core.superseded.keys()),
            "messages_repeated": self.core.delivery.repeated,
        }
        return counts | self.core.ledger.counts() | dict(self.core.counters)

    def _message(self, event: Received) -> None:
        core, peer, body = self.core, event.sender, event.body
        if event.recipient != core.me:
            return core.refuse("message for another worker or an earlier start")
        if isinstance(body, (Hello, Welcome)):
            new = core.on_hello(peer, body) if isinstance(body, Hello) else core.on_welcome(peer, body)
            for earlier in core.earlier_starts(peer) if new else ():
                self._supersede(earlier, peer)
            if new or peer in core.problems:
                self.targets.handshaken(peer)
            return
        if peer not in core.known:
            return core.refuse("message from an unknown peer")
        if not core.delivery.hear(peer, event.place):
            return None
        if isinstance(body, Beat):
            return core.delivery.on_beat(peer, body)
        if peer in core.superseded and isinstance(body, Abort) and body.role == "source":
            return self.sources.acknowledge(body.transfer, peer)
        if peer in core.superseded and not isinstance(body, (AbortAck, Goodbye)):
            return core.refuse("message from an earlier start of a known worker")
        if isinstance(body, Goodbye):
            return self._lost(peer, "the peer has closed its endpoint")
        if body.attempt != ATTEMPT:
            return core.refuse("message of another attempt")
        self._about_transfer(peer, body)

    def _about_transfer(self, peer: Peer, body: About) -> None:
        if isinstance(body, Offer):
            self.sources.on_offer(peer, body)
        elif isinstance(body, Ready):
            self.targets.on_ready(peer, body)
        elif isinstance(body, Grants):
            self.sources.on_grants(peer, body)
        elif isinstance(body, ChunkDone):
            self.targets.on_chunk_done(peer, body)
        elif isinstance(body, Landed):
            self.targets.on_landed(peer, body)
        elif isinstance(body, Commit):
            self.targets.on_commit(peer, body)
        elif isinstance(body, Complete):
            self.sources.on_complete(peer, body)
        elif isinstance(body, Abort):
            self.sources.on_abort(peer, body) if body.role == "source" else self.targets.on_abort(peer, body)
        elif isinstance(body, AbortAck):
            self.core.on_abort_ack(peer, body)

    def _abort(self, event: AbortCall) -> None:
        reason = event.reason or "by its caller, without a reason"
        if event.role == "target" and event.transfer in self.targets.running:
            self.targets.fail(self.targets.running[event.transfer], "aborted", reason, None)
        elif event.role == "source" and event.transfer in self.sources.running:
            self.sources.fail(event.transfer, "aborted", reason, None)

    def _runs_with(self, peer: Peer) -> bool:
        return self.targets.runs_with(peer) or self.sources.runs_with(peer) or peer in self.core.ledger.doubts

    def _supersede(self, earlier: Peer, later: Peer) -> None:
        """Only its own answer, or its witnessed death, says that it writes into our slots no more."""
        how = f"it has been started again, as {later}"
        self.core.supersede(earlier)
        self.targets.died(earlier, how)
        self.sources.died(earlier, how)

    def _lost(self, peer: Peer, how: str) -> None:
        self.core.forget(peer)
        self.targets.died(peer, how)
        self.sources.died(peer, how)
