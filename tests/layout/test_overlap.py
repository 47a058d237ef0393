"""The overlap test against brute force, and how it bears large and hostile layouts."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.layout import overlap
from kvferry.layout.overlap import TooIrregular, first_overlap

Modes = list[tuple[int, int]]


def brute(modes: Modes, page_bytes: int, item_bytes: int, buffers: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
    """All pairs of buffers that share a byte, by writing down every byte."""
    users: dict[int, list[int]] = {}
    for index, (start, pages) in enumerate(buffers):
        for page, *digits in itertools.product(range(pages), *(range(extent) for extent, _ in modes)):
            first = start + page * page_bytes + sum(d * stride for d, (_, stride) in zip(digits, modes, strict=True))
            for byte in range(first, first + item_bytes):
                users.setdefault(byte, []).append(index)
    return {(min(a, b), max(a, b)) for who in users.values() for a, b in itertools.combinations(who, 2)}


@settings(deadline=None, max_examples=600)
@given(
    modes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=3),
    page_bytes=st.integers(1, 60),
    item_bytes=st.sampled_from([1, 2, 4]),
    buffers=st.lists(st.tuples(st.integers(0, 120), st.integers(1, 4)), min_size=1, max_size=4),
    shift=st.sampled_from([0, 2**63 - 50, 2**64 - 500]),
)
@example([(2, 3), (3, 2)], 100, 1, [(0, 1)], 0)  # strides 3 and 2 meet at 6 only with extents 3 and 4
@example([(3, 3), (4, 2)], 100, 1, [(0, 1)], 0)
@example([(2, 16)], 4, 2, [(0, 4)], 0)  # stride above page_bytes: pages lie inside the mode
@example([(2, 16)], 4, 2, [(0, 5)], 0)
@example([], 1, 2, [(0, 2)], 0)
def test_it_agrees_with_brute_force(
    modes: Modes, page_bytes: int, item_bytes: int, buffers: list[tuple[int, int]], shift: int
) -> None:
    found = first_overlap(modes, page_bytes, item_bytes, [(start + shift, pages) for start, pages in buffers])
    expected = brute(modes, page_bytes, item_bytes, buffers)
    if found is None:
        assert not expected
    else:
        assert (min(found), max(found)) in expected


def test_nested_layouts_are_found_free_and_one_byte_less_is_not() -> None:
    rnd = random.Random(1)
    for _ in range(300):
        item = rnd.choice([1, 2, 4])
        extents = [rnd.choice([2, 3, 8]) for _ in range(rnd.randint(1, 4))]
        pages, count, span = rnd.randint(2, 9), rnd.randint(2, 5), item
        kinds = ["page", "buffer", *map(str, range(len(extents)))]
        rnd.shuffle(kinds)
        strides: dict[str, int] = {}
        for kind in kinds:
            strides[kind] = span
            span *= {"page": pages, "buffer": count}.get(kind) or extents[int(kind)]
        modes = [(extent, strides[str(index)]) for index, extent in enumerate(extents)]
        buffers = [(2**63 - 100 + index * strides["buffer"], pages) for index in range(count)]
        assert first_overlap(modes, strides["page"], item, buffers) is None
        shifted = [buffers[0], (buffers[1][0] + 1, pages), *buffers[2:]]
        if item > 1 and (kinds[0] == "buffer" or count > 2):
            assert first_overlap(modes, strides["page"], item, shifted) is not None


def test_large_pools_take_milliseconds() -> None:
    pages, head, dim = 200_000, 8, 128
    modes = [(16, head * dim * 2), (head, dim * 2), (dim, 2)]
    part = 16 * head * dim * 2
    apart = [(index * pages * part, pages) for index in range(160)]
    woven = [(index * part, pages) for index in range(160)]
    by_head = [(head, pages * 16 * dim * 2), (16, dim * 2), (dim, 2)]
    started = time.perf_counter()
    assert first_overlap(modes, part, 2, apart) is None
    assert first_overlap(modes, 160 * part, 2, woven) is None
    assert first_overlap(by_head, 16 * dim * 2, 2, apart) is None
    assert first_overlap(modes, 160 * part - 2, 2, woven) is not None
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("size", [2**31, 2**62, 2**63 - 1])
def test_sizes_beyond_any_array_type_are_exact(size: int) -> None:
    assert first_overlap([(2, size)], 1, 1, [(0, size)]) is None
    assert first_overlap([(2, size)], 1, 1, [(0, size + 1)]) == (0, 0)
    assert first_overlap([(2, size)], size * 2, 4, [(0, 2), (size - 4, 1)]) is None
    assert first_overlap([(2, size)], size * 2, 4, [(0, 2), (size - 3, 1)]) == (0, 1)


def test_a_layout_that_would_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = [(2, 10**9 + 7919 * index * index) for index in range(60)]
    started = time.perf_counter()
    with pytest.raises(TooIrregular):
        first_overlap(hostile, 10**12, 1, [(0, 1)])
    assert time.perf_counter() - started < 20
    with pytest.raises(TooIrregular, match="page counts"):
        first_overlap([], 10, 1, [(index * 1000, index + 1) for index in range(100)])
    monkeypatch.setattr(overlap, "WORK_LIMIT", 100)
    with pytest.raises(TooIrregular, match="pairs"):
        first_overlap([], 100, 1, [(index, 2) for index in range(50)])
