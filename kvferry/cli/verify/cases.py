"""What is moved: every group by itself through several page tables, then all together. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.layout.document import Group, Instance, Struct
from kvferry.layout.request import Side, Table, Wanted
from kvferry.plan.route import shared_groups

PAGES = 3
"""Whole pages, of the larger ones, that a case spans; and a part of another one."""
POSITION = 7


class Case(Struct, frozen=True):
    """One transfer. `groups`: what it is about; groups that are named with an empty range, or whose state only comes
    along, are in `wanted` alone.
    """

    name: str
    groups: tuple[str, ...]
    wanted: dict[str, Wanted]
    source: Side
    target: Side
    seed: int


@dataclass(frozen=True)
class Room:
    """What one page table of an instance may use. `unit`: tokens after which cyclic context parallelism repeats, of
    which each worker keeps one in `size`.
    """

    page_tokens: int
    pages: tuple[int, ...]
    unit: int = 1
    size: int = 1

    @property
    def tokens(self) -> int:
        return len(self.pages) * self.page_tokens // (self.unit // self.size) * self.unit

    @property
    def step(self) -> int:
        """Tokens from the start of one page to that of another, on every worker."""
        return math.lcm(self.unit, self.page_tokens * self.size)

    def needed(self, start: int, stop: int) -> int:
        """Pages for tokens [start, stop), where a page begins with `start`."""
        local = -(-(stop - start) // self.unit) * (self.unit // self.size)
        return -(-local // self.page_tokens)


@dataclass(frozen=True)
class Kind:
    """Orders of pages at the source and at the target; which tokens: all, those after a prefix, in a window, or one."""

    name: str
    source: str
    target: str
    tokens: str = "all"


KINDS = (
    Kind("pages in order", "in order", "in order"),
    Kind("pages at random", "random", "random"),
    Kind("pages reversed, far apart", "reversed", "far apart"),
    Kind("after a prefix hit", "random", "random", "prefix"),
    Kind("a window", "far apart", "reversed", "window"),
    Kind("one token", "random", "random", "one"),
)


def make_cases(source: Instance, target: Instance, seed: int = 1) -> list[Case]:
    """Each group in each way, then every group at once."""
    groups = shared_groups(source, target)
    tokens = [group for group in groups if group.growth == "token"]
    plans: list[tuple[Kind, tuple[str, ...]]] = [(kind, (group.name,)) for group in tokens for kind in KINDS]
    states = tuple(group.name for group in groups if group.growth == "state")
    if states:
        plans += [(kind, states) for kind in KINDS[:3]]
    everything = tuple(group.name for group in groups)
    plans += [(kind, everything) for kind in KINDS[1:3]]
    maker = _Maker(source, target, groups)
    return [maker.case(kind, names, seed + number) for number, (kind, names) in enumerate(plans)]


def bulk_case(source: Instance, target: Instance, nbytes: int) -> Case:
    """All groups at once, as many tokens as come to `nbytes` at most, or as there is room for; for measuring."""
    groups = shared_groups(source, target)
    maker = _Maker(source, target, groups)
    each = sum(_token_bytes(group) for group in groups if group.growth == "token")
    return maker.case(KINDS[1], tuple(group.name for group in groups), 1, max(1, nbytes // max(1, each)))


class _Maker:
    def __init__(self, source: Instance, target: Instance, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._sides = {"source": source, "target": target}
        self._rooms = {side: rooms(instance) for side, instance in self._sides.items()}
        self._names = {
            side: {group.name: _table_names(instance, group.name) for group in groups}
            for side, instance in self._sides.items()
        }

    def case(self, kind: Kind, names: tuple[str, ...], seed: int, most: int = 0) -> Case:
        """`most`: tokens at most; 0: a few pages."""
        wanted = {group.name: self._wanted(group, kind, names, most) for group in self._groups}
        source = self._side("source", wanted, kind, seed)
        target = self._side("target", wanted, kind, seed + 1)
        return Case(kind.name, names, wanted, source, target, seed)

    def _wanted(self, group: Group, kind: Kind, names: tuple[str, ...], most: int) -> Wanted:
        if group.growth == "state":
            return Wanted(position=POSITION)
        if group.name not in names:
            return Wanted((0, 0))
        all_rooms = [self._rooms[side][name] for side in self._names for name in self._names[side][group.name]]
        page = max(room.step for room in all_rooms)
        room_for = min(room.tokens for room in all_rooms)
        stop = max(1, min(room_for, most or PAGES * page + page // 2 + 1))
        # a prefix ends, and a window begins, in the middle of a page of either side
        starts = {"all": 0, "prefix": min(page + page // 3 + 1, stop - 1), "one": stop // 2}
        start = starts.get(kind.tokens, min(2 * page - 1, stop - 1))
        return Wanted((start, start + 1 if kind.tokens == "one" else stop))

    def _side(self, side: str, wanted: Mapping[str, Wanted], kind: Kind, seed: int) -> Side:
        spans: dict[str, tuple[int, int]] = {}
        for name, want in wanted.items():
            start, stop = want.token_range
            for table in self._names[side][name] if start < stop else ():
                low, high = spans.get(table, (start, stop))
                spans[table] = min(start, low), max(stop, high)
        order = kind.source if side == "source" else kind.target
        draw = np.random.default_rng(seed)
        # a source that has the whole prompt, or in a window only its pages; a target whose table begins where it must
        whole = side == "source" and kind.tokens != "window"
        holes = side == "source" and kind.tokens == "window"
        return Side({
            name: _table(self._rooms[side][name], (0 if whole else start, stop), order, draw, holes)
            for name, (start, stop) in spans.items()
        })  # fmt: skip


def rooms(instance: Instance) -> dict[str, Room]:
    """What each page table may use: no page is in two of them, since pools may share memory."""
    found: dict[str, tuple[int, int, int, int]] = {}
    for worker in instance.workers:
        for pool in worker.pools:
            _, size, block = pool.cycle
            pages = min(buffer.pages for buffer in pool.buffers)
            old = found.get(pool.table_name, (pool.page_tokens, pages, size * block, size))
            found[pool.table_name] = (
                min(old[0], pool.page_tokens), min(old[1], pages), math.lcm(old[2], size * block), max(old[3], size)
            )  # fmt: skip
    count = len(found)
    return {
        name: Room(page_tokens, tuple(range(pages)[index::count]) or tuple(range(pages)), unit, size)
        for index, (name, (page_tokens, pages, unit, size)) in enumerate(sorted(found.items()))
    }


def _table(room: Room, tokens: tuple[int, int], order: str, draw: np.random.Generator, holes: bool) -> Table:
    """`holes`: the pages before the first token are there in the table and don't exist."""
    start = tokens[0] // room.step * room.step
    pages = _ordered(room.pages, room.needed(start, tokens[1]), order, draw)
    if holes:
        return Table((*[None] * room.needed(0, start), *pages))
    return Table(tuple(pages), start)


def _ordered(pages: Sequence[int], count: int, order: str, draw: np.random.Generator) -> list[int]:
    if order == "in order":
        return list(pages[:count])
    if order == "reversed":
        return list(pages[:count])[::-1]
    if order == "random":
        return [pages[index] for index in draw.permutation(len(pages))[:count].tolist()]
    spread = [pages[index] for index in np.linspace(0, len(pages) - 1, count).round().astype(int).tolist()]
    return [spread[index // 2 if index % 2 == 0 else count - 1 - index // 2] for index in range(count)]


def _table_names(instance: Instance, group: str) -> tuple[str, ...]:
    """A group's layers may be in several."""
    pools = (pool for worker in instance.workers for pool in worker.pools)
    return tuple(dict.fromkeys(pool.table_name for pool in pools if pool.group == group))


def _token_bytes(group: Group) -> int:
    return len(group.layers) * len(group.parts) * math.prod(group.axes.values()) * group.item_bytes
