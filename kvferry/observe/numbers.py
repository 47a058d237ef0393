"""What an endpoint counts, as plain data: counters, gauges and histograms by name and labels. Nothing here locks.

`FAMILIES` is the one list of names. They follow Prometheus' conventions: base units, `_total` for counters. Labels are
bounded: roles, phases, outcomes, ways, reasons, and of peers only those that somebody waits for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from kvferry.observe.records import Sample

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histograms' buckets, in seconds; one more has no bound."""
REASONS = 64
"""Reasons for refused messages that are told apart; the others are one."""


@dataclass(frozen=True)
class Family:
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


FAMILIES: dict[str, Family] = {
    "kvferry_transfers_total": Family(
        "counter", ("role", "outcome", "phase"), "Transfers that have ended, by outcome and the phase they ended in"
    ),
    "kvferry_transfer_seconds": Family("histogram", ("role", "outcome"), "From the call to the end of a transfer"),
    "kvferry_phase_seconds": Family("histogram", ("role", "phase"), "Time that transfers spent in a phase"),
    "kvferry_step_seconds": Family(
        "histogram", ("step",), "From order to end of a plan, a write of a piece, a scatter or a check of digests"
    ),
    "kvferry_bytes_total": Family(
        "counter",
        ("role", "way", "staged"),
        "Bytes that have really been moved; staged: gathered by a source, or landed in slots of a target",
    ),
    "kvferry_moving_seconds_total": Family(
        "counter", ("role",), "Time with at least one piece between its post and its completion"
    ),
    "kvferry_pieces_total": Family("counter", ("role",), "Pieces that have been moved"),
    "kvferry_copies_total": Family("counter", ("role",), "Runs of the cache's pages that were copied or written"),
    "kvferry_descriptors_total": Family("counter", ("way",), "Descriptors that were posted: one per write or run"),
    "kvferry_transfers_running": Family("gauge", ("role", "phase"), "Transfers that run, by phase"),
    "kvferry_transfer_waiting_seconds": Family(
        "gauge", ("role", "phase", "peer"), "The longest that a transfer waits for a peer without progress"
    ),
    "kvferry_offers_waiting": Family("gauge", (), "Offers of peers that wait for this worker's own send"),
    "kvferry_slots": Family(
        "gauge", ("state",), "Landing slots: free, used, or quarantined since a writer is in doubt"
    ),
    "kvferry_leases": Family("gauge", (), "Grants that peers hold now"),
    "kvferry_pieces_quarantined": Family("gauge", (), "Pieces of the cache's own pages whose writer is in doubt"),
    "kvferry_peers": Family("gauge", ("state",), "Peers: connected, greeting (no answer yet), or silent while awaited"),
    "kvferry_messages_refused_total": Family("counter", ("reason",), "Messages that were dropped"),
    "kvferry_messages_repeated_total": Family("counter", (), "Messages said again since they were not heard"),
    "kvferry_log_records_lost_total": Family("counter", (), "Records that the event log has forgotten to make room"),
    "kvferry_trace_files_total": Family("counter", ("outcome",), "Logs of failed transfers written, skipped or failed"),
}
OUTCOMES = ("done", "aborted", "refused", "timeout", "lost", "corrupted")
Key = tuple[str, tuple[str, ...]]


@dataclass
class Histogram:
    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.seconds += seconds


class Stopwatch:
    """Runs while something is open. Its time goes on with each piece, not at the end of a transfer, so that bytes per
    second of it is a speed at any moment.
    """

    def __init__(self) -> None:
        self._open = 0
        self._since_s = 0.0
        self._seconds = 0.0

    def start(self, now: float, count: int = 1) -> None:
        self.seconds(now)
        self._open += count

    def stop(self, now: float, count: int = 1) -> None:
        self.seconds(now)
        self._open -= count

    def seconds(self, now: float) -> float:
        if self._open:
            self._seconds += now - self._since_s
        self._since_s = now
        return self._seconds


class Numbers:
    """Counters and histograms; gauges are looked up when somebody asks."""

    def __init__(self) -> None:
        self.counters: Counter[Key] = Counter()
        self._histograms: dict[Key, Histogram] = {}
        self.moving = {"source": Stopwatch(), "target": Stopwatch()}

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        self.counters[name, labels] += by  # type: ignore[assignment]  # Counter is for int to mypy

    def took(self, name: str, *labels: str, seconds: float) -> None:
        key = (name, labels)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = Histogram()
        found.add(seconds)

    def samples(self, now: float) -> list[Sample]:
        counted = [Sample(name, labels, value) for (name, labels), value in self.counters.items()]
        timed = [Sample(name, labels, h.seconds, tuple(h.buckets)) for (name, labels), h in self._histograms.items()]
        name = "kvferry_moving_seconds_total"
        return [*counted, *timed, *(Sample(name, (role,), watch.seconds(now)) for role, watch in self.moving.items())]


def refusals(counters: Counter[str]) -> list[Sample]:
    """Of the state machine's own counters. A reason is cut where it begins to tell particulars."""
    reasons: Counter[str] = Counter()
    for text, count in counters.items():
        kind, _, reason = text.partition(": ")
        if kind == "refused" and reason:
            name = reason.partition(":")[0]
            reasons[name if name in reasons or len(reasons) < REASONS else "other"] += count
    return [Sample("kvferry_messages_refused_total", (reason,), count) for reason, count in reasons.items()]
