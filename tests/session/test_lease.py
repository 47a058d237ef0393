"""Two clocks that run apart: a target never counts on a source's pages when the source may have given them back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TransferTimeout
from kvferry.session.events import Action, Event
from kvferry.session.lease import DRIFT, claimer_end_s, offered_s, owner_end_s
from kvferry.session.messages import ChunkDone, Message, Peer
from tests.session.pools import Shape
from tests.session.sim import Sim
from tests.session.test_machine import ends

RATES = st.floats(1 / (1 + DRIFT), 1 / (1 - DRIFT))
"""Seconds of a real one that a clock counts."""


@given(
    way_s=st.tuples(st.floats(0, 100), st.floats(0, 100)),
    left_s=st.floats(0, 1e5),
    rates=st.tuples(RATES, RATES),
    starts=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
)
def test_the_claimers_end_lies_before_the_owners(
    way_s: tuple[float, float], left_s: float, rates: tuple[float, float], starts: tuple[float, float]
) -> None:
    """Both ends in real time. The claim is sent at 0, and granted when it has come."""
    (owner, claimer), (owner_start_s, claimer_start_s) = rates, starts
    granted_s = owner_start_s + way_s[0] * owner
    lease_s = offered_s(left_s)
    owner_end = owner_end_s(granted_s, lease_s)
    assert owner_end <= granted_s + left_s + 1e-6, "it need not keep its pages longer than it wanted"
    real_owner_end = (owner_end - owner_start_s) / owner
    real_claimer_end = (claimer_end_s(claimer_start_s, lease_s) - claimer_start_s) / claimer
    assert real_claimer_end <= real_owner_end + 1e-6


@dataclass
class Drifting(Sim):
    """Each machine has a clock of its own: start and rate by instance."""

    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)

    def clock(self, peer: Peer) -> float:
        start_s, rate = self.clocks[peer.instance]
        return start_s + self.now * rate

    def event(self, peer: Peer, event: Event) -> None:
        if peer in self.machines:
            self.act(peer, self.machines[peer].handle(event, self.clock(peer)))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for peer, machine in list(self.machines.items()):
            actions: list[Action] = machine.tick(self.clock(peer))
            self.act(peer, actions)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), rates=st.tuples(RATES, RATES), starts=st.tuples(st.floats(0, 1e5), st.floats(0, 1e5))
)
def test_no_target_commits_after_its_source_has_given_up(
    seed: int, rates: tuple[float, float], starts: tuple[float, float]
) -> None:
    rng = random.Random(seed)
    shapes = {"p": Shape(), "d": Shape(page_tokens=6)}
    clocks = {"p": (starts[0], rates[0]), "d": (starts[1], rates[1])}
    sim = Drifting(rng, shapes, slots=4, clocks=clocks)
    for peer, call in sim.start("a", "p", "d", 2.0 if rng.random() < 0.5 else 3.0):
        sim.event(peer, call)
    for _ in range(600):
        sim.step()
        sim.pass_time(rng.random() * 0.05)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    at = {(peer, ended.error is None): at_s for peer, ended, at_s in sim.ended}
    if (source, False) in at and (target, True) in at:
        assert at[target, True] <= at[source, False]


def test_what_lands_after_the_lease_is_not_committed_although_nothing_else_says_so() -> None:
    """The source's own word of its end is lost with it: only the lease tells."""
    sim = Sim(random.Random(0), {"p": Shape(), "d": Shape()}, slots=64)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    (sent, received) = (call for _, call in sim.start("a", "p", "d", 100.0))
    sim.event(source, type(sent)(**{**vars(sent), "timeout_s": 5.0}))
    sim.event(target, received)
    done: list[ChunkDone] = []

    def lose(sender: Peer, recipient: Peer, body: Message) -> bool:
        done.extend([body] if isinstance(body, ChunkDone) else [])
        return 1.0 < sim.now < 30.0 and sender == source

    sim.lose = lose
    while not (done and all(job.owner != source for job in sim.jobs) and not any(sim.wire.values())):
        scattering = [job for job in sim.jobs if job.owner == target and done]
        sim.jobs = [job for job in sim.jobs if job not in scattering]
        assert sim.step() or scattering
        sim.jobs += scattering
    sim.pass_time(6.0)  # the scatter takes that long
    assert not any(peer == target for peer, _, _ in sim.ended)
    sim.settle()
    error = ends(sim)[target, "a"].error
    assert isinstance(error, TransferTimeout)
    assert f"{source} kept its pages no longer" in str(error)
    assert all(0 < one.lease_s <= 5.0 / (1 + DRIFT) for one in done)
