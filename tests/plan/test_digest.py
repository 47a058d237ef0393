"""The digest of a layer doesn't depend on who computes it in which pieces, and does on every byte and its place."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout.document import Group
from kvferry.plan.dense import Chunk, chunk_bytes, split
from kvferry.plan.digest import add, layer_digests, whole_axes
from kvferry.plan.route import Box
from tests.plan.build import instance
from tests.plan.in_order import items_in_order, random_order

KEY = bytes(range(16))
Cache = dict[tuple[int, str], np.ndarray]
TOKENS, HEADS = 12, 4


def group_of(dtype: str, dim: int) -> Group:
    return Group("attn", "token", dtype, (3, 1, 7), ("k", "v"), {"head": HEADS, "dim": dim})


def cache_of(group: Group, seed: int) -> Cache:
    """[token, head, bytes of dim] per layer and part."""
    rng = np.random.default_rng(seed)
    shape = (TOKENS, HEADS, group.axes["dim"] * group.item_bytes)
    return {
        (layer, part): rng.integers(0, 256, shape, dtype=np.uint8) for layer in group.layers for part in group.parts
    }


def dense(group: Group, cache: Cache, chunk: Chunk) -> np.ndarray:
    """The chunk's bytes, picked one by one."""
    item, box = group.item_bytes, chunk.box
    items = [
        cache[box.layers[layer], box.parts[part]][token, head, item * i : item * (i + 1)]
        for layer, part, token, head, i in items_in_order(chunk)
    ]
    return np.concatenate([np.empty(0, np.uint8), *items])


def total(group: Group, cache: Cache, chunks: list[Chunk], whole: int = 1) -> dict[tuple[str, int], int]:
    sums: dict[tuple[str, int], int] = {}
    for chunk in chunks:
        add(sums, group.name, layer_digests(group, chunk, dense(group, cache, chunk), KEY, whole))
    return sums


def everything(group: Group) -> Box:
    return Box(group.name, group.layers, group.parts, {"head": ((0, HEADS),), "dim": ((0, group.axes["dim"]),)})


def cut(rnd: random.Random, group: Group, box: Box) -> list[Chunk]:
    """The whole cache cut at random: by layers, heads, context ranks, tokens and sizes."""
    layers = rnd.sample(list(box.layers), len(box.layers))
    at = rnd.randint(0, HEADS)
    size, block = rnd.choice([(1, 1), (2, 1), (3, 2)])
    middle = rnd.randint(0, TOKENS)
    chunks = []
    for some in (tuple(layers[:1]), tuple(layers[1:])):
        for heads in (((0, at),), ((at, HEADS),)):
            for rank in range(size):
                part = Box(box.group, some, box.parts, {**box.axes, "head": heads}, ((rank, size, block),))
                for tokens in ((0, middle), (middle, TOKENS)):
                    chunks += split(group, part, tokens, 64, order=random_order(rnd, part))
    rnd.shuffle(chunks)
    return chunks


@settings(max_examples=60, deadline=None)
@given(
    st.randoms(use_true_random=False), st.sampled_from([("float16", 1), ("int8", 3), ("float32", 4), ("float16", 8)])
)
def test_sums_do_not_depend_on_the_pieces(rnd: random.Random, kind: tuple[str, int]) -> None:
    group = group_of(*kind)
    cache = cache_of(group, 1)
    whole = Chunk(everything(group), (0, TOKENS))
    expected = total(group, cache, [whole])
    assert set(expected) == {("attn", 3), ("attn", 1), ("attn", 7)}
    pieces = cut(rnd, group, everything(group))
    assert sum(chunk_bytes(group, chunk) for chunk in pieces) == chunk_bytes(group, whole)
    assert total(group, cache, pieces) == expected
    lost = pieces[:-1]
    assert total(group, cache, lost) != expected, "a hole shows"


def test_every_byte_and_its_place_count() -> None:
    group = group_of("float16", 8)
    whole = [Chunk(everything(group), (0, TOKENS))]
    cache = cache_of(group, 1)
    expected = total(group, cache, whole)
    for layer, part in cache:
        for t, h, b in [(0, 0, 0), (TOKENS - 1, HEADS - 1, 15), (5, 2, 7)]:
            cache[layer, part][t, h, b] ^= 1
            found = total(group, cache, whole)
            assert {key for key in found if found[key] != expected[key]} == {("attn", layer)}
            cache[layer, part][t, h, b] ^= 1
    swaps = [
        lambda c: c[1, "k"].__setitem__(slice(None), c[1, "k"][:, ::-1].copy()),  # heads
        lambda c: c[1, "k"].__setitem__(slice(None), c[1, "k"][::-1].copy()),  # tokens
        lambda c: c.update({(1, "k"): c[1, "v"], (1, "v"): c[1, "k"]}),  # parts
        lambda c: c[1, "k"].__setitem__(slice(None), c[1, "k"][..., ::-1].copy()),  # inside a cell
    ]
    for swap in swaps:
        damaged = {key: values.copy() for key, values in cache.items()}
        swap(damaged)
        assert total(group, damaged, whole)[("attn", 1)] != expected[("attn", 1)]


def test_another_key_is_another_digest() -> None:
    group = group_of("float16", 8)
    chunk = Chunk(everything(group), (0, TOKENS))
    data = dense(group, cache_of(group, 1), chunk)
    assert layer_digests(group, chunk, data, KEY, 1) != layer_digests(group, chunk, data, KEY[::-1], 1)


def test_axes_that_anyone_splits_are_no_part_of_a_cell() -> None:
    one, two = instance("a", tp=1), instance("b", tp=2)
    group = one.group("attn")
    assert list(group.axes) == ["head", "dim"]
    assert whole_axes(group, [one, one]) == 2
    assert whole_axes(group, [one, two]) == 1


@pytest.mark.parametrize("whole", [0, 1])
def test_nothing_has_digest_zero(whole: int) -> None:
    group = group_of("float32", 4)
    chunk = Chunk(everything(group), (4, 4))
    assert layer_digests(group, chunk, np.empty(0, np.uint8), KEY, whole) == {3: 0, 1: 0, 7: 0}
