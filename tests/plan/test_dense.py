"""Chunks in any order: what one side gathers and the other scatters moves each wanted byte once."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from kvferry.errors import PlanError
from kvferry.layout.address import Address
from kvferry.layout.document import Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.request import Side, Table
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.dense import Chunk, chunk_bytes, dense_copies, split
from kvferry.plan.follow import best_order
from kvferry.plan.order import CANONICAL, Order, order_problem
from kvferry.plan.program import cell_bytes
from kvferry.plan.route import Box, route
from kvferry.plan.wanted import check_wanted
from tests.plan.build import instance
from tests.plan.cases import Json, random_case
from tests.plan.in_order import items_in_order, random_order
from tests.plan.oracle import replay, truth
from tests.plan.test_oracle import ANY_SPEED, CHANCE, EXAMPLES


def in_chunk(worker: Worker, group: Group, chunk: Chunk, side: Side) -> list[int]:
    """The address of each of the chunk's bytes; every byte has one."""
    copies = dense_copies(worker, group, chunk, side)
    found: list[int | None] = [None] * chunk_bytes(group, chunk)
    runs = zip(copies.addresses.u64.tolist(), copies.dense_offsets.tolist(), copies.lengths.tolist(), strict=True)
    for address, offset, count in runs:
        for byte in range(count):
            assert found[offset + byte] is None, f"byte {offset + byte} of the chunk has two places"
            found[offset + byte] = address + byte
    assert None not in found
    return found  # type: ignore[return-value]


def staged(rnd: random.Random, source: Json, target: Json, request: Json) -> Json:
    """A plan byte by byte, of chunks in orders drawn at random or the best."""
    ours, theirs = parse_instance(json.dumps(source)), parse_instance(json.dumps(target))
    wanted = parse_request(json.dumps(request), ours, theirs)
    check_wanted(ours, theirs, wanted.groups)
    transfers = []
    for worker in theirs.workers:
        for step in route(ours, theirs, worker.rank):
            group, other = theirs.group(step.box.group), ours.worker(step.source)
            if group.name not in wanted.groups:
                continue
            order = rnd.choice([random_order(rnd, step.box), best_order(group, step.box, other, worker)])
            limit = cell_bytes(group, step.box) * rnd.choice([1, 2, 5, 11, 60, 1000])
            limit_tokens = rnd.choice([0, 0, 0, 1, 3])
            tokens = wanted.groups[group.name].token_range
            for chunk in split(group, step.box, tokens, limit, limit_tokens, order):
                assert 0 < chunk_bytes(group, chunk) <= limit
                assert not limit_tokens or chunk.tokens[1] - chunk.tokens[0] <= limit_tokens or step.box.cycles
                sides = [
                    [hex(address) for address in in_chunk(who, group, chunk, side)]
                    for who, side in ((other, wanted.source), (worker, wanted.target))
                ]
                transfers.append(
                    {
                        "source": step.source, "target": worker.rank, "source_addresses": sides[0],
                        "target_addresses": sides[1], "bytes": [1] * len(sides[0]),
                    }
                )  # fmt: skip
    total = sum(len(transfer["bytes"]) for transfer in transfers)
    proof = {"bytes": total, "copies": total, "in_bounds": True, "exactly_once": True, "complete": True}
    return {"transfers": transfers, "proof": proof}


