"""The layout reader on made-up tensors: what it says is compared with where the tensors' own elements lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvferry.engines.vllm.layers import CachedLayer  # noqa: E402
from kvferry.engines.vllm.layout import merge_groups, read_groups, read_pieces, read_worker  # noqa: E402
from kvferry.engines.vllm.states import Split  # noqa: E402
from kvferry.errors import EngineError  # noqa: E402
from kvferry.layout.document import Instance, Worker  # noqa: E402
from kvferry.layout.validate import check_instance  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 5, 8, 2, 4
ALL_HEADS = 4


def cached(layer: int = 0, backend: str = "FLASH_ATTN", **changed: Any) -> CachedLayer:
    fields: dict[str, Any] = {
        "name": f"model.layers.{layer}.self_attn.attn",
        "layer": layer,
        "table": 0,
        "kind": "full",
        "backend": backend,
        "heads": HEADS,
        "key_dim": DIM,
        "value_dim": DIM,
        "block_tokens": TOKENS,
    }
    return CachedLayer(**{**fields, **changed})


def read(tensors: dict[str, Any], layers: list[CachedLayer], blocks: int = BLOCKS) -> tuple[Instance, Worker]:
    pieces = read_pieces(layers, tensors, blocks, Split(1, 2, ALL_HEADS))
    groups = merge_groups([read_groups(pieces)])
    worker = read_worker(1, pieces, groups)
    return check_instance(Instance("kvferry-instance/1", "i", "m", tuple(groups.values()), (worker,))), worker


def one(tensor: Any, layer: CachedLayer, blocks: int = BLOCKS) -> Worker:
    return read({layer.name: tensor}, [layer], blocks)[1]


def numbered(*shape: int) -> Any:
    """Each element is its own place, counted in elements from the start of the memory."""
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def place(worker: Worker, part: str, block: int, token: int, head: int, dim: int) -> int:
    """Where the document says that an element lies, in elements from the start of the memory (region 0)."""
    pool, buffer = next((p, b) for p in worker.pools for b in p.buffers if b.part == part)
    offset = buffer.offset_bytes + block * pool.page_bytes
    index = {"token": token, "head": head, "dim": dim}
    for axis, extent, stride in reversed([(m.axis, m.extent, m.stride_bytes) for m in pool.modes]):
        offset += index[axis] % extent * stride
        index[axis] //= extent
    assert not any(index.values())
    return offset // 4


def check(worker: Worker, logical: Any) -> None:
    """`logical[part]` is [block, token, head, dim]; each number in it is its own place."""
    for part, values in zip("kv", logical, strict=True):
        for block, token, head, dim in np.ndindex(*values.shape):
            assert place(worker, part, block, token, head, dim) == int(values[block, token, head, dim])


def test_nhd_and_hnd_blocks_differ_in_strides_only() -> None:
    hnd = numbered(BLOCKS, HEADS, TOKENS, 2 * DIM)
    check(one(hnd, cached()), hnd.permute(0, 2, 1, 3).split(DIM, dim=-1))
    nhd = numbered(BLOCKS, TOKENS, HEADS, 2 * DIM)
    check(one(nhd.permute(0, 2, 1, 3), cached()), nhd.split(DIM, dim=-1))


def test_heads_outside_blocks() -> None:
    tensor = numbered(HEADS, BLOCKS, TOKENS, 2 * DIM)
    check(one(tensor.transpose(0, 1), cached()), tensor.permute(1, 2, 0, 3).split(DIM, dim=-1))


@pytest.mark.parametrize("parts_first", [True, False])
@pytest.mark.parametrize("hnd", [True, False])
def test_keys_and_values_as_an_axis(parts_first: bool, hnd: bool) -> None:
    outer = (2, BLOCKS) if parts_first else (BLOCKS, 2)
    inner = (HEADS, TOKENS) if hnd else (TOKENS, HEADS)
    tensor = numbered(*outer, *inner, DIM)
    registered = tensor.transpose(2, 3) if hnd else tensor
    check(one(registered, cached()), registered if parts_first else registered.transpose(0, 1))


def test_cpu_backend_keeps_keys_transposed_in_a_block() -> None:
    tensor = numbered(BLOCKS, HEADS, TOKENS, 2 * DIM)
    inside = tensor.reshape(BLOCKS, HEADS, 2, TOKENS * DIM)
    keys = inside[:, :, 0].reshape(BLOCKS, HEADS, DIM, TOKENS).permute(0, 3, 1, 2)
    values = inside[:, :, 1].reshape(BLOCKS, HEADS, TOKENS, DIM).permute(0, 2, 1, 3)
    check(one(tensor, cached(backend="CPU_ATTN")), (keys, values))


def test_cpu_backend_with_tokens_apart_is_refused() -> None:
    tensor = numbered(BLOCKS, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3)
    with pytest.raises(EngineError, match="side by side"):
        one(tensor, cached(backend="CPU_ATTN"))


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "CPU_ATTN"])
def test_a_block_that_the_kernel_cuts(backend: str) -> None:
    cut = 2
    tensor = numbered(BLOCKS * cut, HEADS, TOKENS // cut, 2 * DIM)
    worker = one(tensor, cached(backend=backend))
    assert worker.pools[0].page_tokens == TOKENS
    if backend == "FLASH_ATTN":
        whole = tensor.reshape(BLOCKS, cut, HEADS, TOKENS // cut, 2 * DIM).permute(0, 1, 3, 2, 4)
        check(worker, whole.reshape(BLOCKS, TOKENS, HEADS, 2 * DIM).split(DIM, dim=-1))
    else:
        half = TOKENS // cut
        # token 5 is the second of the second half; keys lie as [dim][half]
        assert place(worker, "k", 1, half + 1, 1, 3) == int(tensor[3, 1].reshape(-1)[3 * half + 1])


def test_padded_blocks_keep_their_distance() -> None:
    memory = numbered(BLOCKS, 160)
    tensor = memory.as_strided((BLOCKS, HEADS, TOKENS, 2 * DIM), (160, TOKENS * 2 * DIM, 2 * DIM, 1))
    worker = one(tensor, cached())
    assert worker.pools[0].page_bytes == 160 * 4
    check(worker, tensor.permute(0, 2, 1, 3).split(DIM, dim=-1))


def test_layers_in_one_tensor_share_a_pool() -> None:
    memory = numbered(BLOCKS, 3, HEADS, TOKENS, 2 * DIM)  # blocks outermost, then layers
    layers = [cached(layer) for layer in range(3)]
    _, worker = read({c.name: memory[:, c.layer] for c in layers}, layers)
    (pool,) = worker.pools
    assert [(b.layer, b.part) for b in pool.buffers] == [(layer, part) for layer in range(3) for part in "kv"]
    assert pool.page_bytes == 3 * HEADS * TOKENS * 2 * DIM * 4
    assert pool.owned["head"] == ((2, 4),)


def test_tables_and_windows_are_pools_of_their_own() -> None:
    layers = [
        cached(0, table=0),
        cached(1, table=1, kind="window-16"),
        cached(2, table=2, kind="window-16"),
    ]
    document, worker = read({c.name: numbered(BLOCKS, HEADS, TOKENS, 2 * DIM) for c in layers}, layers)
    assert [(group.name, group.layers, group.constants) for group in document.groups] == [
        ("full", (0,), {}),
        ("sliding", (1, 2), {"window": 16}),
    ]
    assert [(pool.group, pool.table_name, [b.layer for b in pool.buffers]) for pool in worker.pools] == [
        ("full", "blocks0", [0, 0]),
        ("sliding", "blocks1", [1, 1]),
        ("sliding", "blocks2", [2, 2]),
    ]


def test_windows_of_different_length_are_groups_of_their_own() -> None:
    layers = [cached(0, kind="window-16"), cached(1, kind="window-32")]
    document, _ = read({c.name: numbered(BLOCKS, HEADS, TOKENS, 2 * DIM) for c in layers}, layers)
    assert [group.name for group in document.groups] == ["sliding-16", "sliding-32"]


def test_keys_and_values_of_different_width_are_two_groups() -> None:
    layer = cached(key_dim=6, value_dim=4)
    tensor = numbered(BLOCKS, HEADS, TOKENS, 10)
    document, worker = read({layer.name: tensor}, [layer])
    assert [(g.name, g.parts, g.axes["dim"]) for g in document.groups] == [("attn.k", ("k",), 6), ("attn.v", ("v",), 4)]
    check(worker, tensor.permute(0, 2, 1, 3).split([6, 4], dim=-1))


def test_a_stage_knows_the_groups_of_the_instance() -> None:
    stages = [[cached(layer) for layer in ids] for ids in ([0, 1], [2])]
    tensors = {c.name: numbered(BLOCKS, HEADS, TOKENS, 2 * DIM) for stage in stages for c in stage}
    pieces = [read_pieces(stage, tensors, BLOCKS, Split(0, 2, ALL_HEADS)) for stage in stages]
    groups = merge_groups(map(read_groups, pieces))
    assert groups["full"].name == "attn" and groups["full"].layers == (0, 1, 2)
    worker = read_worker(0, pieces[1], groups)
    assert {b.layer for pool in worker.pools for b in pool.buffers} == {2}


@pytest.mark.parametrize(
    ("shape", "changed"),
    [
        ((BLOCKS, HEADS, TOKENS, 2 * DIM + 1), {}),
        ((BLOCKS, HEADS + 1, TOKENS, 2 * DIM), {}),
        ((BLOCKS, HEADS, TOKENS + 1, 2 * DIM), {}),
        ((BLOCKS + 1, HEADS, TOKENS, 2 * DIM), {}),
        ((2, BLOCKS, TOKENS, HEADS, DIM), {"value_dim": DIM - 1}),
        ((BLOCKS, TOKENS, 2 * DIM), {}),
    ],
)
def test_an_unknown_shape_is_refused_with_what_was_expected(shape: tuple[int, ...], changed: dict[str, int]) -> None:
    with pytest.raises(EngineError, match=r"model.layers.0.*none of the known shapes.*5 blocks of 8 tokens, 2 KV"):
        one(numbered(*shape), cached(**changed))


def test_two_blocks_beside_two_parts_are_refused() -> None:
    with pytest.raises(EngineError, match="more than one of the known shapes"):
        one(numbered(2, 2, TOKENS, HEADS, DIM), cached(), blocks=2)


def test_layers_of_one_kind_that_differ_are_refused() -> None:
    layers = [cached(0), cached(1, key_dim=8, value_dim=8)]
    tensors = {
        layers[0].name: numbered(BLOCKS, HEADS, TOKENS, 2 * DIM),
        layers[1].name: numbered(BLOCKS, HEADS, TOKENS, 16),
    }
    with pytest.raises(EngineError, match=r"layer 0 has float32.*layer 1 has float32"):
        read_groups(read_pieces(layers, tensors, BLOCKS, Split(0, 2, ALL_HEADS)))


def test_heads_that_vllm_splits_otherwise_are_refused() -> None:
    layer = cached()
    tensors = {layer.name: numbered(BLOCKS, HEADS, TOKENS, 2 * DIM)}
    with pytest.raises(EngineError, match="vLLM caches 2 KV heads here, 4 were expected"):
        read_pieces([layer], tensors, BLOCKS, Split(0, 2, 8))
