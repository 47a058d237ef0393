"""Where each item of a chunk lies, found by sorting, and orders drawn at random."""

from __future__ import annotations

import itertools
import random
from typing import Any

from kvferry.plan.dense import Chunk
from kvferry.plan.order import Order
from kvferry.plan.route import Box

Item = tuple[int, ...]


def items_in_order(chunk: Chunk) -> list[Item]:
    """(layer, part, token, indices…) of each item of the chunk, by its place in the chunk. Layer and part count in the
    box, tokens and indices are global.
    """
    box, start, stop = chunk.box, *chunk.tokens
    tokens = [t for t in range(start, stop) if all(t // block % size == rank for rank, size, block in box.cycles)]
    indices = [[i for a, b in segments for i in range(a, b)] for segments in box.axes.values()]
    size = chunk.order.block_tokens

    def key(item: Item) -> Any:
        layer, part, token, *own = item
        places = [indices[axis].index(i) for axis, i in enumerate(own)]
        block, slot = divmod(token, size) if size else (0, token)
        coordinates = [layer, part, block, slot, *places]
        # a short first block, the whole ones, a short last one
        short = 1
        if size and token < -(-start // size) * size:
            short = 0
        elif size and token >= stop // size * size:
            short = 2
        return short, *(coordinates[axis] for axis in chunk.order.axes or range(len(coordinates)))

    return sorted(itertools.product(range(len(box.layers)), range(len(box.parts)), tokens, *indices), key=key)


def random_order(rnd: random.Random, box: Box) -> Order:
    axes = list(range(4 + len(box.axes)))
    rnd.shuffle(axes)
    cycles = any(size > 1 for _, size, _ in box.cycles)
    return Order(tuple(rnd.choice([[], axes])), 0 if cycles else rnd.choice([0, 1, 2, 3, 4, 6, 16]))
