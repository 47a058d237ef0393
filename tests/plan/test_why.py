"""Following single cells, compared with the plan's copies."""

from __future__ import annotations

import json
import random

import pytest

from kvferry.errors import DocumentError, KVFerryError
from kvferry.layout.document import Group, Instance
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.document import make_plan
from kvferry.plan.route import owners, shared_groups
from kvferry.plan.why import Cell, parse_cell, why, why_text
from tests.plan.build import instance, request
from tests.plan.cases import random_case

BASE = 0xFFFF81AB54E01000


@pytest.mark.parametrize("seed", range(60))
def test_a_random_cell_lies_in_the_copy_that_carries_it(seed: int) -> None:
    rnd = random.Random(seed)
    documents = random_case(rnd)
    source, target = (parse_instance(json.dumps(document)) for document in documents[:2])
    asked = parse_request(json.dumps(documents[2]), source, target)
    transfers = {(t.source, t.target): t for t in make_plan(source, target, asked).transfers}
    cells = [
        cell
        for group in shared_groups(source, target)
        for cell in some_cells(rnd, target, group, asked.groups[group.name].token_range)
    ]
    for cell in cells:
        found = why(source, target, cell, asked)
        transfer = transfers[found.source.rank, cell.rank]
        copies = set(zip(transfer.source_addresses, transfer.target_addresses, transfer.bytes))
        assert (found.run.source_start, found.run.target_start, found.run.bytes) in copies
        for end, start in ((found.source, found.run.source_start), (found.target, found.run.target_start)):
            assert end.address is not None and end.page is not None
            assert int(end.address, 16) == int(start, 16) + found.run.cell_at
            assert int(end.address, 16) == int(end.base, 16) + end.page * end.page_bytes + end.page_offset
        assert found.source.rank in found.replicas
        assert str(found.source.rank) in found.reason or len(found.replicas) == 1
        loose = why(source, target, cell)
        assert loose.source.rank == found.source.rank and 0 < loose.run.bytes
        assert loose.run.cell_at < loose.run.bytes


