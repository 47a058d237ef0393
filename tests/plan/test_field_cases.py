"""Faults seen in the field, each as its smallest case, planned and replayed byte by byte against the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.layout.document import encode_json
from kvferry.layout.presets import memory_bytes, uniform_instance
from tests.plan.oracle import replay, truth
from tests.plan.test_oracle import plan

Json = dict[str, Any]
TOP = 2**64
TOKENS = 13


def kv(name: str, heads: int, tp: int, pp: int = 1, *, layers: Any = 2, top: bool = False, **options: Any) -> Json:
    """A K/V instance of head_dim 2 as plain JSON; `top`: every worker's memory ends at 2**64."""
    options = {"page_tokens": 4, "pages": 9, "dtype": "float16", "bases": 0xFFFF81AB54E01000, **options}
    instance = uniform_instance(name, layers, heads, 2, tp, pp, **options)
    if top:
        options["bases"] = [TOP - memory_bytes(worker) for worker in instance.workers]
        instance = uniform_instance(name, layers, heads, 2, tp, pp, **options)
    document: Json = json.loads(encode_json(instance))
    return document


def table(page_tokens: int, stop: int, start: int = 0) -> Json:
    """Pages in falling order, so that neighbours in the table are no neighbours in memory."""
    return {"pages": list(range(-(-(stop - start) // page_tokens)))[::-1], "start": start}


def crosses(source: Json, target: Json, tokens: tuple[int, int] = (0, TOKENS), target_start: int = 0) -> int:
    """Plan the one group `attn` and replay; returns the bytes moved."""
    sizes = [side["workers"][0]["pools"][0]["page_tokens"] for side in (source, target)]
    request = {
        "format": "kvferry-request/1",
        "groups": {"attn": {"tokens": list(tokens)}},
        "source": {"tables": {"attn": table(sizes[0], tokens[1])}},
        "target": {"tables": {"attn": table(sizes[1], tokens[1], target_start)}},
    }
    return replay(truth(source, target, request), plan(source, target, request))


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 1), (1, 2), (2, 1)])
def test_f1_f2_addresses_with_bit_63_equal_and_mismatched(source_tp: int, target_tp: int, top: bool) -> None:
    source, target = kv("p", 2, source_tp, top=top), kv("d", 2, target_tp, top=top)
    assert crosses(source, target) == 2 * 2 * TOKENS * 2 * 2 * 2


TP_CASES = [
    ("F10 F11", 2, 4, 1),
    ("F12", 2, 1, 4),
    ("F13", 2, 4, 2),
    ("F13", 2, 2, 4),
    ("F13", 4, 8, 16),
    ("F14", 4, 8, 1),
    ("F15", 1, 16, 1),
    ("F16", 12, 3, 2),
    ("F16", 4, 4, 3),
    ("F16", 4, 6, 4),
    ("F16", 5, 3, 2),
]


@pytest.mark.parametrize(("rows", "heads", "source_tp", "target_tp"), TP_CASES)
def test_f10_to_f16_heads(rows: str, heads: int, source_tp: int, target_tp: int) -> None:
    held = max(heads, target_tp)  # replicas on the target each get their copy
    assert (
        crosses(kv("p", heads, source_tp, layers=1), kv("d", heads, target_tp, layers=1)) == held * 2 * TOKENS * 2 * 2
    )


STAGE_CASES: list[tuple[list[list[int]], list[list[int]]]] = [
    ([[0, 1, 2], [3, 4]], [[0, 1, 2, 3, 4]]),
    ([[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]]),
    ([[0], [1], [2], [3, 4]], [[0, 1, 2], [3, 4]]),
    ([[4, 0], [2], [1, 3]], [[3, 4], [0, 2, 1]]),
]


@pytest.mark.parametrize(("source_stages", "target_stages"), STAGE_CASES)
@pytest.mark.parametrize("packing", ["separate", "one_tensor", "interleaved"])
def test_f20_f21_uneven_and_interleaved_stages(
    source_stages: list[list[int]], target_stages: list[list[int]], packing: str
) -> None:
    source = kv("p", 2, 1, layers=5, stages=source_stages, packing=packing)
    target = kv("d", 2, 2, layers=5, stages=target_stages)
    assert crosses(source, target, (0, 5)) == 5 * 2 * 5 * 2 * 2 * 2


def cyclic(instance: Json, size: int, block: int) -> Json:
    """The same instance with every worker once per context rank."""
    workers = []
    for rank in range(size):
        for worker in json.loads(json.dumps(instance["workers"])):
            worker["rank"] = rank * len(instance["workers"]) + worker["rank"]
            for pool in worker["pools"]:
                pool["owned"]["token"] = [rank, size, block]
            workers.append(worker)
    return {**instance, "workers": workers}


@pytest.mark.parametrize(
    ("source_cp", "target_cp"), [((1, 1), (8, 1)), ((8, 1), (1, 1)), ((2, 4), (3, 1)), ((2, 2), (2, 3))]
)
def test_f22_cyclic_context_parallel(source_cp: tuple[int, int], target_cp: tuple[int, int]) -> None:
    source, target = cyclic(kv("p", 2, 2), *source_cp), cyclic(kv("d", 2, 1), *target_cp)
    assert crosses(source, target, (3, 26)) == 2 * 2 * 23 * 2 * 2 * 2


def test_f23_pipeline_to_tensor_and_context_parallel() -> None:
    source = kv("p", 4, 1, 4, layers=4)
    target = cyclic(kv("d", 4, 2, layers=4), 2, 2)
    assert crosses(source, target) == 4 * 2 * TOKENS * 4 * 2 * 2


@pytest.mark.parametrize(("source_page", "target_page"), [(4, 8), (8, 4), (6, 4), (4, 6), (1, 5), (7, 1)])
def test_f30_page_sizes(source_page: int, target_page: int) -> None:
    source = kv("p", 2, 1, page_tokens=source_page, pages=14)
    assert crosses(source, kv("d", 2, 2, page_tokens=target_page, pages=14)) == 2 * 2 * TOKENS * 2 * 2 * 2


@pytest.mark.parametrize("source_layout", ["nhd", "hnd", "vectorised"])
@pytest.mark.parametrize("target_layout", ["nhd", "hnd", "vectorised"])
@pytest.mark.parametrize("packings", [("interleaved", "separate"), ("one_tensor", "interleaved")])
def test_f31_f32_layouts(source_layout: str, target_layout: str, packings: tuple[str, str]) -> None:
    source = uniform_instance(
        "p", 1, 2, 8, 1, page_tokens=2, layout=source_layout, packing=packings[0], dtype="float32", pages=4
    )
    target = uniform_instance(
        "d", 1, 2, 8, 2, page_tokens=4, layout=target_layout, packing=packings[1], dtype="float32", pages=4
    )
    documents = [json.loads(encode_json(instance)) for instance in (source, target)]
    assert crosses(documents[0], documents[1], (1, 6)) == 2 * 5 * 2 * 8 * 4


@pytest.mark.parametrize("hit", [4, 5, 8, 12])
def test_f36_a_prefix_hit_on_the_target(hit: int) -> None:
    source, target = kv("p", 2, 1), kv("d", 2, 2)
    assert crosses(source, target, (hit, TOKENS), hit) == 2 * 2 * (TOKENS - hit) * 2 * 2 * 2


def side(
    name: str, groups: list[Json], tp: int, owned: dict[str, str], page_tokens: int, base: int
) -> tuple[Json, Json]:
    """(instance, page tables) of a model with several groups.

    `owned` names the axis that tensor parallelism splits per group, and each split axis is cut at `edges` first.
    """
    edges = {"head": [0, 2], "channel": [0, 4, 6, 10]}
    workers = []
    for rank in range(tp):
        pools: list[Json] = []
        regions: list[Json] = []
        at = base
        for group in groups:
            axis = owned.get(group["name"])
            segments: list[list[int]] = []
            counts = dict(group["axes"])
            if axis:
                for low, high in zip(edges[axis], edges[axis][1:], strict=False):
                    first = low + (high - low) * rank // tp
                    segments.append([first, max(low + (high - low) * (rank + 1) // tp, first + 1)])
                counts[axis] = sum(stop - start for start, stop in segments)
            tokens = page_tokens if group["growth"] == "token" else 1
            modes: list[list[Any]] = []
            stride = {"float16": 2, "float32": 4}.get(group["dtype"], 1)
            for dimension, extent in reversed([("token", tokens), *counts.items()]):
                modes.insert(0, [dimension, extent, stride])
                stride *= extent
            buffers = []
            for layer in group["layers"]:
                for part in group["parts"]:
                    buffers.append([layer, part, len(regions), 0, 6])
                    regions.append({"base": hex(at), "bytes": 6 * stride})
                    at += 6 * stride
            pools.append(
                {"group": group["name"], "table": "state" if tokens == 1 else "kv", "page_tokens": tokens}
                | {"page_bytes": stride, "modes": modes, "buffers": buffers, "owned": {axis: segments} if axis else {}}
            )
        workers.append({"rank": rank, "regions": regions, "pools": pools})
    instance = {"format": "kvferry-instance/1", "instance": name, "model": "m", "groups": groups, "workers": workers}
    kv_table = [5, 1, None, 4, 0, 2] if page_tokens == 2 else [2, 0, 3]
    return instance, {"tables": {"kv": {"pages": kv_table}, "state": {"pages": [rank_page(name)]}}}


def rank_page(name: str) -> int:
    return 3 if name == "p" else 1


K = {
    "name": "k",
    "growth": "token",
    "dtype": "float8_e4m3fn",
    "layers": [0, 1],
    "parts": ["k"],
    "axes": {"head": 2, "dim": 3},
}
V = {**K, "name": "v", "parts": ["v"], "axes": {"head": 2, "dim": 2}}
SCALE = {**K, "name": "scale", "dtype": "float32", "parts": ["k", "v"], "axes": {"head": 2}}
LATENT = {"name": "mla", "growth": "token", "dtype": "float16", "layers": [0, 1], "parts": ["c"], "axes": {"dim": 5}}
DRAFT = {
    "name": "draft",
    "growth": "token",
    "dtype": "float16",
    "layers": [7],
    "parts": ["k", "v"],
    "axes": {"head": 2, "dim": 2},
}
CONV = {
    "name": "conv",
    "growth": "state",
    "dtype": "float16",
    "layers": [3],
    "parts": ["conv"],
    "axes": {"channel": 10, "width": 3},
}
WINDOW = {**K, "name": "swa", "layers": [4], "dtype": "float16"}
SPLIT = {"k": "head", "v": "head", "scale": "head", "draft": "head", "conv": "channel", "swa": "head"}

GROUP_CASES: list[tuple[str, list[Json], dict[str, Json], int]] = [
    ("F33 mixed dtypes, fp16 state beside fp8", [K, CONV], {"k": {"tokens": [0, 4]}, "conv": {"position": 4}}, 108),
    ("F34 scales beside the data", [K, SCALE], {"k": {"tokens": [0, 4]}, "scale": {"tokens": [0, 4]}}, 176),
    ("F35 K and V of different width", [K, V], {"k": {"tokens": [1, 4]}, "v": {"tokens": [1, 4]}}, 60),
    ("F41 F45 MLA and an MHA draft", [LATENT, DRAFT], {"mla": {"tokens": [6, 11]}, "draft": {"tokens": [6, 10]}}, 0),
    ("F42 conv state of three segments", [CONV], {"conv": {"position": 9}}, 60),
    ("F44 a window that starts inside a page", [WINDOW], {"swa": {"tokens": [7, 12]}}, 60),
]


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize(("row", "groups", "wanted", "nbytes"), GROUP_CASES)
def test_f33_to_f45_groups(
    row: str, groups: list[Json], wanted: dict[str, Json], nbytes: int, source_tp: int, target_tp: int
) -> None:
    source, source_side = side("p", groups, source_tp, SPLIT, 2, 0xFFFF81AB54E01000)
    target, target_side = side("d", groups, target_tp, SPLIT, 4, 0x1000)
    request = {"format": "kvferry-request/1", "groups": wanted, "source": source_side, "target": target_side}
    answer = plan(source, target, request)
    moved = replay(truth(source, target, request), answer)
    # F40: a latent is whole on every target rank, and each of them gets it once
    assert moved == (nbytes or target_tp * 2 * 5 * 5 * 2 + 2 * 4 * 2 * 2 * 2)
