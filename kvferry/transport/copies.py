"""The gather and scatter kernel: many short runs between two buffers of this process, without a Python loop per run.

A run is one item of a void dtype as long as the run. The items of a window view start at every byte, so any offset and
any length can be indexed, aligned or not, and NumPy's indexing moves them one memcpy each. Offsets here are offsets in
buffers, already checked; nothing here is an address.
"""

from __future__ import annotations

import itertools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layout.address import U64

Bytes: TypeAlias = npt.NDArray[np.uint8]
Index: TypeAlias = npt.NDArray[np.intp]

BLOCK_BYTES = 1 << 20
"""Moved per indexing operation: its temporary copy stays in the cache."""
BLOCK_RUNS = 1 << 14
LONG_RUN_BYTES = 1 << 16
"""From here on a plain copy per run costs nothing beside the bytes it moves."""


def copy_runs(target: Bytes, target_offsets: U64, source: Bytes, source_offsets: U64, lengths: U64) -> None:
    """Copy `lengths[i]` bytes from `source[source_offsets[i]:]` to `target[target_offsets[i]:]`, for every i.

    The caller has checked that all runs are inside both buffers; target runs must not overlap.
    """
    if not len(lengths):
        return
    to, out_of = target_offsets.astype(np.intp), source_offsets.astype(np.intp)
    if (lengths == lengths[0]).all():
        _copy_equal(target, to, source, out_of, int(lengths[0]))
        return
    order = np.argsort(lengths, kind="stable")
    ascending = lengths[order]
    edges = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
    for start, stop in itertools.pairwise([0, *edges.tolist(), len(order)]):
        rows = order[start:stop]
        _copy_equal(target, to[rows], source, out_of[rows], int(ascending[start]))


def _copy_equal(target: Bytes, to: Index, source: Bytes, out_of: Index, nbytes: int) -> None:
    if nbytes == 0:
        return
    if nbytes >= LONG_RUN_BYTES:
        for at, start in zip(to.tolist(), out_of.tolist()):
            target[at : at + nbytes] = source[start : start + nbytes]
        return
    if _adjacent(to, nbytes) and (out_of % nbytes == out_of[0] % nbytes).all():
        return _take(target, to, source, out_of, nbytes)
    step = max(1, min(BLOCK_RUNS, BLOCK_BYTES // nbytes))
    for first in range(0, len(to), step):
        block = slice(first, first + step)
        target_items, target_index = _items(target, to[block], nbytes)
        source_items, source_index = _items(source, out_of[block], nbytes)
        target_items[target_index] = source_items[source_index]


def _take(target: Bytes, to: Index, source: Bytes, out_of: Index, nbytes: int) -> None:
    """The common gather: into one piece of memory, from whole items of the source. `np.take` then needs no copy in
    between, which the indexing of windows does.
    """
    void = np.dtype((np.void, nbytes))
    shift = int(out_of[0]) % nbytes
    items = source[shift : shift + (source.size - shift) // nbytes * nbytes].view(void)
    first = int(to[0])
    out = target[first : first + len(to) * nbytes].view(void)
    np.take(items, (out_of - shift) // nbytes, out=out, mode="clip")  # "raise" would copy; offsets were checked


def _adjacent(offsets: Index, nbytes: int) -> bool:
    """Whether the runs lie one after another."""
    return int(offsets[-1]) == int(offsets[0]) + (len(offsets) - 1) * nbytes and bool(
        (np.diff(offsets) == nbytes).all()
    )


def _items(buffer: Bytes, offsets: Index, nbytes: int) -> tuple[npt.NDArray[np.void], Index | slice]:
    """The runs as items of a view, and the index that selects them: all of it where they lie one after another."""
    void = np.dtype((np.void, nbytes))
    first, count = int(offsets[0]), len(offsets)
    if _adjacent(offsets, nbytes):
        return buffer[first : first + count * nbytes].view(void), slice(None)
    windows: npt.NDArray[np.void] = np.ndarray((buffer.size - nbytes + 1,), void, buffer, 0, (1,))
    return windows, offsets
