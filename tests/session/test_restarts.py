"""F64: the next request uses a later start, whatever was started again and how, also where nobody witnessed it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from kvferry.errors import TransferRefused
from kvferry.session.events import AbortCall, DrainCall, Event, ReceiveCall, SendCall
from kvferry.session.messages import Message, Peer
from tests.session.pools import Shape
from tests.session.sim import TABLES, TOKENS, Sim
from tests.session.test_machine import ends

LONG_S, SOON_S = 30.0, 3.0
SEEDS = range(3)


def after_one(tp_source: int, tp_target: int, seed: int, key: str = "") -> Sim:
    """Two instances of which transfer "a" has gone over."""
    sim = Sim(random.Random(seed), {"p": Shape(tp=tp_source), "d": Shape(tp=tp_target, page_tokens=6)})
    if key:
        for peer in list(sim.machines):
            boot(sim, peer, key)
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    sim.settle()
    assert all(ended.error is None for ended in ends(sim).values())
    sim.ended.clear()
    return sim


def boot(sim: Sim, peer: Peer, key: str = "") -> None:
    sim.boot(peer)
    if key:
        core = sim.machines[peer].core
        core._allowed, core.card = {"A", "B"}, msgspec.structs.replace(core.card, key=key)
        entries = sim.entries[peer.instance]
        sim.entries[peer.instance] = tuple(
            msgspec.structs.replace(entry, key=key) if entry.rank == peer.rank else entry for entry in entries
        )


def cut_off(sim: Sim, gone: Sequence[Peer]) -> None:
    """They may run on, and nobody hears of them or is heard by them."""

    def lose(sender: Peer, recipient: Peer, body: Message) -> bool:
        return sender in gone or recipient in gone

    sim.lose = lose


def start_again(sim: Sim, name: str, ranks: Sequence[int], key: str = "") -> list[Peer]:
    cut_off(sim, [Peer(name, 1, rank) for rank in ranks])
    later = [Peer(name, 2, rank) for rank in ranks]
    for peer in later:
        boot(sim, peer, key)
    return later


def living(sim: Sim, name: str) -> list[Peer]:
    """The latest start of each rank."""
    latest = {peer.rank: peer for peer in sorted(sim.peers(name), key=lambda peer: peer.generation)}
    return list(latest.values())


def ask(sim: Sim, seed: int) -> list[Peer]:
    """The next request, in any order of calls. Who takes part."""
    calls: list[tuple[Peer, Event]] = [(peer, SendCall("b", TOKENS, TABLES, LONG_S)) for peer in living(sim, "p")]
    calls += [(peer, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S)) for peer in living(sim, "d")]
    random.Random(seed).shuffle(calls)
    for peer, call in calls:
        sim.event(peer, call)
    return [peer for peer, _ in calls]


def used_at_once(sim: Sim, seed: int) -> None:
    began_s, peers = sim.now, ask(sim, seed)
    sim.settle()
    found = {peer: ended.error for (peer, name), ended in ends(sim).items() if name == "b"}
    assert found == dict.fromkeys(peers)
    assert max(at_s for _, _, at_s in sim.ended) < began_s + SOON_S


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("later_s", [0.0, 20.0])
@pytest.mark.parametrize("pair", [(1, 1), (2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("some", [True, False], ids=["one rank", "all ranks"])
def test_of_the_source(some: bool, pair: tuple[int, int], later_s: float, seed: int) -> None:
    sim = after_one(*pair, seed)
    start_again(sim, "p", [seed % pair[0]] if some else range(pair[0]))
    sim.pass_time(later_s)
    used_at_once(sim, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_rank_beside_us(rank: int, seed: int) -> None:
    sim = after_one(1, 2, seed)
    start_again(sim, "d", [rank])
    sim.pass_time(5.0)
    used_at_once(sim, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "shape", [Shape(tp=2), Shape(order="hnd"), Shape(page_tokens=8)], ids=["size", "order", "page"]
)
def test_with_another_layout(shape: Shape, seed: int) -> None:
    sim = after_one(1, 1, seed)
    sim.shapes["p"] = shape
    start_again(sim, "p", range(shape.world))
    sim.pass_time(20.0)
    used_at_once(sim, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("key", ["A", "B"], ids=["its key", "another member's key"])
def test_with_a_key(key: str, seed: int) -> None:
    sim = after_one(1, 1, seed, "A")
    start_again(sim, "p", [0], key)
    sim.pass_time(60.0)
    used_at_once(sim, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_key_that_is_not_allowed_fails_at_once(seed: int) -> None:
    sim = after_one(1, 1, seed, "A")
    start_again(sim, "p", [0], "C")
    sim.pass_time(60.0)
    began_s, (target,) = sim.now, sim.peers("d")
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, LONG_S))
    sim.settle()
    ((_, ended, at_s),) = sim.ended
    assert isinstance(ended.error, TransferRefused) and "C" in str(ended.error)
    assert at_s < began_s + SOON_S


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("closes", [False, True], ids=["it drains", "it closes"])
def test_while_the_earlier_start_goes(closes: bool, seed: int) -> None:
    sim = after_one(1, 1, seed)
    earlier = Peer("p", 1, 0)
    sim.pass_time(5.0)
    sim.event(earlier, DrainCall())
    boot(sim, Peer("p", 2, 0))
    if not closes:
        return used_at_once(sim, seed)
    peers = ask(sim, seed)
    sim.act(earlier, sim.machines[earlier].close(sim.now))
    sim.act(earlier, sim.machines[earlier].goodbye())
    del sim.machines[earlier]
    sim.settle()
    assert {peer: ended.error for (peer, _), ended in ends(sim).items()} == dict.fromkeys(peers)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [0, 1, 3, 6, 12, 25])
def test_an_abort_reaches_the_start_that_is_there(steps: int, seed: int) -> None:
    """Or prefill would keep its pages to the end of its lease."""
    sim = after_one(1, 1, seed)
    (later,) = start_again(sim, "p", [0])
    (target,) = sim.peers("d")
    sim.pass_time(5.0)
    began_s = sim.now
    ask(sim, seed)
    for _ in range(steps):
        sim.step()
    sim.event(target, AbortCall("target", "b", "its client left"))
    sim.settle()
    assert {peer for peer, _ in ends(sim)} == {target, later}
    assert max(at_s for _, _, at_s in sim.ended) < began_s + SOON_S
