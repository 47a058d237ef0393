"""Rows and totals of the explanation, against plans of real requests."""

from __future__ import annotations

import json
import random

import pytest

from kvferry.layout.document import Instance
from kvferry.layout.request import Request
from kvferry.layout.validate import parse_instance, parse_request
from kvferry.plan.document import make_plan
from kvferry.plan.explain import Wire, cycle_text, explain, ranges, slices, who_sends_what
from tests.plan.build import instance, request
from tests.plan.cases import random_case


def scattered_pages(count: int) -> list[int | None]:
    """Page numbers of which no two neighbours are adjacent."""
    return [2 * i + 1 for i in range(count)]


def planned(source: Instance, target: Instance, asked: Request) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """(copies, bytes, shortest, longest) per pair."""
    return {
        (t.source, t.target): (len(t.bytes), sum(t.bytes), min(t.bytes), max(t.bytes))
        for t in make_plan(source, target, asked).transfers
    }


@pytest.mark.parametrize("layouts", [("nhd", "nhd"), ("nhd", "hnd"), ("hnd", "hnd"), ("hnd", "vectorised")])
@pytest.mark.parametrize(("source_tokens", "target_tokens"), [(8, 8), (6, 4), (4, 6)])
@pytest.mark.parametrize("tps", [(4, 3), (1, 1)])
def test_runs_and_copies_are_those_of_a_plan(
    layouts: tuple[str, str], source_tokens: int, target_tokens: int, tps: tuple[int, int]
) -> None:
    source, target = (
        instance(name, tp=tp, heads=12, layout=layout, page_tokens=tokens, pages=64)
        for name, tp, layout, tokens in zip("ab", tps, layouts, (source_tokens, target_tokens))
    )
    tokens = 24
    asked = request((0, tokens), scattered_pages(tokens // source_tokens), scattered_pages(tokens // target_tokens))
    for pair, (copies, nbytes, shortest, longest) in planned(source, target, asked).items():
        (row,) = [row for row in who_sends_what(source, target) if (row.source, row.target) == pair]
        assert (row.run_bytes, row.longest_run_bytes) == (shortest, longest)
        assert row.copies_per_page == round(copies * target_tokens / tokens, 2)
        assert row.bytes_per_token * tokens == nbytes
        assert (row.choice, row.replicas) == ("only owner", (row.source,))


def test_totals_under_cyclic_context_parallelism_are_means() -> None:
    source = instance("a", heads=4, pages=64, cycles=((0, 2, 4), (1, 2, 4)))
    target = instance("b", heads=4, pages=64, cycles=((0, 4, 1), (1, 4, 1), (2, 4, 1), (3, 4, 1)))
    found = explain(source, target, Wire("nixl", 1e-6, 1e-9, 1e-8, 1e-9))
    whole = 2 * 2 * 4 * 4 * 2  # layers × parts × heads × dim × bytes
    assert [total.bytes_per_token for total in found.senders] == [whole / 2] * 2
    assert [total.bytes_per_token for total in found.receivers] == [whole / 4] * 4
    assert all(total.peers == (0, 1) for total in found.receivers)
    assert {row.token_share for row in found.rows} == {1 / 8}
    pages: list[int | None] = scattered_pages(6)
    plan = planned(source, target, request((0, 96), pages, pages))
    for row in found.rows:
        copies, nbytes, *_ = plan[row.source, row.target]
        assert row.amount(96) == (nbytes, copies)


def test_replicas_are_counted_and_chosen_evenly() -> None:
    rows = who_sends_what(instance("a", tp=4, heads=1), instance("b", tp=8, heads=1))
    assert [(row.target, row.source, row.choice) for row in rows] == [
        (target, target // 2, f"replica {target // 2 + 1} of 4") for target in range(8)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_rows_add_up_to_what_a_plan_moves(seed: int) -> None:
    """Random instances of every kind: the bytes of the plan are the rows' cells times the tokens that pass."""
    documents = random_case(random.Random(seed))
    source, target = (parse_instance(_json(document)) for document in documents[:2])
    asked = parse_request(_json(documents[2]), source, target)
    moved: dict[tuple[int, int], int] = {}
    for row in who_sends_what(source, target):
        start, stop = asked.groups[row.group].token_range
        tokens = [t for t in range(start, stop) if all(t // block % size == rank for rank, size, block in row.cycles)]
        pair = row.source, row.target
        moved[pair] = moved.get(pair, 0) + row.bytes_per_token * len(tokens)
    assert {pair: n for pair, n in moved.items() if n} == {
        pair: nbytes for pair, (_, nbytes, *_) in planned(source, target, asked).items()
    }


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


def test_texts() -> None:
    assert ranges([8, 0, 1, 2, 4]) == "0-2,4,8"
    assert slices([(0, 4), (8, 12)]) == "0:4,8:12"
    assert cycle_text([(1, 4, 16), (0, 1, 1)]) == "t//16%4=1"
    assert cycle_text([]) == "all"
