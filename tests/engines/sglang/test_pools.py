"""SGLang's own pools: the probe finds what they really write, whatever the kind, the page size and the data type."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sglang]
pytest.importorskip("sglang", reason="sglang is not importable")

import torch  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from kvferry.engines.sglang.layout import document  # noqa: E402
from kvferry.engines.sglang.pool import Model, Ranks, named_tensors, read_pool  # noqa: E402
from kvferry.engines.sglang.probe import map_memory, probe_pool  # noqa: E402
from kvferry.errors import EngineError  # noqa: E402
from kvferry.transport.memory import HostMemory  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
LAYERS = 2


def make(kind: str, page: int, dtype: torch.dtype) -> Any:
    if kind == "latent":
        return MLATokenToKVPool(64, page, dtype, 24, 8, LAYERS, "cpu", False)
    width = 8 if kind == "narrow values" else None
    return MHATokenToKVPool(64, page, dtype, 2, 16, LAYERS, "cpu", False, v_head_dim=width)


@pytest.mark.parametrize(
    ("kind", "page", "dtype"), list(itertools.product(("attention", "narrow values", "latent"), (1, 16), DTYPES))
)
def test_what_a_pool_writes_is_found(kind: str, page: int, dtype: torch.dtype) -> None:
    pool = make(kind, page, dtype)
    pointers, lengths, items = pool.get_contiguous_buf_infos()
    args = SimpleNamespace(kv_data_ptrs=pointers, kv_data_lens=lengths, kv_item_lens=items, state_types=[])
    instance = document("one", "model", 0, read_pool(pool, args, Model(LAYERS, 2), Ranks(0, 1, 0, 1)))
    worker = instance.workers[0]
    memory = HostMemory([map_memory(region.base, region.bytes) for region in worker.regions])
    with get_parallel().override(attn_dcp_size=1, dcp_enabled=False):
        probe_pool(pool, worker, instance.groups, memory)
        assert not any(tensor.view(torch.uint8).any() for tensor in named_tensors(pool).values())
        original = pool.set_kv_buffer
        pool.set_kv_buffer = lambda layer, loc, *rest, **options: original(layer, loc.flip(0), *rest, **options)
        with pytest.raises(EngineError, match="layout probe"):
            probe_pool(pool, worker, instance.groups, memory)
