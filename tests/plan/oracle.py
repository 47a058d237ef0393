"""The planner's judge: slow, obviously right, written from the formats' description alone; shares no code with kvferry.

It reads the plain JSON objects of instances and requests. A worker's memory is a dict from address to tag, and the tag
is the logical byte that belongs there: (group, layer, part, token, axis indices, byte of the item).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Tag = tuple[str, int, str, int, tuple[int, ...], int]
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


class Refused(Exception):
    """This request can't be served."""


def group_of(instance: Json, name: str) -> Json:
    return next(group for group in instance["groups"] if group["name"] == name)


def table_of(side: Json, rank: int, name: str) -> Json:
    tables = dict(side.get("tables", {}))
    tables.update(side.get("workers", {}).get(str(rank), {}).get("tables", {}))
    if name not in tables:
        raise Refused(f"rank {rank} has no table {name}")
    table: Json = tables[name]
    return table


def owned_indices(pool: Json, group: Json, axis: str) -> list[int]:
    """Global indices on an axis in local order."""
    segments = pool.get("owned", {}).get(axis, [[0, group["axes"][axis]]])
    return [index for start, stop in segments for index in range(start, stop)]


def offset_in_page(pool: Json, axis: str, local: int) -> int:
    """Mixed-radix digits of the local index, outermost mode first, times their strides."""
    total = 0
    for name, extent, stride in reversed(pool["modes"]):
        if name == axis:
            total += local % extent * stride
            local //= extent
    assert local == 0
    return total


