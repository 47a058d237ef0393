"""The state machine without sockets: every order of messages, loss, duplicates, aborts, deaths."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import CutOff, PeerLost, TransferAborted, TransferRefused, TransferTimeout
from kvferry.layout.address import Address
from kvferry.layout.request import Wanted
from kvferry.session.events import (
    AbortCall,
    Action,
    Ended,
    Lookup,
    ReceiveCall,
    Received,
    Scatter,
    SendCall,
    Write,
    WriteFailed,
)
from kvferry.session.messages import Abort, ChunkDone, Commit, Complete, Goodbye, Grant, Grants, Landed, Offer, Peer
from kvferry.session.registry import Entry
from tests.session.pools import Shape, table
from tests.session.sim import TABLES, TOKENS, Sim

PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (8, 2)]


def make(tp_source: int = 2, tp_target: int = 1, seed: int = 0, **options: object) -> Sim:
    shapes = {"p": Shape(tp=tp_source), "d": Shape(tp=tp_target, page_tokens=6)}
    return Sim(random.Random(seed), shapes, **options)  # type: ignore[arg-type]


def run(sim: Sim, *names: str, timeout_s: float = 10.0) -> None:
    calls = [call for name in names for call in sim.start(name, "p", "d", timeout_s)]
    sim.rng.shuffle(calls)
    for peer, call in calls:
        for _ in range(sim.rng.randrange(12)):
            sim.step()
        sim.event(peer, call)
    sim.settle()


def ends(sim: Sim) -> dict[tuple[Peer, str], Ended]:
    found: dict[tuple[Peer, str], Ended] = {}
    for peer, ended, _ in sim.ended:
        assert (peer, ended.transfer) not in found, "a transfer ended twice"
        found[peer, ended.transfer] = ended
    return found


def check(sim: Sim, names: list[str], timeout_s: float) -> dict[tuple[Peer, str], Ended]:
    """What must hold whatever has happened."""
    found = ends(sim)
    living = list(sim.machines)
    for name in names:
        targets = [peer for peer in living if peer.instance == "d"]
        for peer in living:
            assert (peer, name) in found, f"{name} never ended at {peer}"
        done = [peer for peer in targets if found[peer, name].error is None]
        for peer in targets if done else []:
            landed = sim.scattered.get((peer, name), [])
            assert sorted(landed, key=str) == sorted(sim.wanted[peer, name], key=str), (
                "success without every piece once"
            )
        # a lost Commit may split the target's ranks, as nothing can prevent; no rank then has less than it says
        for peer in [peer for peer in living if peer.instance == "p" and found[peer, name].error is None]:
            ranks = {target.rank for target in done}
            assert sim.takers[peer, name] <= ranks, "a source was told of success that its takers didn't have"
    for _, ended, at_s in sim.ended:
        assert at_s <= timeout_s + 1, f"{ended} came after its deadline"
    for peer, machine in sim.machines.items():
        stats = machine.stats()
        assert stats["slots_free"] == sim.slots, f"{peer} holds slots at rest: {stats}"
    return found


@pytest.mark.parametrize("pair", PAIRS)
def test_every_side_succeeds_without_faults(pair: tuple[int, int]) -> None:
    sim = make(*pair)
    run(sim, "a", "b")
    found = check(sim, ["a", "b"], 10)
    assert len(found) == 2 * sum(pair)
    assert all(ended.error is None for ended in found.values())
    bytes_sent = sum(ended.report.bytes for ended in found.values() if ended.role == "source" and ended.report)
    bytes_received = sum(ended.report.bytes for ended in found.values() if ended.role == "target" and ended.report)
    wanted = 8 * 4 * 4 * 4 * 3 * 2 * max(1, pair[1] // 4)
    assert bytes_sent == bytes_received == 2 * wanted


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pair=st.sampled_from(PAIRS),
    drop=st.sampled_from([0.0, 0.02, 0.2]),
    duplicate=st.sampled_from([0.0, 0.1]),
    reorder=st.booleans(),
    slots=st.integers(1, 3),
)
def test_loss_duplicates_and_reordering(
    seed: int, pair: tuple[int, int], drop: float, duplicate: float, reorder: bool, slots: int
) -> None:
    sim = make(*pair, seed, drop=drop, duplicate=duplicate, reorder=reorder, slots=slots)
    run(sim, "a", "b")
    found = check(sim, ["a", "b"], 10)
    if not drop and not reorder:
        assert all(ended.error is None for ended in found.values())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), pair=st.sampled_from(PAIRS), steps=st.integers(0, 150), reorder=st.booleans())
def test_abort_at_any_moment(seed: int, pair: tuple[int, int], steps: int, reorder: bool) -> None:
    sim = make(*pair, seed, reorder=reorder, duplicate=0.05)
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    for _ in range(steps):
        sim.step()
    victim = sim.rng.choice(list(sim.machines))
    sim.event(victim, AbortCall("source" if victim.instance == "p" else "target", "a", "changed my mind"))
    for peer, call in sim.start("b", "p", "d"):
        sim.event(peer, call)
    sim.settle()
    found = check(sim, ["a", "b"], 10)
    if not reorder:
        assert all(found[peer, "b"].error is None for peer in sim.machines)
    assert all(isinstance(e.error, (TransferAborted, TransferTimeout, type(None))) for e in found.values())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), pair=st.sampled_from(PAIRS), steps=st.integers(0, 150))
def test_death_at_any_moment(seed: int, pair: tuple[int, int], steps: int) -> None:
    sim = make(*pair, seed)
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    for _ in range(steps):
        sim.step()
    sim.kill(sim.rng.choice(list(sim.machines)))
    sim.settle()
    found = ends(sim)
    for peer, machine in sim.machines.items():
        assert (peer, "a") in found
        assert isinstance(found[peer, "a"].error, (PeerLost, TransferTimeout, type(None)))
        assert machine.stats()["slots_free"] == sim.slots


def moving(**options: object) -> tuple[Sim, Peer, Peer, ChunkDone]:
    """A sim (1 → 1) that stands just before the first chunk's report is delivered."""
    sim = make(1, 1, **options)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    while not any(isinstance(m, ChunkDone) for m in waiting(sim, source, target)):
        assert sim.step()
    return sim, source, target, next(m for m in waiting(sim, source, target) if isinstance(m, ChunkDone))


