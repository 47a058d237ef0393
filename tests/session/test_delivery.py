"""F55: whatever control message is lost, once or as long as the line is cut, the transfer goes on; and who says nothing
is noticed.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvferry.errors import TransferAborted, TransferTimeout
from kvferry.session import delivery
from kvferry.session.events import AbortCall, Note, ReceiveCall, Received, Send, SendCall
from kvferry.session.messages import (
    Abort,
    AbortAck,
    Beat,
    ChunkDone,
    Commit,
    Complete,
    Grants,
    Hello,
    Landed,
    Message,
    Offer,
    Peer,
    Place,
    Ready,
    Welcome,
)
from tests.session.pools import Shape
from tests.session.sim import TABLES, TOKENS, Sim
from tests.session.test_machine import check, ends, moving

ON_THE_WAY = (Hello, Welcome, Offer, Ready, Grants, ChunkDone, Landed, Commit, Complete)


def make(tp_source: int = 2, tp_target: int = 2, **options: object) -> Sim:
    shapes = {"p": Shape(tp=tp_source), "d": Shape(tp=tp_target, page_tokens=6)}
    return Sim(random.Random(0), shapes, **options)  # type: ignore[arg-type]


def begin(sim: Sim, transfer: str = "a", timeout_s: float = 60.0) -> None:
    for peer, call in sim.start(transfer, "p", "d", timeout_s):
        sim.event(peer, call)


@pytest.mark.parametrize("kind", ON_THE_WAY, ids=lambda kind: kind.__name__)
def test_f55_each_message_may_be_lost_once_on_every_line(kind: type[Message]) -> None:
    sim = make()
    lost: Counter[tuple[Peer, Peer]] = Counter()

    def lose(sender: Peer, recipient: Peer, body: Message) -> bool:
        lost[sender, recipient] += isinstance(body, kind)
        return isinstance(body, kind) and lost[sender, recipient] == 1

    sim.lose = lose
    begin(sim)
    sim.settle()
    assert sum(count > 0 for count in lost.values()) >= 1
    assert all(ended.error is None for ended in check(sim, ["a"], 60).values())
    assert max(at_s for _, _, at_s in sim.ended) < 8, "it doesn't wait for the deadline"


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("kind", [Abort, AbortAck], ids=lambda kind: kind.__name__)
def test_f55_an_abort_and_its_answer_may_be_lost(kind: type[Message], side: str) -> None:
    sim = make(slots=4)
    begin(sim)
    while not any(machine.stats()["slots_used"] for machine in sim.machines.values()):
        assert sim.step()
    lost: Counter[tuple[Peer, Peer]] = Counter()

    def lose(sender: Peer, recipient: Peer, body: Message) -> bool:
        lost[sender, recipient] += isinstance(body, kind)
        return isinstance(body, kind) and lost[sender, recipient] <= 2

    sim.lose = lose
    sim.event(sim.peers(side)[0], AbortCall("source" if side == "p" else "target", "a", "enough"))
    sim.settle()
    assert lost
    assert all(isinstance(ended.error, TransferAborted) for ended in check(sim, ["a"], 60).values())


@pytest.mark.parametrize("seed", range(8))
def test_f55_many_losses_and_a_distant_deadline_end_in_success(seed: int) -> None:
    sim = make(drop=0.3, duplicate=0.1, reorder=True)
    sim.rng.seed(seed)
    for name in ("a", "b"):
        begin(sim, name, 3_000.0)
    sim.settle()
    assert all(ended.error is None for ended in check(sim, ["a", "b"], 3_000).values())
    for machine in sim.machines.values():
        refused = {reason for reason in machine.stats() if reason.startswith("refused: ")}
        assert refused <= {"refused: message from an unknown peer", "refused: welcome without a hello"}, (
            "once, in order"
        )


def test_a_line_that_is_cut_for_a_while_costs_that_while() -> None:
    sim, source, _, _ = moving()
    sim.lose = lambda sender, recipient, body: sim.now < 5.0
    sim.settle()
    assert all(ended.error is None for ended in check(sim, ["a"], 10).values())
    assert 5.0 <= max(at_s for _, _, at_s in sim.ended) < 5.0 + delivery.BEAT_MAX_S
    assert sim.machines[source].stats()["messages_repeated"] > 0


def test_what_is_not_lost_is_not_repeated_and_peers_hear_little() -> None:
    """Messages of one transfer between one source and one target, with the acknowledgement at its end."""
    sim = make(1, 1, slots=64)
    sim.slots = 64
    said: Counter[str] = Counter()

    def count(sender: Peer, recipient: Peer, body: Message) -> bool:
        said[type(body).__name__] += not isinstance(body, (Hello, Welcome))
        return False

    sim.lose = count
    begin(sim, "first")
    sim.settle()
    pieces = len(next(iter(sim.wanted.values())))
    said.clear()
    begin(sim, "second")
    sim.settle()
    assert said["Offer"] == said["Ready"] == said["Complete"] == 1
    assert said["ChunkDone"] == pieces
    assert said["Beat"] <= 3
    assert not any(machine.stats()["messages_repeated"] for machine in sim.machines.values())


def test_f57_a_silent_peer_is_noticed_and_named_and_ends_nothing_before_the_deadline() -> None:
    sim, source, target, _ = moving()
    notes: list[tuple[float, str]] = []
    act = sim.act

    def listen(peer: Peer, actions: list[object]) -> None:
        notes.extend((sim.now, action.text) for action in actions if isinstance(action, Note))
        act(peer, actions)  # type: ignore[arg-type]

    sim.act = listen  # type: ignore[method-assign, assignment]
    sim.wire.clear()
    stopped = sim.machines.pop(source)
    while sim.now < 4.5:
        sim.pass_time(0.1)
    at_s = next(at_s for at_s, text in notes if f"no word from {source} for" in text)
    assert delivery.SILENT_S <= at_s <= delivery.SILENT_S + 2 * delivery.BEAT_S
    assert sim.machines[target].stats()["peers_silent"] == 1
    assert not sim.ended
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, 3.0))
    while sim.now < 12:
        sim.pass_time(0.1)
    for transfer in ("a", "b"):
        error = ends(sim)[target, transfer].error
        assert isinstance(error, TransferTimeout)
        assert f"no word from {source} for " in str(error)
    sim.machines[source] = stopped
    sim.pass_time(delivery.BEAT_MAX_S)
    sim.settle()
    assert any(f"{source} is heard again" in text for _, text in notes)
    assert sim.machines[target].stats()["peers_silent"] == 0
    assert sim.machines[target].stats()["slots_free"] == sim.slots


def test_a_peer_may_be_silent_for_days() -> None:
    """And its slots in doubt: it is asked on and on, and answers when it is there again."""
    sim, source, target, _ = moving()
    sim.event(target, AbortCall("target", "a", "enough"))
    stopped = sim.machines.pop(source)
    for _ in range(1_200):
        sim.wire.clear()
        sim.pass_time(240.0)
    sim.machines[source] = stopped
    sim.pass_time(delivery.BEAT_MAX_S)
    sim.settle()
    assert sim.machines[target].stats()["slots_free"] == sim.slots


def test_nothing_is_asked_where_nothing_runs() -> None:
    sim = make(1, 1)
    begin(sim)
    sim.settle()
    sim.pass_time(delivery.BEAT_S)
    sim.settle()
    assert all(machine.next_s() == float("inf") for machine in sim.machines.values())


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sent_first", [False, True])
def test_an_abort_before_the_offer_ends_the_source(known: bool, sent_first: bool) -> None:
    """The source would keep its pages until its own deadline otherwise."""
    sim = make(1, 1)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    if known:
        begin(sim, "earlier")
        sim.settle()
    if sent_first:
        sim.event(source, SendCall("a", TOKENS, TABLES, 500.0))
    sim.event(target, ReceiveCall("a", "p", TOKENS, TABLES, 500.0))
    assert sim.machines[target].targets.running["a"].phase == "preparing"
    sim.event(target, AbortCall("target", "a", "the user went away"))
    sim.settle()
    if not sent_first:
        sim.event(source, SendCall("a", TOKENS, TABLES, 500.0))
    ended = ends(sim)[source, "a"]
    assert isinstance(ended.error, TransferAborted)
    assert f"aborted by {target}: the user went away" in str(ended.error)
    assert max(at_s for _, _, at_s in sim.ended) < 5


def test_an_abort_while_the_registry_is_away_reaches_the_source_later() -> None:
    sim = make(1, 1)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    entries, sim.entries = sim.entries, {}
    sim.event(source, SendCall("a", TOKENS, TABLES, 500.0))
    sim.event(target, ReceiveCall("a", "p", TOKENS, TABLES, 500.0))
    sim.event(target, AbortCall("target", "a", "the user went away"))
    assert isinstance(ends(sim)[target, "a"].error, TransferAborted)
    sim.entries = entries
    sim.find()
    sim.settle()
    assert isinstance(ends(sim)[source, "a"].error, TransferAborted)


def test_a_peer_that_hears_nothing_does_not_fill_our_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "SAID_LIMIT", 50)
    sim, source, target, _ = moving()
    for number in range(500):
        lie = Offer(f"n{number}", 1, TOKENS, (), (5,), 1.0)
        sim.event(source, Received(target, source, lie))
    assert len(sim.machines[source].core.delivery._lines[target].said) == 50


@pytest.mark.parametrize("place", [Place(10**9, 10**9 - 1, 0), Place(3, 2, 10**12), Place(1, 0, 0), Place(5, 9, 0)])
def test_places_that_make_no_sense_harm_only_who_says_them(place: Place) -> None:
    sim, source, target, good = moving()
    sim.event(target, Received(source, target, good, place))
    sim.event(target, Received(source, target, Beat(False), place))
    actions = sim.machines[target].handle(Received(source, target, Beat(True)), sim.now)
    assert any(isinstance(action, Send) and action.body == Beat(False) for action in actions)
    sim.settle()
    check(sim, ["a"], 10)
