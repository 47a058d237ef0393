"""Where engines keep what a model caches: from `models` to whole instance documents.

For planning and dry runs. An adapter inside an engine reads the real tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Union

from kvferry.errors import DocumentError
from kvferry.layout.address import Address
from kvferry.layout.document import TOKEN, Buffer, Instance, Mode, Pool, Region, Worker
from kvferry.layout.models import Cached, Slab, SlabKind
from kvferry.layout.presets import packed, pp_layers, tp_heads
from kvferry.layout.validate import check_instance

PART = "part"
ALIGN_BYTES = 64
"""Each region starts at a multiple of this from the worker's base."""

Orders = Mapping[tuple[str, ...], tuple[str, ...]]
"""Axes of a group → the order of everything in its page, outermost first."""


def vllm_stages(layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage: what is left over goes to the stages before the last one, from the back.

    As vLLM 0.32 does in get_pp_indices (vllm/distributed/utils.py).
    """
    counts = [layers // pp] * pp
    for step in range(layers % pp):
        counts[-2 - step] += 1
    return counts


def sglang_stages(layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage: what is left over goes to the last stages.

    As SGLang 0.5 does in get_pp_indices (sglang/srt/distributed/utils.py).
    """
    return [layers // pp + (stage >= pp - layers % pp) for stage in range(pp)]


def plain_stages(layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage, as even as the sizes allow."""
    return [len(pp_layers(range(layers), pp, stage)) for stage in range(pp)]


@dataclass(frozen=True)
class Engine:
    """How an engine lays out its memory. `together`: slabs whose groups and parts share a page; others are apart."""

    name: str
    stages: Callable[[int, int], list[int]]
    together: frozenset[SlabKind]
    orders: Mapping[str, Orders]
    uneven: bool = False  # whether heads may be cut over ranks that don't divide them


_NHD: Orders = {
    ("head", "dim"): (TOKEN, "head", PART, "dim"),
    ("dim",): (TOKEN, PART, "dim"),
    ("block",): (TOKEN, PART, "block"),
    ("channel", "width"): (PART, "channel", "width"),
    ("head", "value", "key"): (PART, "head", "value", "key"),
}
_HND: Orders = {**_NHD, ("head", "dim"): ("head", TOKEN, PART, "dim")}

ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            vllm_stages,
            frozenset({"kv", "index", "state"}),
            # VLLM_SSM_CONV_STATE_LAYOUT is SD by default, and DS where KV is HND for P/D
            {"nhd": {**_NHD, ("channel", "width"): (PART, "width", "channel")}, "hnd": _HND},
        ),
        Engine("sglang", sglang_stages, frozenset({"index"}), {"nhd": _NHD, "hnd": _HND}),
        Engine("plain", plain_stages, frozenset(), {"nhd": _NHD, "hnd": _HND}, uneven=True),
    )
}
LAYOUTS = ("nhd", "hnd")


@dataclass(frozen=True)
class Shape:
    """How an instance is cut and how much each of its workers keeps.

    There are pp × cp × tp workers, rank = (stage × cp + context rank) × tp + tensor rank. Each has an address space of
    its own, so the regions of all start at the one `base`. `pages` (of token groups) and `rows` (of states) count those
    that an engine keeps for itself too.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_block: int = 1
    page_tokens: int = 16
    pages: int = 64
    rows: int = 64
    layout: str = "nhd"
    base: Address = field(default_factory=lambda: Address(0x10000))


def place(slabs: Sequence[Slab], engine: Engine, shape: Shape, *, instance: str, model: str) -> Instance:
    """The instance that keeps `slabs` as `engine` does, checked. DocumentError where the engine can't cut them so."""
    for name in ("tp", "pp", "cp", "cp_block", "page_tokens", "pages", "rows"):
        if getattr(shape, name) < 1:
            raise DocumentError(name, f"must be ≥ 1, got {getattr(shape, name)}")
    for cached in (cached for slab in slabs for cached in slab.groups):
        _check_cut(cached, engine, shape.tp)
    groups = tuple(cached.group for slab in slabs for cached in slab.groups)
    layers = 1 + max(max(group.layers) for group in groups)
    if shape.pp > layers:
        raise DocumentError("pp", f"must be ≤ {layers}, the number of layers, got {shape.pp}")
    counts = engine.stages(layers, shape.pp)
    workers: list[Worker] = []
    for stage, stop in enumerate(accumulate(counts)):
        for context_rank in range(shape.cp):
            for tensor_rank in range(shape.tp):
                memory = _Memory(shape.base)
                part = _Part(range(stop - counts[stage], stop), context_rank, tensor_rank)
                pools = tuple(pool for slab in slabs for pool in _pools(slab, engine, shape, part, memory))
                workers.append(Worker(len(workers), tuple(memory.regions), pools))
    return check_instance(Instance("kvferry-instance/1", instance, model, groups, tuple(workers)))


def _check_cut(cached: Cached, engine: Engine, tp: int) -> None:
    for axis, sections in cached.sections.items():
        for units, _ in sections:
            if not (engine.uneven or units % tp == 0 or (cached.replicas and tp % units == 0)):
                where = f"group {cached.group.name!r}, axis {axis!r}"
                raise DocumentError("tp", f"{engine.name} can't cut {units} heads over {tp} ranks ({where})")


@dataclass(frozen=True)
class _Part:
    """Which part of the cache one worker keeps."""

    layers: range
    context_rank: int
    tensor_rank: int


class _Memory:
    """The regions of one worker, one after the other."""

    def __init__(self, base: Address) -> None:
        self.regions: list[Region] = []
        self._base = base
        self._used = 0

    def region(self, nbytes: int) -> int:
        """Add a region and return its index."""
        self.regions.append(Region(self._base.plus(self._used), nbytes, "device"))
        self._used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return len(self.regions) - 1


def _pools(slab: Slab, engine: Engine, shape: Shape, part: _Part, memory: _Memory) -> Iterator[Pool]:
    """One pool per group; each frame (what shares a page) has one region per layer, its fields one after the other."""
    layers = [layer for layer in slab.groups[0].group.layers if layer in part.layers]
    buffers: dict[str, list[Buffer]] = {cached.group.name: [] for cached in slab.groups}
    page_bytes: dict[str, int] = {}
    modes: dict[str, tuple[Mode, ...]] = {}
    for frame in _frames(slab, engine.together):
        starts: list[tuple[str, str, int]] = []
        total = 0
        for cached, parts in frame:
            name = cached.group.name
            modes[name], part_stride, nbytes = _field(cached, parts, engine, shape, part.tensor_rank)
            starts += [(name, one, total + index * part_stride) for index, one in enumerate(parts)]
            total += nbytes
        pages = _pages(slab, shape)
        for layer in layers:
            region = memory.region(total * pages)
            for name, one, offset in starts:
                buffers[name].append(Buffer(layer, one, region, offset, pages))
        page_bytes.update((cached.group.name, total) for cached, _ in frame)
    for cached in slab.groups if layers else ():
        group = cached.group
        owned = _owned(cached, shape, part)
        page_tokens = shape.page_tokens if group.growth == "token" else 1
        table = None if cached.table == group.name else cached.table
        yield Pool(
            group.name, page_tokens, page_bytes[group.name], modes[group.name], tuple(buffers[group.name]), table, owned
        )


def _frames(slab: Slab, together: frozenset[SlabKind]) -> list[list[tuple[Cached, tuple[str, ...]]]]:
    """What shares a page: all groups and parts of the slab, or every part of every group by itself."""
    if slab.kind in together:
        return [[(cached, cached.group.parts) for cached in slab.groups]]
    return [[(cached, (part,))] for cached in slab.groups for part in cached.group.parts]


def _field(
    cached: Cached, parts: tuple[str, ...], engine: Engine, shape: Shape, tensor_rank: int
) -> tuple[tuple[Mode, ...], int, int]:
    """(modes, bytes from one part to the next, bytes in all) of one group in a page."""
    group = cached.group
    extents = {
        **{
            axis: sum(b - a for a, b in _segments(cached, axis, extent, shape.tp, tensor_rank))
            for axis, extent in group.axes.items()
        },
        TOKEN: shape.page_tokens,
        PART: len(parts),
    }
    order = engine.orders[shape.layout][tuple(group.axes)]
    modes, nbytes = packed([(axis, extents[axis]) for axis in order], group.item_bytes)
    part_stride = next(mode.stride_bytes for mode in modes if mode.axis == PART)
    return tuple(mode for mode in modes if mode.axis != PART), part_stride, nbytes


def _segments(cached: Cached, axis: str, extent: int, tp: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Global indices of `axis` that tensor rank `rank` holds: its share of each section, in order."""
    found = []
    start = 0
    for units, size in cached.sections.get(axis, ()):
        ((first, last),) = tp_heads(units, tp, rank)
        found.append((start + first * size, start + last * size))
        start += units * size
    return tuple(found) or ((0, extent),)


def _owned(cached: Cached, shape: Shape, part: _Part) -> dict[str, tuple[Union[int, tuple[int, ...]], ...]]:
    owned: dict[str, tuple[Union[int, tuple[int, ...]], ...]] = {
        axis: _segments(cached, axis, cached.group.axes[axis], shape.tp, part.tensor_rank) for axis in cached.sections
    }
    if cached.group.growth == "token" and shape.cp > 1:
        owned[TOKEN] = (part.context_rank, shape.cp, shape.cp_block)
    return owned


def _pages(slab: Slab, shape: Shape) -> int:
    return shape.rows if slab.kind == "state" else shape.pages
