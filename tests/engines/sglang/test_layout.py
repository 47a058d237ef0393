"""SGLang's pools as instance documents. No SGLang needed: a pool is whatever has its attributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.engines.sglang.layout import Described, Registered, describe_rows, document
from kvferry.engines.sglang.pool import Model, Ranks, read_pool, registered
from kvferry.errors import EngineError, IncompatibleError
from kvferry.layout.address import Address
from kvferry.layout.document import Instance, Mode, Worker
from kvferry.plan.route import check_compatible

ROWS = [
    Registered(Address(0x1000), 512, 64),
    Registered(Address(0x2000), 4096, 512),
    Registered(Address(0x4000), 512, 64),
]


@dataclass
class MHATokenToKVPool:
    """As SGLang's: K and V of a layer are halves of one tensor, padded to whole pages."""

    size: int = 64
    page_size: int = 16
    head_num: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    layer_num: int = 3
    start_layer: int = 0
    dtype: str = "torch.float32"
    device: str = "cpu"
    kv_cache_layout: str = "nhd"
    k_buffer: list[Any] = field(init=False)
    v_buffer: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.size + self.page_size
        self.k_buffer, self.v_buffer = (
            [np.zeros((rows, self.head_num, width), np.float32) for _ in range(self.layer_num)]
            for width in (self.head_dim, self.v_head_dim)
        )


class MLATokenToKVPool(SimpleNamespace):
    pass


def mla(width: int = 24) -> MLATokenToKVPool:
    buffers = [np.zeros((80, 1, width), np.float32) for _ in range(3)]
    return MLATokenToKVPool(
        kv_buffer=buffers, page_size=16, layer_num=3, start_layer=0, dtype="torch.float32", device="cpu"
    )


def kv_args(pool: Any, tensors: list[Any]) -> Any:
    return SimpleNamespace(
        kv_data_ptrs=[tensor.ctypes.data for tensor in tensors],
        kv_data_lens=[tensor.nbytes for tensor in tensors],
        kv_item_lens=[tensor[0].nbytes * pool.page_size for tensor in tensors],
        state_types=[],
    )


def described(pool: Any, heads: int, rank: int, size: int, model_layers: int = 3) -> Instance:
    tensors = [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else pool.kv_buffer
    parts = read(pool, kv_args(pool, tensors), heads, rank, size, model_layers)
    return document("one", "model", rank, parts)


def read(pool: Any, args: Any, heads: int, rank: int = 0, size: int = 1, model_layers: int = 3) -> list[Described]:
    stage = model_layers > pool.layer_num
    return read_pool(pool, args, Model(model_layers, heads, stage), Ranks(rank, size, rank, size))


def worker(instance: Instance) -> Worker:
    return instance.workers[0]


def test_keys_and_values() -> None:
    pool = MHATokenToKVPool()
    instance = described(pool, heads=4, rank=1, size=2)
    (group,), (held,) = instance.groups, worker(instance).pools
    assert (group.name, group.axes, group.parts) == ("attn", {"head": 4, "dim": 8}, ("k", "v"))
    assert held.owned == {"head": ((2, 4),)}
    assert held.modes == (Mode("token", 16, 64), Mode("head", 2, 32), Mode("dim", 8, 4))
    assert held.page_bytes == 16 * 64
    places = {(b.layer, b.part): worker(instance).regions[b.region].base.value for b in held.buffers}
    assert places == {
        (layer, part): buffer[layer].ctypes.data
        for part, buffer in (("k", pool.k_buffer), ("v", pool.v_buffer))
        for layer in range(3)
    }
    assert {b.pages for b in held.buffers} == {5}


@pytest.mark.parametrize(("size", "rank", "owned"), [(8, 0, (0, 1)), (8, 1, (0, 1)), (8, 7, (3, 4)), (4, 3, (3, 4))])
def test_heads_are_replicated_where_ranks_outnumber_them(size: int, rank: int, owned: tuple[int, int]) -> None:
    """F10: nothing multiplies local heads by ranks."""
    instance = described(MHATokenToKVPool(head_num=1), heads=4, rank=rank, size=size)
    assert worker(instance).pools[0].owned == {"head": (owned,)}
    assert instance.groups[0].axes["head"] == 4


def test_values_that_are_narrower_are_a_group_of_their_own() -> None:
    """F35."""
    instance = described(MHATokenToKVPool(v_head_dim=4), heads=2, rank=0, size=1)
    assert [(group.name, group.axes["dim"]) for group in instance.groups] == [("attn.k", 8), ("attn.v", 4)]
    assert {pool.table for pool in worker(instance).pools} == {"kv"}


def test_a_latent_has_no_heads_and_is_whole_on_every_rank() -> None:
    """F40."""
    instance = described(mla(), heads=1, rank=3, size=4)
    (group,), (pool,) = instance.groups, worker(instance).pools
    assert (group.name, group.parts, group.axes) == ("latent", ("latent",), {"dim": 24})
    assert pool.owned == {}
    assert pool.modes == (Mode("token", 16, 96), Mode("dim", 24, 4))


def test_a_stage_holds_its_own_layers() -> None:
    """F20: layers have their global numbers."""
    instance = described(MHATokenToKVPool(start_layer=5, layer_num=2), heads=2, rank=0, size=1, model_layers=8)
    assert instance.groups[0].layers == tuple(range(8))
    assert sorted({b.layer for b in worker(instance).pools[0].buffers}) == [5, 6]


def test_values_are_found_by_asking_the_pool() -> None:
    """F21: half of KVArgs' list is not V just because it is the second half."""
    pool = MHATokenToKVPool(layer_num=2)
    mixed = [pool.v_buffer[1], pool.k_buffer[0], pool.v_buffer[0], pool.k_buffer[1]]
    (part,) = read(pool, kv_args(pool, mixed), 2, model_layers=2)
    places = {(b.layer, b.part): part.regions[b.region].base.value for b in part.pools[0].buffers}
    assert places[1, "v"] == pool.v_buffer[1].ctypes.data
    assert places[0, "k"] == pool.k_buffer[0].ctypes.data


def test_addresses_use_all_bits() -> None:
    """F1, F4."""
    high = 0xFFFF_81AB_54E0_1000
    (buffer,) = registered([high], [4096], [64])
    assert buffer.address == Address(high)


def test_metadata_rows() -> None:
    instance = document("one", "model", 0, [describe_rows(ROWS)])
    assert [(g.name, g.growth, g.layers, g.axes) for g in instance.groups] == [
        ("row.64", "state", (0, 2), {"byte": 64}),
        ("row.512", "state", (1,), {"byte": 512}),
    ]
    assert [pool.table for pool in worker(instance).pools] == ["row", "row"]
    regions = worker(instance).regions
    assert [regions[b.region].base for b in worker(instance).pools[0].buffers] == [ROWS[0].address, ROWS[2].address]


def test_cache_and_rows_in_one_document() -> None:
    pool = MHATokenToKVPool()
    cache = read(pool, kv_args(pool, [*pool.k_buffer, *pool.v_buffer]), 2)
    both = document("one", "model", 0, [*cache, describe_rows(ROWS)])
    rows = next(pool for pool in worker(both).pools if pool.group == "row.512")
    assert worker(both).regions[rows.buffers[0].region].base == ROWS[1].address


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        ({"layer_num": 3}, {"layer_num": 2}, "layers"),
        ({"head_dim": 8, "v_head_dim": 8}, {"head_dim": 4, "v_head_dim": 4}, "axes"),
        ({"dtype": "torch.float32"}, {"dtype": "torch.bfloat16"}, "dtype"),
        ({"head_num": 2}, {"head_num": 4}, "axes"),
    ],
)
def test_sides_that_differ_are_told_both_values(one: dict[str, Any], other: dict[str, Any], field: str) -> None:
    """F18, F37."""
    sides = []
    for change in (one, other):
        pool = MHATokenToKVPool(**change)
        sides.append(described(pool, heads=pool.head_num, rank=0, size=1, model_layers=pool.layer_num))
    with pytest.raises(IncompatibleError, match=f"groups.attn.{field}"):
        check_compatible(*sides)


