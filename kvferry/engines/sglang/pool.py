"""Reading SGLang's live KV pool, and trying at start whether it really writes where its description says."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvferry.engines.probe import check_written, tags
from kvferry.engines.sglang.layout import KINDS, KV_TABLE, Cache, Registered
from kvferry.errors import EngineError
from kvferry.layout.address import Address
from kvferry.layout.document import Group, Worker
from kvferry.layout.request import Side, Table
from kvferry.layout.tensors import view_of
from kvferry.transport.memory import HostMemory, MappedRegion, map_array

SCRATCH_PAGES = (1, 0)
"""Pages that the probe writes: SGLang keeps page 0 for padding, and nothing is allocated yet when the probe runs. Two,
in falling order, so that the bytes from page to page are tried as well.
"""


def tensors_of(pool: Any) -> Mapping[str, Sequence[Any]]:
    """The pool's tensors by part, one per layer. EngineError where this kind of pool is not known."""
    kind = KINDS.get(type(pool).__name__)
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if kind is None or layout != "nhd" or getattr(pool, "k_scale_buffer", None) is not None:
        raise EngineError(
            f"the KV pool is a {type(pool).__name__} in layout {layout!r}; kvferry knows {', '.join(KINDS)} in layout "
            "'nhd' without scales. Hybrid, sliding-window, sparse and FP4 pools are not supported yet"
        )
    if str(pool.device) != "cpu":
        raise EngineError(
            f"the KV pool is on device {str(pool.device)!r}; kvferry reaches host memory only, --device cpu"
        )
    return {part: getattr(pool, attribute) for part, attribute in kind.attributes.items()}


def read_cache(pool: Any, args: Any, model_layers: int, heads: int) -> Cache:
    """What `pool` and its listing in KVArgs `args` say. EngineError where they don't fit each other."""
    tensors = tensors_of(pool)
    listed = registered(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)
    count = sum(len(views) for views in tensors.values())
    if len(listed) != count:
        raise EngineError(
            f"KVArgs lists {len(listed)} KV buffers, the pool has {count}; the cache of a draft model is not supported "
            "yet: start both servers without speculative decoding"
        )
    if args.state_types:
        kinds = ", ".join(str(getattr(kind, "value", kind)) for kind in args.state_types)
        raise EngineError(f"the model keeps state beside its KV cache ({kinds}), which is not supported yet")
    by_address = {buffer.address: buffer for buffer in listed}
    views = {part: tuple(view_of(tensor) for tensor in each) for part, each in tensors.items()}
    missing = [view.address for part in views.values() for view in part if view.address not in by_address]
    if missing:
        raise EngineError(f"KVArgs doesn't list the pool's buffer at {missing[0]}")
    first = int(pool.start_layer)
    return Cache(
        kind=KINDS[type(pool).__name__],
        dtype=str(pool.dtype).removeprefix("torch."),
        page_tokens=int(pool.page_size),
        layers=tuple(range(first, first + int(pool.layer_num))),
        model_layers=model_layers,
        heads=heads,
        tensors=views,
        registered={part: tuple(by_address[view.address] for view in each) for part, each in views.items()},
    )


def registered(pointers: Iterable[int], lengths: Iterable[int], items: Iterable[int]) -> list[Registered]:
    """Buffers as KVArgs lists them in three lists of one length."""
    rows = zip(pointers, lengths, items, strict=True)
    return [Registered(Address(pointer), int(nbytes), int(item)) for pointer, nbytes, item in rows]


def map_memory(address: Address, nbytes: int) -> MappedRegion:
    """This process's own memory, which the engine keeps alive as long as it serves.

    By its raw address, since metadata rows reach us as nothing else: SGLang lists pointers and lengths in KVArgs.
    """
    return map_array(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value)))


def probe_pool(pool: Any, worker: Worker, groups: Sequence[Group], memory: HostMemory) -> None:
    """Write different values through the pool's own update and find them where `worker` says; EngineError if not.

    The scratch pages are zero afterwards. The pool must be unused.
    """
    import torch

    tensors = tensors_of(pool)
    size = int(pool.page_size)
    tokens = len(SCRATCH_PAGES) * size
    slots = torch.tensor([page * size + slot for page in SCRATCH_PAGES for slot in range(size)])
    layers = range(int(pool.start_layer), int(pool.start_layer) + int(pool.layer_num))
    written: dict[tuple[int, str], np.ndarray[Any, Any]] = {}
    for local, layer in enumerate(layers):
        values = {}
        for number, (part, each) in enumerate(tensors.items()):
            shape = (tokens, *each[local].shape[1:])
            drawn = tags(shape, each[local].element_size(), seed=layer * len(tensors) + number)
            values[part] = torch.from_numpy(drawn).view(pool.dtype)
            written[layer, part] = drawn
        k, *v = values.values()
        # a latent pool takes a value argument and ignores it
        pool.set_kv_buffer(None, slots, k.clone(), (v[0] if v else k).clone(), layer_id_override=layer)
    side = Side({KV_TABLE: Table(SCRATCH_PAGES)})
    for group in groups:
        mine = {key: _as_group(group, values) for key, values in written.items() if key[1] in group.parts}
        if group.growth == "token":
            check_written(worker, group, memory, side, (0, tokens), mine)
    for each in tensors.values():
        for tensor in each:
            tensor[slots] = 0


def _as_group(group: Group, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[tokens, heads, width] without the axis that the group doesn't have."""
    return values.reshape(len(values), *([values.shape[1]] if "head" in group.axes else []), values.shape[-1])
