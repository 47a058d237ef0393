"""The driver: it meets the workers of both sides, has them move every case, and gathers their verdicts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.cli.verify.cases import Case, bulk_case, make_cases
from kvferry.cli.verify.control import Answer, Caller, Describe, Described, Ended, Expect, Fill, Question, Receive, Send
from kvferry.cli.verify.names import control_name
from kvferry.cli.verify.synthetic import Checked, Fault, Guards, Outcome, Share
from kvferry.errors import RegistryError, WorkerFailed
from kvferry.layout.document import Instance
from kvferry.plan.route import check_compatible, route
from kvferry.session.choices import registry_at
from kvferry.session.keys import Access
from kvferry.session.messages import Peer
from kvferry.session.registry import Entry

ASK_S = 30.0
CHECK_S = 120.0
LOOK_S = 0.1
BULK_TIMES = 3


@dataclass(frozen=True)
class Wrong:
    """A wrong cell, and the case that showed it."""

    case: str
    fault: Fault


@dataclass
class Pair:
    """One group between one source and one target worker, over all cases. Bytes are counted at the target."""

    group: str
    source: int
    target: int
    via: str = ""
    cases: int = 0
    bytes: int = 0
    wrong_bytes: int = 0
    first: Wrong | None = None
    problem: str = ""

    @property
    def good(self) -> bool:
        return bool(self.cases) and not self.wrong_bytes and not self.problem


@dataclass
class Fence:
    """The guards of one target worker: everything that no case wanted."""

    target: int
    cases: int = 0
    stray_bytes: int = 0
    where: str = ""


@dataclass(frozen=True)
class Speed:
    """Of the fastest of a few transfers of all groups, from receive() to the commit on the last rank."""

    bytes: int
    seconds: float


@dataclass
class Verdict:
    source: Instance
    target: Instance
    cases: int = 0
    pairs: dict[tuple[str, int, int], Pair] = field(default_factory=dict)
    fences: dict[int, Fence] = field(default_factory=dict)
    speed: Speed | None = None

    @property
    def good(self) -> bool:
        return all(pair.good for pair in self.pairs.values()) and not any(f.stray_bytes for f in self.fences.values())


class Driver:
    def __init__(self, url: str, at: Access, timeout_s: float) -> None:
        self._registry, self._timeout_s = registry_at(url, at), timeout_s
        self._run = secrets.token_hex(4)
        self._caller = Caller(Peer(f"verify-driver-{self._run}", time.time_ns(), 0), at)

    def close(self) -> None:
        self._caller.close()

    def verify(self, source: str, target: str, wait_s: float, nbytes: int, say: Callable[[str], None]) -> Verdict:
        """`source`, `target`: names that workers wait under, for `wait_s` at most. IncompatibleError, PlanError where
        the two don't fit; WorkerFailed, EngineError where a worker is lost.
        """
        senders, here = self._meet(source, wait_s)
        takers, there = self._meet(target, wait_s)
        check_compatible(here, there)
        shares = {peer: tuple(Share(r.source, r.box) for r in route(here, there, peer.rank)) for peer in takers}
        self._caller.ask({peer: Expect(()) for peer in senders}, ASK_S)
        self._caller.ask({peer: Expect(some) for peer, some in shares.items()}, ASK_S)
        verdict = Verdict(here, there)
        for peer, some in shares.items():
            verdict.fences[peer.rank] = Fence(peer.rank)
            for share in some:
                key = (share.box.group, share.source, peer.rank)
                verdict.pairs.setdefault(key, Pair(*key))
        cases = make_cases(here, there)
        for number, case in enumerate(cases):
            say(f"case {number + 1} of {len(cases)}: {', '.join(case.groups)}, {case.name}")
            self._case(verdict, case, senders, takers)
        if verdict.good and nbytes:
            say("measuring")
            bulk = bulk_case(here, there, nbytes)
            taken = [self._case(verdict, bulk, senders, takers) for _ in range(BULK_TIMES)]
            moved = [(nbytes, seconds) for nbytes, seconds in taken if seconds]
            verdict.speed = Speed(*min(moved, key=lambda one: one[1])) if moved else None
        return verdict

    def _meet(self, name: str, wait_s: float) -> tuple[list[Peer], Instance]:
        """The workers that wait under a name, and the instance that they make together."""
        peers = [self._caller.open(entry) for entry in self._wait(name, wait_s)]
        parts = [
            self._described(answer).instance
            for answer in self._caller.ask(dict.fromkeys(peers, Describe()), ASK_S).values()
        ]
        first = parts[0]
        for part in parts[1:]:
            if (part.model, part.groups) != (first.model, first.groups):
                raise WorkerFailed(name, "its workers were started with different documents")
        workers = tuple(sorted((w for part in parts for w in part.workers), key=lambda worker: worker.rank))
        return peers, Instance(first.format, first.instance, first.model, first.groups, workers)

    def _wait(self, name: str, wait_s: float) -> tuple[Entry, ...]:
        end_s = time.monotonic() + wait_s
        while True:
            try:
                view = self._registry.instance(control_name(name))
                if view.ready:
                    return view.workers
                problem = view.missing
            except RegistryError as error:
                problem = str(error)
            if time.monotonic() > end_s:
                raise RegistryError(
                    f"no workers named {name!r} wait at {self._registry.url} ({problem}); start them where "
                    f"{name!r} is: kvferry verify worker FILE --name {name} --registry {self._registry.url}"
                )
            time.sleep(LOOK_S)

    @staticmethod
    def _described(answer: Answer) -> Described:
        assert isinstance(answer, Described)
        return answer

    def _case(self, verdict: Verdict, case: Case, senders: Sequence[Peer], takers: Sequence[Peer]) -> tuple[int, float]:
        """Move it; the bytes that were checked, and the seconds that it took the slowest target, 0 where it failed."""
        verdict.cases += 1
        transfer = f"verify-{self._run}-{verdict.cases}"
        self._caller.ask(dict.fromkeys(senders, Fill(case)), CHECK_S)
        receive = Receive(case, transfer, verdict.source.instance, self._timeout_s)
        questions: dict[Peer, Question] = {
            **dict.fromkeys(senders, Send(case, transfer, self._timeout_s)),
            **dict.fromkeys(takers, receive),
        }
        answers = self._caller.ask(questions, self._timeout_s + CHECK_S)
        outcomes = {peer: answer.outcome for peer, answer in answers.items() if isinstance(answer, Ended)}
        for peer in takers:
            _note(verdict, case, peer.rank, outcomes[peer])
        for peer in senders:
            _note_links(verdict, peer.rank, outcomes[peer], case)
        seconds = 0.0 if any(one.problem for one in outcomes.values()) else max(outcomes[p].seconds for p in takers)
        return sum(one.bytes for peer in takers for one in outcomes[peer].checked), seconds


def _note(verdict: Verdict, case: Case, rank: int, outcome: Outcome) -> None:
    """What a target worker says of a case."""
    if outcome.problem:
        for pair in verdict.pairs.values():
            if pair.target == rank and pair.group in case.groups:
                pair.problem = pair.problem or f"{case.name}: {outcome.problem}"
        return
    for checked in outcome.checked:
        _count(verdict, case, rank, checked)
    _fence(verdict.fences[rank], case, outcome.guards)


def _count(verdict: Verdict, case: Case, rank: int, checked: Checked) -> None:
    key = (checked.group, checked.source, rank)
    pair = verdict.pairs.setdefault(key, Pair(*key))
    pair.cases += 1
    pair.bytes += checked.bytes
    pair.wrong_bytes += checked.wrong_bytes
    if pair.first is None and checked.fault is not None:
        pair.first = Wrong(case.name, checked.fault)


def _fence(fence: Fence, case: Case, guards: Guards) -> None:
    fence.cases += 1
    fence.stray_bytes += guards.stray_bytes
    if guards.where and not fence.where:
        fence.where = f"{guards.where}, in {case.name}"


def _note_links(verdict: Verdict, rank: int, outcome: Outcome, case: Case) -> None:
    """Which transport a source worker has used to whom, or why it failed."""
    by_target = {int(peer.rpartition("/")[2]): link.partition(":")[0] for peer, link in outcome.links.items()}
    for pair in verdict.pairs.values():
        if pair.source == rank:
            pair.via = by_target.get(pair.target, pair.via)
            if outcome.problem and pair.group in case.groups:
                pair.problem = pair.problem or f"{case.name}: {outcome.problem}"
