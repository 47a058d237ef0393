"""The layout probe writes through the cache's own update: the true description passes, a wrong one is refused."""

from __future__ import annotations

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvferry.engines.transformers.cache import CacheShape, PageLayout, PagePool  # noqa: E402
from kvferry.engines.transformers.probe import check_layout  # noqa: E402
from kvferry.errors import EngineError  # noqa: E402
from kvferry.layout.document import Mode  # noqa: E402
from kvferry.transport.memory import HostMemory, map_array  # noqa: E402


def pool_and_memory(layout: PageLayout, dtype: torch.dtype = torch.float32) -> tuple[PagePool, HostMemory]:
    pool = PagePool(CacheShape(layers=2, heads=4, dim=8, dtype=dtype), page_tokens=3, pages=5, layout=layout, seed="x")
    return pool, HostMemory([map_array(tensor) for pair in pool.tensors for tensor in pair])


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_true_description_passes_and_leaves_nothing(layout: PageLayout, dtype: torch.dtype) -> None:
    pool, memory = pool_and_memory(layout, dtype)
    check_layout(pool, pool.describe(0), memory)
    assert pool.free_pages == 5
    assert not any(tensor.any() for pair in pool.tensors for tensor in pair)


def test_a_wrong_description_is_refused() -> None:
    pool, memory = pool_and_memory("nhd")
    described = pool.describe(0)
    (only,) = described.pools
    swapped = (Mode("token", 3, 32), Mode("head", 4, 96), only.modes[2])
    wrong = msgspec.structs.replace(described, pools=(msgspec.structs.replace(only, modes=swapped),))
    with pytest.raises(EngineError, match=r"layer 0, part k: .*not where its layout says, first at token 0, head 1"):
        check_layout(pool, wrong, memory)
    assert pool.free_pages == 5