@pytest.mark.timeout(3600)
@settings(ANY_SPEED, max_examples=max(EXAMPLES // 4, 1))
@given(CHANCE)
def test_chunks_in_any_order_move_each_wanted_byte_once(rnd: random.Random) -> None:
    source, target, request = random_case(rnd)
    note(json.dumps([source, target, request]))
    expected = truth(source, target, request)
    try:
        answer = staged(rnd, source, target, request)
    except PlanError as error:
        assert expected.verdict != "yes", f"refused, but can be served: {error}"
        return event("refused")
    event("moved" if replay(expected, answer) else "nothing wanted")


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_items_lie_where_the_order_says(rnd: random.Random) -> None:
    """Both sides could agree on a wrong order, so here the chunk is compared with a sorted list of its items."""
    worker = instance(layout="hnd", page_tokens=4, pages=8).workers[0]
    group = instance().groups[0]
    start = rnd.randint(0, 9)
    tokens = start, start + rnd.randint(1, 12)
    box = Box("attn", (1, 0), ("k", "v"), {"head": ((2, 4), (0, 1)), "dim": ((0, 4),)})
    chunk = Chunk(box, tokens, random_order(rnd, box))
    pages = rnd.sample(range(8), 6)
    base, span = worker.regions[0].base.value, 8 * 4 * 32

    def address(layer: int, part: int, token: int, head: int, dim: int) -> int:
        buffer = 2 * box.layers[layer] + part
        return base + buffer * span + pages[token // 4] * 128 + head * 32 + token % 4 * 8 + dim * 2

    found = in_chunk(worker, group, chunk, Side({"attn": Table(tuple(pages))}))
    assert found[::2] == [address(*item) for item in items_in_order(chunk)]  # type: ignore[arg-type]


HEADS, DIM, PAGE_TOKENS = 4, 8, 16


def pages_of(modes: str, tp: int, rank: int, page_tokens: int = PAGE_TOKENS, layers: int = 2) -> tuple[Group, Worker]:
    """One worker whose pages nest as `modes` says, outermost first, with the layers in regions of their own."""
    group = Group("attn", "token", "bfloat16", tuple(range(layers)), ("k", "v"), {"head": HEADS, "dim": DIM})
    extents = {"part": 2, "token": page_tokens, "head": HEADS // tp, "dim": DIM}
    strides, stride = {}, 2
    for name in reversed(modes.split()):
        strides[name] = stride
        stride *= extents[name]
    page_bytes, part_stride = stride, strides.get("part", 0)
    if not part_stride:  # each part has all of its pages together
        part_stride = 64 * page_bytes
    buffers = tuple(Buffer(i, part, i, n * part_stride, 64) for i in range(layers) for n, part in enumerate("kv"))
    regions = tuple(Region(Address((i + 1) << 32), 2 * 64 * page_bytes) for i in range(layers))
    owned = {"head": ((HEADS // tp * rank, HEADS // tp * (rank + 1)),)}
    named = tuple(Mode(axis, extents[axis], strides[axis]) for axis in ("token", "head", "dim"))
    return group, Worker(rank, regions, (Pool("attn", page_tokens, page_bytes, named, buffers, owned=owned),))


def runs_of(group: Group, sides: Sequence[Worker], box: Box, order: Order, tokens: tuple[int, int]) -> list[int]:
    """Of all of the tokens in one chunk, on each side; no two pages are neighbours."""
    table = Side({"attn": Table(tuple(range(0, 64, 2)))})
    (chunk,) = split(group, box, tokens, 1 << 30, order=order)
    return [len(dense_copies(worker, group, chunk, table).lengths) for worker in sides]


@pytest.mark.parametrize(
    ("source", "target", "tp", "runs"),
    [
        ("token head dim", "token head dim", 1, [4 * 8, 4 * 8]),  # 4: two layers, two parts; 8 pages
        ("token head dim", "token head dim", 2, [4 * 128, 4 * 8]),
        ("head token dim", "head token dim", 1, [4 * 8, 4 * 8]),
        ("head token dim", "head token dim", 2, [4 * 8, 4 * 8]),
        ("head token dim", "token head dim", 1, [4 * 128 * 4, 4 * 8]),  # one side is cut up in any order: canonical
        ("head token part dim", "head token part dim", 1, [2 * 8, 2 * 8]),  # vLLM 0.32 on a CPU
        ("head token part dim", "head token part dim", 2, [2 * 8, 2 * 8]),
        ("part token head dim", "part token head dim", 1, [2 * 8, 2 * 8]),
        ("part head token dim", "part head token dim", 2, [2 * 8 * 2, 2 * 8]),
        ("part token head dim", "token head dim", 1, [2 * 8, 4 * 8]),
    ],
)
def test_the_best_order_follows_the_pages(source: str, target: str, tp: int, runs: list[int]) -> None:
    group, one = pages_of(source, 1, 0)
    _, two = pages_of(target, tp, tp - 1)
    box = Box("attn", (0, 1), ("k", "v"), {"head": ((HEADS - HEADS // tp, HEADS),), "dim": ((0, DIM),)})
    order = best_order(group, box, one, two)
    best = runs_of(group, (one, two), box, order, (0, 128))
    plain = runs_of(group, (one, two), box, CANONICAL, (0, 128))
    assert best == runs, (order, best, plain)
    assert sum(best) <= sum(plain)


def test_orders_that_make_no_sense_are_named() -> None:
    box = Box("attn", (0,), ("k",), {"head": ((0, 4),), "dim": ((0, 4),)})
    assert not order_problem(CANONICAL, box)
    assert not order_problem(Order((5, 4, 3, 2, 1, 0), 7), box)
    for axes in ((0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 4), (0, 1, 2, 3, 4, 6), (0, 1, 2, 3, 4, 5, 6), (-1, 0, 1, 2, 3, 4)):
        assert "does not name each of the 6 axes once" in order_problem(Order(axes), box)
    assert "blocks of -1 tokens" in order_problem(Order((), -1), box)
    cyclic = Box("attn", (0,), ("k",), box.axes, ((0, 2, 1),))
    assert "only some of the tokens" in order_problem(Order((), 16), cyclic)
    assert not order_problem(Order((3, 2, 1, 0, 4, 5)), cyclic)


def test_chunks_end_at_blocks_where_one_fits() -> None:
    group, _ = pages_of("head token dim", 1, 0)
    box = Box("attn", (0, 1), ("k", "v"), {"head": ((0, HEADS),), "dim": ((0, DIM),)})
    cell = cell_bytes(group, box) * 2
    chunks = split(group, box, (5, 300), 40 * cell, order=Order((0, 1, 2, 4, 3, 5), 16))
    edges = sorted({chunk.tokens for chunk in chunks})
    assert edges[0][0] == 5 and edges[-1][1] == 300
    assert all(low % 16 == 0 for low, _ in edges[1:])
    assert all(high - low <= 32 for low, high in edges)
    small = split(group, box, (0, 32), 5 * cell, order=Order((0, 1, 2, 4, 3, 5), 16))
    assert max(chunk.tokens[1] - chunk.tokens[0] for chunk in small) == 5


def test_state_groups_and_split_axes_keep_the_canonical_order() -> None:
    """An axis that a page splits in two can't be said in an order."""
    packed: Instance = instance(layout="vectorised")
    box = Box("attn", (0, 1), ("k", "v"), {"head": ((0, 4),), "dim": ((0, 4),)})
    worker = packed.workers[0]
    assert best_order(packed.groups[0], box, worker, worker) == CANONICAL
    state = Group("ssm", "state", "float32", (0,), ("ssm",), {"head": 2})
    assert best_order(state, Box("ssm", (0,), ("ssm",), {"head": ((0, 2),)}), worker, worker) == CANONICAL
