"""The layout probe: what an engine really writes must lie where its layout says, or the worker does not start.

A wrong layout would not show in a transfer, where both sides only follow layouts: bytes and digests would agree and the
model would read garbage. So an engine writes `tags` with its own cache update, and `check_written` reads raw memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import EngineError
from kvferry.layout.address import Address
from kvferry.layout.document import TOKEN, Buffer, Group, Pool, Worker
from kvferry.layout.request import Side
from kvferry.plan.dense import Chunk, DenseCopies, chunk_bytes, dense_copies
from kvferry.plan.route import Box
from kvferry.transport.copies import Bytes

Tags = npt.NDArray[np.unsignedinteger[Any]]
_NORMAL = {1: (0x08, 0x7C), 2: (0x0400, 0x7C00), 4: (0x0080_0000, 0x7F80_0000)}
"""Bit patterns [low, high) are positive normal numbers in every float format of that width (float8 e4m3fn and e5m2,
float16 and bfloat16): no operation on the way flushes them to zero or changes a NaN."""
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Readable(Protocol):
    """Memory that a probe can look into."""

    def gather(self, copies: DenseCopies, out: Bytes) -> None: ...

    def view(self, base: Address, nbytes: int) -> Bytes: ...


def tags(shape: tuple[int, ...], item_bytes: int, seed: int) -> Tags:
    """Bit patterns of `item_bytes` (1, 2 or 4), normal numbers as floats, in random order, repeated only where the
    width has no more of them.
    """
    count = int(np.prod(shape))
    low, high = _NORMAL[item_bytes]
    draw = np.random.default_rng(seed)
    start = int(draw.integers(0, max(1, high - low - count)))
    values = low + (start + draw.permutation(count)) % (high - low)
    return values.astype(_UINT[item_bytes]).reshape(shape)


def check_written(
    worker: Worker,
    group: Group,
    memory: Readable,
    side: Side,
    tokens: tuple[int, int],
    written: Mapping[tuple[int, str], Tags],
) -> None:
    """Compare memory with what the engine was asked to write for tokens [start, stop) in the pages of `side`.

    `written[layer, part]`: [tokens, *axes of the group that the worker owns], of the group's item size, in the order of
    the group's axes. EngineError names the first layer, part and index that differ, with the strides of the layout and
    those found in memory.
    """
    for (layer, part), values in written.items():
        pool, buffer = _holder(worker, group, layer, part)
        axes = {axis: pool.segments(axis, extent) for axis, extent in group.axes.items()}
        sizes = tuple(sum(stop - start for start, stop in segments) for segments in axes.values())
        if values.shape != (tokens[1] - tokens[0], *sizes):
            raise EngineError(
                f"layout probe: group {group.name}, layer {layer}, part {part}: the layout holds "
                f"{dict(zip(axes, sizes))} of {tokens[1] - tokens[0]} tokens, the engine writes shape {values.shape}"
            )
        chunk = Chunk(Box(group.name, (layer,), (part,), axes), tokens)
        found = np.zeros(chunk_bytes(group, chunk), np.uint8)
        memory.gather(dense_copies(worker, group, chunk, side), found)
        wrong = np.flatnonzero(found.view(values.dtype) != values.ravel())
        if len(wrong):
            index = np.unravel_index(wrong[0], values.shape)
            where = ", ".join(f"{axis} {at}" for axis, at in zip((TOKEN, *axes), index))
            raise EngineError(
                f"layout probe: group {group.name}, layer {layer}, part {part}: what the engine writes is not where "
                f"its layout says, first at {where}.\n  {_strides(worker, memory, pool, buffer, values)}\n"
                "  The layout reader does not know this engine version, backend or cache format: nothing was started."
            )


def _holder(worker: Worker, group: Group, layer: int, part: str) -> tuple[Pool, Buffer]:
    for pool in worker.pools:
        for buffer in pool.buffers:
            if (pool.group, buffer.layer, buffer.part) == (group.name, layer, part):
                return pool, buffer
    raise EngineError(
        f"layout probe: group {group.name}, layer {layer}, part {part}: worker {worker.rank} holds no such cells"
    )


def _strides(worker: Worker, memory: Readable, pool: Pool, buffer: Buffer, values: Tags) -> str:
    """Layout and memory one above the other: the strides the layout states, and where the tags really are."""
    region = worker.regions[buffer.region]
    modes = ", ".join(f"{mode.axis} × {mode.extent}: {mode.stride_bytes:+d}" for mode in pool.modes)
    data = memory.view(region.base, region.bytes)
    found = _found(data[: len(data) // values.itemsize * values.itemsize].view(values.dtype), values)
    return (
        f"layout: page 0 at byte {buffer.offset_bytes} of the region, pages {pool.page_bytes} bytes apart; {modes}\n"
        f"  memory: {found}"
    )


def _found(data: Tags, values: Tags) -> str:
    """Byte offset of the first tag in the region, and from it to its neighbour along each axis."""
    first = (0,) * values.ndim
    start = _place(data, values[first])
    if start is None:
        return "the first value is not exactly once in this region"
    steps = []
    for axis in range(values.ndim):
        if values.shape[axis] > 1:
            index = tuple(int(i == axis) for i in range(values.ndim))
            spot = _place(data, values[index])
            steps.append(f"{list(index)} at {'no single place' if spot is None else f'{spot - start:+d}'}")
    return f"value {list(first)} at byte {start}; from there " + ", ".join(steps)


def _place(data: Tags, value: Any) -> int | None:
    at = np.flatnonzero(data == value)
    return int(at[0]) * data.itemsize if len(at) == 1 else None
