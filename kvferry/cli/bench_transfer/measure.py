"""Runs the cases: opens pools in worker processes, moves their cells in each way, and compares every byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvferry.cli.bench_transfer.cases import CURVE, EQUAL, SPLIT, TABLE, WIRE, Scenario, of_run_length
from kvferry.cli.bench_transfer.raw import cut
from kvferry.cli.bench_transfer.worker import Stages
from kvferry.cli.crew import Crew, Member, answers, every
from kvferry.errors import EngineError, WorkerFailed
from kvferry.layout.address import U64, Address
from kvferry.plan.bind import Copies
from kvferry.plan.document import plan_copies
from kvferry.session.registry import RegistryServer

DIRECT_TRANSPORTS = ("process_vm", "nixl")
"""Those that can write straight into the target's pages."""
STAGED, DIRECT = "staged", "direct"
"""By kvferry: as it does by default, and straight into the target's pages."""
ONE_PIECE, MERGED, PER_RUN = "wire", "merged", "per run"
"""Without it: one piece of memory as descriptors of 1 MiB, neighbours merged by hand, one descriptor per run."""
RAW = (ONE_PIECE, MERGED, PER_RUN)
SETTLE_S = 0.05
OFFER_S = 60.0
_numbers = itertools.count()
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One case over one transport in one way, and what each repetition took. `runs` and `run_bytes` (the most common
    length) describe the memory, not what the transport made of it.
    """

    transport: str
    case: str
    title: str
    way: str
    workers: tuple[int, int]
    bytes: int
    runs: int
    run_bytes: int
    samples_s: tuple[float, ...]
    stages: Stages | None = None
    control_s: float = 0.0
    processor_s: tuple[float, float] = (0.0, 0.0)  # of all sources and of all targets, in the best repetition

    @property
    def best_s(self) -> float:
        return min(self.samples_s)

    @property
    def gb_s(self) -> float:
        return self.bytes / self.best_s / 1e9


@dataclass(frozen=True)
class Order:
    """What is to be measured. Each case is sized to about `bytes` bytes over all its target workers."""

    transports: tuple[str, ...]
    cases: tuple[str, ...]
    bytes: int
    repeat: int
    curve_run_bytes: tuple[int, ...]

    def scenarios(self) -> list[tuple[Scenario, tuple[str, ...]]]:
        """(case, ways) in the order of the table; the wire is always among them."""
        found: list[tuple[Scenario, tuple[str, ...]]] = [(WIRE, (ONE_PIECE,))]
        for scenario in TABLE:
            if scenario.key in self.cases:
                found.append((scenario, WAYS.get(scenario.key, (STAGED,))))
        if CURVE in self.cases:
            found += [(of_run_length(nbytes), (PER_RUN, STAGED)) for nbytes in self.curve_run_bytes]
        return [(scenario.sized(self.bytes), ways) for scenario, ways in found]

    @property
    def steps(self) -> int:
        """How often `measure` reports a step at most."""
        return len(self.transports) * (1 + len(self.scenarios()))


WAYS = {EQUAL.key: (MERGED, DIRECT, STAGED), SPLIT.key: (PER_RUN, STAGED)}


@dataclass
class Outcome:
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)  # by transport, why


def unusable(crew: Crew, transport: str) -> str:
    """Why this transport can't be used between two processes here, or nothing."""
    source, target = crew.take(2)
    try:
        export = target("export", transport)
    except WorkerFailed as error:
        return error.problem
    try:
        source("try_export", transport, export)
    except WorkerFailed as error:
        return error.problem
    finally:
        target("close_export")
    return ""


def measure(order: Order, crew: Crew, step: Say) -> Outcome:
    """EngineError where a byte is wrong, or a worker fails."""
    outcome = Outcome()
    registry = RegistryServer()
    try:
        for transport in order.transports:
            step(f"{transport}: does it work here?")
            problem = unusable(crew, transport)
            if problem:
                outcome.left_out[transport] = problem
                continue
            for scenario, ways in order.scenarios():
                step(f"{transport}: {scenario.title}")
                outcome.rows += _case(crew, registry.url, transport, scenario, ways, order.repeat)
    finally:
        registry.close()
    return outcome


@dataclass(frozen=True)
class _Stand:
    """One case, set up."""

    scenario: Scenario
    transport: str
    sources: Sequence[Member]
    targets: Sequence[Member]
    repeat: int

    @property
    def all(self) -> list[Member]:
        return [*self.sources, *self.targets]

    def row(
        self,
        way: str,
        lengths: U64,
        samples: Sequence[float],
        stages: Stages | None = None,
        control: float = 0.0,
        processor: tuple[float, float] = (0.0, 0.0),
    ) -> Row:
        scenario = self.scenario
        values, counts = np.unique(lengths, return_counts=True)
        common = int(values[np.argmax(counts)])
        workers = (len(self.sources), len(self.targets))
        parts = (self.transport, scenario.key, scenario.title, way, workers, int(lengths.sum()), len(lengths), common)
        return Row(*parts, tuple(samples), stages, control, processor)

    def repeated(self, what: str, move: Callable[[], float]) -> list[float]:
        """Once to warm up and `repeat` times for the clock; every byte of every target is compared each time."""
        samples = []
        for _ in range(1 + self.repeat):
            every(self.targets, "clear")
            samples.append(move())
            wrong = sum(every(self.targets, "wrong_bytes"))
            if wrong:
                raise EngineError(f"{self.transport}, {self.scenario.title}, {what}: {wrong} bytes are wrong")
        return samples[1:]