def waiting(sim: Sim, source: Peer, target: Peer) -> list[object]:
    from kvferry.session.messages import decode

    return [decode(data).body for data in sim.wire.get((source, target), [])]


def scatters(sim: Sim) -> int:
    return sum(isinstance(job.action, Scatter) for job in sim.jobs)


def test_f53_late_chunk_of_a_revoked_grant_never_scatters() -> None:
    sim, _, target, _ = moving()
    sim.event(target, AbortCall("target", "a", "enough"))
    assert sim.machines[target].stats()["slots_quarantined"] > 0, "the writer is in doubt until it answers"
    before = scatters(sim)
    sim.settle()
    assert scatters(sim) == before == 0
    assert not sim.scattered
    assert sim.machines[target].stats()["slots_free"] == sim.slots


def test_quarantine_lasts_until_the_peer_answers() -> None:
    sim, source, target, _ = moving()
    sim.event(target, AbortCall("target", "a", "enough"))
    sim.wire.clear()
    stopped = sim.machines.pop(source)  # stopped, not dead: it could go on writing at any time
    for _ in range(200):
        sim.pass_time(10)
        sim.wire.clear()
    assert sim.machines[target].stats()["slots_quarantined"] > 0
    sim.machines[source] = stopped
    sim.pass_time(60)
    sim.settle()
    assert sim.machines[target].stats()["slots_quarantined"] == 0


