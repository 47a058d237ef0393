"""Mistakes that a session's state machine could have. Each changes one rule of it, for the tests of the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest import MonkeyPatch

from kvferry.session import events as e
from kvferry.session.core import Core
from kvferry.session.delivery import Delivery
from kvferry.session.messages import Beat, ChunkDone, Complete, Peer, Place
from kvferry.session.slots import Lease, Ledger
from kvferry.session.source import Sources
from kvferry.session.target import Incoming, Targets

Plant = Callable[[MonkeyPatch], None]


def quarantine_ends_by_time(patch: MonkeyPatch) -> None:
    quarantine, tick = Ledger.quarantine, Core.tick

    def doubt(self: Any, lease: Lease) -> None:
        quarantine(self, lease)
        self.__dict__.setdefault("since_s", {})[lease.transfer, lease.peer] = None

    def impatient(self: Core) -> None:
        tick(self)
        waiting = self.ledger.__dict__.setdefault("since_s", {})
        for key, since_s in list(waiting.items()):
            waiting[key] = self.now if since_s is None else since_s
            if self.now - waiting[key] > 5:
                self.ledger.clear(*key)
                del waiting[key]

    patch.setattr(Ledger, "quarantine", doubt)
    patch.setattr(Core, "tick", impatient)


def failed_slots_are_free_at_once(patch: MonkeyPatch) -> None:
    patch.setattr(Ledger, "quarantine", Ledger.release)


def failed_pages_are_free_at_once(patch: MonkeyPatch) -> None:
    end = Targets._end
    patch.setattr(Targets, "_end", lambda self, t, ended: end(self, t, replace(ended, pages_held=False)))


def abort_is_acknowledged_while_writing(patch: MonkeyPatch) -> None:
    def hasty(self: Sources, transfer: str, peer: Peer) -> None:
        writing, self._writing = self._writing, {}
        acknowledge(self, transfer, peer)
        self._writing = writing

    acknowledge = Sources._acknowledge
    patch.setattr(Sources, "_acknowledge", hasty)


def nothing_is_said_again(patch: MonkeyPatch) -> None:
    def answer(self: Delivery, peer: Peer, beat: Beat) -> None:
        if beat.ask:
            self.say(peer, Beat(False))

    patch.setattr(Delivery, "on_beat", answer)


def death_leaves_quarantine(patch: MonkeyPatch) -> None:
    patch.setattr(Ledger, "clear_dead", lambda *_: None)


def _changed_report(patch: MonkeyPatch, change: Callable[[Any, ChunkDone], ChunkDone]) -> None:
    """`change` gets the flow that a report is about."""
    on_chunk_done = Targets.on_chunk_done

    def changed(self: Targets, peer: Peer, body: ChunkDone) -> None:
        t = self.running.get(body.transfer)
        flow = t.flows.get(peer) if t is not None else None
        on_chunk_done(self, peer, change(flow, body) if flow is not None else body)

    patch.setattr(Targets, "on_chunk_done", changed)


def grants_are_not_compared(patch: MonkeyPatch) -> None:
    def forgiving(flow: Any, body: ChunkDone) -> ChunkDone:
        lease = flow.granted.get(body.piece)
        return replace_struct(body, grant=lease.grant) if lease is not None else body

    _changed_report(patch, forgiving)


def a_report_counts_as_often_as_it_comes(patch: MonkeyPatch) -> None:
    def counting(flow: Any, body: ChunkDone) -> ChunkDone:
        if body.piece not in flow.granted and flow.granted:
            piece, lease = next(iter(flow.granted.items()))
            return replace_struct(body, piece=piece, grant=lease.grant, bytes=lease.nbytes)
        return body

    def credulous(self: Delivery, peer: Peer, place: Place) -> bool:
        hear(self, peer, place)
        return True

    hear = Delivery.hear
    patch.setattr(Delivery, "hear", credulous)
    _changed_report(patch, counting)


def digests_are_not_compared(patch: MonkeyPatch) -> None:
    verified = Targets.verified

    def blind(self: Targets, event: e.Verified | e.VerifyFailed) -> None:
        if isinstance(event, e.Verified) and event.transfer in self.running:
            event = e.Verified(event.transfer, dict(self.running[event.transfer].sums))
        verified(self, event)

    patch.setattr(Targets, "verified", blind)


def commit_before_scatter(patch: MonkeyPatch) -> None:
    def landed(self: Targets, t: Incoming, peer: Peer, lease: Lease, copies: int) -> None:
        """Nothing: it has counted already."""

    count, on_chunk_done = Targets._landed, Targets.on_chunk_done

    def early(self: Targets, peer: Peer, body: ChunkDone) -> None:
        t = self.running.get(body.transfer)
        flow = t.flows.get(peer) if t is not None else None
        lease = flow.granted.get(body.piece) if flow is not None else None
        on_chunk_done(self, peer, body)
        if t is not None and lease is not None and lease.slot is not None and (peer, body.piece) in t.scattering:
            count(self, t, peer, lease, 1)

    patch.setattr(Targets, "_landed", landed)
    patch.setattr(Targets, "on_chunk_done", early)


def pages_end_while_a_scatter_runs(patch: MonkeyPatch) -> None:
    fail = Targets.fail

    def hasty(self: Targets, t: Incoming, *arguments: Any) -> None:
        fail(self, t, *arguments)
        if t.scattering and t.error is not None:
            self._core.out.append(t.error)
            t.error = None

    patch.setattr(Targets, "fail", hasty)


def fences_are_forgotten(patch: MonkeyPatch) -> None:
    add = Sources._add
    patch.setattr(Sources, "_add", lambda self, o, call: add(self, o, replace(call, fence=None)))


def one_taker_is_enough(patch: MonkeyPatch) -> None:
    on_complete = Sources.on_complete

    def hasty(self: Sources, peer: Peer, body: Complete) -> None:
        o = self.running.get(body.transfer)
        if o is not None:
            for taker in o.takers.values():
                taker.complete = taker.complete or taker.written > 0
        on_complete(self, peer, body)

    patch.setattr(Sources, "on_complete", hasty)


def the_leader_does_not_wait(patch: MonkeyPatch) -> None:
    progress = Targets._progress

    def hasty(self: Targets, t: Incoming) -> None:
        t.landed |= set(t.ranks)
        progress(self, t)

    patch.setattr(Targets, "_progress", hasty)


def deadlines_are_forgotten(patch: MonkeyPatch) -> None:
    patch.setattr(Sources, "tick", lambda *_: None)


def replace_struct(struct: Any, **changes: Any) -> Any:
    return type(struct)(**{name: getattr(struct, name) for name in struct.__struct_fields__} | changes)


PLANTS: list[Plant] = [
    quarantine_ends_by_time, failed_slots_are_free_at_once, failed_pages_are_free_at_once,
    abort_is_acknowledged_while_writing, nothing_is_said_again, death_leaves_quarantine, grants_are_not_compared,
    a_report_counts_as_often_as_it_comes, digests_are_not_compared, commit_before_scatter,
    pages_end_while_a_scatter_runs, fences_are_forgotten, one_taker_is_enough, the_leader_does_not_wait,
    deadlines_are_forgotten,
]  # fmt: skip
