"""Synthetic pools whose cells carry their own logical id. No code of the planner is used here: plain NumPy says
where a cell lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.layout.address import Address
from kvferry.layout.document import Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.request import Side, Table

PARTS = ("k", "v")
DIM = 4
HIGH_BASE = Address(0xFFFF_81AB_54E0_1000)
UNTOUCHED = 0xDEADBEEF


@dataclass(frozen=True)
class Shape:
    """One instance: `tp` × `pp` workers; heads are replicated where tp is larger."""

    tp: int = 1
    pp: int = 1
    heads: int = 4
    layers: int = 3
    page_tokens: int = 4
    order: str = "nhd"
    pages: int = 16
    base: Address | None = None
    model: str = "synthetic"

    @property
    def world(self) -> int:
        return self.tp * self.pp

    def rank_layers(self, rank: int) -> range:
        """Uneven where it doesn't divide: the last stage gets the rest."""
        stage, each = rank // self.tp, self.layers // self.pp
        return range(stage * each, self.layers if stage == self.pp - 1 else (stage + 1) * each)

    def rank_heads(self, rank: int) -> range:
        tp_rank = rank % self.tp
        if self.tp >= self.heads:
            head = tp_rank * self.heads // self.tp
            return range(head, head + 1)
        return range(tp_rank * self.heads // self.tp, (tp_rank + 1) * self.heads // self.tp)


def cell_ids(layer: int, part: int, tokens: npt.NDArray[Any], heads: range) -> npt.NDArray[np.uint32]:
    """[token, head, dim] ids, all different, none zero."""
    t, h, d = np.meshgrid(tokens, np.array(heads), np.arange(DIM), indexing="ij")
    return ((((layer * 2 + part) * 256 + t) * 64 + h) * DIM + d + 1).astype(np.uint32)


class WorkerPool:
    """One worker's memory. `cells[layer, part]` is a view [page, slot, head, dim] whatever the order in memory."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        self.heads, self.layers = shape.rank_heads(rank), shape.rank_layers(rank)
        h, t = len(self.heads), shape.page_tokens
        inner = (t, h) if shape.order == "nhd" else (h, t)
        self.memory = np.full((len(self.layers), 2, shape.pages, *inner, DIM), UNTOUCHED, np.uint32)
        self.cells = {
            (layer, part): self.memory[i, p] if shape.order == "nhd" else self.memory[i, p].swapaxes(1, 2)
            for i, layer in enumerate(self.layers)
            for p, part in enumerate(PARTS)
        }

    @property
    def bytes_view(self) -> npt.NDArray[np.uint8]:
        return self.memory.reshape(-1).view(np.uint8)

    def worker(self) -> Worker:
        h, t = len(self.heads), self.shape.page_tokens
        page = t * h * DIM * 4
        token, head = (h * DIM * 4, DIM * 4) if self.shape.order == "nhd" else (DIM * 4, t * DIM * 4)
        modes = (Mode("token", t, token), Mode("head", h, head), Mode("dim", DIM, 4))
        buffers = tuple(
            Buffer(layer, part, 0, (i * 2 + p) * self.shape.pages * page, self.shape.pages)
            for i, layer in enumerate(self.layers)
            for p, part in enumerate(PARTS)
        )
        base = self.shape.base or Address(self.memory.ctypes.data)
        owned = {"head": ((self.heads.start, self.heads.stop),)}
        pool = Pool("attn", t, page, modes, buffers, owned=owned)
        return Worker(self.rank, (Region(base, self.memory.nbytes),), (pool,))

    def fill(self, pages: list[int], start: int, tokens: tuple[int, int]) -> None:
        """Write the ids of `tokens` where the page table says."""
        self._each(pages, start, tokens, lambda view, ids: view.__setitem__(slice(None), ids))

    def expected(self, pages: list[int], start: int, tokens: tuple[int, int]) -> npt.NDArray[np.uint32]:
        """The whole memory as it must look after these tokens have arrived in an untouched pool."""
        twin = WorkerPool(self.shape, self.rank)
        twin.fill(pages, start, tokens)
        return twin.memory

    def _each(self, pages: list[int], start: int, tokens: tuple[int, int], act: Any) -> None:
        for token in range(*tokens):
            page, slot = pages[(token - start) // self.shape.page_tokens], (token - start) % self.shape.page_tokens
            for layer in self.layers:
                for p, part in enumerate(PARTS):
                    act(self.cells[layer, part][page, slot], cell_ids(layer, p, np.array([token]), self.heads)[0])


def groups(shape: Shape) -> tuple[Group, ...]:
    axes = {"head": shape.heads, "dim": DIM}
    return (Group("attn", "token", "float32", tuple(range(shape.layers)), PARTS, axes),)


def instance(name: str, shape: Shape, workers: tuple[Worker, ...]) -> Instance:
    return Instance("kvferry-instance/1", name, shape.model, groups(shape), workers)


def table(pages: list[int], start: int = 0) -> Side:
    return Side({"attn": Table(tuple(pages), start)})


def page_list(shape: Shape, tokens: tuple[int, int], start: int, seed: int) -> list[int]:
    """Enough pages in a shuffled order."""
    count = -(-(tokens[1] - start) // shape.page_tokens)
    return np.random.default_rng(seed).permutation(shape.pages)[:count].tolist()