def token_place(
    pool: Json, group: Json, buffer: list[Any], side: Json, rank: int, token: int
) -> tuple[int, int] | None:
    """(page, slot in it) of a token on a worker; None where the worker doesn't own it, Refused where it has no page."""
    cycle_rank, size, block = pool.get("owned", {}).get("token", [0, 1, 1])
    if (token // block) % size != cycle_rank:
        return None
    table = table_of(side, rank, pool.get("table") or pool["group"])
    slot = token // (block * size) * block + token % block - table.get("start", 0) // size
    index = slot // pool["page_tokens"]
    if slot < 0 or index >= len(table["pages"]):
        raise Refused(f"token {token} is not in the table of rank {rank}")
    page = table["pages"][index]
    if page is None or page >= buffer[4]:
        raise Refused(f"token {token} of rank {rank} falls on page {page}")
    return page, slot % pool["page_tokens"]


def tagged(
    instance: Json, worker: Json, side: Json, name: str, tokens: range
) -> Iterator[tuple[int | Refused, list[Tag]]]:
    """Every (address, tags of the item there) that a worker holds of these tokens; Refused for an address it lacks."""
    group = group_of(instance, name)
    item = ITEM_BYTES[group["dtype"]]
    for pool in worker["pools"]:
        if pool["group"] != name:
            continue
        axes = list(group["axes"])
        owned = [owned_indices(pool, group, axis) for axis in axes]
        for buffer in pool["buffers"]:
            layer, part, region, offset, _ = buffer
            start = int(worker["regions"][region]["base"], 16) + offset
            for token in tokens:
                place: tuple[int, int] | Refused | None
                try:
                    place = token_place(pool, group, buffer, side, worker["rank"], token)
                except Refused as problem:
                    place = problem
                if place is None:
                    continue
                for local in itertools.product(*(range(len(indices)) for indices in owned)):
                    indices = tuple(held[position] for held, position in zip(owned, local, strict=True))
                    tags = [(name, layer, part, token, indices, byte) for byte in range(item)]
                    if isinstance(place, Refused):
                        yield place, tags
                        continue
                    page, slot = place
                    address = start + page * pool["page_bytes"] + offset_in_page(pool, "token", slot)
                    for axis, position in zip(axes, local, strict=True):
                        address += offset_in_page(pool, axis, position)
                    yield address, tags


def wanted_tokens(request: Json) -> dict[str, range]:
    return {
        name: range(*wanted["tokens"]) if "tokens" in wanted else range(1) for name, wanted in request["groups"].items()
    }


def target_memory(target: Json, request: Json) -> dict[int, dict[int, Tag]]:
    """What each target rank must hold afterwards: rank → address → tag. Refused: a byte without a place, two in one."""
    memory: dict[int, dict[int, Tag]] = {}
    for worker in target["workers"]:
        mine = memory.setdefault(worker["rank"], {})
        for name, tokens in wanted_tokens(request).items():
            for address, tags in tagged(target, worker, request["target"], name, tokens):
                if isinstance(address, Refused):
                    raise address
                for byte, tag in enumerate(tags):
                    if address + byte in mine:
                        raise Refused(f"address {address + byte:#x} of rank {worker['rank']} is wanted twice")
                    mine[address + byte] = tag
    return memory


def source_memory(source: Json, request: Json) -> tuple[dict[int, dict[int, set[Tag]]], set[Tag], set[Tag]]:
    """(rank → address → tags there, all tags that some rank can send, tags that some owner has no page for)."""
    memory: dict[int, dict[int, set[Tag]]] = {}
    there: set[Tag] = set()
    lacking: set[Tag] = set()
    for worker in source["workers"]:
        mine = memory.setdefault(worker["rank"], {})
        for name, tokens in wanted_tokens(request).items():
            for address, tags in tagged(source, worker, request["source"], name, tokens):
                if isinstance(address, Refused):
                    lacking.update(tags)
                    continue
                there.update(tags)
                for byte, tag in enumerate(tags):
                    mine.setdefault(address + byte, set()).add(tag)
    return memory, there, lacking


@dataclass(frozen=True)
class Truth:
    """What a request should do: `"yes"`: must be planned; `"no"`: must be refused; `"either"`: an owner lacks a page
    that another owner has. Then the target's memory afterwards and the source's now.
    """

    verdict: str
    wanted: dict[int, dict[int, Tag]]
    memory: dict[int, dict[int, set[Tag]]]


def truth(source: Json, target: Json, request: Json) -> Truth:
    memory, there, lacking = source_memory(source, request)
    try:
        wanted = target_memory(target, request)
    except Refused:
        return Truth("no", {}, memory)
    tags = {tag for mine in wanted.values() for tag in mine.values()}
    if not tags <= there:
        return Truth("no", wanted, memory)
    return Truth("either" if tags & lacking else "yes", wanted, memory)


def may_be_refused_early(source: Json, target: Json, request: Json) -> bool:
    """Whether something is wrong that this request happens not to touch.

    Such as a layer that nobody sends, or a page table left out, where the range is empty: refusing is right as well.
    """
    cells: list[set[Tag]] = []
    for instance in (source, target):
        mine: set[Tag] = set()
        for worker in instance["workers"]:
            for pool in worker["pools"]:
                table = pool.get("table") or pool["group"]
                name = pool["group"]
                if name not in request["groups"]:
                    continue
                pages = {table: {"pages": [0] * 48}}
                tokens = range(48 if group_of(instance, name)["growth"] == "token" else 1)
                for _, tags in tagged(instance, {**worker, "pools": [pool]}, {"tables": pages}, name, tokens):
                    mine.update(tags)
                try:
                    table_of(request["source" if instance is source else "target"], worker["rank"], table)
                except Refused:
                    return True
        cells.append(mine)
    return not cells[1] <= cells[0]


def replay(expected: Truth, plan: Json) -> int:
    """Carry out a plan byte by byte and compare it with what was wanted; returns the number of bytes."""
    wanted, memory = expected.wanted, expected.memory
    written: dict[int, dict[int, Tag]] = {rank: {} for rank in wanted}
    copies = 0
    for transfer in plan["transfers"]:
        theirs, mine, goal = memory[transfer["source"]], written[transfer["target"]], wanted[transfer["target"]]
        runs = zip(transfer["source_addresses"], transfer["target_addresses"], transfer["bytes"], strict=True)
        for source_address, target_address, count in runs:
            assert count > 0
            copies += 1
            for byte in range(count):
                read, write = int(source_address, 16) + byte, int(target_address, 16) + byte
                assert write in goal, f"rank {transfer['target']}: {write:#x} is written but not wanted"
                assert write not in mine, f"rank {transfer['target']}: {write:#x} is written twice"
                tag = goal[write]
                tags = theirs.get(read, set())
                assert tag in tags, f"{write:#x} should get {tag}, but {read:#x} of rank {transfer['source']} is {tags}"
                mine[write] = tag
    for rank, goal in wanted.items():
        missing = goal.keys() - written[rank].keys()
        assert not missing, f"rank {rank}: {len(missing)} wanted bytes are never written, such as {goal[min(missing)]}"
    total = sum(map(len, wanted.values()))
    proof = plan["proof"]
    assert proof == {"bytes": total, "copies": copies, "in_bounds": True, "exactly_once": True, "complete": True}, proof
    return total
