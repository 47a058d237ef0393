"""The fence tables of docs/transports: after what can a source no longer write into a landing slot?

Each row stops a real write in the middle, applies what may be a fence, reuses the slot, lets the write go on and looks
whether bytes of it arrive. «holds» and «lands» are both asserted. Rows whose moment can't be had for sure are tried
several times; the moments of «holds» must have been had.

Moments, and who is stopped in them:
- gather: the source, after it has gathered half of its bytes
- wire: the source, after the observer has seen the first byte in the slot and not the last one
- race: nobody; as wire, but the candidate is applied at once
- flood: the target, while its sockets hold bytes that it has not read
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.transport.installed import NIXL_PROBLEM
from tests.transport.pair import OLD, SETTLE_S, WAYS, Pair, pair, unread_bytes

SLOT_BYTES = 64 << 20
TRIES = 20
TIME_S = 2.0
NEEDS_NIXL = pytest.mark.skipif(bool(NIXL_PROBLEM), reason=NIXL_PROBLEM)

AT_THE_SOURCE = ("close peer", "close transport")
CANDIDATES: dict[str, Callable[[Pair], object]] = {
    "revoke": lambda p: p.target.do("revoke"),
    "target closes": lambda p: p.target.do("close"),
    "close peer": lambda p: p.source.do("close peer"),
    "close transport": lambda p: p.source.do("close transport"),
    "death": lambda p: p.source.kill(),
    "time": lambda p: time.sleep(TIME_S),
}


@dataclass(frozen=True)
class Row:
    way: str
    candidate: str
    moment: str
    verdict: str


def rows(*lines: str) -> list[Row]:
    return [Row(*(cell.strip() for cell in line.split("|"))) for line in lines]


ROWS = rows(
    "shm        | revoke          | gather | lands",
    "shm        | target closes   | gather | lands",
    "shm        | close peer      | gather | lands",
    "shm        | close transport | gather | lands",
    "shm        | death           | gather | holds",
    "shm        | time            | gather | lands",
    "process_vm | revoke          | gather | lands",
    "process_vm | target closes   | gather | lands",
    "process_vm | close peer      | race   | lands",
    "process_vm | close transport | gather | lands",
    "process_vm | death           | gather | holds",
    "process_vm | death           | race   | holds",
    "process_vm | time            | gather | lands",
    "tcp        | revoke          | gather | holds",
    "tcp        | revoke          | wire   | holds",
    "tcp        | revoke          | race   | holds",
    "tcp        | target closes   | gather | holds",
    "tcp        | target closes   | wire   | holds",
    "tcp        | target closes   | race   | holds",
    "tcp        | close peer      | flood  | lands",
    "tcp        | close transport | gather | lands",
    "tcp        | death           | flood  | lands",
    "tcp        | time            | gather | lands",
    "nixl-sm    | revoke          | gather | lands",
    "nixl-sm    | target closes   | wire   | lands",
    "nixl-sm    | close peer      | race   | lands",
    "nixl-sm    | close transport | race   | holds",
    "nixl-sm    | death           | gather | holds",
    "nixl-sm    | death           | wire   | holds",
    "nixl-sm    | time            | wire   | lands",
    "nixl-tcp   | revoke          | gather | lands",
    "nixl-tcp   | target closes   | gather | holds",
    "nixl-tcp   | target closes   | wire   | holds",
    "nixl-tcp   | close peer      | flood  | lands",
    "nixl-tcp   | close transport | flood  | lands",
    "nixl-tcp   | death           | flood  | lands",
    "nixl-tcp   | time            | wire   | lands",
)


PARAMETERS = [pytest.param(way, marks=[NEEDS_NIXL] if way.startswith("nixl") else []) for way in WAYS]


def parameters() -> list[object]:
    return [
        pytest.param(
            row,
            marks=[NEEDS_NIXL] if row.way.startswith("nixl") else [],
            id=f"{row.way}-{row.candidate}-{row.moment}-{row.verdict}".replace(" ", "_"),
        )
        for row in ROWS
    ]


def reach(p: Pair, moment: str) -> bool:
    """Put the pair into the moment; False where it was missed."""
    if moment == "gather":
        p.write(held=True)
        p.source.stop()
        return True
    if moment == "flood":
        p.target.stop()
        p.write()
        assert soon(lambda: unread_bytes(p.target.pid) >= 1 << 16), "nothing arrives in the target's sockets"
        return True
    p.write()
    assert soon(lambda: p.slot[0] == OLD, 0.0), "nothing arrives in the slot"
    if moment == "wire":
        p.source.stop()
    return p.unfinished()


def soon(true: Callable[[], object], pause_s: float = 0.01) -> bool:
    deadline_s = time.monotonic() + 30
    while not true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
    return True


def missed(p: Pair) -> None:
    """Let the write end, for the next try."""
    p.source.go_on()
    assert p.outcome() == "returned"
    p.clear()


def attempt(row: Row) -> tuple[int, str] | None:
    """Bytes that landed after the reuse, and how the write ended; None where the moment was missed."""
    with pair(row.way, SLOT_BYTES) as p:
        for _ in range(TRIES):
            if reach(p, row.moment):
                break
            missed(p)
        else:
            return None
        if row.candidate in AT_THE_SOURCE:
            p.source.go_on()
        CANDIDATES[row.candidate](p)
        hit = p.unfinished()
        p.reuse()
        outcome = go_on(p)
        landed = p.landed()
        return (landed, outcome) if hit or landed else None


def go_on(p: Pair) -> str:
    """Continue whoever is stopped until bytes land or the write has ended; how it ended."""
    p.target.go_on()
    outcome = "its process is dead"
    if p.source.alive:
        p.source.go_on()
        p.release()
        outcome = ""
        assert soon(lambda: p.landed() or p.events.poll()), "neither bytes nor the end of the write within 30 s"
        outcome = p.outcome(0.0) or "it goes on"
    time.sleep(SETTLE_S)
    return outcome


@pytest.mark.parametrize("row", parameters())
def test_fence(row: Row) -> None:
    seen = []
    for _ in range(TRIES):
        result = attempt(row)
        seen.append("missed" if result is None else f"{result[0]} of {SLOT_BYTES} bytes landed, write: {result[1]}")
        if result is not None and (row.verdict == "holds" or result[0]):
            break
    print(f"{row.way}, {row.candidate}, {row.moment}: {'; '.join(seen)}")
    assert result is not None, f"the moment was missed in {TRIES} tries"
    assert (result[0] == 0) == (row.verdict == "holds"), seen


@pytest.mark.parametrize("way", PARAMETERS)
def test_nothing_lands_after_a_write_has_returned(way: str) -> None:
    with pair(way, SLOT_BYTES) as p:
        reach(p, "gather")
        p.source.go_on()
        p.release()
        assert p.outcome() == "returned"
        assert p.landed() == SLOT_BYTES
        p.reuse()
        time.sleep(SETTLE_S)
        assert p.landed() == 0
