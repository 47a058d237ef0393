"""SGLang's memory as an instance document. Pure: what a pool says about itself goes in, groups and pools come out.

Source of the format: SGLang 0.5.23, `sglang/srt/mem_cache/memory_pool.py` (`MHATokenToKVPool`, `MLATokenToKVPool`:
one tensor `[slots, heads, width]` per layer and part, a page is `page_size` slots one after the other) and
`sglang/srt/disaggregation/utils.py` (`MetadataBuffers`: rows of bytes by metadata index). What is kept beside keys and
values is described in `states`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import EngineError
from kvferry.layout.address import Address
from kvferry.layout.document import TOKEN, Buffer, Group, Instance, Mode, Pool, Region, Worker
from kvferry.layout.presets import Segments, tp_heads
from kvferry.layout.tensors import TensorView
from kvferry.layout.validate import check_instance

KV_TABLE, ROW_TABLE = "kv", "row"
"""Page tables of a request: SGLang's KV page ids, and its one metadata index."""
MAMBA, SLIDING, INDEX = "mamba", "swa", "dsa"
"""SGLang's names of what KVArgs lists as states, which are also the names of their page tables."""
ROW_GROUP = "row"


@dataclass(frozen=True)
class Kind:
    """A kind of pool: the group it caches, its parts and the attribute that lists each part's tensors, and what the
    axes of one slot mean ("" has one index and is no axis of the group).
    """

    group: str
    attributes: Mapping[str, str]
    axes: tuple[str, ...]


_LATENT = Kind("latent", {"latent": "kv_buffer"}, ("", "dim"))
KINDS = {
    "MHATokenToKVPool": Kind("attn", {"k": "k_buffer", "v": "v_buffer"}, ("head", "dim")),
    "MLATokenToKVPool": _LATENT,
    "DSATokenToKVPool": _LATENT,
}
"""Pools of slots, by the name of their class."""


@dataclass(frozen=True)
class Registered:
    """One buffer as SGLang lists it in KVArgs; an item is a page, or a row of metadata."""

    address: Address
    bytes: int
    item_bytes: int

    @property
    def items(self) -> int:
        return self.bytes // self.item_bytes


@dataclass(frozen=True)
class Cache:
    """What one pool of slots on one worker says about itself. `tensors`: by part, one per layer in `layers`, `[slots,
    heads, width]`; `registered`: the same buffers in KVArgs; `all_layers`: those of the group on all workers; `heads`:
    KV heads of the whole model; `table`: which page ids of a request it goes by.
    """

    kind: Kind
    group: str
    table: str
    dtype: str
    page_tokens: int
    layers: tuple[int, ...]
    all_layers: tuple[int, ...]
    heads: int
    tensors: Mapping[str, tuple[TensorView, ...]]
    registered: Mapping[str, tuple[Registered, ...]]


@dataclass(frozen=True)
class Described:
    """Groups, and the pools that hold them; a pool's buffers count regions from this description's first."""

    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    pools: tuple[Pool, ...]


def describe_cache(cache: Cache, tp_rank: int, tp_size: int) -> list[Described]:
    """One group per width of a token, so that K and V of different width are two groups with one page table.

    EngineError names what a tensor says and what was expected of it.
    """
    by_width: dict[int, list[str]] = {}
    for part, views in cache.tensors.items():
        by_width.setdefault(views[0].shape[-1], []).append(part)
    owned = tp_heads(cache.heads, tp_size, tp_rank)
    group = cache.group
    return [
        _describe_width(cache, group if len(by_width) == 1 else f"{group}.{'.'.join(parts)}", width, parts, owned)
        for width, parts in by_width.items()
    ]


def _describe_width(cache: Cache, name: str, width: int, parts: Sequence[str], owned: Segments) -> Described:
    named = [axis for axis in cache.kind.axes if axis]
    whole = {"head": cache.heads, "dim": width}
    group = Group(
        name,
        "token",
        cache.dtype,
        cache.all_layers,
        tuple(parts),
        {axis: whole[axis] for axis in named},
    )
    local = {"": 1, "head": sum(stop - start for start, stop in owned), "dim": width}
    slot = [local[axis] for axis in cache.kind.axes]
    first = cache.tensors[parts[0]][0]
    places = [
        (layer, part, view, listed)
        for part in parts
        for layer, view, listed in zip(cache.layers, cache.tensors[part], cache.registered[part])
    ]
    for layer, part, view, listed in places:
        _check_tensor(f"layer {layer}, part {part!r}", view, listed, first, slot, cache.page_tokens)
    strides = dict(zip(cache.kind.axes, first.strides_bytes[1:]))
    modes = [Mode(TOKEN, cache.page_tokens, first.strides_bytes[0])]
    modes += [Mode(axis, local[axis], strides[axis]) for axis in named]
    pool = Pool(
        name,
        cache.page_tokens,
        cache.page_tokens * first.strides_bytes[0],
        tuple(modes),
        tuple(Buffer(layer, part, i, 0, listed.items) for i, (layer, part, _, listed) in enumerate(places)),
        table=cache.table,
        owned={"head": owned} if "head" in named else {},
    )
    regions = tuple(Region(listed.address, listed.bytes, view.memory, view.device) for *_, view, listed in places)
    return Described((group,), regions, (pool,))


