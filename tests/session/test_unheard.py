"""Nothing that nobody hears is kept for ever, and nobody is asked for ever: whatever it is that was said, however the
transfer ended. And what a peer must hear to have its slots back is said until it does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from kvferry.errors import PeerLost
from kvferry.layout.request import Wanted
from kvferry.session import core, delivery
from kvferry.session.delivery import ENDS
from kvferry.session.events import (
    AbortCall,
    Action,
    Died,
    DrainCall,
    Event,
    ReceiveCall,
    Received,
    Send,
    SendCall,
    Write,
)
from kvferry.session.machine import Machine
from kvferry.session.messages import (
    Abort,
    AbortAck,
    About,
    ChunkDone,
    Commit,
    Complete,
    Grants,
    Landed,
    Message,
    Offer,
    Peer,
    Ready,
)
from kvferry.session.source import SOURCE_SAYS
from kvferry.session.target import TARGET_SAYS
from tests.session.pools import Shape
from tests.session.sim import TABLES, TOKENS, Sim
from tests.session.test_machine import ends

KEEP_S = 15.0
"""Ten minutes are many beats."""


class Recorded(Sim):
    """`said`: how many messages of each kind."""

    def __post_init__(self) -> None:
        self.said: Counter[type[Message]] = Counter()
        super().__post_init__()

    def act(self, peer: Peer, actions: list[Action]) -> None:
        self.said.update(type(action.body) for action in actions if isinstance(action, Send))
        super().act(peer, actions)


class Deaf(Recorded):
    """Everybody does what it is told and acknowledges nothing."""

    def event(self, peer: Peer, event: Event) -> None:
        if isinstance(event, Received):
            event = replace(event, place=msgspec.structs.replace(event.place, heard=0))
        super().event(peer, event)


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "KEEP_S", KEEP_S)
    monkeypatch.setattr(core, "KEEP_S", KEEP_S)


def make(kind: type[Recorded] = Recorded, tp: int = 2, slots: int = 2) -> Recorded:
    shapes = {"p": Shape(tp=tp), "d": Shape(tp=tp, page_tokens=6)}
    return kind(random.Random(1), shapes, slots=slots)


def begin(sim: Sim, timeout_s: float = 10.0, sends: bool = True) -> None:
    for peer, call in sim.start("a", "p", "d", timeout_s):
        if sends or not isinstance(call, SendCall):
            sim.event(peer, call)


def until_granted(sim: Sim) -> None:
    while not any(machine.stats()["slots_used"] for machine in sim.machines.values()):
        assert sim.step()


def go_on(sim: Sim, seconds: float) -> None:
    for _ in range(int(seconds)):
        while sim.step():
            pass
        sim.pass_time(1.0)
    while sim.step():
        pass


def unheard(sim: Sim) -> set[type[Message]]:
    lines = [line for machine in sim.machines.values() for line in machine.core.delivery._lines.values()]
    return {type(said.body) for line in lines for said in line.said}


def greet(sim: Sim, peer: Peer, other: Peer) -> None:
    entry = next(entry for entry in sim.entries[other.instance] if entry.rank == other.rank)
    sim.machines[peer].core.hello(other, entry.address, "", sim.now + 50)
    sim.act(peer, sim.machines[peer].tick(sim.now))


# how a transfer ends, and what is said of it until then


def completes(sim: Sim) -> None:
    begin(sim)


def aborted_by(name: str) -> Callable[[Sim], None]:
    def end(sim: Sim) -> None:
        begin(sim)
        until_granted(sim)
        sim.event(sim.peers(name)[0], AbortCall("source" if name == "p" else "target", "a", "enough"))

    return end


def passes_its_deadline(sim: Sim) -> None:
    begin(sim, 3.0)
    until_granted(sim)
    sim.pass_time(3.5)


def refused(sim: Sim) -> None:
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, replace(call, groups={"attn": Wanted((0, 7))}) if isinstance(call, SendCall) else call)


def refused_by_a_source_that_drains(sim: Sim) -> None:
    for peer in sim.peers("p"):
        sim.event(peer, DrainCall())
    begin(sim, sends=False)


def drained_while_it_waits(sim: Sim) -> None:
    begin(sim, 100.0, sends=False)
    for _ in range(300):
        sim.step()
    for peer in sim.peers("p"):
        sim.event(peer, DrainCall())


def without_a_worker_of(name: str) -> Callable[[Sim], None]:
    def end(sim: Sim) -> None:
        begin(sim)
        until_granted(sim)
        sim.kill(sim.peers(name)[-1])

    return end


def without_a_start_of(name: str) -> Callable[[Sim], None]:
    """Which has only stood still, and goes on."""

    def end(sim: Sim) -> None:
        begin(sim)
        until_granted(sim)
        sim.boot(Peer(name, 2, 0))
        for peer in sim.peers("d" if name == "p" else "p"):
            greet(sim, Peer(name, 2, 0), peer)

    return end


ENDINGS: dict[str, tuple[Callable[[Sim], None], set[type[Message]]]] = {
    "completes": (completes, {Offer, Ready, Grants, ChunkDone, Landed, Commit, Complete}),
    "aborted by a source": (aborted_by("p"), {Offer, Ready, Grants, Abort, AbortAck}),
    "aborted by a target": (aborted_by("d"), {Offer, Ready, Grants, Abort, AbortAck}),
    "passes its deadline": (passes_its_deadline, {Offer, Ready, Grants, Abort, AbortAck}),
    "refused": (refused, {Offer, Abort, AbortAck}),
    "refused by a source that drains": (refused_by_a_source_that_drains, {Offer, Abort, AbortAck}),
    "drained while it waits": (drained_while_it_waits, {Offer, Abort, AbortAck}),
    "without a source": (without_a_worker_of("p"), {Offer, Ready, Grants, Abort, AbortAck}),
    "without a target": (without_a_worker_of("d"), {Offer, Ready, Grants, Abort, AbortAck}),
    "without an earlier start of a source": (without_a_start_of("p"), {Offer, Ready, Grants, Abort, AbortAck}),
    "without an earlier start of a target": (without_a_start_of("d"), {Offer, Ready, Grants, Abort, AbortAck}),
}
ending = pytest.mark.parametrize(("end", "kinds"), ENDINGS.values(), ids=ENDINGS.keys())


def test_every_kind_of_message_about_a_transfer_is_here() -> None:
    kinds = {kind for _, kinds in ENDINGS.values() for kind in kinds}
    assert kinds == {*SOURCE_SAYS, *TARGET_SAYS, *ENDS} == set(About.__subclasses__())


def check_rest(sim: Recorded) -> None:
    assert not any(machine.sources.running or machine.targets.running for machine in sim.machines.values())
    assert unheard(sim) == set()
    sim.said.clear()
    go_on(sim, 20)
    assert not sim.said, "nobody is asked for anything any more"


@ending
def test_peers_that_acknowledge_nothing_are_told_no_more(end: Callable[[Sim], None], kinds: set[type[Message]]) -> None:
    sim = make(Deaf)
    end(sim)
    go_on(sim, 4 * KEEP_S)
    assert kinds <= sim.said.keys()
    check_rest(sim)


@pytest.mark.parametrize("side", ["p", "d"])
@ending
def test_peers_that_die_unwitnessed_are_told_no_more(
    end: Callable[[Sim], None], kinds: set[type[Message]], side: str
) -> None:
    """But for slots that one of them may still write, as far as we can know."""
    sim = make()
    end(sim)
    dead = sim.peers(side)
    for peer in dead:
        del sim.machines[peer]
    sim.wire = {line: some for line, some in sim.wire.items() if line[1] not in dead}
    sim.jobs = [job for job in sim.jobs if job.owner not in dead]
    go_on(sim, 4 * KEEP_S + 20)
    assert unheard(sim) <= ({Abort} if any(m.core.ledger.doubts for m in sim.machines.values()) else set())
    for peer in sim.machines:
        for gone in dead:
            sim.event(peer, Died(gone))
    sim.settle()
    check_rest(sim)


# what must be heard


def stopped_while_granted(sim: Sim, name: str, timeout_s: float = 100.0) -> tuple[Peer, Machine]:
    """A worker that stands still in the middle of a transfer: what it was told waits for it."""
    begin(sim, timeout_s)
    until_granted(sim)
    (peer,) = sim.peers(name)
    return peer, sim.machines.pop(peer)


def test_an_earlier_start_of_a_target_that_comes_back_gets_its_slots_back() -> None:
    """The source has been told of the later start meanwhile, and doesn't forget at once that the earlier one needs
    its word.
    """
    sim = make(tp=1)
    earlier, machine = stopped_while_granted(sim, "d")
    (source,) = sim.peers("p")
    sim.wire.clear()
    sim.boot(Peer("d", 2, 0))
    greet(sim, Peer("d", 2, 0), source)
    go_on(sim, 2)
    assert isinstance(ends(sim)[source, "a"].error, PeerLost)
    assert sim.machines[source].stats()["peers"] == 1
    go_on(sim, KEEP_S / 2)
    sim.machines[earlier] = machine
    assert machine.stats()["slots_used"] > 0
    go_on(sim, 30)
    assert isinstance(ends(sim)[earlier, "a"].error, PeerLost)
    assert machine.stats()["slots_free"] == sim.slots
    go_on(sim, 3 * KEEP_S)
    assert sim.machines[source].core.known.keys() == {Peer("d", 2, 0)}


def test_an_earlier_start_ends_nothing_of_the_later_one() -> None:
    sim = make(tp=1)
    begin(sim)
    sim.settle()
    (source,), (earlier,) = sim.peers("p"), sim.peers("d")
    later = Peer("d", 2, 0)
    sim.boot(later)
    greet(sim, later, source)
    sim.settle()
    sim.event(source, SendCall("b", TOKENS, TABLES, 10.0))
    sim.event(later, ReceiveCall("b", "p", TOKENS, TABLES, 10.0))
    sim.event(source, Received(earlier, source, Abort("b", 1, "source", "aborted", "a ghost")))
    sim.settle()
    assert ends(sim)[source, "b"].error is None
    assert ends(sim)[later, "b"].error is None


def test_a_registry_that_is_behind_names_an_earlier_start_and_nothing_is_offered_to_it() -> None:
    sim = make(tp=1)
    (target,) = sim.peers("d")
    behind = sim.entries["p"]
    begin(sim)
    sim.settle()
    sim.boot(Peer("p", 2, 0))
    greet(sim, Peer("p", 2, 0), target)
    sim.settle()
    sim.entries["p"], now = behind, sim.entries["p"]
    sim.said.clear()
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, 10.0))
    for _ in range(50):
        sim.step()
    assert not sim.said[Offer]
    sim.entries["p"] = now
    sim.event(Peer("p", 2, 0), SendCall("b", TOKENS, TABLES, 10.0))
    sim.settle()
    assert ends(sim)[target, "b"].error is None


def test_an_earlier_start_is_the_latest_again_when_the_later_one_has_left() -> None:
    sim = make(tp=1)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    entries = sim.entries["p"]
    begin(sim)
    sim.settle()
    sim.boot(Peer("p", 2, 0))
    greet(sim, Peer("p", 2, 0), target)
    sim.settle()
    sim.entries["p"] = entries
    sim.kill(Peer("p", 2, 0))
    for peer, call in sim.start("b", "p", "d"):
        sim.event(peer, call)
    sim.settle()
    assert ends(sim)[target, "b"].error is None
    assert ends(sim)[source, "b"].error is None


def test_a_worker_that_starts_again_and_again_leaves_few_lines_behind() -> None:
    sim = make(tp=1)
    (source,) = sim.peers("p")
    for generation in range(2, 200):
        sim.boot(Peer("d", generation, 0))
        greet(sim, Peer("d", generation, 0), source)
        del sim.machines[Peer("d", generation, 0)]
        while sim.step():
            pass
    sim.pass_time(1.0)
    assert Peer("d", 199, 0) in sim.machines[source].core.known
    assert len(sim.machines[source].core.known) <= core.EARLIER_LIMIT + 1
    assert sim.machines[source].stats()["peers"] == 1


def test_an_answer_that_waits_for_a_write_is_owed_to_an_earlier_start_too() -> None:
    sim = make(tp=1)
    begin(sim, 100.0)
    while not any(isinstance(job.action, Write) and job.begun for job in sim.jobs):
        assert sim.step()
    (source,), (earlier,) = sim.peers("p"), sim.peers("d")
    writes, sim.jobs = sim.jobs, []
    sim.event(earlier, AbortCall("target", "a", "enough"))
    go_on(sim, 2)
    sim.boot(Peer("d", 2, 0))
    greet(sim, Peer("d", 2, 0), source)
    go_on(sim, 2)
    assert sim.machines[earlier].stats()["slots_quarantined"] > 0
    sim.jobs += writes
    go_on(sim, 5)
    assert sim.machines[earlier].stats()["slots_free"] == sim.slots


def test_an_answer_to_an_abort_that_was_given_up_is_asked_for_again() -> None:
    """The source has heard that it has ended, and gives up answering while the target stands still."""
    sim = make(tp=1)
    begin(sim)
    until_granted(sim)
    (target,) = sim.peers("d")
    sim.lose = lambda sender, recipient, body: recipient == target
    sim.event(target, AbortCall("target", "a", "enough"))
    go_on(sim, 5)
    assert sim.said[AbortAck] == 1
    stopped = sim.machines.pop(target)
    go_on(sim, 4 * KEEP_S)
    assert unheard(sim) == set()
    sim.machines[target] = stopped
    sim.lose = lambda sender, recipient, body: False
    assert stopped.stats()["slots_quarantined"] > 0
    go_on(sim, 2 * KEEP_S)
    assert stopped.stats()["slots_free"] == sim.slots
    check_rest(sim)


def test_who_stood_still_for_longer_than_that_says_it_once_more() -> None:
    """The other side was there all the time, and has only missed the last word."""
    sim = make(tp=1)
    sim.lose = lambda sender, recipient, body: isinstance(body, Complete) and sim.now == 0
    begin(sim, 100.0)
    while sim.step():
        pass
    assert sim.said[Complete] == 1
    sim.pass_time(2 * KEEP_S)
    go_on(sim, 3)
    assert all(ended.error is None for ended in ends(sim).values())
    assert len(sim.ended) == 2
