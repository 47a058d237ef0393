"""What a soak does to its processes, when, and which failed requests that explains."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from kvferry.cli.soak.fleet import Fleet, RegistrySeat, Seat, WorkerSeat

GAP_S = (0.3, 3.0)
"""From one fault to the next."""
AFTER_S = 3.0
"""How long a fault explains failures once it is mended: an entry of the registry may be that old."""
AT_ONCE = 2
"""Seats that are stopped or dead at the same time, at most."""


@dataclass
class Fault:
    """`scope`: the instance, or the registry, that was hurt."""

    kind: str
    scope: str
    began_s: float
    seat: Seat
    until_s: float
    mended_s: float | None = None


class Faults:
    def __init__(self, rng: random.Random, fleet: Fleet, now: float) -> None:
        self._rng, self._fleet = rng, fleet
        self._next_s = now + rng.uniform(*GAP_S)
        self.log: list[Fault] = []
        self.counts: Counter[str] = Counter()

    def tick(self, now: float) -> list[Seat]:
        """Mend what is due, and hurt the next one; seats whose process was killed just now."""
        for fault in self._open():
            if fault.until_s <= now:
                self._mend(fault, now)
        if self._next_s > now or len(self._open()) >= AT_ONCE:
            return []
        self._next_s = now + self._rng.uniform(*GAP_S)
        healthy = [seat for seat in self._fleet.seats if seat.state == "open"]
        if not healthy:
            return []
        seat = self._rng.choice(healthy)
        return [seat] if self._hurt(seat, now) == "kill" else []

    def heal(self, now: float) -> None:
        for fault in self._open():
            self._mend(fault, now)

    def explain(self, source: str, target: str, began_s: float, ended_s: float) -> bool:
        """Whether something was done, while a request between these ran, to anybody that it may have needed."""
        scopes = (source, target, RegistrySeat.NAME)
        return any(
            fault.scope in scopes
            and fault.began_s <= ended_s
            and (fault.mended_s is None or fault.mended_s + AFTER_S >= began_s)
            for fault in self.log
        )

    def _open(self) -> list[Fault]:
        return [fault for fault in self.log if fault.mended_s is None]

    def _hurt(self, seat: Seat, now: float) -> str:
        rng = self._rng
        kind = rng.choice(("kill", "pause", "long pause") if rng.random() < 0.5 else ("kill", "pause"))
        lasts_s = {"kill": (0.0, 1.0), "pause": (0.05, 1.0), "long pause": (3.0, 9.0)}[kind]
        scope = seat.instance if isinstance(seat, WorkerSeat) else seat.name
        self.log.append(Fault(kind, scope, now, seat, now + rng.uniform(*lasts_s)))
        self.counts[f"{kind} of {'the registry' if scope == seat.name else 'a worker'}"] += 1
        if kind == "kill":
            seat.kill()
        else:
            seat.stop()
        return kind

    def _mend(self, fault: Fault, now: float) -> None:
        fault.mended_s = now
        if fault.kind == "kill":
            fault.seat.start()
        else:
            fault.seat.go_on()
