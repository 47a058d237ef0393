"""The fence tables of docs/transports: after what can a source no longer write into a landing slot?

Each row stops a real write in the middle, applies what may be a fence, reuses the slot, lets the write go on and looks
whether bytes of it arrive. All verdicts are asserted, from what was seen in the slot:
- holds: the write was cut, and none of its bytes came after the reuse
- waits: the write was complete when the candidate was through, and none of its bytes came after the reuse
- lands: bytes of the write came after the reuse, so the candidate is no fence

Moments, and who is stopped in them:
- gather: the source, after it has gathered half of its bytes
- wire: the source, after the observer has seen the first byte in the slot and not the last one
- race: nobody; as wire, but the candidate is applied at once
- flood: the target, while its sockets hold bytes that it has not read
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.transport.nixl import CLOSE_S
from tests.transport.installed import NIXL_PROBLEM
from tests.transport.pair import OLD, SETTLE_S, WAYS, Pair, pair, unread_bytes

SLOT_BYTES = 64 << 20
RACE_BYTES = 256 << 20
TRIES = 10
DOCS = sorted((Path(__file__).parents[2] / "docs" / "transports").glob("*.md"))
TIME_S = 2.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NEEDS_NIXL = pytest.mark.skipif(bool(NIXL_PROBLEM), reason=NIXL_PROBLEM)


def close_while_stopped(p: Pair) -> None:
    """The source closes its transport, and is stopped for longer than close() waits for a write."""
    p.source.tell("close transport")
    time.sleep(0.005)
    p.source.stop()
    time.sleep(CLOSE_S + 0.5)
    p.source.go_on()
    p.source.answer()


AT_THE_SOURCE = ("close peer", "close transport", "stopped close")
CANDIDATES: dict[str, Callable[[Pair], object]] = {
    "revoke": lambda p: p.target.do("revoke"),
    "target closes": lambda p: p.target.do("close"),
    "close peer": lambda p: p.source.do("close peer"),
    "close transport": lambda p: p.source.do("close transport"),
    "stopped close": close_while_stopped,
    "death": lambda p: p.source.kill(),
    "time": lambda p: time.sleep(TIME_S),
}


@dataclass(frozen=True)
class Row:
    way: str
    candidate: str
    moment: str
    verdict: str

    @property
    def id(self) -> str:
        return "-".join((self.way, self.candidate, self.moment, self.verdict)).replace(" ", "_")


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
    "nixl-sm    | close transport | race   | waits",
    "nixl-sm    | stopped close   | race   | lands",
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
    return [pytest.param(row, marks=[NEEDS_NIXL] if row.way.startswith("nixl") else [], id=row.id) for row in ROWS]


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


@dataclass(frozen=True)
class Seen:
    """Whether the slot was full when the candidate was through, and how many bytes came after the reuse."""

    full: bool
    after: int
    write: str

    def __str__(self) -> str:
        return (
            f"{'full' if self.full else 'not full'} before, {self.after} bytes after the reuse, the write {self.write}"
        )

    @property
    def verdict(self) -> str:
        if self.after:
            return "lands"
        return "waits" if self.full else "holds"


def attempt(row: Row) -> Seen | None:
    """None where the moment was missed."""
    with pair(row.way, RACE_BYTES if row.moment == "race" else SLOT_BYTES) as p:
        for _ in range(TRIES):
            if reach(p, row.moment):
                break
            missed(p)
        else:
            return None
        if row.candidate in AT_THE_SOURCE:
            p.source.go_on()
        CANDIDATES[row.candidate](p)
        full = not p.unfinished()  # writers come from the front
        p.reuse()
        outcome = go_on(p)
        return Seen(full, p.landed(), outcome)


def go_on(p: Pair) -> str:
    """Continue whoever is stopped until bytes land or the write has ended; how it ended."""
    p.target.go_on()
    outcome = "ended with its process"
    if p.source.alive:
        p.source.go_on()
        p.release()
        soon(lambda: p.any_landed() or p.events.poll())
        outcome = p.outcome(0.0) or "goes on"
    time.sleep(SETTLE_S)
    return outcome


@pytest.mark.parametrize("row", parameters())
def test_fence(row: Row) -> None:
    """A race may be lost, also by a write that ended before the candidate began: then it is run again."""
    tries = []
    for _ in range(TRIES):
        seen = attempt(row)
        tries.append(str(seen) if seen else "missed")
        if seen and (seen.verdict == row.verdict or (seen.after and row.verdict != "lands")):
            break
    print(f"{row.way}, {row.candidate}, {row.moment}: {'; '.join(tries)}")
    assert seen is not None, f"the moment was missed in {TRIES} tries"
    assert seen.verdict == row.verdict, tries


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


@pytest.mark.parametrize("way", PARAMETERS)
def test_what_lands_after_a_write_has_raised(way: str) -> None:
    """Its deadline passes while the target is stopped. Only tcp ends such a write with bytes still on their way."""
    with pair(way, SLOT_BYTES) as p:
        p.target.stop()
        p.write(timeout_s=1.0)
        early = p.outcome(4.0)
        print(f"{way}, while the target is stopped, the write {early or 'goes on'}")
        if way in ("shm", "process_vm"):  # nothing of the target is needed
            assert early == "returned"
            assert p.landed() == SLOT_BYTES
        elif way == "tcp":
            assert "not done within 1.0 s" in early
            assert p.landed() == 0
        elif way == "nixl-tcp":
            assert early == "", "a write that isn't known to have ended goes on after its deadline"
            assert p.landed() == 0
        else:  # the bytes need nothing of the target; the notice of the end may
            assert p.landed() == SLOT_BYTES
        if early:
            p.reuse()
        p.target.go_on()
        if not early:
            assert "not done within 1 s" in p.outcome()
            assert p.landed() == SLOT_BYTES
            p.reuse()
        if way == "tcp":
            assert soon(p.any_landed)
        else:
            time.sleep(SETTLE_S)
            assert p.landed() == 0


def test_the_documentation_has_these_rows_and_no_others() -> None:
    """Each row of a fence table ends with the ids of its tests."""
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS)
    named = re.findall(rf"`((?:{'|'.join(WAYS)})-[a-z_]+-[a-z]+-[a-z]+)`", text)
    assert sorted(named) == sorted(row.id for row in ROWS)
