"""What each running transfer waits for now: read from the state machine, decided by nobody here."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.observe.observer import Observer, Track
from kvferry.observe.records import Flow, State, Wait, short
from kvferry.session.incoming import Flow as Incoming_
from kvferry.session.incoming import Incoming
from kvferry.session.machine import Machine
from kvferry.session.messages import Peer, Role
from kvferry.session.source import Outgoing, Taker


def states(machine: Machine, observer: Observer, now: float) -> list[State]:
    """Of every transfer that runs here, the oldest first. Called under the endpoint's lock."""
    observer.prune()
    found = [_outgoing(observer, transfer, o, now) for transfer, o in machine.sources.running.items()]
    found += [_incoming(machine, observer, transfer, t, now) for transfer, t in machine.targets.running.items()]
    return sorted(found, key=lambda state: -state.age_s)


def _incoming(machine: Machine, observer: Observer, transfer: str, t: Incoming, now: float) -> State:
    track = _track(observer, "target", transfer, t.phase, t.started_s)
    flows = tuple(_flow_in(peer, flow) for peer, flow in t.flows.items())
    waits = tuple(_wait(observer, track, now, what, peer) for what, peer in _target_waits(machine, t))
    return State(transfer, "target", t.phase, now - t.started_s, t.deadline_s - now, track.request, flows, waits)


def _flow_in(peer: Peer, flow: Incoming_) -> Flow:
    pieces = flow.shipment.pieces
    open_pieces = {*flow.unready, *flow.waiting, *flow.granted}
    granted = sum(lease.nbytes for lease in flow.granted.values())
    expected = sum(piece.bytes for piece in pieces)
    left = sum(pieces[i].bytes for i in open_pieces)
    return Flow(str(peer), expected, expected - left, granted, len(pieces), flow.landed)


def _target_waits(machine: Machine, t: Incoming) -> Iterator[tuple[str, Peer | None]]:
    if t.phase == "preparing":
        yield from _preparing(machine, t)
    elif t.phase in ("matching", "moving"):
        for peer, flow in t.flows.items():
            if flow.granted:
                yield f"done with {_pieces(len(flow.granted))}", peer
            if flow.waiting:
                yield f"a free slot for {_pieces(len(flow.waiting))}", None
            if len(flow.unready) == len(flow.shipment.pieces) and not flow.ready:
                yield "ready, which comes after its send()", peer
            elif flow.unready or not flow.ready:
                yield "ready with the rest, which comes after its extend()", peer
    if t.scattering:
        yield f"the scatter of {_pieces(len(t.scattering))} here", None
    elif t.phase == "verifying":
        yield "the check of digests here", None
    elif t.phase == "committing":
        leader = t.ranks[0]
        if leader != machine.core.me:
            yield "commit, which comes when every rank has landed", leader
        for rank in t.ranks:
            if leader == machine.core.me and rank not in t.landed:
                yield "landed", rank


def _preparing(machine: Machine, t: Incoming) -> Iterator[tuple[str, Peer | None]]:
    if t.planning:
        yield "the plan here", None
        return
    absent = [peer for peer in (*t.sources, *t.ranks) if peer != machine.core.me and peer not in machine.core.known]
    for peer in absent:
        yield "an answer to hello", peer
    if not absent:
        yield f"registry: {t.problem}" if t.problem else "the registry", None


def _outgoing(observer: Observer, transfer: str, o: Outgoing, now: float) -> State:
    track = _track(observer, "source", transfer, o.phase, o.started_s)
    flows = tuple(_flow_out(peer, taker) for peer, taker in o.takers.items())
    waits = tuple(_wait(observer, track, now, what, peer) for what, peer in _source_waits(o))
    return State(transfer, "source", o.phase, now - o.started_s, o.deadline_s - now, track.request, flows, waits)


def _flow_out(peer: Peer, taker: Taker) -> Flow:
    pieces = taker.offer.pieces
    granted = sum(pieces[i].bytes for i in taker.grants)
    # which of the granted pieces are written isn't kept; they are of one size but the last
    moved = granted if taker.written == len(taker.grants) else taker.written * max(p.bytes for p in pieces)
    moved = min(moved, granted)
    return Flow(str(peer), sum(p.bytes for p in pieces), moved, granted - moved, len(pieces), taker.written)


def _source_waits(o: Outgoing) -> Iterator[tuple[str, Peer | None]]:
    if not o.called:
        yield f"this side's own send(); {', '.join(short(str(peer)) for peer in o.takers) or 'nobody'} has asked", None
        return
    if not o.last:
        yield "this side's own extend(last=True)", None
    if not o.takers:
        yield "an offer: no target has asked yet", None
    for peer, taker in o.takers.items():
        if taker.written < len(taker.grants):
            yield f"this side's own write of {_pieces(len(taker.grants) - taker.written)} to it", peer
        elif len(taker.grants) < len(taker.offer.pieces):
            yield "grants", peer
        elif not taker.complete:
            yield "complete", peer
    ranks = {rank for taker in o.takers.values() for rank in taker.offer.takers}
    missing = sorted(ranks - {peer.rank for peer in o.takers})
    if missing:
        yield f"the offers of target ranks {', '.join(map(str, missing))}", None


def _pieces(count: int) -> str:
    return f"{count} piece{'s' * (count != 1)}"


def _track(observer: Observer, role: Role, transfer: str, phase: str, started_s: float) -> Track:
    return observer.tracks.get((role, transfer)) or Track(role, phase, started_s, started_s)


def _wait(observer: Observer, track: Track, now: float, what: str, peer: Peer | None) -> Wait:
    moved_s = max(track.phase_s, track.progress.get(peer, 0.0) if peer else 0.0)
    heard_s = observer.heard.get(peer) if peer else None
    return Wait(what, now - moved_s, str(peer) if peer else "", None if heard_s is None else now - heard_s)
