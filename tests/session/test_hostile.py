"""What a peer may say must not decide how much memory, time or how many lines it takes here."""

from __future__ import annotations

import os
import random
import time

import pytest

from kvferry.errors import TransferTimeout
from kvferry.layout.request import Wanted
from kvferry.plan.dense import Chunk
from kvferry.plan.route import Box
from kvferry.session import core, source
from kvferry.session.endpoint import Endpoint
from kvferry.session.events import Close, Ended, Found, ReceiveCall, Received, SendCall
from kvferry.session.messages import Abort, Offer, Part, Peer, Piece
from kvferry.session.registry import Entry, Registry
from kvferry.session.source import missing_problem, offer_problem
from kvferry.transport.memory import HostMemory, map_array
from tests.plan import build
from tests.session.pools import Shape, WorkerPool, instance, table
from tests.session.sim import TABLES, TOKENS, Sim

FULL = {"head": ((0, 4),), "dim": ((0, 4),)}
NOTHING: dict[str, tuple[tuple[int, int], ...]] = {"head": (), "dim": ()}
MANY = 3_000


@pytest.mark.parametrize(
    ("box", "tokens", "nbytes", "expected"),
    [
        (Box("attn", tuple(range(MANY)), tuple(map(str, range(MANY))), NOTHING), (0, 8), 0, "layers"),
        (Box("attn", (0, 0), ("k",), FULL), (0, 8), 1024, "layers"),
        (Box("attn", (0,), ("k", "q"), FULL), (0, 8), 1024, "parts"),
        (Box("attn", (0,), ("k",), {**FULL, "head": ((0, 1 << 40),)}), (0, 8), 1 << 47, "axis head"),
        (Box("attn", (0,), ("k",), {**FULL, "head": ((0, 1 << 40), (1 << 40, 0))}), (0, 8), 0, "axis head"),
        (Box("attn", (0,), ("k",), {**FULL, "head": ((-4, 0),)}), (0, 8), 512, "axis head"),
        (Box("attn", (0,), ("k",), {**FULL, "head": ((0, 0),) * MANY}), (0, 8), 0, "axis head"),
        (Box("attn", (0,), ("k",), FULL, ((0, 2, 1),) * MANY), (0, 8), 256, "cycles"),
        (Box("attn", (0,), ("k",), FULL, ((0, 2, (1 << 63) - 1),)), (0, 8), 512, "cycles"),
        (Box("attn", (0,), ("k",), FULL, ((0, (1 << 64) - 1, 1),)), (0, 8), 0, "cycles"),
        (Box("attn", (0,), ("k",), FULL, ((0, 0, 1),)), (0, 8), 0, "cycles"),
        (Box("attn", (0,), ("k",), FULL, ((0, 2, 1),)), ((1 << 64) - 1,) * 2, 0, ""),
    ],
)
def test_f66_a_piece_that_the_group_cannot_have_is_refused_before_it_is_planned(
    box: Box, tokens: tuple[int, int], nbytes: int, expected: str
) -> None:
    shape = Shape()
    ours = instance("p", shape, (WorkerPool(shape, 0).worker(),))
    offer = Offer("t", 1, TOKENS, (Piece(Chunk(box, tokens), nbytes),), (0,), 1.0)
    problem = offer_problem(ours, offer) or missing_problem([Part(TOKENS)], offer)
    assert expected in problem
    assert bool(problem) == bool(expected)


def test_no_tokens_named_is_no_way_around_the_tokens_that_were_sent() -> None:
    shape = Shape()
    ours = instance("p", shape, (WorkerPool(shape, 0).worker(),))
    piece = Piece(Chunk(Box("attn", (0,), ("k",), FULL), (0, 1)), 64)
    offer = Offer("t", 1, {"attn": Wanted()}, (piece,), (0,), 1.0)
    problem = offer_problem(ours, offer) or missing_problem([Part({"attn": Wanted((4, 8))})], offer)
    assert "asks for tokens [0, 1], send() has [4, 8]" in problem


