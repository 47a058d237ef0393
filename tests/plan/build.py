"""Small instances for the planner's tests, written out by hand from the format's definition."""

from __future__ import annotations

from kvferry.layout.address import Address
from kvferry.layout.document import Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.request import Request, Side, Table, Wanted

DIM = 4
ITEM = 2


def heads_of(heads: int, tp: int, rank: int) -> tuple[int, int]:
    """The heads of one rank: split as evenly as the numbers allow; with more ranks than heads, replicas."""
    if tp <= heads:
        return heads * rank // tp, heads * (rank + 1) // tp
    return rank * heads // tp, rank * heads // tp + 1


def modes_for(layout: str, page_tokens: int, heads: int) -> tuple[Mode, ...]:
    token, head, dim = page_tokens, heads, DIM
    if layout == "nhd":
        return (
            Mode("token", token, head * dim * ITEM),
            Mode("head", head, dim * ITEM),
            Mode("dim", dim, ITEM),
        )
    if layout == "hnd":
        return (
            Mode("head", head, token * dim * ITEM),
            Mode("token", token, dim * ITEM),
            Mode("dim", dim, ITEM),
        )
    assert layout == "vectorised", layout
    return (
        Mode("head", head, token * dim * ITEM),
        Mode("dim", dim // 2, token * 2 * ITEM),
        Mode("token", token, 2 * ITEM),
        Mode("dim", 2, ITEM),
    )


def instance(
    name: str = "prefill",
    *,
    tp: int = 1,
    heads: int = 4,
    stages: tuple[tuple[int, ...], ...] = ((0, 1),),
    layout: str = "nhd",
    page_tokens: int = 8,
    pages: int = 16,
    base: int = 0xFFFF81AB54E01000,
    cycles: tuple[tuple[int, int, int], ...] = ((0, 1, 1),),
) -> Instance:
    """`stages`: layers per pipeline stage; workers are ordered stage by stage, then by cycle, then by TP rank."""
    workers = []
    layers = tuple(sorted(layer for stage in stages for layer in stage))
    for stage in stages:
        for cycle in cycles:
            for rank in range(tp):
                start, stop = heads_of(heads, tp, rank)
                page_bytes = page_tokens * (stop - start) * DIM * ITEM
                span = page_bytes * pages
                keys = [(layer, part) for layer in stage for part in ("k", "v")]
                buffers = tuple(Buffer(layer, part, 0, i * span, pages) for i, (layer, part) in enumerate(keys))
                size = max(1, span * len(keys))
                region = Region(Address(base + len(workers) * 2 * size), size, "device")
                pool = Pool(
                    "attn",
                    page_tokens,
                    page_bytes,
                    modes_for(layout, page_tokens, stop - start),
                    buffers,
                    owned={"head": ((start, stop),), "token": cycle},
                )
                workers.append(Worker(len(workers), (region,), (pool,)))
    group = Group("attn", "token", "bfloat16", layers, ("k", "v"), {"head": heads, "dim": DIM})
    return Instance("kvferry-instance/1", name, "tiny", (group,), tuple(workers))


def request(
    tokens: tuple[int, int],
    source_pages: list[int | None],
    target_pages: list[int | None],
    source_start: int = 0,
    target_start: int = 0,
) -> Request:
    return Request(
        "kvferry-request/1",
        {"attn": Wanted(tokens=tokens)},
        Side({"attn": Table(tuple(source_pages), source_start)}),
        Side({"attn": Table(tuple(target_pages), target_start)}),
    )
