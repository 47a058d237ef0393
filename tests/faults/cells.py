"""The cells of the fault matrix: what can happen to whom and when, which of it can't be, and how each may end."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass
from typing import TypeAlias

FAULTS = {
    "kill": "kill -9; started again when everybody has noticed",
    "restart": "kill -9, and started again at once, while the others still run",
    "stop": "SIGSTOP until the deadline has passed, then SIGCONT",
    "pause": "SIGSTOP and SIGCONT a moment later",
    "cut": "nothing that is said to it arrives, until the deadline has passed; then all connections break",
    "blink": "all connections to it break once",
    "abort": "its caller aborts the transfer",
}
VICTIMS = ("prefill", "decode", "registry")
PHASES = ("preparing", "matching", "moving", "landing", "committing")
ORDERS = ("offer-first", "ready-first")
TRANSPORTS = {
    "local": {"transport": "local"},
    "direct": {"transport": "process_vm", "landing": "pages"},
    "tcp": {"transport": "tcp"},
    "nixl": {"transport": "nixl"},
}
"""What endpoints are started with. `direct`: the source writes straight into the target's pages."""
AXES = (tuple(FAULTS), VICTIMS, PHASES, ORDERS, tuple(TRANSPORTS))
Pair: TypeAlias = frozenset[str]
SHORT_S, LONG_S = 3.0, 20.0


@dataclass(frozen=True)
class Cell:
    fault: str
    victim: str
    phase: str
    order: str
    transport: str

    def __str__(self) -> str:
        return " ".join(astuple(self))

    @property
    def pairs(self) -> set[Pair]:
        return {frozenset(pair) for pair in itertools.combinations(astuple(self), 2)}

    @property
    def victim_rank(self) -> int:
        """Which decode worker it is: the one that leads in half of the cells."""
        return 0 if self.victim != "decode" or self.order == "offer-first" else 1

    @property
    def unmatched(self) -> bool:
        """Whether the targets' receive() comes only after the fault."""
        late = self.phase == "preparing" and self.victim == "registry"
        return late or (self.phase == "matching" and self.order == "ready-first")

    @property
    def leader_can_commit(self) -> bool:
        """Whether the victim is a decode worker that has said already that everything has landed there."""
        return self.victim == "decode" and self.victim_rank != 0 and self.phase == "committing"

    @property
    def timeout_s(self) -> float:
        """Short where only the deadline can end it."""
        return SHORT_S if "timeout" in set().union(*allowed(self).values()) else LONG_S


def impossible(cell: Cell) -> str:
    """Why there is no such cell, or nothing."""
    before_send = cell.order == "offer-first" and cell.phase in ("preparing", "matching")
    if cell.fault == "abort":
        if cell.victim == "registry":
            return "a registry takes no part in a transfer, so it can't abort one"
        if cell.victim == "prefill" and before_send:
            return "prefill has not called send() yet, so it has nothing to abort"
        if cell.victim == "decode" and cell.unmatched:
            return "decode has not called receive() yet, so it has nothing to abort"
    return ""


def every_cell() -> list[Cell]:
    """Sorted by transport, since its processes are used for all of its cells."""
    cells = [Cell(*names) for names in itertools.product(*AXES)]
    return sorted((c for c in cells if not impossible(c)), key=lambda c: list(TRANSPORTS).index(c.transport))


def impossible_cells() -> list[Cell]:
    return [cell for cell in (Cell(*names) for names in itertools.product(*AXES)) if impossible(cell)]


def covering() -> list[Cell]:
    """Few cells that hold every pair of values that any cell holds: always the one next that adds most of them."""
    cells = every_cell()
    missing = set().union(*(cell.pairs for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(cell.pairs & missing))
        chosen.append(best)
        missing -= best.pairs
    return sorted(chosen, key=lambda c: list(TRANSPORTS).index(c.transport))


def allowed(cell: Cell) -> dict[str, set[str]]:
    """How the transfer may end on the side of prefill, and on each decode worker; where two ways are named, both are
    right: data that has landed may be committed by workers that don't need the victim any more.
    """
    arrived = cell.phase in ("landing", "committing")
    if cell.fault == "abort":
        prefill, decode = {"aborted"}, {"aborted"}
    elif cell.fault in ("pause", "blink"):
        prefill, decode = {"done"}, {"done"}
    elif cell.victim == "registry":  # only who still has to look somebody up needs it
        ends = {"timeout"} if cell.unmatched and cell.fault != "restart" else {"done"}
        prefill, decode = ends, ends
    elif cell.fault in ("kill", "restart"):
        prefill, decode = _dead(cell, arrived)
    elif cell.victim == "prefill":  # stop, cut: what has arrived can be committed without it
        prefill, decode = {"timeout"}, {"timeout"}
        if arrived:
            prefill, decode = {"timeout", "done"}, {"done"}
        elif cell.transport == "direct" and cell.phase == "moving" and cell.fault == "cut":
            prefill, decode = {"timeout", "done"}, {"timeout", "done"}  # all its grants were there before
    else:
        prefill, decode = {"timeout"}, {"timeout"}
        if cell.leader_can_commit or (arrived and cell.fault == "cut"):  # the rank that hears everything may be through
            decode = {"timeout", "done"}
    return {"prefill": prefill, "decode": decode}


def _dead(cell: Cell, arrived: bool) -> tuple[set[str], set[str]]:
    """Who has met the dead one knows at once; who looks it up later finds nobody, until the deadline."""
    if cell.victim == "prefill":
        if cell.unmatched:
            return {"lost"}, {"timeout", "lost"}
        return {"lost"}, {"lost", "done"} if arrived else {"lost"}
    if cell.unmatched:
        ends = {"done"} if cell.fault == "restart" else {"timeout", "lost"}
        return ends, ends
    return {"lost"}, {"lost", "done"} if cell.leader_can_commit else {"lost"}