def test_goodbye_ends_transfers_and_clears_doubt() -> None:
    sim, source, target, _ = moving()
    sim.event(target, AbortCall("target", "a", "enough"))
    assert sim.machines[target].stats()["slots_quarantined"] > 0
    sim.event(target, ReceiveCall("b", "p", TOKENS, TABLES, 9.0))
    sim.event(target, Received(source, target, Goodbye()))
    stats = sim.machines[target].stats()
    assert (stats["slots_free"], stats["peers"]) == (sim.slots, 0)
    assert isinstance(ends(sim)[target, "b"].error, PeerLost)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: ChunkDone(m.transfer, m.attempt, m.piece, bytes(16), m.bytes),
        lambda m: ChunkDone(m.transfer, m.attempt, m.piece + 1, m.grant, m.bytes),
        lambda m: ChunkDone(m.transfer, m.attempt, 10_000, m.grant, m.bytes),
        lambda m: ChunkDone("other", m.attempt, m.piece, m.grant, m.bytes),
        lambda m: ChunkDone(m.transfer, 7, m.piece, m.grant, m.bytes),
    ],
    ids=["grant", "piece", "far piece", "transfer", "attempt"],
)
def test_wrong_chunk_report_is_refused_and_counted(change: object) -> None:
    sim, source, target, good = moving()
    sim.event(target, Received(source, target, change(good)))  # type: ignore[operator]
    assert scatters(sim) == 0
    assert sim.machines[target].stats()["refused_messages"] == 1
    sim.settle()
    assert all(ended.error is None for ended in check(sim, ["a"], 10).values()), "junk must not end a transfer"


def test_f14_wrong_size_is_an_error_not_success() -> None:
    sim, source, target, good = moving()
    sim.event(target, Received(source, target, ChunkDone(good.transfer, 1, good.piece, good.grant, good.bytes - 1)))
    sim.settle()
    error = check(sim, ["a"], 10)[target, "a"].error
    assert isinstance(error, TransferRefused)
    assert "reports 127 bytes, 128 were wanted" in str(error) or "bytes" in error.problem


def test_same_report_twice_counts_once() -> None:
    sim, source, target, good = moving()
    sim.event(target, Received(source, target, good))
    sim.event(target, Received(source, target, good))
    assert scatters(sim) == 1
    assert sim.machines[target].stats()["refused: chunk without a living grant"] == 1


def test_junk_from_strangers_and_old_generations_is_refused() -> None:
    sim, source, target, good = moving()
    stranger, older = Peer("x", 1, 0), Peer(target.instance, 0, 0)
    sim.event(target, Received(stranger, target, good))
    sim.event(target, Received(source, older, good))
    sim.event(target, Received(source, target, Commit("a", 1)))
    sim.event(source, Received(target, source, Complete("a", 1)))
    sim.event(source, Received(target, source, Grants("a", 1, (Grant(999, bytes(16), Address(0), 1),))))
    assert sim.machines[target].stats()["refused_messages"] == 3
    assert sim.machines[source].stats()["refused_messages"] == 2
    sim.settle()
    assert all(ended.error is None for ended in check(sim, ["a"], 10).values())


def test_timeout_of_an_unmatched_receive_names_the_phase_and_the_peer() -> None:
    sim = make(2, 1)
    (target,) = sim.peers("d")
    sim.event(target, ReceiveCall("a", "p", TOKENS, TABLES, 3.0))
    sim.settle()
    error = ends(sim)[target, "a"].error
    assert isinstance(error, TransferTimeout)
    assert error.where.phase == "matching"
    assert error.where.peer == "p/1/0"
    assert 3.0 <= error.where.elapsed_s < 3.1
    assert "to send()" in str(error)
    late = sim.peers("p")[1]
    sim.event(late, SendCall("a", TOKENS, TABLES, 3.0))
    assert isinstance(ends(sim)[late, "a"].error, TransferTimeout), "a send after the abort learns of it at once"


def test_timeout_of_an_unmatched_send() -> None:
    sim = make(1, 1)
    (source,) = sim.peers("p")
    sim.event(source, SendCall("a", TOKENS, TABLES, 2.0))
    sim.settle()
    error = ends(sim)[source, "a"].error
    assert isinstance(error, TransferTimeout)
    assert error.where.phase == "matching"


