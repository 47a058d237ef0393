"""Any history of requests, accidents and delays that hypothesis can think of: the session keeps its promises in all.

`tests/session/world.py` raises `Violation` at the moment one is broken. Planted faults show that it would.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvferry.session.events import Write
from tests.session.node import Node, Request, Setup, Violation
from tests.session.planted import PLANTS, Plant
from tests.session.world import Faults, World

SETUPS = st.builds(
    Setup,
    sources=st.sampled_from([(1,), (2,), (2, 1), (1, 4)]),
    target=st.sampled_from([1, 2, 3]),
    slots=st.integers(1, 4),
    digests=st.booleans(),
    direct=st.booleans(),
)
SEEDS = st.integers(0, 2**32)
PICKS = st.integers(0, 63)


class Histories(RuleBasedStateMachine):
    @initialize(setup=SETUPS, seed=SEEDS)
    def start(self, setup: Setup, seed: int) -> None:
        self.world = World(setup, seed)
        self.broken = False

    @rule(
        source=st.sampled_from("pq"),
        tokens=st.integers(1, 12),
        offset=st.integers(0, 11),
        grow=st.sampled_from(["", "", "tokens", "layers"]),
        piece_tokens=st.sampled_from([0, 0, 2]),
        timeout_s=st.sampled_from([0.5, 10.0, 60.0, 60.0]),
        fenced=st.booleans(),
        now=st.sampled_from([True, True, False]),
    )
    def request(
        self, source: str, tokens: int, offset: int, grow: str, piece_tokens: int, timeout_s: float, fenced: bool,
        now: bool,
    ) -> None:  # fmt: skip
        world = self.world
        name = source if source in world.setup.shapes() else "p"
        number = len(world.requests) + 1
        offset = min(offset, tokens - 1)
        world.request(Request(f"t{number}", number, name, "d", tokens, offset, grow, piece_tokens, timeout_s, fenced))
        for _ in range(len(world.todo) if now else 0):
            world.call(world.rng.randrange(64))

    @precondition(lambda self: self.world.todo)
    @rule(pick=PICKS)
    def call(self, pick: int) -> None:
        self.world.call(pick)

    @rule(steps=st.sampled_from([1, 3, 10, 40, 150]), seed=SEEDS)
    def run(self, steps: int, seed: int) -> None:
        self.world.rng = random.Random(seed)
        for _ in range(steps):
            if not self.world.step():
                return

    @rule(
        drop=st.sampled_from([0.0, 0.05, 0.5]),
        duplicate=st.sampled_from([0.0, 0.2]),
        reorder=st.booleans(),
        corrupt=st.sampled_from([0.0, 0.1]),
        fail=st.sampled_from([0.0, 0.0, 0.05]),
    )
    def trouble(self, drop: float, duplicate: float, reorder: bool, corrupt: float, fail: float) -> None:
        # without digests nothing is there that could find a changed byte
        digests = self.world.setup.digests
        self.world.faults = Faults(drop, duplicate, reorder, corrupt if digests else 0.0, fail)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 11.0, 40.0]), coarse=st.booleans())
    def wait(self, seconds: float, coarse: bool) -> None:
        self.world.pass_time(seconds, coarse)

    @rule(pick=PICKS, seconds=st.sampled_from([0.3, 0.3, 5.0, 1e6]))
    def jump(self, pick: int, seconds: float) -> None:
        """One host was suspended: its clock is ahead of what it was, and nobody else's."""
        node = self._pick(pick)
        node.offset_s += seconds
        self.world._tick(node)

    @precondition(lambda self: self.world.running())
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        running = self.world.running()
        self.world.abort(*running[pick % len(running)])

    @rule(pick=st.integers(0, 499))
    def replay(self, pick: int) -> None:
        self.world.replay(pick)

    @precondition(lambda self: self.world.running())
    @rule(pick=PICKS)
    def forge(self, pick: int) -> None:
        running = self.world.running()
        self.world.forge(running[pick % len(running)][0], bytes(16))

    @rule(pick=PICKS, stalled=st.booleans())
    def stall(self, pick: int, stalled: bool) -> None:
        """Or not any more: what this node writes stands still on the way."""
        self._pick(pick).stalled = stalled

    @rule(pick=PICKS)
    def pause(self, pick: int) -> None:
        self.world.pause(self._pick(pick))

    @rule(pick=PICKS)
    def resume(self, pick: int) -> None:
        paused = [node for node in self.world.living() if node.paused]
        if paused:
            self.world.resume(paused[pick % len(paused)])

    @rule(pick=PICKS, witnessed=st.booleans(), again=st.booleans())
    def kill(self, pick: int, witnessed: bool, again: bool) -> None:
        node = self._pick(pick)
        if self._others(node):
            self.world.kill(node, witnessed)
            if again and node in self.world.current(node.peer.instance):
                self.world.boot(node.peer.instance, node.peer.rank)

    @rule(pick=PICKS, again=st.booleans())
    def close(self, pick: int, again: bool) -> None:
        """Its endpoint is closed, and perhaps another one is opened in its place at once."""
        node = self._pick(pick)
        if self._others(node) and node.open and not node.paused:
            newest = node in self.world.current(node.peer.instance)
            self.world.close(node)
            if again and newest:
                self.world.boot(node.peer.instance, node.peer.rank)

    @rule(pick=PICKS)
    def restart(self, pick: int) -> None:
        """Of a worker that is closed, dead or stands still: then the old one goes on some day, under its generation."""
        world = self.world
        newest = [node for name in world.registry for node in world.current(name)]
        down = [node.peer for node in newest if not node.alive or node.paused] + world.vacant()
        if down:
            peer = down[pick % len(down)]
            world.boot(peer.instance, peer.rank)

    def _others(self, node: Node) -> bool:
        """Somebody has to be there."""
        return any(other.open for other in self.world.living() if other is not node)

    def _pick(self, pick: int) -> Node:
        living = self.world.living()
        return living[pick % len(living)]

    def check_invariants(self, *arguments: object, **options: object) -> None:
        """After each rule the world goes on a little, or doesn't."""
        if hasattr(self, "world"):
            for _ in range(self.world.rng.choice((0, 5, 30, 150))):
                if not self.world.step():
                    break
            self.world.check_deadlines()
        super().check_invariants(*arguments, **options)  # type: ignore[arg-type]

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def explore(examples: int, machine: type[Histories] = Histories, **options: object) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,  # type: ignore[arg-type]
        ),
    )


