"""Everything that an endpoint tells of itself at one moment, as a kvferry-trace/1 log."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

from kvferry import __version__
from kvferry.observe.log import as_records
from kvferry.observe.numbers import refusals
from kvferry.observe.observer import Observer
from kvferry.observe.records import Head, Log, Sample, State, short
from kvferry.observe.waits import states
from kvferry.session.clock import now_s
from kvferry.session.machine import Machine
from kvferry.session.messages import Peer

SILENT_S = 1.5
"""A peer that is waited for and has said nothing for so long counts as silent here: it is asked every second."""
WAITED_FOR = 32
"""Peers that are told apart in one family, those waited for longest; more could make too many time series."""
LIVE: set[Snapshots] = set()
"""Of the endpoints of this process that are open."""


class Snapshots:
    """`lock` is the endpoint's."""

    def __init__(self, machine: Machine, observer: Observer, lock: AbstractContextManager[object]) -> None:
        self._machine, self._observer, self._lock = machine, observer, lock
        self._boot = _boot()

    def take(self, records: bool = True, file: str = "", transfer: str = "") -> Log:
        """`transfer`: only records of this one, and those of no transfer at all."""
        with self._lock:
            now = now_s()
            running = states(self._machine, self._observer, now)
            samples = self._samples(running, now)
            entries = self._observer.log.entries() if records else []
            head = self._head(self._machine.core.me, now, file)
        if transfer:
            entries = [entry for entry in entries if entry.transfer in ("", transfer)]
            running = [state for state in running if state.transfer == transfer]
        return Log(head, tuple(running), tuple(samples), as_records(entries))

    def _head(self, me: Peer, now: float, file: str) -> Head:
        who = (me.instance, me.generation, me.rank, os.getpid(), socket.gethostname(), self._boot, __version__)
        return Head("kvferry-trace/1", *who, now, time.time(), self._observer.log.lost, file)

    def _samples(self, running: list[State], now: float) -> list[Sample]:
        machine, observer = self._machine, self._observer
        counts = machine.core.ledger.counts()
        early = sum(1 for o in machine.sources.running.values() if not o.called)
        slots = [Sample("kvferry_slots", (s,), counts[f"slots_{s}"]) for s in ("free", "used", "quarantined")]
        return [
            *observer.numbers.samples(now),
            *_running(running),
            *slots,
            Sample("kvferry_offers_waiting", (), early),
            Sample("kvferry_leases", (), machine.core.ledger.leases),
            Sample("kvferry_pieces_quarantined", (), counts["pieces_quarantined"]),
            *_peers(machine, running),
            Sample("kvferry_messages_repeated_total", (), machine.core.delivery.repeated),
            *refusals(machine.core.counters),
            Sample("kvferry_log_records_lost_total", (), observer.log.lost),
        ]


def _running(running: list[State]) -> list[Sample]:
    phases = Counter((state.role, state.phase) for state in running)
    waiting: dict[tuple[str, ...], float] = {}
    for state in running:
        for wait in state.waits:
            if wait.peer:
                key = (state.role, state.phase, short(wait.peer))
                waiting[key] = max(waiting.get(key, 0.0), wait.since_s)
    longest = sorted(waiting.items(), key=lambda item: -item[1])[:WAITED_FOR]
    found = [Sample("kvferry_transfers_running", key, count) for key, count in phases.items()]
    return found + [Sample("kvferry_transfer_waiting_seconds", key, seconds) for key, seconds in longest]


def _peers(machine: Machine, running: list[State]) -> list[Sample]:
    quiet = {w.peer for state in running for w in state.waits if w.quiet_s is not None and w.quiet_s > SILENT_S}
    silent = sum(1 for peer in machine.core.known if str(peer) in quiet)
    counts = {"connected": len(machine.core.known) - silent, "silent": silent, "greeting": machine.core.greeting}
    return [Sample("kvferry_peers", (state,), count) for state, count in counts.items()]


def _boot() -> str:
    """Names this boot of this machine, whose processes share a monotonic clock; empty where that isn't known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
