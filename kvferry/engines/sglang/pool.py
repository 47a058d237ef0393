"""Reading SGLang's live KV pool: its parts, and what each says about itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.engines.sglang.layout import (
    INDEX,
    KINDS,
    KV_TABLE,
    MAMBA,
    SLIDING,
    Cache,
    Described,
    Registered,
    describe_cache,
)
from kvferry.engines.sglang.states import Index, State, describe_index, describe_state
from kvferry.errors import EngineError
from kvferry.layout.address import Address
from kvferry.layout.tensors import view_of


@dataclass(frozen=True)
class Slots:
    """A pool of slots, which may be a part of a larger pool: its group, which page ids it goes by, and its layers by
    their numbers in the model.
    """

    pool: Any
    group: str
    table: str
    layers: tuple[int, ...]

    @property
    def tensors(self) -> Mapping[str, Sequence[Any]]:
        """By part, one per layer."""
        attributes = KINDS[type(self.pool).__name__].attributes
        return {part: getattr(self.pool, attribute) for part, attribute in attributes.items()}


def slots_of(pool: Any) -> list[Slots]:
    """The parts of `pool` that hold slots. EngineError where this kind of pool is not known."""
    name = type(pool).__name__
    if name == "SWAKVPool":
        ids: dict[bool, list[int]] = {False: [], True: []}
        for layer, (_, slides) in sorted(pool.layers_mapping.items()):
            ids[slides].append(layer)
        parts = [
            Slots(pool.full_kv_pool, "full", KV_TABLE, tuple(ids[False])),
            Slots(pool.swa_kv_pool, "sliding", SLIDING, tuple(ids[True])),
        ]
    elif name == "HybridLinearKVPool":
        inner = pool.full_kv_pool
        layers = tuple(pool.full_attention_layer_id_mapping)
        parts = [Slots(inner, _kind_name(inner), KV_TABLE, layers)]
    else:
        first = int(pool.start_layer)
        layers = tuple(range(first, first + int(pool.layer_num)))
        parts = [Slots(pool, _kind_name(pool), KV_TABLE, layers)]
    for part in parts:
        _check_slots(part.pool)
    return [part for part in parts if part.layers]


def _kind_name(pool: Any) -> str:
    kind = KINDS.get(type(pool).__name__)
    return kind.group if kind is not None else ""


def _check_slots(pool: Any) -> None:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    scales = getattr(pool, "k_scale_buffer", None)
    if type(pool).__name__ not in KINDS or layout != "nhd" or scales is not None:
        raise EngineError(
            f"the KV pool is a {type(pool).__name__} in layout {layout!r}{' with scales' if scales is not None else ''}"
            f"; kvferry knows {', '.join(KINDS)} in layout 'nhd' without scales, alone or as parts of SWAKVPool and "
            "HybridLinearKVPool"
        )


@dataclass(frozen=True)
class Model:
    """What the model's configuration says. `stage_only`: a pipeline stage, which has some of the layers only."""

    layers: int
    heads: int
    stage_only: bool = False


@dataclass(frozen=True)
class Ranks:
    """This worker's place: of those that share the KV heads, and of those that share recurrent state."""

    rank: int
    size: int
    state_rank: int
    state_size: int


def read_pool(pool: Any, args: Any, model: Model, ranks: Ranks) -> list[Described]:
    """Everything that `pool` and its listing in KVArgs `args` say. EngineError where they don't fit each other, or
    where something is listed that kvferry doesn't know: a group that is left out still reads as text, and is wrong.
    """
    parts = slots_of(pool)
    kinds = state_kinds(args)
    states = {kind: _listed_state(args, index) for index, kind in enumerate(kinds)}
    unknown = [kind for kind in kinds if kind not in (MAMBA, SLIDING, INDEX)]
    if unknown or len(states) != len(kinds):
        raise EngineError(f"the model keeps state beside its KV cache that kvferry doesn't know: {', '.join(kinds)}")
    if model.stage_only and (kinds or len(parts) > 1):
        raise EngineError("--pp-size: a pipeline stage of a hybrid model is not supported by the kvferry backend")
    listed = {KV_TABLE: registered(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), **states}
    described: list[Described] = []
    for part in parts:
        cache = read_cache(part, listed.pop(part.table, []), model)
        described += describe_cache(cache, ranks.rank, ranks.size)
    if MAMBA in listed:
        for state in read_states(pool.mamba_pool, listed.pop(MAMBA)):
            described.append(describe_state(state, ranks.state_rank, ranks.state_size))
    if INDEX in listed:
        described.append(describe_index(_read_index(parts[0], listed.pop(INDEX))))
    if listed:
        raise EngineError(f"KVArgs lists {', '.join(listed)}, which a {type(pool).__name__} doesn't have")
    return described


