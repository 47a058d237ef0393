"""Where the cells of a pool lie and what is in them: by the words of docs/reference/formats.md, in plain NumPy.

No code of the planner is used here, so that what it does wrong can't be done wrong here in the same way.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.errors import PlanError
from kvferry.layout.document import TOKEN, Group, Pool
from kvferry.layout.request import Table

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Cells:
    """The cells of some tokens in one pool. `tokens`: those that the worker owns; `indices`: per axis of the group the
    owned global indices; `offsets` [token, *axes]: bytes from page 0 of a buffer to each item.
    """

    tokens: Ints
    indices: tuple[Ints, ...]
    offsets: Ints


def cells_of(pool: Pool, group: Group, table: Table, tokens: tuple[int, int]) -> Cells:
    """PlanError where a token that the worker owns has no page."""
    rank, size, block = pool.cycle
    every = np.arange(*tokens, dtype=np.int64)
    mine = every[every // block % size == rank]
    local = mine // (block * size) * block + mine % block - table.start // size
    pages = np.array([-1 if page is None else page for page in table.pages], np.int64)
    rows = local // pool.page_tokens
    if len(local) and (local[0] < 0 or rows[-1] >= len(pages) or (pages[rows] < 0).any()):
        raise PlanError(f"group {group.name}: tokens [{tokens[0]}, {tokens[1]}) are not all in the table's pages")
    at_tokens = pages[rows] * pool.page_bytes + digits(pool, TOKEN, local % pool.page_tokens)
    return _spread(pool, group, mine, at_tokens)


def slots_of(pool: Pool, group: Group, pages: Sequence[int]) -> Ints:
    """As `Cells.offsets`, for every slot of these pages, whoever owns it."""
    slots = digits(pool, TOKEN, np.arange(pool.page_tokens))
    starts = np.array(pages, np.int64) * pool.page_bytes
    return _spread(pool, group, np.zeros(0, np.int64), (starts[:, None] + slots).ravel()).offsets


def digits(pool: Pool, axis: str, local: Ints) -> Ints:
    """Bytes that local indices of an axis add: their mixed-radix digits over its modes, outermost first, times the
    strides.
    """
    total = np.zeros(local.shape, np.int64)
    for mode in reversed([mode for mode in pool.modes if mode.axis == axis]):
        total += local % mode.extent * mode.stride_bytes
        local = local // mode.extent
    return total


def pattern(group: Group, layer: int, part: str, cells: Cells, seed: int) -> Values:
    """[token, *axes, byte of the item]: what belongs into each cell; no byte is zero, and neighbours differ."""
    mixed = cells.tokens.astype(np.uint64).reshape(-1, *[1] * len(cells.indices))
    for position, indices in enumerate(cells.indices):
        shape = [1] * (len(cells.indices) + 1)
        shape[position + 1] = -1
        mixed = mixed * np.uint64(1 + group.axes[list(group.axes)[position]]) + indices.astype(np.uint64).reshape(shape)
    return values_of(mixed, zlib.crc32(f"{seed}/{group.name}/{layer}/{part}".encode()), group.item_bytes)


def values_of(numbers: Words, key: int, item_bytes: int) -> Values:
    """The first bytes of a hash of each number and `key`: SplitMix64's finaliser, whose products wrap on purpose."""
    mixed = numbers ^ np.uint64(key * 0x9E37_79B9 + 1)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    raw = mixed[..., None].view(np.uint8)[..., :item_bytes]
    return (raw % 255 + 1).astype(np.uint8)


def _spread(pool: Pool, group: Group, tokens: Ints, at_tokens: Ints) -> Cells:
    indices, offsets = [], at_tokens
    for axis, extent in group.axes.items():
        owned = [np.arange(start, stop, dtype=np.int64) for start, stop in pool.segments(axis, extent)]
        indices.append(np.concatenate(owned) if owned else np.zeros(0, np.int64))
        offsets = offsets[..., None] + digits(pool, axis, np.arange(len(indices[-1])))
    return Cells(tokens, tuple(indices), offsets)