def refused(match: str, pool: Any, args: Any = None, heads: int = 2) -> None:
    args = args or kv_args(pool, [*pool.k_buffer, *pool.v_buffer])
    with pytest.raises(EngineError, match=match):
        read(pool, args, heads)


def test_what_is_not_known_is_refused() -> None:
    pool = MHATokenToKVPool()
    good = kv_args(pool, [*pool.k_buffer, *pool.v_buffer])
    refused(r"layout 'hnd'", MHATokenToKVPool(kv_cache_layout="hnd"))
    refused(r"is a PageMajorMHATokenToKVPool", type("PageMajorMHATokenToKVPool", (MHATokenToKVPool,), {})())
    state = {"state_data_ptrs": [[0x1000]], "state_data_lens": [[64]], "state_item_lens": [[8]]}
    odd = SimpleNamespace(**{**vars(good), **state, "state_types": ["block_scale"]})
    refused(r"keeps state beside its KV cache that kvferry doesn't know: block_scale", pool, odd)
    mamba = SimpleNamespace(**{**vars(odd), "state_types": ["swa"]})
    refused(r"KVArgs lists swa, which a MHATokenToKVPool doesn't have", pool, mamba)
    refused(r"shape of a slot: the pool has \[2, 8\], expected was \[4, 8\]", pool, heads=4)


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("kv_data_ptrs", lambda values: [values[0] + 4096, *values[1:]], "doesn't list the pool's buffer"),
        ("kv_item_lens", lambda values: [values[0] * 2, *values[1:]], "bytes of a page"),
        ("kv_data_lens", lambda values: [values[0] * 2, *values[1:]], "bytes, at least"),
    ],
)
def test_kvargs_that_contradict_the_pool(field: str, change: Any, match: str) -> None:
    pool = MHATokenToKVPool()
    args = kv_args(pool, [*pool.k_buffer, *pool.v_buffer])
    setattr(args, field, change(getattr(args, field)))
    refused(match, pool, args)


def test_a_draft_models_buffers_are_refused_not_forgotten() -> None:
    """F45."""
    pool, draft = MHATokenToKVPool(), MHATokenToKVPool(layer_num=1)
    args = kv_args(pool, [*pool.k_buffer, *pool.v_buffer, *draft.k_buffer, *draft.v_buffer])
    refused("KVArgs lists 8 kv buffers, the pool has 6; the cache of a draft model", pool, args)


def test_a_tensor_with_other_strides_than_the_first() -> None:
    pool = MHATokenToKVPool()
    wide = np.zeros((80, 2, 16), np.float32)[:, :, :8]
    pool.v_buffer[1] = wide
    refused("layer 1, part 'v': strides", pool)
