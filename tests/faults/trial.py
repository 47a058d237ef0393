"""Plays one cell: a transfer is held in a phase, hurt there, goes on, and everything about its end is looked at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.cells import Cell, allowed
from tests.faults.stage import Play, Seat, Stage, until
from tests.session.crew import RemoteError

SLACK_S = 1.5
"""An end that a deadline brings may be seen this much later: two cores run four processes."""
PAUSE_S = 0.3


@dataclass(frozen=True)
class End:
    how: str
    text: str
    elapsed_s: float


@dataclass
class Row:
    """What the table says of one cell."""

    cell: Cell
    ends: dict[str, End] = field(default_factory=dict)
    wrong_bytes: int = -1
    pages_held: int = -1
    slots_held: int = -1
    settled_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> str:
        return ", ".join(f"{who} {end.how}" for who, end in self.ends.items()) or "nobody is left"

    @property
    def seconds(self) -> float:
        return max((end.elapsed_s for end in self.ends.values()), default=0.0)


def play(stage: Stage, cell: Cell) -> Row:
    row = Row(cell)
    try:
        Trial(stage, cell, row).run()
    except (AssertionError, RemoteError, TimeoutError) as error:
        row.problems.append(f"it could not be played to the end: {error}")
    return row


class Trial:
    def __init__(self, stage: Stage, cell: Cell, row: Row) -> None:
        self.stage, self.cell, self.row = stage, cell, row
        self.play = Play(stage, cell.timeout_s)
        seats = {"prefill": stage.prefill, "decode": stage.decode[cell.victim_rank]}
        self.victim = seats.get(cell.victim)
        self.other_decode = stage.decode[1 - cell.victim_rank]
        self.takes_part: list[Seat] = []
        self.holding: list[Seat] = []
        self.calls: list[tuple[Seat, Callable[[], None]]] = []  # that come after the fault

    def run(self) -> None:
        self.begin()
        self.hurt()
        self.go_on(lambda seat: seat.alive and not seat.stopped)
        if self.cell.fault == "pause":
            time.sleep(PAUSE_S)
            self.heal()
            self.go_on(lambda seat: True)
        self.see_ends(lambda seat: seat.alive and not seat.stopped)
        if self.cell.fault != "pause":
            self.heal()
            self.go_on(lambda seat: True)
            self.see_ends(lambda seat: True)
        self.settle()

    # until the transfer is in its phase

    def begin(self) -> None:
        phase, order = self.cell.phase, self.cell.order
        self.hold(phase)
        sends = (self.stage.prefill, self.play.send)
        receives = [(seat, lambda seat=seat: self.play.receive(seat)) for seat in self.stage.decode]
        if order == "ready-first":
            self.call(*sends)
        if self.cell.unmatched:
            self.calls += receives
        else:
            for call in receives:
                self.call(*call)
        if order == "offer-first":
            if phase in ("preparing", "matching"):
                self.calls.append(sends)
            else:
                self.see(lambda: self.stage.prefill("takers", self.play.transfer) == 2, "both offers are there")
                self.call(*sends)
        self.see_phase()

    def hold(self, phase: str) -> None:
        decode = self.stage.decode
        self.holding = {
            "preparing": decode,
            "matching": [],
            "moving": [self.stage.prefill],
            "landing": decode,
            "committing": [self.other_decode],
        }[phase].copy()
        if not self.cell.unmatched:
            for seat in self.holding:
                seat("hold", "landing" if phase == "committing" else phase)

    def call(self, seat: Seat, call: Callable[[], None]) -> None:
        call()
        self.takes_part.append(seat)

    def see_phase(self) -> None:
        """The transfer is where it is to be hurt, for certain, and stays there."""
        cell, transfer = self.cell, self.play.transfer
        if cell.unmatched:
            return
        for seat in self.holding:
            self.see(lambda seat=seat: seat("held"), f"{seat} is held")
        if cell.phase == "matching":
            self.see(lambda: self.stage.prefill("takers", transfer) == 2, "both offers are there")
        there = [s for s in self.stage.decode if not (cell.phase == "committing" and s is self.other_decode)]
        at = (cell.phase, "verifying") if cell.phase == "landing" else (cell.phase,)
        for seat in there:
            self.see(lambda seat=seat: seat("phase", transfer) in at, f"{seat} is {cell.phase}")

    def see(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, 0.8 * self.cell.timeout_s)

    # the fault

    def hurt(self) -> None:
        fault, hurt = self.cell.fault, self.victim or self.stage.registry
        if fault in ("kill", "restart"):
            hurt.kill()
            if fault == "restart":
                hurt.start()
        elif fault in ("stop", "pause"):
            hurt.stop()
        elif fault == "cut":
            hurt.proxy.cut()
        elif fault == "blink":
            hurt.proxy.blink()
        else:
            assert self.victim is not None
            self.victim("abort", self.play.transfer, "the user went away")

    def go_on(self, can: Callable[[Seat], bool]) -> None:
        """Whoever can is held no longer, and makes the calls that are left."""
        for seat in [seat for seat in self.holding if can(seat)]:
            seat("release")
            self.holding.remove(seat)
        for seat, call in [left for left in self.calls if can(left[0])]:
            self.calls.remove((seat, call))
            if not self.was_replaced(seat):
                self.call(seat, call)

    def was_replaced(self, seat: Seat) -> bool:
        """Whether the process that the request was for is gone. A request that comes later is for the new one."""
        later = self.cell.fault == "restart" and self.cell.unmatched and seat.instance == "decode"
        return seat is self.victim and self.cell.fault in ("kill", "restart") and not later

    def see_ends(self, can: Callable[[Seat], bool]) -> None:
        for seat in [seat for seat in self.takes_part if can(seat)]:
            self.takes_part.remove(seat)
            if self.was_replaced(seat):
                continue
            end = End(*seat("end", self.play.transfer))
            self.row.ends[str(seat)] = end
            if seat.instance == "decode" and end.how != "done":
                self.see_pages_free(seat)
            self.play.ended(seat, end.how)

    def see_pages_free(self, seat: Seat) -> None:
        """With direct landing only the writer's word or death gives them back, so it must be able to speak first."""
        if not seat("pages_free", self.play.transfer):
            self.heal()
            self.go_on(lambda seat: True)
            until(lambda: seat("pages_free", self.play.transfer), f"the pages of {seat} are free")

    # afterwards

    def heal(self) -> None:
        fault, hurt = self.cell.fault, self.victim or self.stage.registry
        if fault == "kill" and not hurt.alive:
            hurt.start()
        elif fault in ("stop", "pause"):
            hurt.go_on()
        elif fault == "cut" and hurt.proxy.is_cut:
            hurt.proxy.heal()

    def settle(self) -> None:
        """Nothing may be held, nothing may be wrong, and the next transfer must work."""
        row, began_s = self.row, time.monotonic()
        row.problems += self.wrong_ends()
        try:
            until(lambda: self.stage.held() == (0, 0), "nothing is held")
        except AssertionError:
            row.problems.append("pages or slots are held for good")
        row.settled_s = time.monotonic() - began_s
        row.pages_held, row.slots_held = self.stage.held()
        row.wrong_bytes = self.stage.wrong_bytes()
        if row.wrong_bytes:
            row.problems.append(f"{row.wrong_bytes} wrong bytes")
        try:
            Play(self.stage).cross()
        except AssertionError as error:
            row.problems.append(f"the next transfer: {error}")

    def wrong_ends(self) -> list[str]:
        problems = []
        for who, end in self.row.ends.items():
            right = allowed(self.cell)[who.partition("/")[0]]
            if end.how not in right:
                problems.append(f"{who} ended as {end.how}, not {' or '.join(sorted(right))}: {end.text}")
            if end.how != "done" and not ("transfer " in end.text and ", phase " in end.text):
                problems.append(f"{who}: the error does not say what it is about: {end.text}")
            if end.elapsed_s > self.cell.timeout_s + SLACK_S and not self.was_stopped(who):
                problems.append(f"{who} ended after {end.elapsed_s:.1f} s, its deadline was {self.cell.timeout_s:g} s")
        return problems

    def was_stopped(self, who: str) -> bool:
        return self.cell.fault == "stop" and who == str(self.victim)