def test_some_histories() -> None:
    explore(20)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_histories() -> None:
    explore(2_000)


def accident(world: World, rng: random.Random) -> None:
    """One of those that faults in the machine need to show."""
    running = [(node, name) for node, role, name in world.running() if role == "target"]
    kind = rng.randrange(7)
    if kind == 0 and running:
        for node in world.living():
            node.stalled = node.peer.instance == "p"
        node, name = rng.choice(running)
        world.abort(node, "target", name)
        go(world, 100)
        world.pass_time(8.0)
    elif kind == 1:
        for node, _ in running:
            world.forge(node, bytes(16))
    elif kind == 2:
        for _ in range(30):
            world.replay(rng.randrange(500))
    elif kind == 3:
        world.faults = Faults(corrupt=0.2 if world.setup.digests else 0.0, duplicate=0.2)
    elif kind == 4:  # in the middle of writing, if it can be
        writers = [job.node for job in world.jobs if isinstance(job.action, Write)]
        node = rng.choice(writers or world.living())
        world.kill(node, witnessed=True)
        world.boot(node.peer.instance, node.peer.rank)
    elif kind == 5:  # of which nobody hears but by the next start
        node = rng.choice(world.living())
        world.kill(node, witnessed=False)
        world.boot(node.peer.instance, node.peer.rank)


def go(world: World, steps: int) -> None:
    for _ in range(steps):
        if not world.step():
            return


def short_history(seed: int) -> None:
    """A few requests with an accident between two; as `Histories`, but most of it matters."""
    rng = random.Random(seed)
    sources = rng.choice([(1,), (2, 1)])
    setup = Setup(sources, rng.choice([1, 2]), rng.randint(1, 3), rng.random() < 0.4, rng.random() < 0.4)
    world = World(setup, seed)
    for number in range(1, 5):
        source = rng.choice("pq"[: len(sources)])
        tokens = rng.randint(3, 12)
        request = (
            f"t{number}",
            number,
            source,
            "d",
            tokens,
            rng.randrange(tokens),
            "",
            rng.choice((0, 2)),
            60.0,
            False,
        )
        world.request(Request(*request))
        for _ in range(len(world.todo)):
            world.call(0)
        go(world, rng.randrange(120))
        accident(world, rng)
        world.check_deadlines()
    go(world, 400)
    world.finish()


def test_short_histories() -> None:
    for seed in range(12):
        short_history(seed)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By short histories where they do it, which takes a second or two, else by hypothesis."""
    plant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(300):
            short_history(seed)
        explore(600, phases=[Phase.generate], derandomize=True, report_multiple_bugs=False, print_blob=False)