def _check_tensor(
    where: str, view: TensorView, listed: Registered, first: TensorView, slot: list[int], page_tokens: int
) -> None:
    """A tensor must be what KVArgs lists, with slots of the expected shape, strided as the first of its group."""
    for what, found, expected in (
        ("shape of a slot", list(view.shape[1:]), slot),
        ("strides", view.strides_bytes, first.strides_bytes),
        ("address", view.address, listed.address),
        ("bytes of a page", page_tokens * view.strides_bytes[0], listed.item_bytes),
        ("bytes, at least", min(view.span_bytes, listed.bytes), listed.bytes),
    ):
        if found != expected:
            raise EngineError(
                f"{where}: {what}: the pool has {found}, expected was {expected}; this version of SGLang keeps its "
                "cache in a way that kvferry doesn't know"
            )


def describe_rows(registered: Sequence[Registered], held: bool = True) -> Described:
    """SGLang's metadata buffers (first token, its logprobs, …): a group per row size, a "layer" per buffer.

    The row of a request moves and commits with its cache. Every worker has a whole copy; what it says is true where it
    is `held`, on the last pipeline stage.
    """
    by_size: dict[int, list[int]] = {}
    for index, buffer in enumerate(registered):
        by_size.setdefault(buffer.item_bytes, []).append(index)
    groups, pools = [], []
    for size, indices in by_size.items():
        name = f"{ROW_GROUP}.{size}"
        groups.append(Group(name, "state", "uint8", tuple(indices), ("row",), {"byte": size}))
        buffers = tuple(Buffer(index, "row", index, 0, registered[index].items) for index in indices)
        modes = (Mode(TOKEN, 1, size), Mode("byte", size, 1))
        pools.append(Pool(name, 1, size, modes, buffers, ROW_TABLE))
    if not held:
        return Described(tuple(groups), (), ())
    regions = tuple(Region(buffer.address, buffer.bytes) for buffer in registered)
    return Described(tuple(groups), regions, tuple(pools))


def document(name: str, model: str, rank: int, described: Sequence[Described]) -> Instance:
    """This worker's part of the instance document, checked."""
    groups: list[Group] = []
    regions: list[Region] = []
    pools: list[Pool] = []
    for part in described:
        groups += part.groups
        pools += [_shifted(pool, len(regions)) for pool in part.pools]
        regions += part.regions
    worker = Worker(rank, tuple(regions), tuple(pools))
    return check_instance(Instance("kvferry-instance/1", name, model, tuple(groups), (worker,)))


def _shifted(pool: Pool, by: int) -> Pool:
    buffers = tuple(Buffer(b.layer, b.part, b.region + by, b.offset_bytes, b.pages) for b in pool.buffers)
    return Pool(pool.group, pool.page_tokens, pool.page_bytes, pool.modes, buffers, table=pool.table, owned=pool.owned)


def on_host(instance: Instance, name: str, device: Sequence[Registered], host: Sequence[Registered]) -> Instance:
    """The same cache in SGLang's pool on the host, whose buffers KVArgs lists in the order of those on the device.

    EngineError where an item is of another size, so that a page would look otherwise.
    """
    if [buffer.item_bytes for buffer in device] != [buffer.item_bytes for buffer in host]:
        raise EngineError("the pool on the host has pages of another size than the pool that it stands for")
    moved = {buffer.address: twin for buffer, twin in zip(device, host)}
    (worker,) = instance.workers
    twins = [moved.get(region.base) for region in worker.regions]
    regions = tuple(Region(twin.address, twin.bytes) if twin else region for region, twin in zip(worker.regions, twins))
    pools = tuple(
        Pool(
            pool.group,
            pool.page_tokens,
            pool.page_bytes,
            pool.modes,
            tuple(_on_twin(buffer, twins[buffer.region]) for buffer in pool.buffers),
            table=pool.table,
            owned=pool.owned,
        )
        for pool in worker.pools
    )
    whole = Instance(instance.format, name, instance.model, instance.groups, (Worker(worker.rank, regions, pools),))
    return check_instance(whole)


def _on_twin(buffer: Buffer, twin: Registered | None) -> Buffer:
    pages = buffer.pages if twin is None else twin.items
    return Buffer(buffer.layer, buffer.part, buffer.region, buffer.offset_bytes, pages)
