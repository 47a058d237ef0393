"""A soak: rounds of random requests and faults, each followed by a moment of quiet in which everything is counted."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from kvferry.cli.soak.faults import Faults
from kvferry.cli.soak.fleet import Fleet, Numbers, Seat, WorkerSeat
from kvferry.cli.soak.load import SHAPES, SOURCES, Load, Running
from kvferry.cli.soak.worker import Ended, Look, Worker
from kvferry.errors import WorkerFailed

ROUND_S = 12.0
AT_ONCE = 8
ABORTED_SHARE = 0.1
HUNG_S = 15.0
"""How long after its deadline, and after everybody goes on, an end may come at the latest."""
QUIET_S = 20.0
PROBLEMS_KEPT = 20


@dataclass(frozen=True)
class Settings:
    minutes: float
    seed: int
    transport: str
    make: Callable[[], Worker] = Worker
    keys: bool = False


@dataclass
class Usage:
    """One process: what it used at the first and at the last quiet moment of its life, and what it held then."""

    seat: str
    pid: int
    first: Numbers
    last: Numbers
    look: Look | None = None


@dataclass
class Outcome:
    """Everything that a soak has seen. `problems`: whatever must not be."""

    settings: Settings
    seconds: float = 0.0
    interrupted: bool = False
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    quiet_moments: int = 0
    wrong_bytes: int = 0
    hung: int = 0
    unexplained: int = 0
    pages_held: int = 0
    slots_held: int = 0
    usage: dict[int, Usage] = field(default_factory=dict)  # by pid, of those that live
    problems: list[str] = field(default_factory=list)

    def wrong(self, problem: str) -> None:
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)


class Soak:
    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        outcome: Outcome,
        say: Callable[[str], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        rng = random.Random(settings.seed)
        self._enough = enough
        self._rng, self._fleet, self._outcome, self._say = rng, fleet, outcome, say
        self._load = Load(rng, SHAPES)
        self._faults = Faults(rng, fleet, time.monotonic())
        self._running: dict[str, Running] = {}
        self._began_s = time.monotonic()
        self._length_s = settings.minutes * 60

    def run(self) -> None:
        """Until its time is over or somebody has had enough; then everything is looked at once more."""
        self._come_to_rest()  # also waits until everybody is there
        self._began_s = time.monotonic()
        while (left_s := self._length_s - self._elapsed_s()) > 0 and not self._enough():
            self._round(min(left_s, ROUND_S, max(3.0, self._length_s / 3)))
            self._come_to_rest()
        self._outcome.interrupted = self._enough()

    # a round

    def _round(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        next_s = 0.0
        while (now := time.monotonic()) < end_s and not self._enough():
            for seat in self._faults.tick(now):
                self._outcome.restarts += 1
                self._gone(seat)
            if next_s <= now and len(self._running) < AT_ONCE:
                request = self._load.draw()
                if request is not None:
                    self._start(Running(request, now, {}))
                next_s = now + self._rng.uniform(0.0, 0.1)
            self._pump()

    def _start(self, running: Running, aborts: bool = True) -> None:
        request = running.request
        sources, targets = self._fleet.of(request.source), self._fleet.of(request.target)
        calls = [("receive", seat) for seat in targets] + [("send", seat) for seat in sources]
        for call, seat in calls if request.offer_first else reversed(calls):
            if seat.living:
                running.parts[seat.name, seat.starts] = None
                seat.say(call, request)
        if aborts and self._rng.random() < ABORTED_SHARE:
            running.abort_s = running.began_s + self._rng.uniform(0.0, 0.3)
        self._running[request.id] = running

    def _pump(self) -> None:
        """One look at everybody: what has ended, and what has to be aborted."""
        now = time.monotonic()
        try:
            for seat, ended in self._fleet.pump():
                self._ended(seat, ended)
        except WorkerFailed as error:
            self._crashed(error)
        for running in list(self._running.values()):
            if running.abort_s is not None and running.abort_s <= now:
                running.abort_s, running.aborted = None, True
                living = [seat for seat in self._takers(running) if seat.living]
                if living:
                    self._rng.choice(living).say("abort", running.request.id)
            self._forget_if_over(running)
        time.sleep(0.002)

    def _takers(self, running: Running) -> list[WorkerSeat]:
        return self._fleet.of(running.request.source) + self._fleet.of(running.request.target)

    def _crashed(self, error: WorkerFailed) -> None:
        """A process that nobody killed."""
        self._outcome.wrong(f"a worker failed by itself: {error}")
        for seat in self._fleet.workers:
            if seat.name == error.worker and seat.living:
                seat.kill()
                self._gone(seat)
                seat.start()

    def _ended(self, seat: WorkerSeat, ended: Ended) -> None:
        running = self._running.get(ended.request)
        part = (seat.name, seat.starts)
        if running is None or part not in running.parts:
            return self._outcome.wrong(f"{seat.name} ended {ended.request} a second time, or never began it")
        running.parts[part] = ended
        if ended.wrong_bytes:
            self._outcome.wrong_bytes += ended.wrong_bytes
            self._outcome.wrong(f"{seat.name}: {ended.wrong_bytes} wrong bytes in the pages of {ended.request}")

    def _gone(self, seat: Seat) -> None:
        """Its process has been killed."""
        for running in self._running.values():
            running.gone |= {part for part in running.parts if part[0] == seat.name and part[1] == seat.starts}

    def _forget_if_over(self, running: Running) -> None:
        if not running.over:
            return
        request = running.request
        del self._running[request.id]
        for instance, pages in ((request.source, request.source_pages), (request.target, request.target_pages)):
            self._load.give_back(instance, pages)
        outcome = running.outcome
        self._outcome.requests[outcome] += 1
        hurt = self._faults.explain(request.source, request.target, running.began_s, time.monotonic())
        if outcome != "done" and not hurt and not (running.aborted and outcome == "aborted"):
            self._outcome.unexplained += 1
            self._outcome.wrong(f"{request.id} failed, and nothing was done to it: {running.problem or outcome}")

    # rest

    def _come_to_rest(self) -> None:
        """Everybody goes on, everything ends, and nothing may be left."""
        self._faults.heal(time.monotonic())
        self._fleet.heal()
        self._wait_for_ends()
        for seat in self._fleet.workers:  # what is measured should not depend on who has talked to whom already
            self._until(lambda seat=seat: seat.state == "open", HUNG_S)  # type: ignore[misc]  # bound now
        for source in SOURCES:
            self._cross(source)
        self._count()
        self._outcome.quiet_moments += 1
        self._outcome.faults = Counter(self._faults.counts)
        self._outcome.seconds = self._elapsed_s()
        self._say(self.line())

    def _wait_for_ends(self) -> None:
        deadline_s = max((r.request.timeout_s for r in self._running.values()), default=0.0)
        if self._until(lambda: not self._running, deadline_s + HUNG_S):
            return
        for running in list(self._running.values()):
            self._outcome.hung += 1
            waiting = [part[0] for part, ended in running.parts.items() if ended is None and part not in running.gone]
            self._outcome.wrong(f"{running.request.id} never ended on {', '.join(waiting)}")
            running.gone |= set(running.parts)
            self._forget_if_over(running)

    def _cross(self, source: str) -> None:
        """One request that nobody disturbs. A worker that was just started may have to register first."""
        request = self._load.draw(source)
        if request is None:
            return self._outcome.wrong(f"no pages are left for a request from {source}")
        running = Running(request, time.monotonic(), {})
        self._start(running, aborts=False)
        self._wait_for_ends()
        if running.outcome != "done":
            self._outcome.wrong(f"at rest, {request.id} from {source} failed: {running.problem or running.outcome}")

    def _count(self) -> None:
        outcome = self._outcome
        self._until(lambda: all(look.clean for look in self._looks().values()), QUIET_S)
        looks = self._looks()
        outcome.pages_held = self._load.pages_held()
        outcome.slots_held = sum(look.slots_held for look in looks.values())
        living = {seat.pid for seat in self._fleet.seats}
        outcome.usage = {pid: usage for pid, usage in outcome.usage.items() if pid in living}
        for seat in self._fleet.seats:
            now, look = seat.numbers(), looks.get(seat.name)
            usage = outcome.usage.setdefault(seat.pid, Usage(seat.name, seat.pid, now, now))
            usage.last, usage.look = now, look
            if look is not None and not look.clean:
                held = f"{look.slots_held} slots and {look.transfers} transfers, and waits for {look.greeted} peers"
                outcome.wrong(f"{seat.name} still holds {held} after {QUIET_S:g} s of rest")
            if look is not None and look.wrong_bytes:
                outcome.wrong_bytes += look.wrong_bytes
                outcome.wrong(f"{seat.name}: {look.wrong_bytes} wrong bytes in its memory")

    def _looks(self) -> dict[str, Look]:
        for seat in self._fleet.workers:
            seat.looks.clear()
            seat.look()
        self._until(lambda: all(seat.looks for seat in self._fleet.workers), HUNG_S)
        looks = {seat.name: seat.looks[-1] for seat in self._fleet.workers if seat.looks}
        for name, look in looks.items():
            for error in look.errors:
                self._outcome.wrong(f"{name} has logged an error: {error}")
        return looks

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end_s:
                return False
            self._pump()
        return True

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def line(self) -> str:
        """How it goes, in one line."""
        outcome = self._outcome
        done, total = outcome.requests["done"], sum(outcome.requests.values())
        faults = sum(outcome.faults.values())
        return (
            f"{self._elapsed_s() / 60:.1f} of {self._length_s / 60:g} min: {total} requests, {done} done, "
            f"{faults} faults, {outcome.restarts} restarts, {outcome.wrong_bytes} wrong bytes, "
            f"{len(outcome.problems)} problems"
        )


def soak(
    settings: Settings, outcome: Outcome, say: Callable[[str], None], enough: Callable[[], bool] = lambda: False
) -> None:
    """Fills `outcome` as it goes. `enough`: whether it should come to its end."""
    with ExitStack() as opened:
        folder = opened.enter_context(TemporaryDirectory(prefix="kvferry-soak-")) if settings.keys else None
        keys = Path(folder) if folder else None
        fleet = opened.enter_context(Fleet(SHAPES, settings.transport, settings.make, keys))
        Soak(settings, fleet, outcome, say, enough).run()
