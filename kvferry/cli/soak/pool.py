"""The memory of one worker of the soak, and what every byte of it has to be.

Each request has contents of its own, so pages that were given to another request in the meantime can't look right.
Plain NumPy says where a cell lies; no code of the planner is used for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.layout.document import Instance
from kvferry.layout.presets import tp_heads, uniform_instance
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import host_address

LAYERS, HEADS, DIM = 2, 6, 8
GROUP = "attn"
UNTOUCHED = 0xA5
GUARD_BYTES = 4096
Cells = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Shape:
    """How one instance of the soak is cut and laid out."""

    tp: int
    page_tokens: int
    layout: str
    pages: int

    def instance(self, name: str, base: int = 0x10000) -> Instance:
        return uniform_instance(
            name,
            LAYERS,
            HEADS,
            DIM,
            self.tp,
            page_tokens=self.page_tokens,
            layout=self.layout,
            dtype="float32",
            pages=self.pages,
            bases=base,
            packing="one_tensor",
            group=GROUP,
        )


class WorkerPool:
    """`bytes` is the memory, with guards before and after it; `expected` is a second one, never seen by an endpoint."""

    def __init__(self, shape: Shape, rank: int) -> None:
        ((start, stop),) = tp_heads(HEADS, shape.tp, rank)
        self._page_tokens = shape.page_tokens
        self._heads = range(start, stop)
        tokens_heads = (shape.page_tokens, stop - start)
        self._nhd = shape.layout == "nhd"
        self._inner = tokens_heads if self._nhd else tokens_heads[::-1]
        nbytes = LAYERS * 2 * shape.pages * shape.page_tokens * (stop - start) * DIM * 4
        self._file, self._expected = (np.full(nbytes + 2 * GUARD_BYTES, UNTOUCHED, np.uint8) for _ in range(2))
        self.bytes: Bytes = self._file[GUARD_BYTES:-GUARD_BYTES]
        self.address = host_address(self.bytes).value

    def fill(self, seed: int, pages: Sequence[int], start: int, tokens: tuple[int, int]) -> None:
        """Write the contents of a request into its pages; `start` is the first token of the first page."""
        self._write(self._file, seed, pages, start, tokens)
        self.expect(seed, pages, start, tokens)

    def expect(self, seed: int, pages: Sequence[int], start: int, tokens: tuple[int, int]) -> None:
        """A transfer has brought these contents."""
        self._write(self._expected, seed, pages, start, tokens)

    def wrong_bytes_of(self, seed: int, pages: Sequence[int], start: int, tokens: tuple[int, int]) -> int:
        """Bytes in the pages of one request that aren't its contents."""
        found = self._cells(self._file)[self._where(pages, start, tokens)]
        return int(np.count_nonzero(found.view(np.uint8) != contents(seed, tokens, self._heads).view(np.uint8)))

    def wrong_bytes(self) -> int:
        """Bytes of all this memory that aren't as they must be. Only while nothing moves."""
        return int(np.count_nonzero(self._file != self._expected))

    def _write(self, memory: Bytes, seed: int, pages: Sequence[int], start: int, tokens: tuple[int, int]) -> None:
        self._cells(memory)[self._where(pages, start, tokens)] = contents(seed, tokens, self._heads)

    def _cells(self, memory: Bytes) -> Cells:
        """[layer, part, page, slot, head, dim], a view."""
        cells = memory[GUARD_BYTES:-GUARD_BYTES].view(np.uint32).reshape(LAYERS, 2, -1, *self._inner, DIM)
        return cells if self._nhd else cells.swapaxes(3, 4)

    def _where(self, pages: Sequence[int], start: int, tokens: tuple[int, int]) -> tuple[Any, ...]:
        offsets = np.arange(*tokens) - start
        table = np.asarray(pages, np.int64)
        return slice(None), slice(None), table[offsets // self._page_tokens], offsets % self._page_tokens


def contents(seed: int, tokens: tuple[int, int], heads: range) -> Cells:
    """[layer, part, token, head, dim]: what a request holds there, by mixing its seed with the cell's place."""
    axes = (np.arange(LAYERS), np.arange(2), np.arange(*tokens), np.array(heads), np.arange(DIM))
    number = np.zeros((1,) * len(axes), np.uint64)
    for index, (axis, extent) in enumerate(zip(axes, (LAYERS, 2, 1 << 20, HEADS, DIM))):
        shape = [1] * len(axes)
        shape[index] = len(axis)
        number = number * np.uint64(extent) + axis.astype(np.uint64).reshape(shape)
    mixed = (number + np.uint64(seed % (1 << 30) << 32)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(32)).astype(np.uint32)
