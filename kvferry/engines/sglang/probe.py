"""Trying at start whether SGLang really writes where its description says."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.engines.probe import Readable, check_written, tags
from kvferry.engines.sglang.layout import INDEX, MAMBA
from kvferry.engines.sglang.pool import Slots, slots_of, state_tensors
from kvferry.layout.address import Address
from kvferry.layout.document import Group, Worker
from kvferry.layout.request import Side, Table
from kvferry.transport.memory import MappedRegion, map_array

SCRATCH_PAGES = (1, 0)
"""Pages that the probe writes: SGLang keeps page 0 for padding, and nothing is allocated yet when the probe runs. Two,
in falling order, so that the bytes from page to page are tried as well.
"""


def map_memory(address: Address, nbytes: int) -> MappedRegion:
    """This process's own memory, which the engine keeps alive as long as it serves.

    By its raw address, since metadata rows reach us as nothing else: SGLang lists pointers and lengths in KVArgs.
    """
    return map_array(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value)))


def probe_pool(pool: Any, worker: Worker, groups: Sequence[Group], memory: Readable) -> None:
    """Write different values through the pool's own updates and find them where `worker` says; EngineError if not.

    The scratch pages are zero afterwards. The pool must be unused.
    """
    for slots in slots_of(pool):
        _probe_slots(slots, worker, [group for group in groups if _of_slots(group, slots)], memory)
        if hasattr(slots.pool, "index_key_cache"):
            _probe_index(slots, worker, [group for group in groups if group.name.startswith("index")], memory)
    if hasattr(pool, "mamba_pool"):
        _probe_state(pool.mamba_pool, worker, groups, memory)


def _of_slots(group: Group, slots: Slots) -> bool:
    return group.name.partition(".")[0] == slots.group


def _probe_slots(slots: Slots, worker: Worker, groups: Sequence[Group], memory: Readable) -> None:
    import torch

    pool, size = slots.pool, int(slots.pool.page_size)
    tokens = len(SCRATCH_PAGES) * size
    places = [page * size + slot for page in SCRATCH_PAGES for slot in range(size)]
    locations = torch.tensor(places, device=pool.device)
    written: dict[tuple[int, str], np.ndarray[Any, Any]] = {}
    for local, layer in enumerate(slots.layers):
        values = {}
        for number, (part, each) in enumerate(slots.tensors.items()):
            shape = (tokens, *each[local].shape[1:])
            drawn = tags(shape, each[local].element_size(), seed=layer * len(slots.tensors) + number)
            values[part] = torch.from_numpy(drawn).view(pool.dtype).to(pool.device)
            written[layer, part] = drawn
        k, *v = values.values()
        # a latent pool takes a value argument and ignores it; parts of a hybrid count their layers from their own first
        own = int(pool.start_layer) + local
        pool.set_kv_buffer(None, locations, k.clone(), (v[0] if v else k).clone(), layer_id_override=own)
    side = Side({slots.table: Table(SCRATCH_PAGES)})
    for group in groups:
        mine = {key: _as_group(group, values) for key, values in written.items() if key[1] in group.parts}
        check_written(worker, group, memory, side, (0, tokens), mine)
    for each in slots.tensors.values():
        for tensor in each:
            tensor[locations] = 0


def _as_group(group: Group, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[tokens, heads, width] without the axis that the group doesn't have."""
    return values.reshape(len(values), *([values.shape[1]] if "head" in group.axes else []), values.shape[-1])


def _probe_state(mamba_pool: Any, worker: Worker, groups: Sequence[Group], memory: Readable) -> None:
    """Recurrent state is written by kernels that take a layer's tensors and a slot, from the same accessor as here."""
    import torch

    slot = 1
    for number, (name, _) in enumerate(state_tensors(mamba_pool)):
        group = next(group for group in groups if group.name == name)
        written = {}
        for local, layer in enumerate(group.layers):
            cache = mamba_pool.mamba2_layer_cache(local)
            tensor = cache.temporal if name == "temporal" else cache.conv[number]
            drawn = tags(tuple(tensor.shape[1:]), tensor.element_size(), seed=number * len(group.layers) + local)
            tensor[slot] = torch.from_numpy(drawn).view(tensor.dtype).to(tensor.device)
            written[layer, "state"] = drawn[np.newaxis]
        check_written(worker, group, memory, Side({MAMBA: Table((slot,))}), (0, 1), written)
        for local in range(len(group.layers)):
            cache = mamba_pool.mamba2_layer_cache(local)
            (cache.temporal if name == "temporal" else cache.conv[number])[slot] = 0


def _probe_index(slots: Slots, worker: Worker, groups: Sequence[Group], memory: Readable) -> None:
    """Index keys are written by kernels for one kind of device only. What SGLang has everywhere is its `move` of single
    tokens: it moves a page's tokens one by one, in other order, so it shows where SGLang sees each key and scale.
    """
    import torch

    pool, size = slots.pool, int(slots.pool.index_page_size)
    held = [i for i, buffer in enumerate(pool.index_k_with_scale_buffer) if buffer.shape[0]]
    here, there = SCRATCH_PAGES[1] * size, SCRATCH_PAGES[0] * size
    order = np.random.default_rng(0).permutation(size)
    raw = {i: tags((size, pool.index_head_dim // 128 * 132), 1, seed=i) for i in held}
    for i in held:
        keys, scales = np.split(raw[i], [pool.index_head_dim], axis=1)
        page = np.concatenate([keys.ravel(), scales.ravel()])
        pool.index_k_with_scale_buffer[i][SCRATCH_PAGES[1]] = torch.from_numpy(page).to(pool.device)
    source = torch.arange(here, here + size, device=pool.device)
    pool.index_key_cache.move(torch.from_numpy(there + order).to(pool.device), source)
    moved = np.argsort(order)
    side = Side({INDEX: Table(SCRATCH_PAGES[:1])})
    for group in groups:
        width = pool.index_head_dim
        written = {}
        for i in held:
            keys, scales = np.split(raw[i][moved], [width], axis=1)
            wanted = keys if "dim" in group.axes else np.ascontiguousarray(scales).view(np.uint32)
            written[slots.layers[i], "k"] = wanted
        check_written(worker, group, memory, side, (0, size), written)
    for i in held:
        pool.index_k_with_scale_buffer[i][list(SCRATCH_PAGES)] = 0
