"""Exact test whether two elements of one pool share a byte.

A pool is a lattice: an element lies at its buffer's base + Σ index·stride over the modes and the page. Two elements
share a byte exactly when some difference of index vectors moves one of them less than an item away from the other.
Walking the strides from the largest down, only remainders that the smaller strides can still bring back to zero are
kept, so nested layouts need one or two of them however many pages there are, and odd strides are decided as exactly.
Offsets here are differences, never addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import numpy.typing as npt

WORK_LIMIT = 1 << 19
"""Most remainders or buffer pairs looked at before a layout is refused as too irregular to check."""
PAGE_COUNT_LIMIT = 64
"""Most different page counts among the buffers of one pool."""

# int64, or object (Python integers) where a difference could leave its range
_Ints = npt.NDArray[Any]


class TooIrregular(Exception):
    """The layout can't be checked within the work limit."""


@dataclass(frozen=True)
class _Step:
    """One lattice direction: index differences low … high, each `stride` bytes."""

    low: int
    high: int
    stride: int


def first_overlap(
    modes: Sequence[tuple[int, int]], page_bytes: int, item_bytes: int, buffers: Sequence[tuple[int, int]]
) -> Union[tuple[int, int], None]:
    """Indices of two buffers (or twice the same one) that hold elements sharing a byte, or None.

    `modes` are (extent, stride in bytes), `buffers` are (distance of page 0 from any common point, pages). Raises
    TooIrregular.
    """
    if any(extent == 0 for extent, _ in modes):
        return None
    inner = [(extent, stride) for extent, stride in modes if extent > 1]
    most_pages = max((pages for _, pages in buffers), default=0)
    if _meets_itself([*inner, (most_pages, page_bytes)], item_bytes):
        for index, (_, pages) in enumerate(buffers):
            if _meets_itself([*inner, (pages, page_bytes)], item_bytes):
                return index, index
    return _two_buffers(inner, page_bytes, item_bytes, buffers)


def _meets_itself(lattice: Sequence[tuple[int, int]], item_bytes: int) -> bool:
    """Whether a non-zero difference vector is shorter than an item; its first index may be taken as positive."""
    ordered = sorted(((extent, stride) for extent, stride in lattice if extent > 1), key=lambda mode: -mode[1])
    steps = [_Step(1 - extent, extent - 1, stride) for extent, stride in ordered]
    for place, step in enumerate(steps):
        if _reaches([0], [_Step(1, step.high, step.stride), *steps[place + 1 :]], item_bytes):
            return True
    return False


def _two_buffers(
    inner: Sequence[tuple[int, int]], page_bytes: int, item_bytes: int, buffers: Sequence[tuple[int, int]]
) -> Union[tuple[int, int], None]:
    pairs = _near_pairs(sum((extent - 1) * stride for extent, stride in inner) + item_bytes, page_bytes, buffers)
    fixed = [_Step(1 - extent, extent - 1, stride) for extent, stride in inner]
    for (pages, other_pages), distances in pairs.items():
        page = _Step(1 - other_pages, pages - 1, page_bytes)
        steps = sorted([*fixed, page], key=lambda step: -step.stride)
        starts = list(distances)
        if _reaches(starts, steps, item_bytes):
            while len(starts) > 1:  # bisect for one distance that meets, to name its buffers
                half = starts[: len(starts) // 2]
                starts = half if _reaches(half, steps, item_bytes) else starts[len(half) :]
            return distances[starts[0]]
    return None


def _near_pairs(
    page_span: int, page_bytes: int, buffers: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], dict[int, tuple[int, int]]]:
    """Pairs of buffers whose spans overlap: (pages, other pages) → {distance: (index, other index)}."""
    if len({pages for _, pages in buffers}) > PAGE_COUNT_LIMIT:
        raise TooIrregular(f"more than {PAGE_COUNT_LIMIT} different page counts in one pool")
    order = sorted(range(len(buffers)), key=lambda index: buffers[index][0])
    found: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
    looked_at = 0
    for place, lower in enumerate(order):
        base, pages = buffers[lower]
        end = base + (pages - 1) * page_bytes + page_span
        for upper in order[place + 1 :]:
            other_base, other_pages = buffers[upper]
            if other_base >= end:
                break
            looked_at += 1
            if looked_at > WORK_LIMIT:
                raise TooIrregular(f"more than {WORK_LIMIT} pairs of buffers lie within each other")
            found.setdefault((other_pages, pages), {}).setdefault(other_base - base, (lower, upper))
    return found


def _reaches(starts: Sequence[int], steps: Sequence[_Step], item_bytes: int) -> bool:
    """Whether some start + Σ x·stride, x within each step's bounds, is shorter than an item either way.

    Steps come in order of falling stride. Raises TooIrregular.
    """
    reach = sum(max(-step.low, step.high) * step.stride for step in steps) + item_bytes
    wide = reach + max(map(abs, starts)) >= 1 << 61
    remainders: _Ints = np.array(starts, dtype=object if wide else np.int64)
    rest = reach - 1
    for step in steps:
        rest -= max(-step.low, step.high) * step.stride
        remainders = _advance(remainders, step, rest)
        if remainders.size == 0:
            return False
    return True


def _advance(remainders: _Ints, step: _Step, rest: int) -> _Ints:
    """All distinct remainders + x·stride, x in low … high, that lie in -rest … rest."""
    low = np.maximum(-((rest + remainders) // step.stride), step.low)
    high = np.minimum((rest - remainders) // step.stride, step.high)
    counts = np.clip(high - low + 1, 0, WORK_LIMIT + 1).astype(np.int64)
    total = int(counts.sum())
    if total > WORK_LIMIT:
        raise TooIrregular("its strides fold over each other too often")
    first = np.cumsum(counts) - counts
    nth = np.arange(total) - np.repeat(first, counts)
    return np.unique(np.repeat(remainders + low * step.stride, counts) + nth.astype(remainders.dtype) * step.stride)
