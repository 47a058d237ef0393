"""Which order a chunk should have: that of the pages it comes from, of those it goes to, or the canonical one.

Every run costs the same again, whatever it moves, so the best order is the one that leaves the fewest runs on both
sides together. It is chosen once for a pair of workers, from their layouts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from kvferry.layout.document import TOKEN as TOKEN_AXIS
from kvferry.layout.document import Group, Pool, Worker
from kvferry.plan.bind import grow
from kvferry.plan.dense import Chunk, programs
from kvferry.plan.order import BLOCK, CANONICAL, FIRST, LAYER, PART, TOKEN, Order, Section, order_problem
from kvferry.plan.program import Program, pool_places
from kvferry.plan.route import Box

OUTSIDE = 1 << 64
"""As a stride: larger than any in a page."""
LONG_TOKENS = 1 << 20
"""Of a chunk that is longer than any page."""


def best_order(group: Group, box: Box, source: Worker, target: Worker) -> Order:
    """The order of the chunks that take `box` from `source` to `target`; the canonical one unless another is better.

    PlanError where one of them doesn't hold the box.
    """
    if group.growth == "state":
        return CANONICAL
    orders = [CANONICAL, *_page_orders(group, box, source), *_page_orders(group, box, target)]
    possible = [order for order in dict.fromkeys(orders) if not order_problem(order, box)]
    if len(possible) == 1:
        return CANONICAL
    return min(possible, key=lambda order: sum(_runs_per_token(w, group, box, order) for w in (source, target)))


def _page_orders(group: Group, box: Box, worker: Worker) -> Iterator[Order]:
    """How the pages of each of the worker's pools hold the box, as far as an order can say it."""
    for place, _ in pool_places(worker, group, box):
        order = _page_order(place.pool, box)
        if order is not None:
            yield order


def _page_order(pool: Pool, box: Box) -> Order | None:
    """None where an axis is split in a page, as in the packed keys [head][dim / 8][token][8]."""
    strides = {LAYER: OUTSIDE, PART: OUTSIDE, BLOCK: OUTSIDE}
    numbers = {TOKEN_AXIS: TOKEN, **{axis: FIRST + i for i, axis in enumerate(box.axes)}}
    for axis, number in numbers.items():
        modes = [mode for mode in pool.modes if mode.axis == axis and mode.extent > 1]
        if len(modes) > 1:
            return None
        strides[number] = modes[0].stride_bytes if modes else OUTSIDE
    at = {(b.layer, b.part): (b.region, b.offset_bytes) for b in pool.buffers}
    first, other = box.layers[0], box.layers[-1]
    one, two = box.parts[0], box.parts[-1]
    strides[PART] = _step(at.get((first, one)), at.get((first, two)), len(box.parts), pool.page_bytes)
    strides[LAYER] = _step(at.get((first, one)), at.get((other, one)), len(box.layers), pool.page_bytes)
    axes = tuple(sorted(strides, key=lambda number: (-strides[number], number)))
    together = axes.index(TOKEN) == axes.index(BLOCK) + 1
    return Order(axes, 0 if together else pool.page_tokens)


def _step(one: tuple[int, int] | None, two: tuple[int, int] | None, count: int, page_bytes: int) -> int:
    """Bytes between neighbours, of which `one` and `two` are the first and the last, if they lie in one page."""
    if one is None or two is None or count == 1 or one[0] != two[0]:
        return OUTSIDE
    step = abs(two[1] - one[1]) // (count - 1)
    return step if 0 < step and abs(two[1] - one[1]) < page_bytes else OUTSIDE


def _runs_per_token(worker: Worker, group: Group, box: Box, order: Order) -> float:
    """In the middle of a long chunk, where no two pages are neighbours."""
    block_tokens = order.block_tokens or LONG_TOKENS
    section = Section((0, block_tokens), block_tokens, 0)
    found = programs(worker, group, Chunk(box, section.tokens, order), section)
    return sum(_runs(program, order.block_tokens) for program in found)


def _runs(program: Program, block_tokens: int) -> float:
    """Of one token in all pieces of a program."""
    source, target = program.source.tokens, program.target.tokens
    tokens = gcd(source.unit, block_tokens)
    count = 0
    for piece in program.pieces:
        _, outer = grow((*piece.folds, (tokens, source.stride, target.stride)))
        count += len(piece.source_starts) * len(piece.source_bases) * prod(extent for extent, _, _ in outer)
    return count / tokens
