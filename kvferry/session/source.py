"""The source's half of the state machine: it matches offers with what was sent and writes where it was granted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.errors import CutOff, Where
from kvferry.layout.document import Group, Instance
from kvferry.layout.request import Side, Wanted
from kvferry.plan.dense import Chunk, chunk_bytes
from kvferry.plan.order import order_problem
from kvferry.plan.route import Box
from kvferry.session.core import ATTEMPT, EARLY_LIMIT, Core, Memory, failure, kind_of, told_by
from kvferry.session.events import (
    CancelWrites,
    Ended,
    ExtendCall,
    Fence,
    Report,
    SendCall,
    Write,
    WriteFailed,
    Written,
)
from kvferry.session.lease import offered_s
from kvferry.session.messages import (
    Abort,
    AbortAck,
    ChunkDone,
    Complete,
    Digest,
    FailureKind,
    Grants,
    Offer,
    Part,
    Peer,
    Piece,
    Ready,
)

WORD_S = 1.0
"""How long a target that has cut off our write may take to say why: its abort comes on another line."""
CYCLE_LIMIT = 1 << 32
"""Tokens after which a cycle repeats, at most: far above any, far below where token numbers would wrap."""


SOURCE_SAYS = (Ready, ChunkDone)
"""What a source says of a transfer that runs."""
EARLY_PIECES = 131_072
"""Pieces in the offers of one peer that wait for our own send(): about as much as a peer may make us remember."""
EARLY_MAX_S = 3600.0
"""How long an offer waits for our own send() at most, whatever deadline it names, unless the endpoint says less."""


@dataclass
class Taker:
    """One target worker that wants something from us."""

    offer: Offer
    grants: dict[int, bytes] = field(default_factory=dict)
    written: int = 0
    complete: bool = False
    checked: bool = False


@dataclass
class Outgoing:
    called: bool  # False while only the offer is here
    started_s: float
    deadline_s: float
    parts: tuple[Part, ...] = ()  # what is there yet
    last: bool = False  # nothing is added any more
    tables: Side = field(default_factory=Side)
    fences: tuple[Fence, ...] = ()
    takers: dict[Peer, Taker] = field(default_factory=dict)
    phase: str = "matching"
    cut: tuple[Peer, CutOff] | None = None  # by a target that may say why
    cut_s: float = math.inf  # until when it may
    bytes: int = 0
    copies: int = 0
    chunks: int = 0


class Sources:
    def __init__(self, core: Core, early_s: float = EARLY_MAX_S) -> None:
        self._core, self._early_s = core, early_s
        self.running: dict[str, Outgoing] = {}
        self._past = Memory()
        self._writing: dict[tuple[str, Peer], set[int]] = {}  # also of transfers that have ended
        self._acks_owed: set[tuple[str, Peer]] = set()
        self._draining = ""  # why offers without a send() are refused

    # matching

    def call(self, call: SendCall) -> None:
        now = self._core.now
        o = self.running.setdefault(call.transfer, Outgoing(False, now, now))
        o.called, o.started_s, o.deadline_s = True, now, now + call.timeout_s
        if call.transfer in self._past:
            past = self._past[call.transfer] or ("refused", "this transfer id has been used before; ids are unique")
            return self.fail(call.transfer, past[0], past[1], None)
        self._add(o, call)

    def extend(self, call: ExtendCall) -> None:
        o = self.running.get(call.transfer)
        if o is not None and o.called and not o.last:  # else it has ended, which its caller is told by poll
            self._add(o, call)

    def _add(self, o: Outgoing, call: SendCall | ExtendCall) -> None:
        o.parts = (*(p for p in o.parts if not _replaces(call, p)), Part(call.groups, call.layers))
        o.tables, o.last = call.tables, call.last
        o.fences += (call.fence,) if call.fence else ()
        for peer in list(o.takers):
            if call.transfer in self.running:
                self._match(call.transfer, peer)

    def on_offer(self, peer: Peer, offer: Offer) -> None:
        core, transfer, now = self._core, offer.transfer, self._core.now
        if transfer in self._past:
            past = self._past[transfer]
            if past is None:
                return core.refuse("offer for a finished transfer")
            return core.abort(peer, "target", transfer, past[0], past[1])
        o = self.running.get(transfer)
        if o is not None and peer in o.takers:
            return core.refuse("offer twice")
        if o is None and self._draining:
            return core.abort(peer, "target", transfer, "refused", self._draining)
        if o is None:
            if sum(1 for other in self.running.values() if not other.called) >= EARLY_LIMIT:
                return core.abort(
                    peer, "target", transfer, "refused", f"{EARLY_LIMIT} offers wait for a send() already"
                )
            o = self.running[transfer] = Outgoing(False, now, now + min(offer.timeout_s, self._early_s))
        problem = _taker_problem(o, peer, offer)
        if not o.called and self._pieces_waiting(peer) + len(offer.pieces) > EARLY_PIECES:
            problem = f"more than {EARLY_PIECES} pieces of this peer wait for a send()"
        if problem:
            return core.abort(peer, "target", transfer, "refused", problem)
        o.takers[peer] = Taker(offer)
        if o.called:
            self._match(transfer, peer)

    def drain(self) -> None:
        """No send() will come any more: offers that wait for one end now, as later ones do."""
        self._draining = f"{self._core.me} is draining and takes no new transfers; use another instance"
        for transfer in [transfer for transfer, o in self.running.items() if not o.called]:
            self.fail(transfer, "refused", self._draining, None)

    def _pieces_waiting(self, peer: Peer) -> int:
        early = (o.takers[peer] for o in self.running.values() if not o.called and peer in o.takers)
        return sum(len(taker.offer.pieces) for taker in early)

    def _match(self, transfer: str, peer: Peer) -> None:
        o = self.running[transfer]
        taker = o.takers[peer]
        problem = "" if taker.checked else offer_problem(self._core.card.instance, taker.offer)
        taker.checked = True
        if o.last and not problem:
            problem = missing_problem(o.parts, taker.offer)
        if problem:
            return self.fail(transfer, "refused", problem, peer)
        self._core.send(peer, Ready(transfer, ATTEMPT, o.parts, o.last))

    # moving

    def on_grants(self, peer: Peer, body: Grants) -> None:
        o = self.running.get(body.transfer)
        if o is None or not o.called or peer not in o.takers:
            return self._core.refuse("grants for no transfer of this peer")
        taker, core = o.takers[peer], self._core
        for grant in body.grants:
            if grant.piece >= len(taker.offer.pieces) or taker.offer.pieces[grant.piece].bytes != grant.bytes:
                core.refuse("grant that does not fit its piece")
                continue
            if not covered(taker.offer.pieces[grant.piece].chunk, o.parts):
                core.refuse("grant for a piece that isn't ready")
                continue
            if grant.piece in taker.grants:
                core.refuse("grant twice")
                continue
            o.phase = "moving"
            taker.grants[grant.piece] = grant.grant
            self._writing.setdefault((body.transfer, peer), set()).add(grant.piece)
            chunk, export = taker.offer.pieces[grant.piece].chunk, core.known[peer].export
            where = (grant.piece, chunk, grant.grant, grant.address, grant.bytes)
            left_s = max(0.001, o.deadline_s - core.now)
            core.out.append(
                Write(body.transfer, peer, export, *where, o.tables, left_s, grant.runs, o.fences, taker.offer.digest)
            )

    def written(self, event: Written | WriteFailed) -> None:
        key = (event.transfer, event.peer)
        self._writing[key].discard(event.piece)
        if not self._writing[key]:
            del self._writing[key]
        o = self.running.get(event.transfer)
        if o is not None and event.peer in o.takers:
            if isinstance(event, WriteFailed) and isinstance(event.error, CutOff):
                o.cut = o.cut or (event.peer, event.error)
                o.cut_s = min(o.cut_s, self._core.now + WORD_S, o.deadline_s)
            elif isinstance(event, WriteFailed):
                self.fail(event.transfer, kind_of(event.error), str(event.error), event.peer, event.error)
            else:
                self._count(o, event)
        self._acknowledge(*key)

    def _count(self, o: Outgoing, event: Written) -> None:
        taker = o.takers[event.peer]
        nbytes = taker.offer.pieces[event.piece].bytes
        taker.written += 1
        o.bytes += nbytes
        o.copies += event.copies
        o.chunks += 1
        grant, lease_s = taker.grants[event.piece], offered_s(o.deadline_s - self._core.now)
        done = ChunkDone(event.transfer, ATTEMPT, event.piece, grant, nbytes, event.digests, lease_s)
        self._core.send(event.peer, done)
        if all(t.written == len(t.offer.pieces) for t in o.takers.values()):
            o.phase = "committing"

    # the end

    def on_complete(self, peer: Peer, body: Complete) -> None:
        o = self.running.get(body.transfer)
        taker = o.takers.get(peer) if o is not None else None
        if o is None or not o.called or taker is None or taker.written != len(taker.offer.pieces):
            return self._core.refuse("complete for no finished part")
        taker.complete = True
        if {p.rank for p, t in o.takers.items() if t.complete} != set(taker.offer.takers):
            return
        peers = tuple(str(p) for p, t in o.takers.items() if t.written)
        report = Report(o.bytes, o.copies, o.chunks, self._core.now - o.started_s, peers)
        del self.running[body.transfer]
        self._past.add(body.transfer, None)
        self._core.delivery.drop(body.transfer, SOURCE_SAYS)
        self._core.out.append(Ended("source", body.transfer, report=report))

    def on_abort(self, peer: Peer, body: Abort) -> None:
        o = self.running.get(body.transfer)
        if o is not None and (not o.takers or any(peer.instance == taker.instance for taker in o.takers)):
            self.fail(body.transfer, body.kind, told_by(peer, body), peer)
        elif o is None and body.transfer not in self._past:
            self._past.add(body.transfer, (body.kind, told_by(peer, body)), peer)
        self.acknowledge(body.transfer, peer)

    def acknowledge(self, transfer: str, peer: Peer) -> None:
        """An abort, as soon as no write of ours to this peer is under way."""
        self._acks_owed.add((transfer, peer))
        self._acknowledge(transfer, peer)

    def _acknowledge(self, transfer: str, peer: Peer) -> None:
        key = (transfer, peer)
        if key in self._acks_owed and key not in self._writing:
            self._acks_owed.discard(key)
            self._core.send(peer, AbortAck(transfer, ATTEMPT))

    def fail(
        self, transfer: str, kind: FailureKind, problem: str, peer: Peer | None, cause: BaseException | None = None
    ) -> None:
        core = self._core
        o = self.running.pop(transfer)
        who = str(peer) if peer else ", ".join(map(str, list(o.takers)[:4]))
        where = Where(transfer, who, o.phase, core.now - o.started_s)
        if transfer not in self._past:
            self._past.add(transfer, (kind, problem), None if o.called else next(iter(o.takers), peer))
        core.delivery.drop(transfer, SOURCE_SAYS)
        for taker in o.takers:
            if taker in core.known:
                core.abort(taker, "target", transfer, kind, problem)
        if any(key[0] == transfer for key in self._writing):
            core.out.append(CancelWrites(transfer))
        if o.called:
            core.out.append(Ended("source", transfer, error=failure(kind, where, problem, cause)))

    def died(self, peer: Peer, how: str) -> None:
        self._acks_owed = {key for key in self._acks_owed if key[1] in self._core.known}
        for transfer, o in list(self.running.items()):
            if peer in o.takers and not o.takers[peer].complete:
                self.fail(transfer, "lost", how, peer)

    def tick(self) -> None:
        now = self._core.now
        for transfer, o in [(key, o) for key, o in self.running.items() if o.cut_s <= now]:
            if o.cut is not None:
                self.fail(transfer, kind_of(o.cut[1]), str(o.cut[1]), *o.cut)
        for transfer, o in [(key, o) for key, o in self.running.items() if o.deadline_s <= now]:
            waiting = next((peer for peer, taker in o.takers.items() if not taker.complete), None)
            span_s = o.deadline_s - o.started_s
            if not o.called and any(taker.offer.timeout_s > self._early_s for taker in o.takers.values()):
                problem = f"no send() came here within {span_s:g} s: it has ended, or this instance knows no such id"
                self.fail(transfer, "refused", problem, waiting)
                continue
            detail = "no target has made an offer" if not o.takers else f"still waiting for {waiting or 'other takers'}"
            if not o.last:
                detail += "; extend() was never called with last=True"
            quiet_s = self._core.delivery.silent_s(waiting) if waiting else 0.0
            detail += f"; no word from {waiting} for {quiet_s:.1f} s" if quiet_s else ""
            self.fail(transfer, "timeout", f"the deadline of {span_s:g} s has passed; {detail}", waiting)

    def runs_with(self, peer: Peer) -> bool:
        return any(peer in o.takers for o in self.running.values())

    @property
    def quiet(self) -> bool:
        """Whether none of our writers runs."""
        return not self._writing

    def next_s(self) -> float:
        return min((min(o.deadline_s, o.cut_s) for o in self.running.values()), default=math.inf)


def _taker_problem(o: Outgoing, peer: Peer, offer: Offer) -> str:
    if peer.rank not in offer.takers:
        return f"target rank {peer.rank} offers but is not among its own takers {offer.takers}"
    for other, taker in o.takers.items():
        if other.instance != peer.instance:
            return f"instance {other.instance!r} takes this transfer already; ids are unique"
        if other.rank == peer.rank:
            return f"target rank {peer.rank} offers twice, as generation {other.generation} and {peer.generation}"
        if taker.offer.takers != offer.takers:
            return f"target ranks disagree on who takes from us: {taker.offer.takers} and {offer.takers}"
    return ""


def _replaces(call: SendCall | ExtendCall, part: Part) -> bool:
    return part.layers == call.layers and part.groups.keys() <= call.groups.keys()


def covered(chunk: Chunk, parts: Sequence[Part]) -> bool:
    """Whether all of a chunk lies in what is there; each layer in one part."""
    box = chunk.box

    def there(layer: int, part: Part) -> bool:
        sent = part.groups.get(box.group)
        return sent is not None and (part.layers is None or layer in part.layers) and _holds(sent, chunk.tokens)

    return all(any(there(layer, part) for part in parts) for layer in box.layers)


def _holds(sent: Wanted, tokens: tuple[int, int]) -> bool:
    return _inside(tokens, sent.token_range)


def missing_problem(parts: Sequence[Part], offer: Offer) -> str:
    """Why what is asked is not covered by all that was sent, or nothing."""
    groups = {name: sent for part in parts for name, sent in part.groups.items()}
    for name, wanted in offer.groups.items():
        sent = groups.get(name)
        if sent is None:
            return f"group {name}: the target asks for it, send() did not name it"
        if sent.position != wanted.position:
            return f"group {name}: the target asks for position {wanted.position}, send() has {sent.position}"
        state = wanted.tokens is None and sent.tokens is None
        if not state and not _inside(wanted.token_range, sent.tokens):
            return (
                f"group {name}: the target asks for tokens {list(wanted.token_range)}, "
                f"send() has {list(sent.tokens or ())}"
            )
    for index, piece in enumerate(offer.pieces):
        if not covered(piece.chunk, parts):
            box = piece.chunk.box
            return (
                f"piece {index}: tokens {list(piece.chunk.tokens)} of group {box.group}, layers {list(box.layers)} are "
                "asked for, send() and extend() have not named them all"
            )
    return ""


def offer_problem(instance: Instance, offer: Offer) -> str:
    """Why an offer makes no sense, or nothing. Gathering proves that we own the cells."""
    groups = {group.name: group for group in instance.groups}
    for index, piece in enumerate(offer.pieces):
        problem = _piece_problem(piece, offer)
        group = groups.get(piece.chunk.box.group)
        if problem or group is None or set(piece.chunk.box.axes) != set(group.axes):
            return f"piece {index}: {problem or 'no such group or axes'}"
        problem = _box_problem(piece.chunk.box, group) or order_problem(piece.chunk.order, piece.chunk.box)
        if problem:
            return f"piece {index}: {problem}"
        if chunk_bytes(group, piece.chunk) != piece.bytes:
            return f"piece {index}: the target counts {piece.bytes} bytes, we count {chunk_bytes(group, piece.chunk)}"
        if offer.digest is not None and not _cells_whole(piece.chunk.box, group, offer.digest):
            return f"piece {index}: its cells are cut, by what the offer says of group {group.name} for digests"
    return ""


def _piece_problem(piece: Piece, offer: Offer) -> str:
    wanted = offer.groups.get(piece.chunk.box.group)
    if wanted is None:
        return f"group {piece.chunk.box.group!r} is not among the groups of its own offer"
    if not _inside(piece.chunk.tokens, wanted.token_range):
        return f"tokens {list(piece.chunk.tokens)} are outside the offer's own {list(wanted.token_range)}"
    return ""


def _cells_whole(box: Box, group: Group, digest: Digest) -> bool:
    whole = digest.whole.get(group.name, -1)
    if not 0 <= whole <= len(group.axes):
        return False
    inside = list(group.axes.items())[len(group.axes) - whole :]
    return all(tuple(box.axes[axis]) == ((0, extent),) for axis, extent in inside)


def _box_problem(box: Box, group: Group) -> str:
    """Cells that the group can't have. Planning enumerates layers, parts, indices and cycles: a peer's numbers must not
    decide how much that takes.
    """
    for what, asked, known in (("layers", box.layers, group.layers), ("parts", box.parts, group.parts)):
        if len(set(asked)) != len(asked) or not set(asked).issubset(known):
            return f"its {what} are not all different {what} of group {group.name}"
    for axis, segments in box.axes.items():
        extent = group.axes[axis]
        inside = len(segments) <= extent + 1 and all(0 <= start <= stop <= extent for start, stop in segments)
        if not inside or sum(stop - start for start, stop in segments) > extent:
            return f"its segments of axis {axis} are not inside [0, {extent})"
    if len(box.cycles) > 2 or not all(
        0 <= rank < size and 1 <= block and size * block < CYCLE_LIMIT for rank, size, block in box.cycles
    ):
        return "its token cycles are not at most two of [rank, size, block]"
    return ""


def _inside(inner: tuple[int, int], outer: tuple[int, int] | None) -> bool:
    start, stop = inner
    return 0 <= start <= stop and (start == stop or (outer is not None and outer[0] <= start and stop <= outer[1]))