@pytest.mark.parametrize(
    ("asked", "sent", "expected"),
    [
        (Wanted((0, 8)), Wanted((0, 7)), "asks for tokens [0, 8], send() has [0, 7]"),
        (Wanted((0, 8)), Wanted((1, 8)), "asks for tokens [0, 8], send() has [1, 8]"),
    ],
)
def test_tokens_that_were_not_sent_are_refused(asked: Wanted, sent: Wanted, expected: str) -> None:
    sim = make(1, 2)
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, replace(call, groups={"attn": sent if isinstance(call, SendCall) else asked}))
    sim.settle()
    for ended in check(sim, ["a"], 10).values():
        assert isinstance(ended.error, TransferRefused)
        assert expected in str(ended.error)


def test_f54_a_plan_that_fails_is_told_to_the_source() -> None:
    """A failed post is reported to the other side, which doesn't wait for its deadline."""
    sim = make(2, 1)
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, replace(call, tables=table([0])) if isinstance(call, ReceiveCall) else call)
    sim.settle()
    for ended in check(sim, ["a"], 10).values():
        assert isinstance(ended.error, TransferRefused)
    assert sim.ended[-1][2] < 1.0


def test_an_id_is_used_once() -> None:
    sim = make(1, 1)
    run(sim, "a")
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    sim.ended.clear()
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    for peer in (source, target):
        error = ends(sim)[peer, "a"].error
        assert isinstance(error, TransferRefused)
        assert "ids are unique" in str(error)


def test_offer_of_a_peer_that_lies_about_takers_is_refused() -> None:
    sim, source, target, _ = moving()
    lie = Offer("b", 1, TOKENS, (), (5,), 1.0)
    sim.event(source, Received(target, source, lie))
    aborts = [m for m in waiting(sim, source, target) if isinstance(m, Abort)]
    assert len(aborts) == 1
    assert "not among its own takers" in aborts[0].reason


def test_one_peer_leaves_slots_for_others() -> None:
    """A source that never writes holds its own slots only."""
    sim = make(1, 1, slots=4)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    for peer, call in sim.start("slow", "p", "d"):
        sim.event(peer, call)
    for _ in range(60):
        if any(job.owner == source for job in sim.jobs):
            break
        sim.step()
    assert sim.machines[target].stats()["slots_used"] == 2
    assert sim.machines[target].stats()["slots_free"] == 2


def test_only_the_leader_commits() -> None:
    sim = make(1, 2)
    (source,), (_, follower) = sim.peers("p"), sim.peers("d")
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    running = sim.machines[follower].targets.running
    while running["a"].phase != "committing":
        assert sim.step()
    sim.event(follower, Received(source, follower, Commit("a", 1)))
    assert "a" in running
    assert sim.machines[follower].stats()["refused: commit for no transfer"] == 1
    sim.settle()
    assert all(ended.error is None for ended in check(sim, ["a"], 10).values())


def test_f64_a_worker_started_again_is_found_by_a_receive_that_was_told_of_the_earlier_start() -> None:
    """The registry still names the dead one when it is asked first; the transfer needs no more than to ask again."""
    sim = make(1, 1)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    stale = Entry("p", 0, 0, 1, "tcp://127.0.0.1:999")
    fresh, sim.entries["p"] = sim.entries["p"], (stale,)
    sim.event(source, SendCall("a", TOKENS, TABLES, 10))
    sim.event(target, ReceiveCall("a", "p", TOKENS, TABLES, 10))
    for _ in range(20):
        sim.step()
    assert not sim.machines[target].targets.running["a"].planning
    assert list(sim.machines[target].core._hellos) == [Peer("p", 0, 0)]
    sim.entries["p"] = fresh
    sim.pass_time(0.6)
    while source not in sim.machines[target].core.known:
        assert sim.step()
    assert not sim.machines[target].core._hellos, "nobody waits for the dead one any more"
    sim.settle()
    assert all(ended.error is None for ended in ends(sim).values())
    assert len(sim.ended) == 2
    assert max(at_s for _, _, at_s in sim.ended) < 2, "asked again soon, not at the deadline"


