"""In which order a chunk holds its cells.

The axes of a chunk are layer, part, block, token and the group's own: its tokens are cut into blocks of equally many
tokens of the sequence. A chunk that follows a page in which one head's tokens, or a token's key and value, lie side by
side takes that page in few long runs; in the canonical order it would be a run for each token, head and part.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.layout.document import Row
from kvferry.plan.route import Box

LAYER, PART, BLOCK, TOKEN, FIRST = range(5)
"""The axes by number; FIRST is the first of the group's own."""


class Order(Row, frozen=True):
    """`axes`: the chunk's axes by number, outermost first; none: in the order of their numbers. `block_tokens`: blocks
    begin at its multiples in the sequence, so a chunk's first and last may be shorter; 0: one block holds all of it.
    """

    axes: tuple[int, ...]
    block_tokens: int = 0


@dataclass(frozen=True)
class Section:
    """Neighbouring blocks of a chunk that have equally many tokens; `before`: the chunk's tokens before them."""

    tokens: tuple[int, int]
    block_tokens: int
    before: int


CANONICAL = Order(())
"""[layer][part][token][axes…], as a tensor of that shape."""


def order_problem(order: Order, box: Box) -> str:
    """Why this can't be the order of a chunk of `box`, or nothing."""
    if order.axes and sorted(order.axes) != list(range(FIRST + len(box.axes))):
        return f"its order {list(order.axes)} does not name each of the {FIRST + len(box.axes)} axes once"
    if order.block_tokens < 0:
        return f"its order has blocks of {order.block_tokens} tokens"
    if order.block_tokens and any(size > 1 for _, size, _ in box.cycles):
        return "its order has blocks of tokens, its box only some of the tokens"
    return ""


def sections(order: Order, tokens: tuple[int, int], count: int) -> list[Section]:
    """Cut a chunk of `tokens`, of which `count` pass its cycles, where its blocks change their size: at most three."""
    start, stop = tokens
    size = order.block_tokens
    if not count:
        return []
    if not size:
        return [Section(tokens, count, 0)]
    first = min(stop, -(-start // size) * size)
    last = max(first, stop // size * size)
    found = [(start, first, first - start), (first, last, size), (last, stop, stop - last)]
    return [Section((a, b), block_tokens, a - start) for a, b, block_tokens in found if b > a]