def _case(
    crew: Crew, registry: str, transport: str, scenario: Scenario, ways: Sequence[str], repeat: int
) -> Iterator[Row]:
    members = crew.take(scenario.source.world + scenario.target.world)
    sources, targets = members[: scenario.source.world], members[scenario.source.world :]
    stand = _Stand(scenario, transport, sources, targets, repeat)
    for side, some in (("source", sources), ("target", targets)):
        for rank, member in enumerate(some):
            member.begin("open", scenario, side, rank)
    found = answers(members)
    try:
        copies = _plan(scenario, found[: len(sources)], found[len(sources) :])
        lengths = np.concatenate([runs.lengths for runs in copies.values()])
        for way in ways:
            if way in RAW:
                yield stand.row(way, lengths, _raw(stand, way, copies))
            elif way == STAGED or transport in DIRECT_TRANSPORTS:
                yield _by_kvferry(stand, registry, way, lengths)
    finally:
        every(members, "close")


def _plan(scenario: Scenario, sources: Sequence[Address], targets: Sequence[Address]) -> dict[tuple[int, int], Copies]:
    """The runs between all workers' memory, neighbours merged; the wire's are cut into its descriptors."""
    source = scenario.instance("source", "raw-source", [address.value for address in sources])
    target = scenario.instance("target", "raw-target", [address.value for address in targets])
    copies = plan_copies(source, target, scenario.request())
    return {pair: cut(runs) for pair, runs in copies.items()} if scenario.key == WIRE.key else copies


def _raw(stand: _Stand, way: str, copies: dict[tuple[int, int], Copies]) -> list[float]:
    runs = [copies[0, rank] for rank in range(len(stand.targets))]
    for target, some in zip(stand.targets, runs):
        target("set_runs", [some])
    cards = every(stand.targets, "open_reader", stand.transport)
    (source,) = stand.sources
    source("set_runs", runs)
    try:
        source("open_writer", stand.transport, cards)

        def move() -> float:
            for target in stand.targets:
                target.begin("raw_read")
            source.begin("raw_write")
            (started_s, ended_s), *_ = answers([source, *stand.targets])
            return float(ended_s - started_s)

        return stand.repeated(way, move)
    finally:
        every(stand.sources, "close_ways")
        every(stand.targets, "close_ways")


def _by_kvferry(stand: _Stand, registry: str, way: str, lengths: U64) -> Row:
    with _endpoints(stand, registry, way) as name:
        spent: list[tuple[float, float]] = []
        samples = stand.repeated(way, lambda: _transfer(stand, name, spent))
        control = min(_transfer(stand, name, [], empty=True) for _ in range(1 + stand.repeat))
    best = spent[1:][samples.index(min(samples))]
    return stand.row(way, lengths, samples, _stages(stand), control, best)


@contextmanager
def _endpoints(stand: _Stand, registry: str, way: str) -> Iterator[str]:
    """Endpoints in all workers; gives the name of the source instance."""
    number = next(_numbers)
    names = f"prefill-{number}", f"decode-{number}"
    options = {"landing": "pages"} if way == DIRECT else {}
    try:
        for name, some in zip(names, (stand.sources, stand.targets)):
            for member in some:
                member.begin("open_endpoint", name, registry, stand.transport, options)
        answers(stand.all)
        yield names[0]
    finally:
        every(stand.sources, "close_ways")
        every(stand.targets, "close_ways")


def _transfer(stand: _Stand, source: str, spent: list[tuple[float, float]], empty: bool = False) -> float:
    """From the first send() to the last target's wait(). The offers are there before, as while prefill computes.

    `spent` gets the processor time that it took, of all sources and of all targets.
    """
    transfer = f"transfer-{next(_numbers)}"
    for target in stand.targets:
        target.begin("receive", transfer, source, empty)
    began_s = time.monotonic()
    while not all(every(stand.sources, "offers_waiting")):
        if time.monotonic() > began_s + OFFER_S:
            raise EngineError(f"{stand.transport}, {stand.scenario.title}: no offer within {OFFER_S:g} s")
        time.sleep(0.005)
    # the first offer is there; the other targets' planning takes as long at most
    time.sleep(SETTLE_S + time.monotonic() - began_s)
    before = _processor_s(stand)
    for member in stand.sources:
        member.begin("send", transfer, empty)
    found = answers(stand.all)
    after = _processor_s(stand)
    spent.append((after[0] - before[0], after[1] - before[1]))
    return float(max(found[len(stand.sources) :]) - min(found[: len(stand.sources)]))


def _processor_s(stand: _Stand) -> tuple[float, float]:
    """Of all sources and of all targets, so far."""
    return sum(member.processor_s for member in stand.sources), sum(member.processor_s for member in stand.targets)


def _stages(stand: _Stand) -> Stages:
    """The steps alone, one worker after the other, best of the repetitions."""
    rounds = [[member("stages") for member in stand.all] for _ in range(stand.repeat)]
    totals = [
        Stages(*(sum(getattr(one, name) for one in some) for name in ("bind_s", "gather_s", "scatter_s")))
        for some in rounds
    ]
    return Stages(*(min(getattr(one, name) for one in totals) for name in ("bind_s", "gather_s", "scatter_s")))
