from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvferry.engines.transformers.cache import CacheShape, PagedCache, PagePool, local_heads  # noqa: E402
from kvferry.engines.transformers.model import load_model, next_token, plain_tokens  # noqa: E402
from kvferry.errors import EngineError  # noqa: E402
from kvferry.layout.document import Instance  # noqa: E402
from kvferry.layout.validate import check_instance  # noqa: E402

SHAPE = CacheShape(layers=2, heads=4, dim=8)
PROMPT = [5, 3, 40, 8, 9, 33, 1, 2, 60, 21, 22]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    torch.set_num_threads(1)
    return load_model(tiny_model)


def greedy(model: Any, cache: PagedCache, prompt: list[int], count: int) -> list[int]:
    tokens = [next_token(model, cache, prompt)]
    while len(tokens) < count:
        tokens.append(next_token(model, cache, tokens[-1:]))
    return tokens


@pytest.mark.parametrize(("layout", "page_tokens"), [("nhd", 16), ("hnd", 8), ("nhd", 6), ("hnd", 1)])
def test_paged_cache_gives_the_tokens_of_a_plain_cache(model: Any, layout: Any, page_tokens: int) -> None:
    pool = PagePool(CacheShape.of(model), page_tokens=page_tokens, pages=48, layout=layout, seed="a")
    cache = PagedCache(pool)
    assert greedy(model, cache, PROMPT, 20) == plain_tokens(model, PROMPT, 20)
    assert cache.get_seq_length() == len(PROMPT) + 19
    cache.close()
    assert pool.free_pages == 48


def test_decoding_reads_the_pages(model: Any) -> None:
    """Else the test above could pass with a cache that keeps a copy on the side."""
    pool = PagePool(CacheShape.of(model), page_tokens=4, pages=16)
    cache = PagedCache(pool)
    tokens = [next_token(model, cache, PROMPT)]
    for pair in pool.tensors:
        for tensor in pair:
            tensor[cache.pages[0]] = 3.0
    for _ in range(19):
        tokens.append(next_token(model, cache, tokens[-1:]))
    assert tokens != plain_tokens(model, PROMPT, 20)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_cache_continues_on_pages_filled_from_outside(model: Any, layout: Any) -> None:
    shape = CacheShape.of(model)
    source = PagePool(shape, page_tokens=4, pages=16, layout=layout, seed="a")
    target = PagePool(shape, page_tokens=4, pages=16, layout=layout, seed="b")
    filled = PagedCache(source)
    tokens = [next_token(model, filled, PROMPT)]
    cache = PagedCache(target, tokens=len(PROMPT))
    assert cache.pages != filled.pages
    for theirs, ours in zip(source.tensors, target.tensors, strict=True):
        for their, our in zip(theirs, ours, strict=True):
            our[cache.pages] = their[filled.pages]
    while len(tokens) < 12:
        tokens.append(next_token(model, cache, tokens[-1:]))
    assert tokens == plain_tokens(model, PROMPT, 12)


@pytest.mark.parametrize(
    ("layout", "modes"),
    [
        ("nhd", [("token", 6, 64), ("head", 2, 32), ("dim", 8, 4)]),
        ("hnd", [("token", 6, 32), ("head", 2, 192), ("dim", 8, 4)]),
    ],
)
def test_description_of_a_shard(layout: Any, modes: list[tuple[str, int, int]]) -> None:
    pool = PagePool(SHAPE, page_tokens=6, pages=3, layout=layout, rank=1, tp=2)
    worker = pool.describe(1)
    (described,) = worker.pools
    assert [(mode.axis, mode.extent, mode.stride_bytes) for mode in described.modes] == modes
    assert described.page_bytes == 6 * 2 * 8 * 4
    assert described.owned == {"head": ((2, 4),)}
    assert worker.regions[3].base.value == pool.tensors[1][1].data_ptr()
    check_instance(
        Instance("kvferry-instance/1", "a", "m", (SHAPE.group,), (PagePool(SHAPE, page_tokens=6, pages=3).describe(0),))
    )


def test_pages_are_scattered_and_the_same_on_every_rank() -> None:
    first, second = (PagePool(SHAPE, page_tokens=4, pages=32, rank=rank, tp=2, seed="a").take(8) for rank in (0, 1))
    assert first == second
    assert first != sorted(first)
    assert first != PagePool(SHAPE, page_tokens=4, pages=32, seed="b").take(8)


def test_pool_refuses_what_it_can_not_give() -> None:
    pool = PagePool(SHAPE, page_tokens=4, pages=3)
    with pytest.raises(EngineError, match="4 pages wanted, 3 of 3 are free"):
        pool.take(4)
    pages = pool.take(2)
    pool.give_back(pages)
    with pytest.raises(EngineError, match="not in use"):
        pool.give_back(pages)


def test_tensor_parallel_size_must_divide_the_kv_heads() -> None:
    assert [local_heads(4, rank, 2) for rank in (0, 1)] == [(0, 2), (2, 4)]
    for tp in (3, 8):
        with pytest.raises(EngineError, match=rf"size {tp} does not divide the model's 4 KV heads.*1, 2, 4"):
            local_heads(4, 0, tp)


def test_a_batch_is_refused() -> None:
    cache = PagedCache(PagePool(SHAPE, page_tokens=4, pages=3))
    with pytest.raises(EngineError, match="batch of 2"):
        cache.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