def test_starts_that_never_answer_do_not_use_up_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that crashes after each registration, again and again."""
    monkeypatch.setattr(core, "PEER_LIMIT", 3)
    sim = Sim(random.Random(0), {"p": Shape(), "d": Shape()})
    (target,) = sim.peers("d")
    machine = sim.machines[target]
    for generation in range(2, 8):
        machine.handle(ReceiveCall(f"t{generation}", "p", TOKENS, TABLES, 1.0), sim.now)
        machine.handle(Found("d", sim.entries["d"]), sim.now)
        machine.handle(Found("p", (Entry("p", generation, 0, 1, "tcp://127.0.0.1:5"),)), sim.now)
        sim.now += 2
        assert any(isinstance(action, Close) for action in machine.tick(sim.now))
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    sim.settle()
    assert [ended.error for _, ended, _ in sim.ended] == [None, None]


def test_an_address_that_cannot_be_used_fails_at_once() -> None:
    sim = Sim(random.Random(0), {"p": Shape(), "d": Shape()})
    sim.entries["p"] = (Entry("p", 1, 0, 1, "tcp://10.0.0.1:5"),)
    (target,) = sim.peers("d")
    sim.event(target, ReceiveCall("a", "p", TOKENS, TABLES, 10.0))
    ((_, ended, at_s),) = sim.ended
    assert isinstance(ended, Ended)
    assert "tcp://10.0.0.1:5" in str(ended.error) and "is on loopback" in str(ended.error)
    assert at_s == 0.0


def test_a_closed_endpoint_writes_to_no_descriptor(registry: str) -> None:
    pool = WorkerPool(Shape(), 0)
    document = instance("gone", Shape(), (pool.worker(),))
    endpoint = Endpoint(document, 0, HostMemory([map_array(pool.bytes_view)]), world=1, registry=registry)
    transfer = endpoint.send("a", {"attn": Wanted((0, 4))}, table([0]), timeout_s=30)
    number = endpoint._bell._rope
    endpoint.close()
    ends = os.pipe()
    if number not in ends:
        os.dup2(ends[1], number)
    os.set_blocking(ends[0], False)
    try:
        endpoint.abort(transfer)
        with pytest.raises(BlockingIOError):
            os.read(ends[0], 1)
    finally:
        for descriptor in {*ends, number}:
            os.close(descriptor)


def test_peers_that_close_leave_no_descriptors(registry: str) -> None:
    """Their process lives on: it only opens and closes endpoints."""
    pool = WorkerPool(Shape(), 0)
    memory = HostMemory([map_array(pool.bytes_view)])

    def open_one(name: str) -> Endpoint:
        return Endpoint(instance(name, Shape(), (pool.worker(),)), 0, memory, world=1, registry=registry)

    def count() -> int:
        deadline_s = time.monotonic() + 5
        while target.stats()["peers"] and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.1)
        return len(os.listdir("/proc/self/fd"))

    with open_one("stays") as target:
        counts = []
        for _ in range(6):
            with open_one("comes"):
                target.connect("comes", timeout_s=10)
            counts.append(count())
    assert counts[-1] <= counts[1] + 1, counts


def test_a_card_that_shares_tokens_over_countless_ranks_is_refused() -> None:
    """Routing would go through all of them, and every other transfer would wait."""
    document = build.instance(cycles=((0, 1 << 40, 1),))
    peer = Peer(document.instance, 1, 0)
    assert "shared out over" in core._card_problem(peer, core.Card("tcp://127.0.0.1:5", 1, document, b""))


def test_a_name_that_cannot_be_asked_for_stops_no_thread(registry: str) -> None:
    pool = WorkerPool(Shape(), 0)
    document = instance("named", Shape(), (pool.worker(),))
    memory = HostMemory([map_array(pool.bytes_view)])
    with Endpoint(document, 0, memory, world=1, registry=registry, ttl_s=0.5) as endpoint:
        transfer = endpoint.receive("a", "\ud800", TOKENS, TABLES, timeout_s=0.2)
        with pytest.raises(TransferTimeout):
            endpoint.wait(transfer)
        time.sleep(0.6)
        assert Registry(registry).instance("named").ready


def test_offers_that_wait_are_bounded_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers for transfers that we never send: a few fit, then this peer is refused, and all of them end."""
    monkeypatch.setattr(source, "EARLY_PIECES", 100)
    sim = Sim(random.Random(0), {"p": Shape(), "d": Shape()})
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    sim.settle()
    (ours,), (theirs,) = sim.peers("p"), sim.peers("d")
    machine = sim.machines[ours]
    piece = Piece(Chunk(Box("attn", (0,), ("k",), FULL), (0, 1)), 64)
    for number in range(8):
        offer = Offer(f"early {number}", 1, TOKENS, (piece,) * 30, (0,), 1e6)
        machine.handle(Received(theirs, ours, offer), sim.now)
    waiting = [o for o in machine.sources.running.values() if o.takers]
    assert len(waiting) == 3
    machine.tick(sim.now + source.EARLY_MAX_S + 1)
    assert not machine.sources.running


@pytest.mark.parametrize("early", [False, True], ids=["aborts", "offers that expire"])
def test_a_flood_of_ends_makes_us_forget_the_flooders_own_only(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a send() whose target has told us of its end would hold its pages until its own deadline."""
    monkeypatch.setattr(core, "REMEMBERED", 60)
    sim = Sim(random.Random(0), {"p": Shape(), "d": Shape(tp=2)})
    (source,), (target, flooder) = sim.peers("p"), sim.peers("d")
    for name in ("a", "b"):
        for peer, call in sim.start(name, "p", "d"):
            sim.event(peer, call)
    sim.settle()
    sim.ended.clear()
    sim.event(source, Received(target, source, Abort("wanted", 1, "source", "aborted", "the user went away")))
    for number in range(300):
        flood = Offer(f"f{number}", 1, TOKENS, (), (1,), 1.0) if early else Abort(f"f{number}", 1, "source", "lost", "")
        sim.event(source, Received(flooder, source, flood))
        sim.pass_time(1.5 if early else 0.0)
    for name in ("wanted", "a", "b"):
        sim.event(source, SendCall(name, TOKENS, TABLES, 100.0))
    problems = {ended.transfer: str(ended.error) for _, ended, _ in sim.ended if ended.transfer[0] != "f"}
    assert f"aborted by {target}: the user went away" in problems["wanted"]
    assert "ids are unique" in problems["a"] and "ids are unique" in problems["b"]
    assert len(sim.machines[source].sources._past._owners) == 60