def some_cells(rnd: random.Random, target: Instance, group: Group, tokens: tuple[int, int]) -> list[Cell]:
    """Up to four cells that a target worker holds and the request wants."""
    found = []
    for (layer, part), holders in owners(target, group).items():
        for owner in holders:
            rank, size, block = owner.cycle
            held = [t for t in range(*tokens) if t // block % size == rank]
            axes = [[i for segment in segments for i in range(*segment)] for segments in owner.segments]
            if held and all(axes):
                index = {axis: rnd.choice(indices) for axis, indices in zip(group.axes, axes)}
                found.append(Cell(owner.rank, group.name, layer, part, index, rnd.choice(held)))
    return rnd.sample(found, min(4, len(found)))


def test_addresses_by_hand() -> None:
    """TP 4 → 3 with 12 heads, pages of 6 and 4 tokens, HND."""
    source = instance("a", tp=4, heads=12, page_tokens=6, layout="hnd")
    target = instance("b", tp=3, heads=12, page_tokens=4, layout="hnd", base=1 << 40)
    asked = request((0, 12), [5, 9], [3, 11, 1])
    found = why(source, target, Cell(1, "attn", 1, "v", {"head": 5, "dim": 2}, 7), asked)
    # token 7: slot 1 of the second source page, slot 3 of the second target page; head 5 is the third of worker 1's
    source_span, target_span = 16 * 6 * 3 * 8, 16 * 4 * 4 * 8
    source_base = BASE + 2 * 4 * source_span + 3 * source_span
    target_base = (1 << 40) + 2 * 4 * target_span + 3 * target_span
    assert (found.source.rank, found.source.page, found.source.slot) == (1, 9, 1)
    assert (found.target.page, found.target.slot) == (11, 3)
    assert found.source.address == hex(source_base + 9 * 144 + 2 * 48 + 1 * 8 + 4)
    assert found.target.address == hex(target_base + 11 * 128 + 1 * 32 + 3 * 8 + 4)
    # tokens 6 and 7 of head 5 travel together
    assert (found.run.bytes, found.run.cell_at) == (16, 12)


def test_a_long_merged_run_is_shown_whole() -> None:
    """Equal layouts and pages side by side: one run of 5,000 pages, more than are looked at first."""
    side = instance("a", heads=1, page_tokens=1, pages=5001, stages=((0,),))
    asked = request((0, 5000), list(range(5000)), list(range(5000)))
    found = why(side, side, Cell(0, "attn", 0, "v", {"head": 0, "dim": 0}, 2500), asked)
    assert (found.run.bytes, found.run.cell_at) == (5000 * 8, 2500 * 8)
    (transfer,) = make_plan(side, side, asked).transfers
    assert (found.run.source_start, found.run.bytes) in set(zip(transfer.source_addresses, transfer.bytes))


def test_the_rule_among_replicas_is_told() -> None:
    found = why(
        instance("a", tp=4, heads=1), instance("b", tp=8, heads=1), Cell(5, "attn", 0, "k", {"head": 0, "dim": 0}, 3)
    )
    assert (found.source.rank, found.replicas) == (2, (0, 1, 2, 3))
    assert found.reason == (
        "source workers 0-3 hold it and target workers 0-7 want it, spread evenly: "
        "target 5 is number 6 of 8, so it takes replica 3 of 4, worker 2"
    )
    text = why_text(found)
    assert "offsets inside a page" in text and found.source.address is None


def test_without_a_request_pages_are_offsets() -> None:
    source, target = instance("a", page_tokens=6, layout="hnd"), instance("b", page_tokens=4, layout="hnd")
    found = why(source, target, Cell(0, "attn", 0, "k", {"head": 1, "dim": 0}, 1_000_000_007))
    # 1,000,000,007 is 5 in its page of 6 tokens and 3 in its page of 4; tokens 8 to 11 of every 12 share both
    assert (found.source.slot, found.target.slot) == (5, 3)
    assert (found.source.table_entry, found.target.table_entry) == (166_666_667, 250_000_001)
    assert (found.source.page_offset, found.target.page_offset) == (6 * 8 + 5 * 8, 4 * 8 + 3 * 8)
    assert (found.run.bytes, found.run.cell_at) == (32, 24)
    assert (found.run.source_start, found.run.target_start) == (hex(48 + 2 * 8), hex(32))


TARGET = instance("b", tp=2, heads=4)


def test_cells_are_read() -> None:
    assert parse_cell("1:attn:1:v:3:17", TARGET) == Cell(1, "attn", 1, "v", {"head": 3, "dim": 0}, 17)
    assert parse_cell("1:attn:1:v:dim=2:0", TARGET) == Cell(1, "attn", 1, "v", {"head": 2, "dim": 2}, 0)
    assert parse_cell("0:attn:1:v:3,dim=1:0", TARGET).index == {"head": 3, "dim": 1}
    assert parse_cell("1:attn:0:k:-:0", TARGET).index == {"head": 2, "dim": 0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected TARGET_RANK:"),
        ("0:attn:0:k:0", "expected TARGET_RANK:"),
        ("x:attn:0:k:0:0", "TARGET_RANK must be a whole number, got 'x'"),
        ("-1:attn:0:k:0:0", "TARGET_RANK must be a whole number, got '-1'"),
        ("2:attn:0:k:0:0", "there is no target worker 2; its ranks are 0-1"),
        ("0:mla:0:k:0:0", "no group 'mla'; expected one of attn"),
        ("0:attn:2:k:0:0", "no layer 2; it has layers 0-1"),
        ("0:attn:0:q:0:0", "no part 'q'; it has k, v"),
        ("0:attn:0:k:4:0", "head 4 is outside the 4"),
        ("0:attn:0:k:width=1:0", "no axis 'width'; its axes: head, dim"),
        ("0:attn:0:k:0,head=1:0", "axis 'head' is given twice"),
        ("0:attn:0:k:head=:0", "the index of axis head must be a whole number, got ''"),
        ("0:attn:0:k:0:1e3", "TOKEN must be a whole number, got '1e3'"),
        ("0:attn:0:k:0:²", "TOKEN must be a whole number"),
        (f"0:attn:0:k:0:{10**30}", "TOKEN must be a whole number"),
    ],
)
def test_bad_cells_are_refused(text: str, problem: str) -> None:
    with pytest.raises(DocumentError, match=r"^--why: ") as raised:
        parse_cell(text, TARGET)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("0:attn:0:k:2:16", "target worker 0 doesn't hold head 2; it holds head 0:2"),
        ("0:attn:0:k:0:40", "token 40 isn't wanted; the request wants tokens 16 to 31"),
    ],
)
def test_cells_that_do_not_travel_are_refused(cell: str, problem: str) -> None:
    asked = request((16, 32), [0, 1, 2, 3], [0, 1, 2, 3])
    with pytest.raises(KVFerryError) as raised:
        why(instance("a", heads=4), TARGET, parse_cell(cell, TARGET), asked)
    assert problem in str(raised.value)


def test_a_token_of_another_context_rank_is_refused() -> None:
    target = instance("b", cycles=((0, 2, 4), (1, 2, 4)))
    with pytest.raises(DocumentError, match=r"worker 1 doesn't hold token 8, only t with t // 4 % 2 = 1"):
        why(instance("a"), target, parse_cell("1:attn:0:k:0:8", target))


def test_a_worker_without_the_layer_is_refused() -> None:
    target = instance("b", stages=((0,), (1,)))
    with pytest.raises(DocumentError, match="worker 0 doesn't hold layer 1, part k"):
        parse_cell("0:attn:1:k:0:0", target)
