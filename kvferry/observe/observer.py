"""What an endpoint's control thread shows: each event that its state machine was given, and what came out of it.

`saw` is called for each, under the endpoint's lock; it writes the event log and counts, and decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from kvferry.errors import TransferError
from kvferry.observe.log import EventLog
from kvferry.observe.numbers import Numbers
from kvferry.observe.records import Value
from kvferry.session.core import kind_of
from kvferry.session.events import (
    AbortCall,
    Action,
    Close,
    Died,
    Ended,
    Event,
    ExtendCall,
    Found,
    Note,
    NotFound,
    Prepare,
    Prepared,
    PrepareFailed,
    ReceiveCall,
    Received,
    Released,
    Report,
    Scatter,
    Scattered,
    ScatterFailed,
    Send,
    SendCall,
    Verified,
    Verify,
    VerifyFailed,
    Write,
    WriteFailed,
    Written,
)
from kvferry.session.machine import Machine
from kvferry.session.messages import (
    Abort,
    ChunkDone,
    Complete,
    Goodbye,
    Grants,
    Hello,
    Message,
    Offer,
    Peer,
    Role,
    Welcome,
)

LOG = logging.getLogger("kvferry.observe")
_SAID = {"chunkdone": "done", "abortack": "abort-ack"}
_OTHER: dict[Role, Role] = {"source": "target", "target": "source"}


@dataclass
class Track:
    """What the log knows of one running transfer beside the machine: since when its phase lasts, who moved it last."""

    role: Role
    phase: str
    phase_s: float
    started_s: float
    request: str = ""
    progress: dict[Peer, float] = field(default_factory=dict)
    landed_bytes: int = 0
    under_way: int = 0


class Observer:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.log, self.numbers = EventLog(), Numbers()
        self.tracks: dict[tuple[Role, str], Track] = {}
        self.heard: dict[Peer, float] = {}
        self.failed: Callable[[str], None] = lambda transfer: None
        """Told the id of each transfer that has failed, other than by an abort."""
        self._requests: dict[tuple[Role, str], str] = {}  # said by callers, before the machine knows the transfer
        self._connects: set[str] = set()  # calls that only shake hands: no transfers
        self._jobs: dict[tuple[str, str, Peer | None, int], tuple[float, int]] = {}  # when ordered, bytes
        self._newest: dict[tuple[Peer, str], int] = {}  # number of the newest message heard and sent
        self._problems: dict[str, str] = {}  # by instance: why a registry doesn't know it
        self._on: dict[type, Callable[[Any, float], None]] = {
            SendCall: self._send_call,
            ExtendCall: self._extend_call,
            ReceiveCall: self._receive_call,
            AbortCall: self._abort_call,
            Received: self._received,
            Found: self._found,
            NotFound: self._not_found,
            Prepared: self._prepared,
            PrepareFailed: self._job_failed,
            Written: self._written,
            WriteFailed: self._job_failed,
            Scattered: self._scattered,
            ScatterFailed: self._job_failed,
            Verified: self._verified,
            VerifyFailed: self._job_failed,
            Died: self._died,
            Send: self._sends,
            Prepare: self._orders,
            Write: self._orders,
            Scatter: self._orders,
            Verify: self._orders,
            Ended: self._ended,
            Released: self._released,
            Close: self._closed,
            Note: self._note,
        }

    def called(self, role: Role, transfer: str, request: str) -> None:
        """The caller's own name for what is about to start."""
        if request and request != transfer:
            self._requests[role, transfer] = request

    def saw(self, event: Event | None, actions: list[Action], now: float) -> None:
        """`event` went into the machine at `now`, `actions` came out. Never raises."""
        for one in (event, *actions):
            see = self._on.get(type(one))
            try:
                if see is not None:
                    see(one, now)
            except Exception:
                LOG.exception("the event log missed a %s", type(one).__name__)

    def prune(self) -> None:
        """Forget tracks of transfers that ended without a word: offers that nobody here ever sent for."""
        for key in [key for key in self.tracks if self._phase(*key) is None]:
            del self.tracks[key]

    # transfers

    def _phase(self, role: Role, transfer: str) -> str | None:
        """The phase of a running transfer."""
        if role == "source":
            outgoing = self._machine.sources.running.get(transfer)
            return outgoing.phase if outgoing else None
        incoming = self._machine.targets.running.get(transfer)
        return incoming.phase if incoming else None

    def _track(self, role: Role, transfer: str, now: float, peer: Peer | None = None) -> Track:
        """Brought up to date with the machine. A transfer that doesn't run gets one that isn't kept."""
        phase = self._phase(role, transfer)
        track = self.tracks.get((role, transfer))
        if track is None:
            track = Track(role, phase or "", now, now)
            if phase is None:
                return track
            if len(self.tracks) > 64 + 2 * (len(self._machine.sources.running) + len(self._machine.targets.running)):
                self.prune()
            self.tracks[role, transfer] = track
        if phase is not None and phase != track.phase:
            self._leave(track, now)
            track.phase, track.phase_s = phase, now
        if peer is not None:
            track.progress[peer] = now
        return track

    def _leave(self, track: Track, now: float) -> None:
        self.numbers.took("kvferry_phase_seconds", track.role, track.phase, seconds=now - track.phase_s)

    def _add(
        self,
        now: float,
        event: str,
        role: Role,
        transfer: str,
        peer: Peer | None = None,
        nbytes: int = 0,
        values: dict[str, Value] | None = None,
    ) -> None:
        track = self._track(role, transfer, now, peer)
        self.log.add(now, event, transfer, role, _peer_name(peer), track.phase, nbytes, values)

    def _merge(self, now: float, event: str, role: Role, transfer: str, peer: Peer, nbytes: int, count: int) -> Track:
        track = self._track(role, transfer, now, peer)
        where = (event, transfer, role, _peer_name(peer), track.phase, nbytes)
        if (role, transfer) in self.tracks:
            self.log.merge(now, *where, count)
        else:
            self.log.add(now, *where)
        return track

    # events: calls

    def _send_call(self, call: SendCall, now: float) -> None:
        self._add(now, "send", "source", call.transfer, values=self._call(call, "source", now))

    def _extend_call(self, call: ExtendCall, now: float) -> None:
        self._add(now, "extend", "source", call.transfer, values={"groups": _wanted(call), "last": int(call.last)})

    def _receive_call(self, call: ReceiveCall, now: float) -> None:
        if call.connect_only:
            self._connects.add(call.transfer)
        values = self._call(call, "target", now)
        self._add(now, "receive", "target", call.transfer, values={"source": call.source, **values})

    def _call(self, call: SendCall | ReceiveCall, role: Role, now: float) -> dict[str, Value]:
        values: dict[str, Value] = {"groups": _wanted(call), "timeout_s": call.timeout_s}
        request = self._requests.pop((role, call.transfer), "")
        if request:
            self._track(role, call.transfer, now).request = values["request"] = request
        return values

    def _abort_call(self, call: AbortCall, now: float) -> None:
        self._add(now, "abort", call.role, call.transfer, values={"reason": call.reason})

    # events: messages

    def _received(self, event: Received, now: float) -> None:
        peer, body = event.sender, event.body
        if peer in self._machine.core.known:
            self.heard[peer] = now
        number, last = event.place.number, self._newest.get((peer, "heard"), 0)
        if number:
            if not event.place.after <= last < number:
                return  # heard before, or too early: the machine has dropped it
            self._newest[peer, "heard"] = number
        self._said(peer, body, now, "heard")

    def _sends(self, action: Send, now: float) -> None:
        number, last = action.place.number, self._newest.get((action.peer, "sent"), 0)
        if number:
            self._newest[action.peer, "sent"] = max(number, last)
        self._said(action.peer, action.body, now, "repeated" if 0 < number <= last else "sent")

    def _said(self, peer: Peer, body: Message, now: float, how: str) -> None:
        event = _event_name(type(body), how)
        if isinstance(body, (Hello, Welcome, Goodbye)):
            return self.log.add(now, event, peer=_peer_name(peer))
        transfer: str = getattr(body, "transfer", "")
        if not transfer:
            return None  # of peers only: that they live is in `heard`
        role = _role(body, how, peer.instance == self._machine.core.me.instance)
        if isinstance(body, Offer):
            wanted = sum(piece.bytes for piece in body.pieces)
            values: dict[str, Value] = {"pieces": len(body.pieces), "timeout_s": body.timeout_s}
            self._add(now, event, role, transfer, peer, wanted, values)
        elif isinstance(body, Grants):
            self._granted(peer, body, now, event, role, how)
        elif isinstance(body, ChunkDone):
            if how == "heard":  # what is sent is `written` at this moment
                self._merge(now, event, role, transfer, peer, body.bytes, 1)
                self._landed_in_pages(transfer, now)
        elif isinstance(body, Abort):
            self._add(now, event, role, transfer, peer, values={"kind": body.kind, "reason": body.reason})
        else:
            self._add(now, event, role, transfer, peer)

    def _granted(self, peer: Peer, body: Grants, now: float, event: str, role: Role, how: str) -> None:
        count, nbytes = len(body.grants), sum(grant.bytes for grant in body.grants)
        track = self._merge(now, event, role, body.transfer, peer, nbytes, count)
        if how == "sent" and ("target", body.transfer) in self.tracks:
            track.under_way += count
            self.numbers.moving["target"].start(now, count)

    # events: what was ordered of other threads

    def _orders(self, action: Prepare | Write | Scatter | Verify, now: float) -> None:
        kind = type(action).__name__.lower()
        nbytes = action.nbytes if isinstance(action, (Write, Scatter)) else 0
        self._jobs[_job(kind, action)] = (now, nbytes)
        if isinstance(action, Write):
            self.numbers.moving["source"].start(now)

    def _done(self, kind: str, event: Any, now: float) -> int:
        """Bytes of the job that has ended, well or badly."""
        ordered_s, nbytes = self._jobs.pop(_job(kind, event), (now, 0))
        self.numbers.took("kvferry_step_seconds", kind, seconds=now - ordered_s)
        if kind == "write":
            self.numbers.moving["source"].stop(now)
        return nbytes

    def _prepared(self, event: Prepared, now: float) -> None:
        self._done("prepare", event, now)
        pieces = sum(len(shipment.pieces) for shipment in event.shipments.values())
        values: dict[str, Value] = {"pieces": pieces, "copies": event.proof.copies}
        self._add(now, "planned", "target", event.transfer, None, event.proof.bytes, values)

    def _written(self, event: Written, now: float) -> None:
        nbytes = self._done("write", event, now)
        self._merge(now, "written", "source", event.transfer, event.peer, nbytes, 1)
        self._moved("source", event.way, event.gathered, nbytes, event.copies)
        self.numbers.count("kvferry_descriptors_total", event.way, by=1 if event.gathered else event.copies)

    def _scattered(self, event: Scattered, now: float) -> None:
        nbytes = self._done("scatter", event, now)
        track = self._merge(now, "scattered", "target", event.transfer, event.peer, nbytes, 1)
        self._arrived(track, nbytes, event.copies, now)

    def _landed_in_pages(self, transfer: str, now: float) -> None:
        """A piece that needs no scatter is in its pages as soon as the source has said so."""
        incoming, track = self._machine.targets.running.get(transfer), self.tracks.get(("target", transfer))
        if track is not None and incoming is not None and incoming.bytes > track.landed_bytes:
            self._arrived(track, incoming.bytes - track.landed_bytes, 0, now)

    def _arrived(self, track: Track, nbytes: int, copies: int, now: float) -> None:
        """`copies` out of a slot; none where the source wrote straight into the pages."""
        track.landed_bytes += nbytes
        self._moved("target", "", bool(copies), nbytes, copies)
        if track.under_way:
            track.under_way -= 1
            self.numbers.moving["target"].stop(now)

    def _moved(self, role: Role, way: str, staged: bool, nbytes: int, copies: int) -> None:
        self.numbers.count("kvferry_bytes_total", role, way, "yes" if staged else "no", by=nbytes)
        self.numbers.count("kvferry_pieces_total", role)
        if copies:
            self.numbers.count("kvferry_copies_total", role, by=copies)

    def _verified(self, event: Verified, now: float) -> None:
        self._done("verify", event, now)
        self._add(now, "verified", "target", event.transfer)

    def _job_failed(self, event: PrepareFailed | WriteFailed | ScatterFailed | VerifyFailed, now: float) -> None:
        kind = type(event).__name__.removesuffix("Failed").lower()
        self._done(kind, event, now)
        role: Role = "source" if kind == "write" else "target"
        peer: Peer | None = getattr(event, "peer", None)
        self._add(now, f"{kind} failed", role, event.transfer, peer, values={"problem": str(event.error)})

    # events: registry and peers

    def _found(self, event: Found, now: float) -> None:
        self._problems.pop(event.instance, None)
        self.log.add(now, "found", values={"instance": event.instance, "workers": len(event.entries)})

    def _not_found(self, event: NotFound, now: float) -> None:
        """Asked again and again: told when the answer changes."""
        if self._problems.get(event.instance) != event.problem:
            if len(self._problems) >= 64:
                self._problems.clear()
            self._problems[event.instance] = event.problem
            self.log.add(now, "not found", values={"instance": event.instance, "problem": event.problem})

    def _died(self, event: Died, now: float) -> None:
        self.log.add(now, "process ended", peer=_peer_name(event.peer))

    def _closed(self, action: Close, now: float) -> None:
        self.heard.pop(action.peer, None)
        for how in ("heard", "sent"):
            self._newest.pop((action.peer, how), None)
        self.log.add(now, "line closed", peer=_peer_name(action.peer))

    def _note(self, action: Note, now: float) -> None:
        self.log.add(now, "note", values={"text": action.text})

    # the end

    def _ended(self, action: Ended, now: float) -> None:
        role, transfer, error = action.role, action.transfer, action.error
        track = self.tracks.pop((role, transfer), None)
        outcome, phase = "done", "done"
        peer, values = "", dict[str, Value]()
        if error is not None:
            outcome, phase, peer = kind_of(error), error.where.phase, error.where.peer
            values = {"outcome": outcome, "problem": error.problem}
        elif action.report is not None:
            values = self._report(role, action.report, track, now)
        nbytes = action.report.bytes if action.report else 0
        self.log.add(now, "failed" if error else "done", transfer, role, peer, phase, nbytes, values)
        self.log.forget(transfer)
        if transfer in self._connects:
            self._connects.discard(transfer)
            return
        self.numbers.count("kvferry_transfers_total", role, outcome, phase)
        if track is not None:
            self._leave(track, now)
            self.numbers.took("kvferry_transfer_seconds", role, outcome, seconds=now - track.started_s)
            self.numbers.moving["target"].stop(now, track.under_way)
        if isinstance(error, TransferError) and outcome != "aborted":
            self.failed(transfer)

    def _report(self, role: Role, report: Report, track: Track | None, now: float) -> dict[str, Value]:
        if role == "target" and track is not None and report.bytes > track.landed_bytes:
            self._arrived(track, report.bytes - track.landed_bytes, 0, now)  # the piece in pages that ended it
        return {"copies": report.copies, "chunks": report.chunks, "seconds": round(report.seconds, 6)}

    def _released(self, action: Released, now: float) -> None:
        self.log.add(now, "pages released", action.transfer, "target")


def _role(body: Message, how: str, sibling: bool) -> Role:
    """Our role in the transfer that a message is about; `sibling`: with another rank of our instance."""
    if sibling:
        return "target"
    heard = how == "heard"
    if isinstance(body, Abort):  # it names its receiver's role
        return body.role if heard else _OTHER[body.role]
    return "source" if isinstance(body, (Offer, Grants, Complete)) == heard else "target"


@cache
def _event_name(kind: type, how: str) -> str:
    name = kind.__name__.lower()
    return f"{_SAID.get(name, name)} {how}"


@lru_cache(maxsize=4096)
def _peer_name(peer: Peer | None) -> str:
    return str(peer) if peer else ""


def _wanted(call: SendCall | ExtendCall | ReceiveCall) -> str:
    """What a call names, as people write it: `attn 0-4096, state 7`."""
    named = []
    for name, wanted in call.groups.items():
        start, stop = wanted.token_range
        named.append(f"{name} {start}-{stop}")
    return ", ".join(named)


def _job(kind: str, job: Any) -> tuple[str, str, Peer | None, int]:
    return kind, job.transfer, getattr(job, "peer", None), getattr(job, "piece", -1)
