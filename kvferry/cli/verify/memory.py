"""Memory that stands in for a worker's regions, as large as the document says and as costly as what is touched of it.

Each region is an anonymous file, so the system knows which of its pages were ever written: those are looked through
for bytes that nobody wanted.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvferry.cli.verify.cells import Ints, Values
from kvferry.layout.address import Address
from kvferry.layout.document import Region, Worker
from kvferry.transport.copies import Bytes
from kvferry.transport.memory import HostMemory, MappedRegion


@dataclass(frozen=True)
class _Block:
    """Regions that overlap share one file."""

    base: Address
    nbytes: int
    fd: int
    view: Bytes


class SparseMemory:
    """All zero at first. `host` is what an endpoint gets; offsets are bytes from the start of a region."""

    def __init__(self, worker: Worker) -> None:
        self._regions = worker.regions
        self._blocks = [_block(base, nbytes) for base, nbytes in _spans(worker.regions)]
        self.host = HostMemory([MappedRegion(block.base, block.nbytes, block.view) for block in self._blocks])

    def read(self, region: int, offsets: Ints, item_bytes: int) -> Values:
        """[*offsets, byte of the item]"""
        items, at = self._items(region, offsets, item_bytes)
        found: Values = items[at]
        return found

    def write(self, region: int, offsets: Ints, values: Values | int, item_bytes: int) -> None:
        items, at = self._items(region, offsets, item_bytes)
        items[at] = values

    def stray(self) -> Iterator[tuple[int, int]]:
        """(region, offset) of each byte that is not zero."""
        for block in self._blocks:
            for start, stop in _written(block):
                for offset in np.flatnonzero(block.view[start:stop]).tolist():
                    yield self._region_at(block, start + offset)

    def clear(self) -> None:
        for block in self._blocks:
            for start, stop in _written(block):
                block.view[start:stop] = 0

    def close(self) -> None:
        for block in self._blocks:
            os.close(block.fd)

    def _items(self, region: int, offsets: Ints, item_bytes: int) -> tuple[Values, Ints]:
        """The block's bytes as [item, byte], and the items at `offsets`; an item for each byte where they straddle."""
        base = self._regions[region].base
        block = next(one for one in self._blocks if _inside(base, one.base, one.nbytes))
        at = offsets + base.distance_from(block.base)
        if (at % item_bytes).any():
            return as_strided(block.view, (block.nbytes - item_bytes + 1, item_bytes), (1, 1)), at
        return block.view[: block.nbytes // item_bytes * item_bytes].reshape(-1, item_bytes), at // item_bytes

    def _region_at(self, block: _Block, offset: int) -> tuple[int, int]:
        address = block.base.plus(offset)
        for number, region in enumerate(self._regions):
            if region.bytes and _inside(address, region.base, region.bytes):
                return number, address.distance_from(region.base)
        raise AssertionError("every byte of a block is in a region")


def _inside(address: Address, base: Address, nbytes: int) -> bool:
    return address.value >= base.value and address.distance_from(base) < nbytes


def _spans(regions: tuple[Region, ...]) -> list[tuple[Address, int]]:
    """(base, bytes) of what the regions cover together, those that overlap joined."""
    spans: list[tuple[Address, int]] = []
    for region in sorted((one for one in regions if one.bytes), key=lambda one: one.base.value):
        if spans and (distance := region.base.distance_from(spans[-1][0])) < spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], distance + region.bytes)
        else:
            spans.append((region.base, region.bytes))
    return spans


def _block(base: Address, nbytes: int) -> _Block:
    fd = os.memfd_create("kvferry-verify", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return _Block(base, nbytes, fd, np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), np.uint8))


def _written(block: _Block) -> Iterator[tuple[int, int]]:
    """[start, stop) of what was ever written."""
    stop = 0
    while stop < block.nbytes:
        try:
            start = os.lseek(block.fd, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing any more
                return
            raise
        stop = min(os.lseek(block.fd, start, os.SEEK_HOLE), block.nbytes)
        yield start, stop
