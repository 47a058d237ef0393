"""What `kvferry bench transfer` moves: pairs of synthetic instances, sized by bytes, and where their pages lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvferry.layout.document import Group, Instance, Pool, Worker
from kvferry.layout.presets import attention_group, latent, modes_of, pack, pp_layers, regions_from, tp_heads
from kvferry.layout.request import Request, Side, Table, Wanted
from kvferry.layout.validate import check_instance

SideName = Literal["source", "target"]
GROUP = "cache"
ITEM_BYTES = 2  # bfloat16
SPARE_PAGES = 4
"""At the end of every pool: nothing may be written there."""
WIRE_BYTES = 1 << 20
CURVE_RUN_BYTES = (128, 256, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


@dataclass(frozen=True)
class Shape:
    """How one instance is cut and laid out; rank = (stage · tp + tensor rank) · cp + context rank."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    layout: str = "nhd"
    page_tokens: int = 16

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(stage, tensor rank, context rank)."""
        return rank // self.cp // self.tp, rank // self.cp % self.tp, rank % self.cp


@dataclass(frozen=True)
class Scenario:
    """A pair of instances and the tokens of one request. `key` is its name on the command line.

    `heads` 0 is a latent of `dim`, which every tensor rank holds whole. Pages of a request lie in stretches of
    `stretch` pages, shuffled.
    """

    key: str
    title: str
    source: Shape
    target: Shape
    layers: int = 16
    heads: int = 8
    dim: int = 128
    stretch: int = 4
    tokens: int = 1

    @property
    def group(self) -> Group:
        if self.heads:
            return attention_group(self.layers, self.heads, self.dim, name=GROUP)
        return Group(GROUP, "token", "bfloat16", tuple(range(self.layers)), ("kv",), {"dim": self.dim})

    @property
    def token_bytes(self) -> int:
        """Bytes that one token brings to all target workers together."""
        if self.heads:
            return self.layers * 2 * self.heads * self.dim * ITEM_BYTES
        return self.layers * self.dim * ITEM_BYTES * self.target.tp

    @property
    def bytes(self) -> int:
        return self.tokens * self.token_bytes

    def sized(self, nbytes: int) -> Scenario:
        """As many tokens as come nearest to `nbytes`."""
        return replace(self, tokens=max(1, round(nbytes / self.token_bytes)))

    def shape(self, side: SideName) -> Shape:
        return self.source if side == "source" else self.target

    def heads_of(self, side: SideName, rank: int) -> range:
        """The heads that a worker holds; a latent counts as one."""
        shape = self.shape(side)
        ((start, stop),) = tp_heads(self.heads, shape.tp, shape.place(rank)[1]) if self.heads else ((0, 1),)
        return range(start, stop)

    def page_list(self, side: SideName) -> list[int]:
        """The pages of the request, in order, the same on every worker of a side."""
        count = self._pages_needed(side)
        stretch = min(self.stretch, count)
        order = apart(-(-count // stretch), 0.38 if side == "source" else 0.62)
        pages = order[:, None] * stretch + np.arange(stretch)
        listed: list[int] = pages.ravel()[:count].tolist()
        return listed

    def pool_pages(self, side: SideName) -> int:
        count = self._pages_needed(side)
        stretch = min(self.stretch, count)
        return -(-count // stretch) * stretch + SPARE_PAGES

    def _pages_needed(self, side: SideName) -> int:
        shape = self.shape(side)
        local_tokens = -(-self.tokens // shape.cp)
        return -(-local_tokens // shape.page_tokens)

    def instance(self, side: SideName, name: str, bases: Sequence[int]) -> Instance:
        """The instance whose worker i has its memory at `bases[i]`."""
        group, shape = self.group, self.shape(side)
        workers = tuple(self.worker(side, rank, bases[rank]) for rank in range(shape.world))
        return check_instance(Instance("kvferry-instance/1", name, f"bench-{self.key}", (group,), workers))

    def worker(self, side: SideName, rank: int, base: int) -> Worker:
        shape, group = self.shape(side), self.group
        stage, _, context = shape.place(rank)
        heads = self.heads_of(side, rank)
        owned: dict[str, tuple[int | tuple[int, ...], ...]] = {}
        if self.heads:
            modes, page_bytes = modes_of(shape.layout, shape.page_tokens, len(heads), self.dim, ITEM_BYTES)
            owned["head"] = ((heads.start, heads.stop),)
        else:
            modes, page_bytes = latent(shape.page_tokens, self.dim, ITEM_BYTES)
        if shape.cp > 1:
            owned["token"] = (context, shape.cp, 1)
        layers = pp_layers(group.layers, shape.pp, stage)
        packing = pack("separate", layers, group.parts, self.pool_pages(side), page_bytes)
        pool = Pool(GROUP, shape.page_tokens, packing.page_bytes, modes, packing.buffers, owned=owned)
        return Worker(rank, regions_from(base, packing.region_bytes), (pool,))

    def table(self, side: SideName) -> Side:
        return Side({GROUP: Table(tuple(self.page_list(side)))})

    def request(self) -> Request:
        wanted = {GROUP: Wanted((0, self.tokens))}
        return Request("kvferry-request/1", wanted, self.table("source"), self.table("target"))


WIRE = Scenario(
    "wire", "wire, 1 MiB", Shape(page_tokens=1), Shape(page_tokens=1), 1, 0, WIRE_BYTES // ITEM_BYTES, 1 << 40
)
"""The bytes in one piece on both sides: what every transfer is compared with."""
EQUAL = Scenario("equal", "equal TP", Shape(), Shape())
SPLIT = Scenario("split", "TP1→TP4 NHD", Shape(), Shape(tp=4))
OTHERS = (
    Scenario("hnd", "TP1→TP4 HND", Shape(layout="hnd"), Shape(tp=4, layout="hnd")),
    Scenario("mla", "MLA TP4→TP8", Shape(tp=4, page_tokens=64), Shape(tp=8, page_tokens=64), heads=0, dim=576),
    Scenario("pp", "PP2→PP1", Shape(pp=2), Shape()),
    Scenario("cp", "cyclic CP1→CP8", Shape(), Shape(cp=8)),
)
TABLE = (EQUAL, SPLIT, *OTHERS)
CURVE = "runs"
"""The name on the command line of the curve over run lengths."""
CASES = (WIRE.key, *(scenario.key for scenario in TABLE), CURVE)


def of_run_length(run_bytes: int) -> Scenario:
    """One worker on each side, NHD on both; pages of `run_bytes` bytes that nowhere lie one after the other, so each is
    a run."""
    dim = min(128, run_bytes // ITEM_BYTES)
    heads = min(8, run_bytes // ITEM_BYTES // dim)
    shape = Shape(page_tokens=run_bytes // ITEM_BYTES // dim // heads)
    return Scenario(CURVE, f"runs of {run_bytes} B", shape, shape, heads=heads, dim=dim, stretch=1)


def longest_run(nbytes: int) -> int:
    """Of the curve: every layer and part still has two of them."""
    return nbytes // (of_run_length(WIRE_BYTES).layers * 2 * 2)


def apart(count: int, share: float) -> npt.NDArray[np.int64]:
    """0 … count − 1 in an order in which no number follows its predecessor, about `share` · count from one to the
    next."""
    numbers = np.arange(count)
    if count < 5:
        return numbers[::-1]
    first = round(count * share)
    step = next(step for step in range(first, first + count) if gcd(step, count) == 1 and step % count != 1)
    return numbers * step % count