def listed_twins(args: Any) -> tuple[list[Registered], list[Registered]]:
    """Buffers on the device and their twins on the host, where decode may receive on the host; else nothing."""
    if args.host_kv_data_ptrs is None:
        return [], []
    here = registered(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    twins = registered(args.host_kv_data_ptrs, args.host_kv_data_lens, args.host_kv_item_lens)
    for index, pointers in enumerate(args.host_state_data_ptrs or ()):
        here += _listed_state(args, index)
        twins += registered(pointers, args.host_state_data_lens[index], args.host_state_item_lens[index])
    return here, twins


def state_kinds(args: Any) -> list[str]:
    """In the order in which SGLang gives the page ids of a request's states."""
    return [str(getattr(kind, "value", kind)) for kind in args.state_types]


def _listed_state(args: Any, index: int) -> list[Registered]:
    return registered(args.state_data_ptrs[index], args.state_data_lens[index], args.state_item_lens[index])


def registered(pointers: Iterable[int], lengths: Iterable[int], items: Iterable[int]) -> list[Registered]:
    """Buffers as KVArgs lists them in three lists of one length."""
    rows = zip(pointers, lengths, items, strict=True)
    return [Registered(Address(pointer), int(nbytes), int(item)) for pointer, nbytes, item in rows]


def read_cache(part: Slots, listed: Sequence[Registered], model: Model) -> Cache:
    """One pool of slots, its tensors found among the buffers that KVArgs lists for it."""
    pool, tensors = part.pool, part.tensors
    count = sum(len(views) for views in tensors.values())
    if len(listed) != count:
        raise EngineError(
            f"KVArgs lists {len(listed)} {part.table} buffers, the pool has {count}; the cache of a draft model is not "
            "supported yet: start both servers without speculative decoding"
        )
    views = {name: tuple(view_of(tensor) for tensor in each) for name, each in tensors.items()}
    by_address = _by_address(listed, [view.address for each in views.values() for view in each])
    return Cache(
        kind=KINDS[type(pool).__name__],
        group=part.group,
        table=part.table,
        dtype=str(pool.dtype).removeprefix("torch."),
        page_tokens=int(pool.page_size),
        layers=part.layers,
        all_layers=tuple(range(model.layers)) if model.stage_only else part.layers,
        heads=model.heads,
        tensors=views,
        registered={name: tuple(by_address[view.address] for view in each) for name, each in views.items()},
    )


def _by_address(listed: Sequence[Registered], wanted: Sequence[Address]) -> dict[Address, Registered]:
    by_address = {buffer.address: buffer for buffer in listed}
    for address in wanted:
        if address not in by_address:
            raise EngineError(f"KVArgs doesn't list the pool's buffer at {address}")
    return by_address


def state_tensors(mamba_pool: Any) -> list[tuple[str, Any]]:
    """(name, `[layers, slots, …]`) of each tensor of recurrent state that moves with a request."""
    cache = mamba_pool.mamba_cache
    conv = [("conv" if len(cache.conv) == 1 else f"conv.{i}", tensor) for i, tensor in enumerate(cache.conv)]
    return [(name, each) for name, each in [*conv, ("temporal", cache.temporal)] if each.numel()]


def read_states(mamba_pool: Any, listed: Sequence[Registered]) -> list[State]:
    layers = tuple(int(layer) for layer in mamba_pool.mamba_layer_ids)
    tensors = state_tensors(mamba_pool)
    views = {name: tuple(view_of(tensor[i]) for i in range(len(layers))) for name, tensor in tensors}
    by_address = _by_address(listed, [view.address for each in views.values() for view in each])
    if len(listed) != len(layers) * len(tensors):
        raise EngineError(
            f"KVArgs lists {len(listed)} buffers of recurrent state, the pool has {len(layers) * len(tensors)} that "
            "kvferry knows; start both servers without speculative decoding and without --enable-linear-replayssm"
        )
    blocks = mamba_pool.conv_shard_groups
    return [
        State(
            name,
            MAMBA,
            layers,
            each,
            tuple(by_address[view.address] for view in each),
            cut=0 if name == "temporal" else mamba_pool.conv_slice_axis,
            # heads are one piece; SGLang names the pieces of a convolution for some models only
            blocks=() if name == "temporal" else None if blocks is None else tuple(int(block) for block in blocks),
        )
        for name, each in views.items()
    ]


def _read_index(part: Slots, listed: Sequence[Registered]) -> Index:
    """Layers that reuse another's keys have a tensor of no rows, which is listed but holds nothing."""
    buffers = part.pool.index_k_with_scale_buffer
    if len(listed) != len(buffers):
        raise EngineError(f"KVArgs lists {len(listed)} buffers of index keys, the pool has {len(buffers)}")
    held = [(layer, buffer, at) for layer, buffer, at in zip(part.layers, buffers, listed) if buffer.shape[0]]
    return Index(
        INDEX,
        int(part.pool.index_page_size),
        int(part.pool.index_head_dim),
        tuple(layer for layer, *_ in held),
        tuple(view_of(buffer) for _, buffer, _ in held),
        tuple(at for *_, at in held),
    )


def named_tensors(pool: Any) -> dict[str, Any]:
    """All tensors of a pool, for a dump."""
    named = {
        f"layers.{layer}.{part}": tensor
        for slots in slots_of(pool)
        for part, each in slots.tensors.items()
        for layer, tensor in zip(slots.layers, each)
    }
    if hasattr(pool, "mamba_pool"):
        for name, tensor in state_tensors(pool.mamba_pool):
            named |= {f"layers.{layer}.{name}": tensor[i] for i, layer in enumerate(pool.mamba_pool.mamba_layer_ids)}
    for slots in slots_of(pool):
        for layer, tensor in zip(slots.layers, getattr(slots.pool, "index_k_with_scale_buffer", ())):
            named[f"layers.{layer}.index"] = tensor
    return named
