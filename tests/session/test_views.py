"""A request between workers that know each other waits for no registry, and a later start is used all the same."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import PeerLost, TransferRefused
from kvferry.session.events import ReceiveCall, SendCall
from kvferry.session.messages import Message, Offer, Peer
from tests.session.pools import Shape
from tests.session.sim import TABLES, TOKENS, Sim
from tests.session.test_machine import check, ends, make

LONG_S = 30.0


def after_one(tp_source: int = 1, tp_target: int = 1, seed: int = 0) -> Sim:
    """Two instances of which transfer "a" has gone over."""
    sim = make(tp_source, tp_target, seed)
    call(sim, "a")
    no_steps(sim)
    assert all(ended.error is None for ended in ends(sim).values())
    sim.ended.clear()
    return sim


def call(sim: Sim, name: str) -> None:
    for peer, event in sim.start(name, "p", "d", LONG_S):
        sim.event(peer, event)


def no_steps(sim: Sim) -> None:
    """What can be done without time passing."""
    while sim.step():
        pass


@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_the_second_request_needs_no_answer_of_the_registry(pair: tuple[int, int]) -> None:
    sim = after_one(*pair)
    sim.entries.clear()
    call(sim, "b")
    no_steps(sim)
    assert sim.now == 0.0
    assert all(ended.error is None for ended in check(sim, ["b"], LONG_S).values())
    assert len(sim.ended) == sum(pair)


@pytest.mark.parametrize(("later_s", "asked"), [(0.05, set()), (0.2, {"p", "d"})])
def test_the_registry_is_asked_meanwhile_where_its_last_answer_is_old(later_s: float, asked: set[str]) -> None:
    sim = after_one()
    sim.entries.clear()
    sim.pass_time(later_s)
    call(sim, "b")
    assert {lookup.instance for _, lookup in sim.asked} == asked


def test_a_peer_that_is_silent_is_looked_up_first() -> None:
    sim = after_one()
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))
    sim.lose = lambda sender, recipient, body: source in (sender, recipient)
    while not sim.machines[target].core.delivery.silent_s(source):
        sim.step() or sim.pass_time(0.5)
    sim.entries.clear()
    sim.event(target, ReceiveCall("c", "p", TOKENS, TABLES, LONG_S))
    assert not any(getattr(job.action, "transfer", "") == "c" for job in sim.jobs)


def start_again(sim: Sim, rank: int = 0) -> Peer:
    """Nobody witnesses the end of the earlier start, which is cut off."""
    earlier, later = Peer("p", 1, rank), Peer("p", 2, rank)
    cut_off(sim, earlier)
    sim.boot(later)
    return later


def cut_off(sim: Sim, peer: Peer) -> None:
    def lose(sender: Peer, recipient: Peer, body: Message) -> bool:
        return peer in (sender, recipient)

    sim.lose = lose


def heal(sim: Sim) -> None:
    sim.lose = lambda sender, recipient, body: False


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pair=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4)]),
    later_s=st.sampled_from([0.0, 0.09, 0.11, 20.0]),
    steps=st.integers(0, 60),
    back=st.booleans(),
)
@example(seed=0, pair=(2, 1), later_s=0.0, steps=0, back=True)
def test_f64_a_start_that_nobody_witnessed_is_used_by_the_next_request(
    seed: int, pair: tuple[int, int], later_s: float, steps: int, back: bool
) -> None:
    """One rank of the source is started again before the request, whatever is done in which order after it."""
    sim = after_one(*pair, seed)
    later = start_again(sim, random.Random(seed).randrange(pair[0]))
    earlier = Peer("p", 1, later.rank)
    sim.pass_time(later_s)
    calls = [one for one in sim.start("b", "p", "d", LONG_S) if one[0] != earlier]
    sim.rng.shuffle(calls)
    for peer, event in calls:
        for _ in range(sim.rng.randrange(12)):
            sim.step()
        sim.event(peer, event)
    for _ in range(steps):
        sim.step()
    if back:
        heal(sim)
    sim.settle()
    found = {peer: ended for (peer, _), ended in ends(sim).items()}
    assert {peer: ended.error for peer, ended in found.items()} == {peer: None for peer, _ in calls}
    assert max(at_s for _, _, at_s in sim.ended) < later_s + 3
    assert all((peer, "b") in sim.scattered for peer in sim.peers("d"))
    heal(sim)
    sim.pass_time(1.0)
    sim.settle()
    assert all(machine.stats()["slots_free"] == sim.slots for machine in sim.machines.values())


def test_f64_a_start_after_the_request_takes_nothing_over() -> None:
    """What was sent at the earlier start is gone with it: the caller hears so instead of waiting."""
    sim = after_one()
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    cut_off(sim, source)
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))
    while sim.now < 2.0:  # the registry has been asked since, and still knew the earlier start
        sim.step() or sim.pass_time(0.1)
    later = Peer("p", 2, 0)
    sim.boot(later)
    sim.settle()
    ((_, ended, at_s),) = sim.ended
    assert isinstance(ended.error, PeerLost)
    assert f"it has been started again, as {later}" in str(ended.error)
    assert at_s < 10


def test_an_answer_that_comes_before_the_plan_settles_which_start_it_is() -> None:
    """Also where only the source was known, as after connect()."""
    sim = make(1, 1)
    (target,) = sim.peers("d")
    sim.event(target, ReceiveCall("a", "p", {}, {}, LONG_S, connect_only=True))
    no_steps(sim)
    assert ends(sim)[target, "a"].error is None
    sim.ended.clear()
    sim.pass_time(0.2)
    own = sim.entries.pop("d")
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))  # the registry knows the source at once, us later
    sim.entries["d"] = own
    sim.find()
    no_steps(sim)
    start_again(sim)
    sim.settle()
    ((_, ended, at_s),) = sim.ended
    assert isinstance(ended.error, PeerLost)
    assert at_s < 10


def test_a_start_of_another_size_takes_nothing_over() -> None:
    sim = after_one()
    (target,) = sim.peers("d")
    sim.shapes["p"] = Shape(tp=2)
    start_again(sim)
    sim.boot(Peer("p", 2, 1))
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))
    sim.settle()
    ((_, ended, _),) = sim.ended
    assert isinstance(ended.error, PeerLost)


def test_what_the_earlier_start_has_begun_is_not_taken_over() -> None:
    sim = after_one()
    (target,) = sim.peers("d")
    call(sim, "b")
    while not sim.machines[target].targets.running["b"].flows or not any(
        flow.began for flow in sim.machines[target].targets.running["b"].flows.values()
    ):
        assert sim.step()
    assert sim.machines[target].targets.running["b"].assumed
    later = start_again(sim)
    sim.event(later, SendCall("c", TOKENS, TABLES, LONG_S))
    sim.event(target, ReceiveCall("c", "p", TOKENS, TABLES, LONG_S))
    while len(found := ends(sim)) < 3:
        sim.step() or sim.pass_time(0.1)
    assert isinstance(found[target, "b"].error, PeerLost)
    assert found[target, "c"].error is None


def test_our_own_later_start_ends_what_began_on_an_old_answer() -> None:
    sim = after_one()
    (target,) = sim.peers("d")
    sim.pass_time(5.0)
    (entry,) = sim.entries["d"]
    sim.entries["d"] = (msgspec.structs.replace(entry, generation=2),)
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))
    ((_, ended, _),) = sim.ended
    assert isinstance(ended.error, TransferRefused)
    assert "superseded by a later start, d/2/0" in str(ended.error)


def test_an_earlier_start_that_comes_back_keeps_the_offer_to_the_deadline_only() -> None:
    sim = after_one()
    (source,), (target,) = sim.peers("p"), sim.peers("d")

    def lose(sender: Peer, recipient: Peer, body: Message) -> bool:
        return source in (sender, recipient) and not isinstance(body, Offer)  # it gets the offer, its answers are lost

    sim.lose = lose
    sim.boot(later := Peer("p", 2, 0))
    sim.event(later, SendCall("b", TOKENS, TABLES, LONG_S))
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))
    while len(sim.ended) < 2:
        sim.step() or sim.pass_time(0.1)
    assert ends(sim)[target, "b"].error is None
    assert sim.machines[source].stats()["offers_waiting"] == 1
    heal(sim)
    sim.pass_time(LONG_S)
    sim.settle()
    assert sim.machines[source].stats()["offers_waiting"] == 0
    assert all(machine.stats()["slots_free"] == sim.slots for machine in sim.machines.values())