def test_a_superseded_worker_is_told_so_at_once() -> None:
    sim = make(1, 1)
    (target,) = sim.peers("d")
    (entry,) = sim.entries["d"]
    sim.entries["d"] = (msgspec.structs.replace(entry, generation=2),)
    sim.event(target, ReceiveCall("a", "p", TOKENS, TABLES, 10.0))
    ((_, ended, at_s),) = sim.ended
    assert isinstance(ended.error, TransferRefused)
    assert "superseded by a later start, d/2/0" in str(ended.error)
    assert at_s == 0.0


def test_a_worker_that_is_listed_under_an_earlier_start_asks_the_registry_now_and_then() -> None:
    """Until its own entry is there; a registry that answers at once is not asked without a pause."""
    sim = make(1, 1)
    (entry,) = sim.entries["d"]
    sim.entries["d"] = (msgspec.structs.replace(entry, generation=0),)
    asked: list[float] = []
    act = sim.act

    def listen(peer: Peer, actions: list[Action]) -> None:
        asked.extend(sim.now for action in actions if isinstance(action, Lookup) and action.instance == "d")
        act(peer, actions)

    sim.act = listen  # type: ignore[method-assign]
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    while sim.now < 3.0:
        sim.pass_time(0.05)
    assert 4 <= len(asked) <= 8
    sim.entries["d"] = (entry,)
    sim.settle()
    assert all(ended.error is None for ended in check(sim, ["a"], 10).values())
    assert max(at_s for _, _, at_s in sim.ended) < 5


@pytest.mark.parametrize("says", [True, False], ids=["says why", "says nothing"])
def test_a_source_whose_write_is_cut_off_by_an_abort_says_that_it_was_aborted(says: bool) -> None:
    """Over tcp the refusal of a grant that an abort has revoked may come before the abort itself."""
    sim = make(1, 1)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    while not any(isinstance(job.action, Write) for job in sim.jobs):
        assert sim.step()
    write = next(job.action for job in sim.jobs if isinstance(job.action, Write))
    sim.jobs = [job for job in sim.jobs if job.action is not write]
    error = CutOff("refused by the target: unknown or revoked grant")
    sim.event(source, WriteFailed("a", target, write.piece, error))
    assert not sim.ended
    if says:
        sim.event(target, AbortCall("target", "a", "the user went away"))
    sim.settle()
    ended = ends(sim)[source, "a"].error
    if says:
        assert isinstance(ended, TransferAborted)
        assert f"aborted by {target}: the user went away" in str(ended)
    else:
        assert isinstance(ended, PeerLost) and ended.__cause__ is error
        assert "revoked grant" in str(ended)
        assert 1.0 <= max(at_s for _, _, at_s in sim.ended) < 1.5, "it does not wait for long"
    assert sim.machines[target].stats()["slots_free"] == sim.slots


def test_a_leader_that_was_stopped_does_not_commit_after_the_deadline() -> None:
    """It finds the last Landed and its deadline at the same time; the other rank has ended by then."""
    sim = make(1, 2)
    leader, follower = sim.peers("d")
    for peer, call in sim.start("a", "p", "d"):
        sim.event(peer, call)
    running = sim.machines[leader].targets.running
    while running["a"].phase != "committing":
        assert sim.step()
    sim.now += 11
    sim.event(leader, Received(follower, leader, Landed("a", 1)))
    assert isinstance(ends(sim)[leader, "a"].error, TransferTimeout)


def test_a_start_that_a_later_one_has_followed_is_greeted_no_more() -> None:
    """An abort looks for peers that the registry named before the restart; a hello to them would go on for long."""
    sim = make(1, 1)
    (source,), (target,) = sim.peers("p"), sim.peers("d")
    run(sim, "a")
    core = sim.machines[target].core
    assert source in core.known
    core.hello(Peer("p", 0, 0), "tcp://127.0.0.1:999", "", sim.now + 60)
    assert not core._hellos and not core.problems
    core.hello(Peer("p", 2, 0), "tcp://127.0.0.1:999", "", sim.now + 60)
    assert list(core._hellos) == [Peer("p", 2, 0)]
