"""Plans of whole requests: refusals, the address range, page borders, dense chunks; names field cases."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.errors import PlanError, ProofError
from kvferry.layout.address import Address
from kvferry.layout.document import Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.request import Request, Side, Table, Wanted
from kvferry.plan.bind import bind_tokens, expand, grow, page_array
from kvferry.plan.dense import Chunk, chunk_bytes, dense_copies, split
from kvferry.plan.document import make_plan, pair_programs
from kvferry.plan.landing import prove_landing
from kvferry.plan.program import fold_axis
from kvferry.plan.prove import prove_cells, prove_disjoint
from kvferry.plan.route import Box, route
from tests.plan.build import instance, request

HIGH = 0xFFFF81AB54E01000


@pytest.mark.parametrize("target_tp", [1, 2])
def test_f1_f2_addresses_with_bit_63(target_tp: int) -> None:
    """F1 and F2: the same path for equal and mismatched TP, and exact addresses on both."""
    source = instance(base=HIGH, heads=2, stages=((0,),))
    target = instance("decode", base=HIGH + (1 << 20), heads=2, tp=target_tp, stages=((0,),))
    plan = make_plan(source, target, request((0, 8), [3], [5]))
    head_bytes = 8 if target_tp == 2 else 16
    first = plan.transfers[0]
    assert first.source_addresses[0] == hex(HIGH + 3 * 8 * 16)
    assert first.target_addresses[0] == hex(HIGH + (1 << 20) + 5 * 8 * head_bytes)
    if target_tp == 2:
        assert plan.transfers[1].source_addresses[0] == hex(HIGH + 3 * 8 * 16 + 8)
    assert plan.proof.bytes == 8 * 2 * 16


def test_f3_large_page_numbers_do_not_wrap() -> None:
    """F3: page 2**20 of 4,096 bytes lies at byte 2**32, not 0."""
    group = Group("attn", "token", "uint8", (0,), ("k",), {"dim": 4096})
    pool = Pool("attn", 1, 4096, (Mode("dim", 4096, 1),), (Buffer(0, "k", 0, 0, (1 << 20) + 1),))
    worker = Worker(0, (Region(Address(1 << 40), 1 << 33),), (pool,))
    one = Instance("kvferry-instance/1", "a", "m", (group,), (worker,))
    plan = make_plan(one, one, request((0, 1), [1 << 20], [0]))
    assert plan.transfers[0].source_addresses == [hex((1 << 40) + (1 << 32))]


@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(64, 128), (128, 64), (6, 4), (4, 6), (16, 24)])
def test_f30_page_sizes_differ(source_tokens: int, target_tokens: int) -> None:
    source = instance(page_tokens=source_tokens, pages=80)
    target = instance("decode", page_tokens=target_tokens, pages=80)
    plan = make_plan(source, target, request((0, 256), list(range(75, 1, -1)), list(range(0, 79))))
    assert plan.proof.bytes == 256 * 4 * 4 * 2 * 2 * 2


def test_f36_prefix_hit_starts_at_the_offset() -> None:
    source, target = instance(), instance("decode")
    plan = make_plan(source, target, request((16, 32), [0, 1, 2, 3], [9, 7], target_start=16))
    whole = {(s, t) for c in plan.transfers for s, t in zip(c.source_addresses, c.target_addresses, strict=True)}
    page = 8 * 4 * 8
    assert (hex(HIGH + 2 * page), hex(HIGH + 9 * page)) in whole
    assert (hex(HIGH + 3 * page), hex(HIGH + 7 * page)) in whole


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            request((0, 20), [0, 1], [0, 1, 2]),
            "token 16 is wanted, but its 2 pages of 8 tokens from token 0 on don't hold it",
        ),
        (request((0, 8), [16], [0]), "page 16 is outside the pool's 16 pages"),
        (request((0, 16), [0, None], [0, 1]), "doesn't exist"),
        (request((0, 16), [0, 1], [4, 4]), "group attn, worker 0: page 4 serves two wanted ranges"),
        (request((0, 8), [0], [0], target_start=8), "token 0 is wanted, but its 1 pages"),
        (request((0, 8), [1 << 70], [0]), "page number"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(bad: Request, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(instance(), instance("decode"), bad)


def test_an_empty_range_needs_no_table() -> None:
    plan = make_plan(instance(), instance("decode"), replace(request((8, 8), [], []), source=Side(), target=Side()))
    assert plan.proof.bytes == 0


def test_null_pages_outside_the_wanted_tokens_are_fine() -> None:
    plan = make_plan(instance(), instance("decode"), request((8, 16), [None, 1], [None, 3]))
    assert plan.proof.bytes == 8 * 4 * 8 * 4


def test_f43_a_forgotten_group_is_refused() -> None:
    one = instance()
    with pytest.raises(PlanError, match="doesn't name it"):
        make_plan(one, one, replace(request((0, 8), [0], [1]), groups={}))
    with pytest.raises(PlanError, match="not both sides have it"):
        make_plan(one, one, replace(request((0, 8), [0], [1]), groups={"attn": Wanted((0, 8)), "ssm": Wanted((0, 8))}))


def test_f22_cyclic_context_parallel_is_one_run_per_token_staged_in_chunks() -> None:
    source = instance(cycles=tuple((rank, 8, 1) for rank in range(8)), pages=4, stages=((0,),))
    target = instance("decode", pages=32, stages=((0,),))
    tables = [[3, 1]], list(range(16, 32))
    plan = make_plan(source, target, request((0, 128), tables[0][0], tables[1]))
    assert len(plan.transfers) == 8
    assert plan.proof.copies == 128 * 2
    box = route(source, target, 0)[5].box
    chunks = split(source.groups[0], box, (0, 128), 1 << 20)
    assert [chunk_bytes(source.groups[0], chunk) for chunk in chunks] == [16 * 32 * 2]
    runs = dense_copies(target.worker(0), source.groups[0], chunks[0], Side({"attn": Table(tuple(tables[1]))}))
    assert len(runs.lengths) == 16 * 2


def test_split_covers_the_box_once_and_respects_the_limit() -> None:
    source = instance(stages=((0, 1, 2),), cycles=((0, 2, 2), (1, 2, 2)))
    target = instance("decode", tp=3, stages=((0, 1, 2),))
    group = source.groups[0]
    for limit in (8, 20, 64, 200, 1 << 20):
        for step in route(source, target, 1):
            chunks = split(group, step.box, (3, 61), limit)
            assert all(0 < chunk_bytes(group, chunk) <= limit for chunk in chunks)
            cells = [
                (layer, part, token)
                for chunk in chunks
                for layer, part, token in itertools.product(chunk.box.layers, chunk.box.parts, range(*chunk.tokens))
                if all(token // block % size == rank for rank, size, block in step.box.cycles)
            ]
            rank, size, block = step.box.cycles[0]
            mine = [t for t in range(3, 61) if t // block % size == rank]
            assert sorted(cells) == sorted(itertools.product((0, 1, 2), ("k", "v"), mine))
    with pytest.raises(PlanError, match="use larger slots"):
        split(group, route(source, target, 1)[0].box, (0, 8), 7)


def test_dense_copies_refuses_what_the_worker_does_not_own() -> None:
    source = instance(tp=2, heads=4)
    group, side = source.groups[0], Side({"attn": Table((0, 1))})
    foreign = Box("attn", (0,), ("k",), {"head": ((2, 3),), "dim": ((0, 4),)})
    (chunk,) = split(group, foreign, (0, 8), 1 << 20)
    with pytest.raises(PlanError, match=r"head 2: worker 0 doesn't own it"):
        dense_copies(source.worker(0), group, chunk, side)
    assert dense_copies(source.worker(1), group, chunk, side).total_bytes == 8 * 8
    for bad in (
        replace(foreign, layers=(7,)),
        replace(foreign, axes={"head": ((2, 3),)}),
        replace(foreign, layers=(0, 0)),
    ):
        with pytest.raises(PlanError):
            dense_copies(source.worker(1), group, replace(chunk, box=bad), side)


def test_dense_copies_refuses_tokens_of_another_cycle() -> None:
    """Rank 0 of two holds tokens 0, 2, 4 …: where token 1 would be lies token 2."""
    source = instance(cycles=((0, 2, 1), (1, 2, 1)))
    group, side = source.groups[0], Side({"attn": Table((0, 1))})
    axes = {"head": ((0, 4),), "dim": ((0, 4),)}
    for cycles in ((), ((1, 2, 1),), ((0, 2, 2),)):
        with pytest.raises(PlanError, match=r"owns only those of cycle \[0, 2, 1\]"):
            dense_copies(source.worker(0), group, Chunk(Box("attn", (0,), ("k",), axes, cycles), (0, 8)), side)
    own = Chunk(Box("attn", (0,), ("k",), axes, ((0, 2, 1), (0, 4, 1))), (0, 8))
    assert dense_copies(source.worker(0), group, own, side).total_bytes == 2 * 4 * 4 * 2


def test_axes_without_a_common_refinement_are_enumerated() -> None:
    """2×3 against 3×2: no common fold exists, every index still gets its own pair."""
    index = np.arange(6, dtype=np.uint64)
    source = index // np.uint64(3) * np.uint64(100) + index % np.uint64(3) * np.uint64(2)
    target = index // np.uint64(2) * np.uint64(50) + index % np.uint64(2) * np.uint64(2)
    pairs = []
    for part in fold_axis(source.tobytes(), target.tobytes()):
        for s, t in zip(part.source.tolist(), part.target.tolist(), strict=True):
            corner = [(s, t)]
            for extent, ss, ts in part.folds:
                corner = [(a + i * ss, b + i * ts) for a, b in corner for i in range(extent)]
            pairs += corner
    assert sorted(pairs) == sorted(zip(source.tolist(), target.tolist(), strict=True))


def test_equal_layouts_grow_to_one_run() -> None:
    assert grow(((2, 1, 1), (128, 2, 2), (8, 256, 256), (16, 2048, 2048))) == (2 * 128 * 8 * 16, [])
    run, left = grow(((2, 1, 1), (128, 2, 2), (4, 256, 256), (16, 2048, 1024)))
    assert (run, left) == (1024, [(16, 2048, 1024)])


def test_neighbouring_pages_merge_into_one_copy() -> None:
    one = instance(stages=((0,),))
    plan = make_plan(one, one, request((0, 32), [4, 5, 6, 9], [1, 2, 3, 8]))
    assert plan.proof.copies == 4  # pages 4–6 and page 9, of K and of V


@pytest.mark.parametrize("damage", ["shift", "drop", "twice", "swap"])
def test_the_proof_catches_broken_programs(damage: str) -> None:
    source, target = instance(tp=2), instance("decode", layout="hnd")
    (program,) = pair_programs(source.worker(0), target.worker(0), source.groups[0], route(source, target, 0)[0].box)
    prove_cells(program)
    piece = program.pieces[0]
    broken = {
        "shift": [replace_piece(piece, target_starts=piece.target_starts + np.uint64(2))],
        "drop": [replace_piece(piece, folds=piece.folds[:-1])],
        "twice": [piece, piece],
        "swap": [replace_piece(piece, target_bases=piece.target_bases.take(np.arange(len(piece.target_bases))[::-1]))]
        if len(piece.target_bases) > 1
        else [replace_piece(piece, folds=tuple((e, t, s) for e, s, t in piece.folds))],
    }[damage]
    with pytest.raises(ProofError):
        prove_cells(dataclasses.replace(program, pieces=tuple(broken)))


def replace_piece(piece: object, **changes: object) -> object:
    return dataclasses.replace(piece, **changes)  # type: ignore[type-var]


def test_the_proof_catches_overlap_and_bounds() -> None:
    one = instance()
    (program,) = pair_programs(one.worker(0), one.worker(0), one.groups[0], route(one, one, 0)[0].box)
    segments = bind_tokens(program, (0, 16), page_array(Table((0, 1))), page_array(Table((2, 2))))
    copies = expand(program, segments)
    with pytest.raises(ProofError, match="share target bytes"):
        prove_disjoint(copies.target, copies.lengths, "worker 0")


def test_landing_is_proved_before_it_is_offered() -> None:
    one = instance()
    worker, wanted = one.worker(0), {"attn": Wanted(tokens=(0, 16))}
    prove_landing(worker, one, wanted, Side({"attn": Table((3, 1))}))
    with pytest.raises(ProofError, match="page 3 serves two"):
        prove_landing(worker, one, wanted, Side({"attn": Table((3, 3))}))
    with pytest.raises(PlanError, match="no such page table"):
        prove_landing(worker, one, wanted, Side())


def test_landing_sees_pools_that_share_memory() -> None:
    """Two groups whose pools lie in the same bytes: different pages are fine, the same page is not."""
    one = instance()
    pool = one.workers[0].pools[0]
    other = replace(one.groups[0], name="other")
    both = replace(
        one,
        groups=(one.groups[0], other),
        workers=(replace(one.workers[0], pools=(pool, replace(pool, group="other"))),),
    )
    wanted = {"attn": Wanted(tokens=(0, 8)), "other": Wanted(tokens=(0, 8))}
    tables = Side({"attn": Table((3,)), "other": Table((4,))})
    plan = make_plan(both, both, Request("kvferry-request/1", wanted, tables, tables))
    assert plan.proof.bytes == 2 * 8 * 4 * 8 * 4
    with pytest.raises(ProofError, match="share target bytes"):
        same = Side({"attn": Table((3,)), "other": Table((3,))})
        make_plan(both, both, Request("kvferry-request/1", wanted, tables, same))
    prove_landing(both.worker(0), both, wanted, Side({"attn": Table((3,)), "other": Table((4,))}))
    with pytest.raises(ProofError, match="share target bytes"):
        prove_landing(both.worker(0), both, wanted, Side({"attn": Table((3,)), "other": Table((3,))}))


def test_f17_a_second_decode_instance_with_another_tp_gets_its_own_copies() -> None:
    """F17: one prefill, decode instances of TP 2, 4 and 3 in turn: each plan is what it is when made alone."""
    source = instance(tp=2, heads=12)
    targets = [instance(f"decode-{tp}", tp=tp, heads=12, base=1 << 40) for tp in (2, 4, 3)]
    wanted = request((3, 61), list(range(8)), list(range(7, -1, -1)))
    together = [make_plan(source, target, wanted) for target in targets + targets]
    for plan, target in zip(together, targets + targets, strict=True):
        alone = make_plan(
            instance(tp=2, heads=12), instance(target.instance, tp=len(target.workers), heads=12, base=1 << 40), wanted
        )
        assert plan == alone
        assert {transfer.target for transfer in plan.transfers} == {worker.rank for worker in target.workers}
    assert len({str(plan) for plan in together}) == 3
