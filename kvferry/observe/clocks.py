"""Whose event came first, where a story was told on several hosts.

Processes of one boot of one machine share CLOCK_MONOTONIC, so their order is exact. Between machines only wall clocks
can be compared, and they differ. But nothing is heard before it was said: each message from A to B bounds the
difference from above, each from B to A from below, and the messages of a transfer go both ways. The middle of the
bounds is taken; half their distance, at most half of the fastest round trip, is what the order may be wrong by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.layout.document import Struct
from kvferry.observe.records import Log, Record

_BEGINNINGS = ("send", "receive", "offer heard")


class Clock(Struct, frozen=True):
    """A host's wall clock is ahead of the first host's by `ahead_s`, give or take `error_s`.

    `error_s` is None where no messages went both ways: the wall clocks are believed then.
    """

    host: str
    ahead_s: float
    error_s: float | None


@dataclass(frozen=True)
class Clocks:
    """By machine: `wall_s`, what its wall clock showed when its monotonic clock began, and `ahead_s`, by how much that
    is ahead of the first machine's.
    """

    wall_s: dict[str, float]
    ahead_s: dict[str, float]
    hosts: tuple[Clock, ...]

    def time(self, log: Log, record: Record) -> float:
        """By the first machine's wall clock."""
        return self.wall_s[_machine(log)] + record.mono_s - self.ahead_s[_machine(log)]


def common_clock(logs: Sequence[Log], transfer: str) -> Clocks:
    """`logs`: one per endpoint. The clock of the first of them is everybody's."""
    hosts = {_machine(log): log.head.host for log in logs}
    left = list(hosts)
    ahead, errors = dict.fromkeys(left[:1], 0.0), dict.fromkeys(left[:1], 0.0)
    del left[:1]
    found = []
    wall_s: dict[str, float] = {}
    for log in logs:  # one word for each machine: its clock may have been set between two logs
        wall_s.setdefault(_machine(log), log.head.wall_s - log.head.mono_s)
    said, heard = _firsts(logs, transfer, " sent", wall_s), _firsts(logs, transfer, " heard", wall_s)
    while left:
        pairs = [(placed, other, *_bounds(said, heard, placed, other)) for placed in ahead for other in left]
        placed, other, low, high = min(pairs, key=lambda pair: pair[3] - pair[2] if pair[2] <= pair[3] else math.inf)
        known = math.isfinite(low) and math.isfinite(high) and low <= high
        ahead[other] = ahead[placed] + (low + high) / 2 if known else 0.0
        errors[other] = errors[placed] + (high - low) / 2 if known else math.inf
        left.remove(other)
        found.append(Clock(hosts[other], ahead[other], errors[other] if math.isfinite(errors[other]) else None))
    return Clocks(wall_s, ahead, tuple(found))


_Heard = dict[tuple[str, str, str], tuple[str, float]]
"""By (sender, receiver, kind of message): on which machine, and when by its wall clock."""


def _bounds(said: _Heard, heard: _Heard, first: str, other: str) -> tuple[float, float]:
    """How far `other`'s wall clock is ahead of `first`'s, at least and at most."""
    low, high = -math.inf, math.inf
    for key, (from_machine, said_s) in said.items():
        to_machine, heard_s = heard.get(key, ("", 0.0))
        if (from_machine, to_machine) == (first, other):
            high = min(high, heard_s - said_s)
        elif (from_machine, to_machine) == (other, first):
            low = max(low, said_s - heard_s)
    return low, high


def _firsts(logs: Sequence[Log], transfer: str, how: str, wall_s: dict[str, float]) -> _Heard:
    """When each kind of message was first said, or first heard. Whatever was lost on the way, the first that was heard
    is no older than the first that was said. Logs that have forgotten the transfer's beginning don't know the first.
    """
    found: _Heard = {}
    for log in logs:
        records = [record for record in log.records if record.transfer == transfer]
        if records and log.head.lost and not any(record.event in _BEGINNINGS for record in records):
            continue
        for record in records:
            if record.event.endswith(how) and record.peer:
                ends = (log.head.worker, record.peer) if how == " sent" else (record.peer, log.head.worker)
                at_s = wall_s[_machine(log)] + record.mono_s
                found.setdefault((*ends, record.event.removesuffix(how)), (_machine(log), at_s))
    return found


def _machine(log: Log) -> str:
    return log.head.boot or log.head.host
