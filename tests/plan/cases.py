"""Random small instances and requests as plain JSON objects, for the oracle.

Everything is drawn from a `random.Random`, so Hypothesis can drive and shrink it and a plain seed can repeat it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Json = dict[str, Any]
BASES = ("low", "device", "2**63", "2**64")


@dataclass
class Grid:
    """How one side spreads its workers: pipeline stages × context ranks × tensor ranks."""

    tp: int
    pp: int
    cp: int
    block: int
    base: str


def random_case(rnd: random.Random) -> tuple[Json, Json, Json]:
    """(source, target, request), nearly always a request that can be served."""
    groups = random_groups(rnd)
    wanted = {group["name"]: random_wanted(rnd, group) for group in groups}
    request: Json = {"format": "kvferry-request/1", "groups": wanted}
    sides = []
    for name in ("source", "target"):
        instance, tables = random_side(rnd, name, groups, wanted)
        sides.append(instance)
        request[name] = tables
    if rnd.random() < 0.15:  # a group that one side caches for itself
        spare = {"name": "draft", "growth": "token", "dtype": "int8", "layers": [9], "parts": ["k"], "axes": {"dim": 2}}
        rnd.choice(sides)["groups"].append({**spare, "optional": True})
    return sides[0], sides[1], request


def random_groups(rnd: random.Random) -> list[Json]:
    layers = rnd.choice([[0], [0, 1], [0, 1, 2], [3, 1]])
    heads = rnd.choice([1, 2, 2, 3, 4, 4, 6])
    dtype = rnd.choice(["float16", "bfloat16", "int8", "float8_e4m3fn", "float32"])
    plain = {"growth": "token", "dtype": dtype, "layers": layers}
    packed = {"dtype": "uint8", "encoding": "mxfp4"}
    kinds: dict[str, list[Json]] = {
        "gqa": [{**plain, "name": "attn", "parts": ["k", "v"], "axes": {"head": heads, "dim": rnd.choice([1, 2, 4])}}],
        "widths": [
            {**plain, "name": "k", "parts": ["k"], "axes": {"head": heads, "dim": 3}},
            {**plain, "name": "v", "parts": ["v"], "axes": {"head": heads, "dim": 2}},
        ],
        "scales": [
            {**plain, "name": "attn", "parts": ["k"], "axes": {"head": heads, "dim": 4}, **packed},
            {**plain, "name": "scale", "dtype": "float32", "parts": ["k"], "axes": {"head": heads, "block": 2}},
        ],
        "mla": [{**plain, "name": "mla", "parts": ["latent"], "axes": {"dim": rnd.choice([3, 6])}}],
        "bare": [{**plain, "name": "bare", "parts": ["x"], "axes": {}}],
        "conv": [
            {
                "name": "conv", "growth": "state", "dtype": "float16", "layers": [layers[0]], "parts": ["conv"],
                "axes": {"channel": 12, "width": rnd.choice([1, 3])},
            }
        ],
        "ssm": [
            {
                "name": "ssm", "growth": "state", "dtype": "float32", "layers": [layers[-1]], "parts": ["ssm"],
                "axes": {"head": heads, "value": 2},
            }
        ],
    }  # fmt: skip
    chosen = rnd.sample(["gqa", "gqa", "widths", "scales", "mla", "bare", "conv", "ssm"], rnd.choice([1, 1, 2]))
    found: dict[str, Json] = {}
    for kind in chosen:
        for group in kinds[kind]:
            found.setdefault(group["name"], group)
    return list(found.values())


def random_wanted(rnd: random.Random, group: Json) -> Json:
    if group["growth"] == "state":
        return {"position": rnd.randint(0, 9)}
    start = rnd.choice([0, 0, 1, 2, 4, 7])
    return {"tokens": [start, start + rnd.choice([0, 1, 2, 3, 5, 8, 11])]}


def random_side(rnd: random.Random, name: str, groups: list[Json], wanted: Json) -> tuple[Json, Json]:
    grid = Grid(
        tp=rnd.choice([1, 1, 2, 3, 4]), pp=rnd.choice([1, 1, 1, 2, 3]), cp=rnd.choice([1, 1, 1, 2, 3]),
        block=rnd.choice([1, 1, 2, 4]), base=rnd.choice(BASES),
    )  # fmt: skip
    if grid.tp * grid.pp * grid.cp > 6:
        grid.pp = grid.cp = 1
    shared = rnd.random() < 0.5  # one page table for all token groups
    table_names = {
        group["name"]: "pages" if shared and group["growth"] == "token" else group["name"] for group in groups
    }
    page_tokens = {table: rnd.choice([1, 2, 3, 4, 6]) for table in table_names.values()}
    tables: dict[str, Json] = {}
    pool_pages: dict[str, int] = {}
    for table in sorted(set(table_names.values())):
        users = [group for group in groups if table_names[group["name"]] == table]
        if users[0]["growth"] == "state":
            page_tokens[table] = 1
            pool_pages[table] = rnd.randint(1, 3)
            tables[table] = {"pages": [rnd.randrange(pool_pages[table])]}
        else:
            ranges = [range(*wanted[group["name"]]["tokens"]) for group in users]
            tables[table], pool_pages[table] = random_table(rnd, ranges, page_tokens[table], grid)
    plans = {group["name"]: random_spread(rnd, group, grid) for group in groups}
    ranks = list(range(grid.tp * grid.pp * grid.cp))
    if rnd.random() < 0.3:
        ranks = rnd.sample(range(2 * len(ranks)), len(ranks))
    workers = []
    for number, rank in enumerate(ranks):
        tensor, rest = number % grid.tp, number // grid.tp
        context, stage = rest % grid.cp, rest // grid.cp
        pools: list[Json] = []
        for group in groups:
            stages, owned_by_rank = plans[group["name"]]
            layers = [layer for layer in group["layers"] if stages[layer] == stage]
            owned = dict(owned_by_rank[tensor])
            if grid.cp > 1 and group["growth"] == "token":
                owned["token"] = [context, grid.cp, grid.block]
            table = table_names[group["name"]]
            shape = {"group": group["name"], "page_tokens": page_tokens[table], "owned": owned}
            if table != group["name"]:
                shape["table"] = table
            pools += random_pools(rnd, group, shape, layers, pool_pages[table])
        workers.append(place(rnd, {"rank": rank, "regions": [], "pools": pools}, grid.base))
    instance = {
        "format": "kvferry-instance/1",
        "instance": name,
        "model": "m",
        "groups": groups[:: rnd.choice([1, -1])],
        "workers": workers,
    }
    return instance, {"tables": tables, **random_overrides(rnd, ranks, tables, pool_pages)}


def random_table(rnd: random.Random, ranges: list[range], page_tokens: int, grid: Grid) -> tuple[Json, int]:
    """A table that covers every wanted token, with null pages where none falls, and how many pages its pools have."""
    cycle = grid.cp * grid.block
    tokens = sorted({token for tokens in ranges for token in tokens})
    step = cycle if grid.cp > 1 else 1
    start = rnd.choice(range(0, (tokens[0] if tokens else 0) + 1, step))
    slots = {token // cycle * grid.block + token % grid.block - start // grid.cp for token in tokens}
    used = {slot // page_tokens for slot in slots}
    count = max(used, default=-1) + 1 + rnd.choice([0, 0, 1])
    pool_pages = count + rnd.choice([1, 1, 2, 4])
    pages: list[int | None] = list(rnd.sample(range(pool_pages), count))
    for index in range(count):
        if index not in used and rnd.random() < 0.5:
            pages[index] = None
    return {"pages": pages, **({"start": start} if start else {})}, pool_pages


def random_overrides(rnd: random.Random, ranks: list[int], tables: dict[str, Json], pool_pages: dict[str, int]) -> Json:
    """Sometimes one rank has the same tokens in other pages."""
    if rnd.random() > 0.1:
        return {}
    name = rnd.choice(sorted(tables))
    order = rnd.sample(range(pool_pages[name]), pool_pages[name])
    pages = [None if page is None else order[page] for page in tables[name]["pages"]]
    return {"workers": {str(rnd.choice(ranks)): {"tables": {name: {**tables[name], "pages": pages}}}}}


def random_spread(rnd: random.Random, group: Json, grid: Grid) -> tuple[dict[int, int], list[Json]]:
    """(layer → stage, per tensor rank what it owns)."""
    stages = {layer: rnd.randrange(grid.pp) for layer in group["layers"]}
    axes = list(group["axes"])
    axis = rnd.choice([axes[0], axes[0], axes[0], axes[-1], None]) if axes else None
    if axis is None or (group["name"] == "mla" and rnd.random() < 0.8):
        return stages, [{} for _ in range(grid.tp)]
    extent = group["axes"][axis]
    if rnd.random() < 0.25:
        shares = scattered_shares(rnd, extent, grid.tp)
    elif axis == "channel":  # q | k | v of unequal width, each split
        edges = rnd.choice([[0, 6, 8, 12], [0, 4, 8, 12], [0, 2, 9, 12]])
        shares = [[] for _ in range(grid.tp)]
        for low, high in pairwise(edges):
            for rank, segments in enumerate(even_shares(high - low, grid.tp)):
                shares[rank] += [[low + start, low + stop] for start, stop in segments]
    else:
        shares = even_shares(extent, grid.tp)
    whole = [[0, extent]]
    return stages, [{} if share == whole and rnd.random() < 0.5 else {axis: share} for share in shares]


def even_shares(extent: int, tp: int) -> list[list[list[int]]]:
    if tp > extent:  # replicas
        return [[[rank * extent // tp, rank * extent // tp + 1]] for rank in range(tp)]
    return [[[rank * extent // tp, (rank + 1) * extent // tp]] for rank in range(tp)]


def scattered_shares(rnd: random.Random, extent: int, tp: int) -> list[list[list[int]]]:
    """Each index on one or more ranks, segments in any order; a rank may own nothing."""
    owners = [set(rnd.sample(range(tp), rnd.randint(1, tp))) for _ in range(extent)]
    shares = []
    for rank in range(tp):
        segments: list[list[int]] = []
        for index in range(extent):
            if rank in owners[index]:
                if segments and segments[-1][1] == index and rnd.random() < 0.8:
                    segments[-1][1] = index + 1
                else:
                    segments.append([index, index + 1])
        rnd.shuffle(segments)
        shares.append(segments)
    return shares


def random_pools(rnd: random.Random, group: Json, shape: Json, layers: list[int], pages: int) -> list[Json]:
    """One pool of these layers and all parts, or several with layouts of their own."""
    keys = [(layer, part) for layer in layers for part in group["parts"]]
    if not keys:
        return []
    cuts = [keys]
    if len(keys) > 1 and rnd.random() < 0.3:
        by_part = [[key for key in keys if key[1] == part] for part in group["parts"]]
        by_layer = [[key for key in keys if key[0] == layer] for layer in layers]
        cuts = rnd.choice([by_part, by_layer])
    return [{**shape, **random_layout(rnd, group, shape, cut, pages)} for cut in cuts]


def random_layout(rnd: random.Random, group: Json, shape: Json, keys: list[tuple[int, str]], pages: int) -> Json:
    """Modes, page_bytes and buffers of any nesting of page, layer, part and in-page digits, padded or not."""
    counts = {
        axis: sum(stop - start for start, stop in shape["owned"].get(axis, [[0, size]]))
        for axis, size in group["axes"].items()
    }
    plain = rnd.random() < 0.4
    axes = ["token", *counts]
    if rnd.random() < 0.4:
        axes[0:2] = reversed(axes[0:2])
    digits: list[list[Any]] = []
    for axis in axes:
        count = shape["page_tokens"] if axis == "token" else counts[axis]
        digits += [[axis, extent, 0] for extent in ([count] if plain else factors(rnd, count))]
    layers = sorted({layer for layer, _ in keys})
    parts = sorted({part for _, part in keys})
    page: list[Any]
    layer: list[Any]
    part: list[Any]
    page, layer, part = ["page", pages, 0], ["layer", len(layers), 0], ["part", len(parts), 0]
    nest = [layer, part, page, *digits]
    if not plain:
        rnd.shuffle(nest)
    span = {"float32": 4, "float16": 2, "bfloat16": 2}.get(group["dtype"], 1)
    for step in reversed(nest):
        step[2] = span + (0 if plain else rnd.choice([0, 0, 0, 1, 3]))
        span = step[2] * max(step[1], 1)
    if not plain:
        # digits of one axis keep their order, outermost first; axes may be listed in any order
        rnd.shuffle(axes)
        digits = [digit for axis in axes for digit in digits if digit[0] == axis]
        digits = [digit for digit in digits if digit[1] != 1 or rnd.random() < 0.5]
    buffers = [
        [key[0], key[1], 0, layers.index(key[0]) * layer[2] + parts.index(key[1]) * part[2], pages] for key in keys
    ]
    rnd.shuffle(buffers)
    return {"modes": digits, "page_bytes": page[2], "buffers": buffers, "_span": span}


def factors(rnd: random.Random, count: int) -> list[int]:
    if count < 2 or rnd.random() < 0.5:
        return [count]
    outer = rnd.choice([divisor for divisor in range(1, count + 1) if count % divisor == 0])
    return [outer, count // outer]


def place(rnd: random.Random, worker: Json, base: str) -> Json:
    """Give every pool its region, one after the other from the base on; or all in one region."""
    total = sum(pool["_span"] for pool in worker["pools"])
    start = {"low": 0x1000, "device": 0xFFFF81AB54E01000, "2**63": 2**63 - total // 2, "2**64": 2**64 - total}[base]
    together = rnd.random() < 0.3
    if together and total:
        worker["regions"].append({"base": hex(start), "bytes": total, "memory": "device"})
    offset = 0
    for pool in worker["pools"]:
        span = pool.pop("_span")
        if not together:
            worker["regions"].append({"base": hex(start + offset), "bytes": span})
        for buffer in pool["buffers"]:
            buffer[2] = len(worker["regions"]) - 1
            buffer[3] += offset if together else 0
        offset += span
    return worker


def spoil(rnd: random.Random, source: Json, target: Json, request: Json) -> str:
    """Change one thing that may make the request impossible; returns what was changed."""
    side = rnd.choice(["source", "target"])
    name = rnd.choice(sorted(request[side]["tables"]))
    table = request[side]["tables"][name]
    what = rnd.choice(["null", "far", "short", "twice", "gone", "late", "layer", "worker", "alias"])
    pages = table["pages"]
    if what in ("null", "far", "twice") and pages:
        index = rnd.randrange(len(pages))
        pages[index] = {"null": None, "far": rnd.choice([7, 20, 2**40]), "twice": pages[0]}[what]
    elif what == "short" and pages:
        pages.pop()
    elif what == "gone":
        del request[side]["tables"][name]
    elif what == "late":
        table["start"] = table.get("start", 0) + 24  # a multiple of every block × size used here
    elif what == "alias":  # two pools in the same memory
        for worker in (source if side == "source" else target)["workers"]:
            for region in worker["regions"][1:]:
                first = int(worker["regions"][0]["base"], 16)
                region["base"] = hex(min(first, 2**64 - region["bytes"]))
    elif what == "layer":
        pools = [pool for worker in source["workers"] for pool in worker["pools"]]
        if pools:
            rnd.choice(pools)["buffers"].pop()
    elif len(source["workers"]) > 1:
        source["workers"].pop(rnd.randrange(len(source["workers"])))
        request["source"].pop("workers", None)
    return f"{side} {name} {what}"
