"""Every end that is no success says which request, which peer, which phase, how long it took and what to check."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.errors import KVFerryError, TransferError, Where
from kvferry.session.core import ADVICE, ERRORS, LATE, advice, failure
from kvferry.session.events import (
    AbortCall,
    Died,
    ReceiveCall,
    Received,
    ScatterFailed,
    SendCall,
    Verified,
    WriteFailed,
)
from kvferry.session.messages import ChunkDone, FailureKind, Goodbye, Peer
from tests.session.pools import Shape, table
from tests.session.sim import TABLES, TOKENS, Sim
from tests.session.test_machine import ends

TARGET_PHASES = ("preparing", "matching", "moving", "landing", "verifying", "committing")
BROKEN = KVFerryError("broken")
SOURCE_PHASES = ("matching", "moving", "committing")


def make(tp_target: int = 1) -> Sim:
    return Sim(random.Random(0), {"p": Shape(), "d": Shape(tp=tp_target)}, slots=64)


def reach(sim: Sim, phase: str) -> tuple[Peer, Peer]:
    """Stop when the target of transfer "a" is in this phase."""
    (source,), target = sim.peers("p"), sim.peers("d")[-1]
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    running = sim.machines[target].targets.running
    for _ in range(10_000):
        if running["a"].phase == phase:
            return source, target
        assert sim.step(), f"never in phase {phase}"
    raise AssertionError(phase)


def late(sim: Sim) -> None:
    sim.wire.clear()
    sim.jobs.clear()
    sim.lose = lambda sender, recipient, body: True
    sim.pass_time(11)


def judge(sim: Sim, peer: Peer, kinds: set[FailureKind], phases: tuple[str, ...]) -> None:
    error = ends(sim)[peer, "a"].error
    assert isinstance(error, TransferError)
    assert type(error) in {ERRORS[kind] for kind in kinds}
    where = error.where
    assert where.transfer == "a" and where.phase in phases and 0 <= where.elapsed_s <= 11.1
    other = "d" if peer.instance == "p" else "p"
    if where.peer not in ("p", "d", ""):  # it is not known yet which worker
        instance, generation, rank = where.peer.split(", ")[0].split("/")
        assert instance in ("p", "d") and generation == "1" and rank.isdecimal()
    assert where.peer or (peer.instance == "p" and where.phase == "matching"), f"{other} is not named"
    text = str(error)
    assert f"transfer 'a'{' with ' + where.peer if where.peer else ''}, phase {where.phase}, after " in text
    assert error.advice and text.endswith(error.advice)
    assert error.problem and "None" not in text


@pytest.mark.parametrize("phase", [phase for phase in TARGET_PHASES if phase not in ("verifying", "landing")])
def test_a_deadline_in_every_phase(phase: str) -> None:
    sim = make(tp_target=2 if phase == "committing" else 1)
    source, target = reach(sim, phase)
    late(sim)
    judge(sim, target, {"timeout"}, (phase,))
    judge(sim, source, {"timeout"}, SOURCE_PHASES)


ENDS: dict[str, tuple[str, Callable[[Sim, Peer, Peer], None], set[FailureKind]]] = {
    "abort of the target": ("moving", lambda s, p, d: s.event(d, AbortCall("target", "a", "")), {"aborted"}),
    "abort of the source": ("moving", lambda s, p, d: s.event(p, AbortCall("source", "a", "why")), {"aborted"}),
    "abort before anything is known": (
        "preparing",
        lambda s, p, d: s.event(d, AbortCall("target", "a", "why")),
        {"aborted"},
    ),
    "death of the source": ("moving", lambda s, p, d: s.event(d, Died(p)), {"lost"}),
    "goodbye": ("moving", lambda s, p, d: s.event(d, Received(p, d, Goodbye())), {"lost"}),
    "closing": ("moving", lambda s, p, d: s.act(d, s.machines[d].close(s.now)), {"aborted"}),
    "failed write": (
        "moving",
        lambda s, p, d: _first_write(s, p, lambda job: WriteFailed("a", d, job, BROKEN)),
        {"refused"},
    ),
    "failed scatter": ("landing", lambda s, p, d: _fail_scatter(s, p, d), {"refused"}),
    "wrong size": ("moving", lambda s, p, d: _wrong_size(s, p, d), {"refused"}),
}


def _first_write(sim: Sim, source: Peer, event: Callable[[int], WriteFailed]) -> None:
    while not (jobs := [job for job in sim.jobs if job.owner == source]):
        assert sim.step()
    sim.jobs.remove(jobs[0])
    sim.event(source, event(jobs[0].action.piece))  # type: ignore[union-attr]


def _fail_scatter(sim: Sim, source: Peer, target: Peer) -> None:
    job = next(job for job in sim.jobs if job.owner == target)
    sim.jobs.remove(job)
    sim.event(target, ScatterFailed("a", source, job.action.piece, BROKEN))  # type: ignore[union-attr]


def _wrong_size(sim: Sim, source: Peer, target: Peer) -> None:
    flow = sim.machines[target].targets.running["a"].flows[source]
    piece, lease = next(iter(flow.granted.items()))
    sim.event(target, Received(source, target, ChunkDone("a", 1, piece, lease.grant, 1)))


@pytest.mark.parametrize("case", ENDS)
def test_every_end_but_a_deadline(case: str) -> None:
    phase, act, kinds = ENDS[case]
    sim = make()
    source, target = reach(sim, phase)
    act(sim, source, target)
    sim.settle()
    judge(sim, target, kinds, TARGET_PHASES)
    if ends(sim).get((source, "a")):
        judge(sim, source, kinds | {"timeout"}, SOURCE_PHASES)


def test_refusals_of_what_was_asked() -> None:
    for change in ({"groups": {**TOKENS, "other": TOKENS["attn"]}}, {"tables": table([0])}):
        sim = make()
        for peer, call in sim.start("a", "p", "d"):
            sim.event(peer, replace(call, **change) if isinstance(call, ReceiveCall) else call)  # type: ignore[arg-type]
        sim.settle()
        judge(sim, sim.peers("d")[0], {"refused"}, TARGET_PHASES)
    sim = make()
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    sim.event(target, ReceiveCall("a", "d", TOKENS, TABLES, 5.0))
    judge(sim, target, {"refused"}, TARGET_PHASES)
    sim.event(source, SendCall("a", TOKENS, TABLES, 2.0))
    sim.settle()
    judge(sim, source, {"timeout"}, SOURCE_PHASES)


def test_a_difference_of_digests() -> None:
    sim = make()
    source, target = reach(sim, "moving")
    sim.event(target, Verified("a", {("attn", 0): 1}))
    sim.settle()
    judge(sim, target, {"corrupted"}, TARGET_PHASES)
    judge(sim, source, {"corrupted"}, SOURCE_PHASES)


def test_every_kind_and_every_phase_has_advice() -> None:
    assert set(ADVICE) | {"timeout"} == set(ERRORS)
    assert set(LATE) == set(TARGET_PHASES) >= set(SOURCE_PHASES)
    for kind in ERRORS:
        error = failure(kind, Where("a", "p/1/0", "moving", 1.0), "problem")
        assert str(error).endswith(f"problem; {advice(kind, 'moving')}")
